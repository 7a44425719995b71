"""The installed JAX computes what it should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_batched_product_and_sum(n):
    """Wrong on CPU from 16,385 float64 rows on, for n = 3 and 5, in JAX 0.10.2 (jax issue 39103)."""
    matrix = np.arange(1.0, n * n + 1).reshape(n, n)
    rows = np.random.default_rng(n).normal(size=(16_385, n))
    result = jax.jit(jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2)))(rows)
    np.testing.assert_allclose(result, np.sum((rows @ matrix.T) ** 2, axis=1), rtol=1e-10, atol=1e-10)
