"""scikit-learn's tools around a fit: splits, searches and pipelines, and what they spend."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import config_context
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score
from sklearn.pipeline import Pipeline, make_pipeline, make_union
from sklearn.preprocessing import FunctionTransformer, Normalizer, OneHotEncoder, StandardScaler

import privrep
from privrep import PrivateFedRep, WithinUserSplit
from privrep.data.synthetic import make_population
from privrep.errors import BudgetExceeded, FittedAgain, InputError, OutsideLedger, UnknownUsers
from privrep.estimators.accounts import forget_fits
from privrep.linear.registry import ESTIMATORS
from privrep.privacy.accounting import compute_epsilon

USERS = 60


@pytest.fixture(scope="module")
def rows() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    table = make_population(rng, USERS, 4, 1, 6, 0.1, intercept=0.5).sample(rng)
    order = rng.permutation(len(table.y))
    return table.X[order], table.y[order], np.repeat(table.ids, table.sizes)[order]


@pytest.fixture
def routed() -> Iterator[None]:
    with config_context(enable_metadata_routing=True):
        yield


def asking(model: Any) -> Any:
    return model.set_fit_request(groups=True).set_score_request(groups=True)


# Splits


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12), st.floats(0.01, 0.99), st.integers(1, 4), st.integers(0, 9)
)
def test_every_user_with_two_rows_is_on_both_sides(sizes: list[int], part: float, splits: int, seed: int) -> None:
    groups = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    found = list(WithinUserSplit(splits, test_size=part, random_state=seed).split(groups, groups=groups))
    assert len(found) == splits
    for train, test in found:
        assert np.array_equal(np.sort(np.concatenate([train, test])), np.arange(len(groups)))
        assert np.array_equal(train, np.sort(train))
        for user, size in enumerate(sizes):
            held = np.count_nonzero(groups[test] == user)
            assert held == (0 if size == 1 else np.clip(np.floor(size * part + 0.5), 1, size - 1))


def test_a_split_is_drawn_anew_and_the_same_from_the_same_state(rows: Any) -> None:
    X, y, groups = rows
    first, again = (
        [test.tolist() for _, test in WithinUserSplit(3, random_state=state).split(X, y, groups)] for state in (1, 1)
    )
    assert first == again
    assert len({str(test) for test in first}) == 3
    other = [test.tolist() for _, test in WithinUserSplit(3, random_state=2).split(X, y, groups)]
    assert first != other
    text = [test.tolist() for _, test in WithinUserSplit(3, random_state=1).split(X, y, [f"u{g:03}" for g in groups])]
    assert first == text
    assert WithinUserSplit(3).get_n_splits() == 3
    assert "WithinUserSplit(n_splits=3" in repr(WithinUserSplit(3))


@pytest.mark.parametrize(
    ("options", "groups", "sentence"),
    [({}, None, "needs groups"), ({"test_size": 1.0}, [1], "test_size is a part"), ({"n_splits": 0}, [1], "n_splits")],
)
def test_what_cannot_be_split_is_refused(options: Any, groups: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        list(WithinUserSplit(**options).split([0], groups=groups))


@pytest.mark.usefixtures("routed")
def test_a_score_within_users_is_of_personal_heads(rows: Any) -> None:
    """Users who were in training are predicted by their own heads, and users who were not by the prior mean."""
    X, y, groups = rows
    model = asking(PrivateFedRep(1, epsilon=50.0, random_state=0))
    within = cross_val_score(
        model, X, y, cv=WithinUserSplit(2, random_state=0), params={"groups": groups}, error_score="raise"
    )
    with pytest.warns(UnknownUsers):
        between = cross_val_score(model, X, y, cv=GroupKFold(2), params={"groups": groups}, error_score="raise")
    assert np.isfinite([*within, *between]).all()
    assert within.min() > between.max()


# Searches

SCORED = {
    **{name: lambda name=name: getattr(privrep, name)(1, epsilon=4.0) for name in ESTIMATORS},
    "PrivateFedRepClassifier": lambda: privrep.PrivateFedRepClassifier(1, epsilon=4.0, classes=[-1, 1]),
    "PrivateMarginSelector": lambda: privrep.PrivateMarginSelector(1, epsilon=4.0, candidates=8, rounds=2),
    "CentaurRegressor": lambda: privrep.CentaurRegressor(epsilon=4.0),
    "Centaur": lambda: privrep.Centaur(epsilon=4.0, classes=[-1, 1], share="linear", rounds=1),
}


WITHOUT_PRIOR = {"DPFedAvg", "PrivateMarginSelector", "Centaur"}  # nothing was released to predict strangers with


@pytest.mark.parametrize("name", [name for name in SCORED if name in privrep.__all__])
@pytest.mark.usefixtures("routed")
def test_users_who_were_in_no_fold_have_scores_by_the_prior_mean(name: str, rows: Any) -> None:
    X, y, groups = rows
    model = asking(SCORED[name]().set_params(random_state=0))
    labels = y if name in ESTIMATORS or name == "CentaurRegressor" else np.where(y > 0, 1, -1)
    if name in WITHOUT_PRIOR:
        with pytest.raises(InputError, match=r"user \d+ .*was not in"):
            cross_val_score(model, X, labels, cv=GroupKFold(3), params={"groups": groups}, error_score="raise")
        return
    with pytest.warns(UnknownUsers, match="rows of"):
        scores = cross_val_score(model, X, labels, cv=GroupKFold(3), params={"groups": groups}, error_score="raise")
    assert scores.shape == (3,)
    assert np.isfinite(scores).all()


@pytest.mark.usefixtures("routed")
def test_a_search_over_seven_fits_says_what_they_come_to(rows: Any) -> None:
    """Three values, two splits, and the refit: fits of the same users. The sum is checked against accounting."""
    X, y, groups = rows
    model = asking(PrivateFedRep(1, epsilon=1.0, delta=1e-6))
    spent: list[Any] = []

    class Kept(PrivateFedRep):
        def fit(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> Any:
            super().fit(X, y, groups, sample_weight)
            spent.append([event for _, event in self.privacy_.events])
            return self

    search = GridSearchCV(
        asking(Kept(**model.get_params())), {"epsilon": [0.5, 1.0, 2.0]}, cv=WithinUserSplit(2, random_state=0)
    )
    with pytest.warns(FittedAgain) as caught:
        search.fit(X, y, groups=groups)
    told = [str(each.message) for each in caught if each.category is FittedAgain]
    assert len(spent) == 7
    assert [f"made {number} fits" in words for number, words in zip(range(2, 8), told, strict=True)] == [True] * 6
    total = compute_epsilon([event for each in spent for event in each], 1e-6)
    found = re.search(r"up to epsilon ([\d.]+) at delta 1e-06", told[-1])
    assert found
    assert total <= float(found[1]) <= total + 1e-3  # rounded up to four digits
    assert total > 2.0


@pytest.mark.usefixtures("routed")
def test_a_search_with_a_population_stops_at_its_budget(rows: Any, tmp_path: Any) -> None:
    X, y, groups = rows
    people = privrep.PopulationLedger.create(tmp_path / "people.db", epsilon=1.3)
    model = asking(PrivateFedRep(1, epsilon=1.0, population=people.path))
    search = GridSearchCV(
        model, {"rank": [1, 2, 3]}, cv=WithinUserSplit(2, random_state=0), refit=False, error_score="raise"
    )
    with pytest.raises(BudgetExceeded, match="no room for this run"):
        search.fit(X, y, groups=groups)
    found = people.read()
    assert 0.5 < found.epsilon <= 1.3
    assert {share.status for share in found.shares.values()} == {"finished"}


def test_other_users_and_simulations_are_no_fits_of_these(rows: Any) -> None:
    X, y, groups = rows
    PrivateFedRep(1, epsilon=1.0).fit(X, y, groups)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PrivateFedRep(1, epsilon=1.0).fit(X, y, groups + 10_000)
        PrivateFedRep(1, epsilon=1.0, random_state=0).fit(X, y, groups)
        PrivateFedRep(1, epsilon=1.0, relation="add-or-remove-one-user").fit(X, y, groups)
    assert not [each for each in caught if each.category is FittedAgain]
    with pytest.warns(FittedAgain, match="2 fits"):
        PrivateFedRep(1, epsilon=1.0).fit(X[:60], y[:60], groups[:60])


def test_fits_of_one_ledger_are_its_own_and_any_other_fit_is_told_of(rows: Any, tmp_path: Path) -> None:
    """A population ledger has the total of its own fits. A fit beside it is on no ledger with them."""
    X, y, groups = rows
    people = [privrep.PopulationLedger.create(tmp_path / f"{name}.db", epsilon=9.0) for name in "ab"]
    forget_fits()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FittedAgain)
        for _ in range(2):
            PrivateFedRep(1, epsilon=1.0, population=people[0]).fit(X, y, groups)
    for count, drawn_from in ((3, None), (4, people[0]), (5, people[1])):
        with pytest.warns(FittedAgain, match=f"{count} fits"):
            PrivateFedRep(1, epsilon=1.0, population=drawn_from).fit(X, y, groups)
    forget_fits()


# Pipelines

LEARNING = {
    "a scaler": (lambda: make_pipeline(StandardScaler(), fitted()), "'standardscaler' (StandardScaler)"),
    "an imputer": (lambda: make_pipeline(SimpleImputer(), fitted()), "'simpleimputer' (SimpleImputer)"),
    "a projection": (lambda: Pipeline([("turn", PCA(3)), ("fit", fitted())]), "'turn' (PCA)"),
    "a column's scaler": (
        lambda: make_pipeline(ColumnTransformer([("one", StandardScaler(), [0])], remainder="passthrough"), fitted()),
        "'columntransformer__one' (StandardScaler)",
    ),
    "several": (
        lambda: make_pipeline(Normalizer(), make_union(StandardScaler(), PCA(1)), fitted()),
        "'featureunion__standardscaler' (StandardScaler), 'featureunion__pca' (PCA)",
    ),
    "a pipeline within": (
        lambda: make_pipeline(make_pipeline(Normalizer(), PCA(2)), fitted()),
        "'pipeline__pca' (PCA)",
    ),
}
STATELESS = {
    "a function": lambda: make_pipeline(FunctionTransformer(np.tanh), fitted()),
    "lengths": lambda: make_pipeline(Normalizer(), fitted()),
    "columns": lambda: make_pipeline(ColumnTransformer([("one", Normalizer(), [0, 1])]), fitted()),
    "nothing": lambda: Pipeline([("no", "passthrough"), ("nor", None), ("fit", fitted())]),
    "declared": lambda: make_pipeline(
        FunctionTransformer(np.sign), OneHotEncoder(categories=[[-1, 1]] * 4, sparse_output=False), fitted()
    ),
    "frozen": lambda: make_pipeline(FrozenEstimator(StandardScaler().fit(np.eye(4))), fitted()),
    "alone": lambda: Pipeline([("fit", fitted())]),
}


def fitted() -> PrivateFedRep:
    return PrivateFedRep(1, epsilon=4.0, random_state=0)


def groups_of(pipeline: Pipeline, groups: Any) -> dict[str, Any]:
    return {f"{pipeline.steps[-1][0]}__groups": groups}


@pytest.mark.parametrize("name", LEARNING)
def test_a_step_that_learned_from_rows_is_remarked_on_once_by_name(name: str, rows: Any) -> None:
    X, y, groups = rows
    make, named = LEARNING[name]
    pipeline = make()
    with pytest.warns(OutsideLedger, match="learned from these users' rows before this fit") as caught:
        pipeline.fit(X, y, **groups_of(pipeline, groups))
    (told,) = [str(each.message) for each in caught if each.category is OutsideLedger]
    assert f"step {named} of the pipeline" in told


@pytest.mark.parametrize("name", STATELESS)
def test_a_step_that_learns_nothing_is_not(name: str, rows: Any) -> None:
    X, y, groups = rows
    pipeline = STATELESS[name]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline.fit(X, y, **groups_of(pipeline, groups))
    assert not [each for each in caught if each.category is OutsideLedger]


@pytest.mark.parametrize("name", [name for name in SCORED if name in privrep.__all__])
def test_every_estimator_remarks(name: str, rows: Any) -> None:
    X, y, groups = rows
    labels = y if name in ESTIMATORS or name == "CentaurRegressor" else np.where(y > 0, 1, -1)
    pipeline = make_pipeline(StandardScaler(), SCORED[name]().set_params(random_state=0))
    with pytest.warns(OutsideLedger, match="'standardscaler'"):
        pipeline.fit(X, labels, **groups_of(pipeline, groups))


def test_a_fit_beside_a_pipeline_is_none_of_its_steps(rows: Any) -> None:
    """A fit that a step makes for itself is no last step."""
    X, y, groups = rows

    class Fits(FunctionTransformer):  # type: ignore[misc]
        def fit(self, rows: Any, targets: Any = None) -> Any:
            clone(fitted()).fit(X, y, groups)
            return super().fit(rows)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_pipeline(StandardScaler(), Fits()).fit(X)
    assert not [each for each in caught if each.category is OutsideLedger]
