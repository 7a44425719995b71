"""The small dense solves against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxsim.solve import solve, solve_spd

SIZES = range(1, 9)
PROBLEMS = 100
solve_all, solve_spd_all = jax.jit(jax.vmap(solve)), jax.jit(jax.vmap(solve_spd))


def matrices(kind, n):
    rng = np.random.default_rng(n)
    A = rng.normal(size=(PROBLEMS, n, n))
    if kind == "rows":
        A *= 10.0 ** rng.uniform(-8, 8, size=(PROBLEMS, n, 1))
    elif kind == "columns":
        A *= 10.0 ** rng.uniform(-8, 8, size=(PROBLEMS, 1, n))
    elif kind == "pivoting":  # nothing on the diagonal to divide by
        A = np.stack([np.eye(n)[rng.permutation(n)] for _ in range(PROBLEMS)]) + 1e-14 * A
    elif kind in ("definite", "inertias"):
        A = A @ A.transpose(0, 2, 1) + 0.1 * np.eye(n)
        if kind == "inertias":  # grams beside tonnes, millimetres beside metres
            scale = 10.0 ** rng.uniform(-4, 4, size=(PROBLEMS, n))
            A = A * scale[:, :, None] * scale[:, None, :]
        A = (A + A.transpose(0, 2, 1)) / 2
    return A


def backward_error(A, x, b):
    """Smallest relative change of a row of A and b that makes x exact."""
    return np.abs(A @ x - b) / (np.abs(A) @ np.abs(x) + np.abs(b))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", ["random", "rows", "columns", "pivoting", "definite", "inertias"])
def test_solve(kind, n):
    A = matrices(kind, n)
    rng = np.random.default_rng(1)
    b = rng.normal(size=(PROBLEMS, n, 1)) * (np.abs(A).max(axis=2, keepdims=True) if kind == "rows" else 1.0)
    x = np.asarray(solve_all(A, b[..., 0]))[..., None]
    assert backward_error(A, x, b).max() <= (1e-12 if kind in ("rows", "inertias") else 1e-14)
    if kind in ("random", "pivoting", "definite"):
        wanted = np.linalg.solve(A, b)
        error = np.max(np.abs(x - wanted), axis=1) / np.max(np.abs(wanted), axis=1)
        assert np.all(error[:, 0] <= 1e-15 * (1 + np.linalg.cond(A)))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])  # more go to `solve`
@pytest.mark.parametrize("kind", ["definite", "inertias"])
def test_solve_spd(kind, n):
    A = matrices(kind, n)
    b = np.random.default_rng(2).normal(size=(PROBLEMS, n, 1))
    x = np.asarray(solve_spd_all(A, b[..., 0]))[..., None]
    assert backward_error(A, x, b).max() <= (1e-12 if kind == "inertias" and n > 4 else 1e-14)


@pytest.mark.parametrize(("function", "n"), [(solve, 1), (solve, 2), (solve, 3), (solve_spd, 3), (solve_spd, 4)])
def test_right_hand_sides(function, n):
    """A matrix is solved column by column, and a batch of vectors like a matrix."""
    A = matrices("definite", n)[0]
    B = np.random.default_rng(3).normal(size=(n, 3))

    @jax.jit
    def in_all_shapes(A, B):
        mapped = jax.vmap(function, (None, 1), 1)(A, B)
        return function(A, B), mapped, function(A, B[:, 0]), function(A, B[:, :0])

    matrix, mapped, vector, empty = in_all_shapes(A, B)
    wanted = np.linalg.solve(A, B)
    for found in (matrix, mapped):
        np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(vector, wanted[:, 0], rtol=1e-11, atol=1e-12)
    assert empty.shape == (n, 0)


def test_nothing_to_solve():
    assert solve(jnp.zeros((0, 0)), jnp.zeros(0)).shape == (0,)
    assert solve(jnp.zeros((0, 0)), jnp.zeros((0, 2))).shape == (0, 2)


@pytest.mark.parametrize(("function", "n"), [(solve, 1), (solve, 2), (solve, 3), (solve_spd, 3), (solve_spd, 4)])
def test_derivatives(function, n):
    """jvp and vjp against finite differences."""
    A, b = matrices("definite", n)[1], np.random.default_rng(4).normal(size=(n, 2))
    compiled = jax.jit(function)
    check_grads(compiled, (jnp.asarray(A), jnp.asarray(b)), order=1, modes=("fwd", "rev"), atol=1e-5, rtol=1e-5, eps=1e-6)


@pytest.mark.parametrize(("function", "n"), [(solve, 2), (solve, 3), (solve_spd, 3)])
def test_transpose(function, n):
    """Linear in the right-hand side."""
    A = matrices("definite", n)[2] if function is solve_spd else matrices("random", n)[2]
    b, y = np.random.default_rng(6).normal(size=(2, n))
    (transposed,) = jax.linear_transpose(lambda b: function(jnp.asarray(A), b), b)(y)
    np.testing.assert_allclose(transposed, np.linalg.solve(A.T, y), rtol=1e-10)


@pytest.mark.parametrize("n", SIZES)
def test_singular(n):
    """No exception, and nothing that looks like a solution."""
    A = np.ones((PROBLEMS, n, n)) if n > 1 else np.zeros((PROBLEMS, 1, 1))
    x = solve_all(A, np.random.default_rng(7).normal(size=(PROBLEMS, n)))
    assert not np.any(np.all(np.isfinite(x), axis=1))


def test_two_unknowns_keep_their_symmetry():
    """Swapping the unknowns swaps the solution, to the last bit."""
    rng = np.random.default_rng(8)
    A, b = rng.normal(size=(PROBLEMS, 2, 2)), rng.normal(size=(PROBLEMS, 2))
    np.testing.assert_array_equal(solve_all(A, b), solve_all(A[:, ::-1, ::-1], b[:, ::-1])[:, ::-1])
