"""Data as it comes: heavy tails, outliers, wild units, users of one row and of ten thousand. Each works, with an error
within a stated factor of that of clean data, or is refused in one sentence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from scipy import sparse

from privrep import InputError, PrivateFedRep
from privrep.data.synthetic import make_population

USERS, D, K, ROWS, NOISE = 2500, 20, 2, 10, 0.1


@dataclass
class Data:
    """Rows to learn from, and fresh ones of the same users with targets without noise."""

    X: np.ndarray
    y: np.ndarray
    groups: np.ndarray
    fresh: np.ndarray
    truth: np.ndarray
    owners: np.ndarray


def clean(seed=0, rows=ROWS, rank=K, kind="gaussian", users=USERS):
    rng = np.random.default_rng(seed)
    population = make_population(rng, users, D, rank, rows, NOISE, feature_kind=kind, intercept=1.0)
    learned, fresh = population.sample(rng), population.sample(rng)
    owners = np.repeat(np.arange(users), population.sizes)
    truth = np.einsum("rd,rd->r", fresh.X, population.weights[owners]) + population.intercepts[owners]
    return Data(learned.X, learned.y, owners, fresh.X, truth, owners)


def fit(X, y, groups, **parameters):
    return PrivateFedRep(**{"rank": K, "epsilon": 20.0, "random_state": 0, **parameters}).fit(X, y, groups=groups)


def error(model, data, fresh=None, truth=None, median=False):
    """Mean (or median) squared error on fresh rows, noise not counted."""
    X, wanted = data.fresh if fresh is None else fresh, data.truth if truth is None else truth
    squares = (model.predict(X, groups=data.owners) - wanted) ** 2
    assert np.isfinite(squares).all()
    return float(np.median(squares) if median else np.mean(squares))


@pytest.fixture(scope="module")
def data():
    return clean()


@pytest.fixture(scope="module")
def plain(data):
    return fit(data.X, data.y, data.groups)


@pytest.fixture(scope="module")
def usual(data, plain):
    found = error(plain, data)
    assert found < 0.01  # of a target with variance one; ten rows with noise 0.01 for three unknowns
    return found


def test_heavy_tails(usual):
    student = clean(kind="student")
    assert error(fit(student.X, student.y, student.groups), student) < 2 * usual


def test_noise_with_heavy_tails(data, usual):
    noise = np.random.default_rng(1).standard_t(2.1, len(data.y)) * NOISE
    assert error(fit(data.X, data.y + noise, data.groups), data, median=True) < 4 * usual


def test_outliers_among_users(data, usual):
    """One user in a hundred is off by a factor of a million: their own matter, the others must not notice."""
    wild = np.isin(data.groups, np.arange(0, USERS, 100))
    model = fit(data.X, np.where(wild, data.y * 1e6, data.y), data.groups)
    others = np.flatnonzero(data.owners % 100 != 0)
    left = model.predict(data.fresh[others], groups=data.owners[others]) - data.truth[others]
    assert np.mean(left**2) < 1.2 * usual
    their = np.flatnonzero(data.owners % 100 == 0)
    off = model.predict(data.fresh[their], groups=data.owners[their]) / 1e6 - data.truth[their]
    assert np.mean(off**2) < 3 * usual


def test_outliers_among_rows(data, plain, usual):
    """One row in a thousand has features of a million: it spoils its user, not the representation."""
    wild = np.where(np.arange(len(data.X)) % 1000 == 0, 1e6, 1.0)
    model = fit(data.X * wild[:, None], data.y, data.groups)
    hit = np.isin(data.owners, data.groups[wild > 1])
    left = model.predict(data.fresh[~hit], groups=data.owners[~hit]) - data.truth[~hit]
    assert np.mean(left**2) < 1.2 * usual


def test_features_on_wild_scales(data, usual):
    scale = 10.0 ** np.linspace(-6, 6, D)
    model = fit(data.X * scale, data.y, data.groups)
    assert error(model, data, fresh=data.fresh * scale) < 1.1 * usual


@pytest.mark.parametrize("unit", [1e-9, 1e9])
def test_targets_in_wild_units(data, usual, unit):
    model = fit(data.X, data.y * unit + 5 * unit, data.groups)
    assert error(model, data, truth=data.truth * unit + 5 * unit) / unit**2 < 1.1 * usual


def test_features_far_from_zero(data, usual):
    model = fit(data.X + 1e6, data.y, data.groups)
    assert error(model, data, fresh=data.fresh + 1e6) < 1.1 * usual


def test_users_of_one_row_and_of_ten_thousand(data, usual):
    rng = np.random.default_rng(2)
    kept = np.where(data.groups < 500, np.arange(len(data.groups)) % ROWS == 0, True)  # 500 users keep one row
    many = rng.normal(size=(10_000, D))
    weights = rng.normal(size=D)
    X = np.concatenate([data.X[kept], many])
    y = np.concatenate([data.y[kept], many @ weights])
    model = fit(X, y, np.concatenate([data.groups[kept], np.full(10_000, USERS)]))
    whole = data.owners >= 500
    left = model.predict(data.fresh[whole], groups=data.owners[whole]) - data.truth[whole]
    assert np.mean(left**2) < 1.2 * usual
    assert np.mean((model.predict(many[:50], groups=np.full(50, USERS)) - many[:50] @ weights) ** 2) < 1e-3
    single = data.owners < 500
    left = model.predict(data.fresh[single], groups=data.owners[single]) - data.truth[single]
    assert np.mean(left**2) < 4.0  # the mean of one row: no worse than about twice the variance of the targets


def test_columns_that_say_nothing(data, usual):
    """Constant, duplicated and all-zero columns, and one that is constant within each user."""

    def widened(X, owners):
        return np.column_stack([X, np.full(len(X), 7.0), X[:, 0], np.zeros(len(X)), owners % 90])

    model = fit(widened(data.X, data.groups), data.y, data.groups)
    assert error(model, data, fresh=widened(data.fresh, data.owners)) < 1.2 * usual
    assert np.isfinite(model.representation_).all()


def test_an_all_zero_table_and_constant_targets(data):
    with pytest.warns(match="do better than what users can do alone"):
        model = fit(np.zeros_like(data.X), data.y, data.groups)
    assert np.isfinite(model.predict(data.fresh, groups=data.owners)).all()
    with pytest.warns(match="do better than what users can do alone"):
        model = fit(data.X, np.full_like(data.y, 3.0), data.groups)
    assert model.predict(data.fresh, groups=data.owners) == pytest.approx(np.full(len(data.owners), 3.0))


def test_users_with_constant_targets(data, usual):
    constant = data.groups < 800
    model = fit(data.X, np.where(constant, 0.1, data.y), data.groups)
    mine = data.owners < 800
    assert np.mean((model.predict(data.fresh[mine], groups=data.owners[mine]) - 0.1) ** 2) < 0.01 * usual
    left = model.predict(data.fresh[~mine], groups=data.owners[~mine]) - data.truth[~mine]
    assert np.mean(left**2) < 1.2 * usual


def test_more_directions_than_any_user_has_rows():
    few = clean(rows=4, rank=6)
    model = fit(few.X, few.y, few.groups, rank=6)
    assert error(model, few) < 1.5  # of a target with variance one: users' means are about as good, and it stays near
    assert model.representation_.shape == (D, 6)


def test_sparse_is_as_good_as_dense():
    rng = np.random.default_rng(3)
    made = clean()
    thin, fresh = (np.where(rng.random(X.shape) < 0.3, X, 0.0) for X in (made.X, made.fresh))
    weights = np.random.default_rng(4).normal(size=(USERS, K)) @ np.linalg.qr(rng.normal(size=(D, K)))[0].T
    y = np.einsum("rd,rd->r", thin, weights[made.groups]) + NOISE * rng.normal(size=len(thin))
    truth = np.einsum("rd,rd->r", fresh, weights[made.owners])
    errors = []
    for form in (np.asarray, sparse.csr_array, sparse.csc_matrix):
        model = fit(form(thin), y, made.groups, safety_net=False)
        errors.append(np.mean((model.predict(form(fresh), groups=made.owners) - truth) ** 2))
    assert errors[1] == pytest.approx(errors[2], rel=1e-9)
    assert errors[1] < 1.5 * errors[0]
    assert errors[1] < 0.2 * np.var(truth)


def test_several_targets_on_wild_scales(data, usual):
    rng = np.random.default_rng(5)
    scale = np.array([1e6, 1.0, 1e-6])
    y = np.column_stack([data.y, -data.y + NOISE * rng.normal(size=len(data.y)), data.y]) * scale
    model = fit(data.X, y, data.groups)
    left = model.predict(data.fresh, groups=data.owners) / scale - np.column_stack(
        [data.truth, -data.truth, data.truth]
    )
    assert (np.mean(left**2, axis=0) < [1.2 * usual, 2.5 * usual, 1.2 * usual]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.int64, bool])
def test_other_kinds_of_numbers(data, usual, dtype):
    X = (np.round(data.X * 3) if dtype is np.int64 else data.X > 0 if dtype is bool else data.X).astype(dtype)
    assert np.isfinite(fit(X, data.y, data.groups).predict(X, groups=data.groups)).all()


@pytest.mark.parametrize("size", [1e155, 1e300])
def test_a_user_whose_numbers_overflow_is_alone_with_it(data, usual, size):
    X, y = data.X.copy(), data.y.copy()
    X[:ROWS] *= size
    y[:ROWS] *= size
    model = fit(X, y, data.groups)
    others = data.owners > 0
    left = model.predict(data.fresh[others], groups=data.owners[others]) - data.truth[others]
    assert np.mean(left**2) < 1.1 * usual


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda X, y, g: (np.where(X > 3, np.inf, X), y, g), "infinity"),
        (lambda X, y, g: (X, np.where(y > 3, np.inf, y), g), "infinity"),
        (lambda X, y, g: (X, np.full_like(y, np.nan), g), "no row is left"),
        (lambda X, y, g: (X, y, g[:-1]), "one user per observation"),
        (lambda X, y, g: (X[:0], y[:0], g[:0]), "0 sample"),
        (lambda X, y, g: (X[:, :0], y, g), "0 feature"),
        (lambda X, y, g: (X[:, 0], y, g), "2D"),
    ],
)
def test_what_cannot_be_is_refused(data, change, sentence):
    with pytest.raises((InputError, ValueError), match=sentence):
        fit(*change(data.X, data.y, data.groups))


def test_one_user_and_one_feature(data):
    one = data.groups == 0
    with pytest.warns(match="do better than what users can do alone"):
        model = fit(data.X[one], data.y[one], data.groups[one], rank=2)
    assert np.isfinite(model.predict(data.X[one], groups=data.groups[one])).all()
    narrow = fit(data.X[:, :1], data.y, data.groups, rank=1)
    assert np.isfinite(narrow.predict(data.X[:, :1], groups=data.groups)).all()


def test_more_sparse_features_than_can_be_paired():
    rng = np.random.default_rng(6)
    users, d, rows = 3000, 1100, 12
    columns = rng.integers(0, d, users * rows * 4)
    place = np.repeat(np.arange(users * rows), 4)
    X = sparse.csr_array((rng.normal(size=len(place)), (place, columns)), shape=(users * rows, d))
    U = np.linalg.qr(rng.normal(size=(d, 1)))[0] * np.sqrt(d)
    groups = np.repeat(np.arange(users), rows)
    y = (X @ U)[:, 0] * rng.normal(size=users)[groups] + NOISE * rng.normal(size=len(groups))
    model = fit(X, y, groups, rank=1, epsilon=100.0)
    pages = {name.split("/")[0] for name, _ in model.privacy_.events}
    assert {"scales", "frequencies", "power-1"} <= pages
    assert not {"covariance", "moments"} & pages
    found = model.representation_[:, 0]
    assert abs(found @ U[:, 0]) / np.linalg.norm(found) / np.linalg.norm(U) > 0.9
