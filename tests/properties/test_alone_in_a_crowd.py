"""A user's contribution is a function of its own rows, to the last bit, whoever stands beside it.

Batched arithmetic that rounds a user's numbers differently in another company would break the stated sensitivity where
a step is not continuous (cells of histograms, directions of tiny vectors): then one user's change moves all the others.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from asking import taste_questions
from experiments.fedavg import LocalUpdate
from scipy import sparse

from privrep.data.sparse import SparseRows
from privrep.heads.classification import fit_class_own, fit_class_shared
from privrep.heads.regression import Preference, fit_own_candidate, fit_shared_candidate
from privrep.linear.methods.fedavg import ModelUpdate
from privrep.linear.methods.private_fedrep import BatchGradient, FirstHalfPairs
from privrep.linear.steps import (
    FeatureSizes,
    Frequencies,
    LeaveOneOutGradient,
    PairMoments,
    PowerStep,
    ResidualMoments,
    SecondMoments,
)
from privrep.local.losses import Loss
from privrep.local.transform import FeatureTransform
from privrep.privacy.columns import SparseColumns
from privrep.privacy.contributions import Concatenated, Counts, NonNegative, Summed, Vectors
from privrep.privacy.moments import CrossMoments, RowMoments
from privrep.privacy.protocol import UserBatch
from privrep.privacy.sparse_moments import SparseMoments

D, K, USERS = 17, 3, 31
U = np.linalg.qr(np.random.default_rng(0).normal(size=(D, K)))[0]
WIDE = np.linalg.qr(np.random.default_rng(3).normal(size=(D, 9)))[0]
SCALE = 2.0 ** np.random.default_rng(1).integers(-3, 4, D)
MIXING = np.random.default_rng(2).normal(size=(D, D)) / 4
SCALED = FeatureTransform(SCALE)
WHITENED = FeatureTransform(SCALE, np.eye(D) + MIXING @ MIXING.T, np.array([0.5, 2.0, 1e3]))


def framed(transform, intercept):
    return {
        "second moments": SecondMoments(transform, intercept),
        "moments": PairMoments(transform, intercept),
        "normalised moments": PairMoments(transform, intercept, normalised=True),
        "residuals": ResidualMoments(U, transform, 0.01, intercept),
        "gradient": LeaveOneOutGradient(U, transform, 0.3, 0.01, intercept),
        "wide gradient": LeaveOneOutGradient(WIDE, transform, 0.3, 1e-3, intercept),
        "power": PowerStep(U, transform, intercept),
        "power, own rows": PowerStep(WIDE, transform, intercept, own_rows=True),
        "sizes": FeatureSizes(intercept),
    }


DENSE = {
    f"{name}, {words}{'' if intercept else ', no intercept'}": step
    for words, transform in (("scaled", SCALED), ("whitened", WHITENED))
    for intercept in (True, False)
    for name, step in framed(transform, intercept).items()
} | {
    "paper's moments": FirstHalfPairs(),
    "paper's gradient": BatchGradient(U, "paper-round-1"),
    "federated averaging": LocalUpdate(np.append(U[:, 0], 0.5), 1.0, True),
    "fedavg": ModelUpdate(U[:, 0], WHITENED, 0.1, True),
    "fedavg, no intercept": ModelUpdate(U[:, 0], SCALED, 0.1, False),
    "preference": Preference(WHITENED.to_original(U), WHITENED, True),
    "preference, no intercept": Preference(SCALED.to_original(U), SCALED, False),
}
SPARSE = (
    {
        f"{name}{'' if intercept else ', no intercept'}": step
        for intercept in (True, False)
        for name, step in framed(SCALED, intercept).items()
        if step.spec.accepts_sparse
    }
    | {
        "frequencies": Frequencies(SCALE, 0.7),
    }
    | {name: step for name, (step, _) in taste_questions(D, K).items()}
)
SHAPES = [(1, np.float64), (2, np.float32), (3, np.float64), (10, np.float32), (10, np.float64), (33, np.float32)]
ONE_TARGET = {
    "paper's moments",
    "paper's gradient",
    "federated averaging",
    "fedavg",
    "fedavg, no intercept",
    "preference",
    "preference, no intercept",
}


def crowd(rows, dtype, targets, rng):
    """Ordinary users, users with constant targets (all their residuals are rounding errors), and exact fits."""
    X = rng.normal(size=(USERS, rows, D)) * SCALE + rng.normal(size=(USERS, 1, D))
    y = rng.normal(size=(USERS, rows, targets)) * 10.0 ** rng.integers(-3, 4, (USERS, 1, 1))
    y[::3] = 0.1
    y[1::3] = np.einsum("umd,d->um", X[1::3], U[:, 0])[:, :, None] * np.arange(1, targets + 1)
    return X.astype(dtype), (y[:, :, 0] if targets == 1 else y).astype(dtype)


def sparse_crowd(kind, rows, dtype, rng):
    """(matrix, y). Rows of a few entries, some of none; or of a single one, whose columns a user may repeat."""
    if kind == "one-hot":
        column = rng.integers(0, D, USERS * rows)
        column[::5] = column[0]
        stored = rng.random(USERS * rows) < 0.9  # an item that is not listed is a row without entries
        shape = (USERS * rows, D)
        matrix = sparse.csr_array((np.ones(stored.sum()), (np.flatnonzero(stored), column[stored])), shape=shape)
        y = rng.integers(1, 6, (USERS, rows)).astype(float)
    else:
        values = rng.normal(size=(USERS * rows, D)) * SCALE
        matrix = sparse.csr_array(np.where(rng.random(values.shape) < 0.2, values, 0.0))
        y = rng.normal(size=(USERS, rows))
    y[::3] = 0.1
    return sparse.csr_array(matrix.astype(dtype)), y.astype(dtype)


pytestmark = pytest.mark.usefixtures("as_the_engines_call_steps")


def numbers(contributions, users):
    """All that says what each user sends, its norm included: at the edge of overflow that decides all or nothing."""
    match contributions:
        case Vectors(values) | NonNegative(values):
            parts = [list(values)]
        case Counts(cells, _):
            parts = [[np.sort(mine[mine >= 0]) for mine in cells]]
        case CrossMoments(rows, scale):
            parts = [rows.reshape(users, -1), np.ascontiguousarray(rows, np.float64).sum(axis=1), scale[:, None]]
        case RowMoments(rows, scale):
            parts = [rows.reshape(users, -1), scale[:, None]]
        case SparseColumns(user, column, values, tail, _):
            mine = [user == u for u in range(users)]
            parts = [[column[m] for m in mine], [values[m].ravel() for m in mine], tail]
        case SparseMoments(user, column, values):
            mine = [user == u for u in range(users)]
            parts = [[column[m] for m in mine], [values[m] for m in mine]]
        case Concatenated(several) | Summed(several):
            parts = [numbers(part, users) for part in several]
        case _:
            raise AssertionError(contributions)
    return [
        np.concatenate(each).astype(np.float64) for each in zip(*parts, contributions.norms()[:, None], strict=True)
    ]


def assert_alone_as_in_company(step, take):
    """`take(users)` gives X and y of these users, in this order."""
    rng = np.random.default_rng(4)
    everyone = np.arange(USERS)
    expected = {key: numbers(sent, USERS) for key, sent in step(UserBatch(*take(everyone))).items()}
    few = rng.permutation(USERS)[:20]
    companies = [[user] for user in everyone] + [[user, (user + 1) % USERS] for user in everyone[::4]]
    companies += [few, few[::-1]]
    for company in companies:
        for key, sent in step(UserBatch(*take(np.array(company)))).items():
            for user, found in zip(company, numbers(sent, len(company)), strict=True):
                assert np.array_equal(found, expected[key][user], equal_nan=True), (key, user, company)


def chosen(X, y, users):
    return np.ascontiguousarray(X[users]), np.ascontiguousarray(y[users])


def chosen_sparse(matrix, y, rows, users):
    picked = (users[:, None] * rows + np.arange(rows)).ravel()
    return SparseRows(matrix[picked], rows), np.ascontiguousarray(y[users])


@pytest.mark.parametrize(("rows", "dtype"), SHAPES)
@pytest.mark.parametrize("name", DENSE)
def test_contributions_do_not_depend_on_the_others(name, rows, dtype):
    X, y = crowd(rows, dtype, 1, np.random.default_rng([rows, len(name)]))
    assert_alone_as_in_company(DENSE[name], functools.partial(chosen, X, y))


@pytest.mark.parametrize(("rows", "dtype"), [(1, np.float64), (3, np.float32), (10, np.float64)])
@pytest.mark.parametrize("name", [name for name in DENSE if name not in ONE_TARGET])
def test_nor_do_those_for_several_targets(name, rows, dtype):
    X, y = crowd(rows, dtype, 3, np.random.default_rng([rows, len(name)]))
    assert_alone_as_in_company(DENSE[name], functools.partial(chosen, X, y))


@pytest.mark.parametrize("name", [name for name in DENSE if name not in ONE_TARGET and "scaled" in name])
def test_nor_do_those_for_many_targets(name):
    """NumPy adds nine numbers of a single user in another order than those of several users side by side."""
    X, y = crowd(5, np.float64, 9, np.random.default_rng(len(name)))
    assert_alone_as_in_company(DENSE[name], functools.partial(chosen, X, y))


@pytest.mark.parametrize(("rows", "dtype"), SHAPES)
@pytest.mark.parametrize("kind", ["few entries", "one-hot"])
@pytest.mark.parametrize("name", SPARSE)
def test_nor_do_those_of_sparse_rows(name, kind, rows, dtype):
    matrix, y = sparse_crowd(kind, rows, dtype, np.random.default_rng([rows, len(name)]))
    assert_alone_as_in_company(SPARSE[name], functools.partial(chosen_sparse, matrix, y, rows))


@pytest.mark.parametrize("name", [name for name in SPARSE if name not in taste_questions(D, K)])
def test_nor_do_those_of_sparse_rows_with_several_targets(name):
    matrix, _ = sparse_crowd("few entries", 6, np.float64, np.random.default_rng(5))
    y = crowd(6, np.float64, 3, np.random.default_rng(6))[1]
    assert_alone_as_in_company(SPARSE[name], functools.partial(chosen_sparse, matrix, y, 6))


def test_a_step_that_looks_at_the_others_is_noticed():
    def careless(batch):
        return {"values": Vectors((batch.X.reshape(len(batch), -1) * (1 + 1e-16 + 1e-15 * len(batch)))[:, :3])}

    X, y = crowd(2, np.float64, 1, np.random.default_rng(0))
    with pytest.raises(AssertionError):
        assert_alone_as_in_company(careless, functools.partial(chosen, X, y))


CANDIDATES = {
    "own": lambda X, y: fit_own_candidate(X, y, SCALE, True),
    "own, no intercept": lambda X, y: fit_own_candidate(X, y, SCALE, False),
    "shared": lambda X, y: fit_shared_candidate(X, y, WIDE, True),
    **{
        f"{kind}, {loss.name}, {loss.classes} classes": functools.partial(candidate, loss)
        for loss in (Loss("log", 2), Loss("log", 4), Loss("hinge", 2))
        for kind, candidate in (
            ("own", lambda loss, X, y: fit_class_own(X, loss.signs(labels(y, loss)), loss, SCALE, True)),
            ("shared", lambda loss, X, y: fit_class_shared(X, loss.signs(labels(y, loss)), loss, WIDE, True, 0.5)),
        )
    },
}


def labels(y, loss):
    return np.mod(np.floor(np.abs(y) * 3), loss.classes)


@pytest.mark.parametrize("rows", [5, 12, 20, 68, 80])
@pytest.mark.parametrize("name", CANDIDATES)
def test_nor_do_the_losses_that_votes_compare(name, rows):
    """A vote shows a cell; behind it are losses, whose last bit may decide where two are as good."""
    X, y = crowd(rows, np.float64, 1, np.random.default_rng([rows, len(name)]))

    def step(batch):
        return {"losses": Vectors(CANDIDATES[name](batch.X, batch.y).loss[:, None])}

    assert_alone_as_in_company(step, functools.partial(chosen, X, y))
