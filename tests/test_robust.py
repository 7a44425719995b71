"""No NaN and no inf, in value or derivative, at 1e5 random and adversarial states per scheme: one step from each of them.

The states have gaps and gap rates that are zero, next to zero, or such that the impact falls on the middle or the end of the
step, also but for one ulp; on one contact, on several at once, or on none; with restitution and friction at the ends of
their ranges, velocities that vanish, an aligned crank. Derivatives are taken along a random direction and along a single
coordinate or parameter (0 times inf shows only there), in forward and in reverse mode, with t and dt among the arguments.
float32 gets the same states, rounded: what is below its range (1e-300) is 0 there, and gaps are off by up to 1e-7.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from jaxsim.schemes import DecoupledGearGuptaLeimkuhler, EventDriven, GearGuptaLeimkuhler, Moreau, State
from jaxsim.system import gap_jacobian, gap_rate, has_friction, slip_jacobian
from jaxsim.systems import ImpactOscillator, NewtonsCradle, RockingBlock, SliderCrank, SlidingBlock

SYSTEMS = {
    # system, scales of q and v, steps
    "slider-crank": (SliderCrank(), (np.pi, np.pi, 0.02), (150.0, 75.0, 100.0), (1e-6, 1e-5, 1e-4)),
    "oscillator": (ImpactOscillator(damping=1.0, drive_amplitude=5.0, drive_frequency=7.0), (1.0,), (10.0,), (1e-4, 1e-2)),
    "cradle": (NewtonsCradle(masses=(0.1, 0.2, 0.1, 0.1)), (0.1,) * 4, (1.0,) * 4, (1e-4, 1e-3)),
    "sliding block": (SlidingBlock(pull=1.0, inclination=0.1), (1.0, 1.0), (3.0, 3.0), (1e-3, 1e-2)),
    "rocking block": (RockingBlock(), (1.0, 0.6, 0.5), (1.0, 1.0, 3.0), (1e-4, 1e-3)),
}
SCHEMES = {
    "moreau": Moreau(),
    "plain": Moreau(gradient="plain"),
    "ggl": GearGuptaLeimkuhler(),
    "decoupled": DecoupledGearGuptaLeimkuhler(),
    "event": EventDriven(max_logged=2),
}
# each scheme once, on systems that compile fast: opposing contacts, friction, several contacts at once
DEFAULT = [
    *(("plain", "slider-crank"), ("moreau", "oscillator"), ("ggl", "sliding block")),
    *(("decoupled", "cradle"), ("event", "sliding block")),
]
SMALL = (0.0, 0.0, 1e-300, 1e-16, 1e-12, 1e-8)  # what vanishes, or nearly


@functools.partial(jax.jit, static_argnums=4)
@functools.partial(jax.vmap, in_axes=(None, 0, 0, 0, None))
def contact_rows(system, t, q, v, rubbing):
    """Gaps and their Jacobian, and the rates to choose with theirs: of the gaps and, with friction, of the slips."""
    W, rate = gap_jacobian(system, t, q), gap_rate(system, t, q, v)
    if not rubbing:
        return system.gap(t, q), W, rate, W
    return system.gap(t, q), W, jnp.append(rate, system.slip(t, q, v)), jnp.append(W, slip_jacobian(system, t, q), axis=0)


def draw(rng, name, count):
    """States (t, q, v), steps, and systems, each of `count`: admissible but for a penetration of 1e-8 at most."""
    batches = []
    while sum(len(batch[0]) for batch in batches) < count:
        batches.append(_draw(rng, name, 4096))
    columns = zip(*batches, strict=True)
    *state, systems = (jax.tree.map(lambda *parts: np.concatenate(parts)[:count], *column) for column in columns)
    return *state, systems


def _draw(rng, name, n):
    system, q_scale, v_scale, steps = SYSTEMS[name]
    t, dt = rng.uniform(0, 1, n), rng.choice(steps, n)
    q, v = (rng.uniform(-1, 1, (n, len(scale))) * scale for scale in (q_scale, v_scale))
    v *= rng.choice([1.0, 1.0, 1.0, 0.0, 1e-12], v.shape) * rng.choice([1.0, 1.0, 1e-3, 1e-6, 0.0], (n, 1))
    if name == "slider-crank":
        y = rng.uniform(-1e-3, 1e-3, n) * rng.integers(0, 2, n)
        rod = np.arcsin((y - system.l1 * np.sin(q[:, 0])) / system.l2)
        q[:, 1] = np.where(rng.random(n) < 0.5, rod, np.pi - rod)
        q[:, 2] *= rng.integers(0, 2, n)
        aligned = rng.random(n) < 0.2
        q[aligned, :2] = rng.choice([0.0, np.pi], (aligned.sum(), 2))
    if name == "rocking block":
        q[:, 2] *= rng.integers(0, 2, n)

    # Newton for the gaps and the rates that some of the contacts shall have; coordinates without weight stay as they are
    rubbing = has_friction(system)
    gap, _, rate, _ = contact_rows(system, t, q, v, rubbing)
    near = (rng.random(gap.shape) < 0.4) & (np.arange(n)[:, None] % 8 > 0)
    gap_wanted = rng.choice(SMALL, gap.shape) * rng.choice([1, -1], gap.shape)
    chosen = np.concatenate([near, rng.random((n, rate.shape[1] - gap.shape[1])) < 0.5], axis=1)
    chosen &= rng.random((n, 1)) < 0.6
    rate_wanted = rng.choice((*SMALL, 1e-6, 1e-3), rate.shape) * rng.choice([1, -1], rate.shape)
    weight = rng.choice([1.0, 1.0, 1.0, 0.0], q.shape)
    for _ in range(6):
        gap, W, *_ = map(np.asarray, contact_rows(system, t, q, v, rubbing))
        q = q + _least(W, near, gap_wanted - gap, weight)
    for _ in range(3):
        _, _, rate, R = map(np.asarray, contact_rows(system, t, q, v, rubbing))
        v = v + _least(R, chosen, rate_wanted - rate, np.ones_like(q))
    # back in time, so that they touch at the start, in the middle, at the end, or anywhere; and one ulp to either side
    part = np.where(rng.random(n) < 0.8, rng.choice([0.0, 0.0, 0.5, 1.0, 1.0], n), rng.random(n))
    q = q - (part * dt)[:, None] * v
    q = np.nextafter(q, q + rng.integers(-1, 2, q.shape))

    eps = rng.choice([0.0, 1.0, np.nan], n)
    fields = {"restitution": np.where(np.isnan(eps), rng.random(n), eps)}
    if rubbing:
        mu = rng.choice([0.0, 1.0, np.nan], n)
        fields["friction"] = np.where(np.isnan(mu), rng.random(n), mu)
    systems = jax.tree.map(lambda x: np.broadcast_to(np.asarray(x, float), (n, *np.shape(x))), system)
    for field, values in fields.items():
        object.__setattr__(systems, field, values)
    keep = np.min(contact_rows(system, t, q, v, rubbing)[0], axis=1) >= -2e-8
    return t[keep], q[keep], v[keep], dt[keep], jax.tree.map(lambda x: x[keep], systems)


def _least(A, rows, wanted, weight):
    """The smallest change x with A x = wanted on the chosen rows, as far as they and the weights allow."""
    A = np.where(rows[:, :, None], A, 0.0)
    inverse = np.linalg.pinv(A * weight[:, None, :], rcond=1e-9)
    return weight * (inverse @ np.where(rows, wanted, 0.0)[:, :, None])[:, :, 0]


@functools.partial(jax.jit, static_argnames=("scheme", "reverse"))
def finite(scheme, systems, t, q, v, dt, directions, cotangent, *, reverse):
    """Which steps have a finite value and finite derivatives, forward and, where asked for, reverse."""

    @jax.vmap
    def one(system, t, q, v, dt, directions, cotangent):
        flat, unravel = ravel_pytree((system, t, q, v, dt))

        def step(flat):
            system, t, q, v, dt = unravel(flat)
            state = State(q, v)
            if hasattr(scheme, "start"):
                state = scheme.start(system, state, t)
            state, info = scheme.step(system, state, t, dt)
            if hasattr(scheme, "start"):  # entries of the log that are not used have time inf
                log = state.impacts
                used = jnp.arange(log.time.size) < log.count
                state = state._replace(impacts=log._replace(time=jnp.where(used, log.time, 0.0)))
            floats = [x for x in jax.tree.leaves((state, info)) if jnp.issubdtype(x.dtype, jnp.floating)]
            return ravel_pytree(floats)[0]

        if not reverse:
            value, tangents = jax.vmap(lambda d: jax.jvp(step, (flat,), (d,)))(directions)
            return jnp.stack([jnp.all(jnp.isfinite(x)) for x in (value, tangents)])
        value, push = jax.linearize(step, flat)
        pull = jax.linear_transpose(push, flat)
        tangents, gradient = jax.vmap(push)(directions), pull(jnp.resize(cotangent, value.shape))
        return jnp.stack([jnp.all(jnp.isfinite(x)) for x in (value, tangents, *gradient)])

    return one(systems, t, q, v, dt, directions, cotangent)


def check(scheme, name, count, reverse, dtype=np.float64, chunk=1000):
    rng = np.random.default_rng(0)
    t, q, v, dt, systems = draw(rng, name, count)
    size = sum(x[0].size for x in jax.tree.leaves((systems, t, q, v, dt)))
    single = np.eye(size)[rng.integers(0, size, count)]
    directions = np.stack([rng.normal(size=(count, size)), single], axis=1)
    batch = (systems, t, q, v, dt, directions, rng.normal(size=(count, 16)))
    batch = jax.tree.map(lambda x: x.astype(dtype), batch)
    parts = [jax.tree.map(lambda x, i=i: x[i : i + chunk], batch) for i in range(0, count, chunk)]
    fine = np.concatenate([np.asarray(finite(SCHEMES[scheme], *part, reverse=reverse)) for part in parts])
    bad = np.flatnonzero(~fine.all(axis=1))
    text = f"{(~fine).sum(axis=0)} of {count} states have no finite value, forward, reverse derivative, such as"
    for i in bad[:3]:
        text += f"\n{jax.tree.map(lambda x, i=i: x[i], systems)}, t={t[i]}, dt={dt[i]}, q={q[i].tolist()}, v={v[i].tolist()}"
    assert not bad.size, text


@pytest.mark.parametrize("scheme, name", DEFAULT)
def test_finite(scheme, name):
    check(scheme, name, 1000, reverse=False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_finite_at_many_states(scheme, name, dtype):
    """The systems together make 1e5 states for each scheme."""
    check(scheme, name, 20_000, reverse=True, dtype=dtype)


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_states_are_what_they_should_be(name):
    """Gaps and rates that vanish, singly and together; impacts on the end of the step; no more than a little penetration."""
    system = SYSTEMS[name][0]
    t, q, v, dt, systems = draw(np.random.default_rng(0), name, 10_000)
    gap, _, rate, _ = map(np.asarray, contact_rows(system, t, q, v, False))
    assert gap.min() >= -2e-8 and np.isfinite(rate).all()
    touches = np.abs(gap) < 1e-15
    for least, hold in [
        (1500, touches.any(axis=1)),
        (400, (touches.sum(axis=1) >= 2) if gap.shape[1] > 1 else touches[:, 0]),
        (1000, (touches & (np.abs(rate) < 1e-11)).any(axis=1)),
        (200, (gap < -1e-9).any(axis=1)),
        (50, (np.abs(gap + rate * dt[:, None]) < 1e-9).any(axis=1) & (gap > 1e-9).all(axis=1)),
        (500, (v == 0).all(axis=1)),
        (2000, systems.restitution == 1),
        (500, np.abs(np.sin(q[:, :2])).max(axis=1) < 1e-12 if name == "slider-crank" else touches.any(axis=1)),
    ]:
        assert hold.sum() >= least
