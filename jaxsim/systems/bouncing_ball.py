"""A ball that falls on a floor, at rest or vibrating."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsim.system import Parameter, mechanism
from jaxsim.trigonometry import sin_cos


@mechanism
class BouncingBall:
    """Ball above a fixed floor; q = (height,), of its lowest point [m].

    From rest at h0 it first lands after sqrt(2 h0 / gravity) and, for restitution < 1, comes to rest at
    (1 + restitution) / (1 - restitution) times that, after infinitely many impacts.
    """

    restitution: Parameter = 0.8
    gravity: Parameter = 9.81  # [m/s^2]
    mass: Parameter = 1.0  # [kg]

    def mass_matrix(self, q: Float[Array, "1"]) -> Float[Array, "1 1"]:
        """The mass."""
        return self.mass * jnp.eye(1, dtype=q.dtype)

    def force(self, t, q: Float[Array, "1"], v: Float[Array, "1"]) -> Float[Array, "1"]:
        """The weight."""
        return -self.mass * self.gravity * jnp.ones_like(q)

    def gap(self, t, q: Float[Array, "1"]) -> Float[Array, "1"]:
        """Height above the floor."""
        return q

    def potential_energy(self, t, q: Float[Array, "1"]) -> Float[Array, ""]:
        """Of the weight [J], zero at q = 0."""
        return self.mass * self.gravity * q[0]

    def points(self, q: Float[Array, "1"]) -> dict[str, Float[Array, "points 2"]]:
        """The ball, as one point [m]."""
        return {"ball": jnp.stack([jnp.zeros_like(q), q], axis=1)}


@mechanism
class BallOnTable(BouncingBall):
    """The ball above a table that vibrates as amplitude sin(angular_frequency t): a wall that moves.

    A ball at rest on the table lifts off where the table's deceleration exceeds gravity, first at
    arcsin(gravity / (amplitude angular_frequency^2)) / angular_frequency; where that ratio is above 1, never.
    """

    amplitude: Parameter = 0.01  # [m]
    angular_frequency: Parameter = 40.0  # [rad/s]

    def gap(self, t, q: Float[Array, "1"]) -> Float[Array, "1"]:
        """Height above the table."""
        sin, _ = sin_cos(jnp.asarray(self.angular_frequency * t, q.dtype))
        return q - self.amplitude * sin
