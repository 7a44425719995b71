"""Moreau's midpoint rule: impacts and contact on velocity level.

Sources: Moreau, "Unilateral contact and dry friction in finite freedom dynamics", 1988; section 1 of Schoeder, Ulbrich,
Schindler, doi 10.1007/s11044-013-9370-y, who measure the drift of the gaps that it allows.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxsim.contact.complementarity import contact_rows, natural_residual, solve_rows
from jaxsim.schemes.state import Candidates, State, StepInfo, candidates
from jaxsim.solve import solve, solve_spd
from jaxsim.system import (
    constraint_jacobian,
    constraint_rate,
    gap_jacobian,
    gap_rate,
    has_friction,
    restitution,
    slip_jacobian,
)


@dataclass(frozen=True)
class Moreau:
    """Moreau's midpoint rule.

        q_M = q_n + dt/2 v_n
        v+  = v_n + M_M^-1 (h(q_M, v_n) dt + W_M^T L),   0 <= gdot+ + eps gdot_n _|_ L >= 0 where g(q_M) <= 0
        q+  = q_M + dt/2 v+

    One evaluation of M, h, W per step and an exact solution of the small complementarity problem. First order;
    closed contacts drift by Wdot v dt (1 - eps) / (2 (1 + eps)) per unit of time, since only velocities are constrained.
    Coulomb friction: L_T = prox_[-mu L, mu L](L_T - r slip+).
    """

    def step(self, system: Any, state: State, t: Any, dt: Any) -> tuple[State, StepInfo]:
        """One step from t to t + dt."""
        q, v = state
        q_mid = q + dt / 2 * v
        gap = system.gap(t + dt / 2, q_mid)
        impact = velocity_step(system, t + dt / 2, q_mid, v, dt, gap)
        return State(q_mid + dt / 2 * impact.v, impact.v), impact.info


class VelocityStep(NamedTuple):
    """Result of `velocity_step`, with what a position projection after it needs."""

    v: Float[Array, " n"]
    info: StepInfo
    mass: Float[Array, "n n"]
    directions: Float[Array, "contacts n"]  # W of all contacts


def velocity_step(
    system: Any, t: Any, q: Float[Array, " n"], v: Float[Array, " n"], dt: Any, gap: Float[Array, " contacts"]
) -> VelocityStep:
    """v+ = v + M^-1 (h dt + W^T L) with M, h, W at (t, q) and the impact law on the contacts with gap <= 0."""
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
    b = directions @ free + _offsets(system, t, q, v, contacts, friction is not None)

    # Bilateral rows first: what they take is linear in the contacts' impulses.
    u = unilateral
    joint = solve(D[u:, u:], jnp.concatenate([b[u:, None], D[u:, :u]], axis=1))
    reduced_D = D[:u, :u] - D[:u, u:] @ joint[:, 1:]
    reduced_b = b[:u] - D[:u, u:] @ joint[:, 0]
    law = contact_rows(reduced_D, reduced_b, active, friction)
    impulse = solve_rows(reduced_D, reduced_b, law)
    joint_impulse = -(joint[:, 0] + joint[:, 1:] @ impulse)

    v_new = free + responses @ jnp.concatenate([impulse, joint_impulse])
    k = active.size
    residual = natural_residual(reduced_D, reduced_D @ impulse + reduced_b, impulse, active, friction)
    speed = jnp.max(jnp.abs(reduced_b), initial=0.0)
    info = StepInfo(
        impulse=contacts.spread(impulse[:k]),
        friction_impulse=contacts.spread(impulse[k:]) if friction is not None else jnp.zeros(0, gap.dtype),
        joint_impulse=joint_impulse,
        active=contacts.spread(active),
        iterations=jnp.asarray(0),
        residual=residual,
        converged=(residual <= 1e-8 * (1 + speed)) & jnp.all(jnp.isfinite(v_new)) & _one_per_group(gap, contacts),
    )
    return VelocityStep(v_new, info, mass, W)


def _offsets(system: Any, t: Any, q: Array, v: Array, contacts: Candidates, friction: bool) -> Array:
    # What the rows read beside directions @ v+: moving walls and the restitution of the velocity before.
    rest = jnp.zeros_like(v)
    wall = gap_rate(system, t, q, rest)
    eps = restitution(system, wall.size)
    parts = [contacts.pick(wall + eps * gap_rate(system, t, q, v))]
    if friction:
        parts.append(contacts.pick(system.slip(t, q, rest)))
    return jnp.concatenate([*parts, constraint_rate(system, t, q, rest)])


def _one_per_group(gap: Array, contacts: Candidates) -> Bool[Array, ""]:
    # `opposing` promises that no two contacts of a group close together; a step in which they do is flagged.
    return jnp.sum(gap <= 0) == jnp.sum(contacts.pick(gap) <= 0)
