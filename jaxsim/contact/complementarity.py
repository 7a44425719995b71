"""Impulses of unilateral contacts with Coulomb friction, by exact complementarity.

With the Delassus matrix D and the constraint directions stacked as (normal, tangential), a step has to find

    xi_N = D_NN L_N + D_NT L_T + b_N,    0 <= xi_N  _|_  L_N >= 0
    xi_T = D_TN L_N + D_TT L_T + b_T,    L_T = prox_[-mu L_N, mu L_N](L_T - r xi_T)

over the contacts that are active. The combinatorial part, which contact is closed and which way it slides, is solved
exactly and once (`contact_rows`: closed form for one or two frictionless contacts, Lemke's pivoting otherwise); the
impulses then solve a linear system (`solve_rows`), through which derivatives pass. Iterating over single contacts
(Gauss-Seidel) is no substitute: two corners of one rigid body are coupled so strongly that it needs hundreds of sweeps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxsim.solve import by_precision, solve


def prox_nonnegative(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Proximal point on the non-negative reals, max(x, 0), with derivative 0 at x = 0 as in (47)."""
    return jnp.where(x > 0, x, 0.0)


def prox_interval(x: Float[Array, "*shape"], radius: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Proximal point on [-radius, radius]; radius >= 0."""
    return jnp.where(x > radius, radius, jnp.where(x < -radius, -radius, x))


class Rows(NamedTuple):
    """One linear row per multiplier: xi = 0 where `free`, else `fixed` @ L = 0 (L = 0 without `fixed`)."""

    free: Bool[Array, " m"]
    fixed: Float[Array, "m m"] | None


def contact_rows(
    D: Float[Array, "m m"],
    b: Float[Array, " m"],
    active: Bool[Array, " contacts"],
    friction: Float[Array, " contacts"] | None = None,
) -> Rows:
    """Which multipliers are at work: the solution's rows, frictionless (m = contacts) or with Coulomb (m = 2 contacts).

    Which rows they are is a combinatorial answer and carries no derivative; the friction coefficient in them does.
    """
    D, b = jax.lax.stop_gradient((D, b))
    if friction is None:
        return Rows(complementarity_set(D, b, active), None)
    return _coulomb_rows(D, b, active, friction)


def solve_rows(D: Float[Array, "m m"], b: Float[Array, "m *columns"], rows: Rows) -> Float[Array, "m *columns"]:
    """L with D L + b = 0 on the free rows and `fixed` @ L = 0 on the others; open contacts carry exactly nothing."""
    fixed = jnp.eye(D.shape[0], dtype=D.dtype) if rows.fixed is None else rows.fixed
    free = rows.free.reshape(-1, *(1,) * (b.ndim - 1))
    L = solve(jnp.where(rows.free[:, None], D, fixed), jnp.where(free, -b, 0.0))
    return jnp.where(free, L, 0.0 if rows.fixed is None else L - fixed @ L)


class WithoutJoints(NamedTuple):
    """D L + b of the contacts alone; the joints' impulses are -(joint[:, 0] + joint[:, 1:] @ L)."""

    D: Float[Array, "m m"]
    b: Float[Array, " m"]
    joint: Float[Array, "joints columns"]


def eliminate_joints(D: Float[Array, "rows rows"], b: Float[Array, " rows"], m: int) -> WithoutJoints:
    """Solve the bilateral rows, those after the first m, whose velocity has to vanish: what they take is linear in L."""
    joint = solve(D[m:, m:], jnp.concatenate([b[m:, None], D[m:, :m]], axis=1))
    return WithoutJoints(D[:m, :m] - D[:m, m:] @ joint[:, 1:], b[:m] - D[:m, m:] @ joint[:, 0], joint)


def natural_residual(
    D: Float[Array, "m m"],
    xi: Float[Array, " m"],
    impulse: Float[Array, " m"],
    active: Bool[Array, " contacts"],
    friction: Float[Array, " contacts"] | None = None,
) -> Float[Array, ""]:
    """Largest violation of the contact law as a velocity: D_ii (L_i - prox(L_i - xi_i / D_ii)); 0 without contacts."""
    contacts = active.size
    scaled = impulse * jnp.diagonal(D)
    gap_part = scaled[:contacts] - prox_nonnegative(scaled[:contacts] - xi[:contacts])
    violation = jnp.where(active, jnp.abs(gap_part), 0.0)
    if friction is not None:
        radius = friction * prox_nonnegative(impulse[:contacts]) * jnp.diagonal(D)[contacts:]
        slip_part = scaled[contacts:] - prox_interval(scaled[contacts:] - xi[contacts:], radius)
        violation = jnp.maximum(violation, jnp.where(active, jnp.abs(slip_part), 0.0))
    return jnp.max(violation, initial=0.0)


def complementarity_set(D: Float[Array, "n n"], b: Float[Array, " n"], active: Bool[Array, " n"]) -> Bool[Array, " n"]:
    """Where L_i > 0 in 0 <= D L + b _|_ L >= 0, over the active indices."""
    if b.size == 0:
        return active
    if b.size == 1:
        return active & (b < 0)
    if b.size == 2:
        return _set_of_two(D, b, active)
    D, b = _scaled(D, b, active)
    return _lemke(*_masked(D, b, active), 16 * b.size) & active


def _scaled(D: Array, b: Array, active: Array) -> tuple[Array, Array]:
    # Unit diagonal and a right-hand side of size one: then one threshold fits every unit and every mass.
    scale = 1 / jnp.sqrt(jnp.diagonal(D))
    b = b * scale
    largest = jnp.max(jnp.where(active, jnp.abs(b[: active.size]), 0.0))
    if b.size > active.size:  # tangential rows of the same contacts
        largest = jnp.maximum(largest, jnp.max(jnp.where(active, jnp.abs(b[active.size :]), 0.0)))
    return D * scale[:, None] * scale[None, :], b / jnp.where(largest > 0, largest, 1.0)


def _set_of_two(D: Array, b: Array, active: Array) -> Array:
    # Both, if that gives positive impulses (and D is regular); else the one that leaves the other's velocity larger.
    # Signs are all that is asked for, so nothing is divided: impulses times the determinant, velocities times D_ii.
    (d00, d01), (d10, d11) = D
    determinant = d00 * d11 - d01 * d10
    both = jnp.stack([d01 * b[1] - d11 * b[0], d10 * b[0] - d00 * b[1]])
    use_both = (determinant > by_precision(D.dtype, 1e-12, 1e-6) * d00 * d11) & jnp.all(active & (both > 0))
    push = jnp.where(active, prox_nonnegative(-b), 0.0)
    left = jnp.stack([b[0] * d11 + d01 * push[1], b[1] * d00 + d10 * push[0]])
    left = jnp.where(active, left, jnp.inf)
    first = use_both | (push[0] > 0) & (left[1] >= left[0])
    second = use_both | (push[1] > 0) & (left[1] < left[0])
    return jnp.stack([first, second])


def _masked(M: Array, q: Array, active: Array) -> tuple[Array, Array]:
    # An inactive index becomes w = z + 1, whose solution is z = 0.
    keep = active[:, None] & active[None, :]
    return jnp.where(keep, M, jnp.eye(q.size, dtype=M.dtype)), jnp.where(active, q, 1.0)


def _coulomb_rows(D: Array, b: Array, active: Array, friction: Array) -> Rows:
    # Planar Coulomb friction as a linear complementarity problem (Glocker, Set-Valued Force Laws, ch. 6):
    # w = (xi_N, xi_R, L_L), z = (L_N, L_R, xi_L) with xi_T = xi_R - xi_L, L_R = mu L_N + L_T, L_L = mu L_N - L_T.
    k = active.size
    G, c = _scaled(D, b, active)
    scale = jnp.sqrt(jnp.diagonal(D))
    mu = jax.lax.stop_gradient(friction) * scale[k:] / scale[:k]
    zero, unit = jnp.zeros((k, k), D.dtype), jnp.eye(k, dtype=D.dtype)
    M = jnp.block(
        [
            [G[:k, :k] - G[:k, k:] * mu, G[:k, k:], zero],
            [G[k:, :k] - G[k:, k:] * mu, G[k:, k:], unit],
            [2 * jnp.diag(mu), -unit, zero],
        ]
    )
    q = jnp.concatenate([c, jnp.zeros(k, D.dtype)])
    basic = _lemke(*_masked(M, q, jnp.tile(active, 3)), 48 * k)
    closed, right, left = basic[:k] & active, basic[k : 2 * k], basic[2 * k :]
    sticks = closed & right & ~left
    slides = jnp.where(left, 1.0, -1.0) * closed  # direction of the friction impulse, against the slip
    return Rows(
        jnp.concatenate([closed, sticks]),
        jnp.block([[unit, zero], [-jnp.diag(slides * friction), unit]]),
    )


def _lemke(M: Array, q: Array, max_pivots: int) -> Array:
    """Basic z of w = M z + q, w, z >= 0, w _|_ z (Lemke 1965; Cottle, Pang, Stone, The LCP, algorithm 4.4.5).

    Where it ends on a ray or runs out of pivots the set is not a solution, which the caller's residual shows.
    """
    n = q.size
    artificial = 2 * n
    rows = jnp.arange(n)
    smallest_pivot, tie = by_precision(M.dtype, 1e-7, 1e-3), by_precision(M.dtype, 1e-12, 1e-6)

    def pivot(tableau: Array, basis: Array, row: Array, column: Array) -> tuple[Array, Array]:
        here = rows == row
        pivot_row = tableau[row] / tableau[row, column]
        swept = tableau - jnp.where(here, 0.0, tableau[:, column])[:, None] * pivot_row
        return jnp.where(here[:, None], pivot_row, swept), jnp.where(here, column, basis)

    def body(carry):
        tableau, basis, entering, count, _ = carry
        column = tableau[:, entering]
        # Smaller entries are rounding: rows of contacts that are nearly redundant, such as two corners that stick.
        usable = column > smallest_pivot
        ratios = jnp.where(usable, tableau[:, -1] / jnp.where(usable, column, 1.0), jnp.inf)
        smallest = jnp.min(ratios)
        ends = (
            (basis == artificial) & usable & (tableau[:, -1] - smallest * column <= tie)
        )  # on a tie the artificial variable leaves first
        row = jnp.where(jnp.any(ends), jnp.argmax(ends), jnp.argmin(ratios))
        leaving = basis[row]
        swept, new_basis = pivot(tableau, basis, row, entering)
        ray = ~jnp.isfinite(smallest)
        tableau, basis = jnp.where(ray, tableau, swept), jnp.where(ray, basis, new_basis)
        entering = jnp.where(leaving < n, leaving + n, leaving - n)
        return tableau, basis, entering, count + 1, ray | (leaving == artificial)

    start = jnp.concatenate([jnp.eye(n, dtype=M.dtype), -M, -jnp.ones((n, 1), M.dtype), q[:, None]], axis=1)
    worst = jnp.argmin(q)
    trivial = ~(q[worst] < 0)
    tableau, basis = pivot(start, rows, worst, jnp.asarray(artificial))
    carry = (tableau, basis, worst + n, jnp.asarray(1), trivial)
    _, basis, _, _, _ = jax.lax.while_loop(lambda c: ~c[4] & (c[3] < max_pivots), body, carry)
    basic = jnp.any(basis[None, :] == (rows + n)[:, None], axis=1)
    return basic & ~trivial
