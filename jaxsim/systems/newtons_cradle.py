"""Newton's cradle: a row of balls on strings that hit each other."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsim.system import Parameter, mechanism


@mechanism
class NewtonsCradle:
    """Any number of balls in a row; q = displacements x_i of the balls from where they hang at rest [m].

    One-dimensional: each ball is a mathematical pendulum of small amplitude, pulled back by masses gravity / length x_i;
    gravity = 0 leaves balls that slide on a line. Contact i is that of the balls i and i + 1.
    """

    masses: Parameter = (0.1, 0.1, 0.1, 0.1, 0.1)  # one per ball [kg]
    diameter: Parameter = 0.03  # for drawing [m]
    clearance: Parameter = 0.0  # between neighbours at rest, one value or one per contact [m]
    length: Parameter = 0.2  # of the strings [m]
    gravity: Parameter = 9.81  # [m/s^2]
    restitution: Parameter = 0.95  # one value or one per contact

    def mass_matrix(self, q: Float[Array, " balls"]) -> Float[Array, "balls balls"]:
        """The masses on the diagonal."""
        return jnp.eye(q.size, dtype=q.dtype) * jnp.asarray(self.masses)

    def force(self, t, q: Float[Array, " balls"], v: Float[Array, " balls"]) -> Float[Array, " balls"]:
        """Towards the rest positions."""
        return -jnp.asarray(self.masses) * (self.gravity / self.length) * q

    def gap(self, t, q: Float[Array, " balls"]) -> Float[Array, " contacts"]:
        """Distances between neighbours."""
        return q[1:] - q[:-1] + self.clearance

    def potential_energy(self, t, q: Float[Array, " balls"]) -> Float[Array, ""]:
        """Of the weights [J], zero at rest."""
        return 0.5 * (self.gravity / self.length) * jnp.sum(jnp.asarray(self.masses) * q**2)

    def points(self, q: Float[Array, " balls"]) -> dict[str, Float[Array, "points 2"]]:
        """The strings, from where they hang to the centres of the balls [m]."""
        between = jnp.broadcast_to(jnp.asarray(self.diameter + self.clearance, q.dtype), (q.size - 1,))
        hinges = jnp.concatenate([jnp.zeros(1, q.dtype), jnp.cumsum(between)])
        drop = jnp.sqrt(jnp.maximum(self.length**2 - q**2, 0.0))
        return {
            f"ball {i + 1}": jnp.array([[hinges[i], self.length], [hinges[i] + q[i], self.length - drop[i]]])
            for i in range(q.size)
        }
