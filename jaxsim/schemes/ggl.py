"""The unified Gear-Gupta-Leimkuhler step: impact law and non-penetration in one nonlinear system.

Source: Schoeder, Ulbrich, Schindler, "Discussion of the Gear-Gupta-Leimkuhler method for impacting mechanical systems",
doi 10.1007/s11044-013-9370-y, equations (36)-(55) and figure 7; the Jacobian (43)-(55) is what `jax.jacfwd` replaces.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float

from jaxsim.contact.complementarity import contact_rows, prox_interval, prox_nonnegative, solve_rows
from jaxsim.schemes.impact_time import GRADIENTS, with_impact_times
from jaxsim.schemes.state import Candidates, State, StepInfo, candidates, check_option
from jaxsim.solve import by_precision, solve, solve_spd
from jaxsim.system import (
    constraint_rate,
    gap_jacobian,
    gap_rate,
    has_friction,
    restitution,
    slip_jacobian,
)


class Unknowns(NamedTuple):
    """x_{n+1} of (38), with friction impulses and bilateral multipliers beside it; contacts are the candidates."""

    q: Float[Array, " n"]
    v: Float[Array, " n"]
    impulse: Float[Array, " m"]  # Lambda, normal then tangential (m = contacts, or 2 contacts with friction)
    correction: Float[Array, " contacts"]  # Psi (absent without the position level)
    joint_impulse: Float[Array, " joints"]
    joint_correction: Float[Array, " joints"]


class Equations(NamedTuple):
    """What (39) is made of: two rows of motion, and the arguments of the laws."""

    phi1: Float[Array, " n"]
    phi2: Float[Array, " n"]
    rate: Float[Array, " m"]  # gdot+ + eps gdot_n, then the slip with friction
    gap: Float[Array, " contacts"]  # g+
    joint_rate: Float[Array, " joints"]
    joint_gap: Float[Array, " joints"]


class Reduced(NamedTuple):
    """The unknowns that are left when phi1 = 0 has been solved for v+: q+ = q_n + dt (v_n + s)."""

    s: Float[Array, " n"]  # mean velocity of the step less v_n
    joint_impulse: Float[Array, " joints"]
    joint_correction: Float[Array, " joints"]  # corrections as velocities, 2 Psi / dt
    impulse: Float[Array, " m"]
    correction: Float[Array, " contacts"]

    def smooth(self) -> Array:
        """What no inequality restricts, as one vector."""
        return jnp.concatenate(self[:3])

    def with_smooth(self, flat: Array) -> "Reduced":
        """The same with the smooth part replaced."""
        n, joints = self.s.size, self.joint_impulse.size
        return self._replace(s=flat[:n], joint_impulse=flat[n : n + joints], joint_correction=flat[n + joints :])


class ReducedRows(NamedTuple):
    """The equations of `Reduced`: the smooth ones as one vector, and the arguments of the laws, all as velocities."""

    smooth: Array
    rate: Float[Array, " m"]
    gap: Float[Array, " contacts"]


class StepData(NamedTuple):
    """What is known when a step begins."""

    t: Array
    dt: Array
    q: Float[Array, " n"]
    v: Float[Array, " n"]
    inverse_mass: Float[Array, "n n"]  # M_M^-1, at q_n + dt/2 v_n
    contacts: Candidates
    restitution: Float[Array, " contacts"]
    friction: Float[Array, " contacts"] | None


@dataclass(frozen=True)
class GearGuptaLeimkuhler:
    """The unified scheme (36)-(42).

        phi1 = q+ - q_n - dt/2 (v_n + v+) - Z Wt^T Psi
        phi2 = v+ - v_n - M_M^-1 (ht dt + Wt^T L)
        phi3 = L   - prox(L   - r_L (gdot+ + eps gdot_n))
        phi4 = Psi - prox(Psi - r_P g+)

    with Wt, ht at the midpoint of the step and M_M at q_n + dt/2 v_n. A contact takes part once the motion without it
    would end with g <= 0; contacts that the result violates are added and the step is solved again (figure 7). Psi only
    pushes contacts open, so a body that comes to rest may hover, by less than the g dt^2 / 2 of one step's fall.

    Attributes:
        position_level: with phi4 and Psi; without them it is the paper's reference line (figure 10).
        metric: of the position correction, "mass" (Z = M_M^-1) or "identity" (Z = I, as printed in (36), which depends on
            the choice of coordinates and injects energy).
        gap_rate: "exact" (W(q+) v+ + eps W(q_n) v_n), "midpoint" (Wt (v+ + eps v_n), what (42) means) or "literal"
            ((42) with gdot_n = W(q_n) v_n, what (48) differentiates; wrong by Wdot v dt).
        gap: "exact" (g(q+)) or "linearized" ((41) about the true g(q_n), error O(dt^3)).
        tolerance: a step has converged when the last Newton correction, of the velocities and of the gap rates that
            impulses and corrections cause, is below tolerance * (1 + max |v_n|); the error left is of the order of its
            square.
        max_iterations: Newton iterations after which a step is flagged as failed.
        gradient: "impact-time" or "plain", as in `jaxsim.Moreau`.

    Raises:
        ValueError: for an unknown option.
    """

    position_level: bool = True
    metric: str = "mass"
    gap_rate: str = "exact"
    gap: str = "exact"
    tolerance: float = 1e-9
    max_iterations: int = 30
    gradient: str = "impact-time"

    def __post_init__(self):
        for name, options in (
            ("metric", ("mass", "identity")),
            ("gap_rate", ("exact", "midpoint", "literal")),
            ("gap", ("exact", "linearized")),
            ("position_level", (True, False)),
            ("gradient", GRADIENTS),
        ):
            check_option(name, getattr(self, name), options)
        if not self.tolerance > 0 or self.max_iterations < 1:
            raise ValueError(f"tolerance = {self.tolerance} and max_iterations = {self.max_iterations} must be positive")

    @classmethod
    def paper(cls, **options: Any) -> "GearGuptaLeimkuhler":
        """(36)-(42) as printed: identity metric, midpoint gap rate, linearized gap; `options` override."""
        return cls(**{"metric": "identity", "gap_rate": "midpoint", "gap": "linearized", **options})

    def step(self, system: Any, state: State, t: Any, dt: Any) -> tuple[State, StepInfo]:
        """One step from t to t + dt."""
        solution, contacts, active, iterations, change, done = self._solve(*jax.lax.stop_gradient((system, state, t, dt)))
        data = self._step_data(system, state, t, dt, contacts)
        x = self._expand(system, data, self._attach_derivative(system, data, solution, active))
        k = active.size
        info = StepInfo(
            impulse=contacts.spread(x.impulse[:k]),
            friction_impulse=contacts.spread(x.impulse[k:]) if data.friction is not None else x.impulse[k:],
            joint_impulse=x.joint_impulse,
            active=contacts.spread(active),
            iterations=iterations,
            residual=change,
            converged=done & jnp.all(jnp.isfinite(x.v)),
        )
        return with_impact_times(self.gradient, system, state, t, dt, State(x.q, x.v), info)

    # The equations ---------------------------------------------------------------------------------------------------

    def equations(self, system: Any, data: StepData, x: Unknowns) -> Equations:
        """The smooth parts of (39) for the candidate contacts."""
        t, dt, q_n, v_n, inverse_mass, contacts, eps, friction = data
        t_mid, t_end = t + dt / 2, t + dt
        q_mid, v_mid = (q_n + x.q) / 2, (v_n + x.v) / 2
        impulse = self._generalized(system, data, q_mid, x.impulse, x.joint_impulse)
        drift = self._drift(system, data, q_mid, x.correction, x.joint_correction)
        kick = inverse_mass @ (system.force(t_mid, q_mid, v_mid) * dt + impulse)

        def rate(t, q, v):  # dg/dt + W v
            return contacts.pick(gap_rate(system, t, q, v))

        def along(direction):  # Wt @ direction
            return rate(t_mid, q_mid, direction) - rate(t_mid, q_mid, jnp.zeros_like(q_n))

        if self.gap_rate == "exact":
            impact = rate(t_end, x.q, x.v) + eps * rate(t, q_n, v_n)
        elif self.gap_rate == "midpoint":
            impact = rate(t_mid, q_mid, x.v) + eps * rate(t_mid, q_mid, v_n)
        else:
            impact = (1 + eps) * rate(t, q_n, v_n) + along(kick)
        if friction is not None:
            impact = jnp.concatenate([impact, contacts.pick(system.slip(t_end, x.q, x.v))])
        if self.gap == "exact":
            gap = contacts.pick(system.gap(t_end, x.q))
        else:
            gap = contacts.pick(system.gap(t, q_n)) + rate(t_mid, q_mid, v_mid) * dt + along(drift)
        return Equations(
            phi1=x.q - q_n - dt * v_mid - drift,
            phi2=x.v - v_n - kick,
            rate=impact,
            gap=gap,
            joint_rate=constraint_rate(system, t_end, x.q, x.v),
            joint_gap=system.constraint(t_end, x.q),
        )

    def residual(
        self,
        system: Any,
        data: StepData,
        x: Unknowns,
        active: Bool[Array, " contacts"],
        r: tuple[Array, Array],
        sticking: Bool[Array, " contacts"] | None = None,
    ) -> Unknowns:
        """phi of (39), arranged as the unknowns: phi1, phi2, phi3, phi4, and the bilateral rows.

        A contact outside `active` has the unit rows of the reduced system. Any r = (r_L, r_P) > 0 has the same roots.
        `sticking`, where given, decides which rows of friction are xi_T = 0, the others being |L_T| = mu L_N.
        """
        rows = self.equations(system, data, x)
        k, (r_impulse, r_correction) = active.size, r
        normal, wanted = x.impulse[:k], x.impulse - r_impulse * rows.rate
        phi3 = normal - jnp.where(active, prox_nonnegative(wanted[:k]), 0.0)
        if data.friction is not None:
            radius = data.friction * prox_nonnegative(normal)
            tangential = prox_interval(wanted[k:], radius)
            if sticking is not None:
                tangential = jnp.where(sticking, wanted[k:], jnp.sign(wanted[k:]) * radius)
            rubbing = x.impulse[k:] - jnp.where(active, tangential, 0.0)
            phi3 = jnp.concatenate([phi3, rubbing])
        phi4, joint_gap = x.correction, x.joint_correction
        if self.position_level:
            phi4 = x.correction - jnp.where(active, prox_nonnegative(x.correction - r_correction * rows.gap), 0.0)
            joint_gap = rows.joint_gap
        return Unknowns(rows.phi1, rows.phi2, phi3, phi4, rows.joint_rate, joint_gap)

    def _step_data(self, system: Any, state: State, t: Any, dt: Any, contacts: Candidates) -> StepData:
        q, v = state
        inverse_mass = solve_spd(system.mass_matrix(q + dt / 2 * v), jnp.eye(q.size, dtype=q.dtype))
        count = system.gap(t, q).size
        friction = contacts.pick(jnp.broadcast_to(system.friction, (count,))) if has_friction(system) else None
        return StepData(t, dt, q, v, inverse_mass, contacts, contacts.pick(restitution(system, count)), friction)

    def _generalized(self, system: Any, data: StepData, q: Array, contact: Array, joint: Array) -> Array:
        """W^T contact + B^T joint at the middle of the step: normal, then tangential, then bilateral multipliers."""
        t, k = data.t + data.dt / 2, data.restitution.size

        normal = data.contacts.spread(contact[:k])  # rather than picking rows of W, and of its derivatives

        def work(q):
            of_contacts = normal @ system.gap(t, q) if k else 0.0
            return of_contacts + joint @ system.constraint(t, q)

        result = jax.jacfwd(work)(q)  # not reverse mode: the scatters in it keep XLA from compiling the loop as a whole
        if contact.size > k:
            result = result + contact[k:] @ data.contacts.pick(slip_jacobian(system, t, q))
        return result

    def _drift(self, system: Any, data: StepData, q: Array, correction: Array, joint_correction: Array) -> Array:
        """Z Wt^T Psi."""
        if not self.position_level:
            return jnp.zeros_like(q)
        push = self._generalized(system, data, q, correction, joint_correction)
        return data.inverse_mass @ push if self.metric == "mass" else push

    # The reduction: phi1 = 0 is solved for v+ --------------------------------------------------------------------------

    def _expand(self, system: Any, data: StepData, y: Reduced) -> Unknowns:
        half = data.dt / 2
        q = data.q + data.dt * (data.v + y.s)
        v = data.v + 2 * y.s - self._drift(system, data, (data.q + q) / 2, y.correction, y.joint_correction)
        return Unknowns(q, v, y.impulse, half * y.correction, y.joint_impulse, half * y.joint_correction)

    def _reduced_rows(self, system: Any, data: StepData, y: Reduced) -> ReducedRows:
        rows = self.equations(system, data, self._expand(system, data, y))
        if not self.position_level:
            return ReducedRows(jnp.concatenate([rows.phi2, rows.joint_rate]), rows.rate, y.correction)
        per_step = 2 / data.dt  # gaps as velocities: one scale for all rows
        return ReducedRows(
            jnp.concatenate([rows.phi2, rows.joint_rate, per_step * rows.joint_gap]), rows.rate, per_step * rows.gap
        )

    def _attach_derivative(self, system: Any, data: StepData, solution: Reduced, active: Array) -> Reduced:
        """`solution` unchanged, with the derivative of the root of (39), whatever way it was found."""
        W = data.contacts.pick(gap_jacobian(system, data.t, data.q))
        own_correction = jnp.sum(W * (W if self.metric == "identity" else W @ data.inverse_mass), axis=1)
        if data.friction is not None:
            W = jnp.concatenate([W, data.contacts.pick(slip_jacobian(system, data.t, data.q))])
        own_impulse = jnp.sum(W * (W @ data.inverse_mass), axis=1)
        sticking = None
        if data.friction is not None:
            # Where the directions of sticking contacts are redundant (two corners of one body on a floor), the solution has
            # one of them at the limit without slipping. Rounding must not count it as sticking: the rows were singular.
            normal, rubbing = jnp.split(solution.impulse, 2)
            limit = (1 - by_precision(normal.dtype, 1e-9, 1e-4)) * data.friction * normal
            sticking = jnp.abs(rubbing) < limit
        # any r > 0 will do, also for a gap that does not move at all
        r_impulse, r_correction = (1 / jnp.where(own > 0, own, 1.0) for own in (own_impulse, own_correction))
        r = jax.lax.stop_gradient((r_impulse, r_correction))

        def function(y):
            phi = self.residual(system, data, self._expand(system, data, y), active, r, sticking)
            per_step = 2 / data.dt  # all rows as velocities, for the pivoting of the linear solve
            correction = per_step * phi.correction / r[1] if self.position_level else phi.correction
            return Reduced(phi.v, phi.joint_impulse, per_step * phi.joint_correction, phi.impulse / r[0], correction)

        def solve_linear(linear, rhs):
            flat, unravel = ravel_pytree(rhs)
            matrix = jax.jacfwd(lambda x: ravel_pytree(linear(unravel(x)))[0])(jnp.zeros_like(flat))
            return unravel(solve(matrix, flat))

        return jax.lax.custom_root(function, solution, lambda _, guess: guess, solve_linear)

    # The solution ------------------------------------------------------------------------------------------------------

    def _bound(self, state: State, dt: Any) -> Array:
        # nothing can be known better than rounding allows: velocities, and gaps, read as velocities, than that of q
        rounding = 4 * float(jnp.finfo(state.q.dtype).eps)
        tolerance = max(self.tolerance, rounding)
        return tolerance * (1 + jnp.max(jnp.abs(state.v))) + rounding * jnp.max(jnp.abs(state.q)) / dt

    def _solve(self, system: Any, state: State, t: Any, dt: Any):
        """Figure 7: the motion without contacts, then with those that it violates, until nothing is violated."""
        no_contact = Candidates(lambda values: values[:0], lambda values: values)
        bound = self._bound(state, dt)
        free, iterations, change = self._free_motion(system, self._step_data(system, state, t, dt, no_contact), bound)

        def gap_of(y):
            return system.gap(t + dt, state.q + dt * (state.v + y.s))

        contacts = candidates(system, gap_of(free))
        data = self._step_data(system, state, t, dt, contacts)
        active = contacts.pick(gap_of(free)) <= 0
        k = active.size
        start = free._replace(
            impulse=jnp.zeros(k if data.friction is None else 2 * k, free.s.dtype),
            correction=jnp.zeros(k if self.position_level else 0, free.s.dtype),
        )

        def body(carry):
            y, active, iterations, _, _ = carry
            new, change = self._contact_iteration(system, data, y, active)
            settled = change <= bound
            added = active | (settled & (contacts.pick(gap_of(new)) < 0))
            return new, added, iterations + 1, change, settled & jnp.all(added == active)

        def unfinished(carry):
            _, _, iterations, _, done = carry
            return ~done & (iterations < self.max_iterations)

        carry = (start, active, iterations, change, (change <= bound) & ~jnp.any(active))
        y, active, iterations, change, done = jax.lax.while_loop(unfinished, body, carry)
        outside = gap_of(y) < 0
        opposed = jnp.sum(outside) > jnp.sum(contacts.pick(outside))  # two contacts of a group, against `opposing`
        return y, contacts, active, iterations, change, done & ~opposed

    def _free_motion(self, system: Any, data: StepData, bound: Array) -> tuple[Reduced, Array, Array]:
        """Newton for a step without contacts: the solution, its iterations and last correction."""
        zeros = functools.partial(jnp.zeros, dtype=data.q.dtype)
        joints = system.constraint(data.t, data.q).size
        start = Reduced(
            self._guess(system, data), zeros(joints), zeros(joints if self.position_level else 0), zeros(0), zeros(0)
        )

        def body(carry):
            y, iterations, _ = carry

            def function(flat):
                return self._reduced_rows(system, data, y.with_smooth(flat)).smooth

            flat = y.smooth()
            correction = solve(jax.jacfwd(function)(flat), function(flat))
            return y.with_smooth(flat - correction), iterations + 1, jnp.max(jnp.abs(correction[: data.q.size]))

        def unfinished(carry):
            _, iterations, change = carry
            return (change > bound) & (iterations < self.max_iterations)

        return jax.lax.while_loop(unfinished, body, (start, jnp.asarray(0), jnp.asarray(jnp.inf, data.q.dtype)))

    def _guess(self, system: Any, data: StepData) -> Array:
        """Two fixed-point iterations, which cost less than the Newton iteration they save; nothing where they diverge."""
        half = data.dt / 2

        def iterate(s):
            q_mid, v_mid = data.q + half * (data.v + s), data.v + s
            return half * (data.inverse_mass @ system.force(data.t + half, q_mid, v_mid))

        first = iterate(jnp.zeros_like(data.v))
        second = iterate(first)
        return jnp.where(jnp.max(jnp.abs(second - first)) < jnp.max(jnp.abs(first)), second, 0.0)

    def _contact_iteration(self, system: Any, data: StepData, y: Reduced, active: Array) -> tuple[Reduced, Array]:
        """One Newton iteration: linearize by jacfwd, eliminate the smooth unknowns, solve both laws exactly."""

        def function(smooth, impulse, correction):
            return self._reduced_rows(system, data, y.with_smooth(smooth)._replace(impulse=impulse, correction=correction))

        point = (y.smooth(), y.impulse, y.correction)
        rows = function(*point)
        by_smooth, by_impulse, by_correction = (jax.jacfwd(function, argnums=i)(*point) for i in range(3))
        m = y.impulse.size
        columns = jnp.concatenate([rows.smooth[:, None], by_impulse.smooth, by_correction.smooth], axis=1)
        eliminated = solve(by_smooth.smooth, columns)
        move, per_impulse, per_correction = eliminated[:, 0], eliminated[:, 1 : m + 1], eliminated[:, m + 1 :]

        # rate = rate_0 + A L + B Psi and gap = gap_0 + C L + D Psi, with the smooth unknowns gone
        A = by_impulse.rate - by_smooth.rate @ per_impulse
        B = by_correction.rate - by_smooth.rate @ per_correction
        C = by_impulse.gap - by_smooth.gap @ per_impulse
        D = by_correction.gap - by_smooth.gap @ per_correction
        rate_0 = rows.rate - by_smooth.rate @ move - A @ y.impulse - B @ y.correction
        gap_0 = rows.gap - by_smooth.gap @ move - C @ y.impulse - D @ y.correction

        law = contact_rows(A, rate_0 + B @ y.correction, active, data.friction)
        response = solve_rows(A, jnp.concatenate([rate_0[:, None], B], axis=1), law)  # L = response @ (1, Psi)
        correction = y.correction
        if self.position_level:
            gap_0, D = gap_0 + C @ response[:, 0], D + C @ response[:, 1:]
            correction = solve_rows(D, gap_0, contact_rows(D, gap_0, active))
        impulse = response[:, 0] + response[:, 1:] @ correction
        smooth = point[0] - move - per_impulse @ (impulse - y.impulse) - per_correction @ (correction - y.correction)
        changes = (
            (smooth - point[0])[: data.q.size],
            A @ (impulse - y.impulse),  # not the impulses: redundant contacts share theirs in many ways
            D @ (correction - y.correction),
        )
        new = y.with_smooth(smooth)._replace(impulse=impulse, correction=correction)
        return new, jnp.max(jnp.abs(jnp.concatenate(changes)))
