"""Derivatives of a time-stepping scheme that know when impacts happen.

A time-stepping scheme notices an impact a fraction of a step late, and the step in which it does so is a whole number: its
own derivative holds the time of the impact fixed and is wrong by O(1) whatever the step. Here the value stays the scheme's
own, to the last bit, and only the tangent is another one:

* A step with an impact that is resolved, faster than a few steps of free motion, has the derivative of the event-resolved
  step from the same state: smooth motion to the time tau at which the gap closes, tau with its implicit derivative, the
  impact there, smooth motion for the rest of the step. So has a step in which the slip of a closed contact changes its sign.
* In any other step with closed contacts the scheme's own derivative is projected, in the mass metric, onto dg = 0 and
  dgdot = 0: what stays closed stays closed under variation.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxsim.contact.complementarity import Rows, solve_rows
from jaxsim.schemes.flow import Forces, Indicators, Mode, Target, arrive, decide_mode, indicators, motion
from jaxsim.schemes.state import State, StepInfo, candidates
from jaxsim.schemes.velocity import velocity_step
from jaxsim.solve import by_precision, solve_spd
from jaxsim.system import gap_jacobian, gap_rate, has_friction

GRADIENTS = ("impact-time", "plain")
_TOGETHER = 1e-6  # roots that are no further apart, relative to their size, are one event
_RESOLVED = 3.0  # an impact is resolved if its approach speed exceeds that of so many steps of free motion
_NEAR = 2.0  # and if its time is no more than so many steps away, as is that of any other event


def with_impact_times(
    gradient: str, system: Any, state: State, t: Any, dt: Any, new: State, info: StepInfo
) -> tuple[State, StepInfo]:
    """A scheme's own result with the derivatives that `gradient` asks for, "impact-time" or "plain"."""
    if gradient == "plain" or not info.impulse.size:
        return new, info
    own = (new, Forces(info.impulse, info.friction_impulse, info.joint_impulse))
    t, dt = (jnp.asarray(x, state.q.dtype) for x in (t, dt))
    new, forces = _own_value(own, system, State(state.q, state.v), t, dt)
    return new, info._replace(impulse=forces.normal, friction_impulse=forces.friction, joint_impulse=forces.joint)


@jax.custom_jvp
def _own_value(own: tuple[State, Forces], system: Any, state: State, t: Array, dt: Array) -> tuple[State, Forces]:
    return own


@_own_value.defjvp
def _own_value_jvp(primals, tangents):
    own, *arguments = primals
    own_tangent, *argument_tangents = tangents
    events = _events_of(*jax.lax.stop_gradient((own, *arguments)))
    tangent = jax.lax.cond(
        jnp.any(events.hits | events.turns),
        lambda own_tangent, tangents: jax.jvp(lambda *a: _resolved_step(events, *a), arguments, tangents)[1],
        lambda own_tangent, tangents: _stay_closed(events.closed, own, own_tangent, arguments, tangents),
        *(own_tangent, argument_tangents),
    )
    return _own_value(*primals), tangent


class _Events(NamedTuple):
    """What happens in a step of a time-stepping scheme; masks of contacts."""

    closed: Bool[Array, " contacts"]  # with an impulse
    hits: Bool[Array, " contacts"]  # with a resolved impact
    turns: Bool[Array, " contacts"]  # closed all the time, with a slip that changes its sign
    mode: Mode  # of the contacts that are closed all the time


def _events_of(own: tuple[State, Forces], system: Any, state: State, t: Array, dt: Array) -> _Events:
    (new, forces), (q, v) = own, state
    closed = forces.normal > 0
    gap, rate = system.gap(t, q), gap_rate(system, t, q, v)
    # gddot of the free motion in its two parts, W M^-1 h and Wdot v: they nearly cancel in a fast mechanism, where schemes
    # that evaluate W elsewhere in the step are off by one of them
    W, force = gap_jacobian(system, t, q), solve_spd(system.mass_matrix(q), system.force(t, q, v))
    _, drift = jax.jvp(lambda t, q: gap_rate(system, t, q, v), (t, q), (jnp.ones_like(t), v))
    slow = _RESOLVED * dt * jnp.maximum(jnp.abs(W @ force), jnp.abs(drift))
    hits = closed & (-rate > jnp.maximum(slow, jnp.abs(gap) / (_NEAR * dt)))
    turns, sticking, direction = jnp.zeros_like(hits), jnp.zeros_like(hits), jnp.zeros_like(rate)
    if has_friction(system):
        before, after = system.slip(t, q, v), system.slip(t + dt, *new)
        tolerance = _tolerance(v)
        sticking = jnp.abs(before) <= tolerance
        turns = closed & ~sticking & ((after * before < 0) | (jnp.abs(after) <= tolerance)) & ~jnp.any(hits)
        direction = -jnp.sign(before)
    return _Events(closed, hits, turns, Mode(closed & ~hits, sticking, direction))


def _tolerance(v: Array) -> Array:
    return by_precision(v.dtype, 1e-9, 1e-6) * (1 + jnp.max(jnp.abs(v)))  # of velocities that vanish


class _Stage(NamedTuple):
    t: Array
    state: State
    forces: Forces  # impulses so far
    mode: Mode
    pending: Bool[Array, " contacts"]  # events to come


def _resolved_step(events: _Events, system: Any, state: State, t: Array, dt: Array) -> tuple[State, Forces]:
    """The same step with its impacts, or reversals of slip, at their times: at most two, one after the other.

    The times need not lie within the step: Moreau's midpoint rule notices some impacts half a step early.
    """
    forces = jax.tree.map(jnp.zeros_like, jax.eval_shape(lambda: motion(system, t, *state, events.mode)[1]))
    stage = _Stage(t, state, forces, events.mode, events.hits | events.turns)

    def advance(stage, last):
        needed = last | jnp.any(stage.pending)
        return jax.lax.cond(needed, lambda: _advance(events, system, t + dt, dt, stage, last), lambda: stage), None

    stage, _ = jax.lax.scan(advance, stage, jnp.array([False, False, True]))
    return stage.state, stage.forces


def _advance(events: _Events, system: Any, t_end: Array, dt: Array, stage: _Stage, last: Array) -> _Stage:
    """To the first of the pending events and through it, or to the end of the step."""
    turning = jnp.any(events.turns)  # else contacts hit
    now, tau = _first(*jax.lax.stop_gradient((system, stage.t, stage.state, dt)), stage.mode, stage.pending & ~last, turning)
    to_event = jnp.any(now)
    tau = jnp.where(to_event, tau, t_end - stage.t)
    weight = jnp.where(now, 1.0, 0.0)
    target = Target(Indicators(jnp.where(turning, 0.0, weight), jnp.where(turning, weight, 0.0)), t_end)
    tau, end, forces = arrive(_watched, system, stage.t, stage.state, stage.mode, tau, target)
    t = stage.t + tau
    closed = stage.mode.held | now

    def impact():
        hit = velocity_step(system, t, *end, 0.0, jnp.where(closed, -1.0, 1.0))
        return State(end.q, hit.v), Forces(hit.info.impulse, hit.info.friction_impulse, hit.info.joint_impulse)

    hit = to_event & ~turning
    after, shock = jax.lax.cond(hit, impact, lambda: (end, jax.tree.map(jnp.zeros_like, forces)))
    rate, direction = gap_rate(system, t, *after), jnp.zeros_like(events.mode.direction)
    if has_friction(system):
        slip = system.slip(t, *after)
        direction = jnp.where(jnp.abs(slip) > _tolerance(after.v), -jnp.sign(slip), 0.0)
    mode = decide_mode(system, t, after, closed & (rate <= _tolerance(after.v)), direction)
    mode = jax.tree.map(lambda new, old: jnp.where(to_event, new, old), mode, stage.mode)
    pending = stage.pending & ~now & (turning | (rate < 0))
    return _Stage(t, after, jax.tree.map(lambda *x: sum(x), stage.forces, forces, shock), mode, pending)


def _watched(system: Any, t: Any, state: State, mode: Mode) -> Indicators:
    # gaps of open contacts and speeds of sliding ones: they need no forces
    gap = system.gap(t, state.q)
    nothing = jnp.zeros_like(gap)
    return indicators(system, t, *state, mode, Forces(nothing, nothing, nothing))


def _first(
    system: Any, t: Array, state: State, dt: Array, mode: Mode, pending: Array, turning: Array
) -> tuple[Bool[Array, " contacts"], Array]:
    """Which of the pending events come first, and when: roots of the quadratic motion with the acceleration of now.

    They are off by O(dt^3), nothing for derivatives that are right to O(dt). What is far from the step, or touches a wall
    rather than hits it, is no event: its time, from a rate that is rounding or has just been braked, means nothing.
    """
    (q, v), one = state, jnp.ones_like(t)
    a, _ = motion(system, t, q, v, mode)
    gap = system.gap(t, q)
    rate, acceleration = jax.jvp(functools.partial(gap_rate, system), (t, q, v), (one, v, a))
    times = 2 * gap / (jnp.sqrt(jnp.maximum(rate**2 - 2 * gap * acceleration, 0.0)) - rate)
    crosses = -rate > dt * jnp.abs(acceleration)
    if has_friction(system):
        slip, slope = jax.jvp(system.slip, (t, q, v), (one, v, a))
        times, crosses = jnp.where(turning, -slip / slope, times), turning | crosses
    soon = pending & crosses & (jnp.abs(times) <= _NEAR * dt)
    first = jnp.min(jnp.where(soon, times, jnp.inf))
    return soon & (times - first <= _TOGETHER * jnp.max(jnp.where(soon, jnp.abs(times), 0.0))), first


def _stay_closed(
    closed: Array, own: tuple[State, Forces], own_tangent: Any, arguments: Any, tangents: Any
) -> tuple[State, Forces]:
    """The own tangent, projected onto dg = 0 and dgdot = 0 for the closed contacts; untouched without any."""
    (q, v), _ = own
    (dq, dv), forces = own_tangent
    system, _, t, dt = arguments
    d_system, _, d_t, d_dt = tangents
    contacts = candidates(system, jnp.where(closed, -1.0, 1.0))
    W = contacts.pick(gap_jacobian(system, t + dt, q))
    response = solve_spd(system.mass_matrix(q), W.T)
    D, rows = W @ response, Rows(contacts.pick(closed), None)

    def variation(function, primals, tangents):
        _, d = jax.jvp(
            lambda system, t, *x: function(system, t, *x), (system, t + dt, *primals), (d_system, d_t + d_dt, *tangents)
        )
        return contacts.pick(d)

    dq = dq + response @ solve_rows(D, variation(lambda system, t, q: system.gap(t, q), (q,), (dq,)), rows)
    dv = dv + response @ solve_rows(D, variation(gap_rate, (q, v), (dq, dv)), rows)
    return State(dq, dv), forces
