"""A rectangular block that stands, rocks and slides on the ground.

Source: Housner, "The behavior of inverted pendulum structures during earthquakes", Bull. Seism. Soc. Am. 53 (1963), for the
block that does not slide.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsim.system import Parameter, mechanism
from jaxsim.trigonometry import sin_cos


@mechanism
class RockingBlock:
    """Homogeneous block in the plane; q = (x, y, phi), centre of gravity [m] and tilt, counterclockwise [rad].

    The contacts are its lower left (0) and lower right (1) corner; upright on the ground, y = height / 2. With restitution 0
    and friction enough to stick it is Housner's block: on one corner (inertia + mass R^2) phi'' = -+ mass gravity R
    sin(alpha -+ phi), and when it changes corners phi' falls by the factor 1 - 3/2 sin(alpha)^2, where R is half the
    diagonal and tan(alpha) = width / height.
    """

    width: Parameter = 0.2  # [m]
    height: Parameter = 0.6  # [m]
    mass: Parameter = 1.0  # [kg]
    gravity: Parameter = 9.81  # [m/s^2]
    restitution: Parameter = 0.0
    friction: Parameter = 0.5

    @property
    def inertia(self):
        """About the centre of gravity [kg m^2]."""
        return self.mass * (self.width**2 + self.height**2) / 12

    def standing(self, phi: float | Float[Array, ""]) -> Float[Array, "3"]:
        """The coordinates of the block that stands tilted by phi on the one corner or, for phi = 0, on both.

        The corner is where it is when the block stands upright over x = 0.
        """
        sin, cos = sin_cos(jnp.asarray(phi, jnp.result_type(float)))
        side = jnp.where(sin >= 0, 1.0, -1.0)
        x = side * (self.width / 2) * (cos - 1) - (self.height / 2) * sin
        return jnp.array([x, (self.height / 2) * cos + (self.width / 2) * jnp.abs(sin), phi])

    def mass_matrix(self, q: Float[Array, "3"]) -> Float[Array, "3 3"]:
        """Mass and moment of inertia on the diagonal."""
        return jnp.array([[self.mass, 0, 0], [0, self.mass, 0], [0, 0, self.inertia]], q.dtype)

    def force(self, t, q: Float[Array, "3"], v: Float[Array, "3"]) -> Float[Array, "3"]:
        """The weight."""
        return jnp.array([0, -self.mass * self.gravity, 0], q.dtype)

    def gap(self, t, q: Float[Array, "3"]) -> Float[Array, "2"]:
        """Heights of the two corners."""
        sin, cos = sin_cos(q[2])
        across, up = sin * self.width / 2, cos * self.height / 2
        return jnp.array([q[1] - across - up, q[1] + across - up])

    def slip(self, t, q: Float[Array, "3"], v: Float[Array, "3"]) -> Float[Array, "2"]:
        """Horizontal velocities of the two corners."""
        sin, cos = sin_cos(q[2])
        across, up = sin * self.width / 2, cos * self.height / 2
        return jnp.array([v[0] + (across + up) * v[2], v[0] - (across - up) * v[2]])

    def potential_energy(self, t, q: Float[Array, "3"]) -> Float[Array, ""]:
        """Of the weight [J], zero where the centre is on the ground."""
        return self.mass * self.gravity * q[1]

    def points(self, q: Float[Array, "3"]) -> dict[str, Float[Array, "points 2"]]:
        """Outline of the block [m], closed."""
        sin, cos = sin_cos(q[2])
        turn = jnp.array([[cos, -sin], [sin, cos]])
        corners = jnp.array([[-1, -1], [1, -1], [1, 1], [-1, 1], [-1, -1]]) * jnp.array([self.width / 2, self.height / 2])
        return {"block": q[:2] + corners @ turn.T}
