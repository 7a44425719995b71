"""Time per step of the public API on CPU, beside tight C programs and beside each other.

    python tests/bench/bench_speed.py --c-programs FOLDER

All candidates run once in every round, each C program right after what is compared with it, so that a slow spell of the
machine hits both. Times are medians over the rounds; ratios are medians of the ratios within a round, of processor time,
which other work on the machine disturbs less. FOLDER holds moreau_single.c, moreau_batch.c and ggl_single.c; without it, or
without a C compiler, the columns that need them say "-".
"""

import argparse
import dataclasses
import importlib.metadata
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

import jaxsim
from jaxsim import GearGuptaLeimkuhler, Moreau, simulate
from jaxsim.systems import SliderCrank

Q0, V0, DT, BATCH = [0.0, 0.0, 0.0], [150.0, -75.0, 0.0], 1e-5, 1024
SCHEMES = {"moreau": Moreau(), "ggl": GearGuptaLeimkuhler(), "ggl-paper": GearGuptaLeimkuhler.paper()}


@jaxsim.mechanism
class FromEnergies:
    """The slider-crank as a user would write it down: energies and gaps, nothing derived by hand."""

    restitution: Any = 0.1

    opposing = ((0, 2), (1, 3))

    def kinetic_energy(self, q, v):
        rates = v * jnp.array([0.153, 0.306, 1.0])
        x, y = -rates[:2] * jnp.sin(q[:2]), rates[:2] * jnp.cos(q[:2])  # ends of crank and rod, each about its own start
        crank = 0.038 * (x[0] ** 2 + y[0] ** 2) / 4
        rod = 0.038 * ((x[0] + x[1] / 2) ** 2 + (y[0] + y[1] / 2) ** 2)
        slider = 0.076 * ((x[0] + x[1]) ** 2 + (y[0] + y[1]) ** 2)
        return 0.5 * (crank + rod + slider + jnp.array([7.4e-5, 5.9e-4, 2.7e-6]) @ v**2)

    def potential_energy(self, t, q):
        y1, y2 = 0.153 * jnp.sin(q[0]), 0.306 * jnp.sin(q[1])
        return 9.81 * (0.038 * y1 / 2 + 0.038 * (y1 + y2 / 2) + 0.076 * (y1 + y2))

    def gap(self, t, q):
        y, tilt = 0.153 * jnp.sin(q[0]) + 0.306 * jnp.sin(q[1]), 0.05 * jnp.sin(q[2])
        half = 0.026 - 0.025 * jnp.cos(q[2])
        return jnp.array([half - y + tilt, half - y - tilt, half + y - tilt, half + y + tilt])


@dataclasses.dataclass
class Candidate:
    """Something to time: `once` runs it and waits, `steps` is what it counts as (steps times trajectories)."""

    once: Callable[[], Any]
    steps: int
    first_call: float = 0.0  # [s], with tracing and compiling
    wall: list[float] = dataclasses.field(default_factory=list)  # of each round, [ns] per step
    rounds: list[float] = dataclasses.field(default_factory=list)  # the same in processor time

    def start(self) -> None:
        """Compile, and check that no step failed."""
        begin = time.perf_counter()
        self.once().raise_if_failed()
        self.first_call = time.perf_counter() - begin

    def measure(self) -> None:
        """One more round."""
        begin = time.perf_counter(), time.process_time()
        self.once()
        self.wall.append(1e9 * (time.perf_counter() - begin[0]) / self.steps)
        self.rounds.append(1e9 * (time.process_time() - begin[1]) / self.steps)


def single(scheme: Any, system: Any, steps: int) -> Candidate:
    """One trajectory, called as a user calls it."""

    def once():
        return jax.block_until_ready(simulate(system, Q0, V0, dt=DT, num_steps=steps, scheme=scheme, save_every=steps))

    return Candidate(once, steps)


def batch(scheme: Any, steps: int) -> Candidate:
    """1024 restitutions at once."""

    @jax.jit
    @jax.vmap
    def run(restitution):
        system = SliderCrank(restitution=restitution)
        return simulate(system, Q0, V0, dt=DT, num_steps=steps, scheme=scheme, save_every=steps)

    values = 0.95 * jnp.arange(BATCH) / BATCH
    return Candidate(lambda: jax.block_until_ready(run(values)), steps * BATCH)


def candidates(scale: float) -> dict[tuple[str, str], Candidate]:
    """All that is timed here, by (case, scheme); as many steps as the C programs make, so that contact is as frequent."""
    lengths = {"moreau": int(400_000 * scale), "ggl": int(100_000 * scale), "ggl-paper": int(100_000 * scale)}
    found = {}
    for name, scheme in SCHEMES.items():
        for eps in (0.1, 0.9):
            found[f"eps = {eps}", name] = single(scheme, SliderCrank(restitution=eps), lengths[name])
        if name != "ggl-paper":
            found["energies", name] = single(scheme, FromEnergies(restitution=0.1), lengths[name])
    for name, scheme in SCHEMES.items():
        found["batch", name] = batch(scheme, int((2000 if name == "moreau" else 500) * scale))
    return found


class CPrograms:
    """The C programs: compiled into a temporary folder, run as children of this process."""

    # program, its arguments (size, steps, repetitions), and what its output lines are called here
    PROGRAMS = {
        "moreau_single": (("400000", "1"), {r"eps=(\S+) exact2slot .* cpu median (\S+)": "exact"}),
        "moreau_batch": ((str(BATCH), "2000", "3"), {r"(threads=1) .* cpu median (\S+)": "batch"}),
        "ggl_single": (
            ("100000", "1"),
            {
                r"eps=(\S+) newton_tol_reduced +cpu median (\S+)": "Newton",
                r"eps=(\S+) picard3 +cpu median (\S+)": "fixed point",
            },
        ),
    }

    def __init__(self, sources: Path | None, build: str):
        self.rounds: dict[tuple[str, str], list[float]] = {}  # by (case, name), [ns] per step
        self.build = Path(build)
        compiler = shutil.which("cc") or shutil.which("gcc")
        self.there = sources is not None and compiler is not None
        if sources is None or compiler is None:
            return
        for program in self.PROGRAMS:
            command = [compiler, "-O3", "-march=native", "-pthread", "-o", self.build / program]
            subprocess.run([*command, sources / f"{program}.c", "-lm"], check=True)

    def measure(self, program: str) -> None:
        """One more round of this program."""
        if not self.there:
            return
        arguments, patterns = self.PROGRAMS[program]
        output = subprocess.run([self.build / program, *arguments], check=True, capture_output=True, text=True).stdout
        for pattern, name in patterns.items():
            for found, ns in re.findall(pattern, output):
                case = "batch" if name == "batch" else f"eps = {found}"
                self.rounds.setdefault((case, name), []).append(float(ns))


def measure(timed: dict[tuple[str, str], Candidate], c: CPrograms) -> None:
    """One round of everything."""
    groups = [
        ("moreau_single", lambda case, scheme: case != "batch" and scheme == "moreau"),
        ("ggl_single", lambda case, scheme: case != "batch" and scheme != "moreau"),
        ("moreau_batch", lambda case, scheme: case == "batch"),
    ]
    for program, belongs in groups:
        for key, candidate in timed.items():
            if belongs(*key):
                candidate.measure()
        c.measure(program)


def ratio(above: list[float], below: list[float] | None) -> float | None:
    """Median over the rounds of the ratio within a round; None where there is nothing to compare with."""
    return median(a / b for a, b in zip(above, below, strict=True)) if below else None


def report(timed: dict[tuple[str, str], Candidate], c: CPrograms) -> None:
    """Print the table and the limits."""
    print(f"\n{'ns per step':22}{'wall':>9}{'CPU':>9}{'first call':>12}{'C':>16}{'ratio to C':>16}{'to Moreau':>11}")
    for (case, scheme), candidate in timed.items():
        c_case = "eps = 0.1" if case == "energies" else case
        names = ("batch" if case == "batch" else "exact",) if scheme == "moreau" else ("Newton", "fixed point")
        below = [c.rounds.get((c_case, name)) for name in names]
        c_text = " / ".join("-" if ns is None else f"{median(ns):.1f}" for ns in below)
        ratios = " / ".join(show(ratio(candidate.rounds, ns)) for ns in below)
        to_moreau = "" if scheme == "moreau" else show(ratio(candidate.rounds, timed[case, "moreau"].rounds))
        times = f"{median(candidate.wall):9.1f}{median(candidate.rounds):9.1f}{candidate.first_call:10.1f} s"
        print(f"{scheme + ', ' + case:22}{times}{c_text:>16}{ratios:>16}{to_moreau:>11}")
    print("GGL beside C: Newton on the reduced system / fixed point of three iterations\n")

    moreau, ggl = timed["eps = 0.1", "moreau"], timed["eps = 0.1", "ggl"]
    rows = [
        ("Moreau / C", ratio(moreau.rounds, c.rounds.get(("eps = 0.1", "exact"))), 5.0, ""),
        ("GGL", median(ggl.rounds) / 1000, 3.0, " us"),
        ("GGL / Moreau", ratio(ggl.rounds, moreau.rounds), 8.0, ""),
        ("Moreau, from energies / package's", ratio(timed["energies", "moreau"].rounds, moreau.rounds), 5.0, ""),
        ("GGL, from energies / package's", ratio(timed["energies", "ggl"].rounds, ggl.rounds), 5.0, ""),
    ]
    print(f"{'limits: single, eps = 0.1':36}{'measured':>10}{'wanted':>12}")
    for name, value, limit, unit in rows:
        verdict = "" if value is None else "ok" if value <= limit else "MISSED"
        print(f"{name:36}{show(value) + unit:>10}{f'<= {limit:g}{unit}':>12}  {verdict}")


def show(value: float | None) -> str:
    """Two digits, or a dash."""
    return "-" if value is None else f"{value:.2f}"


def cpu_model() -> str:
    """Name of the processor."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--c-programs", type=Path, metavar="FOLDER", help="folder of the C programs to compare with")
    parser.add_argument("--rounds", type=int, default=9, help="how often each candidate runs (default 9)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of steps, to try out (default 1)")
    options = parser.parse_args()

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    tuned = jaxsim.tune_cpu()
    jaxlib = importlib.metadata.version("jaxlib")
    print(f"JAX {jax.__version__}, jaxlib {jaxlib}, {cpu_model()}, tuned: {tuned}", flush=True)
    with tempfile.TemporaryDirectory() as build:
        c = CPrograms(options.c_programs, build)
        timed = candidates(options.scale)
        for candidate in timed.values():
            candidate.start()
        for _ in range(options.rounds):
            measure(timed, c)
    report(timed, c)


if __name__ == "__main__":
    main()
