"""Small dense linear systems in plain array code.

Inside a time step a LAPACK call costs more than the whole elimination (and, on CPU, keeps XLA from compiling the time loop
into one function), so the few unknowns that are left after reduction are eliminated here.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float


def by_precision(dtype: Any, double: Any, single: Any) -> Any:
    """What counts as rounding, in float64 or in float32."""
    return double if dtype == jnp.float64 else single


def solve(A: Float[Array, "n n"], B: Float[Array, "n *m"]) -> Float[Array, "n *m"]:
    """A^-1 B for a vector or a matrix B.

    One unknown divides, two use Cramer's rule (which treats both alike, so that a symmetric problem keeps its symmetry to
    the last bit), more use Gauss-Jordan elimination with partial pivoting. Linear in B, so that it can be transposed; a
    singular A gives inf or nan, never an exception.
    """
    n = A.shape[0]
    if n == 0:
        return B
    columns = B.reshape(n, -1)
    if n == 1:
        return B / A[0, 0]
    if n == 2:
        determinant = A[0, 0] * A[1, 1] - A[0, 1] * A[1, 0]
        first = A[1, 1] * columns[0] - A[0, 1] * columns[1]
        second = A[0, 0] * columns[1] - A[1, 0] * columns[0]
        return (jnp.stack([first, second]) / determinant).reshape(B.shape)
    rows = jnp.arange(n)[:, None]
    for k in range(n):
        pivot = k + jnp.argmax(jnp.abs(A[k:, k]))
        divisor, factors = A[pivot, k], jnp.where(rows == k, 0.0, jnp.where(rows == pivot, A[k, k], A[:, k, None]))

        def sweep(X, k=k, pivot=pivot, divisor=divisor, factors=factors):
            pivot_row = X[pivot] / divisor
            return jnp.where(rows == k, pivot_row, jnp.where(rows == pivot, X[k], X) - factors * pivot_row)

        A, columns = sweep(A), sweep(columns)  # apart, so that JAX sees that the result is linear in B
    return columns.reshape(B.shape)


def solve_spd(A: Float[Array, "n n"], B: Float[Array, "n *m"]) -> Float[Array, "n *m"]:
    """A^-1 B for a symmetric positive definite A, such as a mass matrix: no pivoting.

    Up to four unknowns use A = L D L^T written out in scalars, which XLA fuses into one kernel; more go to `solve`.
    """
    n = A.shape[0]
    if not 3 <= n <= 4:
        return solve(A, B)
    L = [[jnp.zeros((), A.dtype)] * n for _ in range(n)]
    D: list[Array] = []
    for j in range(n):
        D.append(A[j, j] - sum(L[j][k] ** 2 * D[k] for k in range(j)))
        for i in range(j + 1, n):
            L[i][j] = (A[i, j] - sum(L[i][k] * L[j][k] * D[k] for k in range(j))) / D[j]
    y: list[Array] = []
    for i, row in enumerate(B.reshape(n, -1)):
        y.append(row - sum(L[i][k] * y[k] for k in range(i)))
    x = [y[i] / D[i] for i in range(n)]
    for i in reversed(range(n)):
        x[i] = x[i] - sum(L[k][i] * x[k] for k in range(i + 1, n))
    return jnp.stack(x).reshape(B.shape)
