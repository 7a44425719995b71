"""The experiments run from their command line; the figures of jaxsim.plot."""

import csv
import dataclasses
import json
import os
import signal
import sys

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest

import jaxsim
from experiments import slider_crank
from jaxsim import plot

V0 = [150.0, -75.0, 0.0]
TINY = ["--duration", "0.006", "--schemes", "moreau", "reference", "--restitution", "0.5", "0.1"]


@pytest.fixture(scope="module", autouse=True)
def no_display():
    before = matplotlib.get_backend()
    matplotlib.use("Agg")
    yield
    matplotlib.use(before)


@pytest.fixture(scope="module")
def run():
    return jaxsim.simulate(
        jaxsim.systems.SliderCrank(), [0.0, 0.0, 0.0], V0, dt=1e-5, num_steps=600, scheme=jaxsim.Moreau(), save_every=2
    )


# The slider-crank --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slider_crank") / "made" / "here"
    return slider_crank.main([*TINY, "--output", str(folder)]), folder


def read_table(folder):
    with open(folder / "table.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_files(outcome):
    code, folder = outcome
    assert code == 0
    figures = {f"{kind}_{scheme}.png" for kind in ("slider", "gaps") for scheme in ("moreau", "reference")}
    figures |= {"drift.png", "energy.png"}
    assert {path.name for path in folder.iterdir()} == figures | {"table.csv", "table.md", "config.json"}
    for figure in figures:
        assert (folder / figure).read_bytes().startswith(b"\x89PNG")
        assert (folder / figure).stat().st_size < 500_000


def test_table(outcome):
    rows = read_table(outcome[1])
    assert [(row["scheme"], row["restitution"]) for row in rows] == [
        (scheme, eps) for scheme in ("moreau", "reference") for eps in ("0.5", "0.1")
    ]
    for row in rows:
        assert float(row["microseconds_per_step"]) > 0
        assert row["failure"] == ""
    assert [float(row["ratio_to_moreau"]) for row in rows[:2]] == [1, 1]
    lines = (outcome[1] / "table.md").read_text().splitlines()
    assert len(lines) == 2 + len(rows)
    assert len({len(line) for line in lines}) == 1


def test_table_covers_every_step(outcome):
    system = jaxsim.systems.SliderCrank(restitution=0.1)
    every = jaxsim.simulate(system, [0.0, 0.0, 0.0], V0, dt=1e-5, num_steps=600, scheme=jaxsim.Moreau())
    y = np.asarray(system.slider_position(every.q)[1])
    row = read_table(outcome[1])[1]
    assert y.max() > 1e-3  # the penetration, between stored rows
    np.testing.assert_allclose([float(row["y3_min_m"]), float(row["y3_max_m"])], [y.min(), y.max()], rtol=0, atol=1e-14)
    np.testing.assert_allclose(float(row["min_gap_m"]), every.gap.min(), rtol=0, atol=1e-14)
    np.testing.assert_allclose(float(row["final_energy_J"]), every.energy[-1], rtol=1e-12)
    assert float(row["contact_percent"]) == pytest.approx(100 * np.mean(np.any(every.impulse[1:] > 0, axis=1)))


def test_tilted_slider_has_no_extremes(run):
    tilted = dataclasses.replace(run, q=run.q.at[3, 2].set(1e-3))
    assert np.all(np.isnan(slider_crank.Run("moreau", 0.1, tilted).slider_extremes()))
    assert np.all(np.isfinite(slider_crank.Run("moreau", 0.1, run).slider_extremes()))


def test_configuration(outcome):
    configuration = json.loads((outcome[1] / "config.json").read_text())
    assert configuration["arguments"]["num_steps"] == 600
    assert configuration["arguments"]["restitution"] == [0.5, 0.1]
    assert configuration["system"]["l1"] == 0.153
    assert configuration["schemes"]["moreau"] == repr(jaxsim.Moreau())
    assert configuration["versions"]["jax"] == jax.__version__
    assert configuration["interrupted"] is False
    assert all((outcome[1] / name).exists() for name in configuration["figures"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dt", "0"], "--dt: must be a positive number, got 0"),
        (["--dt", "soon"], "--dt: must be a positive number, got soon"),
        (["--duration", "-1"], "--duration: must be a positive number, got -1"),
        (["--duration", "inf"], "--duration: must be a positive number, got inf"),
        (["--duration", "4e-6"], "--duration 4e-06 is shorter than one stored row"),
        (["--restitution", "0.5", "1.1"], "--restitution: must be a number in [0, 1], got 1.1"),
        (["--restitution", "nan"], "--restitution: must be a number in [0, 1], got nan"),
        (["--schemes", "euler"], "--schemes: invalid choice: 'euler'"),
        (["--save-every", "0"], "--save-every: must be a whole number of at least 1, got 0"),
        (["--output", __file__], "--output"),
    ],
)
def test_bad_arguments(arguments, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as exit_:
        slider_crank.main(["--output", str(tmp_path), *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit) as exit_:
        slider_crank.main(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for option in ("--duration", "--dt", "--restitution", "--schemes", "--output", "--save-every"):
        assert option in text
    assert text.count("(default:") == 6


def test_duration_is_rounded(tmp_path):
    arguments = slider_crank.parse(["--duration", "0.1", "--dt", "3e-5", "--save-every", "7", "--output", str(tmp_path)])
    assert arguments.num_steps == 3332


def test_interrupt_keeps_what_is_finished(run, tmp_path, capsys, monkeypatch):
    calls = []

    def simulate(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return run

    monkeypatch.setattr(slider_crank, "simulate", simulate)
    assert slider_crank.main([*TINY, "--output", str(tmp_path)]) == 130
    output = capsys.readouterr()
    assert "stopping after this run" in output.err
    assert "interrupted: 3 of 4 runs finished" in output.out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(read_table(tmp_path)) == 3
    assert json.loads((tmp_path / "config.json").read_text())["interrupted"] is True
    assert (tmp_path / "energy.png").exists()


def test_interrupt_at_once(tmp_path, capsys, monkeypatch):
    def simulate(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(slider_crank, "simulate", simulate)
    assert slider_crank.main([*TINY, "--output", str(tmp_path)]) == 130
    assert read_table(tmp_path) == []


def test_failing_run_is_named(run, tmp_path, capsys, monkeypatch):
    lost = {name: jnp.nan * getattr(run, name) for name in ("q", "gap", "gap_rate", "energy", "min_gap")}
    failed = dataclasses.replace(run, failed_step=jnp.asarray(3), failed_time=jnp.asarray(3e-5), **lost)
    monkeypatch.setattr(slider_crank, "simulate", lambda scheme, *_: failed if scheme == "reference" else run)
    assert slider_crank.main([*TINY, "--output", str(tmp_path)]) == 1
    assert "FAILED reference, eps = 0.5: step 3 at t = 3e-05 s failed" in capsys.readouterr().out
    assert ["step 3" in row["failure"] for row in read_table(tmp_path)] == [False, False, True, True]
    assert "failure" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "drift.png").exists()


# jaxsim.plot -------------------------------------------------------------------------------------------------------------


def test_gaps(run):
    upper, lower = plot.gaps(run)
    assert [line.get_label() for line in upper.get_lines()[:4]] == ["g1", "g2", "g3", "g4"]
    np.testing.assert_array_equal(upper.get_lines()[2].get_ydata(), run.gap[:, 2])
    np.testing.assert_array_equal(lower.get_lines()[2].get_ydata(), run.gap_rate[:, 2])
    assert upper.get_ylabel() == "gap [m]"
    assert lower.get_ylabel() == "gap rate [m/s]"
    assert lower.get_xlabel() == "t [s]"
    plt.close(upper.figure)


def test_gaps_into_given_axes(run):
    figure, axes = plt.subplots(1, 2)
    assert plot.gaps(run, contacts=[2], axes=axes) is axes
    assert axes[0].get_lines()[0].get_label() == "g3"
    assert len(plt.get_fignums()) == 1
    plt.close(figure)


def test_closed_phases_are_shaded(run):
    upper, _ = plot.gaps(run)
    (shaded,) = upper.collections
    spans = [path.get_extents() for path in shaded.get_paths()]
    closed = np.any(np.asarray(run.impulse) > 0, axis=1)
    assert closed.any()
    t = np.asarray(run.t)
    assert sum(span.width for span in spans) == pytest.approx(closed.sum() * (t[1] - t[0]))
    assert spans[0].x0 == pytest.approx(t[np.argmax(closed) - 1])
    plt.close(upper.figure)


def test_energy(run):
    ax = plot.energy([run, run], ["one", "two"])
    np.testing.assert_array_equal(ax.get_lines()[1].get_ydata(), run.energy)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["one", "two"]
    assert "[J]" in ax.get_ylabel()
    assert plot.energy(run, ax=ax) is ax
    assert len(ax.get_lines()) == 3
    with pytest.raises(ValueError, match="1 labels for 2 trajectories"):
        plot.energy([run, run], ["one"])
    plt.close(ax.figure)


def test_batches_are_refused(run):
    batch = jax.tree.map(lambda x: jnp.stack([x, x]), run)
    for function in (plot.gaps, plot.energy):
        with pytest.raises(ValueError, match="batch of runs.*take one of them"):
            function(batch)
    plot.energy(jax.tree.map(lambda x: x[0], batch))
    plt.close("all")


@pytest.mark.parametrize("contacts", [[], [4], [-1]])
def test_unknown_contacts(run, contacts):
    with pytest.raises(ValueError, match="no such contacts"):
        plot.gaps(run, contacts=contacts)


def test_no_contacts_to_draw(run):
    names = ("gap", "gap_rate", "impulse", "friction_impulse", "min_gap", "closed_steps", "failed_active")
    without = dataclasses.replace(run, **{name: getattr(run, name)[..., :0] for name in names})
    with pytest.raises(ValueError, match="the trajectory has 0"):
        plot.gaps(without)


def test_missing_matplotlib_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install 'nonsmooth-jaxsim\[plot\]'"):
        plot.energy(run)
