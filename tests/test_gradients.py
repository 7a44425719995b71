"""Derivatives through impacts against closed forms, the slider-crank's reference, and one another (benchmarks B1 to B8)."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsim
from experiments.gradients import BENCHMARKS, slider_crank
from jaxsim.systems import BallOnTable, BouncingBall, SliderCrank, SlidingBlock

MOREAU, GGL, EVENT = jaxsim.Moreau(), jaxsim.GearGuptaLeimkuhler(), jaxsim.EventDriven()
PLAIN = jaxsim.Moreau(gradient="plain")
SCHEMES = pytest.mark.parametrize("scheme", [MOREAU, GGL, EVENT], ids=["moreau", "ggl", "event"])
TABLE = ["amplitude", "angular_frequency", "restitution", "gravity"]
TIME_STEPPING = pytest.mark.parametrize("scheme", [MOREAU, GGL], ids=["moreau", "ggl"])
slow = pytest.mark.slow


# Against closed forms ----------------------------------------------------------------------------------------------------

# Their motions between impacts are polynomials of time of degree 2, which a method of order 4 integrates exactly.
EXACT = ["wall", "ball", "ball-3", "discs", "three-balls", "reversal", "sliding-stop", "grazing"]


@pytest.mark.parametrize(
    ("name", "dt"),
    [
        *((name, 1e-1) for name in ("ball-3", "three-balls")),
        *(pytest.param(name, dt, marks=slow) for name in EXACT for dt in (1e-1, 1e-2, 1e-3, 1e-4)),
    ],
)
def test_event_driven_is_exact(name, dt):
    assert np.max(BENCHMARKS[name].errors(EVENT, dt)) < 1e-10


@pytest.mark.parametrize("name", ["oscillator", pytest.param("compliant", marks=slow)])
def test_event_driven_has_order_4(name):
    coarse, fine = (BENCHMARKS[name].errors(EVENT, dt) for dt in (1e-2, 1e-3))
    assert np.all(fine < 1e-8) and np.all(np.log10(coarse / fine) > 3.5)


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        (MOREAU, "ball"),
        (GGL, "oscillator"),
        *(
            pytest.param(*pair, marks=slow)
            for pair in [(MOREAU, "oscillator"), (GGL, "ball"), (MOREAU, "ball-3"), (GGL, "ball-3")]
        ),
    ],
    ids=str,
)
def test_time_stepping_converges_with_order_1(scheme, name):
    coarse, fine = (BENCHMARKS[name].errors(scheme, dt) for dt in (1e-3, 1e-4))
    assert np.all(np.log10(coarse / fine) > 0.9) and np.all(fine < 0.02)


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        *((MOREAU, name) for name in ("wall", "grazing")),
        *(pytest.param(MOREAU, name, marks=slow) for name in ("discs", "three-balls", "reversal", "sliding-stop")),
        *(
            pytest.param(GGL, name, marks=slow)
            for name in ("wall", "grazing", "discs", "three-balls", "reversal", "sliding-stop")
        ),
    ],
    ids=str,
)
def test_time_stepping_is_exact_up_to_one_impact(scheme, name):
    """With forces that do not depend on the state the event-resolved step makes no error of its own.

    But for the time of the impact, the root of a gap that is taken for quadratic; that of the discs is not.
    """
    assert np.max(BENCHMARKS[name].errors(scheme, 1e-2)) < (1e-7 if name == "discs" else 1e-10)


def test_plain_derivatives_are_wrong_whatever_the_step():
    """dq/dh0 of the ball is that of free fall, 1, exactly."""
    ball = BENCHMARKS["ball"]
    for dt in (1e-2, 1e-3):
        np.testing.assert_allclose(ball.derivatives(PLAIN, dt)[:, 0, 1], 1.0, rtol=1e-12)
    assert np.all(ball.errors(PLAIN, 1e-3)[:2] > 0.2)


@SCHEMES
def test_derivatives_vanish_after_the_accumulation(scheme):
    np.testing.assert_array_equal(BENCHMARKS["accumulation"].derivatives(scheme, 1e-2), 0.0)


def wall_end(scheme, dt, steps):
    """(q, v) of a ball that flies against a wall, by (restitution, q0, v0)."""

    def end(x):
        run = jaxsim.simulate(
            BouncingBall(restitution=x[0], gravity=0.0),
            x[1:2],
            -x[2:],
            dt=dt,
            num_steps=steps,
            scheme=scheme,
            save_every=steps,
        )
        return jnp.stack([run.q[-1, 0], run.v[-1, 0]])

    return end


def wall_exact(x, T):
    eps, q0, v0 = x
    return np.array([[v0 * T - q0, -eps, eps * T], [v0, 0.0, eps]])


@SCHEMES
def test_continuous_over_the_initial_height(scheme):
    """Wherever in a step the impact falls: the first benchmark at 1000 heights."""
    heights = jnp.linspace(0.2, 0.8, 1000)
    found = jax.jit(jax.vmap(jax.jacfwd(wall_end(scheme, 0.05, 20))))(
        jnp.stack([jnp.full(1000, 0.7), heights, jnp.ones(1000)], axis=1)
    )
    wanted = np.stack([wall_exact((0.7, q0, 1.0), 1.0) for q0 in np.asarray(heights)])
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-10)


@SCHEMES
@pytest.mark.parametrize("eps", [0.0, 0.5, 1.0])
def test_impact_on_a_grid_point_and_one_ulp_beside(scheme, eps):
    jacobian = jax.jit(jax.jacfwd(wall_end(scheme, 0.125, 8)))
    for q0 in (np.nextafter(0.5, 0), 0.5, np.nextafter(0.5, 1)):
        found = jacobian(jnp.array([eps, q0, 1.0]))
        np.testing.assert_allclose(found, wall_exact((eps, q0, 1.0), 1.0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scheme", [MOREAU, EVENT, pytest.param(GGL, marks=slow)], ids=["moreau", "event", "ggl"])
def test_reversal_of_friction_on_a_grid_point_and_one_ulp_beside(scheme):
    def end(v0):
        run = jaxsim.simulate(
            SlidingBlock(friction=0.2, pull=5.0, gravity=10.0), [0.0, 0.0], jnp.stack([v0, 0 * v0]),
            dt=0.125, num_steps=8, scheme=scheme,
        )  # fmt: skip
        return jnp.stack([run.q[-1, 0], run.v[-1, 0]])

    jacobian = jax.jit(jax.jacfwd(end))
    for v0 in (np.nextafter(-3.5, -4), -3.5, np.nextafter(-3.5, 0)):  # turns at 0.5 s
        np.testing.assert_allclose(jacobian(jnp.asarray(v0)), [0.5 + 3 / 7 * 0.5, 3 / 7], rtol=1e-12)


@SCHEMES
def test_rest_after_a_plastic_impact(scheme):
    """Restitution 0: nothing is left of the start."""

    def end(h0):
        run = jaxsim.simulate(BouncingBall(restitution=0.0), h0[None], [0.0], dt=0.01, num_steps=60, scheme=scheme)
        return run.q[-1, 0], run.v[-1, 0]

    assert all(d == 0 for d in jax.jit(jax.jacfwd(end))(jnp.asarray(1.0)))


def on_the_table(scheme, dt):
    return lambda table: jaxsim.simulate(table, [0.3], [0.0], dt=dt, num_steps=round(0.6 / dt), scheme=scheme)


def test_moving_wall():
    """Against differences of the event-driven values."""
    report = jaxsim.gradient_check(on_the_table(EVENT, 0.01), BallOnTable(), TABLE)
    assert report.verdicts == ("agrees",) * 4 and np.max(report.relative_error) < 1e-7, str(report)


@slow
@TIME_STEPPING
def test_moving_wall_in_time_stepping(scheme):
    def derivatives(scheme, dt):
        run = on_the_table(scheme, dt)
        end = jax.jit(jax.jacfwd(lambda x: run(BallOnTable(**dict(zip(TABLE, x, strict=True)))).q[-1, 0]))
        return end(jnp.array([getattr(BallOnTable(), name) for name in TABLE]))

    exact = derivatives(EVENT, 1e-3)
    errors = [np.linalg.norm(derivatives(scheme, dt) - exact) for dt in (1e-3, 1e-4)]
    assert np.log10(errors[0] / errors[1]) > 0.9, errors


# The slider-crank, through chattering and closed contacts ----------------------------------------------------------------

ROWS = json.loads((Path(__file__).parent / "reference" / "slider_crank_derivatives.json").read_text())["rows"]
PARAMETERS = {"restitution": "d_restitution", "l2": "d_l2", "m3": "d_m3", "c": "d_clearance"}


def slider_crank_errors(scheme, dt, fields=tuple(PARAMETERS)):
    """Relative errors, (rows, parameters, [norm of q, norm of v]), in one simulation over 20 ms."""

    def states(x):
        system = dataclasses.replace(SliderCrank(), restitution=0.4)
        system = dataclasses.replace(system, **dict(zip(fields, x, strict=True)))
        run = jaxsim.simulate(
            system,
            [0.0] * 3,
            [150.0, -75.0, 0.0],
            dt=dt,
            num_steps=round(0.02 / dt),
            save_every=round(4e-3 / dt),
            scheme=scheme,
        )
        return jnp.stack([run.q[:, :2], run.v[:, :2]], axis=1)

    x = jnp.array([0.4 if name == "restitution" else getattr(SliderCrank(), name) for name in fields])
    found = np.asarray(jax.jit(jax.jacfwd(states))(x))
    errors = []
    for row in ROWS:
        wanted = np.array([row[PARAMETERS[name]] for name in fields]).reshape(len(fields), 2, 2)
        distance = np.moveaxis(found[round(row["t"] / 4e-3)], -1, 0) - wanted
        errors.append(np.linalg.norm(distance, axis=-1) / np.linalg.norm(wanted, axis=-1))
    return np.array(errors)


def test_slider_crank_event_driven():
    assert np.max(slider_crank_errors(EVENT, 2e-5)) < 1e-6


@slow
def test_slider_crank_unified():
    fine, finer = (slider_crank_errors(GGL, dt) for dt in (1e-5, 2e-6))
    assert np.max(fine[:, 1:]) < 0.05 and np.max(fine[:, 0]) < 0.2
    assert np.max(fine[2:, 1:3]) < 5e-3
    assert np.max(finer[:, 1:]) < 0.01 and np.max(finer[:, 0]) < 0.1
    assert np.all(np.max(finer, axis=-1) < np.max(fine, axis=-1))


@slow
def test_slider_crank_moreau_converges():
    coarse, fine = (slider_crank_errors(MOREAU, dt) for dt in (1e-5, 1e-6))
    settled = np.linalg.norm(coarse, axis=-1)[3] / np.linalg.norm(fine, axis=-1)[3]
    assert np.all(np.log10(settled) > 0.9), (coarse, fine)


@slow
def test_two_corners_at_once():
    """theta3 = 0 from the start: both corners of a side hit in the same instant, which no parameter changes."""
    (wanted,) = slider_crank(4).references()
    (found,) = slider_crank(4).derivatives(MOREAU, 2e-5)
    assert np.all(np.linalg.norm(found - wanted, axis=0) < 0.05 * np.linalg.norm(wanted, axis=0))


# Against one another -----------------------------------------------------------------------------------------------------


def start(x, scheme, steps=100, dt=1e-5, **options):
    """A slider-crank just before its first impact; x = (restitution, l2)."""
    system = dataclasses.replace(SliderCrank(), restitution=x[0], l2=x[1])
    return jaxsim.simulate(
        system, [0.0, 0.0, 0.0], [150.0, -75.0, 0.0], dt=dt, num_steps=steps, scheme=scheme, save_every=steps, **options
    )


X = jnp.array([0.4, 0.3])


@TIME_STEPPING
def test_the_value_is_that_without_derivatives(scheme):
    """To the last bit: differentiated or not, with either kind of gradient."""

    def run(x, scheme):
        return jaxsim.simulate(BouncingBall(restitution=x[0]), x[1:], [0.0], dt=1e-3, num_steps=1500, scheme=scheme).q

    x, direction = jnp.array([0.8, 1.0]), jnp.array([1.0, 0.5])
    value = run(x, scheme)
    plain = dataclasses.replace(scheme, gradient="plain")
    np.testing.assert_array_equal(value, run(x, plain))
    np.testing.assert_array_equal(value, jax.jvp(lambda x: run(x, scheme), (x,), (direction,))[0])
    np.testing.assert_array_equal(value, jax.vjp(lambda x: run(x, scheme), x)[0])


@SCHEMES
def test_forward_equals_reverse_and_batches_equal_single_runs(scheme):
    def f(x):
        run = jaxsim.simulate(BouncingBall(restitution=x[0]), x[1:], [0.0], dt=0.01, num_steps=150, scheme=scheme)
        return jnp.stack([run.q[-1, 0], run.v[-1, 0], run.energy[-1]])

    x = jnp.array([0.8, 1.0])
    forward = jax.jit(jax.jacfwd(f))
    np.testing.assert_allclose(forward(x), jax.jit(jax.jacrev(f))(x), rtol=1e-10)
    batch = jnp.stack([x, x + 0.01, 0.9 * x])
    together = jax.jit(jax.vmap(jax.jacfwd(f)))(batch)
    np.testing.assert_allclose(together, [forward(x) for x in batch], rtol=1e-10)


@slow
@SCHEMES
def test_forward_equals_reverse_on_the_slider_crank(scheme):
    def f(x):
        run = start(x, scheme, steps=1200)  # beyond three impacts
        return jnp.concatenate([run.q[-1], run.v[-1]])

    forward, reverse = jax.jit(jax.jacfwd(f))(X), jax.jit(jax.jacrev(f))(X)
    np.testing.assert_allclose(forward, reverse, rtol=1e-10, atol=1e-10 * np.max(np.abs(forward)))


@pytest.mark.parametrize(
    "scheme", [MOREAU, *(pytest.param(scheme, marks=slow) for scheme in (GGL, EVENT))], ids=["moreau", "ggl", "event"]
)
def test_hessian(scheme):
    """Forward and reverse, in any order; the event-driven one is that of the closed form."""

    def f(x):
        return jaxsim.simulate(BouncingBall(restitution=x[0]), x[1:], [0.0], dt=0.05, num_steps=30, scheme=scheme).q[-1, 0]

    def closed(x):
        return BENCHMARKS["ball"].exact(x[0], x[1], 9.81)[0]

    x = jnp.array([0.8, 1.0])
    hessian = jax.jit(jax.hessian(f))(x)
    for outer in (jax.jacfwd, jax.jacrev):
        np.testing.assert_allclose(jax.jit(outer(jax.jacfwd(f)))(x), hessian, rtol=1e-9)
    np.testing.assert_allclose(hessian, hessian.T, rtol=1e-9)
    if scheme is EVENT:
        np.testing.assert_allclose(hessian, jax.hessian(closed)(x), rtol=1e-9)


@slow
def test_newton_does_not_show_in_derivatives():
    """The number of its iterations changes, by another tolerance or limit, and the derivative does not."""

    def derivative(**options):
        run = jax.jit(jax.jacfwd(lambda x: start(x, jaxsim.GearGuptaLeimkuhler(**options)).v[-1]))
        return np.asarray(run(X))

    wanted = derivative()
    for options in ({"tolerance": 1e-8}, {"max_iterations": 40}):
        np.testing.assert_allclose(derivative(**options), wanted, rtol=1e-6, atol=1e-9 * np.max(np.abs(wanted)))


# Memory of reverse mode --------------------------------------------------------------------------------------------------


def temporary_bytes(f, x):
    return jax.jit(jax.grad(f)).lower(x).compile().memory_analysis().temp_size_in_bytes


def ball_height(n, scheme=MOREAU, **options):
    return lambda x: jaxsim.simulate(
        BouncingBall(restitution=x), [1.0], [0.0], dt=1e-3, num_steps=n, scheme=scheme, save_every=n, **options
    ).q[-1, 0]


def test_memory_grows_like_the_root_of_the_steps():
    n = np.array([10_000, 1_000_000])
    needed = [temporary_bytes(ball_height(int(k)), jnp.asarray(0.8)) for k in n]
    assert np.polyfit(np.log(n), np.log(needed), 1)[0] <= 0.55, needed
    assert temporary_bytes(ball_height(10_000, checkpoint=False), jnp.asarray(0.8)) > 5 * needed[0]


@slow
@pytest.mark.parametrize("scheme", [MOREAU, GGL], ids=["moreau", "ggl"])
def test_memory_of_the_slider_crank(scheme):
    n = np.array([10_000, 100_000, 1_000_000])
    needed = [temporary_bytes(lambda x, k=int(k): start(x, scheme, k).q[-1, 1], X) for k in n]
    assert np.polyfit(np.log(n), np.log(needed), 1)[0] <= 0.55, needed


@slow
def test_memory_of_64_slider_cranks():
    n = np.array([1_600, 16_000, 160_000])
    starts = jnp.tile(X, (64, 1))
    needed = [
        temporary_bytes(lambda x, k=int(k): jnp.sum(jax.vmap(lambda x: start(x, MOREAU, k).q[-1, 1])(x)), starts) for k in n
    ]
    assert np.polyfit(np.log(n), np.log(needed), 1)[0] <= 0.55, needed


@pytest.mark.parametrize("scheme", [MOREAU, *(pytest.param(scheme, marks=slow) for scheme in (GGL, EVENT))], ids=str)
def test_checkpoints_do_not_change_the_gradient(scheme):
    """Also where the steps are no multiple of a chunk: 1009 is prime."""
    x = jnp.asarray(0.8)
    kept, computed = (jax.jit(jax.grad(ball_height(1009, scheme, checkpoint=c)))(x) for c in (False, True))
    np.testing.assert_allclose(computed, kept, rtol=1e-12)
