"""Double precision, and shapes checked: the annotations of jaxsim are enforced while the tests run."""

from jaxtyping import install_import_hook

with install_import_hook("jaxsim", "beartype.beartype"):
    import jaxsim  # noqa: F401

import jax

jax.config.update("jax_enable_x64", True)
