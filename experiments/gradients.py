"""Derivatives through impacts: plain differentiation, the default of the time-stepping schemes, event-driven integration.

Every benchmark has its final state in closed form, or, for the slider-crank, derivatives of the continuous problem to 1e-7.
Plain differentiation of a time-stepping scheme holds the times of the impacts fixed; its error does not fall with the step.

    python -m experiments.gradients
"""

import argparse
import csv
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from tqdm.auto import tqdm

import jaxsim
from jaxsim.systems import BouncingBall, ImpactOscillator, NewtonsCradle, SliderCrank, SlidingBlock

VARIANTS = {
    "Moreau, plain": jaxsim.Moreau(gradient="plain"),
    "unified, plain": jaxsim.GearGuptaLeimkuhler(gradient="plain"),
    "Moreau": jaxsim.Moreau(),
    "unified": jaxsim.GearGuptaLeimkuhler(),
    "event-driven": jaxsim.EventDriven(),
}


@dataclass(frozen=True)
class Benchmark:
    """A motion of which the derivatives by its parameters are known."""

    title: str
    parameters: dict[str, float]
    motion: Callable[..., tuple[Any, Any, Any]]  # parameters -> system, q0, v0
    exact: Callable[..., Any] | None  # parameters -> (q, v) at the end
    duration: float  # [s]
    steps: tuple[float, ...] = (1e-2, 1e-3, 1e-4)  # [s]
    shown: Callable[[Any], Any] = lambda state: state  # the part of (q, v) that is compared
    lasts: Callable[..., Any] | None = None  # the duration, where it depends on the parameters

    @property
    def points(self) -> jax.Array:
        """The parameters as a vector, and some beside it: where in a step an impact falls is chance, so one averages."""
        point = jnp.array(list(self.parameters.values()))
        return point * (1 + jnp.linspace(0.0, 5e-3, 1 if self.exact is None else 8)[:, None])

    def end(self, point: jax.Array, scheme: Any, dt: float) -> jax.Array:
        """(q, v) at the end of a simulation in steps of about dt."""
        arguments = dict(zip(self.parameters, point, strict=True))
        duration = self.lasts(**arguments) if self.lasts else self.duration
        n = round(self.duration / dt)
        system, q0, v0 = self.motion(**arguments)
        q0, v0 = jnp.stack([jnp.asarray(x, float) for x in q0]), jnp.stack([jnp.asarray(x, float) for x in v0])
        run = jaxsim.simulate(system, q0, v0, dt=duration / n, num_steps=n, save_every=n, scheme=scheme)
        return self.shown(jnp.concatenate([run.q[-1], run.v[-1]]))

    def references(self) -> np.ndarray:
        """d(q, v)/d(parameters) at the end for every point, one column per parameter."""
        exact = self.exact
        if exact is None:
            return _slider_crank_reference(self.duration)[None]
        return np.asarray(jax.vmap(jax.jacfwd(lambda point: jnp.stack(exact(*point))))(self.points))

    def derivatives(self, scheme: Any, dt: float) -> np.ndarray:
        """The same by automatic differentiation of a simulation."""
        return np.asarray(jax.jit(jax.vmap(jax.jacfwd(lambda point: self.end(point, scheme, dt))))(self.points))

    def errors(self, scheme: Any, dt: float) -> np.ndarray:
        """|column found - reference| / |reference| for every parameter, root mean square over the points.

        Where the reference is below 1e-12, without the denominator.
        """
        references = self.references()
        size = np.linalg.norm(references, axis=1)
        distance = np.linalg.norm(self.derivatives(scheme, dt) - references, axis=1)
        return np.sqrt(np.mean((distance / np.where(size > 1e-12, size, 1.0)) ** 2, axis=0))


# The benchmarks ----------------------------------------------------------------------------------------------------------

G = 9.81  # [m/s^2]


def _bounces(number: int, end: float) -> Callable[..., Any]:
    """A ball from rest at h0 that bounces so many times until `end`."""

    def exact(eps, h0, g):
        w = jnp.sqrt(2 * g * h0)
        spent = w / g + 2 * w / g * sum(eps**k for k in range(1, number))
        tau = end - spent
        return eps**number * w * tau - g * tau**2 / 2, eps**number * w - g * tau

    return exact


def _ball(eps, h0, g):
    return BouncingBall(restitution=eps, gravity=g), [h0], [0.0]


def _oscillator(eps, v0, k):
    return ImpactOscillator(restitution=eps, stiffness=k), [0.0], [v0]


def _oscillator_end(eps, v0, k):
    w, end, impacts = jnp.sqrt(k), 1.1, 3
    phase = w * end - impacts * jnp.pi
    return eps**impacts * v0 / w * jnp.sin(phase), eps**impacts * v0 * jnp.cos(phase)


def _grazing(eps, v0, g):  # a ball thrown at a floor that repels it, which is a ceiling upside down; H = 1
    return BouncingBall(restitution=eps, gravity=-g), [1.0], [-v0]


def _grazing_end(eps, v0, g):
    w = jnp.sqrt(v0**2 - 2 * g)
    tau = 0.6 - (v0 - w) / g
    return eps * w * tau + g * tau**2 / 2, eps * w + g * tau


@jaxsim.mechanism
class Discs:
    """Two discs on a plane that hit each other; q = (x1, y1, x2, y2) [m]."""

    m1: float = 1.0  # [kg]
    m2: float = 2.0
    reach: float = 0.3  # sum of the radii [m]
    restitution: float = 0.7

    def kinetic_energy(self, q, v):
        """Of both [J]."""
        return 0.5 * self.m1 * v[:2] @ v[:2] + 0.5 * self.m2 * v[2:] @ v[2:]

    def potential_energy(self, t, q):
        """None."""
        return jnp.zeros((), q.dtype)

    def gap(self, t, q):
        """Distance of the edges."""
        d = q[2:] - q[:2]
        return jnp.array([jnp.sqrt(d @ d) - self.reach])


def _discs(eps, m1, m2, reach, offset, speed):
    return Discs(m1=m1, m2=m2, reach=reach, restitution=eps), [-1.0, offset, 0.0, 0.0], [speed, 0.0, -0.5, 0.1]


def _discs_end(eps, m1, m2, reach, offset, speed):
    end = 1.2
    q, v = jnp.array([-1.0, offset, 0.0, 0.0]), jnp.array([speed, 0.0, -0.5, 0.1])
    d, w = q[2:] - q[:2], v[2:] - v[:2]
    t = -(d @ w + jnp.sqrt((d @ w) ** 2 - (w @ w) * (d @ d - reach**2))) / (w @ w)
    n = (d + t * w) / reach
    impulse = -(1 + eps) * (w @ n) / (1 / m1 + 1 / m2)
    after = v + impulse * jnp.concatenate([-n / m1, n / m2])
    return [*(q + t * v + (end - t) * after), *after]


def _three_balls(eps1, eps2, v0):
    cradle = NewtonsCradle(masses=(0.1,) * 3, gravity=0.0, restitution=jnp.stack([eps1, eps2]))
    return cradle, [-0.5, 0.0, 0.0], [v0, 0.0, 0.0]


def _three_balls_end(eps1, eps2, v0):
    tau = 1.0 - 0.5 / v0
    v = [v0 * (1 - 2 * (1 + eps1) / 3), v0 * (1 + eps1) / 3, v0 * (1 + eps1) / 3]
    return [speed * tau for speed in v] + v


@jaxsim.mechanism
class SpringDashpot:
    """A mass that has just touched a linear spring and dashpot; q = (indentation,) [m]."""

    mass: float = 1.0  # [kg]
    stiffness: float = 100.0  # [N/m]
    damping: float = 2.0  # [N s/m]

    def kinetic_energy(self, q, v):
        """Of the mass [J]."""
        return 0.5 * self.mass * v @ v

    def potential_energy(self, t, q):
        """Of the spring [J]."""
        return 0.5 * self.stiffness * q @ q

    def applied_force(self, t, q, v):
        """Of the dashpot [N]."""
        return -self.damping * v


def _contact_time(stiffness, damping, v0):
    return jnp.pi / jnp.sqrt(stiffness - damping**2 / 4)


def _compliant_end(stiffness, damping, v0):
    zeta = damping / (2 * jnp.sqrt(stiffness))
    return jnp.zeros(()), -v0 * jnp.exp(-jnp.pi * zeta / jnp.sqrt(1 - zeta**2))


def _slider_crank_reference(t: float) -> np.ndarray:
    path = Path(__file__).parents[1] / "tests" / "reference" / "slider_crank_derivatives.json"
    (row,) = (row for row in json.loads(path.read_text())["rows"] if row["t"] == t)
    return np.array([row[f"d_{name}"] for name in ("restitution", "l2", "m3", "clearance")]).T


def slider_crank(milliseconds: int, steps: tuple[float, ...] = (2e-5, 1e-5, 4e-6)) -> Benchmark:
    """B8 at 4, 8, 12 or 20 ms: one impact, three impacts, after the accumulation in a closed contact, later."""
    table = SliderCrank()
    return Benchmark(
        f"B8 slider-crank, {milliseconds} ms",
        {"restitution": 0.4, "l2": table.l2, "m3": table.m3, "c": table.c},
        lambda **fields: (SliderCrank(**fields), [0.0, 0.0, 0.0], [150.0, -75.0, 0.0]),
        None,
        milliseconds / 1000,
        steps,
        lambda state: state[np.array([0, 1, 3, 4])],
    )


def _sliding(friction, v0, pull):
    return SlidingBlock(friction=friction, pull=pull, gravity=10.0), [0.0, 0.0], [v0, 0.0]


def _stop_end(friction, v0):
    return v0**2 / (20 * friction), 0.0 * v0


def _reversal_end(friction, v0, pull):
    before, after = pull + 10 * friction, pull - 10 * friction  # accelerations; v0 < 0
    tau = 1.0 + v0 / before
    return -(v0**2) / (2 * before) + after * tau**2 / 2, after * tau


_ALONG = np.array([0, 2])  # x and its velocity
BENCHMARKS = {
    "wall": Benchmark(
        "B1 wall, no gravity",
        {"eps": 0.8, "q0": 0.517, "v0": 1.0},
        lambda eps, q0, v0: (BouncingBall(restitution=eps, gravity=0.0), [q0], [-v0]),
        lambda eps, q0, v0: (eps * (v0 * 1.0 - q0), eps * v0),
        1.0,
    ),
    "ball": Benchmark("B2 ball, 2 impacts", {"eps": 0.8, "h0": 1.0, "g": G}, _ball, _bounces(2, 1.5), 1.5),
    "ball-3": Benchmark("B2 ball, 3 impacts", {"eps": 0.8, "h0": 1.0, "g": G}, _ball, _bounces(3, 2.0), 2.0),
    "accumulation": Benchmark(
        "B2 after accumulation", {"eps": 0.5, "h0": 1.0, "g": G}, _ball, lambda eps, h0, g: (0 * eps, 0 * eps), 1.6
    ),
    "oscillator": Benchmark("B3 impact oscillator", {"eps": 0.8, "v0": 1.0, "k": 100.0}, _oscillator, _oscillator_end, 1.1),
    "discs": Benchmark(
        "B4 two discs, oblique",
        {"eps": 0.7, "m1": 1.0, "m2": 2.0, "reach": 0.3, "offset": 0.12, "speed": 1.0},
        _discs,
        _discs_end,
        1.2,
    ),
    "three-balls": Benchmark("B4 three balls", {"eps1": 0.6, "eps2": 0.6, "v0": 1.03}, _three_balls, _three_balls_end, 1.0),
    "compliant": Benchmark(
        "B5 spring and dashpot",
        {"stiffness": 100.0, "damping": 2.0, "v0": 1.0},
        lambda stiffness, damping, v0: (SpringDashpot(stiffness=stiffness, damping=damping), [0.0], [v0]),
        _compliant_end,
        math.pi / math.sqrt(99),
        lasts=_contact_time,
    ),
    "sliding-stop": Benchmark(
        "B6 sliding to a stop",
        {"friction": 0.2, "v0": 1.03},
        lambda friction, v0: _sliding(friction, v0, 0.0),
        _stop_end,
        1.0,
        shown=lambda state: state[_ALONG],
    ),
    "reversal": Benchmark(
        "B6 reversal of friction",
        {"friction": 0.2, "v0": -3.03, "pull": 5.0},
        _sliding,
        _reversal_end,
        1.0,
        shown=lambda state: state[_ALONG],
    ),
    "grazing": Benchmark("B7 near grazing", {"eps": 0.8, "v0": 4.44, "g": G}, _grazing, _grazing_end, 0.6),
    "slider-crank": slider_crank(20),
}


# The experiment ----------------------------------------------------------------------------------------------------------


def order(steps: Sequence[float], values: Sequence[float]) -> float:
    """Observed order: slope of log(error) over log(step), least squares."""
    return float(np.polyfit(np.log(steps), np.log(np.maximum(values, 1e-300)), 1)[0])


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """Largest error over the parameters at the smallest step, and how it falls (order) for the two defaults."""
    lines = [["benchmark", "dt [s]", *VARIANTS, "order, Moreau", "order, unified"]]
    for name in dict.fromkeys(row["benchmark"] for row in rows):
        own = [row for row in rows if row["benchmark"] == name]
        by_variant = {v: [row for row in own if row["variant"] == v] for v in VARIANTS}
        last = [f"{by_variant[v][-1]['error']:.1e}" if by_variant[v] else "-" for v in VARIANTS]
        orders = []
        for v in ("Moreau", "unified"):
            steps, values = [row["dt"] for row in by_variant[v]], [row["error"] for row in by_variant[v]]
            orders.append(f"{order(steps, values):.2f}" if len(steps) > 1 and max(values) > 1e-9 else "-")
        lines.append([BENCHMARKS[name].title, f"{own[-1]['dt']:g}", *last, *orders])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]])
    pad = [str.ljust] + [str.rjust] * (len(widths) - 1)
    return (
        "\n".join(f"| {' | '.join(p(c, w) for p, c, w in zip(pad, line, widths, strict=True))} |" for line in lines) + "\n"
    )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Error against step, one panel per benchmark."""
    names = list(dict.fromkeys(row["benchmark"] for row in rows))
    columns = min(4, len(names))
    lines = -(-len(names) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(3.4 * columns, 0.8 + 2.6 * lines), squeeze=False, layout="constrained"
    )
    figure.suptitle("Relative error of the derivatives, largest over the parameters", fontsize=11)
    styles = dict(zip(VARIANTS, ("s--", "v--", "s-", "v-", "o-"), strict=True))
    for ax in axes.flat[len(names) :]:
        ax.set_visible(False)
    for ax, name in zip(axes.flat, names, strict=False):
        for variant, style in styles.items():
            own = [row for row in rows if row["benchmark"] == name and row["variant"] == variant]
            # an exact zero is drawn at the rounding of doubles
            ax.loglog([r["dt"] for r in own], [max(r["error"], 1e-16) for r in own], style, label=variant, markersize=4)
        ax.set_title(BENCHMARKS[name].title, fontsize=9)
    for ax in axes[-1]:
        ax.set_xlabel("dt [s]")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(VARIANTS), frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; 0, 1 where a derivative is not finite, 130 after Ctrl-C (with what was finished)."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gradients", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--benchmarks", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), metavar="NAME")
    parser.add_argument("--output", type=Path, default=Path("results/gradients"), help="folder for the figure and tables")
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    cases = [(name, variant, dt) for name in args.benchmarks for variant in VARIANTS for dt in BENCHMARKS[name].steps]
    rows: list[dict[str, Any]] = []
    interrupted = False
    with open(args.output / "errors.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["benchmark", "variant", "dt_s", "parameter", "relative_error"])
        try:
            for name, variant, dt in tqdm(cases, unit="derivative", disable=None):
                benchmark = BENCHMARKS[name]
                found = benchmark.errors(VARIANTS[variant], dt)
                rows.append({"benchmark": name, "variant": variant, "dt": dt, "error": float(np.max(found))})
                writer.writerows([name, variant, dt, p, e] for p, e in zip(benchmark.parameters, found, strict=True))
                file.flush()
        except KeyboardInterrupt:
            interrupted = True
            print(f"\ninterrupted: {len(rows)} of {len(cases)} derivatives finished; these follow")
    if rows:
        (args.output / "table.md").write_text(as_markdown(rows))
        print(f"\n{as_markdown(rows)}")
        draw(rows, args.output / "errors.png")
        print(f"figure and tables: {args.output}")
    return 130 if interrupted else int(not all(math.isfinite(row["error"]) for row in rows))


if __name__ == "__main__":
    jaxsim.tune_cpu()
    jax.config.update("jax_enable_x64", True)
    sys.exit(main())
