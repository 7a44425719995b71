"""The rollout: what is stored, how it transforms, what it refuses, how it fails."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsim
from jaxsim import Moreau
from jaxsim.schemes import State, StepInfo
from jaxsim.systems import IdealSliderCrank, SliderCrank

Q0, V0 = [0.0, 0.0, 0.0], [150.0, -75.0, 0.0]


def run(system=None, q0=Q0, v0=V0, **options):
    options = {"dt": 1e-5, "num_steps": 400, "scheme": Moreau()} | options
    return jaxsim.simulate(system or SliderCrank(), q0, v0, **options)


def test_rows():
    every, some = run(), run(save_every=20)
    assert every.q.shape == (401, 3)
    assert some.q.shape == (21, 3)
    np.testing.assert_array_equal(every.t, 1e-5 * np.arange(401))  # t0 + i dt, not accumulated
    for name in ("t", "q", "v", "gap", "gap_rate", "energy"):
        np.testing.assert_allclose(getattr(some, name), getattr(every, name)[::20], rtol=1e-13, atol=1e-15)
    # sums over the steps between rows
    np.testing.assert_allclose(some.impulse[1:], every.impulse[1:].reshape(20, 20, 4).sum(axis=1), rtol=1e-12, atol=1e-16)
    assert float(some.impulse.sum()) > 0
    for name in ("min_gap", "closed_steps", "steps_in_contact", "failed_step"):
        np.testing.assert_allclose(getattr(some, name), getattr(every, name), rtol=1e-12)
    np.testing.assert_array_equal(every.min_gap, every.gap.min(axis=0))
    np.testing.assert_array_equal(every.closed_steps, (every.impulse > 0).sum(axis=0))
    np.testing.assert_array_equal(every.steps_in_contact, (every.impulse > 0).any(axis=1).sum())


def test_impulse_explains_the_velocity():
    result, system = run(), SliderCrank()
    i = int(jnp.argmax(result.impulse[:, 0] > 0)) - 1
    q_mid = result.q[i] + 0.5e-5 * result.v[i]
    W = jax.jacfwd(lambda q: system.gap(0.0, q))(q_mid)
    change = system.mass_matrix(q_mid) @ (result.v[i + 1] - result.v[i]) - system.force(0.0, q_mid, result.v[i]) * 1e-5
    np.testing.assert_allclose(change, W.T @ result.impulse[i + 1], rtol=1e-9, atol=1e-13)


def test_continued_run_is_the_same():
    whole = run(num_steps=400)
    first = run(num_steps=300)
    second = run(q0=first.q[-1], v0=first.v[-1], num_steps=100, t0=float(first.t[-1]), max_penetration=1e-4)
    np.testing.assert_array_equal(whole.q[-1], second.q[-1])


def test_progress_does_not_change_the_result(capsys):
    plain, shown = run(save_every=2), run(save_every=2, progress=True)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(shown), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-18)
    assert "step" in capsys.readouterr().err


def test_vmap_over_fields_and_starts_equals_single_runs():
    eps = jnp.array([0.1, 0.4, 0.9])
    length = jnp.array([0.306, 0.307, 0.305])
    speed = jnp.array([150.0, 140.0, 130.0])

    def final(eps, length, speed):
        system = dataclasses.replace(SliderCrank(), restitution=eps, l2=length)
        return run(system, v0=jnp.stack([speed, -speed / 2, 0 * speed]), save_every=100)

    batch = jax.jit(jax.vmap(final))(eps, length, speed)
    assert batch.q.shape == (3, 5, 3)
    for lane in range(3):
        single = final(eps[lane], length[lane], speed[lane])
        np.testing.assert_allclose(batch.q[lane], single.q, rtol=0, atol=1e-12)
        np.testing.assert_allclose(batch.min_gap[lane], single.min_gap, rtol=0, atol=1e-13)
    systems = SliderCrank(restitution=eps)
    axes = jax.tree.map(lambda _: None, SliderCrank(restitution=0.0))
    by_axes = jax.vmap(lambda s: run(s, save_every=100), in_axes=(dataclasses.replace(axes, restitution=0),))(systems)
    np.testing.assert_allclose(by_axes.q[0], run(SliderCrank(restitution=0.1), save_every=100).q, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scheme", [Moreau(), jaxsim.GearGuptaLeimkuhler()], ids=["moreau", "ggl"])
def test_forward_derivatives_before_the_first_impact(scheme):
    """No impact up to 2 ms: plain differentiation is exact, here against central differences."""

    def final(x):
        system = dataclasses.replace(SliderCrank(), m3=x[0], l2=x[1])
        return run(system, v0=jnp.stack([x[2], -75.0 + 0 * x[2], 0 * x[2]]), num_steps=200, save_every=200, scheme=scheme).q[
            -1
        ]

    x = jnp.array([0.076, 0.306, 150.0])
    jacobian = jax.jit(jax.jacfwd(final))(x)
    final = jax.jit(final)
    for i, h in enumerate([1e-6, 1e-6, 1e-4]):
        difference = (final(x.at[i].add(h)) - final(x.at[i].add(-h))) / (2 * h)
        np.testing.assert_allclose(jacobian[:, i], difference, rtol=1e-6, atol=1e-9)
    assert bool(jnp.all(jnp.isfinite(jacobian)))


def test_derivative_with_respect_to_the_system_is_a_system():
    derivative = jax.jacfwd(lambda system: run(system, num_steps=20, save_every=20).energy[-1])(
        jax.tree.map(jnp.asarray, SliderCrank())
    )
    assert isinstance(derivative, SliderCrank)
    # E = T + V at a state that hardly moved: dE/dJ1 = omega1^2 / 2
    assert float(derivative.J1) == pytest.approx(150**2 / 2, rel=1e-2)


@dataclasses.dataclass(frozen=True)
class Counting:
    """A user's own scheme: explicit Euler, counting how often it is traced."""

    traces: Any = dataclasses.field(default_factory=list, hash=False, compare=False)

    def step(self, system, state, t, dt):
        self.traces.append(1)
        q, v = state
        contacts = system.gap(t, q)
        zero = jnp.zeros_like(contacts)
        info = StepInfo(zero, jnp.zeros(0), jnp.zeros(0), zero > 1, jnp.asarray(1), jnp.zeros(()), jnp.asarray(True))
        acceleration = jnp.linalg.solve(system.mass_matrix(q), system.force(t, q, v))
        return State(q + dt * v, v + dt * acceleration), info


@dataclasses.dataclass
class Mutable:
    """A scheme that is not frozen, and so has no hash."""

    def step(self, system, state, t, dt):
        raise AssertionError("never traced")


def test_traced_once_per_structure():
    scheme = Counting()
    run(scheme=scheme)
    count = len(scheme.traces)
    assert count >= 1
    run(SliderCrank(l1=0.16, restitution=0.7), q0=np.array(Q0), v0=(150, -75, 0), dt=2e-5, t0=1, scheme=scheme)
    run(dataclasses.replace(SliderCrank(), m3=np.float64(0.08)), scheme=scheme)
    run(SliderCrank(m1=1), scheme=scheme)
    assert len(scheme.traces) == count
    run(num_steps=200, scheme=scheme)  # another length is another structure
    assert len(scheme.traces) > count


@dataclasses.dataclass(frozen=True)
class Failing(Counting):
    """Fails at one step."""

    def step(self, system, state, t, dt):
        new, info = super().step(system, state, t, dt)
        fails = jnp.abs(t - 7e-5) < 1e-9
        active = jnp.array([False, True, False, True]) & fails
        return new, info._replace(converged=~fails, residual=jnp.where(fails, 0.25, 0.0), active=active)


def test_failure_is_flagged_with_time_residual_and_contacts():
    result = run(scheme=Failing(), save_every=10)
    assert int(result.failed_step) == 7
    np.testing.assert_array_equal(np.flatnonzero(~np.asarray(result.converged)), [1])
    with pytest.raises(jaxsim.SimulationError, match=r"step 7 at t = 7e-05 s.*residual 0.25.*contacts \[1, 3\]"):
        result.raise_if_failed()
    assert run().raise_if_failed() is not None
    assert np.isnan(run().failed_time)


@jaxsim.mechanism
class Runaway:
    """x'' = k x^3: leaves every bound in finite time; k = 0 is free motion."""

    k: float = 1.0
    restitution: float = 0.5

    def mass_matrix(self, q):
        return jnp.eye(1)

    def force(self, t, q, v):
        return self.k * q**3

    def gap(self, t, q):
        return q + 10.0


@pytest.mark.parametrize("scheme", [Moreau(), jaxsim.GearGuptaLeimkuhler()], ids=["moreau", "ggl"])
def test_non_finite_lane_is_flagged_and_harms_no_other(scheme):
    def lane(k):
        return jaxsim.simulate(Runaway(k=k), [1.0], [1.0], dt=1e-2, num_steps=500, scheme=scheme)

    batch = jax.vmap(lane)(jnp.array([0.0, 1.0, 0.0]))
    np.testing.assert_array_equal(np.asarray(batch.failed_step) >= 0, [False, True, False])
    np.testing.assert_allclose(batch.q[0], lane(0.0).q, rtol=1e-12)
    with pytest.raises(jaxsim.SimulationError, match=r"run \[1\] \(1 of 3 runs failed\)"):
        batch.raise_if_failed()
    assert "1 of them with a failed step" in batch.summary()


def test_opposing_contacts_that_close_together_are_flagged():
    # A step so long that the slider would pass from wall to wall: both walls of the guide are violated in one step.
    result = run(SliderCrank(c=1e-6), dt=1e-3, num_steps=20, scheme=Moreau())
    assert int(result.failed_step) >= 0 or float(result.min_gap.min()) < -1e-4

    @jaxsim.mechanism
    class Squeezed:
        restitution: float = 0.0
        opposing = ((0, 1),)

        def mass_matrix(self, q):
            return jnp.eye(1)

        def force(self, t, q, v):
            return jnp.zeros(1)

        def gap(self, t, q):  # two walls that close on the ball
            return jnp.array([q[0] + 1 - t, 1 - t - q[0]])

    result = jaxsim.simulate(Squeezed(), [0.0], [0.0], dt=0.1, num_steps=20, scheme=Moreau())
    assert int(result.failed_step) == 10
    result = jaxsim.simulate(Squeezed(), [0.0], [0.0], dt=0.1, num_steps=20, scheme=jaxsim.GearGuptaLeimkuhler())
    assert 9 <= int(result.failed_step) <= 10


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dt": 0.0}, ValueError, "dt = 0.0 must be"),
        ({"dt": -1e-5}, ValueError, "dt = -1e-05 must be"),
        ({"dt": np.nan}, ValueError, "dt = nan must be"),
        ({"dt": [1e-5, 1e-6]}, ValueError, "dt = .* must be one"),
        ({"num_steps": 0}, ValueError, "num_steps = 0"),
        ({"num_steps": 10.0}, TypeError, "num_steps must be an integer"),
        ({"num_steps": True}, TypeError, "num_steps must be an integer"),
        ({"save_every": 0}, ValueError, "save_every = 0"),
        ({"save_every": 7}, ValueError, "num_steps = 400 is not a multiple of save_every = 7"),
        ({"scheme": "moreau"}, TypeError, "scheme must be an object with a method step"),
        ({"scheme": Mutable()}, TypeError, "scheme must be hashable"),
        ({"scheme": Moreau}, TypeError, "scheme must be an object with a method step"),
        ({"q0": [0.0, 0.0]}, ValueError, "same length, got shapes"),
        ({"q0": np.zeros((5, 3)), "v0": np.zeros((5, 3))}, ValueError, "jax.vmap"),
        ({"q0": 0.0, "v0": 0.0}, ValueError, "vectors"),
        ({"q0": [0.0, np.nan, 0.0]}, ValueError, "q0 = .* is not finite"),
        ({"v0": [0.0, np.inf, 0.0]}, ValueError, "v0 = .* is not finite"),
        ({"t0": [0.0, 1.0]}, ValueError, "t0 = .* must be one number"),
        ({"q0": [0.1, 0.0, 0.0]}, ValueError, "the start penetrates: gap"),
        ({"system": SliderCrank(restitution=1.1)}, ValueError, r"SliderCrank.restitution = 1.1 must lie in \[0, 1\]"),
        ({"system": SliderCrank(restitution=-0.1)}, ValueError, r"must lie in \[0, 1\]"),
        (
            {"system": SliderCrank(restitution=[0.1, 0.1])},
            ValueError,
            r"restitution has shape \(2,\), expected one value or",
        ),
        ({"system": SliderCrank(m1=np.nan)}, ValueError, r"SliderCrank.m1 = nan is not finite"),
        ({"system": SliderCrank(m1="heavy")}, TypeError, "not a number"),
        ({"system": SliderCrank(l1=np.ones(4))}, ValueError, r"mass_matrix fails for 3 .*fields: l1 \(4,\)\)"),
        ({"system": IdealSliderCrank(), "q0": [0.1, 0.0, 0.0]}, ValueError, "the start violates the joints: constraint"),
        ({"system": IdealSliderCrank(), "v0": [1.0, 0.0, 0.0]}, ValueError, "the start violates the joints: v0 opens"),
        ({"q0": np.zeros(3, np.float32)}, TypeError, "q0 is float32"),
        ({"q0": [], "v0": []}, ValueError, "vectors"),
        ({"system": SliderCrank}, TypeError, "instance of a mechanism"),
        ({"system": SliderCrank(J3=0.0)}, ValueError, "not positive definite"),
        ({"system": SliderCrank(m3=-1.0)}, ValueError, "not positive definite"),
    ],
)
def test_bad_input_is_refused_before_anything_is_traced(change, error, message):
    scheme = Counting()
    with pytest.raises(error, match=message):
        run(**({"scheme": scheme} | change))
    assert not scheme.traces


def test_float32_needs_permission():
    single = run(
        q0=np.zeros(3, np.float32), v0=np.array(V0, np.float32), allow_float32=True, num_steps=100, max_penetration=1e-5
    )
    assert single.q.dtype == jnp.float32
    np.testing.assert_allclose(single.q[-1], run(num_steps=100).q[-1], atol=1e-5)
    with jax.enable_x64(False), pytest.raises(TypeError, match="jax_enable_x64"):
        run()


@pytest.mark.parametrize(
    "scheme", [Moreau(), jaxsim.GearGuptaLeimkuhler(), jaxsim.EventDriven()], ids=["moreau", "ggl", "event"]
)
def test_float32_derivatives(scheme):
    """Through an impact, in float32 all through where x64 is on, and those of float64 but for rounding."""

    def end(q0):
        run = jaxsim.simulate(
            *(jaxsim.systems.BouncingBall(restitution=0.5), q0, jnp.zeros_like(q0)),
            **dict(dt=5e-3, num_steps=120, save_every=120, scheme=scheme, allow_float32=True),
        )
        return run.q[-1, 0], run.converged.all()

    for derivative in (jax.jacfwd, jax.grad):
        (single, converged), (double, _) = (
            derivative(end, has_aux=True)(jnp.ones(1, dtype)) for dtype in (np.float32, float)
        )
        assert converged and single.dtype == np.float32 and double.dtype == np.float64
        np.testing.assert_allclose(single, double, rtol=1e-3)


def test_wrong_shapes_of_a_mechanism_are_named():
    @jaxsim.mechanism
    class Wrong:
        restitution: float = 0.5

        def mass_matrix(self, q):
            return jnp.eye(2)

        def force(self, t, q, v):
            return jnp.zeros(3)

    with pytest.raises(ValueError, match=r"Wrong.force\(t, q, v\) has shape \(3,\), expected \(2\)"):
        jaxsim.simulate(Wrong(), [0.0, 0.0], [0.0, 0.0], dt=1e-3, num_steps=1, scheme=Moreau())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "neither kinetic_energy"),
        ({"mass_matrix": lambda self, q: q}, "no force"),
        ({"kinetic_energy": lambda self, q, v: v @ v, "force": lambda self, t, q, v: v}, "no mass_matrix"),
        (
            {"mass_matrix": lambda self, q: q, "force": lambda self, t, q, v: v, "applied_force": lambda self, t, q, v: v},
            "one pair or the other",
        ),
        ({"kinetic_energy": lambda self, q, v: v @ v, "gap": lambda self, t, q: q}, "no field 'restitution'"),
        ({"kinetic_energy": lambda self, q, v: v @ v, "slip": lambda self, t, q, v: v}, "no field 'friction'"),
        ({"kinetic_energy": lambda self, q, v: v @ v, "friction": 0.1, "__annotations__": {"friction": float}}, "no slip"),
    ],
)
def test_incomplete_mechanisms_are_refused(body, message):
    with pytest.raises(TypeError, match=message):
        jaxsim.mechanism(type("Incomplete", (), body))


def test_subclasses_of_a_mechanism():
    @jaxsim.mechanism
    class Free:
        m: float = 1.0

        def kinetic_energy(self, q, v):
            return 0.5 * self.m * v @ v

    @jaxsim.mechanism
    class Driven(Free):
        w: float = 2.0

        def potential_energy(self, t, q):
            return self.w * q[0]

    assert float(Driven(m=4.0).force(0.0, jnp.zeros(1), jnp.zeros(1))[0]) == -2.0
    with pytest.raises(TypeError, match="one pair or the other"):

        @jaxsim.mechanism
        class Heavier(SliderCrank):
            def kinetic_energy(self, q, v):
                return v @ v


def test_illegal_lanes_fail_at_step_0():
    ball = jaxsim.systems.BouncingBall()
    options = dict(dt=1e-3, num_steps=10, scheme=Moreau())
    starts = jax.vmap(lambda q: jaxsim.simulate(ball, q, [0.0], **options))(jnp.array([[-1.0], [1.0]]))
    np.testing.assert_array_equal(starts.failed_step, [0, -1])
    eps = jax.vmap(lambda e: jaxsim.simulate(dataclasses.replace(ball, restitution=e), [1.0], [0.0], **options))(
        jnp.array([0.5, 1.5])
    )
    np.testing.assert_array_equal(eps.failed_step, [-1, 0])
    backwards = jax.jit(lambda dt: jaxsim.simulate(ball, [1.0], [0.0], **(options | {"dt": dt})))(-1e-3)
    assert int(backwards.failed_step) == 0


@pytest.mark.parametrize("scheme", [Moreau(), jaxsim.GearGuptaLeimkuhler()], ids=["moreau", "ggl"])
def test_derivative_by_friction_and_beside_a_fixed_gap(scheme):
    """x = v0 t - mu g t^2 / 2 while it slides; a gap that nothing moves must not spoil the derivative."""

    @jaxsim.mechanism
    class Sliding:
        friction: float = 0.2
        restitution: float = 0.0

        def kinetic_energy(self, q, v):
            return 0.5 * v @ v

        def potential_energy(self, t, q):
            return 9.81 * q[1]

        def gap(self, t, q):
            return jnp.array([q[1], 1.0 + 0 * q[1]])

        def slip(self, t, q, v):
            return jnp.array([v[0], v[0]])

    def final(mu):
        return jaxsim.simulate(Sliding(friction=mu), [0.0, 0.0], [1.0, 0.0], dt=1e-3, num_steps=200, scheme=scheme).q[-1, 0]

    assert float(jax.jacfwd(final)(0.2)) == pytest.approx(-9.81 * 0.2**2 / 2, rel=0.02)


def test_masses_in_a_list_can_be_differentiated():
    def energy(m):
        return jaxsim.simulate(
            jaxsim.systems.NewtonsCradle(masses=[m, 0.1]), [0.0, 0.0], [-1.0, 0.0], dt=1e-3, num_steps=2, scheme=Moreau()
        ).energy[0]

    assert float(jax.grad(energy)(0.1)) == pytest.approx(0.5)


def test_text():
    result = run()
    assert repr(result) == "Trajectory(400 steps; t(401,), q(401, 3), gap(401, 4), joint_impulse(401, 0))"
    assert "400 steps of 1e-05 s" in result.summary()
    assert "all steps converged" in result.summary()
