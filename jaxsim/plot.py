"""Figures of single runs, drawn with matplotlib, which is imported when the first of them is drawn.

Every function draws into the axes it is given, or into a new figure, and returns the axes. `ax.figure.savefig("name.png")`
saves the figure; `ax.set_xlim` and `ax.set_ylim` choose a detail.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxsim.trajectory import Trajectory


def gaps(trajectory: Trajectory, *, contacts: Sequence[int] | None = None, axes: Any = None) -> Any:
    """Gaps above, gap rates below, over time; the times in which one of the contacts is closed are shaded.

    Args:
        trajectory: a single run.
        contacts: which contacts to draw, numbered from 0 (contact 0 is called g1); all of them by default.
        axes: a pair of axes to draw into.

    Returns:
        The pair of axes.

    Raises:
        ValueError: for a batch of runs, or contacts that the run does not have.
        ImportError: without matplotlib.
    """
    _check_single(trajectory)
    count = trajectory.gap.shape[-1]
    chosen = range(count) if contacts is None else list(contacts)
    if not chosen or not set(chosen) <= set(range(count)):
        raise ValueError(f"no such contacts to draw: contacts = {contacts}, and the trajectory has {count}")
    if axes is None:
        axes = _pyplot().subplots(2, 1, sharex=True, layout="constrained")[1]
    upper, lower = axes
    t, gap, rate, impulse = (
        np.asarray(values) for values in (trajectory.t, trajectory.gap, trajectory.gap_rate, trajectory.impulse)
    )
    for i in chosen:
        # contacts that move together cover each other: every second one is dashed
        style = {"color": f"C{i % 10}", "linestyle": ("-", (0, (4, 4)))[i % 2], "linewidth": 1.2}
        upper.plot(t, gap[:, i], label=f"g{i + 1}", **style)
        lower.plot(t, rate[:, i], label=f"g{i + 1}", **style)
    closed = _phases(t, np.max(impulse[:, list(chosen)], axis=1) > 0)
    upper.set_ylabel("gap [m]")
    lower.set_ylabel("gap rate [m/s]")
    lower.set_xlabel("t [s]")
    for ax in axes:
        ax.broken_barh(closed, (0, 1), transform=ax.get_xaxis_transform(), color="0.9", linewidth=0, label="closed")
        ax.axhline(0.0, color="black", linewidth=0.8, zorder=1)
        ax.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    upper.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(chosen) + 1, frameon=False)
    return axes


def energy(trajectories: Trajectory | Sequence[Trajectory], labels: Sequence[str] | None = None, *, ax: Any = None) -> Any:
    """Energy T + V of one or several runs over time.

    Args:
        trajectories: single runs.
        labels: one name per run, for the legend.
        ax: axes to draw into.

    Returns:
        The axes.

    Raises:
        ValueError: for a batch of runs, or labels that do not fit.
        ImportError: without matplotlib.
    """
    runs = [trajectories] if isinstance(trajectories, Trajectory) else list(trajectories)
    if labels is not None and len(labels) != len(runs):
        raise ValueError(f"{len(labels)} labels for {len(runs)} trajectories")
    for run in runs:
        _check_single(run)
    if ax is None:
        ax = _pyplot().subplots(layout="constrained")[1]
    for run, label in zip(runs, labels or [None] * len(runs), strict=True):
        ax.plot(np.asarray(run.t), np.asarray(run.energy), linewidth=1.2, label=label)
    ax.set_xlabel("t [s]")
    ax.set_ylabel("energy T + V [J]")
    if labels:
        ax.legend(frameon=False)
    return ax


def _phases(t: np.ndarray, closed: np.ndarray) -> list[tuple[float, float]]:
    """(begin, length) of the phases in which `closed` holds; what a row says covers the time since the row before."""
    change = np.diff(closed.astype(int), prepend=0, append=0)
    first, last = np.flatnonzero(change == 1), np.flatnonzero(change == -1) - 1
    begin = t[np.maximum(first - 1, 0)]
    return list(zip(begin.tolist(), (t[last] - begin).tolist(), strict=True))


def _check_single(trajectory: Trajectory) -> None:
    if np.ndim(trajectory.t) != 1:
        raise ValueError(
            f"the trajectory is a batch of runs, its t has shape {np.shape(trajectory.t)}; "
            "take one of them, as in jax.tree.map(lambda x: x[0], trajectory)"
        )


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot
    except ModuleNotFoundError as error:
        raise ImportError("jaxsim.plot needs matplotlib: pip install 'nonsmooth-jaxsim[plot]'") from error
    return matplotlib.pyplot
