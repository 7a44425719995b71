"""Compiler options that make short steps fast on CPU."""

import logging
import os
import warnings

from jax._src import xla_bridge  # the only way to ask whether a backend has started without starting it

_LOOP = "xla_cpu_small_while_loop_byte_threshold=1000000000"
_FUSION = "xla_cpu_use_multi_output_fusion=true"
_OPTION = "--xla_backend_extra_options="
_hinted = False


def tune_cpu(*, reverse_mode: bool = False) -> bool:
    """Have XLA compile the whole time loop into one function on CPU; call it once, before anything runs on JAX.

    XLA's CPU backend dispatches the body of a loop kernel by kernel unless the loop is small, which for a step of a small
    mechanism costs several times the arithmetic (JAX 0.12 counts more loops as small than 0.10). The two options go into
    the environment variable XLA_FLAGS, beside the user's own; they cannot be set per function. Without effect on other
    backends.

    Args:
        reverse_mode: leave out multi-output fusion, which makes the compile time and cost of reverse-mode derivatives grow.

    Returns:
        Whether the options are in force: False, with a warning, where JAX has already started its backend.
    """
    wanted = [_LOOP] if reverse_mode else [_LOOP, _FUSION]
    flags = os.environ.get("XLA_FLAGS", "").split()
    given = [flag for flag in flags if flag.startswith(_OPTION)]
    options = [option for flag in given for option in flag.removeprefix(_OPTION).split(",")]
    missing = [option for option in wanted if option not in options]
    if not missing:
        return True
    if xla_bridge.backends_are_initialized():
        warnings.warn(
            "jaxsim.tune_cpu() comes too late: JAX has started its backend and reads XLA_FLAGS no more; "
            "call it right after the imports",
            stacklevel=2,
        )
        return False
    os.environ["XLA_FLAGS"] = " ".join([f for f in flags if f not in given] + [_OPTION + ",".join(options + missing)])
    return True


def hint_once(num_steps: int) -> None:
    """Log, once in a process, that a long run on an untuned CPU could be faster."""
    global _hinted
    if _hinted or num_steps < 10_000 or _LOOP in os.environ.get("XLA_FLAGS", ""):
        return
    if xla_bridge.get_backend().platform == "cpu":
        _hinted = True
        logging.getLogger("jaxsim").warning(
            "hint: jaxsim.tune_cpu(), called right after the imports, makes long runs on CPU faster, with JAX 0.10 ten times"
        )
