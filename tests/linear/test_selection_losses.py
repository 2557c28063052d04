"""Margin losses and heads are exact where they say so, bounded, and a user's own to the last bit."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import sparse

from privrep.data.sparse import SparseRows
from privrep.data.synthetic_margin import make_margin_population
from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.heads.margin import (
    LOSSES,
    count_first_half,
    fit_lipschitz,
    fit_surrogate_heads,
    fit_zero_one_heads,
    shorten_rows,
)
from privrep.linear.methods.lipschitz_selection import LipschitzLosses
from privrep.linear.methods.margin_selection import MarginLosses, find_margin_losses
from privrep.linear.nets import WIDTH, RandomNet, Zooming, make_sign_matrix
from privrep.local.transform import Projection
from privrep.privacy.bounds import LossBound
from privrep.privacy.protocol import Facts, UserBatch
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance
from privrep.users.projected import ProjectedUsers, project

CIRCLE = np.linspace(0, 2 * math.pi, 20_001)[:-1]
DIRECTIONS = np.stack([np.cos(CIRCLE), np.sin(CIRCLE)])
STEPS = {f"margin, rank {k}": (k, lambda net: MarginLosses(net, 0.3, 1.5, True)) for k in (1, 2, 3)} | {
    loss: (2, lambda net, loss=loss: LipschitzLosses(net, loss, 0.8, 1.5, False)) for loss in LOSSES
}


pytestmark = pytest.mark.usefixtures("as_the_engines_call_steps")


@dataclass(frozen=True)
class Fixed:
    """A net of given candidates, filled up with zeros."""

    matrices: np.ndarray  # (size, dimension, rank)

    @property
    def size(self) -> int:
        return len(self.matrices)

    def chunk(self, number: int) -> np.ndarray:
        some = self.matrices[number * WIDTH : (number + 1) * WIDTH]
        return np.moveaxis(np.concatenate([some, np.zeros((WIDTH - len(some), *some.shape[1:]))]), 0, 2)


def crowd(users, m, d, seed):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((users, m, d)).astype(np.float32) / math.sqrt(d)
    y = np.where(rng.random((users, m)) < 0.5, 1.0, -1.0).astype(np.float32)
    X[0] = 0
    X[1] = X[1, :1]  # a user whose rows are all alike
    return X, y


@pytest.mark.parametrize("margin", [0.05, 0.3, 0.8])
@pytest.mark.parametrize("m", [1, 2, 5, 9])
def test_the_best_head_in_the_plane_is_found(margin, m):
    Q = np.random.default_rng(m).standard_normal((40, m, 2, 3)) * np.array([0.2, 1.0, 5.0])
    Q[1] = Q[1, :1]
    losses = find_margin_losses(Q, margin, 1.5)
    outputs = np.tensordot(1.5 * DIRECTIONS, Q, axes=(0, 2))  # (directions, users, m, 3)
    by_grid = 1 - (outputs > margin).sum(axis=2).max(axis=0) / m
    assert (losses <= by_grid + 1e-12).all()  # nothing on a fine grid is better
    slack = np.isclose(losses, by_grid)
    assert slack.mean() > 0.99  # and what is better hides between the points of the grid
    nearer = 1 - (outputs > margin * (1 - 1e-3) - 2e-3).sum(axis=2).max(axis=0) / m
    assert (losses >= nearer - 1e-12).all()


def test_the_loss_of_rank_one_tries_both_signs():
    Q = np.array([0.5, 0.2, -0.4, -0.6, 0.9]).reshape(1, 5, 1, 1)
    assert find_margin_losses(Q, 0.3, 1.0)[0, 0] == pytest.approx(3 / 5)
    assert find_margin_losses(Q, 0.3, 2.0)[0, 0] == pytest.approx(2 / 5)
    assert find_margin_losses(-Q, 0.3, 2.0)[0, 0] == pytest.approx(2 / 5)


def test_rows_that_are_alike_count_alike_and_rows_out_of_reach_not_at_all():
    row = np.array([0.31, 0.17], np.float32)
    Q = np.tile(row, (1, 7, 1))[..., None]
    assert find_margin_losses(Q, 0.3, 1.0)[0, 0] == 0
    assert find_margin_losses(Q, 0.36, 1.0)[0, 0] == 1  # longer than the rows are
    assert find_margin_losses(0 * Q, 0.3, 1.0)[0, 0] == 1


@pytest.mark.parametrize("k", [3, 4])
def test_the_surrogate_finds_a_margin_that_is_there(k):
    rng = np.random.default_rng(k)
    V = rng.standard_normal((200, k))
    V /= np.linalg.norm(V, axis=1, keepdims=True)
    Q = rng.standard_normal((200, 6, k))
    Q *= np.sign((Q * V[:, None]).sum(axis=2, keepdims=True))
    Q += 0.5 * V[:, None]
    heads = fit_surrogate_heads(Q[..., None], 0.2, 1.0)
    assert np.linalg.norm(heads, axis=1) == pytest.approx(1)
    losses = find_margin_losses(Q[..., None], 0.2, 1.0)
    right = (Q * heads[:, None, :, 0]).sum(axis=2) > 0.2
    assert losses[:, 0] == pytest.approx(1 - right.mean(axis=1))
    assert losses.mean() < 0.05


@pytest.mark.parametrize("m", [1, 2, 5, 10])
def test_heads_in_the_plane_have_the_least_error_and_the_widest_arc(m):
    Q = np.random.default_rng(m).standard_normal((60, m, 2))
    heads = fit_zero_one_heads(Q)
    outputs = np.tensordot(DIRECTIONS, Q, axes=(0, 2))
    right = (Q * heads[:, None]).sum(axis=2) > 0
    counts = (outputs > 0).sum(axis=2)
    assert (right.sum(axis=1) >= counts.max(axis=0)).all()
    unit = Q / np.linalg.norm(Q, axis=2, keepdims=True)
    nearest = np.where(right, (unit * heads[:, None]).sum(axis=2), 9).min(axis=1)
    angles = outputs / np.linalg.norm(Q, axis=2)
    best = np.where(counts == counts.max(axis=0), np.where(outputs > 0, angles, 9).min(axis=2), -9).max(axis=0)
    assert (nearest >= best - 1e-9).all()
    assert np.linalg.norm(heads, axis=1) == pytest.approx(1)


def test_heads_of_nothing_are_nothing_and_of_one_row_its_own():
    assert not fit_zero_one_heads(np.zeros((2, 3, 2))).any()
    assert fit_zero_one_heads(np.array([[[3.0, 4.0]]])) == pytest.approx(np.array([[0.6, 0.8]]))
    assert fit_zero_one_heads(np.array([[[1.0], [-1.0], [2.0]], [[0.0], [-1.0], [0.0]]])).tolist() == [[1.0], [-1.0]]
    assert fit_zero_one_heads(np.random.default_rng(0).standard_normal((4, 6, 5))).shape == (4, 5)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("m", [1, 2, 5, 10])
def test_a_users_losses_are_its_own_to_the_last_bit(name, m):
    rank, make = STEPS[name]
    X, y = crowd(70, m, 12, m)
    net = RandomNet("test", 300, 12, rank)
    step = make(net)
    together = step(UserBatch(X, y))["losses"].values
    assert together.shape == (70, 300)
    assert together.min() >= 0
    assert together.max() <= 1
    assert together[2:].std() > 0
    for chosen in ([3], [69, 3, 5], [1], [0, 64], list(range(40, 70))):
        alone = step(UserBatch(np.ascontiguousarray(X[chosen]), np.ascontiguousarray(y[chosen])))["losses"].values
        assert np.array_equal(alone, together[chosen])


@pytest.mark.parametrize("name", STEPS)
def test_nor_do_they_depend_on_how_many_candidates_there_are(name):
    rank, make = STEPS[name]
    X, y = crowd(20, 5, 12, 0)
    whole = make(RandomNet("test", 600, 12, rank))(UserBatch(X, y))["losses"].values
    for size in (1, 255, 256, 257):
        assert np.array_equal(
            make(RandomNet("test", size, 12, rank))(UserBatch(X, y))["losses"].values, whole[:, :size]
        )


def test_only_the_first_half_counts_where_it_should():
    X, y = crowd(20, 7, 12, 1)
    net = RandomNet("test", 40, 12, 2)
    changed, flipped = X.copy(), y.copy()
    changed[:, count_first_half(7) :], flipped[:, count_first_half(7) :] = 9, -y[:, count_first_half(7) :]
    for step, same in ((MarginLosses(net, 0.2, 1.0, True), True), (MarginLosses(net, 0.2, 1.0, False), False)):
        losses = [step(UserBatch(*rows))["losses"].values for rows in ((X, y), (changed, flipped))]
        assert np.array_equal(*losses) == same


@pytest.mark.parametrize("loss", LOSSES)
def test_gains_of_lipschitz_losses_lie_in_their_range_and_are_nearly_the_best(loss):
    rng = np.random.default_rng(5)
    F = shorten_rows(rng.standard_normal((60, 6, 2, 1)), 0.8)
    assert np.linalg.norm(F, axis=2).max() <= 0.8 + 1e-12
    y = np.where(rng.random((60, 6, 1)) < 0.5, 1.0, -1.0)
    fit = fit_lipschitz(F, y, loss, 1.5)
    assert np.linalg.norm(fit.heads, axis=1).max() <= 1.5 + 1e-12
    assert (fit.gain >= 0).all()
    assert (fit.gain <= 0.8 * 1.5).all()
    rings = np.concatenate([1.5 * r * DIRECTIONS[:, ::100] for r in np.linspace(0, 1, 31)], axis=1)
    z = np.tensordot(rings, F[..., 0], axes=(0, 2))
    each = {
        "logistic": lambda z: np.log1p(np.exp(-y[..., 0] * z)),
        "hinge": lambda z: np.maximum(1 - y[..., 0] * z, 0),
        "absolute": lambda z: np.abs(z - y[..., 0]),
    }[loss]
    best = (each(np.zeros(1)) - each(z)).mean(axis=2).max(axis=0)
    assert (fit.gain[:, 0] >= best - 0.03).all()


def test_a_lipschitz_loss_says_what_the_fit_gains():
    X, y = crowd(30, 4, 6, 2)
    net = Fixed(np.linalg.qr(np.random.default_rng(0).standard_normal((3, 6, 2)))[0])
    values = LipschitzLosses(net, "hinge", 0.8, 1.5, False)(UserBatch(X, y))["losses"].values
    for c in range(3):
        F = shorten_rows((X @ net.matrices[c].astype(np.float32))[..., None], 0.8)
        gain = fit_lipschitz(F, y[:, :, None], "hinge", 1.5, 6).gain
        assert values[:, c] == pytest.approx(1 - gain[:, 0] / 1.2, abs=1e-5)
    assert values[0].tolist() == [1.0, 1.0, 1.0]  # the rows of user 0 are zero: nothing is gained


def test_projected_rows_are_a_users_own_and_lie_in_the_ball():
    X, _ = crowd(40, 5, 200, 3)
    X = X * np.linspace(0.5, 3, 40, dtype=np.float32)[:, None, None]
    M = make_sign_matrix(16, 200)
    assert np.allclose(np.abs(M), 0.25)
    assert abs(M.mean()) < 5 * 0.25 / math.sqrt(M.size)
    projection = Projection(M, 1.0)
    image = projection(X)
    lengths = np.linalg.norm(X, axis=2, keepdims=True)
    assert image == pytest.approx((X / np.maximum(lengths, 1)) @ M.T, abs=1e-5)
    for users in ([7], [39, 2], range(10, 30)):
        assert np.array_equal(projection(np.ascontiguousarray(X[list(users)])), image[list(users)])
    rows = SparseRows(sparse.csr_array(X.reshape(-1, 200)), 5)
    assert projection(rows) == pytest.approx(image, abs=1e-5)


def ragged(seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 6, 300)
    X = rng.standard_normal((sizes.sum(), 50)).astype(np.float32)
    y = np.where(rng.random(len(X)) < 0.5, 1.0, -1.0).astype(np.float32)
    X[7, 3] = np.nan
    return UserTable.from_rows(X, y, np.repeat(np.arange(300), sizes))


def test_users_projected_once_say_what_users_projected_every_time_say():
    table, projection = ragged(), Projection(make_sign_matrix(8, 50), 6.0)
    step = MarginLosses(RandomNet("test", 100, 8, 2), 0.3, 1.0, True)
    bounds = {"losses": LossBound(100)}
    once = project(InMemoryUsers(table, Performance(2)), projection)
    every = ProjectedUsers(InMemoryUsers(table, Performance(1)), projection)
    assert isinstance(once, InMemoryUsers)
    assert once.facts == Facts(300, 8, 1, False)
    assert every.facts == Facts(300, 8, 1, False)
    sums = [users.sums(step, bounds)["losses"].total for users in (once, every)]
    assert np.array_equal(*sums)


def test_sparse_rows_are_projected_as_they_are_or_made_dense():
    table = ragged()
    hollow = np.where(np.abs(table.X) > 0.7, table.X, 0)
    step = MarginLosses(RandomNet("test", 100, 50, 2), 0.3, 1.0, True)
    totals = []
    for X in (hollow, sparse.csr_array(hollow)):
        plain = project(InMemoryUsers(UserTable(X, table.y, table.offsets, table.ids)), Projection(None, 6.0))
        assert isinstance(plain, ProjectedUsers)
        assert plain.facts.features == 50
        totals.append(plain.sums(step, {"losses": LossBound(100)})["losses"].total)
    assert np.array_equal(*totals)


def test_nets_are_public_and_around_their_centre():
    net = RandomNet("margin-1", 700, 9, 2)
    every = np.concatenate([net.chunk(i) for i in range(3)], axis=2)
    assert np.array_equal(net.chunk(1), RandomNet("margin-1", 500, 9, 2).chunk(1))
    assert not np.array_equal(net.chunk(1), RandomNet("margin-2", 700, 9, 2).chunk(1))
    grams = np.tensordot(every, every, axes=(0, 0))
    assert grams[0, np.arange(768), 0, np.arange(768)] == pytest.approx(1)
    assert grams[0, np.arange(768), 1, np.arange(768)] == pytest.approx(0, abs=1e-12)
    near = RandomNet("margin-2", 300, 9, 2, net.member(5), 0.3)
    assert np.array_equal(near.member(0), net.member(5))
    assert np.array_equal(near.member(299), near.chunk(1)[:, :, 43])
    cosines = np.linalg.svd(np.moveaxis(near.chunk(0), 2, 0).transpose(0, 2, 1) @ net.member(5), compute_uv=False)
    swapped = np.arange(WIDTH) % 4 == 3
    tangents = np.sqrt((1 / cosines**2 - 1).mean(axis=1))
    assert tangents[~swapped][1:] == pytest.approx(math.tan(0.3))
    assert cosines[swapped, 0] == pytest.approx(1)  # one direction of the centre's span is kept
    assert cosines[swapped, 1].mean() < 0.6  # and the other is any


def test_rounds_narrow_and_shares_add_up():
    zooming = Zooming(rounds=10)
    assert zooming.shares().sum() == pytest.approx(1)
    assert (np.diff(zooming.shares()) > 0).all()
    angles = [zooming.angle(t) for t in range(2, 11)]
    assert angles[0] == pytest.approx(zooming.widest)
    assert angles[-1] == pytest.approx(zooming.narrowest)
    assert all(a > b for a, b in itertools.pairwise(angles))
    assert Zooming(rounds=1).shares().tolist() == [1.0]
    for wrong in ({"rounds": 0}, {"candidates": 0}, {"widest": 2.0}, {"narrowest": 0.0}, {"growth": 0.0}):
        with pytest.raises(InputError):
            Zooming(**wrong)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_population_is_what_it_says(rank):
    truth = make_margin_population(np.random.default_rng(0), 200, 30, rank, 8, margin=0.25, inside=0.6)
    table = truth.sample(np.random.default_rng(1))
    assert np.linalg.norm(table.X, axis=1) == pytest.approx(1, abs=1e-5)
    inside = (table.X @ truth.U).reshape(200, 8, rank)
    assert np.linalg.norm(inside, axis=2) == pytest.approx(0.6, abs=1e-5)
    signed = (inside * truth.heads[:, None]).sum(axis=2) * table.y.reshape(200, 8)
    assert signed.min() >= 0.25 - 1e-5
    assert abs(table.y.mean()) < 5 / math.sqrt(1600)
    fresh = np.random.default_rng(2)
    right, wrong = truth.errors(fresh, [(truth.U, truth.heads), (truth.U, -truth.heads)])
    assert (right, wrong) == (0.0, 1.0)
    again = truth.sample(np.random.default_rng(1))
    assert np.array_equal(again.X, table.X)


@pytest.mark.parametrize("wrong", [{"margin": 0.8}, {"margin": 0.0}, {"inside": 1.0}, {"rank": 30}])
def test_populations_that_cannot_be_are_refused(wrong):
    with pytest.raises(InputError):
        make_margin_population(np.random.default_rng(0), 10, 30, **wrong)
