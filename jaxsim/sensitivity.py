"""Are the derivatives right? Automatic differentiation against central differences, one parameter at a time.

A difference quotient D(h) = (y(x + h) - y(x - h)) / 2h converges to the derivative only where y is smooth. The values of a
time-stepping scheme are smooth only piece by piece: the step in which an impact is noticed is a whole number, so that y
jumps by O(dt) wherever that number changes, and between two jumps its slope is that with the time of the impact frozen.
Steps too fine to meet a jump show the frozen slope, a clean but wrong limit; coarse ones average over the jumps and show the
derivative of the motion, to O(dt) / h. Hence a sweep over h, read from the coarse end, in which

    u(h) = 3/2 max |D(h_j) - D(h_j+1)| h_j+1 / h  over h_j <= h,   but at least dt |(v, a)| / h

estimates the error of D(h), be it truncation (~ h^2), jumps or rounding (both ~ 1/h). The bound from below is for
trajectories of time-stepping schemes with contacts, whose values are known to within a step: (v, a) dt, with a = M^-1 h, at
the end.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from jaxsim.trajectory import Trajectory

STEPS = tuple(float(f"{step:.1e}") for step in np.logspace(-2, -8, 25))
_LEGAL = {"restitution": (0.0, 1.0), "friction": (0.0, np.inf)}
_SMALLEST_SCALE = 1e-3  # steps are relative to the parameter, or to this where it is smaller
_TELLING = 0.2  # with a larger relative uncertainty nothing agrees
_INACTIVE = 1e-9  # relative change of the output per relative change of the parameter that counts as none
_GROWTH, _LINEAR_RANGE = 1e3, 1e-5
_GRAZING = 0.1  # approach speed relative to the fastest motion of the gap since the impact before
_EXPLAIN = {
    "grazing": "an impact is slow for the motion before it; the derivative grows like 1 / (approach speed) towards contact",
    "impact in step": "impacts come or go between x - h and x + h; difference steps in which they do are not judged",
    "mode change": "contacts at the end close, open, stick or slide between x - h and x + h; those steps are not judged",
    "two slopes": "fine steps show another slope, that of automatic differentiation: impact times held fixed "
    '(gradient="plain"), or a kink of f within the coarse steps',
    "inactive": "the parameter changes nothing, by either derivative",
    "growth": f"|dy/dx| |x| / |y| > {_GROWTH:g}, or y is linear in x over less than {_LINEAR_RANGE:g} |x|: "
    "a derivative that tells little about finite changes",
}


@dataclasses.dataclass(frozen=True, eq=False)
class GradientReport:
    """What `gradient_check` found; arrays have one row per parameter, `str` gives a table.

    `quotients` against `steps`, on logarithmic axes, shows the plateaus of which the verdict speaks.
    """

    parameters: tuple[str, ...]
    outputs: tuple[str, ...]
    values: Float[np.ndarray, " parameters"]
    automatic: Float[np.ndarray, "parameters outputs"]  # dy/dx by automatic differentiation
    difference: Float[np.ndarray, "parameters outputs"]  # by differences with the step that was chosen, else nan
    relative_error: Float[np.ndarray, " parameters"]
    uncertainty: Float[np.ndarray, " parameters"]  # u of `difference`, relative as the error is
    step: Float[np.ndarray, " parameters"]  # relative step that was chosen, nan where none can be judged
    verdicts: tuple[str, ...]  # "agrees", "differs" or "undecided"
    flags: tuple[tuple[str, ...], ...]
    steps: Float[np.ndarray, " steps"]  # relative, falling
    quotients: Float[np.ndarray, "parameters steps outputs"]  # D(h)
    horizon: Float[
        np.ndarray, " parameters"
    ]  # first stored time with growth [s], beyond it a derivative tells little; else inf
    judged: Bool[np.ndarray, "parameters steps"]  # False where an impact or a mode change falls into the step
    worst: Int[np.ndarray, " parameters"]  # the output that the table shows, which deviates most

    @property
    def ok(self) -> bool:
        """Whether no parameter differs; see `verdicts` for those that are undecided."""
        return "differs" not in self.verdicts

    def __str__(self) -> str:
        head = "parameter", "output", "automatic", "difference", "rel. error", "uncertainty", "step", "verdict", "flags"
        table: list[tuple[str, ...]] = [head]
        for i, (name, k) in enumerate(zip(self.parameters, self.worst, strict=True)):
            slopes = [f"{slope[i, k]:.7g}" for slope in (self.automatic, self.difference)]
            sizes = [f"{size[i]:.1e}" for size in (self.relative_error, self.uncertainty, self.step)]
            table.append((name, self.outputs[k], *slopes, *sizes, self.verdicts[i], ", ".join(self.flags[i])))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        for name, time in zip(self.parameters, self.horizon, strict=True):
            if np.isfinite(time):
                lines.append(f"{name}: derivatives tell little beyond t = {time:g} s")
        occurring = [flag for flag in _EXPLAIN if any(flag in flags for flags in self.flags)]
        return "\n".join(lines + [f"{flag}: {_EXPLAIN[flag]}" for flag in occurring])


class _Sample(NamedTuple):
    """What is kept of f at one point."""

    y: Float[Array, " outputs"]
    impacts: Int[Array, " counts"]  # logged ones, else steps with an impulse per contact
    mode: Int[Array, " contacts"]  # at the end: 0 open, else 2 + sign of the slip
    failed: Int[Array, " 1"]


def gradient_check(
    f: Callable[[Any], Any],
    system: Any,
    parameters: Sequence[str] | None = None,
    *,
    rtol: float = 1e-3,
    steps: Sequence[float] = STEPS,
) -> GradientReport:
    """Compare automatic differentiation of f(system) with central differences, parameter by parameter.

    The difference quotient is taken at the step with the smallest uncertainty u on the way from the coarse end to where u
    rises (see the module); the relative error is |AD - D| / max(|AD|, |D|), with every output divided by its size
    max(|y|, |dy/dx| |x|) over the parameters. A parameter

    * differs, if the error exceeds 2 u + rtol,
    * agrees, if it does not and u is at most 0.2,
    * is undecided otherwise. More time steps (a smaller dt) help there.

    Args:
        f: a function of the mechanism that JAX can trace. It returns a `Trajectory`, of which q and v at the end are
            compared and impacts and contacts are watched, or any pytree of numbers, of which nothing but the values are
            known: a parameter whose 1 % moves an impact by less than dt then may be judged by its frozen slope.
        system: the mechanism; derivatives are taken where it is.
        parameters: names of fields, or of entries of array fields as "restitution[1]"; all of them by default.
        rtol: relative error that is tolerated beyond the uncertainty.
        steps: relative difference steps, three or more; absolute ones are these times max(|x|, 1e-3). Restitution and
            friction stay within their ranges: at a boundary the difference becomes one-sided.

    Returns:
        `GradientReport`, to be printed; `report.ok` says that nothing differs.

    Raises:
        TypeError: if `system` is not an instance of a mechanism, or f returns nothing of floating point.
        ValueError: for unknown parameters, steps that are no such list, or an f that fails or is not finite at `system`.

    >>> import jaxsim
    >>> def f(ball):
    ...     return jaxsim.simulate(ball, [1.0], [0.0], dt=0.1, num_steps=10, scheme=jaxsim.EventDriven())
    >>> report = jaxsim.gradient_check(f, jaxsim.systems.BouncingBall(), parameters=["restitution", "mass"])
    >>> report.verdicts, report.flags, bool(report.relative_error.max() < 1e-6)
    (('agrees', 'agrees'), ((), ('inactive',)), True)
    """
    if isinstance(system, type) or not hasattr(system, "mass_matrix"):
        raise TypeError(f"system must be an instance of a mechanism, such as BouncingBall(), got {system!r}")
    h = np.asarray(steps, float)
    if h.ndim != 1 or h.size < 3 or not np.all((h > 0) & (h < 0.5)) or np.unique(h).size < h.size:
        raise ValueError(f"steps must be a list of three or more different numbers between 0 and 0.5, got {steps!r}")
    h = np.sort(h)[::-1]
    names, chosen = _choose(system, parameters)
    start, rebuild = ravel_pytree(jax.tree.map(lambda x: jnp.asarray(x, float), system))
    x = np.asarray(start)[chosen]

    base = f(system)
    outputs = _check_base(base)
    directions = np.eye(len(names))[chosen]

    def both(p):
        result = f(rebuild(p))
        return _output(result), _rows(result)

    along = jax.vmap(lambda d: jax.jvp(both, (start,), (d,))[1])
    automatic, changes = (np.asarray(x) for x in jax.jit(along)(directions))

    sample = jax.jit(jax.vmap(lambda p: _sample(rebuild(p), f(rebuild(p)))))
    y = np.asarray(_output(base))
    relative = np.abs(automatic * x[:, None])
    size = np.maximum(np.abs(y), np.max(relative, axis=0, where=np.isfinite(relative), initial=0.0))
    size[size == 0] = 1.0
    blur = _blur(system, base) / size
    horizon = _horizon(base, changes * x[:, None, None])
    rows = []
    for i, direction in enumerate(directions):
        low, high = _LEGAL.get(names[chosen[i]].split("[")[0], (-np.inf, np.inf))
        absolute = h * max(abs(x[i]), _SMALLEST_SCALE)
        ends = np.clip(x[i] + np.concatenate([absolute, -absolute, [0.0]]), low, high)
        at = jax.tree.map(np.asarray, sample(np.asarray(start) + (ends - x[i])[:, None] * direction))
        rows.append(_judge(x[i], y, automatic[i], h, ends, at, size, blur, rtol, horizon[i]))
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    verdicts, flags = tuple(columns.pop("verdicts")), tuple(columns.pop("flags"))
    if isinstance(base, Trajectory) and _grazes(base):
        flags = tuple(of_one if "inactive" in of_one else ("grazing", *of_one) for of_one in flags)
    return GradientReport(
        parameters=tuple(names[i] for i in chosen), outputs=outputs, values=x, automatic=automatic, steps=h,
        verdicts=verdicts, flags=flags, horizon=horizon, **{name: np.array(column) for name, column in columns.items()},
    )  # fmt: skip


def _choose(system: Any, parameters: Sequence[str] | None) -> tuple[list[str], list[int]]:
    """Names of all entries of all fields, in the order of the raveled system, and the positions of those asked for."""
    fields = {
        field.name: np.shape(getattr(system, field.name))
        for field in dataclasses.fields(system)
        if not field.metadata.get("static", False)
    }
    names, positions = [], {}
    for field, shape in fields.items():
        entries = _entries(field, shape)
        positions[field] = range(len(names), len(names) + len(entries))
        names += entries
    positions |= {name: [i] for i, name in enumerate(names)}
    unknown = [name for name in parameters or () if name not in positions]
    if unknown or (parameters is not None and not parameters):
        raise ValueError(f"no such parameters: {unknown}; {type(system).__name__} has {', '.join(names)}")
    return names, [i for name in (fields if parameters is None else parameters) for i in positions[name]]


def _numbers(result: Any) -> dict[str, Array]:
    """What is compared, by name."""
    if isinstance(result, Trajectory):
        return {"q": result.q[-1], "v": result.v[-1]}
    leaves = jax.tree_util.tree_leaves_with_path(result)
    named = {jax.tree_util.keystr(path, simple=True, separator=".") or "f": jnp.asarray(leaf) for path, leaf in leaves}
    return {name: leaf for name, leaf in named.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}


def _output(result: Any) -> Float[Array, " outputs"]:
    return jnp.concatenate([jnp.ravel(leaf) for leaf in _numbers(result).values()])


def _rows(result: Any) -> Float[Array, "rows numbers"]:
    """The stored states of a trajectory."""
    return jnp.concatenate([result.q, result.v], axis=1) if isinstance(result, Trajectory) else jnp.zeros((0, 0))


def _horizon(base: Any, changes: Float[np.ndarray, "parameters rows numbers"]) -> Float[np.ndarray, " parameters"]:
    """When |d(q, v)/dx| |x| first exceeds the bound of growth, with q and v divided by their largest values."""
    largest = np.max(np.abs(np.asarray(_rows(base))), axis=0, initial=0.0)
    grown = np.linalg.norm(changes / np.where(largest > 0, largest, 1.0), axis=-1) > _GROWTH
    t = np.asarray(base.t) if isinstance(base, Trajectory) else np.zeros(0)
    return np.array([np.min(t[rows], initial=np.inf) for rows in grown])


def _entries(name: str, shape: tuple[int, ...]) -> list[str]:
    return [f"{name}[{', '.join(map(str, index))}]" if index else name for index in np.ndindex(*shape)]


def _check_base(base: Any) -> tuple[str, ...]:
    """The names of the outputs, each of which must be finite."""
    names = [entry for name, leaf in _numbers(base).items() for entry in _entries(name, leaf.shape)]
    if not names:
        raise TypeError(f"f must return a Trajectory or numbers of floating point, got {base!r}")
    wrong = {name: float(y) for name, y in zip(names, _output(base), strict=True) if not np.isfinite(y)}
    if wrong:
        raise ValueError(f"f(system) is not finite: {wrong}")
    if isinstance(base, Trajectory) and base.failed_step >= 0:
        raise ValueError(f"step {int(base.failed_step)} of f(system) failed; Trajectory.raise_if_failed tells more")
    return tuple(names)


def _sample(system: Any, result: Any) -> _Sample:
    y, none = _output(result), jnp.zeros(0, int)
    if not isinstance(result, Trajectory):
        return _Sample(y, none, none, none)
    q, v = result.q[-1], result.v[-1]
    rest = 1e-9 * (1 + jnp.max(jnp.abs(v)))
    slip = system.slip(result.t[-1], q, v) if hasattr(system, "slip") else jnp.zeros_like(result.gap[-1])
    closed = (result.impulse[-1] > 0) & (jnp.abs(result.gap_rate[-1]) <= rest)
    mode = jnp.where(closed, 2 + jnp.sign(jnp.where(jnp.abs(slip) > rest, slip, 0.0)), 0).astype(int)
    impacts = result.closed_steps if result.impacts is None else result.impacts.count[None]
    return _Sample(y, impacts, mode, (result.failed_step >= 0).astype(int)[None])


def _blur(system: Any, base: Any) -> Float[np.ndarray, "..."]:
    """By how much the values are uncertain because impacts are placed within a step: dt |(v, a)|."""
    if not isinstance(base, Trajectory) or base.impacts is not None or not np.any(base.closed_steps):
        return np.zeros(())
    t, q, v = base.t[-1], base.q[-1], base.v[-1]
    acceleration = np.linalg.solve(system.mass_matrix(q), system.force(t, q, v))
    return np.abs(float(base.dt) * np.concatenate([v, acceleration]))


def _judge(
    x: float, y: Any, automatic: Any, h: Any, ends: Any, at: _Sample, size: Any, blur: Any, rtol: float, horizon: float
) -> dict[str, Any]:
    """One row of the report; ends and samples are in the order x + h, x - h, x."""
    width = (ends[: h.size] - ends[h.size : -1])[:, None]
    quotients = (at.y[: h.size] - at.y[h.size : -1]) / width

    def changes(of: Any, but: float = 0.0) -> Any:
        moved = np.any(np.abs(of - of[-1]) > but * of[-1], axis=-1)
        return moved[: h.size] | moved[h.size : -1]

    # a contact that rests is closed for a few steps more or less; an impact more or less is a larger part of the count
    impacts, modes, failures = changes(at.impacts, 0.1), changes(at.mode), changes(at.failed)
    judged = ~(impacts | modes | failures) & np.all(np.isfinite(quotients), axis=1)

    def norm(of: Any) -> Any:
        return np.linalg.norm(of / size, axis=-1)

    keep = np.flatnonzero(judged)
    D, span = quotients[keep], width[keep, 0]
    uncertainty = np.full(keep.size, np.inf)
    if keep.size > 1:
        jumps = np.append(norm(D[1:] - D[:-1]) * span[1:], 0.0)
        largest = 1.5 * np.maximum.accumulate(jumps[::-1])[::-1]  # among the finer steps
        floor = np.linalg.norm(2 * blur) + np.finfo(float).eps * norm(y)
        uncertainty[:-1] = np.maximum(largest, floor)[:-1] / span[:-1]
    best = 0
    for i in range(1, keep.size):
        if uncertainty[i] > 5 * uncertainty[best]:
            break  # jumps, or rounding; a plateau beyond them is that of frozen times
        best = i if uncertainty[i] < uncertainty[best] else best

    difference = D[best] if keep.size else np.full(y.size, np.nan)
    u = uncertainty[best] if keep.size else np.inf
    scale = np.fmax(norm(automatic), norm(difference))
    error, flags = norm(automatic - difference), []
    grown = np.isfinite(horizon) or np.linalg.norm(automatic * x) > _GROWTH * np.linalg.norm(y)
    unsettled = not keep.size or not np.isfinite(u) or (grown and u > _TELLING * norm(difference))
    relative = error / scale if scale > 0 else 0.0
    if np.any(impacts):
        flags.append("impact in step")
    if np.any(modes):
        flags.append("mode change")
    if not np.all(np.isfinite(automatic)):
        verdict = "differs"
    elif keep.size and scale * abs(x) <= _INACTIVE:
        flags.append("inactive")
        verdict, relative, u = "agrees", 0.0, 0.0
    elif unsettled:
        verdict = "undecided"
    elif not error <= 2 * u + rtol * scale:
        verdict = "differs"
        if np.any(norm(D[best:] - automatic) <= rtol * scale):
            flags.append("two slopes")
    else:
        verdict = "agrees" if u <= _TELLING * scale else "undecided"
    if "inactive" not in flags:
        linear = h[keep][norm(D - difference) <= 0.1 * scale]
        if grown or (linear.size and linear.max() < _LINEAR_RANGE):
            flags.append("growth")
    return {
        "difference": difference,
        "relative_error": relative,
        "uncertainty": u / scale if scale > 0 else 0.0,
        "step": h[keep[best]] if keep.size else np.nan,
        "verdicts": verdict,
        "flags": tuple(flags),
        "quotients": quotients,
        "judged": judged,
        "worst": int(np.argmax(np.nan_to_num(np.abs(automatic - difference) / size))),
    }


def _grazes(run: Trajectory) -> bool:
    """Whether an impact is slow against the motion of its gap since the impact before it, as far as stored rows tell."""
    t, rate = np.asarray(run.t), np.asarray(run.gap_rate)
    closed = np.asarray(run.impulse) > 0
    for contact in range(rate.shape[1]):
        if run.impacts is None:  # rows in which a contact closes
            rows = np.flatnonzero(closed[1:, contact] & ~closed[:-1, contact]) + 1
            speeds, shortest = -rate[rows - 1, contact], 10  # rows of a flight; shorter ones have no speed to speak of
        else:
            hits = np.asarray(run.impacts.contacts)[:, contact]
            rows = np.searchsorted(t, np.asarray(run.impacts.time)[hits])
            speeds, shortest = -np.asarray(run.impacts.rate_before)[hits, contact], 1
        for first, row, speed in zip(np.append(0, rows), rows, speeds, strict=False):
            if row >= first + shortest and speed < _GRAZING * np.max(np.abs(rate[first:row, contact])):
                return True
    return False
