"""Double precision, and shapes checked: the annotations of jaxsim are enforced while the tests run."""

from jaxtyping import install_import_hook

# all modules but simulate, which checks its arguments itself and whose messages are tested
CHECKED = ["contact", "schemes", "solve", "system", "systems", "trajectory", "trigonometry"]
with install_import_hook([f"jaxsim.{name}" for name in CHECKED], "beartype.beartype"):
    import jaxsim

import jax  # noqa: E402

jaxsim.tune_cpu(reverse_mode=True)
jax.config.update("jax_enable_x64", True)
