"""Event-driven integration: every step is split at its impacts, whose times are exact and differentiable."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxsim.schemes.flow import Forces, Indicators, Mode, Target, arrive, decide_mode, flow, indicators, motion, project
from jaxsim.schemes.impact_time import GRADIENTS
from jaxsim.schemes.state import ImpactLog, State, StepInfo, check_option
from jaxsim.schemes.velocity import velocity_step
from jaxsim.solve import by_precision
from jaxsim.system import constraint_jacobian, gap_rate, has_friction, restitution

_ROOT_ITERATIONS = 80


class EventState(NamedTuple):
    """The state with the impacts so far."""

    q: Float[Array, " n"]
    v: Float[Array, " n"]
    impacts: ImpactLog


class _Slot(NamedTuple):
    """Where a step stands between two events."""

    t: Array
    state: State
    impacts: ImpactLog
    impulse: Forces
    touched: Bool[Array, " contacts"]  # closed or hit within the step
    released: Bool[Array, " contacts"]  # by the event just now
    direction: Float[Array, " contacts"]  # of friction on contacts that the event just now made slide, else 0
    iterations: Int[Array, ""]
    hits: Int[Array, ""]  # impacts within the step
    fine: Bool[Array, ""]
    done: Bool[Array, ""]


class _Event(NamedTuple):
    """What ends a mode first; without one, `found` is False and tau the time that is left."""

    found: Bool[Array, ""]
    tau: Float[Array, ""]
    which: Indicators  # of bool: the indicators that vanish there
    direction: Float[Array, " contacts"]  # of friction on contacts that cease to stick, else 0
    accumulates: Bool[Array, ""]  # all further bounces of the contacts that hit end within the time left
    iterations: Int[Array, ""]


@dataclass(frozen=True)
class EventDriven:
    """Steps of fixed length that are split at events, each of them a root in time with an implicit derivative.

    Between events the motion is smooth and integrated with order 4, closed contacts are held as constraints. Events are
    impacts (a gap closes), release (a held contact's force vanishes), and with friction the change between sticking and
    sliding. At an impact all contacts that touch take part in Newton's law 0 <= gdot+ + eps gdot- _|_ L >= 0, as in
    `jaxsim.Moreau`. Derivatives include those of the event times: they are the derivatives of the motion itself.

    The last of the impacts of a step that `max_impacts` admits closes the contact (restitution 0) if the sum of all
    bounces to come, 2 w / (|a| (1 - eps)) after the rebound speed w under the acceleration a, ends within the step.

    Attributes:
        max_impacts: impacts that a step can hold; a step that has more is flagged as failed. Near an accumulation point
            more of them are needed the closer the restitution is to 1, whatever the step.
        rest_speed: a contact that touches (gap <= rest_speed dt) with a smaller rate is closed [m/s].
        max_logged: impacts that `Trajectory.impacts` has room for; later ones are counted only.
        gradient: "impact-time", or "plain" to differentiate with the times of the events held fixed, which is wrong.

    Raises:
        ValueError: for an unknown option.
    """

    max_impacts: int = 8
    rest_speed: float = 1e-7
    max_logged: int = 256
    gradient: str = "impact-time"

    def __post_init__(self):
        for name, least in (("max_impacts", 1), ("max_logged", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} = {value!r} must be an integer of at least {least}")
        if not self.rest_speed > 0:
            raise ValueError(f"rest_speed = {self.rest_speed} must be positive")
        check_option("gradient", self.gradient, GRADIENTS)

    def start(self, system: Any, state: State, t: Any) -> EventState:
        """The state with an empty log."""
        return EventState(*state, ImpactLog.empty(self.max_logged, system.gap(t, state.q)))

    def step(self, system: Any, state: Any, t: Any, dt: Any) -> tuple[Any, StepInfo]:
        """One step from t to t + dt; `state` is a `State`, or an `EventState` whose log goes on."""
        q, v = state.q, state.v
        gap = system.gap(t, q)
        log = state.impacts if isinstance(state, EventState) else ImpactLog.empty(0, gap)
        none, zeros = jnp.zeros(gap.size, bool), jnp.zeros_like(gap)
        rubbing = zeros if has_friction(system) else zeros[:0]
        joints = jnp.zeros(constraint_jacobian(system, t, q).shape[0], q.dtype)
        slot = _Slot(
            *(jnp.asarray(t, q.dtype), State(q, v), log, Forces(zeros, rubbing, joints), none, none, zeros),
            *(jnp.asarray(0), jnp.asarray(0), jnp.asarray(True), jnp.asarray(False)),
        )

        def advance(slot, index):
            may_close = index >= self.max_impacts - 1
            return jax.lax.cond(slot.done, lambda: slot, lambda: self._advance(system, slot, t + dt, dt, may_close)), None

        slot, _ = jax.lax.scan(advance, slot, jnp.arange(self.max_impacts + 2))
        info = StepInfo(
            impulse=slot.impulse.normal,
            friction_impulse=slot.impulse.friction,
            joint_impulse=slot.impulse.joint,
            active=slot.touched,
            iterations=slot.iterations,
            residual=jnp.where(slot.done, 0.0, t + dt - slot.t),
            converged=slot.done
            & slot.fine
            & (slot.hits <= self.max_impacts)
            & jnp.all(jnp.isfinite(slot.state.q))
            & jnp.all(jnp.isfinite(slot.state.v)),
        )
        return (EventState(*slot.state, slot.impacts) if isinstance(state, EventState) else slot.state), info

    def _advance(self, system: Any, slot: _Slot, t_end: Any, dt: Any, may_close: Array) -> _Slot:
        """To the next event, or to the end of the step."""
        t, state = slot.t, slot.state
        frozen, t_0, (q, v) = jax.lax.stop_gradient((system, t, state))
        gap, rate = frozen.gap(t_0, q), gap_rate(frozen, t_0, q, v)
        touching = gap <= self.rest_speed * dt
        at_rest = touching & (jnp.abs(rate) <= self.rest_speed)
        direction = slot.direction
        if has_friction(system):
            slip = frozen.slip(t_0, q, v)
            direction = jnp.where((direction == 0) & (jnp.abs(slip) > self.rest_speed), -jnp.sign(slip), direction)
        mode = decide_mode(frozen, t_0, State(q, v), at_rest & ~slot.released, direction)
        left = t_end - t
        event = _next_event(*jax.lax.stop_gradient((system, t, state, left, dt)), self.rest_speed, mode, touching, at_rest)
        hitting = event.which.normal & ~mode.held

        # what has come to rest stays at rest under variation too
        state = project(system, t, state, mode)
        waits = self.gradient == "impact-time"
        which = jax.tree.map(lambda vanish: jnp.where(vanish & waits, 1.0, 0.0), event.which)
        tau = jnp.where(event.found, event.tau, left)
        target = Target(which, jnp.where(event.found, jax.lax.stop_gradient(t + tau), t_end))
        tau, end, impulse = arrive(_watched, system, t, state, mode, tau, target)
        t = t + tau
        end = project(system, t, end, mode)
        gap, rate = system.gap(t, end.q), gap_rate(system, t, end.q, end.v)

        def impact():
            involved = hitting | mode.held | at_rest | (jax.lax.stop_gradient(gap) <= self.rest_speed * dt)
            eps = jnp.where(may_close & event.accumulates, 0.0, restitution(system, gap.size))
            hit = velocity_step(system, t, end.q, end.v, 0.0, jnp.where(involved, -1.0, 1.0), eps)
            forces = Forces(hit.info.impulse, hit.info.friction_impulse, hit.info.joint_impulse)
            log = slot.impacts.add(t, hitting, rate, hit.info.impulse)
            return State(end.q, hit.v), forces, log, hit.info.converged

        def no_impact():
            return end, jax.tree.map(jnp.zeros_like, impulse), slot.impacts, jnp.asarray(True)

        hits = jnp.any(hitting)
        state, of_impact, log, fine = jax.lax.cond(hits, impact, no_impact)
        return _Slot(
            *(t, state, log, jax.tree.map(lambda *parts: sum(parts), slot.impulse, impulse, of_impact)),
            touched=slot.touched | mode.held | hitting,
            released=event.which.normal & mode.held,
            direction=event.direction,
            iterations=slot.iterations + event.iterations,
            hits=slot.hits + hits,
            fine=slot.fine & fine,
            done=~event.found,
        )


def _watched(system: Any, t: Any, state: State, mode: Mode) -> Indicators:
    _, forces = motion(system, t, *state, mode)
    return indicators(system, t, *state, mode, forces)


class _Root(NamedTuple):
    """The search for the first sign change: a point in time, what is known there, and the bracket."""

    tau: Array
    low: Array
    high: Array
    at: "_Point"
    crossing: Indicators  # of bool: which indicators change their sign
    iterations: Array
    done: Array


class _Point(NamedTuple):
    values: Indicators
    slopes: Indicators  # along the motion
    gap_slope: Array  # gddot
    friction: Array  # L_T


def _next_event(
    system: Any, t: Any, state: State, left: Array, dt: Array, rest_speed: float, mode: Mode, touching: Array, at_rest: Array
) -> _Event:
    """The first sign change of an indicator within the time that is left; of values only, without derivatives."""
    precision = 4 * jnp.finfo(left.dtype).eps * left
    gap, rate = system.gap(t, state.q), gap_rate(system, t, *state)
    if not gap.size:
        none = Indicators(gap > 0, gap > 0)
        return _Event(jnp.asarray(False), left, none, gap, jnp.asarray(True), jnp.asarray(0))
    now = touching & ~at_rest & (rate < 0)  # approaches already
    # An open contact at rest lies at gap = 0 to rounding: only more than that is a sign change. In float32 the rounding of q
    # is more than any motion within the step.
    rounding = by_precision(gap.dtype, 1e-7 * dt, jnp.finfo(jnp.float32).eps * jnp.max(jnp.abs(state.q)))
    slack = jnp.where(~mode.held & at_rest, -jnp.maximum(jnp.abs(gap), rounding), 0.0)

    def point(tau):
        end, _ = flow(system, t, state, tau, mode)
        time = t + tau
        a, forces = motion(system, time, *end, mode)

        def moving(t, q, v):
            return _watched(system, t, State(q, v), mode), gap_rate(system, t, q, v)

        (values, _), (slopes, gap_slope) = jax.jvp(moving, (time, *end), (jnp.ones_like(time), end.v, a))
        return _Point(values, slopes, gap_slope, forces.friction)

    def first(at, crossing):
        """The smallest of the crossing indicators, and its slope."""
        values, slopes, crosses = (jnp.concatenate(parts) for parts in (at.values, at.slopes, crossing))
        index = jnp.argmin(jnp.where(crosses, values, jnp.inf))
        return values[index], slopes[index]

    def begin(at):
        """What crosses between the start and the end of the time left, and from where to look for the root.

        So does a slip that only just has its sign: the next step would take it for rest, and not know that it had one.
        """
        end_rate = jnp.where(mode.held, 0.0, at.slopes.normal)
        dips, x = _dips(gap, rate * left, at.values.normal, end_rate * left)
        dips = dips & ~mode.held & ~touching
        stops = mode.held & ~mode.sticking & (at.slopes.tangential < 0) & (at.values.tangential <= rest_speed)
        crossing = Indicators((at.values.normal < slack) | dips, (at.values.tangential < 0) | stops)
        far = jnp.min(jnp.where(dips, x * left, left), initial=jnp.inf)
        found = (jnp.any(crossing.normal) | jnp.any(crossing.tangential)) & ~jnp.any(now) & (left > 0)
        return far, crossing, found

    def body(root):
        at = point(root.tau)
        far, crossing, found = begin(at)
        start = root.iterations == 0
        crossing = jax.tree.map(lambda new, old: jnp.where(start, new, old), crossing, root.crossing)
        value, slope = first(at, crossing)
        newton = root.tau - value / slope
        low = jnp.where(start | (value < 0), root.low, root.tau)
        beyond = jnp.where((value > 0) & (far == left), 2 * newton - left, far)  # a slip that only just has its sign
        high = jnp.where(start, beyond, jnp.where(value < 0, root.tau, root.high))
        settled = (jnp.abs(newton - root.tau) <= precision) | (high - low <= precision)
        inside = (newton > low) & (newton < high)
        better = jnp.where(settled, root.tau, jnp.where(inside, newton, (low + high) / 2))
        tau = jnp.where(start & (far < left), far, better)
        return _Root(tau, low, high, at, crossing, root.iterations + 1, jnp.where(start, ~found, settled))

    nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(point, left))
    never = jax.tree.map(lambda x: x > 0, nothing.values)
    root = _Root(left, jnp.zeros_like(left), left, nothing, never, jnp.asarray(0), jnp.asarray(False))
    root = jax.lax.while_loop(lambda r: ~r.done & (r.iterations < _ROOT_ITERATIONS), body, root)

    # Everything that vanishes within a millionth of the step belongs to the same event.
    at, approaches = root.at, jnp.any(now)
    later = ~approaches & (left > 0) & (jnp.any(root.crossing.normal) | jnp.any(root.crossing.tangential))
    least, _ = first(at, root.crossing)
    which = jax.tree.map(
        lambda value, slope, crosses: later & crosses & ((value <= -1e-6 * dt * slope) | (value == least)),
        *(at.values, at.slopes, root.crossing),
    )
    which = Indicators(which.normal | now, which.tangential)
    hitting = which.normal & ~mode.held
    tau = jnp.where(approaches, 0.0, root.tau)
    # whether all the bounces that follow end within the time that is left
    eps, speed = restitution(system, gap.size), jnp.abs(jnp.where(approaches, rate, at.slopes.normal))
    over = (at.gap_slope < 0) & (2 * eps * speed <= -at.gap_slope * (1 - eps) * (left - tau))
    turned = jnp.zeros_like(gap)
    if has_friction(system):
        turned = jnp.where(which.tangential & mode.sticking, jnp.sign(at.friction), 0.0)
    return _Event(later | approaches, tau, which, turned, jnp.all(~hitting | over), root.iterations)


def _dips(start: Array, start_slope: Array, end: Array, end_slope: Array) -> tuple[Array, Array]:
    """Whether, and where in (0, 1), the cubic Hermite interpolant of a gap is negative between two positive ends."""
    middle, cubic = 3 * (end - start) - 2 * start_slope - end_slope, start_slope + end_slope - 2 * (end - start)
    root = jnp.sqrt(jnp.maximum(middle**2 - 3 * cubic * start_slope, 0.0))
    x = -start_slope / jnp.where(middle + root > 0, middle + root, 1.0)
    inside = (start_slope < 0) & (end_slope > 0) & (end >= 0) & (x > 0) & (x < 1)
    return inside & (start + x * (start_slope + x * (middle + x * cubic)) < 0), x
