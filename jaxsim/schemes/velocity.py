"""The velocity level: forces, impacts and contact as one linear complementarity problem."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxsim.contact.complementarity import contact_rows, eliminate_joints, natural_residual, solve_rows
from jaxsim.schemes.state import Candidates, StepInfo, candidates
from jaxsim.solve import by_precision, solve_spd
from jaxsim.system import (
    constraint_jacobian,
    constraint_rate,
    gap_jacobian,
    gap_rate,
    has_friction,
    restitution,
    slip_jacobian,
)


class VelocityStep(NamedTuple):
    """Result of `velocity_step`, with what a position projection after it needs."""

    v: Float[Array, " n"]
    info: StepInfo
    mass: Float[Array, "n n"]
    directions: Float[Array, "contacts n"]  # W of all contacts


def velocity_step(
    system: Any,
    t: Any,
    q: Float[Array, " n"],
    v: Float[Array, " n"],
    dt: Any,
    gap: Float[Array, " contacts"],
    eps: Float[Array, " contacts"] | None = None,
) -> VelocityStep:
    """v+ = v + M^-1 (h dt + W^T L) with M, h, W at (t, q) and the impact law on the contacts with gap <= 0.

    With dt = 0 it is the impact itself. `eps`, by default the system's own, is the restitution.
    """
    eps = restitution(system, gap.size) if eps is None else eps
    contacts = candidates(system, gap)
    active = contacts.pick(gap) <= 0
    W = gap_jacobian(system, t, q)
    mass = system.mass_matrix(q)
    friction = contacts.pick(jnp.broadcast_to(system.friction, gap.shape)) if has_friction(system) else None
    rows = [contacts.pick(W)]
    if friction is not None:
        rows.append(contacts.pick(slip_jacobian(system, t, q)))
    unilateral = sum(row.shape[0] for row in rows)
    directions = jnp.concatenate([*rows, constraint_jacobian(system, t, q)])

    responses = solve_spd(mass, jnp.concatenate([(system.force(t, q, v) * dt)[:, None], directions.T], axis=1))
    free, responses = v + responses[:, 0], responses[:, 1:]
    D = directions @ responses
    b = directions @ free + _offsets(system, t, q, v, eps, contacts, friction is not None)

    reduced_D, reduced_b, joint = eliminate_joints(D, b, unilateral)
    law = contact_rows(reduced_D, reduced_b, active, friction)
    impulse = solve_rows(reduced_D, reduced_b, law)
    joint_impulse = -(joint[:, 0] + joint[:, 1:] @ impulse)

    v_new = free + responses @ jnp.concatenate([impulse, joint_impulse])
    k = active.size
    residual = natural_residual(reduced_D, reduced_D @ impulse + reduced_b, impulse, active, friction)
    speed = jnp.max(jnp.abs(reduced_b), initial=0.0)
    info = StepInfo(
        impulse=contacts.spread(impulse[:k]),
        friction_impulse=contacts.spread(impulse[k:]) if friction is not None else jnp.zeros(0, q.dtype),
        joint_impulse=joint_impulse,
        active=contacts.spread(active),
        iterations=jnp.asarray(0),
        residual=residual,
        converged=(residual <= by_precision(q.dtype, 1e-8, 1e-5) * (1 + speed))
        & jnp.all(jnp.isfinite(v_new))
        & _one_per_group(gap, contacts),
    )
    return VelocityStep(v_new, info, mass, W)


def _offsets(system: Any, t: Any, q: Array, v: Array, eps: Array, contacts: Candidates, friction: bool) -> Array:
    # What the rows read beside directions @ v+: moving walls and the restitution of the velocity before.
    rest = jnp.zeros_like(v)
    wall = gap_rate(system, t, q, rest)
    parts = [contacts.pick(wall + eps * gap_rate(system, t, q, v))]
    if friction:
        parts.append(contacts.pick(system.slip(t, q, rest)))
    return jnp.concatenate([*parts, constraint_rate(system, t, q, rest)])


def _one_per_group(gap: Array, contacts: Candidates) -> Bool[Array, ""]:
    # `opposing` promises that no two contacts of a group close together; a step in which they do is flagged.
    return jnp.sum(gap <= 0) == jnp.sum(contacts.pick(gap) <= 0)
