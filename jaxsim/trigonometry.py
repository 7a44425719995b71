"""Sine and cosine of one angle together.

XLA compiles jnp.sin and jnp.cos in float64 to one library call per element on CPU, which neither vectorizes nor is shared
between the two; in a step of a small mechanism that is most of the time. This is a branch-free replacement.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# pi/2 in three parts of which the first two have 33 bits, so that k times a part is exact for |k| < 2^20
_PI_2 = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
# minimax polynomials on [-pi/4, pi/4], with the coefficients of fdlibm's k_sin.c and k_cos.c:
# sin r = r + r z P(z), cos r = 1 - z/2 + z^2 Q(z), z = r^2
_SIN = (
    1.58969099521155010221e-10,
    -2.50507602534068634195e-08,
    2.75573137070700676789e-06,
    -1.98412698298579493134e-04,
    8.33333333332248946124e-03,
    -1.66666666666666324348e-01,
)
_COS = (
    -1.13596475577881948265e-11,
    2.08757232129817482790e-09,
    -2.75573143513906633035e-07,
    2.48015872894767294178e-05,
    -1.38888888888741095749e-03,
    4.16666666666666019037e-02,
)


@jax.custom_jvp
def sin_cos(x: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """(sin x, cos x), within 1e-15 for |x| < 8e5; beyond, as exact as x itself is known. Other dtypes than float64: jnp's.

    Reduction by multiples of pi/2 in three parts (Cody and Waite), then a polynomial on [-pi/4, pi/4].
    """
    if x.dtype != jnp.float64:
        return jnp.sin(x), jnp.cos(x)
    k = jnp.round(x * (2 / jnp.pi))
    r = ((x - k * _PI_2[0]) - k * _PI_2[1]) - k * _PI_2[2]
    z = r * r
    p, q = jnp.zeros_like(z), jnp.zeros_like(z)
    for c_sin, c_cos in zip(_SIN, _COS, strict=True):
        p, q = p * z + c_sin, q * z + c_cos
    sin, cos = r + r * z * p, 1 - 0.5 * z + z * z * q
    quadrant = k - 4 * jnp.floor(k / 4)
    odd = (quadrant == 1) | (quadrant == 3)
    sin, cos = jnp.where(odd, cos, sin), jnp.where(odd, sin, cos)
    return jnp.where(quadrant >= 2, -sin, sin), jnp.where((quadrant == 1) | (quadrant == 2), -cos, cos)


@sin_cos.defjvp
def _sin_cos_jvp(primals, tangents):
    sin, cos = sin_cos(*primals)
    return (sin, cos), (cos * tangents[0], -sin * tangents[0])
