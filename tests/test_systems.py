"""The mechanisms against closed forms.

Compiling dominates the time: runs of one mechanism share the number of steps and the shapes of its parameters, and a smaller
step means a shorter time, in which everything of interest has to happen.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp
from scipy.optimize import brentq

import jaxsim
from jaxsim.schemes import State
from jaxsim.system import energy, gap_jacobian
from jaxsim.systems import (
    BallOnTable,
    BouncingBall,
    DoublePendulum,
    ImpactOscillator,
    NewtonsCradle,
    RockingBlock,
    SliderCrank,
    SlidingBlock,
)

G = 9.81
SCHEMES = {"moreau": jaxsim.Moreau(), "ggl": jaxsim.GearGuptaLeimkuhler()}
both_schemes = pytest.mark.parametrize("scheme", list(SCHEMES.values()), ids=list(SCHEMES))


def run(system, q0, v0, dt, num_steps, scheme, t0=0.0):
    return jaxsim.simulate(system, q0, v0, dt=dt, num_steps=num_steps, scheme=scheme, t0=t0).raise_if_failed()


def events(trajectory, contact=0):
    """Rows whose step had an impulse."""
    return np.flatnonzero(np.asarray(trajectory.impulse[:, contact]) > 0)


# Bouncing ball -------------------------------------------------------------------------------------------------------


def ball(T, h0, e, impacts):
    """B2: height and velocity at T after that many impacts of a ball dropped from h0, and the time until the next one."""
    w = np.sqrt(2 * G * h0)
    landed = w / G + 2 * w / G * sum(e**k for k in range(1, impacts)) if impacts else -w / G
    speed, tau = e**impacts * w, T - landed
    return speed * tau - G * tau**2 / 2, speed - G * tau


def ball_errors(scheme, e, dt):
    worst = np.zeros((3, 2))
    for h0 in np.linspace(0.04, 0.05, 20):
        result = run(BouncingBall(restitution=e), [h0], [0.0], dt, 4000, scheme)
        w = np.sqrt(2 * G * h0)
        landed = w / G * (1 + 2 * np.array([0, e, e + e**2, e + e**2 + e**3]))
        for n, middle in enumerate((landed[1:] + landed[:-1]) / 2, start=1):
            row = round(middle / dt)
            q, v = ball(float(result.t[row]), h0, e, n)
            error = abs(float(result.q[row, 0]) - q), abs(float(result.v[row, 0]) - v)
            worst[n - 1] = np.maximum(worst[n - 1], error)
    return worst


@both_schemes
@pytest.mark.parametrize("e", [0.5, 1.0])
def test_ball_after_one_two_and_three_impacts(scheme, e):
    dt = 1.6e-4
    coarse, fine = ball_errors(scheme, e, 4 * dt), ball_errors(scheme, e, dt)
    # An impact is placed within a step: its time is wrong by at most dt, and gravity is lost on the part after it.
    impacts = np.array([1, 2, 3])
    assert np.all(fine[:, 0] < impacts * (1 + e) * np.sqrt(2 * G * 0.05) * dt)
    assert np.all(fine[:, 1] < 2 * impacts * (1 + e) * G * dt)
    assert np.all(coarse > 2.5 * fine)


@both_schemes
def test_ball_rests_after_the_impacts_have_accumulated(scheme):
    h0, e, dt = 0.05, 0.5, 6.4e-4
    result = run(BouncingBall(restitution=e), [h0], [0.0], dt, 4000, scheme)
    accumulated = np.sqrt(2 * h0 / G) * (1 + e) / (1 - e)
    rest = np.asarray(result.t) > accumulated + 100 * dt
    assert rest.sum() > 3000
    assert np.max(np.abs(result.v[rest])) < 1e-12
    assert np.max(np.abs(result.q[rest])) < G * dt**2
    assert scheme == SCHEMES["moreau"] or np.min(result.q) > -1e-15
    np.testing.assert_allclose(result.impulse[-1], G * dt, rtol=1e-9)  # carries the weight


# Ball on a vibrating table -------------------------------------------------------------------------------------------


def table_impacts(system, h0, count):
    """Times and velocities after the impacts of a ball dropped from h0 on the table, by the flight-time equation."""
    A, w, e = system.amplitude, system.angular_frequency, system.restitution
    t, y, v = 0.0, h0, 0.0
    times, velocities = [], []
    for _ in range(count):

        def clearance(tau, t=t, y=y, v=v):
            return y + v * tau - G * tau**2 / 2 - A * np.sin(w * (t + tau))

        grid = np.arange(1, 100_000) * 1e-5
        below = np.flatnonzero(clearance(grid) < 0)[0]
        tau = brentq(clearance, grid[below - 1], grid[below], xtol=1e-14)
        t, y, v = t + tau, A * np.sin(w * (t + tau)), v - G * tau
        v = -e * v + (1 + e) * A * w * np.cos(w * t)
        times.append(t), velocities.append(v)
    return np.array(times), np.array(velocities)


def on_table(acceleration, e, w=40.0):
    """The table whose largest acceleration is that many g."""
    return BallOnTable(restitution=e, amplitude=acceleration * G / w**2, angular_frequency=w)


@both_schemes
@pytest.mark.parametrize(("acceleration", "count"), [(1.05, 4), (1.5, 5), (3.0, 3)])
def test_table_sequence_of_impacts(scheme, acceleration, count):
    system = on_table(acceleration, 0.5)
    heights = np.linspace(0.02, 0.024, 6)
    wanted = [table_impacts(system, h0, count) for h0 in heights]
    dt, errors = 1.05 * max(times[-1] for times, _ in wanted) / 10_000, []
    for step in (4 * dt, dt):
        worst = np.zeros(2)
        for h0, (times, velocities) in zip(heights, wanted, strict=True):
            result = run(system, [h0], [0.0], step, 10_000, scheme)
            rows = events(result)[:count]
            error = np.abs(result.t[rows] - times).max(), np.abs(result.v[rows, 0] - velocities).max()
            worst = np.maximum(worst, error)
        errors.append(worst)
    coarse, fine = errors
    assert fine[0] < 10 * dt
    assert fine[1] < 10 * (acceleration + 1) * G * dt
    assert np.all(coarse > 2 * fine)


def from_the_bottom(system, dt, scheme):
    """The ball at rest on the table, from where the table turns."""
    turning = -np.pi / 2 / system.angular_frequency
    return run(system, [-system.amplitude], [0.0], dt, 10_000, scheme, t0=turning)


@both_schemes
@pytest.mark.parametrize("e", [0.0, 0.5])
def test_table_below_one_g_keeps_the_ball(scheme, e):
    system, dt = on_table(0.95, e), 6e-5
    result = from_the_bottom(system, dt, scheme)
    lag = system.amplitude * 40.0 * dt  # Moreau has the wall's velocity of half a step ago
    assert np.max(np.abs(result.gap)) < (1.1 * lag if scheme == SCHEMES["moreau"] else G * dt**2 / 4)
    assert np.max(np.abs(result.gap_rate)) < (2 * G * dt if scheme == SCHEMES["moreau"] else 1e-13)


@both_schemes
@pytest.mark.parametrize("acceleration", [1.2, 2.0, 5.0])
def test_table_above_one_g_throws_the_ball(scheme, acceleration):
    system, dt = on_table(acceleration, 0.0), 6e-5
    result = from_the_bottom(system, dt, scheme)
    lift_off = np.arcsin(1 / acceleration) / 40.0
    flying = np.asarray(result.impulse[1:, 0]) == 0
    first = next(i for i in range(9000) if flying[i : i + 200].all())
    assert abs(float(result.t[first]) - lift_off) < 2 * dt
    tau = np.asarray(result.t[first : first + 200]) - lift_off
    A, w = system.amplitude, 40.0
    height = A * np.sin(w * lift_off) + A * w * np.cos(w * lift_off) * tau - G * tau**2 / 2
    np.testing.assert_allclose(result.q[first : first + 200, 0], height, rtol=0, atol=acceleration * G * dt * 0.02)


# Coulomb friction ----------------------------------------------------------------------------------------------------


@both_schemes
@pytest.mark.parametrize("v0", [1.0, -0.3])
def test_block_stops_after_the_coulomb_distance(scheme, v0):
    mu, dt = 0.3, 1e-3
    result = run(SlidingBlock(friction=mu), [0.0, 0.0], [v0, 0.0], dt, 1000, scheme)
    assert abs(float(result.q[-1, 0]) - np.sign(v0) * v0**2 / (2 * mu * G)) < mu * G * dt**2
    assert np.max(np.abs(result.v[-1])) < 1e-14
    stop = int(abs(v0) / (mu * G * dt))
    np.testing.assert_allclose(result.friction_impulse[1:stop, 0], -np.sign(v0) * mu * G * dt, rtol=1e-9)


@both_schemes
def test_block_reverses(scheme):
    mu, F, m, dt = 0.3, 5.0, 0.8, 1e-3
    push_back, fall_off = F / m - mu * G, F / m + mu * G
    for v0 in (0.5, 1.0, 2.0):
        result = run(SlidingBlock(friction=mu, pull=-F, mass=m), [0.0, 0.0], [v0, 0.0], dt, 1000, scheme)
        T, stop = 1000 * dt, v0 / fall_off
        assert abs(float(result.v[-1, 0]) + push_back * (T - stop)) < 2 * mu * G * dt
        assert abs(float(result.q[-1, 0]) - v0**2 / (2 * fall_off) + push_back * (T - stop) ** 2 / 2) < 2 * mu * G * T * dt


@both_schemes
def test_block_sticks_below_the_cone_and_slides_above(scheme):
    mu, m, dt = 0.3, 2.0, 1e-3
    limit = mu * m * G
    for pull in (0.0, 0.5 * limit, -0.999 * limit):
        result = run(SlidingBlock(friction=mu, pull=pull, mass=m), [0.0, 0.0], [0.0, 0.0], dt, 1000, scheme)
        assert np.max(np.abs(result.q)) < 1e-14
        assert np.max(np.abs(result.v)) < 1e-14
        np.testing.assert_allclose(result.friction_impulse[1:, 0], -pull * dt, atol=1e-14)
    for pull in (1.001 * limit, -2 * limit):
        result = run(SlidingBlock(friction=mu, pull=pull, mass=m), [0.0, 0.0], [0.0, 0.0], dt, 1000, scheme)
        a = (pull - np.sign(pull) * limit) / m
        np.testing.assert_allclose(result.v[:, 0], a * np.asarray(result.t), atol=1e-11)
        np.testing.assert_allclose(result.q[:, 0], a * np.asarray(result.t) ** 2 / 2, atol=1e-11)


@both_schemes
def test_block_on_an_incline(scheme):
    dt, angle = 1e-3, 0.4
    held = run(SlidingBlock(friction=1.01 * np.tan(angle), inclination=angle), [0.0, 0.0], [0.0, 0.0], dt, 1000, scheme)
    assert np.max(np.abs(held.q)) < 1e-14
    slides = run(SlidingBlock(friction=0.2, inclination=angle), [0.0, 0.0], [0.0, 0.0], dt, 1000, scheme)
    a = -G * (np.sin(angle) - 0.2 * np.cos(angle))
    np.testing.assert_allclose(slides.v[:, 0], a * np.asarray(slides.t), atol=1e-11)
    np.testing.assert_allclose(slides.impulse[1:, 0], G * np.cos(angle) * dt, rtol=1e-9)


@both_schemes
@pytest.mark.parametrize("mu", [0.1, 0.9])
def test_block_hits_the_plane_at_a_slant(scheme, mu):
    """Normal by Newton, tangential by Coulomb: the block keeps sliding, or the impact stops it."""
    e, vx, vy = 0.6, 1.0, -2.0
    system = SlidingBlock(friction=mu, restitution=e, gravity=0.0)
    result = run(system, [0.0, 0.5], [vx, vy], 1e-3, 1000, scheme)
    np.testing.assert_allclose(result.v[-1], [max(vx - mu * (1 + e) * abs(vy), 0.0), -e * vy], atol=1e-12)


# Rocking block -------------------------------------------------------------------------------------------------------

BLOCK = RockingBlock(width=0.2, height=0.6, mass=1.5, friction=5.0)
B, H = 0.1, 0.3  # half sizes
ALPHA = np.arctan(B / H)


def corner_impact(e, mu):
    """phi'+ / phi'- when the block has turned about its left corner and the right one hits the ground, Newton and Coulomb.

    The right corner takes the impulses (N, -k N) with k = mu, but no more than what makes it stick; the left one lifts.
    """
    inertia = (B**2 + H**2) / 3  # per mass
    k = min(mu, 3 * H * B / (B**2 + 4 * H**2))
    N = (1 + e) * 2 * B / (1 + B * (B - k * H) / inertia)
    ratio = 1 - (B - k * H) * N / inertia
    assert -B + N + B * ratio > 0  # the left corner does lift
    return ratio


@both_schemes
def test_rocking_block_changes_corners_as_housner_says(scheme):
    assert corner_impact(0.0, 5.0) == pytest.approx(1 - 1.5 * np.sin(ALPHA) ** 2, abs=1e-15)
    for e in (0.0, 0.3):
        for mu in (0.0, 0.1, 0.2, 0.3, 5.0):
            system = dataclasses.replace(BLOCK, restitution=e, friction=mu)
            speed = 0.7
            v0 = speed * np.array([H, -B, -1.0])  # about the left corner
            result = run(system, system.standing(0.0), v0, 1e-6, 2000, scheme)
            ratio = -float(result.v[1, 2]) / speed
            assert abs(ratio - corner_impact(e, mu)) < 1e-4


def rocking_reference(phi0, impacts):
    """Times and speeds |phi'| before the impacts of Housner's block from rest at phi0, and the energy ratios at them."""
    stiffness = 0.75 * G / np.hypot(B, H)  # m g R / (4/3 m R^2)

    def motion(t, y):
        return [y[1], -stiffness * np.sin(ALPHA - y[0])]

    def lands(t, y):
        return y[0] if t > 1e-6 else 1.0

    lands.terminal, lands.direction = True, -1
    t, state, found = 0.0, [phi0, 0.0], []
    for _ in range(impacts):
        flight = solve_ivp(motion, (0, 5), state, events=lands, rtol=1e-12, atol=1e-14, method="DOP853")
        t, speed = t + flight.t_events[0][0], abs(flight.y_events[0][0][1])
        found.append((t, speed))
        state = [0.0, speed * (1 - 1.5 * np.sin(ALPHA) ** 2)]
    return np.array(found)


@both_schemes
def test_rocking_block_from_rest(scheme):
    wanted = rocking_reference(0.2, 3)
    dt, errors = 1.05 * wanted[-1, 0] / 2000, []
    for step in (4 * dt, dt):
        start = BLOCK.standing(0.2), np.zeros(3)
        result = jaxsim.simulate(BLOCK, *start, dt=step, num_steps=2000, scheme=scheme)
        tilt, speed = np.asarray(result.q[:, 2]), np.asarray(result.v[:, 2])
        before = np.flatnonzero(np.sign(tilt[1:]) != np.sign(tilt[:-1]))[:3]
        assert np.all(result.converged[: before[-1] + 4])
        crossing = result.t[before] + step * tilt[before] / (tilt[before] - tilt[before + 1])
        errors.append(np.abs(np.stack([crossing, np.abs(speed[before - 1])], axis=1) - wanted).max(axis=0))
        lost = np.asarray(result.energy[before + 3] - result.energy[before - 3])
        inertia = BLOCK.mass * 4 / 3 * (B**2 + H**2)
        loss = inertia / 2 * wanted[:, 1] ** 2 * ((1 - 1.5 * np.sin(ALPHA) ** 2) ** 2 - 1)
    coarse, fine = errors
    assert np.all(fine < [8 * dt, 8 * 7.5 * dt])  # |phi''| <= 7.5 rad/s^2
    assert np.all(coarse > 2 * fine)
    np.testing.assert_allclose(lost, loss, rtol=0.03)


@both_schemes
def test_rocking_block_comes_to_rest(scheme):
    for mu in (0.3, 0.5, 1.0, 5.0):
        for e in (0.0, 0.3):
            for dt in (2e-3, 2.35e-3):
                system = dataclasses.replace(BLOCK, friction=mu, restitution=e)
                result = run(system, system.standing(0.2), np.zeros(3), dt, 2000, scheme)
                assert np.max(np.abs(result.v[-1])) < 1e-9
                assert abs(float(result.q[-1, 1]) - H) < 1e-3
                np.testing.assert_allclose(np.sum(result.impulse[-1]), system.mass * G * dt, rtol=1e-6)


@both_schemes
def test_block_slides_upright_and_stops(scheme):
    mu, v0, dt = 0.2, 0.9, 4e-4
    system = dataclasses.replace(BLOCK, friction=mu)
    result = run(system, system.standing(0.0), [v0, 0.0, 0.0], dt, 2000, scheme)
    stop = v0 / (mu * G)
    assert stop < 1500 * dt
    assert abs(float(result.q[-1, 0]) - v0**2 / (2 * mu * G)) < mu * G * dt**2
    assert np.max(np.abs(result.q[:, 2])) < 1e-12
    assert np.max(np.abs(result.v[1501:])) < 1e-12
    rear, front = np.asarray(result.impulse[100]) / dt  # the friction loads the front edge
    weight = system.mass * G
    np.testing.assert_allclose([rear + front, front - rear], [weight, mu * weight * H / B], rtol=1e-9)


# Newton's cradle -----------------------------------------------------------------------------------------------------


def line(masses, e, clearance):
    """Balls on a line; arrays throughout, so that all lines of one length share one program."""
    contacts = len(masses) - 1
    return NewtonsCradle(
        masses=masses,
        restitution=np.broadcast_to(e, contacts).tolist(),
        clearance=np.broadcast_to(clearance, contacts).tolist(),
        gravity=0.0,
    )


@both_schemes
@pytest.mark.parametrize("e", [0.0, 0.5, 1.0])
def test_three_touching_balls_are_struck_at_once(scheme, e):
    result = run(line([0.4] * 3, e, 0.0), np.zeros(3), [1.0, 0.0, 0.0], 1e-3, 500, scheme)
    np.testing.assert_allclose(result.v[-1], [1 - 2 * (1 + e) / 3, (1 + e) / 3, (1 + e) / 3], atol=1e-12)


def test_restitution_of_the_second_contact_does_not_matter_where_it_only_transmits():
    for e2 in (0.0, 0.7):
        result = run(line([0.4] * 3, [0.5, e2], 0.0), np.zeros(3), [1.0, 0.0, 0.0], 1e-3, 500, SCHEMES["moreau"])
        np.testing.assert_allclose(result.v[-1], [0.0, 0.5, 0.5], atol=1e-12)


@both_schemes
@pytest.mark.parametrize("e", [0.0, 0.3, 1.0])
def test_two_unequal_balls(scheme, e):
    m1, m2, v1, v2 = 0.7, 0.2, 1.3, -0.4
    result = run(line([m1, m2, 1.0], e, [0.1, 50.0]), np.zeros(3), [v1, v2, 0.0], 1e-3, 500, scheme)
    common = (m1 * v1 + m2 * v2) / (m1 + m2)
    wanted = [common - e * m2 * (v1 - v2) / (m1 + m2), common + e * m1 * (v1 - v2) / (m1 + m2), 0.0]
    np.testing.assert_allclose(result.v[-1], wanted, atol=1e-12)
    assert float(np.max(result.impulse)) == pytest.approx((1 + e) * m1 * m2 / (m1 + m2) * (v1 - v2), abs=1e-12)


@pytest.mark.parametrize(("balls", "scheme"), [(5, "moreau"), (3, "ggl")])
def test_separated_balls_pass_the_velocity_on(balls, scheme):
    start = np.zeros(balls)
    start[0] = 1.0
    result = run(line([0.4] * balls, 1.0, 0.05), np.zeros(balls), start, 1e-3, 500, SCHEMES[scheme])
    np.testing.assert_allclose(result.v[-1], start[::-1], atol=1e-12)
    np.testing.assert_allclose(result.impulse.sum(axis=0), 0.4, atol=1e-12)  # each contact once
    assert np.max(np.abs(result.v @ np.full(balls, 0.4) - 0.4)) < 1e-12


@pytest.mark.parametrize(("balls", "scheme"), [(5, "moreau"), (3, "ggl")])
def test_momentum_through_many_impacts(balls, scheme):
    rng = np.random.default_rng(3)
    for _ in range(5):
        masses, v0 = rng.uniform(0.1, 2, balls), np.sort(rng.uniform(-1, 1, balls))[::-1]
        system = line(masses.tolist(), rng.uniform(0, 1), rng.uniform(0, 0.05, balls - 1))
        result = run(system, np.zeros(balls), v0, 1e-3, 500, SCHEMES[scheme])
        assert len(np.unique(np.nonzero(np.asarray(result.impulse))[0])) >= 2
        assert np.max(np.abs(result.v @ masses - v0 @ masses)) < 1e-12
        assert np.max(np.diff(result.energy)) < 1e-12


def test_pulled_ball_swings_back_in_the_period_of_its_string():
    """Ball 1 let go from -A meets a far ball at rest: impact after a quarter of 2 pi sqrt(length / gravity)."""
    dt, length, A = 1e-3, 0.2, 0.02
    system = dataclasses.replace(line([0.4, 0.4, 0.4], 1.0, [0.0, 50.0]), gravity=G, length=length)
    result = run(system, [-A, 0.0, 0.0], np.zeros(3), dt, 500, SCHEMES["ggl"])
    w = np.sqrt(G / length)
    row = events(result)[0]
    assert abs(float(result.t[row]) - np.pi / (2 * w)) < 2 * dt
    np.testing.assert_allclose(result.v[row], [0.0, A * w, 0.0], atol=A * w**2 * dt)


# Impact oscillator ---------------------------------------------------------------------------------------------------


def oscillator_errors(scheme, dt, e):
    worst = np.zeros(2)
    for stiffness in np.linspace(90.0, 110.0, 8):
        w, v0 = np.sqrt(stiffness / 0.9), 1.0
        system = ImpactOscillator(mass=0.9, stiffness=stiffness, restitution=e)
        result = run(system, [0.0], [v0], dt, 4000, scheme)
        for n in range(4):
            row = round((n + 0.5) * np.pi / w / dt)
            t = float(result.t[row])
            speed = e**n * v0 * (-1) ** n  # B3: q = e^n v0/w |sin wt|
            q, v = speed / w * np.sin(w * t), speed * np.cos(w * t)
            worst = np.maximum(worst, [abs(float(result.q[row, 0]) - q), abs(float(result.v[row, 0]) - v)])
    return worst


@both_schemes
@pytest.mark.parametrize("e", [0.6, 1.0])
def test_isochronous_oscillator(scheme, e):
    dt = 3e-4
    coarse, fine = oscillator_errors(scheme, 4 * dt, e), oscillator_errors(scheme, dt, e)
    assert fine[0] < 3 * (1 + e) * dt
    assert fine[1] < 3 * (1 + e) * 11 * dt
    assert np.all(coarse > 2.5 * fine)


def driven_reference(system, v0, count):
    def motion(t, y):
        drive = system.drive_amplitude * np.cos(system.drive_frequency * t)
        return [y[1], (drive - system.stiffness * y[0] - system.damping * y[1]) / system.mass]

    def hits(t, y):
        return y[0] - system.stop

    hits.terminal, hits.direction = True, -1
    t, state, found = 0.0, [0.0, v0], []
    for _ in range(count):
        flight = solve_ivp(motion, (t, t + 5), state, events=hits, rtol=1e-11, atol=1e-13, method="DOP853")
        t, state = flight.t_events[0][0], [system.stop, -system.restitution * flight.y_events[0][0][1]]
        found.append((t, state[1]))
    return np.array(found)


@both_schemes
def test_driven_damped_oscillator_off_its_stop(scheme):
    system = ImpactOscillator(
        mass=0.9, stiffness=80.0, damping=0.7, stop=-0.02, drive_amplitude=9.0, drive_frequency=13.0, restitution=0.7
    )
    wanted = driven_reference(system, 0.5, 4)
    dt, errors = 1.05 * wanted[-1, 0] / 4000, []
    for step in (4 * dt, dt):
        result = run(system, [0.0], [0.5], step, 4000, scheme)
        rows = events(result)[:4]
        errors.append(np.abs(np.stack([result.t[rows], result.v[rows, 0]], axis=1) - wanted).max(axis=0))
    coarse, fine = errors
    assert np.all(fine < [3 * dt, 60 * dt])
    assert np.all(coarse > 2 * fine)


# Mechanisms from their energies --------------------------------------------------------------------------------------


MOUNTING = np.array([[0.5, 0.0], [1.0, 0.5], [1.0, 1.0]])  # of the three centres on crank and rod


@jaxsim.mechanism
class EnergyCrank:
    """The slider-crank of `jaxsim.systems.SliderCrank`, from its energies."""

    lengths: jaxsim.system.Parameter = (0.153, 0.306)
    a: jaxsim.system.Parameter = 0.05
    b: jaxsim.system.Parameter = 0.025
    c: jaxsim.system.Parameter = 0.001
    masses: jaxsim.system.Parameter = (0.038, 0.038, 0.076)
    inertias: jaxsim.system.Parameter = (7.4e-5, 5.9e-4, 2.7e-6)
    restitution: jaxsim.system.Parameter = 0.1
    opposing = ((0, 2), (1, 3))

    def centres(self, q):
        return MOUNTING @ (self.lengths[:, None] * jnp.stack([jnp.cos(q[:2]), jnp.sin(q[:2])], axis=1))

    def kinetic_energy(self, q, v):
        velocities = MOUNTING @ ((self.lengths * v[:2])[:, None] * jnp.stack([-jnp.sin(q[:2]), jnp.cos(q[:2])], axis=1))
        return 0.5 * self.masses @ jnp.sum(velocities**2, axis=1) + 0.5 * self.inertias @ v**2

    def potential_energy(self, t, q):
        return 9.81 * self.masses @ self.centres(q)[:, 1]

    def gap(self, t, q):
        y, tilt = self.centres(q)[2, 1], self.a * jnp.sin(q[2])
        half = self.b + self.c - self.b * jnp.cos(q[2])
        return jnp.array([half - y + tilt, half - y - tilt, half + y - tilt, half + y + tilt])


@jaxsim.mechanism
class DampedPendulum(DoublePendulum):
    """With an applied force and a potential that depends on time."""

    damping: jaxsim.system.Parameter = 0.3

    def applied_force(self, t, q, v):
        return -self.damping * v * jnp.array([1.0, 2.0]) * jnp.cos(q)

    def potential_energy(self, t, q):
        return DoublePendulum.potential_energy(self, t, q) + jnp.sin(3 * t) * q[0] * q[1] ** 2


def as_arrays(system):
    return jax.tree.map(jnp.asarray, system)


def near_contact(rng):
    """Slider-crank states within a step of a wall or through it, one or two corners."""
    system = SliderCrank()
    theta1, tilt = rng.uniform(-np.pi, np.pi), rng.choice([0.0, 1.0]) * rng.uniform(-0.02, 0.02)
    wall = rng.choice([-1.0, 1.0])
    free = system.b + system.c - system.b * np.cos(tilt) - system.a * abs(np.sin(tilt)) - rng.uniform(-1e-6, 5e-6)
    theta2 = np.arcsin((wall * free - system.l1 * np.sin(theta1)) / system.l2)
    speed = rng.uniform(-150, 150)
    speed2 = -system.l1 * np.cos(theta1) / (system.l2 * np.cos(theta2)) * speed + rng.uniform(-3, 3)
    return State(jnp.array([theta1, theta2, tilt]), jnp.array([speed, speed2, rng.uniform(-20, 20)]))


def relative(a, b):
    return float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)))


def test_slider_crank_from_energies_has_the_same_mass_force_and_directions():
    rng = np.random.default_rng(0)

    @jax.jit
    def terms(system, q, v):
        return system.mass_matrix(q), system.force(0.0, q, v), gap_jacobian(system, 0.0, q), energy(system, 0.0, q, v)

    for _ in range(20):
        q, v = rng.uniform(-3, 3, 3), rng.uniform(-150, 150, 3)
        for ours, wanted in zip(terms(as_arrays(EnergyCrank()), q, v), terms(as_arrays(SliderCrank()), q, v), strict=True):
            assert relative(ours, wanted) < 1e-12


@both_schemes
def test_slider_crank_from_energies_makes_the_same_step(scheme):
    rng, dt = np.random.default_rng(1), 1e-5
    step = jax.jit(scheme.step, compiler_options={"xla_backend_optimization_level": 0})  # half the time to compile
    closed, worst = np.zeros(4), 0.0
    for _ in range(40):
        state = near_contact(rng)
        ours, info = step(as_arrays(EnergyCrank()), state, jnp.asarray(0.0), jnp.asarray(dt))
        wanted, wanted_info = step(as_arrays(SliderCrank()), state, jnp.asarray(0.0), jnp.asarray(dt))
        assert bool(info.converged) and bool(wanted_info.converged)
        worst = max(worst, relative(ours.q, wanted.q), relative(ours.v, wanted.v))
        np.testing.assert_array_equal(info.active, wanted_info.active)
        closed += np.asarray(info.impulse) > 0
    assert worst < 1e-12
    assert np.all(closed >= 3)


def finite_difference_force(system, t, q, v, step=1e-4):
    """Q + dT/dq - dV/dq - d(M v)/dq v from values of the energies, with M from T by polarization; fourth order."""
    unit = jnp.eye(q.size)

    def slope(function, x, direction):
        far = function(x + 2 * step * direction) - function(x - 2 * step * direction)
        near = function(x + step * direction) - function(x - step * direction)
        return (8 * near - far) / (12 * step)

    T, V = jax.jit(system.kinetic_energy), jax.jit(system.potential_energy)

    def momentum(q):
        return np.array([T(q, v + e) - T(q, v - e) for e in unit]) / 2  # exact: T is quadratic in v

    force = np.array([slope(lambda q: T(q, v) - V(t, q), q, e) for e in unit]) - slope(momentum, q, v)
    return force + (system.applied_force(t, q, v) if hasattr(system, "applied_force") else 0.0)


@pytest.mark.parametrize(
    "system", [EnergyCrank(), DoublePendulum(m2=0.4, l2=1.3), DampedPendulum()], ids=lambda s: type(s).__name__
)
def test_force_from_energies_against_finite_differences(system):
    rng, n = np.random.default_rng(2), 3 if isinstance(system, EnergyCrank) else 2
    system = as_arrays(system)
    force, mass = jax.jit(system.force), jax.jit(system.mass_matrix)
    for _ in range(5):
        q, v = jnp.asarray(rng.uniform(-3, 3, n)), jnp.asarray(rng.uniform(-2, 2, n))
        wanted = finite_difference_force(system, 0.7, q, v)
        np.testing.assert_allclose(force(0.7, q, v), wanted, rtol=0, atol=1e-9 * np.max(np.abs(wanted)))
        assert float(0.5 * v @ mass(q) @ v) == pytest.approx(float(system.kinetic_energy(q, v)), rel=1e-12)


# Double pendulum -----------------------------------------------------------------------------------------------------


def test_double_pendulum_has_the_textbook_equations():
    rng = np.random.default_rng(4)
    system = as_arrays(DoublePendulum(l1=0.7, l2=1.1, m1=0.5, m2=2.0))
    l1, l2, m1, m2 = 0.7, 1.1, 0.5, 2.0
    mass, force = jax.jit(system.mass_matrix), jax.jit(system.force)
    for _ in range(20):
        q, v = rng.uniform(-3, 3, 2), rng.uniform(-5, 5, 2)
        d = q[0] - q[1]
        M = np.array([[(m1 + m2) * l1**2, m2 * l1 * l2 * np.cos(d)], [m2 * l1 * l2 * np.cos(d), m2 * l2**2]])
        h = [
            -m2 * l1 * l2 * np.sin(d) * v[1] ** 2 - (m1 + m2) * G * l1 * np.sin(q[0]),
            m2 * l1 * l2 * np.sin(d) * v[0] ** 2 - m2 * G * l2 * np.sin(q[1]),
        ]
        np.testing.assert_allclose(mass(q), M, atol=1e-12)
        np.testing.assert_allclose(force(0.0, q, v), h, atol=1e-11)
        assert np.all(mass(q) == mass(q).T)
        assert np.min(np.linalg.eigvalsh(mass(q))) > 0


@functools.cache
def pendulum_run(scheme, dt, wall, e):
    system = DoublePendulum(wall=wall, restitution=e)
    return run(system, [-0.9, -0.4], [1.0, 2.0], dt, 4000, scheme)


@both_schemes
def test_double_pendulum_conserves_energy_to_the_order_of_the_scheme(scheme):
    dt = 2.5e-4
    coarse, fine = pendulum_run(scheme, 4 * dt, 10.0, 0.8), pendulum_run(scheme, dt, 10.0, 0.8)
    errors = [np.abs(coarse.energy - coarse.energy[0])[:1001].max(), np.abs(fine.energy - fine.energy[0]).max()]
    order = np.log(errors[0] / errors[1]) / np.log(4)
    assert abs(order - (2 if scheme == SCHEMES["ggl"] else 1)) < 0.1
    assert errors[1] < (1e-5 if scheme == SCHEMES["ggl"] else 1e-1)


@both_schemes
@pytest.mark.parametrize("e", [0.0, 0.8, 1.0])
def test_double_pendulum_loses_the_energy_of_newtons_law(scheme, e):
    """An impact of one contact takes (1 - eps^2) gdot^2 / (2 W M^-1 W^T)."""
    dt = 5e-4
    result = pendulum_run(scheme, dt, 0.3, e)
    closed = np.asarray(result.impulse) > 0
    system, hits = as_arrays(DoublePendulum(wall=0.3, restitution=e)), 0
    for row in np.flatnonzero(closed.any(axis=1)):
        change = float(result.energy[row] - result.energy[row - 1])
        assert change < (0 if e < 1 else 10 * G * dt)
        if abs(float(result.gap_rate[row - 1].min())) < 0.1 or closed[row].sum() != 1:
            continue
        contact = int(np.flatnonzero(closed[row])[0])
        W = np.asarray(gap_jacobian(system, 0.0, result.q[row - 1]))[contact]
        effective = 1 / (W @ np.linalg.solve(system.mass_matrix(result.q[row - 1]), W))
        speed = float(result.gap_rate[row - 1, contact])
        assert abs(change + (1 - e**2) / 2 * effective * speed**2) < 10 * G * abs(speed) * dt
        hits += 1
    assert hits >= (1 if e == 0 else 2)


# All of them ---------------------------------------------------------------------------------------------------------


SYSTEMS = [
    (BouncingBall(), [0.3]),
    (BallOnTable(), [0.3]),
    (ImpactOscillator(), [0.1]),
    (SlidingBlock(inclination=0.2), [0.1, 0.2]),
    (RockingBlock(), [0.1, 0.4, 0.2]),
    (NewtonsCradle(), [0.0, 0.0, 0.0, 0.01, 0.05]),
    (DoublePendulum(), [0.1, 0.2]),
    (SliderCrank(), [0.1, -0.05, 0.01]),
]
all_systems = pytest.mark.parametrize(("system", "q"), SYSTEMS, ids=[type(system).__name__ for system, _ in SYSTEMS])


@all_systems
def test_force_at_rest_is_the_slope_of_the_potential_energy(system, q):
    system, q = as_arrays(system), jnp.asarray(q)
    slope = jax.jacfwd(system.potential_energy, argnums=1)(0.0, q)
    np.testing.assert_allclose(system.force(0.0, q, jnp.zeros_like(q)), -slope, atol=1e-13)


@all_systems
def test_points_to_draw(system, q):
    for points in system.points(jnp.asarray(q)).values():
        assert points.ndim == 2 and points.shape[1] == 2
        assert np.all(np.isfinite(points))


def test_lowest_points_of_the_drawings_are_the_gaps():
    q = jnp.array([0.1, 0.4, 0.2])
    np.testing.assert_allclose(RockingBlock().points(q)["block"][:2, 1], RockingBlock().gap(0.0, q), atol=1e-15)
    for phi in (-0.3, 0.0, 0.2):
        gaps = np.asarray(RockingBlock().gap(0.0, RockingBlock().standing(phi)))
        assert abs(gaps.min()) < 1e-15 and (gaps.max() > 0) == (phi != 0)
    q = jnp.array([0.3, -0.2])
    np.testing.assert_allclose(1.2 - DoublePendulum().points(q)["pendulum"][1:, 0], DoublePendulum().gap(0.0, q), atol=1e-15)
