"""Agreement with the stored reference runs of the slider-crank (tests/reference/slider_crank.json)."""

import json
from pathlib import Path

import numpy as np
import pytest

import jaxsim
from jaxsim import GearGuptaLeimkuhler, Moreau
from jaxsim.schemes import DecoupledGearGuptaLeimkuhler

REFERENCE = json.loads((Path(__file__).parent / "reference" / "slider_crank.json").read_text())
SCHEMES = {
    "moreau": Moreau(),
    "ggl_default": GearGuptaLeimkuhler(),
    "ggl_paper": GearGuptaLeimkuhler.paper(),
    "ggl_velocity_only": GearGuptaLeimkuhler.paper(position_level=False),
    "ggl_mass_metric": GearGuptaLeimkuhler.paper(metric="mass"),
    "ggl_literal_gap_rate": GearGuptaLeimkuhler.paper(gap_rate="literal"),
    "ggl_exact_gap_rate_mass_metric": GearGuptaLeimkuhler.paper(metric="mass", gap_rate="exact"),
    "decoupled": DecoupledGearGuptaLeimkuhler(),
}
RUNS = [run for run in REFERENCE["runs"] if run["scheme"] != "event_driven_limit"]


def _name(run):
    return f"{run['scheme']}-{run['restitution']}-{run.get('q0', [0, 0, 0])[2]}"


@pytest.mark.parametrize("run", RUNS, ids=_name)
def test_reference_run(run):
    system = jaxsim.systems.SliderCrank(restitution=run["restitution"])
    q0 = run.get("q0", [0.0, 0.0, 0.0])
    result = jaxsim.simulate(
        system, q0, [150.0, -75.0, 0.0], dt=run["dt"], num_steps=10_000, scheme=SCHEMES[run["scheme"]]
    ).raise_if_failed()
    rows = np.array([round(sample["t"] / run["dt"]) for sample in run["samples"]])
    assert len(rows) == 13
    wanted = {name: np.array([sample[name] for sample in run["samples"]]) for name in ("q", "v", "y3", "E")}
    np.testing.assert_allclose(result.q[rows], wanted["q"], rtol=0, atol=1e-9)
    np.testing.assert_allclose(result.v[rows], wanted["v"], rtol=0, atol=1e-7)
    np.testing.assert_allclose(system.slider_position(result.q[rows])[1], wanted["y3"], rtol=0, atol=1e-11)
    np.testing.assert_allclose(result.energy[rows], wanted["E"], rtol=0, atol=1e-9)
    assert int(result.steps_in_contact) == run["steps_in_contact"]
    assert abs(float(result.min_gap.min()) - run["min_gap"]) <= 1e-11
    if run["scheme"] == "ggl_default":
        assert float(result.min_gap.min()) >= -1e-14
    elif run["scheme"] in ("ggl_paper", "ggl_mass_metric", "ggl_literal_gap_rate", "ggl_exact_gap_rate_mass_metric"):
        assert float(result.min_gap.min()) >= -1e-10
