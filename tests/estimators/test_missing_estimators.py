"""Estimators on rows with missing values and weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.utils import get_tags

from privrep import (
    InputError,
    MissingValues,
    PrivAltMin,
    PrivateFedRep,
    PrivateFedRepClassifier,
    PrivateMarginSelector,
)

USERS, ROWS, D = 300, 6, 4
OPTIONS: dict[str, Any] = {"epsilon": 20.0, "delta": 1e-6, "random_state": 1}
Data = tuple[np.ndarray, np.ndarray, np.ndarray]


def made(share: float = 0.15, seed: int = 0) -> Data:
    """Users whose columns lie far from zero, with gaps: a mean of 0 would be far off."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(USERS), ROWS)
    means = np.array([50.0, -3.0, 20.0, 5.0]) + rng.normal(size=(USERS, D)) * [5.0, 1.0, 2.0, 1.0]
    X = means[groups] + rng.normal(size=(len(groups), D))
    y = 2 + X @ [0.5, 1.0, -0.3, 0.0] + 0.5 * rng.normal(size=USERS)[groups] + 0.2 * rng.normal(size=len(groups))
    X[rng.random(X.shape) < share] = np.nan
    X[groups < 20, 1] = np.nan  # users without a value in a column
    return X, y, groups


@pytest.fixture(scope="module")
def data() -> Data:
    return made()


@pytest.fixture(scope="module")
def fitted(data: Data) -> PrivateFedRep:
    with pytest.warns(MissingValues, match=r"missing values filled, inside each user: column 1 \(\d+\)"):
        return PrivateFedRep(**OPTIONS).fit(*data)


def bits(model: Any, *rows: Any) -> bytes:
    return bytes(model.predict(*rows).tobytes())


def quietly(model: Any, *rows: Any, **more: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MissingValues)
        return model.fit(*rows, **more)


def own_filled(X: np.ndarray, groups: np.ndarray, location: np.ndarray) -> np.ndarray:
    frame = pd.DataFrame(X)
    return frame.fillna(frame.groupby(groups).transform("mean")).fillna(pd.Series(location)).to_numpy()


def test_missing_values_are_own_means_else_the_location(data: Data, fitted: PrivateFedRep) -> None:
    X, y, groups = data
    prior = fitted.model_.representation.prior
    assert prior is not None
    assert prior.mean.located.all()
    np.testing.assert_allclose(prior.mean.centre, [50, -3, 20, 5], rtol=0.25)
    filled = own_filled(X, groups, prior.mean.centre)
    assert fitted.model_.heads is not None
    np.testing.assert_array_equal(np.isnan(fitted.model_.heads.means[:20, 1]), True)
    np.testing.assert_allclose(fitted.predict(X, groups), fitted.predict(filled, groups), rtol=1e-9)
    some = X[:3].copy()
    some[0] = np.nan  # a row of which nothing is known
    means = own_filled(np.vstack([X[:ROWS], np.full(D, np.nan)]), np.zeros(ROWS + 1), prior.mean.centre)[-1]
    np.testing.assert_allclose(fitted.predict(some, groups[:3])[0], fitted.predict(means[None], [0])[0], rtol=1e-9)
    error = fitted.predict(X, groups) - y
    assert np.sqrt(np.mean(error**2)) < 0.8


def test_gaps_do_not_decide_what_is_released(data: Data, fitted: PrivateFedRep) -> None:
    """The pages that come before any answer is read, and what they cost, are the same with and without gaps."""
    X, y, groups = data
    whole = PrivateFedRep(**OPTIONS).fit(own_filled(X, groups, np.array([50.0, -3, 20, 5])), y, groups)
    first, second = (model.privacy_.events for model in (fitted, whole))
    assert [repr(event) for event in first[:5]] == [repr(event) for event in second[:5]]
    assert fitted.privacy_.epsilon == whole.privacy_.epsilon


def test_one_users_gaps_change_that_users_contribution_alone(data: Data) -> None:
    X, y, groups = data
    other = X.copy()
    other[groups == 7] = np.nan
    one, two = (quietly(PrivateFedRep(**OPTIONS, rank=0), rows, y, groups) for rows in (X, other))
    a, b = (model.model_.billboard["scales"].arrays for model in (one, two))
    for name in ("sizes", "levels"):
        key = next(key for key in a if key.startswith(name))
        assert np.abs(a[key] - b[key]).sum() <= 2 * D  # a cell of each column, there and elsewhere


def test_heads_of_new_users_fill_their_rows(data: Data, fitted: PrivateFedRep) -> None:
    X, y, groups = data
    mine = groups == 5
    prior = fitted.model_.representation.prior
    assert prior is not None
    filled = own_filled(X[mine], groups[mine], prior.mean.centre)
    head, whole = fitted.personalize(X[mine], y[mine]), fitted.personalize(filled, y[mine])
    np.testing.assert_allclose(head.weights, whole.weights, rtol=1e-9)
    np.testing.assert_allclose(head.predict(X[mine]), whole.predict(filled), rtol=1e-9)
    np.testing.assert_allclose(head.predict(X[mine]), fitted.predict(X[mine], groups[mine]), rtol=1e-9)
    low, high = head.predict_interval(X[mine])
    assert (low < high).all()
    with pytest.warns(match="2 rows of 1 user without a head"):
        unknown, at_centre = fitted.predict(np.stack([np.full(D, np.nan), prior.mean.centre]), [9999, 9999])
    np.testing.assert_allclose(unknown, at_centre, rtol=1e-9)
    newcomer = fitted.personalize(X[:0], y[:0])
    np.testing.assert_allclose(newcomer.predict(np.full((1, D), np.nan)), at_centre, rtol=1e-9)


def test_saved_models_fill_the_same(data: Data, fitted: PrivateFedRep, tmp_path: Path) -> None:
    X, _, groups = data
    fitted.save(tmp_path / "model")
    loaded = PrivateFedRep.load(tmp_path / "model")
    assert bits(loaded, X, groups) == bits(fitted, X, groups)
    assert loaded.get_params()["missing"] == "impute"
    marked = quietly(PrivateFedRep(missing="drop", missing_indicator=[1], **OPTIONS), *data)
    marked.save(tmp_path / "marked")
    again = PrivateFedRep.load(tmp_path / "marked")
    assert (again.missing, again.missing_indicator, again.n_features_in_) == ("drop", [1], D)
    assert bits(again, X, groups) == bits(marked, X, groups)


def test_dropping_is_leaving_rows_out(data: Data) -> None:
    X, y, groups = data
    fitted = quietly(PrivateFedRep(missing="drop", **OPTIONS), X, y, groups)
    there = ~np.isnan(X).any(axis=1)
    gone = np.setdiff1d(groups, groups[there])
    assert len(gone)  # they stay users: how many there are is public
    assert fitted.users_.tolist() == list(range(USERS))
    weighed = PrivateFedRep(**OPTIONS).fit(np.nan_to_num(X), y, groups, sample_weight=there.astype(float))
    np.testing.assert_array_equal(fitted.representation_, weighed.representation_)
    assert bits(fitted, X[there], groups[there]) == bits(weighed, X[there], groups[there])
    assert np.isfinite(fitted.predict(X, groups)).all()


def test_an_indicator_is_a_column_beside_the_filled_one(data: Data) -> None:
    X, y, groups = data
    y = y + 3 * np.isnan(X[:, 0])
    frame = pd.DataFrame(X, columns=list("abcd"))
    marked = quietly(PrivateFedRep(missing_indicator=["a"], **OPTIONS), frame, y, groups)
    plain = quietly(PrivateFedRep(**OPTIONS), frame, y, groups)
    assert marked.model_.columns.feature_names == ("a", "b", "c", "d", "a is missing")
    assert marked.representation_.shape[0] == D + 1
    left = [np.mean((model.predict(frame, groups) - y) ** 2) for model in (marked, plain)]
    assert left[0] < 0.7 * left[1]
    mine = groups == 5
    head = marked.personalize(frame[mine], y[mine])
    np.testing.assert_allclose(head.predict(frame[mine]), marked.predict(frame[mine], groups[mine]), rtol=1e-9)
    by_place = quietly(PrivateFedRep(missing_indicator=[0], **OPTIONS), X, y, groups)
    assert bits(by_place, X, groups) == bits(marked, frame, groups)


@pytest.mark.parametrize("gap", [np.nan, None])
def test_rows_without_a_target_are_left_out(data: Data, gap: Any) -> None:
    X, y, groups = np.nan_to_num(data[0]), data[1].astype(object), data[2]
    lost = np.arange(len(y)) % 7 == 0
    y[lost] = gap
    with pytest.warns(MissingValues, match=f"^{lost.sum()} rows of 1,800 left out: no target"):
        fitted = PrivateFedRep(**OPTIONS).fit(X, y, groups)
    without = PrivateFedRep(**OPTIONS).fit(X[~lost], y[~lost].astype(float), groups[~lost])
    assert bits(fitted, X, groups) == bits(without, X, groups)


def test_of_several_targets_a_row_needs_all(data: Data) -> None:
    X, y, groups = np.nan_to_num(data[0]), np.column_stack([data[1], -data[1]]), data[2]
    y[::5, 0], y[2::5, 1] = np.nan, np.nan
    fitted = quietly(PrivateFedRep(**OPTIONS), X, y, groups)
    there = ~np.isnan(y).any(axis=1)
    without = PrivateFedRep(**OPTIONS).fit(X[there], y[there], groups[there])
    assert bits(fitted, X, groups) == bits(without, X, groups)


@pytest.mark.parametrize("kind", [PrivateFedRep, PrivAltMin, PrivateFedRepClassifier])
def test_weights_are_relative_within_users_to_the_last_bit(data: Data, kind: Any) -> None:
    X, y, groups = np.nan_to_num(data[0]), data[1], data[2]
    y = y if kind is not PrivateFedRepClassifier else (y > np.median(y)).astype(int)
    model = kind(rank=1, **OPTIONS)
    plain = clone(model).fit(X, y, groups)
    for weights in (np.full(len(y), 2.0), 1.0 + groups % 5):
        weighed = clone(model).fit(X, y, groups, sample_weight=weights)
        np.testing.assert_array_equal(weighed.representation_, plain.representation_)
        assert bits(weighed, X, groups) == bits(plain, X, groups)
    there = (np.random.default_rng(3).random(len(y)) < 0.7) | (np.arange(len(y)) % ROWS == 0)
    weighed = clone(model).fit(X, y, groups, sample_weight=3.0 * there)
    assert bits(weighed, X, groups) == bits(clone(model).fit(X[there], y[there], groups[there]), X, groups)
    mine = groups == 3
    heads = (weighed.personalize(X[mine], y[mine], sample_weight=each) for each in (None, np.full(ROWS, 2.0)))
    assert len({head.predict(X[mine]).tobytes() for head in heads}) == 1


def test_rows_that_are_noise_weigh_less() -> None:
    """Half of the rows are noise: with their weights a fit predicts far better than without. False alarms: < 1e-6."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(USERS), ROWS)
    X, level = rng.normal(size=(len(groups), 2)), rng.normal(size=USERS)[groups]
    truth, noisy = X[:, 0] + level, rng.random(len(groups)) < 0.5
    y = truth + np.where(noisy, 5.0, 0.1) * rng.normal(size=len(groups))
    fits = [
        PrivateFedRep(**OPTIONS).fit(X, y, groups, sample_weight=weights)
        for weights in (None, np.where(noisy, 0.001, 3.0))
    ]
    plain, weighed = (float(np.mean((fit.predict(X, groups) - truth) ** 2)) for fit in fits)
    assert weighed < 0.3 * plain


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (lambda n: -np.ones(n), "1,800 negative"),
        (lambda n: np.full(n, np.nan), "1,800 missing"),
        (lambda n: np.full(n, np.inf), "1,800 infinite"),
        (lambda n: np.ones(n + 1), r"must have shape \(1800,\)"),
        (lambda n: ["a"] * n, "must be numbers"),
        (lambda n: np.zeros(n), "no row is left"),
    ],
)
def test_weights_that_are_none(data: Data, weights: Any, words: str) -> None:
    X, y, groups = data
    with pytest.raises(InputError, match=words):
        PrivateFedRep(**OPTIONS).fit(X, y, groups, sample_weight=weights(len(y)))


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"missing": "refuse"}, r"^X misses values of b \(\d+\), .* and missing values are refused"),
        ({"missing": "mean"}, "missing must be one of impute, drop, refuse"),
        ({"missing_indicator": ["e"]}, "missing_indicator names 'e', which is no column of X"),
        ({"missing_indicator": [4]}, "missing_indicator names 4"),
        ({"missing_indicator": "a"}, r"write \['a'\]"),
        ({"unknown_users": "skip"}, 'unknown_users must be "prior" or "refuse"'),
    ],
)
@pytest.mark.parametrize("kind", [PrivateFedRep, PrivateFedRepClassifier])
def test_parameters_that_cannot_be(data: Data, kind: Any, parameters: dict[str, Any], words: str) -> None:
    X, y, groups = data
    with pytest.raises(InputError, match=words):
        kind(**OPTIONS, **parameters).fit(pd.DataFrame(X, columns=list("abcd")), y > 0, groups)


def test_no_sentence_is_scikit_learns_advice(data: Data, fitted: PrivateFedRep) -> None:
    """To impute in a pipeline is to compute a mean over users, which is not private."""
    X, y, groups = data
    wrong = X.copy()
    wrong[3, 2] = np.inf
    stored = sparse.csr_array(X)
    selector = PrivateMarginSelector(2, random_state=0)
    calls: list[tuple[Any, str]] = [
        (lambda: fitted.fit(wrong, y, groups), r"Input X contains infinity .*: column 2 \(1\)"),
        (lambda: fitted.predict(wrong, groups), r"Input X contains infinity .*: column 2 \(1\)"),
        (lambda: fitted.fit(X, np.where(y > 3, np.inf, y), groups), r"Input y contains infinity .* rows"),
        (lambda: PrivateFedRep(**OPTIONS).fit(stored, y, groups), r"X is sparse and stores [\d,]+ values"),
        (lambda: selector.fit(X, np.sign(y), groups), "PrivateMarginSelector does not fill them"),
    ]
    for call, words in calls:
        with pytest.raises(InputError, match=words) as said:
            call()
        assert "impute" not in str(said.value).lower()
        assert "pipeline" not in str(said.value)


def test_rows_to_predict_of_a_model_without_gaps(data: Data, tmp_path: Path) -> None:
    """Users' own means are kept whoever missed what: what one user sees must not depend on the gaps of others."""
    X, y, groups = own_filled(data[0], data[2], np.array([50.0, -3, 20, 5])), data[1], data[2]
    fitted = PrivateFedRep(**OPTIONS).fit(X, y, groups)
    assert fitted.model_.heads is not None
    assert fitted.model_.heads.means is not None
    gap, filled = X[:1].copy(), X[:1].copy()
    gap[0, 0], filled[0, 0] = np.nan, X[groups == 0, 0].mean()
    assert fitted.predict(gap, [0]) == pytest.approx(fitted.predict(filled, [0]), rel=1e-9)
    refusing = PrivateFedRep(**OPTIONS, missing="refuse").fit(X, y, groups)
    assert refusing.model_.heads is not None
    assert refusing.model_.heads.means is None


# Labels


@pytest.mark.parametrize("gap", [None, np.nan, ""])
def test_rows_without_a_label_are_left_out(data: Data, gap: Any) -> None:
    X, groups = np.nan_to_num(data[0]), data[2]
    labels = np.where(data[1] > np.median(data[1]), "yes", "no").astype(object)
    lost = np.arange(len(labels)) % 5 == 0
    labels[lost] = gap
    with pytest.warns(MissingValues, match=f"{lost.sum()} rows of 1,800 left out: no target"):
        fitted = PrivateFedRepClassifier(1, **OPTIONS).fit(X, labels, groups)
    without = PrivateFedRepClassifier(1, **OPTIONS).fit(X[~lost], labels[~lost], groups[~lost])
    assert fitted.classes_.tolist() == ["no", "yes"]
    assert fitted.predict_proba(X, groups).tobytes() == without.predict_proba(X, groups).tobytes()
    mine = groups == 5
    assert fitted.personalize(X[mine], labels[mine]).predict(X[mine]).tolist()


def test_classifiers_fill_missing_values(data: Data, tmp_path: Path) -> None:
    X, y, groups = data
    labels = y > np.median(y)
    fitted = quietly(PrivateFedRepClassifier(1, **OPTIONS), X, labels, groups)
    accuracy = fitted.score(X, labels, groups)
    assert accuracy > 0.8
    fitted.save(tmp_path / "model")
    loaded = PrivateFedRepClassifier.load(tmp_path / "model")
    assert loaded.predict_proba(X, groups).tobytes() == fitted.predict_proba(X, groups).tobytes()
    mine = groups == 5
    head = fitted.personalize(X[mine], labels[mine])
    np.testing.assert_allclose(
        head.decision_function(X[mine]), fitted.decision_function(X[mine], groups[mine]), rtol=1e-6
    )


def test_a_column_that_a_user_never_had_cannot_speak_where_nothing_locates_it() -> None:
    """Without a location only differences to a user's own mean mean anything, and such a user has no mean."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(100), 5)
    X = 1000 + rng.normal(size=(500, 2))
    labels = X[:, 0] > 1000
    X[groups == 3, 1] = np.nan
    fitted = quietly(PrivateFedRepClassifier(1, **OPTIONS), X, labels, groups)
    if fitted.model_.representation.prior is not None:
        pytest.skip("classes have a location")
    rows = np.array([[1000.5, 1e9], [1000.5, np.nan]])
    outputs = fitted.decision_function(rows, [3, 3])
    assert outputs[0] == outputs[1]


def test_nan_is_declared_to_scikit_learn() -> None:
    for kind in (PrivateFedRep, PrivateFedRepClassifier):
        assert get_tags(kind()).input_tags.allow_nan
    assert not get_tags(PrivateMarginSelector()).input_tags.allow_nan


@pytest.mark.parametrize("make", [pd.DataFrame, lambda X, columns: __import__("polars").DataFrame(X, schema=columns)])
def test_frames_have_gaps_of_their_own(data: Data, fitted: PrivateFedRep, make: Any) -> None:
    X, y, groups = data
    if make is not pd.DataFrame:
        pytest.importorskip("polars")
    frame = make(np.where(np.isnan(X), None, X).astype(object) if make is pd.DataFrame else X, columns=list("abcd"))
    again = quietly(PrivateFedRep(**OPTIONS), frame, y, groups)
    assert bits(again, frame, groups) == bits(fitted, X, groups)


def test_frames_with_text_and_gaps(data: Data, tmp_path: Path) -> None:
    X, y, groups = data
    frame = pd.DataFrame(X, columns=list("abcd")).assign(e=np.where(groups % 3 == 0, "one", "other"))
    model = PrivateFedRep(categories={"e": ["one", "other"]}, missing_indicator=["b"], **OPTIONS)
    fitted = quietly(model, frame, y, groups)
    assert fitted.model_.columns.feature_names == ("a", "b", "c", "d", "b is missing", "e=one", "e=other")
    assert fitted.representation_.shape[0] == 7
    found = fitted.predict(frame[["e", "d", "c", "b", "a"]], groups)
    assert np.isfinite(found).all()
    assert np.sqrt(np.mean((found - y) ** 2)) < 1.0
    fitted.save(tmp_path / "model")
    assert bits(PrivateFedRep.load(tmp_path / "model"), frame, groups) == found.tobytes()
    mine = groups == 5
    head = fitted.personalize(frame[mine], y[mine])
    np.testing.assert_allclose(head.predict(frame[mine]), found[mine], rtol=1e-6)
    with pytest.raises(InputError, match=r"misses values of b \(\d+\), .* are refused"):
        quietly(PrivateFedRep(missing="refuse", **OPTIONS), frame, y, groups)


def test_a_target_that_is_no_number_is_refused_without_its_value() -> None:
    X, y = np.zeros((4, 1)), np.array(["1", "2", "12,50 EUR", "3"], dtype=object)
    with pytest.raises(InputError, match="not numbers") as caught:
        PrivateFedRep().fit(X, y, groups=[0, 0, 1, 1])
    assert "EUR" not in str(caught.value)
    assert caught.value.__suppress_context__
