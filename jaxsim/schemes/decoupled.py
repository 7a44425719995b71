"""Velocity and position level one after the other: the counter-example of the Gear-Gupta-Leimkuhler paper."""

from dataclasses import dataclass
from typing import Any

import jax

from jaxsim.contact.complementarity import contact_rows, solve_rows
from jaxsim.schemes.impact_time import GRADIENTS, with_impact_times
from jaxsim.schemes.state import State, StepInfo, candidates, check_option
from jaxsim.schemes.velocity import velocity_step
from jaxsim.solve import solve_spd


@dataclass(frozen=True)
class DecoupledGearGuptaLeimkuhler:
    """Moreau's step, then a projection of the position onto the walls.

        v+ as in `jaxsim.Moreau`,   q* = q_M + dt/2 v+
        q+ = q* + Z W_M^T Psi,   0 <= Psi _|_ g(q*) + W_M Z W_M^T Psi >= 0 over the contacts with g(q*) < 0

    It keeps the gaps closed but not the energy: with `activation="start"` the projected position hides a contact from
    the impact law and energy rises, which is why the paper couples the two levels.

    Attributes:
        metric: "identity" (Z = I, the paper's) or "mass" (Z = M_M^-1).
        activation: where the velocity law looks for closed contacts: "midpoint" (g(q_M) <= 0) or "start" (g(q_n) <= 0).
        gradient: "impact-time" or "plain", as in `jaxsim.Moreau`.
    """

    metric: str = "identity"
    activation: str = "midpoint"
    gradient: str = "impact-time"

    def __post_init__(self):
        check_option("metric", self.metric, ("identity", "mass"))
        check_option("activation", self.activation, ("midpoint", "start"))
        check_option("gradient", self.gradient, GRADIENTS)

    def step(self, system: Any, state: State, t: Any, dt: Any) -> tuple[State, StepInfo]:
        """One step from t to t + dt."""
        q, v = state
        t_mid, q_mid = t + dt / 2, q + dt / 2 * v
        seen = system.gap(t_mid, q_mid) if self.activation == "midpoint" else system.gap(t, q)
        impact = velocity_step(system, t_mid, q_mid, v, dt, seen)
        q_star = q_mid + dt / 2 * impact.v
        gap = system.gap(t + dt, q_star)
        contacts = candidates(system, gap)
        W = contacts.pick(impact.directions)
        response = W.T if self.metric == "identity" else solve_spd(impact.mass, W.T)
        D, violation = W @ response, contacts.pick(gap)
        correction = solve_rows(D, violation, contact_rows(D, violation, violation < 0))
        push = response @ correction
        if self.gradient != "plain":  # it may hide an impact that comes in the next step, but not from the derivative
            push = jax.lax.stop_gradient(push)
        return with_impact_times(self.gradient, system, state, t, dt, State(q_star + push, impact.v), impact.info)
