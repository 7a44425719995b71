"""A mass on a spring that hits a stop."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxsim.system import Parameter, mechanism
from jaxsim.trigonometry import sin_cos


@mechanism
class ImpactOscillator:
    """Mass, spring and damper with a rigid stop below, driven harmonically; q = (displacement,), from the rest position [m].

    mass x'' + damping x' + stiffness x = drive_amplitude cos(drive_frequency t),  x >= stop. With the stop at the rest
    position and without damping and drive, impacts are half a period apart whatever the amplitude.
    """

    mass: Parameter = 1.0  # [kg]
    stiffness: Parameter = 100.0  # [N/m]
    damping: Parameter = 0.0  # [N s/m]
    stop: Parameter = 0.0  # position of the stop [m]
    drive_amplitude: Parameter = 0.0  # [N]
    drive_frequency: Parameter = 0.0  # [rad/s]
    restitution: Parameter = 0.8

    def mass_matrix(self, q: Float[Array, "1"]) -> Float[Array, "1 1"]:
        """The mass."""
        return self.mass * jnp.eye(1, dtype=q.dtype)

    def force(self, t, q: Float[Array, "1"], v: Float[Array, "1"]) -> Float[Array, "1"]:
        """Drive, spring and damper."""
        _, cos = sin_cos(jnp.asarray(self.drive_frequency * t, q.dtype))
        return self.drive_amplitude * cos - self.stiffness * q - self.damping * v

    def gap(self, t, q: Float[Array, "1"]) -> Float[Array, "1"]:
        """Distance from the stop."""
        return q - self.stop

    def potential_energy(self, t, q: Float[Array, "1"]) -> Float[Array, ""]:
        """Of the spring [J]."""
        return 0.5 * self.stiffness * q[0] ** 2

    def points(self, q: Float[Array, "1"]) -> dict[str, Float[Array, "points 2"]]:
        """The mass, as one point on the x axis [m]."""
        return {"mass": jnp.stack([q, jnp.zeros_like(q)], axis=1)}
