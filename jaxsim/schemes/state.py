"""What every scheme reads and returns, and the contacts among which a step has to decide."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


class State(NamedTuple):
    """What the next step needs."""

    q: Float[Array, " n"]  # generalized coordinates
    v: Float[Array, " n"]  # generalized velocities


class StepInfo(NamedTuple):
    """What one wants to look at after a step."""

    impulse: Float[Array, " contacts"]  # normal impulses [N s]
    friction_impulse: Float[Array, " rubbing"]  # tangential impulses [N s]; none without friction
    joint_impulse: Float[Array, " joints"]  # multipliers of the bilateral constraints
    active: Bool[Array, " contacts"]  # contacts that the step treated as closed
    iterations: Int[Array, ""]  # Newton iterations
    residual: Float[Array, ""]  # as a velocity: of the contact law (Moreau), or the last Newton correction
    converged: Bool[Array, ""]


class ImpactLog(NamedTuple):
    """Impacts in the order in which they happen; entries that are not used have time inf and zeros."""

    time: Float[Array, "*batch size"]  # [s]
    contacts: Bool[Array, "*batch size contacts"]  # which contacts hit
    rate_before: Float[Array, "*batch size contacts"]  # gap rates just before [m/s]
    impulse: Float[Array, "*batch size contacts"]  # normal [N s]; resting contacts that share the shock have one too
    count: Int[Array, "*batch"]  # of all impacts, more than `size` if there was no room for the last

    @classmethod
    def empty(cls, size: int, gap: Float[Array, " contacts"]) -> "ImpactLog":
        """Room for `size` impacts."""
        none = jnp.zeros((size, gap.size), gap.dtype)
        return cls(jnp.full(size, jnp.inf, gap.dtype), none > 0, none, none, jnp.asarray(0))

    def add(self, time: Array, contacts: Array, rate_before: Array, impulse: Array) -> "ImpactLog":
        """The log with one more impact."""
        here = jnp.arange(self.time.size) == self.count

        def store(
            column, value
        ):  # a mask: with scatters, or with slices under vmap, XLA does not compile the time loop whole
            return jnp.where(here.reshape(-1, *(1,) * value.ndim), value, column)

        entry = (time, contacts, rate_before, impulse)
        time, contacts, rate_before, impulse = (store(*pair) for pair in zip(self[:4], entry, strict=True))
        return ImpactLog(time, contacts, rate_before, impulse, self.count + 1)


class Candidates(NamedTuple):
    """The contacts among which a step decides: of every opposing group the one with the smallest gap."""

    pick: Callable[[Array], Array]  # (contacts, ...) -> (candidates, ...)
    spread: Callable[[Array], Array]  # (candidates,) -> (contacts,), zero (False) elsewhere


def candidates(system: Any, gap: Float[Array, " contacts"]) -> Candidates:
    """Reduce the contacts to one candidate per group of `system.opposing`; contacts in no group stand for themselves."""
    contacts = gap.size
    groups = [tuple(group) for group in system.opposing]
    if not groups:
        return Candidates(lambda values: values, lambda values: values)
    grouped = {index for group in groups for index in group}
    groups += [(index,) for index in range(contacts) if index not in grouped]
    width = max(map(len, groups))
    table = np.array([group + (group[0],) * (width - len(group)) for group in groups])
    options = gap[table]
    choice = jnp.zeros(len(groups), int)
    smallest = options[:, 0]
    for column in range(1, width):
        closer = options[:, column] < smallest
        choice = jnp.where(closer, column, choice)
        smallest = jnp.where(closer, options[:, column], smallest)

    def pick(values: Array) -> Array:
        picked = values[table[:, 0]]
        for column in range(1, width):
            chosen = (choice == column).reshape((-1,) + (1,) * (values.ndim - 1))
            picked = jnp.where(chosen, values[table[:, column]], picked)
        return picked

    def spread(values: Array) -> Array:
        parts = [jnp.zeros(())] * contacts
        for row, group in enumerate(groups):
            for column, contact in enumerate(group):
                parts[contact] = jnp.where(choice[row] == column, values[row], jnp.zeros_like(values[row]))
        return jnp.stack(parts)

    return Candidates(pick, spread)


def check_option(name: str, value: Any, options: tuple[Any, ...]) -> None:
    """Raise ValueError unless the value is one of the options."""
    if value not in options:
        raise ValueError(f"{name} = {value!r} is not one of {options}")
