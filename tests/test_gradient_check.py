"""The gradient check against derivatives that are right, wrong on purpose, or beyond telling."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsim
from jaxsim.systems import BallOnTable, BouncingBall, DoublePendulum, NewtonsCradle, SlidingBlock

BALL = BouncingBall()


def drop(scheme, dt=0.05, T=1.5, h0=1.0, save_every=None):
    steps = round(T / dt)
    every = save_every or 1
    return lambda ball: jaxsim.simulate(ball, [h0], [0.0], dt=dt, num_steps=steps, scheme=scheme, save_every=every)


event_driven = drop(jaxsim.EventDriven())  # two impacts, the third at 1.752 s


@pytest.fixture(scope="module")
def exact():
    return jaxsim.gradient_check(event_driven, BALL)


def test_event_driven_agrees_tightly(exact):
    assert exact.parameters == ("restitution", "gravity", "mass") and exact.outputs == ("q[0]", "v[0]")
    assert exact.verdicts == ("agrees",) * 3 and exact.ok
    assert np.max(exact.relative_error) < 1e-8 and np.max(exact.uncertainty) < 1e-8
    np.testing.assert_allclose(exact.difference[0, 0], 2.639013, rtol=1e-6)  # closed form, to the digits known
    assert exact.flags == ((), (), ("inactive",))


def test_the_report_holds_the_sweep_and_reads_as_a_table(exact):
    assert exact.quotients.shape == (3, len(exact.steps), 2) and np.all(np.diff(exact.steps) < 0)
    chosen = int(np.flatnonzero(exact.steps == exact.step[0])[0])
    np.testing.assert_array_equal(exact.quotients[0, chosen], exact.difference[0])
    head, *rows, note = str(exact).splitlines()
    assert head.split()[:4] == ["parameter", "output", "automatic", "difference"] and "verdict" in head
    assert [row.split()[0] for row in rows] == ["restitution", "gravity", "mass"]
    assert {row.index("agrees") for row in rows} == {head.index("verdict")}
    assert note.startswith("inactive: ")
    assert "grazing" not in str(exact)


@pytest.mark.parametrize("scheme", [jaxsim.Moreau, jaxsim.GearGuptaLeimkuhler], ids=lambda scheme: scheme.__name__)
def test_time_stepping_agrees_by_default_and_differs_in_plain_mode(scheme):
    names = ["restitution", "gravity"]
    right = jaxsim.gradient_check(drop(scheme(), 1e-3), BALL, names)
    assert right.verdicts == ("agrees", "agrees"), str(right)
    assert np.all(right.relative_error < right.uncertainty)
    wrong = jaxsim.gradient_check(drop(scheme(gradient="plain"), 1e-3), BALL, names)
    assert wrong.verdicts == ("differs", "differs") and not wrong.ok, str(wrong)
    assert all("two slopes" in flags for flags in wrong.flags)
    np.testing.assert_array_equal(right.quotients, wrong.quotients)  # the values are the same
    # the finest steps side with the wrong derivative
    np.testing.assert_allclose(wrong.quotients[:, -5], wrong.automatic, rtol=1e-4)


def test_smaller_steps_narrow_the_uncertainty():
    coarse = jaxsim.gradient_check(drop(jaxsim.Moreau(), 1e-3), BALL, ["restitution"])
    fine = jaxsim.gradient_check(drop(jaxsim.Moreau(), 1e-4), BALL, ["restitution"])
    assert fine.verdicts == ("agrees",) and fine.uncertainty[0] < 0.3 * coarse.uncertainty[0]


def test_steps_too_coarse_in_time_are_undecided():
    report = jaxsim.gradient_check(drop(jaxsim.Moreau(), 1e-2), BALL, ["restitution"])
    assert report.verdicts == ("undecided",) and report.ok
    plain = jaxsim.gradient_check(drop(jaxsim.Moreau(gradient="plain"), 1e-2), BALL, ["gravity"])
    assert plain.verdicts == ("undecided",)


@pytest.mark.parametrize(("gradient", "verdict"), [("impact-time", "agrees"), ("plain", "differs")])
def test_any_pytree_of_numbers(gradient, verdict):
    run = drop(jaxsim.Moreau(gradient=gradient), 1e-3, save_every=1500)

    def f(ball):
        end = run(ball)
        return {"energy": end.energy[-1], "end": (end.q[-1], end.steps_in_contact)}

    report = jaxsim.gradient_check(f, BALL, ["restitution"])
    assert report.outputs == ("end.0[0]", "energy") and report.verdicts == (verdict,), str(report)


@jax.custom_jvp
def one_percent_too_much(x):
    return x


one_percent_too_much.defjvps(lambda tangent, _, x: 1.01 * tangent)


def planted(ball):
    return event_driven(dataclasses.replace(ball, gravity=one_percent_too_much(ball.gravity)))


def test_a_planted_error_of_one_percent_is_found():
    report = jaxsim.gradient_check(planted, BALL, ["gravity", "restitution"])
    assert report.verdicts == ("differs", "agrees") and not report.ok
    np.testing.assert_allclose(report.relative_error[0], 0.01 / 1.01, rtol=1e-6)
    assert jaxsim.gradient_check(planted, BALL, ["gravity"], rtol=0.02).ok


def test_derivatives_that_are_not_finite_differ():
    def f(system):
        return (system.mass + jnp.linalg.norm(jnp.array([system.mass - 1.0]))) * system.gravity  # the norm at 0

    report = jaxsim.gradient_check(f, BALL)
    assert report.verdicts == ("differs",) * 3 and not report.ok, str(report)


def test_entries_of_array_fields():
    def f(cradle):
        return jnp.sin(cradle.masses[1]) * cradle.restitution[0] + cradle.length * cradle.masses[0] ** 2

    cradle = NewtonsCradle(masses=[0.1, 0.2, 0.3], restitution=[0.9, 0.8])
    report = jaxsim.gradient_check(f, cradle, ["masses", "restitution[1]", "length"])
    assert report.parameters == ("masses[0]", "masses[1]", "masses[2]", "restitution[1]", "length")
    np.testing.assert_allclose(report.automatic[:, 0], [0.04, 0.9 * np.cos(0.2), 0, 0, 0.01], rtol=1e-12)
    assert report.verdicts == ("agrees",) * 5
    assert [flags == ("inactive",) for flags in report.flags] == [False, False, True, True, False]
    assert jaxsim.gradient_check(f, cradle).parameters[:4] == ("masses[0]", "masses[1]", "masses[2]", "diameter")


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_differences_stay_within_the_range_of_a_parameter(value):
    def f(ball):
        legal = (ball.restitution >= 0) & (ball.restitution <= 1)
        return jnp.where(legal, jnp.exp(3 * ball.restitution), jnp.nan)

    report = jaxsim.gradient_check(f, BouncingBall(restitution=value), ["restitution"])
    assert report.verdicts == ("agrees",) and np.all(np.isfinite(report.quotients))
    assert report.relative_error[0] < 1e-6
    np.testing.assert_allclose(report.difference[0, 0], 3 * np.exp(3 * value), rtol=1e-6)


def test_an_impact_within_the_difference_step():
    late = drop(jaxsim.EventDriven(), T=1.75, dt=0.05)  # the third impact is 0.1 % away
    report = jaxsim.gradient_check(late, BALL, ["restitution"])
    assert report.verdicts == ("agrees",) and report.flags == (("impact in step",),), str(report)
    assert not report.judged[0, 0] and report.judged[0, -1]
    assert report.relative_error[0] < 1e-6
    assert np.linalg.norm(report.quotients[0, 0] - report.automatic[0]) > 0.1 * np.linalg.norm(report.automatic[0])
    assert "impact in step: " in str(report)


@jaxsim.mechanism
class Ceiling:
    """Ball thrown upwards, with a ceiling."""

    height: float = 1.0
    restitution: float = 0.8

    def mass_matrix(self, q):
        return jnp.eye(1)

    def force(self, t, q, v):
        return jnp.array([-9.81])

    def gap(self, t, q):
        return self.height - q


@pytest.mark.parametrize(("excess", "flagged"), [(1.0, False), (1e-3, True)])
def test_grazing(excess, flagged):
    v0 = float(np.sqrt(2 * 9.81 * (1 + excess)))  # approach speed sqrt(excess) of what it was at the start

    def f(system):
        return jaxsim.simulate(system, [0.0], [v0], dt=0.05, num_steps=12, scheme=jaxsim.EventDriven())

    report = jaxsim.gradient_check(f, Ceiling(), ["height"])
    assert report.verdicts == ("agrees",), str(report)
    assert ("grazing" in report.flags[0]) == flagged and ("grazing: " in str(report)) == flagged
    assert ("impact in step" in report.flags[0]) == flagged


def test_slow_impacts_on_the_way_to_rest_do_not_graze():
    run = drop(jaxsim.Moreau(), 1e-3, T=1.5)(BouncingBall(restitution=0.4))
    assert run.closed_steps[0] > 100 and not jaxsim.sensitivity._grazes(run)


def test_a_change_of_mode_at_the_end():
    block, T = SlidingBlock(), 0.5
    v0 = 1.001 * block.friction * block.gravity * T  # still slides, by 0.1 %

    def f(system):
        return jaxsim.simulate(system, [0.0, 0.0], [v0, 0.0], dt=0.05, num_steps=10, scheme=jaxsim.EventDriven())

    report = jaxsim.gradient_check(f, block, ["friction"])
    assert report.verdicts == ("agrees",) and report.flags == (("mode change",),), str(report)
    assert report.relative_error[0] < 1e-6 and not report.judged[0, 0]


def test_growth():
    def f(ball):
        x = ball.restitution
        for _ in range(30):
            x = 3.9 * x * (1 - x)  # a chaotic map
        return x

    report = jaxsim.gradient_check(f, BALL, ["restitution"])
    assert "growth" in report.flags[0] and "growth: " in str(report)
    assert report.verdicts == ("undecided",)  # what means little need not be wrong


def test_the_horizon_of_chaos():
    """A ball on a table that shakes: bounces multiply what a parameter changes."""
    table = BallOnTable(amplitude=0.02)

    def f(table):
        return jaxsim.simulate(table, [0.3], [0.0], dt=0.01, num_steps=400, scheme=jaxsim.EventDriven(), save_every=10)

    report = jaxsim.gradient_check(f, table, ["restitution"])
    assert "growth" in report.flags[0] and report.verdicts == ("undecided",)
    (horizon,) = report.horizon
    assert 0.5 < horizon < 2 and f"restitution: derivatives tell little beyond t = {horizon:g} s" in str(report)

    def until(horizon):
        return lambda table: jaxsim.simulate(
            table, [0.3], [0.0], dt=0.01, num_steps=round(horizon / 0.01), scheme=jaxsim.EventDriven(), save_every=10
        )

    before = jaxsim.gradient_check(until(horizon - 0.3), table, ["restitution"])
    assert before.verdicts == ("agrees",) and before.horizon[0] == np.inf, str(before)


@pytest.mark.slow
def test_growth_follows_the_lyapunov_exponent():
    """Double pendulum beside a wall: growth of the derivative against the separation of two trajectories, renormalised."""
    scheme, q0, seconds = jaxsim.EventDriven(), jnp.array([-2.0, -2.5]), 20

    def run(q, v, steps=100):
        end = jaxsim.simulate(DoublePendulum(), q, v, dt=0.01, num_steps=steps, scheme=scheme, save_every=steps)
        return jnp.concatenate([end.q[-1], end.v[-1]])

    direction = jnp.array([1.0, 0.0])
    tangent = jax.jit(lambda q: jax.jvp(lambda q: run(q, jnp.zeros(2), 100 * seconds), (q,), (direction,))[1])(q0)
    step = jax.jit(run)
    at, size, growth = jnp.concatenate([q0, jnp.zeros(2)]), 1e-7, 0.0
    beside = at + size * jnp.concatenate([direction, jnp.zeros(2)])
    for _ in range(seconds):
        at, beside = step(at[:2], at[2:]), step(beside[:2], beside[2:])
        ratio = jnp.linalg.norm(beside - at) / size
        growth, beside = growth + jnp.log(ratio), at + (beside - at) / ratio
    assert growth > 5  # chaos
    np.testing.assert_allclose(jnp.log(jnp.linalg.norm(tangent)), growth, rtol=0.05)


def test_other_steps():
    report = jaxsim.gradient_check(
        lambda ball: ball.mass**3, BouncingBall(mass=2.0), ["mass"], steps=[1e-6, 1e-3, 1e-4, 1e-5]
    )
    np.testing.assert_array_equal(report.steps, [1e-3, 1e-4, 1e-5, 1e-6])
    assert report.ok and abs(report.difference[0, 0] - 12) < 1e-5


@pytest.mark.parametrize(
    ("f", "system", "options", "error", "message"),
    [
        (event_driven, BouncingBall, {}, TypeError, "instance of a mechanism"),
        (event_driven, 3.0, {}, TypeError, "instance of a mechanism"),
        (
            event_driven,
            BALL,
            {"parameters": ["mess"]},
            ValueError,
            r"\['mess'\]; BouncingBall has restitution, gravity, mass",
        ),
        (event_driven, BALL, {"parameters": ["mass[0]"]}, ValueError, "no such"),
        (event_driven, BALL, {"parameters": []}, ValueError, "no such"),
        (event_driven, BALL, {"steps": []}, ValueError, "three or more"),
        (event_driven, BALL, {"steps": 1e-3}, ValueError, "three or more"),
        (event_driven, BALL, {"steps": [1e-3, 0.0, 1e-4]}, ValueError, "three or more"),
        (lambda ball: {"x": ball.mass, "y": jnp.log(ball.mass - 2)}, BALL, {}, ValueError, "not finite: {'y': nan}"),
        (lambda ball: {"n": jnp.asarray(3)}, BALL, {}, TypeError, "floating point"),
        (lambda ball: None, BALL, {}, TypeError, "floating point"),
    ],
)
def test_errors(f, system, options, error, message):
    with pytest.raises(error, match=message):
        jaxsim.gradient_check(f, system, **options)
