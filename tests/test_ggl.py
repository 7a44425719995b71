"""The unified step: its Jacobian against (43)-(55) by hand, its active set, its options."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import jaxsim
from jaxsim import GearGuptaLeimkuhler
from jaxsim.schemes.ggl import StepData, Unknowns
from jaxsim.schemes.state import Candidates, State
from jaxsim.solve import solve
from jaxsim.systems import SliderCrank

ALL = Candidates(lambda values: values, lambda values: values)


def step_data(system, q, v, dt):
    inverse_mass = solve(system.mass_matrix(q + dt / 2 * v), jnp.eye(3))
    return StepData(jnp.zeros(()), jnp.asarray(dt), q, v, inverse_mass, ALL, jnp.full(4, system.restitution), None)


def hand_written_jacobian(p, data, x, active, r_impulse, r_correction):
    """d phi / d x of (43)-(55), in NumPy; derivatives by q_{n+1} and v_{n+1} carry the factor 1/2 of the midpoint."""
    dt, eps = float(data.dt), np.asarray(data.restitution)
    q_n, v_n, minv = map(np.asarray, (data.q, data.v, data.inverse_mass))
    q, v, L, P = map(np.asarray, (x.q, x.v, x.impulse, x.correction))
    th, om = (q_n + q) / 2, (v_n + v) / 2
    s, c = np.sin(th), np.cos(th)
    side, turn = np.array([-1, -1, 1, 1]), np.array([1, -1, -1, 1])

    def constraint_matrix(angles):
        return np.stack([
            side * p.l1 * np.cos(angles[0]),
            side * p.l2 * np.cos(angles[1]),
            turn * p.a * np.cos(angles[2]) + p.b * np.sin(angles[2]),
        ], axis=1)  # fmt: skip

    W = constraint_matrix(th)
    dW = np.stack([-side * p.l1 * s[0], -side * p.l2 * s[1], -turn * p.a * s[2] + p.b * c[2]], axis=1)  # dW_ij / dq_j
    mu = p.l1 * p.l2 * (p.m2 / 2 + p.m3)
    s12, c12 = np.sin(th[0] - th[1]), np.cos(th[0] - th[1])
    w1, w2 = p.gravity * p.l1 * (p.m1 / 2 + p.m2 + p.m3), p.gravity * p.l2 * (p.m2 / 2 + p.m3)
    h = np.array([-mu * s12 * om[1] ** 2 - w1 * c[0], mu * s12 * om[0] ** 2 - w2 * c[1], 0])
    h_q = np.array([
        [-mu * c12 * om[1] ** 2 + w1 * s[0], mu * c12 * om[1] ** 2, 0],
        [mu * c12 * om[0] ** 2, -mu * c12 * om[0] ** 2 + w2 * s[1], 0],
        [0, 0, 0],
    ])  # fmt: skip
    h_v = np.array([[0, -2 * mu * s12 * om[1], 0], [2 * mu * s12 * om[0], 0, 0], [0, 0, 0]])
    half = 0.5
    dWT_L, dWT_P = half * np.diag(dW.T @ L), half * np.diag(dW.T @ P)
    force_q = half * h_q * dt + dWT_L
    kick = minv @ (h * dt + W.T @ L)
    eye3, eye4, z34, z43, z44 = np.eye(3), np.eye(4), np.zeros((3, 4)), np.zeros((4, 3)), np.zeros((4, 4))

    phi1 = np.hstack([eye3 - dWT_P, -eye3 * dt / 2, z34, -W.T])
    phi2 = np.hstack([-minv @ force_q, eye3 - minv @ (half * h_v) * dt, -minv @ W.T, z34])
    r_L, r_P = r_impulse[:, None], r_correction[:, None]
    phi3 = np.hstack([
        r_L * (W @ minv @ force_q + half * dW * kick),  # (48)
        r_L * (W @ minv @ (half * h_v) * dt),  # (49)
        r_L * (W @ minv @ W.T),  # (50)
        z44,  # (51)
    ])  # fmt: skip
    phi4 = np.hstack([
        r_P * (half * dW * (om * dt) + half * dW * (W.T @ P) + W @ dWT_P),  # (52)
        r_P * W * dt / 2,  # (53)
        z44,  # (54)
        r_P * (W @ W.T),  # (55)
    ])  # fmt: skip
    # (47): where the argument of prox is not positive, and outside the active set, a unit row
    gdot_n = constraint_matrix(q_n) @ v_n
    rate = gdot_n + W @ kick + eps * gdot_n
    gap = np.asarray(p.gap(0.0, data.q)) + W @ (om * dt + W.T @ P)
    unit3 = ~(active & (L - r_impulse * rate > 0))
    unit4 = ~(active & (P - r_correction * gap > 0))
    phi3[unit3] = np.hstack([z43, z43, eye4, z44])[unit3]
    phi4[unit4] = np.hstack([z43, z43, z44, eye4])[unit4]
    return np.vstack([phi1, phi2, phi3, phi4]), unit3, unit4


@jax.jit
def jacobian_of_39(system, data, x, active, r):
    scheme = GearGuptaLeimkuhler.paper(gap_rate="literal")  # what (48) differentiates
    flat, unravel = ravel_pytree(x)
    phi = scheme.residual
    return jax.jacfwd(lambda flat: ravel_pytree(phi(system, data._replace(contacts=ALL), unravel(flat), active, r))[0])(flat)


@pytest.mark.parametrize(
    "active",
    [[True] * 4, [False] * 4, [True, True, False, False], [True, False, False, True], [False, True, True, False]],
    ids=["all", "none", "upper", "diagonal", "other diagonal"],
)
def test_jacobian_equals_the_hand_written_one(active):
    system, active = SliderCrank(restitution=0.1), np.array(active)
    rng = np.random.default_rng(7)
    seen = set()
    for _ in range(40):
        q, v = jnp.asarray(rng.normal(size=3) * [1.0, 1.0, 0.02]), jnp.asarray(rng.normal(size=3) * [150.0, 75.0, 5.0])
        data = step_data(system, q, v, 10.0 ** rng.uniform(-6, -2))
        x = Unknowns(
            q + data.dt * v + 1e-3 * rng.normal(size=3),
            v + rng.normal(size=3),
            jnp.asarray(rng.normal(size=4) * 0.1),
            jnp.asarray(rng.normal(size=4) * 1e-3),
            jnp.zeros(0),
            jnp.zeros(0),
        )
        r = jnp.asarray(rng.uniform(0.01, 0.5, 4)), jnp.asarray(rng.uniform(1, 40, 4))
        by_hand, unit3, unit4 = hand_written_jacobian(system, data, x, active, *map(np.asarray, r))
        seen |= {("phi3", bool(u)) for u in unit3} | {("phi4", bool(u)) for u in unit4}
        found = np.asarray(jacobian_of_39(system, data._replace(contacts=None), x, jnp.asarray(active), r))
        scale = np.maximum(np.abs(by_hand).max(axis=1, keepdims=True), 1)
        np.testing.assert_allclose(found / scale, by_hand / scale, rtol=0, atol=1e-12)
    expected = {(row, unit) for row in ("phi3", "phi4") for unit in (True, False)}
    assert seen == (expected if active.any() else {("phi3", True), ("phi4", True)})


SCHEMES = [
    GearGuptaLeimkuhler(),
    GearGuptaLeimkuhler.paper(),
    GearGuptaLeimkuhler.paper(gap_rate="literal"),
    GearGuptaLeimkuhler.paper(position_level=False),
    GearGuptaLeimkuhler(gap_rate="midpoint"),
    GearGuptaLeimkuhler(metric="identity", gap="linearized"),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_step_is_a_root_of_39(scheme):
    """The reduced Newton solves the full system: all four rows vanish at (q+, v+, Lambda, Psi) recovered from the step."""
    system, dt = SliderCrank(restitution=0.3), 1e-5
    # a tilted slider about to hit the upper wall with one corner
    q, v = (
        jnp.array([0.25, float(np.arcsin((0.000999 - 0.153 * np.sin(0.25)) / 0.306)), 2e-3]),
        jnp.array([150.0, -60.0, 1.0]),
    )
    state, info = jax.jit(scheme.step)(system, State(q, v), 0.0, dt)
    assert bool(info.converged)
    assert bool(jnp.any(info.impulse > 0))
    data = step_data(system, q, v, dt)
    W = jax.jacfwd(lambda q: system.gap(0.0, q))((q + state.q) / 2)
    Z = data.inverse_mass if scheme.metric == "mass" else jnp.eye(3)
    drift = state.q - q - dt / 2 * (v + state.v)
    active = np.asarray(info.active)
    psi = np.zeros(4)
    psi[active] = np.linalg.lstsq(np.asarray(Z @ W.T)[:, active], np.asarray(drift))[0]
    assert np.any(psi > 1e-15) == scheme.position_level
    correction = jnp.asarray(psi) if scheme.position_level else jnp.zeros(0)
    x = Unknowns(state.q, state.v, info.impulse, correction, jnp.zeros(0), jnp.zeros(0))
    r = (1 / jnp.diagonal(W @ data.inverse_mass @ W.T), 1 / jnp.diagonal(W @ Z @ W.T))
    phi = scheme.residual(system, data, x, info.active, r)
    assert jnp.max(jnp.abs(phi.q)) <= 1e-15
    assert jnp.max(jnp.abs(phi.v)) <= 1e-11
    assert jnp.max(jnp.abs(phi.impulse / r[0])) <= 1e-11
    if scheme.position_level:
        assert jnp.max(jnp.abs(phi.correction / r[1])) <= 1e-15


def test_augmentation_keeps_the_second_corner_out():
    """Asymmetric motion: a contact that only the impact of the other drives into the wall joins the active set."""
    system = SliderCrank(restitution=0.5)
    for scheme in (GearGuptaLeimkuhler(), GearGuptaLeimkuhler.paper()):
        run = jaxsim.simulate(
            system, [0.0, 0.0, 0.004], [150.0, -75.0, 0.0], dt=1e-5, num_steps=3000, scheme=scheme
        ).raise_if_failed()
        assert float(run.min_gap.min()) >= (-1e-14 if scheme.gap == "exact" else -1e-10)


def test_tolerance_does_not_change_the_motion():
    runs = [
        jaxsim.simulate(
            SliderCrank(),
            [0.0, 0.0, 0.0],
            [150.0, -75.0, 0.0],
            dt=1e-5,
            num_steps=1000,
            scheme=GearGuptaLeimkuhler(tolerance=t),
        )
        for t in (1e-9, 1e-11)
    ]
    np.testing.assert_allclose(runs[0].q, runs[1].q, rtol=0, atol=1e-13)


def test_derivative_of_a_step_is_implicit():
    """jacfwd through a step equals finite differences, whatever the tolerance of Newton, and reverse mode agrees."""
    system = SliderCrank(restitution=0.3)
    q = jnp.array([0.25, float(np.arcsin((0.000999 - 0.153 * np.sin(0.25)) / 0.306)), 2e-3])
    v = jnp.array([150.0, -60.0, 1.0])

    @functools.partial(jax.jit, static_argnames=("scheme", "transform"))
    def evaluate(flat, scheme, transform):
        def step(flat):
            state, _ = scheme.step(
                dataclasses.replace(system, l2=flat[6], m3=flat[7]), State(flat[:3], flat[3:6]), 0.0, 1e-5
            )
            return jnp.concatenate([state.q, state.v])

        return transform(step)(flat) if transform else step(flat)

    flat = jnp.concatenate([q, v, jnp.array([system.l2, system.m3])])
    exact, loose = (GearGuptaLeimkuhler(tolerance=tolerance, gradient="plain") for tolerance in (1e-11, 1e-8))
    tight = evaluate(flat, exact, jax.jacfwd)
    norm = jnp.linalg.norm(tight)  # single entries are small differences of terms of the size 2 / dt
    assert jnp.linalg.norm(evaluate(flat, loose, jax.jacfwd) - tight) <= 1e-10 * norm
    assert jnp.linalg.norm(evaluate(flat, exact, jax.jacrev) - tight) <= 1e-10 * norm
    scale = jnp.max(jnp.abs(tight), axis=0)
    for column, h in enumerate(1e-6 * np.array([1, 1, 1, 1, 1, 1, 0.1, 0.1])):
        plus, minus = (evaluate(flat.at[column].add(sign * h), exact, None) for sign in (1, -1))
        difference = (plus - minus) / (2 * h)
        rounding = 1e-12 / (h * scale[column])  # of the velocities, in the quotient
        np.testing.assert_allclose(difference / scale[column], tight[:, column] / scale[column], atol=1e-6 + float(rounding))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "euclid"}, "metric"),
        ({"gap_rate": "exakt"}, "gap_rate"),
        ({"gap": "none"}, "gap"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"max_iterations": 0}, "max_iterations"),
    ],
)
def test_unknown_options(options, message):
    with pytest.raises(ValueError, match=message):
        GearGuptaLeimkuhler(**options)
    with pytest.raises(ValueError, match=message):
        GearGuptaLeimkuhler.paper(**options)
