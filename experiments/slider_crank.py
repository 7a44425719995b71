"""The slider-crank with clearance: Moreau's midpoint rule against the unified Gear-Gupta-Leimkuhler scheme.

Repeats the experiment of Schoeder, Ulbrich, Schindler, "Discussion of the Gear-Gupta-Leimkuhler method for impacting
mechanical systems", doi 10.1007/s11044-013-9370-y: Table 1, figures 3, 4, 8, 9 and 10. Where contacts stay closed, Moreau's
rule lets the slider drift into the wall; the unified scheme holds it on the wall and changes the energy only slightly.

    python -m experiments.slider_crank
"""

import argparse
import contextlib
import csv
import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
from tqdm.auto import tqdm

import jaxsim
from jaxsim import plot

Q0 = [0.0, 0.0, 0.0]  # [rad]
V0 = [150.0, -75.0, 0.0]  # [rad/s]
SCHEMES = {
    "moreau": jaxsim.Moreau(),
    "reference": jaxsim.GearGuptaLeimkuhler.paper(position_level=False),
    "unified": jaxsim.GearGuptaLeimkuhler.paper(),
    "default": jaxsim.GearGuptaLeimkuhler(),
}
TITLES = {
    "moreau": "Moreau's midpoint rule",
    "reference": "Reference line: unified scheme without position level",
    "unified": "Unified Gear-Gupta-Leimkuhler scheme (36)-(42)",
    "default": "Default of jaxsim: exact gaps and gap rates, mass metric",
}
STYLES: dict[str, dict[str, Any]] = {  # of curves that cover each other
    "moreau": {"linewidth": 4, "alpha": 0.4},
    "reference": {"linewidth": 1.5, "linestyle": "--"},
    "unified": {"linewidth": 2, "linestyle": ":"},
    "default": {"linewidth": 1.5},
}
IN_PAPER = {"slider_moreau": 3, "gaps_moreau": 4, "slider_unified": 8, "gaps_unified": 9, "energy": 10}
SHOWN = 0.2  # [s] of the motion in the figures of slider and gaps
TIMED_STEPS, REPETITIONS = 200_000, 5


@dataclasses.dataclass
class Run:
    """One scheme with one restitution; `seconds` are those of the timed repetitions, per step."""

    scheme: str
    restitution: float
    trajectory: jaxsim.Trajectory
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def system(self) -> Any:
        return jaxsim.systems.SliderCrank(restitution=self.restitution)

    @property
    def failure(self) -> str:
        """What went wrong, or nothing."""
        try:
            self.trajectory.raise_if_failed()
        except jaxsim.SimulationError as error:
            return str(error)
        return ""

    def slider_extremes(self) -> tuple[float, float]:
        """Lowest and highest y3 [m] over all steps, stored or not, from the smallest gaps.

        With theta3 = 0, which the symmetric start keeps to rounding, y3 = c - g1 = g3 - c; nan should the slider tilt.
        """
        tilt = self.system.a * np.max(np.abs(self.trajectory.q[:, 2]))
        if not tilt < 1e-9:
            return math.nan, math.nan
        upper, lower = np.asarray(self.trajectory.min_gap).reshape(2, 2).min(axis=1)
        return float(lower - self.system.c), float(self.system.c - upper)


# The computation ---------------------------------------------------------------------------------------------------------


def simulate(scheme: str, restitution: float, dt: float, num_steps: int, save_every: int) -> jaxsim.Trajectory:
    system = jaxsim.systems.SliderCrank(restitution=restitution)
    trajectory = jaxsim.simulate(system, Q0, V0, dt=dt, num_steps=num_steps, scheme=SCHEMES[scheme], save_every=save_every)
    return jax.block_until_ready(trajectory)


@contextlib.contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Ctrl-C sets the event; a KeyboardInterrupt gets lost where it is raised in a callback of JAX."""
    asked = threading.Event()

    def note(*_: Any) -> None:
        asked.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("\nstopping after this run; Ctrl-C again stops at once", file=sys.stderr)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def compute(args: argparse.Namespace, runs: list[Run]) -> None:
    """Fill `runs` one by one, then time them; what an interrupt leaves in it is complete."""
    pairs = [(scheme, restitution) for scheme in args.schemes for restitution in args.restitution]
    timed = min(args.num_steps, TIMED_STEPS)
    total = len(pairs) * args.num_steps + (len(args.schemes) + REPETITIONS * len(pairs)) * timed
    with interrupts() as asked, tqdm(total=total, unit="step", unit_scale=True, disable=None) as bar:

        def advance(steps: int) -> None:
            bar.update(steps)
            if asked.is_set():
                raise KeyboardInterrupt

        compiled = None
        for scheme, restitution in pairs:
            bar.set_description(f"{scheme}, eps = {restitution:g}{'' if scheme == compiled else ', compiling'}")
            trajectory = simulate(scheme, restitution, args.dt, args.num_steps, args.save_every)
            runs.append(Run(scheme, restitution, trajectory))
            compiled = scheme
            advance(args.num_steps)
        bar.set_description("timing, compiling")
        for scheme in args.schemes:
            simulate(scheme, args.restitution[0], args.dt, timed, timed)
            advance(timed)
        bar.set_description("timing")
        for _ in range(REPETITIONS):
            for run in sorted(runs, key=lambda run: run.restitution):  # the schemes of one restitution after one another
                start = time.perf_counter()
                simulate(run.scheme, run.restitution, args.dt, timed, timed)
                run.seconds.append((time.perf_counter() - start) / timed)
                advance(timed)


# The table ---------------------------------------------------------------------------------------------------------------

# Column: heading in Markdown, format there
COLUMNS = {
    "scheme": ("scheme", "{}"),
    "restitution": ("eps", "{:g}"),
    "y3_min_m": ("min y3 [mm]", "{:.6f}"),
    "y3_max_m": ("max y3 [mm]", "{:.6f}"),
    "min_gap_m": ("min gap [m]", "{:.1e}"),
    "final_energy_J": ("E(end) [J]", "{:.5f}"),
    "contact_percent": ("contact [%]", "{:.2f}"),
    "iterations_per_step": ("Newton/step", "{:.2f}"),
    "microseconds_per_step": ("us/step", "{:.2f}"),
    "ratio_to_moreau": ("/ Moreau", "{:.1f}"),
    "failure": ("failure", "{}"),
}


def table(runs: list[Run]) -> list[dict[str, Any]]:
    """One row per run, in SI units; the ratio to Moreau is the median over the rounds, in which both ran side by side."""
    moreau = {run.restitution: run.seconds for run in runs if run.scheme == "moreau"}
    rows = []
    for run in runs:
        trajectory, low_high = run.trajectory, run.slider_extremes()
        ratios = [own / other for own, other in zip(run.seconds, moreau.get(run.restitution, ()), strict=False)]
        rows.append(
            {
                "scheme": run.scheme,
                "restitution": run.restitution,
                "y3_min_m": low_high[0],
                "y3_max_m": low_high[1],
                "min_gap_m": float(np.min(trajectory.min_gap)),
                "final_energy_J": float(trajectory.energy[-1]),
                "contact_percent": 100 * int(trajectory.steps_in_contact) / trajectory.num_steps,
                "iterations_per_step": int(np.sum(trajectory.iterations)) / trajectory.num_steps,
                "microseconds_per_step": 1e6 * statistics.median(run.seconds or [math.nan]),
                "ratio_to_moreau": statistics.median(ratios or [math.nan]),
                "failure": run.failure,
            }
        )
    return rows


def as_markdown(rows: list[dict[str, Any]]) -> str:
    columns = {name: style for name, style in COLUMNS.items() if name != "failure" or any(row["failure"] for row in rows)}

    def cell(name: str, value: Any) -> str:
        if isinstance(value, float) and math.isnan(value):
            return "-"
        return columns[name][1].format(1e3 * value if name.startswith("y3") else value)

    lines = [[heading for heading, _ in columns.values()]] + [[cell(name, row[name]) for name in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numeric = [name not in ("scheme", "failure") for name in columns]

    def text(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * (width - right) + ":" * right for width, right in zip(widths, numeric, strict=True)]
    return "\n".join(map(text, [lines[0], rule, *lines[1:]])) + "\n"


# The figures -------------------------------------------------------------------------------------------------------------


def draw(runs: list[Run], args: argparse.Namespace) -> list[str]:
    """Save all figures that the runs allow; their file names."""
    smallest = [run for run in runs if run.restitution == min(args.restitution)]
    figures = {}
    for scheme in dict.fromkeys(run.scheme for run in runs):
        figures[f"slider_{scheme}"] = draw_slider([run for run in runs if run.scheme == scheme])
    for run in smallest:
        figures[f"gaps_{run.scheme}"] = draw_gaps(run)
    sound = [run for run in smallest if not run.failure]
    if any(np.min(run.trajectory.min_gap) < 0 for run in sound):
        figures["drift"] = draw_drift(sound)
    if smallest:
        figures["energy"] = draw_energy(smallest)
    for name, figure in figures.items():
        if name in IN_PAPER:
            figure.suptitle(f"{figure.get_suptitle()} (as figure {IN_PAPER[name]} of the paper)", fontsize=11)
        figure.savefig(args.output / f"{name}.png", dpi=130)
        plt.close(figure)
    return [f"{name}.png" for name in figures]


def draw_slider(runs: list[Run]) -> Any:
    """As figures 3 and 8: the slider's centre between its clearances, for each restitution."""
    rows = -(-len(runs) // 2)
    figure, axes = plt.subplots(
        rows, min(len(runs), 2), figsize=(10, 1 + 2.4 * rows), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    figure.suptitle(f"{TITLES[runs[0].scheme]}: centre of the slider, dashed: clearance +-c", fontsize=11)
    for ax in axes.flat[len(runs) :]:
        ax.set_visible(False)
    for ax, run in zip(axes.flat, runs, strict=False):
        shown = np.asarray(run.trajectory.t) <= SHOWN
        _, y = run.system.slider_position(run.trajectory.q[shown])
        ax.plot(run.trajectory.t[shown], 1e3 * y, linewidth=1)
        ax.set_xlim(0, min(SHOWN, float(run.trajectory.t[-1])))
        for wall in (-1e3 * run.system.c, 1e3 * run.system.c):
            ax.axhline(wall, color="black", linewidth=0.8, linestyle="--")
        low, high = (1e3 * extreme for extreme in run.slider_extremes())
        end = float(run.trajectory.t[-1])
        ax.set_title(f"eps = {run.restitution:g}; within {end:g} s: {low:.5f} .. {high:.5f} mm", fontsize=9)
    for ax in axes[:, 0]:
        ax.set_ylabel("y3 [mm]")
    for ax in axes[-1]:
        ax.set_xlabel("t [s]")
    return figure


def draw_gaps(run: Run) -> Any:
    """As figures 4 and 9: gaps and gap rates."""
    figure, axes = plt.subplots(2, 1, figsize=(10, 5.5), sharex=True, layout="constrained")
    figure.suptitle(f"{TITLES[run.scheme]}, eps = {run.restitution:g}", fontsize=11)
    plot.gaps(run.trajectory, axes=axes)
    axes[0].set_xlim(0, min(SHOWN, float(run.trajectory.t[-1])))
    return figure


def draw_drift(runs: list[Run]) -> Any:
    """The detail of figures 4 and 9: the contact phase that penetrates most, on the scale of the drift."""
    figure, axes = plt.subplots(2, 1, figsize=(10, 5.5), sharex=True, layout="constrained")
    deepest = min(runs, key=lambda run: float(np.min(run.trajectory.min_gap)))
    t, gap = np.asarray(deepest.trajectory.t), np.asarray(deepest.trajectory.gap)
    row, contact = np.unravel_index(np.argmin(gap[t <= SHOWN]), gap.shape)
    away = np.flatnonzero(gap[:, contact] > 0.1 * deepest.system.c)  # the phase lies between two of these rows
    begin, end = max(away[away < row], default=0), min(away[away > row], default=len(t) - 1)
    depth = max(-gap[row, contact], 1e-6)
    figure.suptitle(
        f"Detail: gap g{contact + 1} while the slider lies on the wall, eps = {deepest.restitution:g}", fontsize=11
    )
    for run in runs:
        for ax, values, factor in zip(axes, (run.trajectory.gap, run.trajectory.gap_rate), (1e6, 1e3), strict=True):
            ax.plot(run.trajectory.t, factor * np.asarray(values)[:, contact], label=run.scheme, **STYLES[run.scheme])
    for ax in axes:
        ax.axhline(0, color="black", linewidth=0.8, zorder=1)
    axes[0].set_xlim(t[begin], t[end])
    axes[0].set_ylim(-1.2e6 * depth, 1.2e6 * depth)
    rate = 5e3 * depth / (t[end] - t[begin])
    axes[1].set_ylim(-rate, rate)
    axes[0].set_ylabel(f"g{contact + 1} [micrometre]")
    axes[1].set_ylabel("gap rate [mm/s]")
    axes[1].set_xlabel("t [s]")
    axes[0].legend(frameon=False, ncols=len(runs), loc="lower right", bbox_to_anchor=(1, 1))
    return figure


def draw_energy(runs: list[Run]) -> Any:
    """As figure 10: the energy of all schemes, the last twentieth of it enlarged."""
    figure, (whole, end) = plt.subplots(1, 2, figsize=(10, 4.5), width_ratios=(2, 1), layout="constrained")
    figure.suptitle(f"Energy, eps = {runs[0].restitution:g}", fontsize=11)
    labels = [f"{run.scheme}: {float(run.trajectory.energy[-1]):.4f} J at the end" for run in runs]
    trajectories = [run.trajectory for run in runs]
    plot.energy(trajectories, labels, ax=whole)
    rows = -(-len(trajectories[0].t) // 20)
    plot.energy([jax.tree.map(lambda x: x[-rows:] if x.ndim else x, trajectory) for trajectory in trajectories], ax=end)
    whole.set_xlim(left=0)
    end.set_title("the end, enlarged", fontsize=9)
    end.set_ylabel("")
    return figure


# The command -------------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, checked, with `num_steps` beside them and `output` created."""
    first, *rest = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m experiments.slider_crank",
        description=f"{first} {rest[0]}",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    positive = _number(float, "a positive number", lambda x: 0 < x < math.inf)
    parser.add_argument(
        "--duration",
        type=positive,
        default=4.0,
        metavar="SECONDS",
        help="simulated time; the nearest whole number of stored rows is taken",
    )
    parser.add_argument("--dt", type=positive, default=1e-5, metavar="SECONDS", help="length of a step")
    parser.add_argument(
        "--restitution",
        type=_number(float, "a number in [0, 1]", lambda x: 0 <= x <= 1),
        nargs="+",
        default=[0.1, 0.3, 0.5, 0.9],
        metavar="EPS",
        help="coefficients of restitution; gaps, drift and energy are drawn for the smallest",
    )
    parser.add_argument(
        "--schemes",
        nargs="+",
        choices=SCHEMES,
        default=list(SCHEMES),
        help="moreau: midpoint rule; reference: the paper's scheme without its position level; unified: the paper's scheme; "
        "default: GearGuptaLeimkuhler() as the library offers it",
    )
    parser.add_argument("--output", type=Path, default=Path("results/slider_crank"), help="folder for figures and tables")
    parser.add_argument(
        "--save-every",
        type=_number(int, "a whole number of at least 1", lambda x: x >= 1),
        default=10,
        metavar="STEPS",
        help="store every so many steps for the figures; the table's extremes and counts cover all steps",
    )
    args = parser.parse_args(argv)
    args.schemes, args.restitution = list(dict.fromkeys(args.schemes)), list(dict.fromkeys(args.restitution))
    rows = round(args.duration / (args.dt * args.save_every))
    if rows < 1:
        parser.error(
            f"--duration {args.duration:g} is shorter than one stored row of --save-every {args.save_every} steps "
            f"of --dt {args.dt:g}"
        )
    args.num_steps = rows * args.save_every
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output {args.output}: {error.strerror}")
    return args


def _number(kind: type, wanted: str, holds: Callable[[Any], bool]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not holds(value):
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text}")
        return value

    return read


def configuration(args: argparse.Namespace, interrupted: bool, figures: list[str]) -> dict[str, Any]:
    system = dataclasses.asdict(jaxsim.systems.SliderCrank())
    del system["restitution"]  # among the arguments
    packages = ("jax", "jaxlib", "numpy", "nonsmooth-jaxsim")
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "arguments": {**vars(args), "output": str(args.output)},
        "simulated_s": args.num_steps * args.dt,
        "q0": Q0,
        "v0": V0,
        "system": system,
        "schemes": {name: repr(SCHEMES[name]) for name in args.schemes},
        "timing": {"steps": min(args.num_steps, TIMED_STEPS), "repetitions": REPETITIONS},
        "versions": {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages},
        "platform": platform.platform(),
        "device": str(jax.devices()[0]),
        "cores": os.cpu_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "interrupted": interrupted,
        "figures": figures,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; 0, 1 where a run failed, 130 after Ctrl-C."""
    args = parse(argv)
    print(
        f"{', '.join(args.schemes)} at eps = {', '.join(f'{eps:g}' for eps in args.restitution)}: "
        f"{args.num_steps} steps of {args.dt:g} s = {args.num_steps * args.dt:g} s each"
    )
    runs: list[Run] = []
    interrupted = False
    try:
        compute(args, runs)
    except KeyboardInterrupt:
        interrupted = True
        planned = len(args.schemes) * len(args.restitution)
        timings = min((len(run.seconds) for run in runs), default=0)
        print(
            f"\ninterrupted: {len(runs)} of {planned} runs finished, each timed {timings} of {REPETITIONS} times; "
            "these follow"
        )
    rows = table(runs)
    with open(args.output / "table.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    (args.output / "table.md").write_text(as_markdown(rows))
    print(f"\n{as_markdown(rows)}")
    figures = draw(runs, args)
    (args.output / "config.json").write_text(json.dumps(configuration(args, interrupted, figures), indent=2) + "\n")
    print(f"figures, table and configuration: {args.output}")
    for run in runs:
        if run.failure:
            print(f"FAILED {run.scheme}, eps = {run.restitution:g}: {run.failure}")
    if interrupted:
        return 130
    return int(any(run.failure for run in runs))


if __name__ == "__main__":
    jaxsim.tune_cpu()
    jax.config.update("jax_enable_x64", True)
    sys.exit(main())
