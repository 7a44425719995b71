"""The rollout: many steps of one scheme as one compiled loop."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from jaxsim.schemes.state import State, StepInfo
from jaxsim.system import constraint_jacobian, constraint_rate, energy, gap_rate, has_friction
from jaxsim.trajectory import Trajectory
from jaxsim.tune import hint_once


def simulate(
    system: Any,
    q0: Float[Array, " n"] | Any,
    v0: Float[Array, " n"] | Any,
    *,
    dt: float | Float[Array, ""],
    num_steps: int,
    scheme: Any,
    save_every: int = 1,
    t0: float | Float[Array, ""] = 0.0,
    progress: bool = False,
    max_penetration: float = 1e-6,
    allow_float32: bool = False,
    checkpoint: bool = True,
) -> Trajectory:
    """Simulate `num_steps` steps of length `dt` from (q0, v0) at time t0.

    Args:
        system: a mechanism (see `jaxsim.mechanism`); its fields may be traced or differentiated.
        q0: coordinates at t0, shape (n,).
        v0: velocities at t0, shape (n,).
        dt: step [s]; the time of step i is t0 + i dt, never accumulated.
        num_steps: how many steps; a multiple of `save_every`.
        scheme: `jaxsim.Moreau()`, `jaxsim.GearGuptaLeimkuhler()`, or any frozen dataclass with
            `step(system, state, t, dt) -> (state, info)`, where `state.q` and `state.v` are the coordinates and velocities.
            A scheme that carries more than those says so by `start(system, state, t0)`, which returns its first state.
        save_every: store every so many steps. Impulses and iterations are summed over the steps between; extremes and
            failures cover all steps.
        t0: time of the start [s].
        progress: show a progress bar (needs tqdm); at most 100 updates, ignored inside jit, vmap or grad.
        max_penetration: a start with a gap below minus this, or a joint open by more than this, is refused [m].
        allow_float32: permit single precision, which cannot resolve the small gaps of an impacting mechanism.
        checkpoint: let reverse-mode derivatives (`jax.grad`, `jax.jacrev`) keep one state per chunk of about
            sqrt(num_steps) / 4 steps and compute the steps between anew: memory grows like sqrt(num_steps) instead of
            num_steps, for one more forward pass. Without effect on values and on forward mode.

    Returns:
        `Trajectory` with time-major arrays of num_steps / save_every + 1 rows, the first of them the start.

    Raises:
        ValueError: shapes that do not fit, dt <= 0, a start that penetrates, restitution outside [0, 1], a negative
            friction coefficient, non-finite parameters; before anything is traced.
        TypeError: float32 without permission, a scheme without `step`, non-integer counts.

    A step that fails to converge raises nothing: see `Trajectory.raise_if_failed`. Under `jit` and `vmap`, where values are
    not known, what would be refused counts as a failure of step 0.

    >>> import jaxsim
    >>> ball = jaxsim.systems.BouncingBall(restitution=0.5)
    >>> run = jaxsim.simulate(ball, [1.0], [0.0], dt=1e-3, num_steps=1000, scheme=jaxsim.Moreau())
    >>> run.q.shape, round(float(run.min_gap[0]), 4)
    ((1001, 1), -0.0032)
    """
    num_steps, save_every = _count("num_steps", num_steps), _count("save_every", save_every)
    if num_steps % save_every:
        raise ValueError(f"num_steps = {num_steps} is not a multiple of save_every = {save_every}")
    if not callable(getattr(scheme, "step", None)) or isinstance(scheme, type):
        raise TypeError(f"scheme must be an object with a method step(system, state, t, dt), got {scheme!r}")
    try:
        hash(scheme)
    except TypeError as error:
        raise TypeError(
            f"scheme must be hashable, a frozen dataclass of plain numbers, since it is compiled in: {scheme!r}"
        ) from error
    if isinstance(system, type) or not hasattr(system, "mass_matrix"):
        raise TypeError(f"system must be an instance of a mechanism, such as SliderCrank(), got {system!r}")
    system, state, t0, dt = _as_arrays(system, q0, v0, t0, dt, allow_float32)
    _check_values(system, state, t0, dt)
    first, tally, at_start = _start(system, state, t0, dt, max_penetration)
    if not _is_traced(first):
        _check_start(first, at_start, max_penetration)

    hint_once(num_steps)
    if hasattr(scheme, "start"):  # what the scheme carries beside (q, v)
        state = scheme.start(system, state, t0)
    rows = num_steps // save_every
    run = functools.partial(_rollout, system, t0=t0, dt=dt, scheme=scheme, save_every=save_every)
    run = functools.partial(run, chunk=max(1, round(num_steps**0.5 / 4)) if checkpoint else num_steps)
    if progress and not _is_traced(system, state, t0, dt):
        state, parts, tally = _run_in_parts(run, state, tally, rows, save_every)
    else:
        state, tally, part = run(state, tally, jnp.asarray(0), rows=rows)
        parts = [part]
    return _finish(first, parts, tally, getattr(state, "impacts", None), t0, dt, num_steps=num_steps)


class _Row(NamedTuple):
    """One stored row; what follows the energy is summed over the steps since the row before."""

    t: Float[Array, ""]
    q: Float[Array, " n"]
    v: Float[Array, " n"]
    gap: Float[Array, " contacts"]
    gap_rate: Float[Array, " contacts"]
    energy: Float[Array, ""]
    impulse: Float[Array, " contacts"]
    friction_impulse: Float[Array, " rubbing"]
    joint_impulse: Float[Array, " joints"]
    iterations: Int[Array, ""]
    converged: Bool[Array, ""]


class _Sums(NamedTuple):
    """What is added up over the steps between two rows, counts among it.

    The loop carries it as one flat vector: every array that it carries is a kernel of its own in the compiled step.
    """

    impulse: Float[Array, " contacts"]
    friction_impulse: Float[Array, " rubbing"]
    joint_impulse: Float[Array, " joints"]
    closed: Float[Array, " contacts"]
    in_contact: Float[Array, ""]
    iterations: Float[Array, ""]
    failures: Float[Array, ""]


class _Failure(NamedTuple):
    """The first step that failed; step = -1 while none has. Flat in the loop, like `_Sums`."""

    step: Float[Array, ""]
    residual: Float[Array, ""]
    active: Float[Array, " contacts"]


class _Tally(NamedTuple):
    """What is known of all steps, stored or not."""

    min_gap: Float[Array, " contacts"]
    closed_steps: Int[Array, " contacts"]
    steps_in_contact: Int[Array, ""]
    failure: Float[Array, " flat"]


def _row(system: Any, t: Array, state: State, sums: _Sums) -> _Row:
    q, v = state.q, state.v
    return _Row(
        *(t, q, v, system.gap(t, q), gap_rate(system, t, q, v), energy(system, t, q, v)),
        *(sums.impulse, sums.friction_impulse, sums.joint_impulse),
        *(sums.iterations.astype(int), sums.failures == 0),
    )


def _nothing(system: Any, contacts: int, joints: int, dtype: Any) -> _Sums:
    zero, per_contact = jnp.zeros((), dtype), jnp.zeros(contacts, dtype)
    rubbing = jnp.zeros(contacts if has_friction(system) else 0, dtype)
    return _Sums(per_contact, rubbing, jnp.zeros(joints, dtype), per_contact, zero, zero, zero)


class _AtStart(NamedTuple):
    joints: Float[Array, " joints"]
    joint_rates: Float[Array, " joints"]
    joint_jacobian: Float[Array, "joints n"]
    mass: Float[Array, "n n"]


@jax.jit
def _start(system: Any, state: State, t0: Array, dt: Array, max_penetration: Any) -> tuple[_Row, _Tally, _AtStart]:
    """The first row, the empty tally, and what `_check_start` looks at. Shapes are checked here, once per structure."""
    _check_shapes(system, state)
    gap, joints = system.gap(t0, state.q), system.constraint(t0, state.q)
    row = _row(system, t0, state, _nothing(system, gap.size, joints.size, gap.dtype))
    # What is refused with an error where values are known fails at step 0 where they are traced, lane by lane.
    eps, mu = jnp.asarray(getattr(system, "restitution", 0.0)), jnp.asarray(getattr(system, "friction", 0.0))
    illegal = ~(dt > 0) | jnp.any(gap < -max_penetration) | jnp.any((eps < 0) | (eps > 1)) | jnp.any(mu < 0)
    failure = _Failure(
        jnp.where(illegal, 0.0, -1.0).astype(gap.dtype), jnp.zeros((), gap.dtype), (gap < -max_penetration).astype(gap.dtype)
    )
    tally = _Tally(gap, jnp.zeros(gap.size, int), jnp.asarray(0), jax.lax.stop_gradient(ravel_pytree(failure)[0]))
    jacobian = constraint_jacobian(system, t0, state.q)
    at_start = _AtStart(joints, constraint_rate(system, t0, *state), jacobian, system.mass_matrix(state.q))
    return jax.tree.map(lambda x: x[None], row), tally, at_start


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _step(scheme: Any, system: Any, state: Any, t: Array, dt: Array) -> tuple[Any, StepInfo]:
    return scheme.step(system, state, t, dt)


@_step.defjvp
def _step_jvp(scheme, primals, tangents):
    # Up to version 0.11 of JAX, reverse mode through `scan` drops the rules of `custom_jvp` (all derivatives of higher order
    # would be wrong) but within a branch of a `cond` that the loop decides.
    def step(system, state, t, dt):
        nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(scheme.step, system, state, t, dt))
        return jax.lax.cond(jnp.isfinite(state.q[0]), scheme.step, lambda *_: nothing, system, state, t, dt)

    return jax.jvp(step, primals, tangents)


@functools.partial(jax.jit, static_argnames=("scheme", "rows", "save_every", "chunk"))
def _rollout(
    system: Any,
    state: State,
    tally: _Tally,
    first_step: Array,
    *,
    t0: Array,
    dt: Array,
    scheme: Any,
    rows: int,
    save_every: int,
    chunk: int,
) -> tuple[State, _Tally, _Row]:
    contacts, joints = tally.min_gap.size, system.constraint(t0, state.q).size
    nothing, unravel = ravel_pytree(_nothing(system, contacts, joints, state.q.dtype))

    def step(carry, i):
        state, sums, min_gap, failure = carry
        state, info = _step(scheme, system, state, t0 + i * dt, dt)
        sums = sums + _sums_of(info, sums.dtype)
        min_gap = jnp.minimum(min_gap, system.gap(t0 + (i + 1) * dt, state.q))
        first = ~info.converged & (failure[0] < 0)
        this = _Failure(i.astype(failure.dtype), info.residual, info.active.astype(failure.dtype))
        failure = jax.lax.cond(first, lambda: jax.lax.stop_gradient(ravel_pytree(this)[0]), lambda: failure)
        return (state, sums, min_gap, failure), None

    def row(carry, r):
        state, tally = carry
        begin = first_step + r * save_every
        carry = (state, nothing, tally.min_gap, tally.failure)
        (state, flat, min_gap, failure), _ = _scan(lambda carry, i: step(carry, begin + i), carry, save_every, chunk)
        sums = unravel(flat)
        tally = _Tally(
            min_gap,
            tally.closed_steps + sums.closed.astype(int),
            tally.steps_in_contact + sums.in_contact.astype(int),
            failure,
        )
        # one flat vector per row: with multi-output fusion, XLA would copy several stacks of rows whole for every row
        return (state, tally), ravel_pytree(_row(system, t0 + (begin + save_every) * dt, state, sums))[0]

    (state, tally), stored = _scan(row, (state, tally), rows, chunk // save_every if save_every < chunk else rows)
    _, unravel_row = ravel_pytree(_row(system, t0, state, unravel(nothing)))
    return state, tally, jax.vmap(unravel_row)(stored)


def _scan(body: Any, carry: Any, count: int, chunk: int) -> tuple[Any, Any]:
    """`jax.lax.scan(body, carry, jnp.arange(count))`, in chunks of about `chunk` that reverse mode computes anew."""
    if chunk >= count:
        return jax.lax.scan(body, carry, jnp.arange(count))
    divisors = [size for size in range(max(1, chunk // 4), 4 * chunk + 1) if count % size == 0]
    if divisors:
        chunk = min(divisors, key=lambda size: max(size / chunk, chunk / size))
    else:  # steps that the last chunk has too many do nothing
        _, nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(body, carry, 0))

    def step(carry, i):
        if divisors:
            return body(carry, i)
        return jax.lax.cond(i < count, body, lambda carry, _: (carry, nothing), carry, i)

    def part(carry, first):
        return jax.lax.scan(step, carry, first + jnp.arange(chunk))

    begins = chunk * jnp.arange(-(-count // chunk))
    carry, stacked = jax.lax.scan(jax.checkpoint(part, prevent_cse=False), carry, begins)
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], stacked)


def _sums_of(info: StepInfo, dtype: Any) -> Float[Array, " flat"]:
    closed = jax.lax.stop_gradient(info.impulse) > 0
    counts = (jnp.any(closed), info.iterations, ~info.converged)
    sums = _Sums(
        *(info.impulse, info.friction_impulse, info.joint_impulse, closed.astype(dtype)),
        *(jnp.asarray(count, dtype) for count in counts),
    )
    return ravel_pytree(sums)[0]


@functools.partial(jax.jit, static_argnames="num_steps")
def _finish(
    first: _Row, parts: list[_Row], tally: _Tally, impacts: Any, t0: Array, dt: Array, *, num_steps: int
) -> Trajectory:
    stored = jax.tree.map(lambda *pieces: jnp.concatenate(pieces), first, *parts)
    failure = _Failure(tally.failure[0], tally.failure[1], tally.failure[2:])
    return Trajectory(
        **stored._asdict(),
        min_gap=tally.min_gap,
        closed_steps=tally.closed_steps,
        steps_in_contact=tally.steps_in_contact,
        failed_step=failure.step.astype(int),
        failed_time=jnp.where(failure.step < 0, jnp.nan, t0 + failure.step * dt),
        failed_residual=failure.residual,
        failed_active=failure.active > 0,
        dt=dt,
        impacts=impacts,
        num_steps=num_steps,
    )


def _run_in_parts(run: Any, state: State, tally: _Tally, rows: int, save_every: int) -> tuple[Any, list[_Row], _Tally]:
    # The same loop, cut into at most 100 calls: the bar costs no host callback inside the compiled loop.
    from tqdm.auto import tqdm

    length = -(-rows // 100)
    parts = []
    with tqdm(total=rows * save_every, unit="step", unit_scale=True) as bar:
        for begin in range(0, rows, length):
            part_rows = min(length, rows - begin)
            state, tally, part = run(state, tally, jnp.asarray(begin * save_every), rows=part_rows)
            parts.append(jax.block_until_ready(part))
            bar.update(part_rows * save_every)
    return state, parts, tally


def _as_arrays(system: Any, q0: Any, v0: Any, t0: Any, dt: Any, allow_float32: bool) -> tuple[Any, State, Array, Array]:
    dtype = jnp.result_type(float)  # float64 where x64 is on
    if dtype != jnp.float64 and not allow_float32:
        raise TypeError(
            "jaxsim needs float64, float32 cannot resolve the gaps of an impacting mechanism: call "
            "jax.config.update('jax_enable_x64', True) first, or pass allow_float32=True"
        )
    for name, value in (("q0", q0), ("v0", v0)):
        if allow_float32 or not hasattr(value, "dtype"):
            continue
        if value.dtype == np.float32:
            raise TypeError(f"{name} is float32; convert it to float64, or pass allow_float32=True")
    if allow_float32 and all(getattr(x, "dtype", None) == np.float32 for x in (q0, v0)):
        dtype = jnp.dtype("float32")

    def cast(
        x: Any,
    ) -> Any:  # NumPy where JAX has no part in it yet: a dozen small transfers cost more than a thousand steps
        return jnp.asarray(x, dtype) if isinstance(x, jax.Array) else np.asarray(x, dtype)

    try:
        system = jax.tree.map(cast, system)
    except (TypeError, ValueError) as error:
        raise TypeError(f"a field of {type(system).__name__} is not a number or an array of numbers: {system!r}") from error
    q0, v0, t0, dt = (jnp.asarray(x, dtype) for x in (q0, v0, t0, dt))
    return system, State(q0, v0), t0, dt


def _check_shapes(system: Any, state: State) -> None:
    q, v = state
    if q.ndim != 1 or v.shape != q.shape or not q.size:
        raise ValueError(
            f"q0 and v0 must be vectors of the same length, got shapes {q.shape} and {v.shape}; "
            "for many starts at once wrap simulate in jax.vmap"
        )
    n, t = q.size, jnp.zeros((), q.dtype)

    def shape(method: str, *arguments: Array) -> Any:
        try:
            return jax.eval_shape(getattr(system, method), *arguments)
        except (TypeError, ValueError) as error:
            fields = {field.name: np.shape(getattr(system, field.name)) for field in dataclasses.fields(system)}
            arrays = ", ".join(f"{field} {size}" for field, size in fields.items() if size)
            raise ValueError(
                f"{type(system).__name__}.{method} fails for {n} coordinates (array fields: {arrays or 'none'}): {error}; "
                "for a batch of parameters wrap simulate in jax.vmap"
            ) from error

    shapes = {
        "mass_matrix(q)": (shape("mass_matrix", q), (n, n)),
        "force(t, q, v)": (shape("force", t, q, v), (n,)),
        "potential_energy(t, q)": (shape("potential_energy", t, q), ()),
        "gap(t, q)": (shape("gap", t, q), (None,)),
        "constraint(t, q)": (shape("constraint", t, q), (None,)),
    }
    contacts = shapes["gap(t, q)"][0]
    if hasattr(system, "applied_force"):
        shapes["applied_force(t, q, v)"] = (shape("applied_force", t, q, v), (n,))
    if hasattr(system, "slip"):
        shapes["slip(t, q, v)"] = (shape("slip", t, q, v), contacts.shape)
    for name, (result, wanted) in shapes.items():
        if len(result.shape) != len(wanted) or any(w not in (None, s) for s, w in zip(result.shape, wanted, strict=True)):
            size = f"({', '.join('any' if w is None else str(w) for w in wanted)})"
            raise ValueError(
                f"{type(system).__name__}.{name} has shape {result.shape}, expected {size} for {n} coordinates; "
                "for a batch of parameters wrap simulate in jax.vmap"
            )
    for name in ("restitution", "friction"):
        value = getattr(system, name, None)
        if value is not None and jnp.shape(value) not in ((), contacts.shape):
            raise ValueError(
                f"{type(system).__name__}.{name} has shape {jnp.shape(value)}, expected one value or one per contact, "
                f"{contacts.shape}; for a batch of parameters wrap simulate in jax.vmap"
            )
    listed = [index for group in system.opposing for index in group]
    if len(set(listed)) != len(listed) or any(not 0 <= index < contacts.shape[0] for index in listed):
        raise ValueError(f"{type(system).__name__}.opposing = {system.opposing} does not fit {contacts.shape[0]} contacts")


def _check_values(system: Any, state: State, t0: Array, dt: Array) -> None:
    """Everything that is known before tracing; a traced value passes."""
    name = type(system).__name__
    if not _is_traced(dt) and not (np.ndim(dt) == 0 and np.isfinite(dt) and dt > 0):
        raise ValueError(f"dt = {dt} must be one positive, finite number")
    if np.ndim(t0):
        raise ValueError(f"t0 = {t0} must be one number")
    for what, value in (("q0", state.q), ("v0", state.v), ("t0", t0)):
        if not _is_traced(value) and not np.all(np.isfinite(value)):
            raise ValueError(f"{what} = {value} is not finite")
    for path, leaf in jax.tree_util.tree_leaves_with_path(system):
        if not _is_traced(leaf) and not np.all(np.isfinite(leaf)):
            raise ValueError(f"{name}{jax.tree_util.keystr(path)} = {leaf} is not finite")
    eps, mu = getattr(system, "restitution", 0.0), getattr(system, "friction", 0.0)
    if not _is_traced(eps) and not np.all((np.asarray(eps) >= 0) & (np.asarray(eps) <= 1)):
        raise ValueError(f"{name}.restitution = {eps} must lie in [0, 1]")
    if not _is_traced(mu) and not np.all(np.asarray(mu) >= 0):
        raise ValueError(f"{name}.friction = {mu} must not be negative")


def _check_start(first: _Row, at_start: _AtStart, max_penetration: float) -> None:
    gap = np.asarray(first.gap[0])
    opening, rate, jacobian, mass = map(np.asarray, at_start)
    if not np.all(np.isfinite(mass)) or np.any(np.linalg.eigvalsh((mass + mass.T) / 2) <= 0):
        raise ValueError(f"mass_matrix(q0) is not positive definite: {mass.tolist()}; check masses and inertias")
    if jacobian.size and np.linalg.matrix_rank(jacobian) < len(jacobian):
        raise ValueError(f"the joints are redundant at the start, their Jacobian has dependent rows: {jacobian.tolist()}")
    if np.any(~(gap >= -max_penetration)):
        raise ValueError(
            f"the start penetrates: gap(t0, q0) = {gap}; move q0, or pass max_penetration larger than {max_penetration}"
        )
    if np.any(~(np.abs(opening) <= max_penetration)):
        raise ValueError(
            f"the start violates the joints: constraint(t0, q0) = {opening}; move q0, or pass max_penetration larger "
            f"than {max_penetration}"
        )
    if np.any(~(np.abs(rate) <= 1e-6 * (1 + np.max(np.abs(first.v))))):
        raise ValueError(f"the start violates the joints: v0 opens them at the rate {rate}, which must be zero")


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} = {value} must be at least 1")
    return int(value)


def _is_traced(*trees: Any) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(trees))
