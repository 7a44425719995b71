"""sin_cos against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxsim.trigonometry import sin_cos

EIGHTHS = np.arange(-4000, 4001) * np.pi / 8  # where the polynomials meet, and their zeros


def angles(largest):
    rng = np.random.default_rng(0)
    return np.concatenate([rng.uniform(-largest, largest, 200_000), EIGHTHS[np.abs(EIGHTHS) <= largest]])


@pytest.mark.parametrize("largest", [1e-8, 0.1, 1.0, 10.0, 1e3, 8e5])
def test_value(largest):
    x = angles(largest)
    sin, cos = jax.jit(sin_cos)(x)
    np.testing.assert_allclose(sin, np.sin(x), rtol=0, atol=4e-16)
    np.testing.assert_allclose(cos, np.cos(x), rtol=0, atol=4e-16)


def test_small_values_are_relatively_exact():
    x = np.concatenate([10.0 ** np.arange(-300, -1), angles(1e-3)])
    np.testing.assert_allclose(jax.jit(sin_cos)(x)[0], np.sin(x), rtol=4e-16)


@pytest.mark.parametrize("largest", [1e6, 1e8, 1e10, 1e12])
def test_beyond_the_exact_range(largest):
    """No worse than a change of x by a few units in its last place."""
    x = angles(largest)
    sin, cos = jax.jit(sin_cos)(x)
    bound = 4e-16 + 3 * np.spacing(np.abs(x))
    assert np.all(np.abs(sin - np.sin(x)) <= bound)
    assert np.all(np.abs(cos - np.cos(x)) <= bound)


def test_symmetry_to_the_last_bit():
    x = jnp.asarray(angles(1e3))
    compiled = jax.jit(sin_cos)
    (sin, cos), (mirrored, same) = compiled(x), compiled(-x)
    assert np.array_equal(mirrored, -sin) and np.array_equal(same, cos)
    assert [float(y) for y in compiled(jnp.zeros(()))] == [0.0, 1.0]


def test_derivatives():
    x = jnp.asarray(angles(30.0)[::100])
    check_grads(jax.jit(sin_cos), (x,), order=2, modes=("fwd", "rev"), atol=1e-6, rtol=1e-6)

    def both(x):
        return jnp.stack(sin_cos(x))

    first, second = jax.vmap(jax.jacfwd(both))(x), jax.vmap(jax.jacrev(jax.jacfwd(both)))(x)
    np.testing.assert_allclose(first, np.stack([np.cos(x), -np.sin(x)], axis=1), rtol=0, atol=4e-16)
    np.testing.assert_allclose(second, -np.stack([np.sin(x), np.cos(x)], axis=1), rtol=0, atol=4e-16)


def test_vmap_and_shapes():
    x = jnp.asarray(angles(10.0)[:24].reshape(2, 3, 4))
    whole, mapped = jax.jit(sin_cos)(x), jax.jit(jax.vmap(jax.vmap(sin_cos)))(x)
    for a, b in zip(whole, mapped, strict=True):
        assert a.shape == x.shape
        np.testing.assert_array_equal(a, b)


def test_other_dtypes():
    x = jnp.linspace(-5.0, 5.0, 101, dtype=jnp.float32)
    sin, cos = sin_cos(x)
    assert sin.dtype == cos.dtype == jnp.float32
    np.testing.assert_array_equal(sin, jnp.sin(x))
    np.testing.assert_array_equal(cos, jnp.cos(x))
    assert jax.jvp(sin_cos, (x,), (jnp.ones_like(x),))[1][0].dtype == jnp.float32


@pytest.mark.parametrize("x", [np.inf, -np.inf, np.nan])
def test_not_finite(x):
    assert np.all(np.isnan(jnp.stack(sin_cos(jnp.asarray(x)))))
    assert np.all(np.isnan(jnp.stack(sin_cos(jnp.asarray([0.0, x])))[:, 1]))
