"""tune_cpu, the hint, and what importing jaxsim does: in fresh interpreters, since all of it happens once per process."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxsim

LOOP, FUSION = "xla_cpu_small_while_loop_byte_threshold=1000000000", "xla_cpu_use_multi_output_fusion=true"
EXTRA = "--xla_backend_extra_options="

MECHANISM = """
import jax, jax.numpy as jnp, jaxsim
jax.config.update("jax_enable_x64", True)

@jaxsim.mechanism
class Ball:
    restitution: float = 0.5
    def mass_matrix(self, q): return jnp.eye(1, dtype=q.dtype)
    def force(self, t, q, v): return -9.81 * jnp.ones_like(q)
    def gap(self, t, q): return q

def run(num_steps, system=Ball(), scheme=jaxsim.Moreau()):
    return jaxsim.simulate(system, [1.0], [0.0], dt=1e-4, num_steps=num_steps, scheme=scheme, save_every=num_steps)
"""


def fresh(code, flags=None):
    """Run code in an interpreter of its own; what it prints as JSON, and its standard error."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu"} | ({} if flags is None else {"XLA_FLAGS": flags})
    done = subprocess.run([sys.executable, "-c", "import json\n" + code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


SET_FLAGS = """
import os, jaxsim
flags = []
for options in {calls}:
    flags.append([jaxsim.tune_cpu(**options), os.environ.get("XLA_FLAGS")])
print(json.dumps(flags))
"""


def set_flags(*calls, flags=None):
    return fresh(SET_FLAGS.format(calls=calls), flags)[0]


def test_sets_the_flags_once():
    first, second = set_flags({}, {})
    assert first == second == [True, f"{EXTRA}{LOOP},{FUSION}"]


def test_reverse_mode_leaves_out_the_fusion():
    first, second, third = set_flags({"reverse_mode": True}, {"reverse_mode": True}, {})
    assert first == second == [True, f"{EXTRA}{LOOP}"]
    assert third == [True, f"{EXTRA}{LOOP},{FUSION}"]


def test_keeps_the_flags_of_the_user():
    own = "--xla_cpu_multi_thread_eigen=false"
    assert set_flags({}, {}, flags=own) == 2 * [[True, f"{own} {EXTRA}{LOOP},{FUSION}"]]
    extra = "xla_cpu_vector_library_path=none"
    assert set_flags({}, {}, flags=f"{EXTRA}{extra} {own}") == 2 * [[True, f"{own} {EXTRA}{extra},{LOOP},{FUSION}"]]
    twice = f"{EXTRA}{extra} {EXTRA}{LOOP}"
    assert set_flags({}, flags=twice) == [[True, f"{EXTRA}{extra},{LOOP},{FUSION}"]]


def test_too_late():
    code = """
import os, warnings, jax, jaxsim
jax.devices()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    done = jaxsim.tune_cpu()
print(json.dumps([done, os.environ.get("XLA_FLAGS"), [str(w.message) for w in caught], [w.filename for w in caught]]))
"""
    (done, flags, messages, files), _ = fresh(code)
    assert done is False and flags is None
    assert len(messages) == 1 and "too late" in messages[0]
    assert files == ["<string>"]  # the warning points at the caller


COMPILE = (
    MECHANISM
    + """
def text(transform, system, start, scheme, restitution):
    def simulate(restitution):
        return jaxsim.simulate(
            system(restitution=restitution), *start, dt=1e-5, num_steps=200, scheme=scheme, save_every=100
        ).q
    return jax.jit(transform(simulate)).lower(restitution).compile().as_text()

slider_crank = jaxsim.systems.SliderCrank, ([0.0, 0.0, 0.0], [150.0, -75.0, 0.0])
"""
)


def loops(text):
    """From compiled HLO: time loops that are dispatched kernel by kernel, and those that became one function.

    XLA's CPU backend moves a loop that it will emit as one function into a computation of its own and marks the call.
    """
    entry = text[text.index("\nENTRY ") :]
    return len(re.findall(r" while\(", entry)), len(re.findall(r'xla_cpu_small_call="?true', entry))


@pytest.mark.parametrize(
    ("tune", "texts"),
    [
        (
            "jaxsim.tune_cpu()",
            """
            text(lambda f: f, *slider_crank, jaxsim.Moreau(), 0.1),
            text(jax.vmap, *slider_crank, jaxsim.Moreau(), jnp.linspace(0.0, 0.9, 8)),
            text(jax.jacfwd, *slider_crank, jaxsim.Moreau(), 0.1),
            """,
        ),
        ("jaxsim.tune_cpu(reverse_mode=True)", "text(lambda f: f, *slider_crank, jaxsim.GearGuptaLeimkuhler(), 0.1),"),
    ],
    ids=["moreau", "ggl"],
)
def test_the_time_loop_is_one_function(tune, texts):
    """Fails on a JAX where the flags no longer work, and for a step with something in it that XLA cannot inline.

    The latter are calls of LAPACK, sorts and scatters.
    """
    user = f"--xla_cpu_multi_thread_eigen=true {EXTRA}xla_cpu_vector_library_path=none"
    found, _ = fresh(f"import jaxsim\n{tune}\n{COMPILE}\nprint(json.dumps([{texts}]))", user)
    for text in found:
        dispatched, whole = loops(text)
        assert dispatched == 0 and whole >= 1


def test_without_the_option_the_time_loop_is_dispatched():
    """What the test before looks for is not there in any case. The threshold is given, since its default grows with JAX."""
    small = f"{EXTRA}xla_cpu_small_while_loop_byte_threshold=1"
    (text,), _ = fresh(f"{COMPILE}\nprint(json.dumps([text(lambda f: f, *slider_crank, jaxsim.Moreau(), 0.1)]))", small)
    dispatched, whole = loops(text)
    assert dispatched >= 1 and whole == 0


HINT = (
    MECHANISM
    + """
import logging
messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append([record.name, record.levelname, record.getMessage()])
logging.getLogger().addHandler(handler)
counts = []
for num_steps in (100, 9_999, 10_000, 10_000, 20_000):
    run(num_steps)
    counts.append(len(messages))
jax.jit(lambda: run(10_000, Ball(restitution=0.9)))()
print(json.dumps([counts, messages]))
"""
)


def test_one_hint_on_an_untuned_cpu():
    counts, messages = fresh(HINT)[0]
    assert counts == [0, 0, 1, 1, 1] and len(messages) == 1
    name, _, message = messages[0]
    assert name == "jaxsim" and "tune_cpu()" in message


def test_the_hint_reaches_who_configured_nothing():
    _, errors = fresh(MECHANISM + "run(10_000)\nrun(10_000)\nprint(0)")
    assert errors.count("tune_cpu()") == 1


def test_no_hint_on_a_tuned_cpu():
    counts, messages = fresh("import jaxsim\njaxsim.tune_cpu(reverse_mode=True)" + HINT)[0]
    assert not any(counts) and not messages


def test_importing_changes_nothing():
    code = """
import os, sys, jax
from jax._src import xla_bridge
def settings():
    return {name: repr(value) for name, value in jax.config.values.items()}
before, environment, modules = settings(), dict(os.environ), set(sys.modules)
import jaxsim
print(json.dumps([
    {name: value for name, value in settings().items() if before.get(name) != value},
    dict(os.environ) != environment,
    xla_bridge.backends_are_initialized(),
    sorted({name.split(".")[0] for name in set(sys.modules) - modules}),
]))
"""
    (changed, environment_changed, started, new), errors = fresh(code)
    assert changed == {} and not environment_changed and not started and errors == ""
    assert "jaxsim" in new
    assert not {"matplotlib", "tqdm", "xarray", "pandas", "optimistix"} & set(new)


def test_the_namesake_is_not_installed():
    """`pip install jaxsim` brings another project with the same import name; the two overwrite each other's files."""
    names = {re.sub(r"[-_.]+", "-", found.name).lower() for found in importlib.metadata.distributions() if found.name}
    assert "nonsmooth-jaxsim" in names
    assert "jaxsim" not in names, "uninstall jaxsim, it is another project, and reinstall nonsmooth-jaxsim"
    assert set(importlib.metadata.packages_distributions()["jaxsim"]) == {"nonsmooth-jaxsim"}
    assert (Path(jaxsim.__file__).parent / "tune.py").exists()
