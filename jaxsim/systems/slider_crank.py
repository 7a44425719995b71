"""The planar slider-crank mechanism whose slider rattles in its guide.

Source: Schoeder, Ulbrich, Schindler, "Discussion of the Gear-Gupta-Leimkuhler method for impacting mechanical systems",
doi 10.1007/s11044-013-9370-y: equations (14)-(20) and Table 1.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsim.system import Parameter, mechanism
from jaxsim.trigonometry import sin_cos


@mechanism
class SliderCrank:
    """Slider-crank with translational clearance; q = (theta1, theta2, theta3), absolute angles [rad].

    Crank (1), connecting rod (2) and slider (3) of length 2 a and height 2 b in a notch of height d = 2 (b + c).
    The four contacts are the slider's corners: 0 and 1 (g1, g2) against the upper, 2 and 3 (g3, g4) against the lower
    wall. Since g1 + g3 > 0 and g2 + g4 > 0, at most two are closed at once. No drive, no friction.

    Defaults are Table 1, in SI units; `restitution` is a number or one value per contact.
    """

    l1: Parameter = 0.153  # crank length [m]
    l2: Parameter = 0.306  # rod length [m]
    a: Parameter = 0.05  # half the slider's length [m]
    b: Parameter = 0.025  # half the slider's height [m]
    c: Parameter = 0.001  # clearance on each side [m]
    m1: Parameter = 0.038  # masses [kg]
    m2: Parameter = 0.038
    m3: Parameter = 0.076
    J1: Parameter = 7.4e-5  # moments of inertia about the centres of gravity [kg m^2]
    J2: Parameter = 5.9e-4
    J3: Parameter = 2.7e-6
    gravity: Parameter = 9.81  # [m/s^2], towards negative y
    restitution: Parameter = 0.1

    opposing = ((0, 2), (1, 3))

    @property
    def d(self):
        """Height of the notch [m]."""
        return 2 * (self.b + self.c)

    def mass_matrix(self, q: Float[Array, "3"]) -> Float[Array, "3 3"]:
        """M of (19)."""
        sin, cos = sin_cos(q)  # of all angles at once, here and below, so that XLA shares them
        coupling = self._coupling * (cos[0] * cos[1] + sin[0] * sin[1])
        crank = self.J1 + self.l1**2 * (self.m1 / 4 + self.m2 + self.m3)
        rod = self.J2 + self.l2**2 * (self.m2 / 4 + self.m3)
        return jnp.array([[crank, coupling, 0], [coupling, rod, 0], [0, 0, self.J3]])

    def force(self, t, q: Float[Array, "3"], v: Float[Array, "3"]) -> Float[Array, "3"]:
        """h of (20)."""
        sin, cos = sin_cos(q)
        coupling = self._coupling * (sin[0] * cos[1] - cos[0] * sin[1])
        weight1, weight2 = self._weights
        return jnp.array(
            [
                -coupling * v[1] ** 2 - weight1 * cos[0],
                coupling * v[0] ** 2 - weight2 * cos[1],
                jnp.zeros_like(q[2]),
            ]
        )

    def gap(self, t, q: Float[Array, "3"]) -> Float[Array, "4"]:
        """g1..g4 of (14)-(17)."""
        sin, cos = sin_cos(q)
        y = self.l1 * sin[0] + self.l2 * sin[1]
        tilt = self.a * sin[2]
        half = self.d / 2 - self.b * cos[2]
        return jnp.array([half - y + tilt, half - y - tilt, half + y - tilt, half + y + tilt])

    def potential_energy(self, t, q: Float[Array, "3"]) -> Float[Array, ""]:
        """Weight of the three bodies [J], zero at y = 0."""
        weight1, weight2 = self._weights
        return weight1 * jnp.sin(q[0]) + weight2 * jnp.sin(q[1])

    @property
    def _coupling(self):
        return self.l1 * self.l2 * (self.m2 / 2 + self.m3)

    @property
    def _weights(self):
        weight1 = self.gravity * self.l1 * (self.m1 / 2 + self.m2 + self.m3)
        return weight1, self.gravity * self.l2 * (self.m2 / 2 + self.m3)

    def slider_position(self, q: Float[Array, "*batch 3"]) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
        """Centre of gravity (x3, y3) of the slider [m]; a trajectory's q works as well as one state's."""
        x = self.l1 * jnp.cos(q[..., 0]) + self.l2 * jnp.cos(q[..., 1])
        y = self.l1 * jnp.sin(q[..., 0]) + self.l2 * jnp.sin(q[..., 1])
        return x, y

    def points(self, q: Float[Array, "3"]) -> dict[str, Float[Array, "points 2"]]:
        """Outlines to draw: name to corner points [m]."""
        crank_end = self.l1 * jnp.array([jnp.cos(q[0]), jnp.sin(q[0])])
        centre = jnp.stack(self.slider_position(q))
        turn = jnp.array([[jnp.cos(q[2]), -jnp.sin(q[2])], [jnp.sin(q[2]), jnp.cos(q[2])]])
        corners = jnp.array([[-self.a, -self.b], [self.a, -self.b], [self.a, self.b], [-self.a, self.b]])
        outline = centre + corners @ turn.T
        return {
            "crank": jnp.stack([jnp.zeros(2), crank_end]),
            "rod": jnp.stack([crank_end, centre]),
            "slider": jnp.concatenate([outline, outline[:1]]),
        }


@mechanism
class IdealSliderCrank(SliderCrank):
    """The same mechanism without clearance: the slider's centre stays on y = 0, a bilateral constraint."""

    opposing = ()

    def gap(self, t, q: Float[Array, "3"]) -> Float[Array, "0"]:
        """No unilateral contact."""
        return jnp.zeros((0,), q.dtype)

    def constraint(self, t, q: Float[Array, "3"]) -> Float[Array, "1"]:
        """l1 sin theta1 + l2 sin theta2 = 0."""
        return (self.l1 * jnp.sin(q[0]) + self.l2 * jnp.sin(q[1]))[None]
