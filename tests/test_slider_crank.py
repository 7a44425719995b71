"""The slider-crank of the paper: closed forms, convergence orders, energies, drift."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsim
from jaxsim import GearGuptaLeimkuhler, Moreau
from jaxsim.schemes import DecoupledGearGuptaLeimkuhler
from jaxsim.system import constraint_rate
from jaxsim.systems import IdealSliderCrank, SliderCrank

Q0, V0 = [0.0, 0.0, 0.0], [150.0, -75.0, 0.0]
REFERENCE_LINE = GearGuptaLeimkuhler.paper(position_level=False)
FAMILY = {
    "moreau": Moreau(),
    "reference": REFERENCE_LINE,
    "paper": GearGuptaLeimkuhler.paper(),
    "default": GearGuptaLeimkuhler(),
}
EVENTS = {
    run["restitution"]: run
    for run in json.loads((Path(__file__).parent / "reference" / "slider_crank.json").read_text())["runs"]
    if run["scheme"] == "event_driven_limit"
}


def run(scheme, num_steps, dt=1e-5, restitution=0.1, save_every=None, system=None):
    system = system or SliderCrank(restitution=restitution)
    result = jaxsim.simulate(system, Q0, V0, dt=dt, num_steps=num_steps, scheme=scheme, save_every=save_every or num_steps)
    return result.raise_if_failed()


def test_table_1():
    system = SliderCrank()
    assert system.d == pytest.approx(0.052, abs=1e-15)
    q, v = jnp.array([0.3, -0.2, 0.01]), jnp.array([150.0, -75.0, 2.0])
    np.testing.assert_allclose(system.mass_matrix(q)[0, 0], 7.4e-5 + 0.153**2 * (0.038 / 4 + 0.038 + 0.076), rtol=1e-15)
    np.testing.assert_allclose(system.mass_matrix(q)[0, 1], 0.153 * 0.306 * np.cos(0.5) * (0.019 + 0.076), rtol=1e-14)
    h = [
        -0.153 * 0.306 * np.sin(0.5) * 0.095 * 75**2 - 9.81 * 0.153 * np.cos(0.3) * (0.019 + 0.038 + 0.076),
        0.153 * 0.306 * np.sin(0.5) * 0.095 * 150**2 - 9.81 * 0.306 * np.cos(0.2) * (0.019 + 0.076),
        0.0,
    ]
    np.testing.assert_allclose(system.force(0.0, q, v), h, rtol=1e-13)
    g = system.gap(0.0, q)
    y3 = 0.153 * np.sin(0.3) - 0.306 * np.sin(0.2)
    np.testing.assert_allclose(g[0], 0.026 - y3 + 0.05 * np.sin(0.01) - 0.025 * np.cos(0.01), rtol=1e-13)
    np.testing.assert_allclose([g[0] + g[2], g[1] + g[3]], 2 * (0.026 - 0.025 * np.cos(0.01)), rtol=1e-13)
    start = jaxsim.system.energy(system, 0.0, jnp.array(Q0), jnp.array(V0))
    assert float(start) == pytest.approx(7.49554875, abs=1e-14)


def test_force_and_mass_matrix_are_consistent():
    # Energy balance of M and h: d/dt (v M v / 2 + V) = v.h + dV/dq.v + v (dM/dt) v / 2 = 0 along the free motion.
    system = SliderCrank()
    for seed in range(5):
        q, v = jax.random.normal(jax.random.key(seed), (2, 3)) * jnp.array([[3.0], [100.0]])
        _, mass_rate = jax.jvp(system.mass_matrix, (q,), (v,))
        _, potential_rate = jax.jvp(lambda q: system.potential_energy(0.0, q), (q,), (v,))
        power = v @ system.force(0.0, q, v) + 0.5 * v @ mass_rate @ v + potential_rate
        assert abs(power) <= 1e-10 * float(jnp.abs(v) @ jnp.abs(system.force(0.0, q, v)))


BILATERAL = {  # time: theta1, omega1, by conservation of energy on the constraint
    0.02: (1.615487385843, 72.2829775195),
    0.05: (4.809238135227, 68.7495094225),
    0.1: (9.140152416942, 144.4063320891),
}


@pytest.mark.parametrize(
    ("scheme", "order", "error", "drift"),
    [
        (GearGuptaLeimkuhler(), 2, 3.15e-7, 1e-15),
        (GearGuptaLeimkuhler.paper(), 2, 3.0e-7, 1e-15),
        (Moreau(), 1, 3.4e-3, 1.2e-4),
    ],
    ids=["default", "paper", "moreau"],
)
def test_bilateral(scheme, order, error, drift):
    system = IdealSliderCrank()
    errors, rates = [], []
    for k in (1, 2, 4):
        result = run(scheme, 10_000 * k, dt=1e-5 / k, save_every=1000 * k, system=system)
        rows = np.array([round(t / 0.01) for t in BILATERAL])
        np.testing.assert_allclose(result.t[rows], list(BILATERAL), rtol=0, atol=1e-15)
        errors.append(result.q[rows, 0] - np.array([theta for theta, _ in BILATERAL.values()]))
        rates.append(result.v[rows, 0] - np.array([omega for _, omega in BILATERAL.values()]))
        opening = jax.vmap(lambda q: system.constraint(0.0, q))(result.q)
        opening_rate = jax.vmap(lambda q, v: constraint_rate(system, 0.0, q, v))(result.q, result.v)
        assert jnp.max(jnp.abs(opening)) <= drift
        if order == 2:
            assert jnp.max(jnp.abs(opening_rate)) <= 1e-13
    # at 0.05 s, the figure of the literature; the orders at every time, in angle and velocity
    assert abs(errors[0][1]) == pytest.approx(error, rel=0.02)
    for coarse, fine in zip((*errors[:-1], *rates[:-1]), (*errors[1:], *rates[1:]), strict=True):
        np.testing.assert_allclose(np.log2(np.abs(coarse / fine)), order, atol=0.03)


@pytest.mark.parametrize("scheme", FAMILY.values(), ids=FAMILY)
@pytest.mark.parametrize("restitution", [0.1, 0.5])
def test_energy_after_the_first_impact(scheme, restitution):
    """As dt -> 0, with the impact at a fixed fraction of its step, so that the error is smooth in dt (Richardson)."""
    impact = EVENTS[restitution]["events"][0]
    table = []
    for steps in (256, 512, 1024, 2048, 4096):
        result = run(scheme, 4098, dt=impact["t"] / (steps + 0.25), restitution=restitution, save_every=1)
        assert int(jnp.argmax(result.impulse[:, 0] > 0)) == steps + 1
        table.append(float(result.energy[steps + 2]))
    for level in range(1, len(table)):
        table = [(2**level * fine - coarse) / (2**level - 1) for coarse, fine in zip(table[:-1], table[1:], strict=True)]
    assert table[0] == pytest.approx(impact["energy_after"], abs=1e-9)


@pytest.mark.parametrize("restitution", [0.1, 0.3])
@pytest.mark.parametrize(
    ("scheme", "drift"),
    [
        (Moreau(), lambda eps: (1 - eps) / (2 * (1 + eps))),
        (REFERENCE_LINE, lambda eps: (1 - eps) / (2 * (1 + eps))),
        (GearGuptaLeimkuhler.paper(), lambda eps: (1 - eps) / (2 * (1 + eps))),
        (GearGuptaLeimkuhler.paper(gap_rate="literal"), lambda eps: 1 / (1 + eps)),
        (GearGuptaLeimkuhler(), lambda eps: 0.0),
    ],
    ids=["moreau", "reference", "midpoint", "literal", "exact"],
)
def test_drift_rate_of_a_closed_contact(scheme, drift, restitution):
    """gdot / (Wdot v dt) in a contact that has been closed for 60 steps and whose wall recedes, Wdot v < 0."""
    system, dt = SliderCrank(restitution=restitution), 1e-5
    result = run(scheme, 5200, restitution=restitution, save_every=1)

    def second_rate(q, v):
        along = lambda f: lambda q: jax.jvp(f, (q,), (v,))[1]  # noqa: E731
        return along(along(lambda q: system.gap(0.0, q)))(q)

    wall = np.asarray(jax.vmap(second_rate)(result.q, result.v))
    pressed = np.asarray(result.impulse) > 0
    settled = np.lib.stride_tricks.sliding_window_view(pressed, 61, axis=0).all(axis=-1)
    settled = np.concatenate([np.zeros((60, 4), bool), settled]) & (wall < -50)
    assert np.sum(settled) > 1000
    measured = np.asarray(result.gap_rate)[settled] / (wall[settled] * dt)
    assert np.mean(measured) == pytest.approx(drift(restitution), abs=1e-3)
    assert np.median(np.abs(measured - drift(restitution))) <= 1e-3


def test_energy_converges_to_the_event_driven_limit():
    limit = EVENTS[0.1]["events"][-1]["energy_after"]
    assert limit == pytest.approx(7.307891685, abs=1e-9)

    def errors(scheme):
        return [float(run(scheme, 10_000 * k, dt=1e-5 / k).energy[-1]) - limit for k in (1, 2, 4, 8)]

    for scheme, first in ((Moreau(), 4.622e-2), (REFERENCE_LINE, 2.458e-3), (GearGuptaLeimkuhler.paper(), 1.126e-3)):
        found = np.abs(errors(scheme))
        assert found[0] == pytest.approx(first, rel=1e-3)
        slope = np.polyfit(np.log([1, 2, 4, 8]), np.log(found), 1)[0]
        assert slope == pytest.approx(-1, abs=0.1), (scheme, found)
    # the default's error is two orders smaller; its sign changes with where the impacts fall in their steps
    found = np.abs(errors(GearGuptaLeimkuhler()))
    assert found[0] == pytest.approx(1.516e-5, rel=1e-2)
    np.testing.assert_array_less(found, 2e-5 / np.array([1, 2, 4, 8]))


@pytest.mark.parametrize("restitution", [0.1, 0.3])
def test_four_seconds(restitution):
    energies = {}
    for name, scheme in FAMILY.items():
        result = run(scheme, 400_000, restitution=restitution, save_every=1000)
        energies[name] = float(result.energy[-1])
        if name == "default":
            assert float(result.min_gap.min()) >= -1e-14
        if name == "moreau" and restitution == 0.1:
            assert int(result.steps_in_contact) / 400_000 == pytest.approx(0.314, abs=5e-4)
            assert float(result.min_gap.min()) == pytest.approx(-4.1418e-5, abs=1e-9)
    assert energies["moreau"] < energies["reference"] < energies["paper"]
    if restitution == 0.1:
        assert energies["moreau"] == pytest.approx(2.88004, rel=1e-3)
        assert energies["reference"] == pytest.approx(3.22671, rel=1e-3)
        assert energies["paper"] == pytest.approx(3.26194, rel=1e-3)
        assert energies["default"] == pytest.approx(3.2597, abs=5e-4)


def test_share_of_contact():
    for restitution, share in ((0.5, 0.070), (0.9, 0.0016)):
        result = run(Moreau(), 400_000, restitution=restitution)
        assert int(result.steps_in_contact) / 400_000 == pytest.approx(share, abs=6e-4 if share > 0.01 else 1e-4)


def test_moreau_penetrates_as_in_figure_3():
    system = SliderCrank()
    result = run(Moreau(), 6000, save_every=1)
    _, y = system.slider_position(result.q)
    assert float(jnp.max(y)) == pytest.approx(1.041418e-3, abs=1e-9)
    assert float(result.t[jnp.argmax(y)]) == pytest.approx(0.0516, abs=2e-4)
    assert float(jnp.min(y)) == pytest.approx(-1.028630e-3, abs=1e-9)
    assert float(result.t[jnp.argmin(y)]) == pytest.approx(0.0342, abs=2e-4)


def test_moreau_dissipates_in_free_flight():
    result = run(Moreau(), 268, save_every=1)
    assert float(result.energy[-1] - result.energy[0]) == pytest.approx(-6.67e-3, abs=5e-5)


def test_identity_metric_injects_energy():
    gained = {}
    for metric in ("identity", "mass"):
        energy = run(GearGuptaLeimkuhler.paper(metric=metric), 10_000, save_every=1).energy
        gained[metric] = float(jnp.sum(jnp.maximum(jnp.diff(energy), 0)))
    assert gained["identity"] == pytest.approx(1.04e-3, rel=0.02)
    assert gained["mass"] == pytest.approx(5.2e-5, rel=0.02)


def test_decoupled_scheme_gains_energy():
    start = run(DecoupledGearGuptaLeimkuhler(activation="start"), 10_000)
    assert float(start.energy[-1]) == pytest.approx(7.535, abs=1e-3)
    assert float(start.energy[-1]) > float(start.energy[0])
    middle = run(DecoupledGearGuptaLeimkuhler(), 10_000)
    assert float(middle.energy[-1]) < float(middle.energy[0])


def test_symmetry_is_kept():
    for scheme in FAMILY.values():
        result = run(scheme, 10_000, save_every=10)
        assert float(jnp.max(jnp.abs(result.q[:, 2]))) <= 1e-12
        np.testing.assert_allclose(result.impulse[:, 0], result.impulse[:, 1], rtol=1e-9, atol=1e-15)


def test_restitution_per_contact():
    same = run(Moreau(), 2000, system=SliderCrank(restitution=[0.3] * 4))
    np.testing.assert_array_equal(same.q, run(Moreau(), 2000, restitution=0.3).q)
    upper_only = dataclasses.replace(SliderCrank(), restitution=np.array([0.3, 0.3, 0.9, 0.9]))
    np.testing.assert_allclose(run(Moreau(), 2000, system=upper_only).q, same.q, rtol=1e-13)  # no lower impact to 20 ms
