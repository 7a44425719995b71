"""A block with Coulomb friction on a plane, level or inclined."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsim.system import Parameter, mechanism
from jaxsim.trigonometry import sin_cos


@mechanism
class SlidingBlock:
    """Block, as a point mass, on a plane; q = (x, y), along the plane, upwards where it is inclined, and away from it [m].

    On a level plane it slides v0^2 / (2 friction gravity) before it stops; a pull below friction mass gravity does not move
    it, a larger one gives it the acceleration pull / mass - friction gravity.
    """

    mass: Parameter = 1.0  # [kg]
    gravity: Parameter = 9.81  # [m/s^2]
    friction: Parameter = 0.3
    pull: Parameter = 0.0  # force along the plane, towards positive x [N]
    inclination: Parameter = 0.0  # of the plane [rad]
    restitution: Parameter = 0.0

    def mass_matrix(self, q: Float[Array, "2"]) -> Float[Array, "2 2"]:
        """The mass in both directions."""
        return self.mass * jnp.eye(2, dtype=q.dtype)

    def force(self, t, q: Float[Array, "2"], v: Float[Array, "2"]) -> Float[Array, "2"]:
        """Pull and weight."""
        along, across = self._weight(q)
        return jnp.array([self.pull - along, -across])

    def gap(self, t, q: Float[Array, "2"]) -> Float[Array, "1"]:
        """Distance from the plane."""
        return q[1:]

    def slip(self, t, q: Float[Array, "2"], v: Float[Array, "2"]) -> Float[Array, "1"]:
        """Velocity along the plane."""
        return v[:1]

    def potential_energy(self, t, q: Float[Array, "2"]) -> Float[Array, ""]:
        """Of the weight [J], zero at q = 0; the pull counts as an outer force."""
        along, across = self._weight(q)
        return along * q[0] + across * q[1]

    def _weight(self, q):
        sin, cos = sin_cos(jnp.asarray(self.inclination, q.dtype))
        return self.mass * self.gravity * sin, self.mass * self.gravity * cos

    def points(self, q: Float[Array, "2"]) -> dict[str, Float[Array, "points 2"]]:
        """The block, as one point of the upright plane [m]."""
        sin, cos = sin_cos(jnp.asarray(self.inclination, q.dtype))
        return {"block": jnp.array([[cos * q[0] - sin * q[1], sin * q[0] + cos * q[1]]])}
