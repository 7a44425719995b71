"""Event-driven steps: the log of impacts, what a step cannot hold, accumulation, rest and release."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsim
from experiments.gradients import SpringDashpot
from jaxsim.systems import BallOnTable, BouncingBall, IdealSliderCrank, NewtonsCradle

G = 9.81


def drop(eps=0.8, h0=1.0, dt=0.1, steps=15, **options):
    scheme = jaxsim.EventDriven(**options)
    return jaxsim.simulate(BouncingBall(restitution=eps), [h0], [0.0], dt=dt, num_steps=steps, scheme=scheme)


def impact_times(eps, h0, count):
    """t_1 + (2 w / g) sum of eps^k."""
    w = jnp.sqrt(2 * G * h0)
    return jnp.stack([w / G + 2 * w / G * sum(eps**k for k in range(1, n)) for n in range(1, count + 1)])


def test_the_log():
    log, w = drop(max_logged=5).impacts, np.sqrt(2 * G)
    assert log.count == 2
    np.testing.assert_allclose(log.time[:2], impact_times(0.8, 1.0, 2), rtol=1e-14)
    np.testing.assert_array_equal(log.time[2:], np.inf)
    np.testing.assert_array_equal(log.contacts[:, 0], [True, True, False, False, False])
    np.testing.assert_allclose(log.rate_before[:, 0], [-w, -0.8 * w, 0, 0, 0], rtol=1e-14)
    np.testing.assert_allclose(log.impulse[:, 0], [1.8 * w, 1.8 * 0.8 * w, 0, 0, 0], rtol=1e-14)


def test_the_log_is_differentiable():
    def entries(x):
        log = drop(x[0], x[1]).impacts
        return jnp.concatenate([log.time[:2], log.rate_before[:2, 0], log.impulse[:2, 0]])

    def exact(x):
        w = jnp.sqrt(2 * G * x[1]) * jnp.array([1.0, 1.0]) * jnp.stack([1.0, x[0]])
        return jnp.concatenate([impact_times(x[0], x[1], 2), -w, (1 + x[0]) * w])

    x = jnp.array([0.8, 1.0])
    for transform in (jax.jacfwd, jax.jacrev):
        np.testing.assert_allclose(jax.jit(transform(entries))(x), jax.jacfwd(exact)(x), rtol=1e-11, atol=1e-11)


def test_a_log_that_is_full_goes_on_counting():
    full, none = drop(max_logged=1), drop(max_logged=0)
    assert full.impacts.count == none.impacts.count == 2 and full.impacts.time.shape == (1,)
    np.testing.assert_allclose(full.impacts.time, impact_times(0.8, 1.0, 1), rtol=1e-14)
    np.testing.assert_array_equal(full.q, none.q)


def test_batches_of_logs_equal_single_runs():
    """Two contacts each, and as many impacts as it happens."""

    def run(eps):
        cradle = NewtonsCradle(masses=(0.1, 0.2, 0.1), restitution=eps, clearance=1e-3)
        return jaxsim.simulate(cradle, [-0.1, 0.0, 0.0], [0.0] * 3, dt=0.01, num_steps=40, scheme=jaxsim.EventDriven())

    eps = jnp.array([0.2, 0.6, 0.9])
    batch = jax.jit(jax.vmap(run))(eps)
    for i in range(3):
        single = jax.jit(run)(eps[i]).raise_if_failed()
        assert batch.impacts.count[i] == single.impacts.count > 1
        np.testing.assert_array_equal(batch.impacts.contacts[i], single.impacts.contacts)
        np.testing.assert_allclose(batch.impacts.time[i], single.impacts.time, rtol=1e-12)
        np.testing.assert_allclose(batch.q[i], single.q, rtol=1e-12, atol=1e-14)


def test_more_impacts_than_a_step_can_hold_are_a_failure():
    """Three impacts in one step of 2 s, at 0.45, 1.17 and 1.75 s."""
    for limit, failed in ((3, False), (2, True)):
        run = drop(dt=2.0, steps=1, max_impacts=limit)
        assert (run.failed_step == 0) == failed
    with pytest.raises(jaxsim.SimulationError, match="max_impacts"):
        run.raise_if_failed()


@pytest.mark.parametrize("dt", [0.1, 0.013])
def test_accumulation_is_closed(dt):
    run = drop(0.5, dt=dt, steps=round(1.6 / dt)).raise_if_failed()
    np.testing.assert_array_equal(run.v[-1], 0.0)
    assert abs(run.q[-1, 0]) < 1e-12 and run.min_gap[0] > -1e-12
    t_end = float(impact_times(0.5, 1.0, 1)[0]) * 3
    last = np.max(np.where(np.isfinite(run.impacts.time), run.impacts.time, 0))
    assert t_end - dt < last <= t_end


def test_rest_and_release():
    """A ball at rest on the table lifts off where the table brakes harder than gravity."""
    table = BallOnTable()
    run = jaxsim.simulate(
        table, [0.0], [table.amplitude * table.angular_frequency], dt=1e-3, num_steps=60, scheme=jaxsim.EventDriven()
    ).raise_if_failed()
    lift_off = np.arcsin(G / (table.amplitude * table.angular_frequency**2)) / table.angular_frequency
    t, gap = np.asarray(run.t), np.asarray(run.gap[:, 0])
    flies = t > lift_off
    assert np.all(np.abs(gap[~flies]) < 1e-15) and np.all(gap[flies] > 0)
    at = table.amplitude * np.sin(table.angular_frequency * lift_off)
    rate = table.amplitude * table.angular_frequency * np.cos(table.angular_frequency * lift_off)
    tau = t[flies] - lift_off
    hits = run.impacts.count > 0
    until = tau < (run.impacts.time[0] - lift_off if hits else np.inf)
    np.testing.assert_allclose(run.q[flies, 0][until], (at + rate * tau - G * tau**2 / 2)[until], rtol=1e-9)


def test_systems_without_contacts():
    run = jaxsim.simulate(SpringDashpot(damping=0.0), [1.0], [0.0], dt=0.01, num_steps=100, scheme=jaxsim.EventDriven())
    np.testing.assert_allclose(run.q[-1], np.cos(10.0), rtol=1e-5)
    crank = jaxsim.simulate(
        IdealSliderCrank(), [0.0, 0.0, 0.0], [150.0, -75.0, 0.0], dt=1e-5, num_steps=500, scheme=jaxsim.EventDriven()
    ).raise_if_failed()
    np.testing.assert_allclose(crank.energy[-1], crank.energy[0], rtol=1e-9)
    assert crank.impacts.count == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_impacts": 0}, "max_impacts = 0 must be an integer of at least 1"),
        ({"max_logged": -1}, "max_logged = -1 must be an integer of at least 0"),
        ({"rest_speed": 0.0}, "rest_speed = 0.0 must be positive"),
        ({"rest_speed": float("nan")}, "rest_speed = nan"),
        ({"gradient": "exact"}, "gradient = 'exact' is not one of"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        jaxsim.EventDriven(**options)
