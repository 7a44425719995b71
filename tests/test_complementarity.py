"""Exact complementarity against the trial of all sets, and against the contact law itself."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsim.contact.complementarity import (
    contact_rows,
    natural_residual,
    prox_interval,
    prox_nonnegative,
    solve_rows,
)

PROBLEMS = 100


@jax.jit
@jax.vmap
def solve_all(D, b, active):
    rows = contact_rows(D, b, active)
    impulse = solve_rows(D, b, rows)
    return impulse, rows.free, natural_residual(D, D @ impulse + b, impulse, active)


@jax.jit
@jax.vmap
def solve_all_with_friction(D, b, active, friction):
    impulse = solve_rows(D, b, contact_rows(D, b, active, friction))
    return impulse, natural_residual(D, D @ impulse + b, impulse, active, friction)


residual_with_friction = jax.jit(jax.vmap(natural_residual))


def problems(contacts, coordinates, rows=1, seed=0):
    """D = W M^-1 W^T and b = W v: what a mechanism can produce, also where W has dependent rows."""
    rng = np.random.default_rng([seed, contacts, coordinates])
    W = rng.normal(size=(PROBLEMS, rows * contacts, coordinates))
    root = rng.normal(size=(PROBLEMS, coordinates, coordinates))
    M = root @ root.transpose(0, 2, 1) + 0.3 * np.eye(coordinates)
    D = W @ np.linalg.solve(M, W.transpose(0, 2, 1))
    b = np.einsum("pij,pj->pi", W, rng.normal(size=(PROBLEMS, coordinates)))
    return (D + D.transpose(0, 2, 1)) / 2, b, rng.random((PROBLEMS, contacts)) < 0.8


def by_trial(D, b, active):
    """The set of closed contacts and their impulses, by trying all subsets."""
    for size in range(len(b) + 1):
        for closed in map(list, itertools.combinations(np.flatnonzero(active), size)):
            impulse = np.zeros_like(b)
            impulse[closed] = np.linalg.solve(D[np.ix_(closed, closed)], -b[closed])
            if np.all(impulse >= 0) and np.all((D @ impulse + b)[active] >= -1e-12):
                return np.isin(np.arange(len(b)), closed), impulse
    raise AssertionError("no set solves the problem")


def violation(D, b, active, impulse):
    """How far 0 <= D L + b _|_ L >= 0 over the active contacts is from holding, as a velocity."""
    xi, scaled = D @ impulse + b, impulse * np.diag(D)
    in_contact = np.max(np.maximum.reduce([-xi, -scaled, np.minimum(np.abs(xi), np.abs(scaled))])[active], initial=0.0)
    return max(in_contact, np.max(np.abs(scaled[~active]), initial=0.0))


def friction_violation(D, b, active, friction, impulse):
    """How far Signorini's and Coulomb's laws are from holding, as a velocity."""
    k = len(active)
    worst = violation(D[:k, :k], D[:k, k:] @ impulse[k:] + b[:k], active, impulse[:k])
    slip, push = D[k:] @ impulse + b[k:], impulse[k:] * np.diag(D)[k:]
    largest = friction * impulse[:k] * np.diag(D)[k:]
    worst = max(worst, np.max(np.abs(push[~active]), initial=0.0))
    # it sticks inside the cone, slides against the impulse on its edge
    inside = np.maximum(np.abs(push) - largest, np.abs(slip))
    slides = np.minimum(np.maximum(slip, 0) + np.abs(push - largest), np.maximum(-slip, 0) + np.abs(push + largest))
    return max(worst, np.max(np.minimum(inside, slides)[active], initial=0.0))


def worst_violation(D, b, active, impulse):
    return max(map(violation, D, b, active, impulse))


@pytest.mark.parametrize("n", range(1, 7))
def test_all_sets_tried(n):
    D, b, active = problems(n, n + 2)
    for scale in (1.0, 1e-4):
        impulse, closed, residual = map(np.asarray, solve_all(D, scale * b, active))
        for i in range(PROBLEMS):
            wanted_set, wanted = by_trial(D[i], b[i], active[i])
            np.testing.assert_array_equal(closed[i], wanted_set)
            np.testing.assert_allclose(impulse[i] / scale, wanted, rtol=1e-9, atol=1e-12)
        assert np.all(residual <= 1e-11 * scale)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_at_rest(n):
    """b = 0: nothing pushes."""
    D, b, active = problems(n, n + 2)
    impulse, closed, residual = solve_all(D, 0 * b, active)
    assert not np.any(closed) and np.all(np.asarray(impulse) == 0) and np.all(np.asarray(residual) == 0)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_exactly_touching(n):
    """Some contacts would keep their velocity exactly at zero without an impulse of their own."""
    D, _, active = problems(n, n + 2)
    rng = np.random.default_rng(n)
    wanted = rng.uniform(0, 1, (PROBLEMS, n)) * (rng.random((PROBLEMS, n)) < 0.5) * active
    b = -np.einsum("pij,pj->pi", D, wanted)  # every active contact ends at xi = 0, with an impulse or without
    impulse, _, residual = map(np.asarray, solve_all(D, b, active))
    np.testing.assert_allclose(impulse, wanted, rtol=0, atol=1e-10)
    assert worst_violation(D, b, active, impulse) <= 1e-12 and np.all(residual <= 1e-12)


@pytest.mark.parametrize(("n", "coordinates"), [(3, 1), (3, 2), (4, 1), (4, 3), (5, 2), (6, 1), (6, 3)])
def test_redundant_contacts(n, coordinates):
    """More contacts than the mechanism has coordinates: D is singular, impulses are not unique."""
    D, b, active = problems(n, coordinates)
    impulse, _, residual = map(np.asarray, solve_all(D, b, active))
    assert worst_violation(D, b, active, impulse) <= 1e-10 and np.all(residual <= 1e-10)


def test_two_redundant_contacts():
    """Two contacts on one coordinate, such as a lever over two stops."""
    D, b, active = problems(2, 1)
    impulse, _, residual = map(np.asarray, solve_all(D, b, active))
    assert worst_violation(D, b, active, impulse) <= 1e-10 and np.all(residual <= 1e-10)


@pytest.mark.parametrize(
    ("arms", "inverse_mass", "velocity"),
    [
        ((0.1, 0.1), 1.0, -1.0),  # two equal stops: L = (-1.8, -1.8), should be 10 in sum
        ((0.1, 0.3), 1.0, -1.0),  # a lever over two stops: L = (0, 2), should be (0, 10/3)
        ((0.1, -0.3), 3.0, 1.0),  # a lever between two stops: L = (inf, inf)
        ((0.1, -0.3), 10.0, -1.0),  # L = (0, 0)
    ],
)
def test_lever_with_two_stops(arms, inverse_mass, velocity):
    W = np.array(arms)
    D, b = W[:, None] * inverse_mass * W[None, :], W * velocity
    both = np.ones((1, 2), bool)
    impulse, _, _ = map(np.asarray, solve_all(D[None], b[None], both))
    assert violation(D, b, both[0], impulse[0]) <= 1e-12


@pytest.mark.parametrize(
    ("mass", "dt"),
    [
        (1.0, 1e-5),
        (1e-9, 1e-6),
        (1e12, 1e-5),
        (1e-15, 1e-8),
    ],
)
def test_three_balls_of_any_mass(mass, dt):
    """Three balls on the ground, lifted by one, two and three times their weight: no scale is special."""
    D, b = np.eye(3) / mass, -9.81 * dt * np.array([1.0, 2.0, 3.0])
    impulse, closed, _ = solve_all(D[None], b[None], np.ones((1, 3), bool))
    assert np.all(closed)
    np.testing.assert_allclose(impulse[0], -b * mass, rtol=1e-12)


def test_symmetric_twins():
    """Two contacts that only their names tell apart get the same impulse, to the last bit."""
    rng = np.random.default_rng(0)
    own, cross, b = rng.uniform(1, 2, PROBLEMS), rng.uniform(-0.9, 0.9, PROBLEMS), rng.normal(size=PROBLEMS)
    D = np.stack([np.stack([own, cross], 1), np.stack([cross, own], 1)], 1)
    active = np.ones((PROBLEMS, 2), bool)
    impulse, closed, residual = map(np.asarray, solve_all(D, np.stack([b, b], 1), active))
    np.testing.assert_array_equal(impulse[:, 0], impulse[:, 1])
    np.testing.assert_array_equal(closed, (b < 0)[:, None] & active)
    assert np.all(residual <= 1e-14)


def test_swapped_twins():
    """Swapping two contacts swaps their impulses, to the last bit."""
    D, b, active = problems(2, 4)
    there, _, _ = solve_all(D, b, active)
    back, _, _ = solve_all(D[:, ::-1, ::-1], b[:, ::-1], active[:, ::-1])
    np.testing.assert_array_equal(there, back[:, ::-1])


@pytest.mark.parametrize("n", range(1, 5))
def test_friction(n):
    D, b, active = problems(n, 2 * n + 1, rows=2)
    friction = np.random.default_rng(n).uniform(0, 0.3, (PROBLEMS, n))
    friction[::10] = 0.0
    for scale in (1.0, 1e-4):
        impulse, residual = map(np.asarray, solve_all_with_friction(D, scale * b, active, friction))
        worst = max(map(friction_violation, D, scale * b, active, friction, impulse))
        assert worst <= 1e-11 * scale and np.all(residual <= 1e-11 * scale)
    smooth, _, _ = solve_all(D[::10, :n, :n], b[::10, :n], active[::10])
    np.testing.assert_allclose(impulse[::10, :n] / scale, smooth, rtol=1e-9, atol=1e-11)


def blocks(count, seed=0):
    """Rectangles on top of each other, (x, y, angle) each, touching at the corners: four rows for three coordinates."""
    rng = np.random.default_rng([seed, count])
    mass = rng.uniform(0.1, 3.0, (PROBLEMS, count))
    inertia = mass * rng.uniform(0.05, 1.0, (PROBLEMS, count))
    width, height = rng.uniform(0.1, 1.0, (2, PROBLEMS, count))
    W = np.zeros((PROBLEMS, 4 * count, 3 * count))
    for block, side in itertools.product(range(count), (0, 1)):
        arm = width[:, block] * (1 - 2 * side)
        normal, tangential, own = 2 * block + side, 2 * count + 2 * block + side, 3 * block
        W[:, normal, own + 1], W[:, normal, own + 2] = 1.0, arm
        W[:, tangential, own], W[:, tangential, own + 2] = 1.0, height[:, block]
        if block:
            W[:, normal, own - 2], W[:, normal, own - 1] = -1.0, -arm
            W[:, tangential, own - 3], W[:, tangential, own - 1] = -1.0, height[:, block - 1]
    M_inverse = 1 / np.stack([mass, mass, inertia], axis=2).reshape(PROBLEMS, 1, 3 * count)
    v = rng.normal(size=(PROBLEMS, count, 3))
    v[::4] = (0.0, -1.0, 0.0)  # straight down
    return (W * M_inverse) @ W.transpose(0, 2, 1), np.einsum("pij,pj->pi", W, v.reshape(PROBLEMS, -1))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("largest", [0.3, 1.0])
def test_rubbing_blocks(count, largest):
    """D is singular."""
    D, b = blocks(count)
    active = np.ones((PROBLEMS, 2 * count), bool)
    friction = np.random.default_rng(count).uniform(0, largest, (PROBLEMS, 1)) * np.ones(2 * count)
    impulse, residual = map(np.asarray, solve_all_with_friction(D, b, active, friction))
    assert max(map(friction_violation, D, b, active, friction, impulse)) <= 1e-10 and np.all(residual <= 1e-10)
    if count == 1:  # straight down: both corners push alike
        np.testing.assert_allclose(impulse[::4, 0], impulse[::4, 1], rtol=1e-12)


@pytest.mark.parametrize(("n", "coordinates"), [(2, 2), (4, 2), (4, 3)])
def test_redundant_contacts_with_friction(n, coordinates):
    """Up to eight directions on two coordinates: rounding can mislead the pivoting, but rarely and never silently."""
    failures = 0
    for seed in range(10):
        D, b, active = problems(n, coordinates, rows=2, seed=seed)
        friction = np.random.default_rng(seed).uniform(0, 0.3, (PROBLEMS, n))
        impulse, residual = map(np.asarray, solve_all_with_friction(D, b, active, friction))
        violations = np.array(list(map(friction_violation, D, b, active, friction, impulse)))
        failures += np.sum(violations > 1e-8)
        assert np.all(residual[violations > 1e-8] > 1e-8)
    assert failures <= 0.005 * 10 * PROBLEMS


def test_residual_off_the_solution():
    D, b, active = problems(3, 8, rows=2)
    active[:, 0] = True
    friction = np.full((PROBLEMS, 3), 0.2)
    impulse, at_solution = map(np.asarray, solve_all_with_friction(D, b, active, friction))
    for row in (0, 3):  # a normal and a tangential impulse
        for change in (-0.1, 0.1):
            moved = impulse.copy()
            moved[:, row] += change
            xi = np.einsum("pij,pj->pi", D, moved) + b
            off = np.asarray(residual_with_friction(D, xi, moved, active, friction))
            assert np.all(off > 1e-3) and np.all(at_solution < 1e-11)


@pytest.mark.parametrize(
    ("xi", "impulse", "friction", "wanted"),
    [
        ((-2.0,), (0.0,), None, 2.0),  # penetrates
        ((1.0,), (0.5,), None, 1.0),  # pushes while it opens
        ((0.0,), (-0.5,), None, 1.0),  # pulls: 0.5 D
        ((1.0,), (0.0,), None, 0.0),
        ((0.0,), (0.5,), None, 0.0),
        ((0.0, 0.0), (1.0, 0.3), 0.2, 0.4),  # 0.1 outside the cone, D = 4
        ((0.0, 5.0), (1.0, 0.2), 0.2, 1.6),  # slides along its impulse instead of against it
        ((0.0, 5.0), (1.0, -0.2), 0.2, 0.0),
        ((0.0, 0.0), (1.0, 0.1), 0.2, 0.0),
        ((0.0, 0.5), (1.0, 0.1), 0.2, 0.5),  # slips inside the cone
        ((3.0, 1.0), (0.0, 0.0), 0.2, 0.0),
    ],
)
def test_residual_is_a_velocity(xi, impulse, friction, wanted):
    D = jnp.diag(jnp.array([2.0, 4.0])[: len(xi)])
    mu = None if friction is None else jnp.array([friction])
    here = functools.partial(natural_residual, D, jnp.array(xi), jnp.array(impulse), friction=mu)
    assert float(here(active=jnp.array([True]))) == pytest.approx(wanted, abs=1e-15)
    assert float(here(active=jnp.array([False]))) == 0.0


@pytest.mark.parametrize(
    ("n", "rows"),
    [(1, 1), (2, 1), (3, 1), (4, 1)] + [(1, 2), (2, 2), (3, 2)],
)
def test_open_contacts_carry_exactly_nothing(n, rows):
    """Who counts contacts by their impulses must not count rounding errors."""
    D, b, active = problems(n, 2 * n + 1, rows)
    if rows == 1:
        impulse, closed, _ = map(np.asarray, solve_all(D, b, active))
    else:
        impulse, _ = map(np.asarray, solve_all_with_friction(D, b, active, np.full((PROBLEMS, n), 0.2)))
        rate = np.einsum("pij,pj->pi", D, impulse) + b
        closed = np.tile(active & (rate[:, :n] < 1e-10), 2)
    assert np.all(impulse[~closed] == 0)


def test_no_contacts():
    nothing, none = jnp.zeros(0), jnp.zeros(0, bool)
    rows = contact_rows(jnp.zeros((0, 0)), nothing, none)
    assert solve_rows(jnp.zeros((0, 0)), nothing, rows).shape == (0,)
    assert float(natural_residual(jnp.zeros((0, 0)), nothing, nothing, none)) == 0.0


@pytest.mark.parametrize("n", [2, 3])
def test_derivatives(n):
    """The set stays, the impulses follow: dL/db = -D^-1 on the closed contacts."""
    D, b, active = problems(n, n + 2)
    closed = np.asarray(solve_all(D, b, active)[1])
    pick = int(np.argmax(closed.sum(axis=1) == n - 1))
    inside = np.ix_(closed[pick], closed[pick])
    wanted = np.zeros((n, n))
    wanted[inside] = -np.linalg.inv(D[pick][inside])

    @jax.jit
    def derivatives(D, b, active):
        def impulses(b):
            return solve_rows(D, b, contact_rows(D, b, active))

        return jax.jacfwd(impulses)(b), jax.jacrev(impulses)(b)

    for found in derivatives(D[pick], b[pick], active[pick]):
        np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_derivative_by_friction():
    """A sliding contact: L_T = -mu L_N."""
    D, b, active = jnp.eye(2), jnp.array([-1.0, 2.0]), jnp.array([True])

    def impulses(friction):
        return solve_rows(D, b, contact_rows(D, b, active, friction[None]))

    value, slope = jax.jit(lambda friction: jax.jvp(impulses, (friction,), (jnp.ones(()),)))(jnp.asarray(0.3))
    np.testing.assert_allclose(value, [1.0, -0.3], rtol=1e-14)
    np.testing.assert_allclose(slope, [0.0, -1.0], rtol=1e-14)


def test_prox():
    x = jnp.array([-2.0, -0.5, 0.0, 0.5, 2.0])
    np.testing.assert_array_equal(prox_nonnegative(x), [0.0, 0.0, 0.0, 0.5, 2.0])
    np.testing.assert_array_equal(prox_interval(x, jnp.ones(5)), [-1.0, -0.5, 0.0, 0.5, 1.0])
    assert float(jax.grad(prox_nonnegative)(0.0)) == 0.0
