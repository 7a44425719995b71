"""A double pendulum beside a wall, from its energies alone."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsim.system import Parameter, mechanism


@mechanism
class DoublePendulum:
    """Two point masses on massless rods that hit a wall; q = (phi1, phi2), absolute angles from the downward vertical [rad].

    The contacts are the two masses, against the vertical wall at x = wall.
    """

    l1: Parameter = 1.0  # lengths of the rods [m]
    l2: Parameter = 1.0
    m1: Parameter = 1.0  # [kg]
    m2: Parameter = 1.0
    gravity: Parameter = 9.81  # [m/s^2]
    wall: Parameter = 1.2  # [m]
    restitution: Parameter = 0.8

    def kinetic_energy(self, q: Float[Array, "2"], v: Float[Array, "2"]) -> Float[Array, ""]:
        """Of the two masses [J]."""
        w1, w2 = self.l1 * v[0], self.l2 * v[1]
        return 0.5 * self.m1 * w1**2 + 0.5 * self.m2 * (w1**2 + w2**2 + 2 * w1 * w2 * jnp.cos(q[0] - q[1]))

    def potential_energy(self, t, q: Float[Array, "2"]) -> Float[Array, ""]:
        """Of the weights [J], zero at the hinge."""
        (_, y1), (_, y2) = self.positions(q)
        return self.gravity * (self.m1 * y1 + self.m2 * y2)

    def positions(self, q: Float[Array, "2"]) -> Float[Array, "2 2"]:
        """(x, y) of the two masses, one per row [m]."""
        elbow = self.l1 * jnp.array([jnp.sin(q[0]), -jnp.cos(q[0])])
        return jnp.stack([elbow, elbow + self.l2 * jnp.array([jnp.sin(q[1]), -jnp.cos(q[1])])])

    def gap(self, t, q: Float[Array, "2"]) -> Float[Array, "2"]:
        """Distances of the two masses from the wall."""
        return self.wall - self.positions(q)[:, 0]

    def points(self, q: Float[Array, "2"]) -> dict[str, Float[Array, "points 2"]]:
        """The two rods as one line [m]."""
        return {"pendulum": jnp.concatenate([jnp.zeros((1, 2)), self.positions(q)])}
