"""Smooth motion between impacts, with closed contacts and joints held as constraints.

Which contacts are closed, and which of them stick, is the mode. While it lasts the motion is smooth: index-1 equations

    M a = h + W^T L_N + W_T^T L_T + B^T L_B,   with   gddot = 0 on held contacts,   sdot = 0 on sticking ones,
    L_T = mu direction L_N on sliding ones,   cddot = 0 on joints,   L = 0 on open contacts

integrated by the classical Runge-Kutta method of order 4. It ends where one of the `indicators` changes its sign.
Glocker, Set-Valued Force Laws (2001), chapters 4 to 6.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxsim.contact.complementarity import Rows, contact_rows, eliminate_joints, solve_rows
from jaxsim.schemes.state import Candidates, State, candidates
from jaxsim.solve import solve_spd
from jaxsim.system import (
    constraint_jacobian,
    constraint_rate,
    gap_jacobian,
    gap_rate,
    has_friction,
    slip_jacobian,
)


class Mode(NamedTuple):
    """What the contacts do between two events; of an opposing group at most one is held."""

    held: Bool[Array, " contacts"]  # closed
    sticking: Bool[Array, " contacts"]  # of the held ones
    direction: Float[Array, " contacts"]  # of the friction force on the held ones that slide, +1 or -1


class Forces(NamedTuple):
    """Multipliers [N], or over a time their impulses [N s]."""

    normal: Float[Array, " contacts"]
    friction: Float[Array, " rubbing"]
    joint: Float[Array, " joints"]


class Indicators(NamedTuple):
    """Positive while the mode lasts."""

    normal: Float[Array, " contacts"]  # gap of open contacts, force of held ones
    tangential: Float[Array, " contacts"]  # speed of sliding contacts, mu L_N - |L_T| of sticking ones, else 1


def motion(
    system: Any, t: Any, q: Float[Array, " n"], v: Float[Array, " n"], mode: Mode
) -> tuple[Float[Array, " n"], Forces]:
    """Acceleration and forces of the mode."""
    contacts = candidates(system, jnp.where(mode.held, -1.0, 1.0))
    D, b, free, response = _dynamics(system, t, q, v, contacts)
    L = solve_rows(D, b, _law(system, mode, contacts, b.size))
    return free + response @ L, _spread(system, L, contacts, mode.held.size)


def indicators(system: Any, t: Any, q: Float[Array, " n"], v: Float[Array, " n"], mode: Mode, forces: Forces) -> Indicators:
    """What tells that the mode ends, by becoming negative."""
    gap = system.gap(t, q)
    tangential = jnp.ones_like(gap)
    if has_friction(system):
        slides, sticks = -mode.direction * system.slip(t, q, v), system.friction * forces.normal - jnp.abs(forces.friction)
        tangential = jnp.where(mode.held, jnp.where(mode.sticking, sticks, slides), 1.0)
    return Indicators(jnp.where(mode.held, forces.normal, gap), tangential)


def flow(system: Any, t: Any, state: State, duration: Any, mode: Mode) -> tuple[State, Forces]:
    """The state after `duration` (of either sign) in this mode, and the impulses of its forces: one step of order 4."""
    q, v = state
    forces = jax.eval_shape(lambda: motion(system, t, q, v, mode)[1])
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, q.dtype), (q, v, forces))

    def stage(carry, coefficients):
        (dq, dv, _), sums = carry
        ahead, weight = coefficients * duration
        v_stage = v + ahead * dv
        slopes = (v_stage, *motion(system, t + ahead, q + ahead * dq, v_stage, mode))
        return (slopes, jax.tree.map(lambda total, slope: total + weight * slope, sums, slopes)), None

    # a loop over the stages, for a quarter of the code
    tableau = jnp.array([[0, 1 / 6], [1 / 2, 1 / 3], [1 / 2, 1 / 3], [1, 1 / 6]], q.dtype)
    (_, (dq, dv, impulse)), _ = jax.lax.scan(stage, (nothing, nothing), tableau)
    return State(q + dq, v + dv), impulse


class Target(NamedTuple):
    """Where a flow ends: where the sum of these indicators vanishes, or, without any, at time t."""

    which: Indicators  # weights
    t: Float[Array, ""]


def _arrive(
    indicators: Callable[..., Indicators], system: Any, t: Any, state: State, mode: Mode, tau: Any, target: Target
) -> tuple[Float[Array, ""], State, Forces]:
    """Flow to the target: tau, the state there, the impulses on the way.

    `tau` is known already, as a value; what it gets here is its derivative, implicitly from the condition

        which . indicators(system, t + tau, state there, mode) = 0   or   t + tau = target.t

    A condition that only touches zero, with slope 0, leaves tau without one.
    """
    return tau, *flow(system, t, state, tau, mode)


arrive = jax.custom_jvp(_arrive, nondiff_argnums=(0,))


@arrive.defjvp
def _arrive_jvp(indicators, primals, tangents):
    # The variation at fixed tau, and d tau times the motion at the end. That the rule calls `arrive` itself makes
    # derivatives of higher order right.
    tau, end, forces = arrive(indicators, *primals)
    system, t, state, mode, _, target = primals
    d_system, d_t, d_state, _, _, d_target = tangents
    waits = jnp.any(target.which.normal != 0) | jnp.any(target.which.tangential != 0)

    def condition(system, time, end, t_target):
        values = indicators(system, time, end, mode)
        return jnp.where(waits, sum(map(jnp.vdot, values, target.which)), time - t_target)

    def at_fixed_tau(system, t, state, t_target):
        end, forces = flow(system, t, state, tau, mode)
        return end, forces, condition(system, t + tau, end, t_target)

    given, variations = (system, t, state, target.t), (d_system, d_t, d_state, d_target.t)
    _, (d_end, d_forces, d_condition) = jax.jvp(at_fixed_tau, given, variations)
    a, force = motion(system, t + tau, *end, mode)
    move = State(end.v, a)
    _, slope = jax.jvp(lambda time, end: condition(system, time, end, target.t), (t + tau, end), (jnp.ones_like(tau), move))
    d_tau = -jnp.where(slope == 0, 0.0, 1 / jnp.where(slope == 0, 1.0, slope)) * d_condition
    d_end, d_forces = jax.tree.map(lambda d, rate: d + rate * d_tau, (d_end, d_forces), (move, force))
    return (tau, end, forces), (d_tau, d_end, d_forces)


def decide_mode(
    system: Any, t: Any, state: State, closed: Bool[Array, " contacts"], direction: Float[Array, " contacts"]
) -> Mode:
    """Which of the closed contacts stay closed, and which of these stick: complementarity of accelerations and forces.

        0 <= gddot _|_ L_N >= 0,   L_T = prox_[-mu L_N, mu L_N](L_T - r sdot) where direction = 0, else mu direction L_N

    `direction` is that of the friction force on contacts that slide already. A decision: it carries no derivative.
    """
    system, t, (q, v), direction = jax.lax.stop_gradient((system, t, state, direction))
    contacts = candidates(system, jnp.where(closed, -1.0, 1.0))
    active = contacts.pick(closed)
    k = active.size
    D, b, _, _ = _dynamics(system, t, q, v, contacts)
    D, b, _ = eliminate_joints(D, b, 2 * k if has_friction(system) else k)
    if not has_friction(system):
        held = contacts.spread(contact_rows(D, b, active).free)
        return Mode(held, jnp.zeros_like(held), jnp.zeros_like(direction))
    mu, ahead = contacts.pick(jnp.broadcast_to(system.friction, closed.shape)), contacts.pick(direction)
    slides = ahead != 0
    D = jnp.concatenate([D[:, :k] + D[:, k:] * (mu * ahead), D[:, k:]], axis=1)
    law = contact_rows(D, b, active, jnp.where(slides, 0.0, mu))
    assert law.fixed is not None
    starts = -jnp.sign(jnp.diagonal(law.fixed[k:, :k]))
    return Mode(
        contacts.spread(law.free[:k]),
        contacts.spread(law.free[:k] & law.free[k:] & ~slides),
        contacts.spread(jnp.where(slides, ahead, starts)),
    )


def project(system: Any, t: Any, state: State, mode: Mode) -> State:
    """The state on the held contacts and the joints, positions and velocities: a Newton iteration in the mass metric."""
    q, v = state
    if not mode.held.size and not system.constraint(t, q).size:
        return state
    contacts = candidates(system, jnp.where(mode.held, -1.0, 1.0))
    R = _directions(system, t, q, contacts)
    response = solve_spd(system.mass_matrix(q), R.T)
    gap, rate = contacts.pick(system.gap(t, q)), _rates(system, t, q, v, contacts)
    rubbing = jnp.zeros(gap.size if has_friction(system) else 0, q.dtype)
    opening = jnp.concatenate([gap, rubbing, system.constraint(t, q)])
    free = _law(system, mode, contacts, rate.size).free
    level = jnp.concatenate([free[: gap.size], jnp.zeros(rubbing.size, bool), free[gap.size + rubbing.size :]])
    D = R @ response
    # no friction of sliding contacts: this removes rounding and truncation, it is no force
    dq, dv = solve_rows(D, opening, Rows(level, None)), solve_rows(D, rate, Rows(free, None))
    return State(q + response @ dq, v + response @ dv)


# Rows: normal, tangential (with friction) and bilateral constraints, one below the other, of the candidates ---------------


class _Dynamics(NamedTuple):
    """The rates' slopes are D L + b, the acceleration free + response @ L."""

    D: Float[Array, "m m"]
    b: Float[Array, " m"]
    free: Float[Array, " n"]
    response: Float[Array, "n m"]


def _dynamics(system: Any, t: Any, q: Array, v: Array, contacts: Candidates) -> _Dynamics:
    t = jnp.asarray(t, q.dtype)
    R = _directions(system, t, q, contacts)
    _, drift = jax.jvp(lambda t, q: _rates(system, t, q, v, contacts), (t, q), (jnp.ones_like(t), v))
    solved = solve_spd(system.mass_matrix(q), jnp.concatenate([system.force(t, q, v)[:, None], R.T], axis=1))
    free, response = solved[:, 0], solved[:, 1:]
    return _Dynamics(R @ response, R @ free + drift, free, response)


def _rates(system: Any, t: Any, q: Array, v: Array, contacts: Candidates) -> Array:
    slip = [contacts.pick(system.slip(t, q, v))] if has_friction(system) else []
    return jnp.concatenate([contacts.pick(gap_rate(system, t, q, v)), *slip, constraint_rate(system, t, q, v)])


def _directions(system: Any, t: Any, q: Array, contacts: Candidates) -> Array:
    # d(rates)/dv
    friction = [contacts.pick(slip_jacobian(system, t, q))] if has_friction(system) else []
    return jnp.concatenate([contacts.pick(gap_jacobian(system, t, q)), *friction, constraint_jacobian(system, t, q)])


def _law(system: Any, mode: Mode, contacts: Candidates, rows: int) -> Rows:
    # One row per multiplier, as `solve_rows` reads them.
    held = contacts.pick(mode.held)
    k = held.size
    if not has_friction(system):
        return Rows(jnp.concatenate([held, jnp.ones(rows - k, bool)]), None)
    sticking, joints = held & contacts.pick(mode.sticking), rows - 2 * k
    mu = contacts.pick(jnp.broadcast_to(system.friction, mode.held.shape))
    push = jnp.where(held & ~sticking, mu * contacts.pick(mode.direction), 0.0)
    below = jnp.pad(-jnp.diag(push), ((k, joints), (0, k + joints)))
    return Rows(jnp.concatenate([held, sticking, jnp.ones(joints, bool)]), jnp.eye(rows, dtype=push.dtype) + below)


def _spread(system: Any, L: Array, contacts: Candidates, count: int) -> Forces:
    joints = L.size - (2 if has_friction(system) else 1) * (k := contacts.pick(jnp.zeros(count)).size)
    friction = contacts.spread(L[k : 2 * k]) if has_friction(system) else L[:0]
    return Forces(contacts.spread(L[:k]), friction, L[L.size - joints :])
