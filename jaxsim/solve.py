"""Small dense linear systems in plain array code.

Inside a time step a LAPACK call costs more than the whole elimination (and, on CPU, keeps XLA from compiling the time loop
into one function), so the few unknowns that are left after reduction are eliminated here.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


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
    rows = jnp.arange(n)
    work = jnp.concatenate([A, columns], axis=1)
    for k in range(n):
        pivot = k + jnp.argmax(jnp.abs(work[k:, k]))
        pivot_row, old_row = work[pivot], work[k]
        work = jnp.where((rows == pivot)[:, None], old_row, work)
        pivot_row = pivot_row / pivot_row[k]
        factors = jnp.where(rows == k, 0.0, work[:, k])
        work = jnp.where((rows == k)[:, None], pivot_row, work - factors[:, None] * pivot_row)
    return work[:, n:].reshape(B.shape)
