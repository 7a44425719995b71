"""What a run returns."""

import dataclasses
from dataclasses import dataclass, field

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxsim.schemes.state import ImpactLog


class SimulationError(RuntimeError):
    """A step did not converge or turned non-finite."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Trajectory:
    """A simulated motion: time-major arrays of `rows` stored states, and what is known of all steps.

    `impulse`, `friction_impulse`, `joint_impulse` and `iterations` of a row are sums over the steps since the row before
    (the first row is the start: zeros); `converged` says whether all of those steps did. A trajectory made under
    `jax.vmap` carries the batch axis in front of every array.
    """

    t: Float[Array, "*batch rows"]  # [s]
    q: Float[Array, "*batch rows n"]
    v: Float[Array, "*batch rows n"]
    gap: Float[Array, "*batch rows contacts"]  # g(t, q) [m]
    gap_rate: Float[Array, "*batch rows contacts"]  # [m/s]
    energy: Float[Array, "*batch rows"]  # T + V [J]
    impulse: Float[Array, "*batch rows contacts"]  # normal [N s]
    friction_impulse: Float[Array, "*batch rows rubbing"]  # tangential [N s], one per contact with friction, else none
    joint_impulse: Float[Array, "*batch rows joints"]  # bilateral
    iterations: Int[Array, "*batch rows"]  # Newton iterations
    converged: Bool[Array, "*batch rows"]
    min_gap: Float[Array, "*batch contacts"]  # over all steps [m]
    closed_steps: Int[Array, "*batch contacts"]  # steps with an impulse, per contact
    steps_in_contact: Int[Array, "*batch"]  # steps with any impulse
    failed_step: Int[Array, "*batch"]  # first step that failed, -1 if none did
    failed_time: Float[Array, "*batch"]  # its time [s], nan if none
    failed_residual: Float[Array, "*batch"]
    failed_active: Bool[Array, "*batch contacts"]
    dt: Float[Array, "*batch"]  # [s]
    impacts: ImpactLog | None  # of a scheme that resolves them, `jaxsim.EventDriven`
    num_steps: int = field(metadata={"static": True})

    def raise_if_failed(self) -> "Trajectory":
        """Return self, or raise for the first step that did not converge or turned non-finite.

        Raises:
            SimulationError: with the time, residual and active contacts of the first failing step (of the first failing
                run of a batch).
        """
        steps = np.atleast_1d(np.asarray(self.failed_step))
        failing = np.argwhere(steps >= 0)
        if not failing.size:
            return self
        index = tuple(failing[0]) if np.ndim(self.failed_step) else ()
        active = np.flatnonzero(np.asarray(self.failed_active)[index]).tolist()
        lane = f"run {list(map(int, index))} ({len(failing)} of {steps.size} runs failed): " if index else ""
        remedy = "a smaller dt usually helps"
        if self.impacts is not None:
            remedy = "more impacts per step (max_impacts of the scheme) or a smaller dt usually help"
        raise SimulationError(
            f"{lane}step {int(np.asarray(self.failed_step)[index])} at t = {np.asarray(self.failed_time)[index]:.9g} s "
            f"failed: residual {np.asarray(self.failed_residual)[index]:.3g}, "
            f"active contacts {active if active else 'none'}; {remedy}"
        )

    def summary(self) -> str:
        """One paragraph of text: span, energy, smallest gap, contact, iterations, failures (single runs)."""
        if np.ndim(self.dt):
            steps = np.atleast_1d(np.asarray(self.failed_step))
            return f"{steps.size} runs of {self.num_steps} steps, {int(np.sum(steps >= 0))} of them with a failed step"
        energy = np.asarray(self.energy)
        lines = [
            f"t = {float(self.t[0]):g} .. {float(self.t[-1]):g} s, {self.num_steps} steps of {float(self.dt):g} s, "
            f"{len(self.t)} rows stored",
            f"energy {energy[0]:.9g} -> {energy[-1]:.9g} J",
        ]
        if self.min_gap.size:
            lines.append(
                f"smallest gap {float(np.min(self.min_gap)):.3e} m, "
                f"in contact in {100 * int(self.steps_in_contact) / self.num_steps:.2f} % of the steps"
            )
        lines.append(f"{int(np.sum(self.iterations)) / self.num_steps:.2f} Newton iterations per step")
        failed = int(self.failed_step)
        lines.append("all steps converged" if failed < 0 else f"step {failed} failed at t = {float(self.failed_time):g} s")
        return "\n".join(lines)

    def __repr__(self) -> str:
        shapes = ", ".join(
            f"{item.name}{tuple(np.shape(getattr(self, item.name)))}"
            for item in dataclasses.fields(self)
            if item.name in ("t", "q", "gap", "joint_impulse")
        )
        return f"Trajectory({self.num_steps} steps; {shapes})"
