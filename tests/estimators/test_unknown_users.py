"""Users who were not in fit, and how sure predictions are: what estimators with a prior of heads say of both."""

from __future__ import annotations

import copy
import shutil
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from scipy import sparse

from privrep import (
    CentaurLinear,
    DPFedAvg,
    InputError,
    PrivAltMin,
    PrivateFedRep,
    PrivateFedRepClassifier,
    UnknownUsers,
)
from privrep.data.table import UserTable
from privrep.heads.fitting import fit_heads
from privrep.heads.store import write_heads
from privrep.models import model as models

FEATURES = 4
NOISE = 0.5
SLOPES = np.array([1.0, -2.0, 0.5, 0.0])
DIRECTION = np.array([0.0, 0.0, 0.6, 0.8])


def panel(users: int, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Levels, common slopes, and slopes of users' own along one direction; rows of each user stand together."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(users), rows)
    X = rng.normal(size=(users, FEATURES))[groups] + rng.normal(size=(users * rows, FEATURES))
    level, own = 3 + rng.normal(size=users), rng.normal(size=users)
    y = level[groups] + X @ SLOPES + (X @ DIRECTION) * own[groups] + NOISE * rng.normal(size=len(groups))
    return X, y, groups


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return panel(2000, 6, seed=0)


@pytest.fixture(scope="module")
def fitted(data: Any) -> PrivateFedRep:
    X, y, groups = data
    return PrivateFedRep(epsilon=5.0, random_state=1).fit(X, y, groups=groups)


@pytest.fixture
def model(fitted: PrivateFedRep) -> PrivateFedRep:
    """One whose parameters may be changed."""
    return copy.copy(fitted)


def newcomers(model: PrivateFedRep, X: Any) -> np.ndarray:
    prior = model.model_.representation.prior
    assert prior is not None
    return prior.mean.predict_rows(X)[:, 0]


@pytest.mark.parametrize("make", [list, np.array, pd.Series, pl.Series])
def test_rows_of_unknown_users_have_the_prior_mean_and_are_counted(model: PrivateFedRep, data: Any, make: Any) -> None:
    X, _, groups = data
    named = make([-1, *groups[1:8].tolist(), -2, -1])
    with pytest.warns(UnknownUsers, match=r"^3 rows of 2 users without a head: predicted with the prior mean") as said:
        values = model.predict(X[:10], groups=named)
    assert len(said) == 1
    assert said[0].filename == __file__
    np.testing.assert_array_equal(values[[0, 8, 9]], newcomers(model, X[[0, 8, 9]]))
    np.testing.assert_allclose(values[1:8], model.predict(X[1:8], groups=groups[1:8]), rtol=1e-12)
    with pytest.warns(UnknownUsers, match=r"^1 row of 1 user without"):
        model.predict(sparse.csr_array(X[:1]), groups=[-1])


def test_nobody_is_warned_of_users_who_are_known(model: PrivateFedRep, data: Any) -> None:
    X, y, groups = data
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(X, groups=groups, return_std=True)
        model.predict_interval(X, groups=groups)
        assert model.score(X, y, groups=groups) > 0.9


def test_unknown_users_are_refused_if_that_is_asked_for(model: PrivateFedRep, data: Any) -> None:
    X, y, groups = data
    model.set_params(unknown_users="refuse")
    for ask in (model.predict, model.predict_interval):
        with pytest.raises(InputError, match=r"user 99999 \(row 1\) was not in fit, so it has no head"):
            ask(X[:2], [0, 99999])
    model.set_params(unknown_users="ignore")
    with pytest.raises(InputError, match='unknown_users must be "prior" or "refuse"'):
        model.predict(X[:1], groups=[0])
    with pytest.raises(InputError, match='unknown_users must be "prior" or "refuse"'):
        PrivateFedRep(unknown_users="ignore", random_state=0).fit(X, y, groups=groups)  # type: ignore[arg-type]


def test_users_without_names_or_with_names_of_another_kind_are_refused(model: PrivateFedRep, data: Any) -> None:
    X, _, _ = data
    with pytest.raises(InputError, match="needs groups"):
        model.predict(X[:2], return_std=True)
    with pytest.raises(InputError, match="no user in row 1"):
        model.predict(X[:2], groups=[0, None])
    with pytest.raises(InputError, match="are text, those of the model are not text"):
        model.predict(X[:2], groups=["0", "1"])


def test_standard_deviations_are_those_of_heads(model: PrivateFedRep, data: Any) -> None:
    X, y, groups = data
    values, deviations = model.predict(X, groups, return_std=True)
    assert values.shape == deviations.shape == y.shape
    np.testing.assert_array_equal(values, model.predict(X, groups))
    heads, representation = model.model_.heads, model.model_.representation
    assert heads is not None
    assert representation.prior is not None
    np.testing.assert_array_equal(deviations, heads.deviations(representation, X, groups))
    prior = representation.prior
    assert (deviations >= np.sqrt(prior.noise[0])).all()
    with pytest.warns(UnknownUsers, match="1 row"):
        _, new = model.predict(X[:1], [-1], return_std=True)
    np.testing.assert_array_equal(new, np.sqrt(prior.noise * prior.new_ratio))


def test_intervals_of_known_and_unknown_users_cover_what_they_say(model: PrivateFedRep) -> None:
    """Of the targets' own noise the releases know little more than its size, so the bounds are wide."""
    representation = model.model_.representation
    X, y, groups = panel(1500, 12, seed=7)
    seen = np.arange(len(y)) % 12 < 6
    heads = fit_heads(UserTable.from_rows(X[seen], y[seen], groups[seen]).blocks(), representation)
    low, high = heads.interval(representation, X[~seen], groups[~seen], 0.9)
    assert 0.8 < np.mean((low <= y[~seen]) & (y[~seen] <= high)) < 0.98
    with pytest.warns(UnknownUsers):
        low, high = model.predict_interval(X, groups + 10**6, coverage=0.9)
    assert 0.8 < np.mean((low <= y) & (y <= high)) < 0.98
    middle = model.predict(X[:5], groups[:5])
    inner, outer = (model.predict_interval(X[:5], groups[:5], coverage) for coverage in (0.5, 0.95))
    assert (outer[0] < inner[0]).all()
    assert (inner[1] < outer[1]).all()
    np.testing.assert_allclose((inner[0] + inner[1]) / 2, middle, rtol=1e-9)
    with pytest.raises(InputError, match="coverage must lie between 0 and 1"):
        model.predict_interval(X[:1], groups[:1], coverage=90)


@pytest.mark.parametrize("make", [np.asarray, sparse.csr_matrix, pd.DataFrame])
def test_a_head_without_rows_is_the_prior_mean(model: PrivateFedRep, data: Any, make: Any) -> None:
    X, _, _ = data
    head = model.personalize(make(X[:0]), np.zeros(0))
    assert head.kind == "prior"
    values, deviations = head.predict(make(X[:9]), return_std=True)
    np.testing.assert_allclose(values, newcomers(model, X[:9]), rtol=1e-9)
    with pytest.warns(UnknownUsers):
        wanted = model.predict(X[:9], [-1] * 9, return_std=True)
    with pytest.warns(UnknownUsers):
        low, high = model.predict_interval(X[:9], [-1] * 9, coverage=0.8)
    np.testing.assert_array_equal(deviations, wanted[1])
    np.testing.assert_allclose(head.predict_interval(X[:9], 0.8), (low, high), rtol=1e-9)
    with pytest.raises(ValueError, match="3 features"):
        model.personalize(np.zeros((0, 3)), np.zeros(0))
    with pytest.raises(ValueError, match="sample"):
        model.personalize(X[:0], np.zeros(1))


def test_a_head_of_rows_is_as_sure_as_one_from_fit(model: PrivateFedRep, data: Any) -> None:
    X, y, groups = data
    mine = groups == 3
    head = model.personalize(X[mine], y[mine])
    assert head.kind == "posterior"
    values, deviations = head.predict(X[:9], return_std=True)
    wanted = model.predict(X[:9], [3] * 9, return_std=True)
    np.testing.assert_allclose(values, wanted[0], rtol=1e-9)
    np.testing.assert_allclose(deviations, wanted[1], rtol=1e-9)
    np.testing.assert_allclose(head.predict_interval(X[:9]), model.predict_interval(X[:9], [3] * 9), rtol=1e-9)


def test_each_row_of_a_newcomer_helps_on_average(model: PrivateFedRep) -> None:
    X, y, _ = panel(500, 16, seed=9)
    rows, targets = X.reshape(500, 16, FEATURES), y.reshape(500, 16)
    errors = []
    for count in range(7):
        heads = [model.personalize(X_i[:count], y_i[:count]) for X_i, y_i in zip(rows, targets, strict=True)]
        found = np.stack([head.predict(X_i[8:]) for head, X_i in zip(heads, rows, strict=True)])
        errors.append(np.mean((found - targets[:, 8:]) ** 2))
    assert all(later < earlier for earlier, later in pairwise(errors))
    assert errors[0] < np.var(y) / 2
    assert errors[-1] < 2.5 * NOISE**2


def test_several_targets(data: Any) -> None:
    X, y, groups = data
    targets = np.column_stack([y, -10 * y])
    model = PrivateFedRep(epsilon=20.0, random_state=0).fit(X, targets, groups=groups)
    with pytest.warns(UnknownUsers, match="2 rows of 1 user"):
        values, deviations = model.predict(X[:4], [0, 0, -1, -1], return_std=True)
    with pytest.warns(UnknownUsers):
        low, high = model.predict_interval(X[:4], [0, 0, -1, -1])
    assert values.shape == deviations.shape == low.shape == high.shape == (4, 2)
    assert (low < values).all()
    assert (values < high).all()
    head = model.personalize(X[:0], np.zeros((0, 2)))
    assert head.kind == ("prior", "prior")
    np.testing.assert_allclose(head.predict(X[2:4]), values[2:], rtol=1e-9)
    np.testing.assert_array_equal(head.predict(X[2:4], return_std=True)[1], deviations[2:])
    with pytest.raises(InputError, match="the model has 2 targets"):
        model.personalize(X[:3], y[:3])


def test_a_saved_model_knows_as_much(model: PrivateFedRep, data: Any, tmp_path: Path) -> None:
    X, _, groups = data
    model.save(tmp_path / "model")
    loaded = PrivateFedRep.load(tmp_path / "model")
    for one, other in zip(model.predict(X, groups, True), loaded.predict(X, groups, True), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.warns(UnknownUsers):
        loaded.predict(X[:1], [-1])
    shutil.rmtree(tmp_path / "model" / "private")
    public = PrivateFedRep.load(tmp_path / "model")
    np.testing.assert_allclose(public.personalize(X[:0], []).predict(X[:3]), newcomers(model, X[:3]), rtol=1e-9)
    with pytest.warns(UnknownUsers, match="without its users' heads .*predicted with the prior mean"):
        np.testing.assert_allclose(public.predict(X[:3], groups[:3]), newcomers(model, X[:3]), rtol=1e-9)
    public.unknown_users = "refuse"
    with pytest.raises(InputError, match="only personalize works"):
        public.predict(X[:1], [-1])


@pytest.mark.parametrize("damage", ["width", "doubt", "finite", "kind"])
def test_damaged_heads_are_one_sentence(model: PrivateFedRep, damage: str, tmp_path: Path) -> None:
    model.save(tmp_path / "model")
    heads = model.model_.heads
    assert heads is not None
    assert heads.origin is not None
    assert heads.doubt is not None
    change: dict[str, Any] = {
        "width": {"shared": np.column_stack([heads.shared, heads.intercept])},
        "doubt": {"doubt": np.column_stack([heads.doubt, heads.doubt])},
        "finite": {"doubt": np.full_like(heads.doubt, np.nan)},
        "kind": {"kind": np.full_like(heads.kind, 9)},
    }[damage]
    write_heads(replace(heads, **change), tmp_path / "model")
    with pytest.raises(InputError, match=r"is damaged \(private/heads.parquet"):
        models.load(tmp_path / "model")


@pytest.mark.parametrize("kind", [PrivateFedRep.paper, PrivAltMin.paper, CentaurLinear.paper, DPFedAvg])
def test_models_without_a_prior_refuse(kind: Any) -> None:
    X, y, groups = panel(300, 6, seed=3)
    model = kind(1, epsilon=100.0, random_state=0).fit(X, y, groups=groups)
    with pytest.raises(InputError, match=r"user -1 \(row 0\) was not in fit"):
        model.predict(X[:1], groups=[-1])
    reason = "heads of DPFedAvg have no prior" if kind is DPFedAvg else "configuration of a paper has no prior of heads"
    wanted = f"says nothing of its uncertainty: .*{reason}, of which intervals are made"
    for ask in (lambda: model.predict(X[:1], [0], return_std=True), lambda: model.predict_interval(X[:1], [0])):
        with pytest.raises(InputError, match=wanted):
            ask()
    head = model.personalize(X[:4], y[:4])
    with pytest.raises(InputError, match=wanted):
        head.predict(X[:1], return_std=True)
    with pytest.raises(ValueError, match="0 sample"):
        model.personalize(X[:0], y[:0])


def test_classifiers_do_the_same() -> None:
    X, y, groups = panel(300, 6, seed=3)
    model = PrivateFedRepClassifier(1, epsilon=50.0, random_state=0).fit(X, (y > 3).astype(int), groups=groups)
    with pytest.warns(UnknownUsers, match="1 row of 1 user without a head: predicted with the prior mean"):
        strange = model.predict_proba(X[:1], groups=[-1])
    assert np.allclose(strange, model.personalize(X[:0], y[:0]).predict_proba(X[:1]))
    model.set_params(unknown_users="refuse")
    with pytest.raises(InputError, match=r"user -1 \(row 0\) was not in fit"):
        model.predict(X[:1], groups=[-1])


def test_intervals_are_infinite_where_nobody_could_be_heard(tmp_path: Path) -> None:
    """Thirty users at epsilon 0.05: how large errors are is lost in noise, and no interval beats a wrong one."""
    rng = np.random.default_rng(0)
    X, groups = rng.normal(size=(120, 2)), np.repeat(np.arange(30), 4)
    y = 1e4 * rng.normal(size=120)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PrivateFedRep(epsilon=0.05, random_state=0).fit(X, y, groups=groups)
    for groups_asked in (groups, groups + 1000):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            predicted, deviation = model.predict(X, groups=groups_asked, return_std=True)
            low, high = model.predict_interval(X, groups=groups_asked, coverage=0.9)
        assert np.isfinite(predicted).all()
        assert np.isinf(deviation).all()
        assert np.isinf(high - low).all()
    model.save(tmp_path / "model")
    again = PrivateFedRep.load(tmp_path / "model")
    assert np.isinf(again.predict(X, groups=groups, return_std=True)[1]).all()
