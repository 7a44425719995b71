"""What a mechanism is, and the quantities that follow from it by differentiation.

A mechanism is a frozen dataclass whose fields are its parameters. `mechanism` registers it as a pytree, so that
`dataclasses.replace`, `jax.vmap` and `jax.jacfwd` work on the parameters directly, and fills in what it does not say.

    symbol       in code                      shape        unit
    M(q)         system.mass_matrix(q)        (n, n)       kg, kg m^2
    h(t, q, v)   system.force(t, q, v)        (n,)         N, N m
    g(t, q)      system.gap(t, q)             (contacts,)  m, rad    >= 0, 0 where closed
    c(t, q)      system.constraint(t, q)      (joints,)    m, rad    = 0, bilateral
    s(t, q, v)   system.slip(t, q, v)         (contacts,)  m/s       tangential velocity, with friction
    V(t, q)      system.potential_energy(t, q) ()          J
    T(q, v)      system.kinetic_energy(q, v)  ()           J
    eps          system.restitution           () or (contacts,)
    mu           system.friction              () or (contacts,)
"""

import dataclasses
from collections.abc import Callable
from typing import Any, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Parameter = Any  # the type of a field: a number or an array, and under JAX's transformations also what stands for one


@dataclass_transform(frozen_default=True)
def mechanism(cls: type) -> Any:
    """Class decorator: make `cls` a mechanism that every scheme can simulate.

    The class lists its parameters as annotated fields and gives either

    * `kinetic_energy(q, v)` and `potential_energy(t, q)`, from which Lagrange's equations follow by differentiation:
      M = d2T/dv2 and h = Q + dT/dq - dV/dq - (d2T/dv dq) v, with Q = `applied_force(t, q, v)` where it is defined, or
    * `mass_matrix(q)` and `force(t, q, v)` themselves (and `potential_energy`, if energies are wanted with it).

    Optional: `gap(t, q)` with a field `restitution` (unilateral contacts), `constraint(t, q)` (joints),
    `slip(t, q, v)` with a field `friction` (Coulomb), `points(q)` for drawing. `opposing`, a class attribute, lists
    groups of contacts of which at most one can be closed at a time, such as the two walls of a guide: the schemes
    then solve a smaller problem, and flag the step should two contacts of a group ever close together.

    A field may be a number, or an array where the mechanism reads it as one; lists and tuples become arrays. Everything
    that may change must be a field: a global that a method reads is compiled in. A field that is no parameter but part of
    the structure (an integer that counts, say) is declared with `dataclasses.field(metadata={"static": True})`.

    Raises:
        TypeError: where the class gives neither energies nor M and h, a gap without restitution or friction without slip.

    >>> import jaxsim, jax.numpy as jnp
    >>> @jaxsim.mechanism
    ... class Ball:
    ...     mass: float = 1.0
    ...     restitution: float = 0.5
    ...     def kinetic_energy(self, q, v): return 0.5 * self.mass * v @ v
    ...     def potential_energy(self, t, q): return 9.81 * self.mass * q[0]
    ...     def gap(self, t, q): return q
    >>> float(Ball(mass=2.0).force(0.0, jnp.zeros(1), jnp.zeros(1))[0])
    -19.62
    """
    given = _check_definition(cls)
    if not hasattr(cls, "__post_init__"):
        cls.__post_init__ = _lists_to_arrays  # type: ignore[attr-defined]
    cls = dataclasses.dataclass(frozen=True)(cls)
    defaults: dict[str, Callable[..., Any]] = {
        "potential_energy": _no_potential_energy,
        "gap": _no_rows,
        "constraint": _no_rows,
    }
    if "mass_matrix" in given:
        defaults["kinetic_energy"] = _kinetic_energy_from_mass
    else:
        defaults |= {"mass_matrix": _mass_from_energy, "force": _force_from_energy}
    for name, function in defaults.items():
        if not hasattr(cls, name):
            setattr(cls, name, function)
    if not hasattr(cls, "opposing"):
        cls.opposing = ()  # type: ignore[attr-defined]
    return jax.tree_util.register_dataclass(cls)


def _check_definition(cls: type) -> set[str]:
    """The names that the class itself or a parent gives, without what `mechanism` filled in; they must fit together."""
    fields = {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})}
    given = fields | {name for name in dir(cls) if getattr(cls, name) not in _FILLED_IN}
    name = cls.__name__
    if "mass_matrix" in given and "force" not in given:
        raise TypeError(f"mechanism {name} gives mass_matrix(q) but no force(t, q, v)")
    if "force" in given and "mass_matrix" not in given:
        raise TypeError(f"mechanism {name} gives force(t, q, v), the whole h, but no mass_matrix(q); forces beside those "
                        "that follow from the energies are applied_force(t, q, v)")  # fmt: skip
    if "mass_matrix" in given and ("kinetic_energy" in given or "applied_force" in given):
        raise TypeError(f"mechanism {name} gives both mass_matrix(q) and force(t, q, v), and kinetic_energy(q, v) or "
                        "applied_force(t, q, v); give one pair or the other")  # fmt: skip
    if not {"mass_matrix", "kinetic_energy"} & given:
        raise TypeError(f"mechanism {name} gives neither kinetic_energy(q, v) nor mass_matrix(q) and force(t, q, v)")
    for method, field in (("gap", "restitution"), ("slip", "friction")):
        if method in given and field not in given:
            raise TypeError(f"mechanism {name} gives {method} but no field {field!r}")
    if "friction" in given and "slip" not in given:
        raise TypeError(f"mechanism {name} has friction but no slip(t, q, v), the tangential velocities")
    return given


def _lists_to_arrays(self: Any) -> None:
    for field in dataclasses.fields(self):
        value = getattr(self, field.name)
        if isinstance(value, list | tuple) and not field.metadata.get("static", False):
            traced = any(isinstance(item, jax.Array) for item in value)
            object.__setattr__(self, field.name, jnp.array(value) if traced else np.asarray(value, dtype=float))


def _no_rows(self: Any, t: Any, q: Array) -> Array:
    return jnp.zeros((0,), q.dtype)


def _no_potential_energy(self: Any, t: Any, q: Array) -> Array:
    return jnp.zeros((), q.dtype)


def _kinetic_energy_from_mass(self: Any, q: Array, v: Array) -> Array:
    return 0.5 * v @ self.mass_matrix(q) @ v


# Forward mode throughout: the scatters that reverse mode makes of q[i] keep XLA from compiling the time loop as a whole.


def _mass_from_energy(self: Any, q: Array) -> Array:
    return jax.jacfwd(jax.jacfwd(self.kinetic_energy, argnums=1), argnums=1)(q, jnp.zeros_like(q))


def _force_from_energy(self: Any, t: Any, q: Array, v: Array) -> Array:
    momentum = jax.jacfwd(self.kinetic_energy, argnums=1)
    _, momentum_rate = jax.jvp(lambda q: momentum(q, v), (q,), (v,))
    lagrangian = jax.jacfwd(lambda q: self.kinetic_energy(q, v) - self.potential_energy(t, q))
    force = lagrangian(q) - momentum_rate
    return force + self.applied_force(t, q, v) if hasattr(self, "applied_force") else force


_FILLED_IN = (
    _no_rows,
    _no_potential_energy,
    _kinetic_energy_from_mass,
    _mass_from_energy,
    _force_from_energy,
)


def gap_jacobian(system: Any, t: Any, q: Float[Array, " n"]) -> Float[Array, "contacts n"]:
    """W = dg/dq."""
    return jax.jacfwd(system.gap, argnums=1)(t, q)


def gap_rate(system: Any, t: Any, q: Float[Array, " n"], v: Float[Array, " n"]) -> Float[Array, " contacts"]:
    """dg/dt + W v: the second term alone where the walls do not move."""
    return _rate(system.gap, t, q, v)


def constraint_jacobian(system: Any, t: Any, q: Float[Array, " n"]) -> Float[Array, "joints n"]:
    """dc/dq of the bilateral constraints."""
    return jax.jacfwd(system.constraint, argnums=1)(t, q)


def constraint_rate(system: Any, t: Any, q: Float[Array, " n"], v: Float[Array, " n"]) -> Float[Array, " joints"]:
    """dc/dt + (dc/dq) v."""
    return _rate(system.constraint, t, q, v)


def slip_jacobian(system: Any, t: Any, q: Float[Array, " n"]) -> Float[Array, "contacts n"]:
    """W_T = ds/dv, the generalized directions of the friction impulses (the slip is affine in v)."""
    return jax.jacfwd(system.slip, argnums=2)(t, q, jnp.zeros_like(q))


def energy(system: Any, t: Any, q: Float[Array, " n"], v: Float[Array, " n"]) -> Float[Array, ""]:
    """T + V [J]; V counts as zero where the mechanism gives no potential energy."""
    return system.kinetic_energy(q, v) + system.potential_energy(t, q)


def has_friction(system: Any) -> bool:
    """Whether the mechanism's contacts rub; friction = 0 as a value still counts, since it may be a batch."""
    return hasattr(system, "friction")


def restitution(system: Any, contacts: int) -> Float[Array, " contacts"]:
    """eps as one value per contact."""
    return jnp.broadcast_to(jnp.asarray(system.restitution), (contacts,)) if contacts else jnp.zeros((0,))


def _rate(function: Callable[..., Array], t: Any, q: Array, v: Array) -> Array:
    t = jnp.asarray(t, q.dtype)
    return jax.jvp(function, (t, q), (jnp.ones_like(t), v))[1]
