"""Moreau's midpoint rule: impacts and contact on velocity level.

Sources: Moreau, "Unilateral contact and dry friction in finite freedom dynamics", 1988; section 1 of Schoeder, Ulbrich,
Schindler, doi 10.1007/s11044-013-9370-y, who measure the drift of the gaps that it allows.
"""

from dataclasses import dataclass
from typing import Any

from jaxsim.schemes.impact_time import GRADIENTS, with_impact_times
from jaxsim.schemes.state import State, StepInfo, check_option
from jaxsim.schemes.velocity import velocity_step


@dataclass(frozen=True)
class Moreau:
    """Moreau's midpoint rule.

        q_M = q_n + dt/2 v_n
        v+  = v_n + M_M^-1 (h(q_M, v_n) dt + W_M^T L),   0 <= gdot+ + eps gdot_n _|_ L >= 0 where g(q_M) <= 0
        q+  = q_M + dt/2 v+

    One evaluation of M, h, W per step and an exact solution of the small complementarity problem. First order;
    closed contacts drift by Wdot v dt (1 - eps) / (2 (1 + eps)) per unit of time, since only velocities are constrained.
    Coulomb friction: L_T = prox_[-mu L, mu L](L_T - r slip+).

    Attributes:
        gradient: "impact-time" (derivatives as of the event-resolved motion, see `jaxsim.schemes.impact_time`) or "plain"
            (of the step as computed, wrong through impacts whatever the step); the motion is the same.

    Raises:
        ValueError: for an unknown option.
    """

    gradient: str = "impact-time"

    def __post_init__(self):
        check_option("gradient", self.gradient, GRADIENTS)

    def step(self, system: Any, state: State, t: Any, dt: Any) -> tuple[State, StepInfo]:
        """One step from t to t + dt."""
        q, v = state
        q_mid = q + dt / 2 * v
        gap = system.gap(t + dt / 2, q_mid)
        impact = velocity_step(system, t + dt / 2, q_mid, v, dt, gap)
        new = State(q_mid + dt / 2 * impact.v, impact.v)
        return with_impact_times(self.gradient, system, state, t, dt, new, impact.info)
