"""Classifiers: labels of every kind, classes that are declared or selected privately, scikit-learn's conventions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks
from sklearn.utils.metaestimators import available_if

from privrep import (
    CentaurLinear,
    InputError,
    NothingLearned,
    PrivateFactorization,
    PrivateFedRep,
    PrivateFedRepClassifier,
    ResumeError,
)
from privrep.data.categories import MOST_CLASSES, check_classes
from privrep.data.synthetic import make_class_population
from privrep.errors import UnknownUsers
from privrep.models import learning
from privrep.models import model as model_module
from privrep.models.description import Columns, Config
from privrep.models.folder import ModelFolder
from privrep.privacy.events import Selection
from privrep.privacy.ledger import Budget, read_ledger

NAMES = np.array(["ash", "birch", "cedar"])
SECRET = "the secret one"


def rows(users: int = 600, classes: int = 3, size: int = 10, seed: int = 0) -> tuple[Any, Any, Any]:
    """X, codes of labels and users, shuffled."""
    rng = np.random.default_rng(seed)
    table = make_class_population(rng, users, 6, 2, size, classes, strength=4.0).sample(rng, np.float64)
    order = rng.permutation(len(table.y))
    return table.X[order], table.y[order].astype(np.int64), np.repeat(table.ids, size)[order]


@pytest.fixture(scope="module")
def data() -> tuple[Any, Any, Any]:
    X, y, groups = rows()
    return X, NAMES[y], groups


@pytest.fixture(scope="module")
def fitted(data: tuple[Any, Any, Any]) -> PrivateFedRepClassifier:
    X, y, groups = data
    return PrivateFedRepClassifier(2, epsilon=20.0, random_state=1).fit(X, y, groups=groups)


def names_of(model: PrivateFedRepClassifier) -> list[str]:
    return [name for name, _ in model.privacy_.events]


def test_learns_and_reports(fitted: PrivateFedRepClassifier, data: tuple[Any, Any, Any]) -> None:
    X, y, groups = data
    assert fitted.classes_.tolist() == NAMES.tolist()
    assert fitted.representation_.shape == (6, 2)
    assert fitted.score(X, y, groups=groups) > 0.8  # one class in three is right by chance
    assert fitted.privacy_.epsilon == pytest.approx(20.0, abs=1e-4)
    assert fitted.privacy_.epsilon <= 20.0
    outputs, chances = fitted.decision_function(X, groups=groups), fitted.predict_proba(X, groups=groups)
    assert outputs.shape == chances.shape == (len(y), 3)
    assert np.allclose(chances.sum(axis=1), 1)
    assert np.array_equal(NAMES[outputs.argmax(axis=1)], fitted.predict(X, groups=groups))
    assert np.array_equal(outputs.argsort(axis=1), chances.argsort(axis=1))


def test_two_classes_have_one_output_whose_sign_decides() -> None:
    X, y, groups = rows(classes=2)
    model = PrivateFedRepClassifier(2, epsilon=20.0, classes=[0, 1], random_state=1).fit(X, y, groups=groups)
    outputs, chances = model.decision_function(X, groups=groups), model.predict_proba(X, groups=groups)
    assert outputs.shape == y.shape
    assert np.array_equal(model.predict(X, groups=groups), (outputs > 0).astype(int))
    assert np.allclose(chances[:, 1], 1 / (1 + np.exp(-outputs)))
    assert model.score(X, y, groups=groups) > 0.85
    head = model.personalize(X[groups == 3], y[groups == 3])
    assert np.allclose(head.decision_function(X[:5]), model.decision_function(X[:5], groups=[3] * 5))
    assert head.predict_proba(X[:5]).shape == (5, 2)


@pytest.mark.parametrize(
    ("make", "kind", "selected"),
    [
        (lambda y: y, "i", True),
        (lambda y: y.astype(np.float64) * 10, "i", True),  # what integers become where a frame had gaps
        (lambda y: y.astype(np.uint8), "i", True),
        (lambda y: NAMES[y], "U", True),
        (lambda y: NAMES[y].astype(object), "U", True),
        (lambda y: pd.Series(NAMES[y], dtype="category"), "U", True),
        (lambda y: pl.Series(NAMES[y].tolist()), "U", True),
        (lambda y: pa.chunked_array([NAMES[y].tolist()]), "U", True),
        (lambda y: y > 0, "b", False),
        (lambda y: (y > 0).tolist(), "b", False),
    ],
    ids=["int", "float", "uint8", "text", "object", "categorical", "polars", "arrow", "bool", "list of bool"],
)
def test_labels_come_back_as_they_were_given(make: Any, kind: str, selected: bool) -> None:
    X, y, groups = rows(users=400)
    labels = make(y)
    model = PrivateFedRepClassifier(2, epsilon=20.0, random_state=1).fit(X, labels, groups=groups)
    predicted = model.predict(X, groups=groups)
    assert predicted.dtype.kind == model.classes_.dtype.kind == kind
    assert np.mean(predicted == np.asarray(labels)) > 0.75
    assert ("classes/keys" in names_of(model)) == selected


# Which classes there are


def test_a_label_of_one_user_alone_is_named_nowhere(tmp_path: Path, data: tuple[Any, Any, Any]) -> None:
    X, y, groups = data
    y = y.astype(object)
    y[groups == 7] = SECRET
    model = PrivateFedRepClassifier(2, epsilon=5.0, run_folder=tmp_path / "model").fit(X, y, groups=groups)
    assert model.classes_.tolist() == NAMES.tolist()
    assert SECRET not in model.predict(X, groups=groups)
    model.save(tmp_path / "saved")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20
    for path in files:
        assert "private" in path.parts or SECRET.encode() not in path.read_bytes()


def test_selecting_classes_is_charged_and_declaring_them_is_not(data: tuple[Any, Any, Any]) -> None:
    X, y, groups = data
    selected = PrivateFedRepClassifier(2, epsilon=5.0, random_state=0).fit(X, y, groups=groups)
    (event,) = [event for _, event in selected.privacy_.events if isinstance(event, Selection)]
    assert names_of(selected)[0] == "classes/keys"
    assert event.delta == pytest.approx(learning.KEYS_SHARE * 1e-6)
    whole = Budget(5.0, 1e-6, "replace-one-user").mu ** 2
    assert event.noise_multiplier**-2 == pytest.approx(learning.KEYS_SHARE * whole, rel=1e-6)
    assert selected.model_.billboard.read_selection("classes").keys == tuple(NAMES.tolist())
    declared = clone(selected).set_params(classes=[*NAMES, "elm"]).fit(X, y, groups=groups)
    assert not [event for _, event in declared.privacy_.events if isinstance(event, Selection)]
    assert "classes" not in declared.model_.billboard
    assert declared.classes_.tolist() == [*NAMES.tolist(), "elm"]
    assert declared.predict_proba(X[:3], groups=groups[:3]).shape == (3, 4)
    assert (selected.model_.classes_selected, declared.model_.classes_selected) == (True, False)


def test_labels_outside_the_list_count_for_nothing(data: tuple[Any, Any, Any]) -> None:
    """Two labels that are not listed are as good as one another, and rows with them are rows without a label."""
    X, y, groups = data
    model = PrivateFedRepClassifier(2, epsilon=20.0, classes=["ash", "birch"], random_state=1).fit(X, y, groups=groups)
    renamed = clone(model).fit(X, np.where(y == "cedar", "elm", y), groups=groups)
    assert np.array_equal(model.representation_, renamed.representation_)
    assert set(model.predict(X, groups=groups)) == {"ash", "birch"}
    known = y != "cedar"
    assert model.score(X[known], y[known], groups=groups[known]) > 0.85
    table = model.model_.heads
    assert table is not None
    assert table.targets == 1
    shifted = clone(model).fit(X, np.where(y == "cedar", "ash", y), groups=groups)
    assert not np.allclose(model.representation_, shifted.representation_)


@pytest.mark.parametrize("label", ["ash", None])
def test_too_few_classes_to_name(tmp_path: Path, label: str | None) -> None:
    """All have one label, or each user one of its own: one sentence, which names none of them."""
    X, _, groups = rows(users=60)
    labels = np.array([label or f"label of {group}" for group in groups])
    model = PrivateFedRepClassifier(2, epsilon=5.0, random_state=0, run_folder=tmp_path / "run")
    with pytest.raises(InputError, match=r"fewer than two classes .* declare them .* is spent") as raised:
        model.fit(X, labels, groups=groups)
    assert "label of" not in str(raised.value)
    assert read_ledger(tmp_path / "run" / "ledger.jsonl").report().epsilon > 0
    assert not (tmp_path / "run" / "model.json").exists()


def test_too_many_classes_to_name() -> None:
    """Every user has all of them: all could be named."""
    rng = np.random.default_rng(0)
    groups, y = np.repeat(np.arange(3000), MOST_CLASSES + 1), np.tile(np.arange(MOST_CLASSES + 1), 3000)
    model = PrivateFedRepClassifier(1, epsilon=50.0, random_state=0)
    with pytest.raises(InputError, match=r"1,001 classes, more than 1,000"):
        model.fit(rng.normal(size=(len(y), 2)), y, groups=groups)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("ab", "must be a list"),
        (3, "must be a list"),
        ([], "2 to 1,000. Got 0"),
        (["a"], "2 to 1,000. Got 1"),
        (range(MOST_CLASSES + 1), "Got 1,001"),
        (["a", 1], "all text, all integers or all booleans"),
        ([True, 1], "all text, all integers or all booleans"),
        ([0.5, 1.5], "all text, all integers or all booleans"),
        (["a", ""], "none empty"),
        ([1, 2**63], "all integers"),
        (["a", "b", "a"], "'a' more than once"),
    ],
)
def test_bad_lists_of_classes(given: Any, sentence: str, data: tuple[Any, Any, Any]) -> None:
    X, y, groups = data
    with pytest.raises(InputError, match=sentence):
        PrivateFedRepClassifier(2, classes=given, random_state=0).fit(X, y, groups=groups)


def test_lists_of_classes_are_sorted() -> None:
    assert check_classes(np.array([3, 1, 2])) == (1, 2, 3)
    assert check_classes(pd.Series(["b", "a"])) == ("a", "b")
    assert check_classes([True, False]) == (False, True)
    assert all(type(value) is int for value in check_classes(np.arange(3)))


# What is refused


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"loss": "square"}, "loss must be one of log, hinge"),
        ({"rank": 7}, "rank must lie between 0"),
        ({"epsilon": 0.0}, "epsilon must be a positive"),
        ({"feature_scale": [1.0]}, "feature_scale must hold 6"),
        ({"start": "best"}, "start must be one of"),
        ({"classes": [1, 2]}, "labels are text and the classes are integers"),
    ],
)
def test_bad_parameters_cost_nothing(
    change: dict[str, Any], sentence: str, tmp_path: Path, data: tuple[Any, Any, Any]
) -> None:
    X, y, groups = data
    model = PrivateFedRepClassifier(**{"rank": 2, "random_state": 0, "run_folder": tmp_path / "run", **change})
    with pytest.raises(InputError, match=sentence):
        model.fit(X, y, groups=groups)
    assert not (tmp_path / "run").exists()


def test_bad_calls(data: tuple[Any, Any, Any], fitted: PrivateFedRepClassifier) -> None:
    X, y, groups = data
    new = PrivateFedRepClassifier(2, random_state=0)
    with pytest.raises(InputError, match="needs groups"):
        new.fit(X, y)
    with pytest.raises(InputError, match="needs groups"):
        fitted.predict_proba(X)
    with pytest.warns(UnknownUsers, match="prior mean"):
        fitted.predict(X[:1], groups=[99999])
    with pytest.raises(InputError, match="one user per observation"):
        new.fit(X, y, groups=groups[:5])
    for bad in (np.linspace(0, 1, len(y)), np.array([1, "a"] * (len(y) // 2), dtype=object), y.astype("S")):
        with pytest.raises(ValueError, match="Unknown label type"):
            new.fit(X, bad, groups=groups)
    with pytest.raises(ValueError, match="1d array"):
        new.fit(X, np.column_stack([y, y]), groups=groups)
    with pytest.raises(InputError, match="labels are integers and the classes are text"):
        fitted.personalize(X[:3], [0, 1, 2])
    with pytest.raises(InputError, match="declare feature_scale instead"):
        PrivateFedRepClassifier(2, feature_covariance=np.eye(6)).fit(sparse.csr_array(X), y, groups=groups)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"method": "priv-altmin"}, "for labels the method is private-fedrep or centaur"),
        ({"configuration": "paper", "intercept": False}, "for labels use the default"),
        ({"ratings": True}, "ratings take a rank and a budget"),
        ({}, "list of two or more classes"),
    ],
)
def test_settings_that_do_not_go_with_labels(change: dict[str, Any], sentence: str) -> None:
    X, y, groups = rows(users=20)
    from privrep.data.table import UserTable
    from privrep.users.memory import InMemoryUsers

    users = InMemoryUsers(UserTable.from_rows(X, y, groups))
    config = Config(2, 1.0, 1e-6, seed=0, loss="log", **change)
    with pytest.raises(InputError, match=sentence):
        learning.learn(users, config)
    several = InMemoryUsers(UserTable.from_rows(X, np.column_stack([y, y]), groups))
    with pytest.raises(InputError, match="labels are one target"):
        learning.learn(several, Config(2, 1.0, 1e-6, loss="log"), columns=Columns(classes=(0, 1, 2)))


def test_the_hinge_has_no_probabilities(tmp_path: Path, data: tuple[Any, Any, Any]) -> None:
    X, y, groups = data
    model = PrivateFedRepClassifier(2, epsilon=20.0, loss="hinge", random_state=1).fit(X, y, groups=groups)
    assert model.score(X, y, groups=groups) > 0.75
    head = model.personalize(X[:10], y[:10])
    for one in (model, head):
        assert not hasattr(one, "predict_proba")
        with pytest.raises(AttributeError, match="predict_proba"):
            one.predict_proba(X)
    assert head.decision_function(X[:2]).shape == (2, 3)
    model.save(tmp_path / "model")
    assert PrivateFedRepClassifier.load(tmp_path / "model").loss == "hinge"


# New users, saving, resuming


def test_a_new_user(fitted: PrivateFedRepClassifier, data: tuple[Any, Any, Any]) -> None:
    X, y, groups = data
    mine = groups == 5
    head = fitted.personalize(X[mine], y[mine])
    assert head.kind == "posterior"
    assert np.array_equal(head.classes, fitted.classes_)
    assert np.allclose(head.decision_function(X[mine]), fitted.decision_function(X[mine], groups=groups[mine]))
    assert np.allclose(head.predict_proba(X[mine]), fitted.predict_proba(X[mine], groups=groups[mine]))
    assert np.array_equal(head.predict(X[mine]), fitted.predict(X[mine], groups=groups[mine]))
    other = np.where(np.arange(mine.sum()) < 2, "elm", y[mine])  # labels that the model does not know
    assert not np.allclose(fitted.personalize(X[mine], other).decision_function(X), head.decision_function(X))
    with pytest.raises(InputError, match="shape"):
        head.predict(X[:, :3])


@pytest.mark.parametrize("classes", [None, ["elm", *NAMES], [True, False]], ids=["selected", "declared", "booleans"])
def test_save_and_load(tmp_path: Path, data: tuple[Any, Any, Any], classes: Any) -> None:
    X, y, groups = data
    y = y == "ash" if classes == [True, False] else y
    model = PrivateFedRepClassifier(2, epsilon=20.0, classes=classes, random_state=1).fit(X, y, groups=groups)
    model.save(tmp_path / "model")
    loaded = PrivateFedRepClassifier.load(tmp_path / "model")
    assert np.array_equal(loaded.predict_proba(X, groups=groups), model.predict_proba(X, groups=groups))
    assert np.array_equal(loaded.predict(X, groups=groups), model.predict(X, groups=groups))
    assert (loaded.classes_.dtype, loaded.classes_.tolist()) == (model.classes_.dtype, model.classes_.tolist())
    assert loaded.privacy_ == model.privacy_
    assert loaded.get_params() == {**model.get_params(), "classes": None if classes is None else sorted(classes)}


def test_other_classes_cannot_load_it_nor_it_others(
    tmp_path: Path, data: tuple[Any, Any, Any], fitted: PrivateFedRepClassifier
) -> None:
    X, _, groups = data
    fitted.save(tmp_path / "labels")
    for kind in (PrivateFedRep, CentaurLinear):
        with pytest.raises(InputError, match=r"load it with PrivateFedRepClassifier\.load"):
            kind.load(tmp_path / "labels")
    with pytest.raises(InputError, match="holds no model of ratings"):
        PrivateFactorization.load(tmp_path / "labels")
    PrivateFedRep(2, epsilon=20.0, random_state=0).fit(X, -X[:, 0], groups=groups).save(tmp_path / "numbers")
    with pytest.raises(InputError, match=r"load it with PrivateFedRep\.load"):
        PrivateFedRepClassifier.load(tmp_path / "numbers")


def test_models_that_know_nothing_of_classes_are_read(tmp_path: Path, data: tuple[Any, Any, Any]) -> None:
    X, _, groups = data
    model = PrivateFedRep(2, epsilon=20.0, random_state=0).fit(X, -X[:, 0], groups=groups)
    model.save(tmp_path / "model")
    path = tmp_path / "model" / "model.json"
    written = json.loads(path.read_text())
    assert written["config"].pop("loss") is None
    assert written["columns"].pop("classes") == []
    ModelFolder(path.parent).finish(written)
    assert np.array_equal(PrivateFedRep.load(tmp_path / "model").representation_, model.representation_)


def test_runs_that_know_nothing_of_classes_are_continued(
    tmp_path: Path, data: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    X, _, groups = data
    model = PrivateFedRep(2, epsilon=20.0, random_state=0, run_folder=tmp_path / "run")
    monkeypatch.setattr(
        model_module, "finish", lambda *_: None
    )  # all is spent, and the folder is that of a run under way
    first = clone(model).fit(X, -X[:, 0], groups=groups)
    monkeypatch.undo()
    path = tmp_path / "run" / "run.json"
    written = json.loads(path.read_text())
    del written["config"]["loss"], written["columns"]["classes"]
    path.write_text(json.dumps(written))
    spent = (tmp_path / "run" / "ledger.jsonl").read_text()
    assert np.array_equal(model.fit(X, -X[:, 0], groups=groups).representation_, first.representation_)
    assert (tmp_path / "run" / "ledger.jsonl").read_text() == spent


@pytest.mark.parametrize("damage", [{"classes": ["a"]}, {"classes": ["a", "b"]}, {"classes": None}])
def test_a_damaged_list_of_classes_is_one_sentence(
    tmp_path: Path, fitted: PrivateFedRepClassifier, damage: dict[str, Any]
) -> None:
    fitted.save(tmp_path / "model")
    path = tmp_path / "model" / "model.json"
    written = json.loads(path.read_text())
    written["columns"] |= damage
    path.write_text(json.dumps(written))
    with pytest.raises(InputError, match="is damaged"):
        PrivateFedRepClassifier.load(tmp_path / "model")


@pytest.mark.parametrize(("at", "classes"), [("classes", None), ("round-2", None), ("round-2", NAMES.tolist())])
def test_a_run_resumes(
    at: str, classes: Any, tmp_path: Path, data: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    X, y, groups = data
    whole = PrivateFedRepClassifier(2, epsilon=20.0, classes=classes, random_state=1).fit(X, y, groups=groups)

    class Killed(Exception):
        pass

    def kill(page: str, epsilon: float) -> None:
        if page == at:
            raise Killed

    learn = learning.learn
    monkeypatch.setattr(learning, "learn", lambda *a, **k: learn(*a, **{**k, "on_page": kill}))
    model = clone(whole).set_params(run_folder=tmp_path / "run")
    with pytest.raises(Killed):
        model.fit(X, y, groups=groups)
    monkeypatch.setattr(learning, "learn", learn)
    for other in ({"classes": ["ash", "birch"]}, {"loss": "hinge"}):
        with pytest.raises(ResumeError, match="other settings"):
            clone(model).set_params(**other).fit(X, y, groups=groups)
    model.fit(X, y, groups=groups)
    assert np.array_equal(model.representation_, whole.representation_)
    assert model.privacy_.events == whole.privacy_.events
    assert model.classes_.tolist() == whole.classes_.tolist()


# Shapes of data, and scikit-learn


def test_order_of_rows_does_not_matter_and_float32_stays(
    data: tuple[Any, Any, Any], fitted: PrivateFedRepClassifier
) -> None:
    X, y, groups = data
    sort = np.argsort(groups, kind="stable")
    again = clone(fitted).fit(X[sort], y[sort], groups=groups[sort])
    assert np.array_equal(again.representation_, fitted.representation_)
    single = clone(fitted).fit(X.astype(np.float32), y, groups=groups)
    assert np.allclose(single.representation_, fitted.representation_, atol=1e-3)
    named = clone(fitted).fit(pd.DataFrame(X, columns=list("abcdef")), y, groups=[("u", int(g)) for g in groups])
    assert list(named.feature_names_in_) == list("abcdef")


def test_sparse_rows(data: tuple[Any, Any, Any]) -> None:
    X, y, groups = data
    thin = sparse.csr_matrix(np.where(np.abs(X) > 0.5, X, 0.0))
    model = PrivateFedRepClassifier(2, epsilon=50.0, random_state=1).fit(thin, y, groups=groups)
    assert model.score(thin, y, groups=groups) > 0.7
    mine = groups == 3
    head = model.personalize(thin[mine], y[mine])
    assert np.allclose(head.decision_function(thin[mine]), model.decision_function(thin[mine], groups=groups[mine]))


def test_a_hopeless_fit_says_so() -> None:
    X, y, groups = rows(users=30)
    with pytest.warns(NothingLearned, match="not seen to do better than what users can do alone: the loss"):
        PrivateFedRepClassifier(2, epsilon=0.1, classes=range(3), random_state=0).fit(X, y, groups=groups)


def _rows(X: Any) -> int:
    return X.shape[0] if hasattr(X, "shape") else len(np.asarray(X))


class GroupedClassifier(PrivateFedRepClassifier):
    """scikit-learn's checks know nothing of groups, and have fewer users than it takes to name a class: this gives
    every fifth row to one user, and declares the classes that occur, which real data must not."""

    def fit(self, X: Any, y: Any) -> Any:
        return super().fit(X, y, groups=np.arange(_rows(X)) % 5)

    def _declared(self, y: Any) -> Any:
        return check_classes(y.unique().to_pylist())

    def predict(self, X: Any) -> Any:
        return super().predict(X, groups=np.zeros(_rows(X), dtype=int))

    def decision_function(self, X: Any) -> Any:
        return super().decision_function(X, groups=np.zeros(_rows(X), dtype=int))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        from sklearn.metrics import accuracy_score

        return float(accuracy_score(y, self.predict(X), sample_weight=sample_weight))

    @available_if(lambda self: self.loss == "log")
    def predict_proba(self, X: Any) -> Any:
        return super().predict_proba(X, groups=np.zeros(_rows(X), dtype=int))


GROUPED = [GroupedClassifier(rank=1, epsilon=1e4, loss=loss, random_state=0) for loss in ("log", "hinge")]


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(GROUPED)
def test_scikit_learn_checks(estimator: Any, check: Any) -> None:
    """Every check scikit-learn has for classifiers, run on the estimator as it is apart from groups and classes."""
    check(estimator)


@pytest.mark.parametrize("estimator", GROUPED)
def test_it_is_declared_a_classifier_so_that_scikit_learn_checks_it(estimator: Any) -> None:
    tags = get_tags(estimator)
    assert tags.estimator_type == "classifier"
    assert tags.input_tags.sparse
    assert not tags.target_tags.multi_output
    names = {getattr(check, "func", check).__name__ for _, check in estimator_checks_generator(estimator)}
    assert {"check_classifiers_classes", "check_classifiers_train", "check_estimator_sparse_array"} <= names
    assert len(names) > 40


@pytest.mark.parametrize("odd", ["x", 2.5])
def test_one_label_of_another_kind_does_not_change_the_kind_of_all(odd: Any) -> None:
    """NumPy would make text of a list of integers with one text in it: the public list would tell of that one."""
    X, y, groups = rows(100, 2)
    labels = y.tolist()
    labels[3] = odd
    with pytest.raises(ValueError, match=r"label|kind|missing|NaN|None"):
        PrivateFedRepClassifier(2, epsilon=20.0, random_state=1).fit(X, labels, groups=groups)


def test_a_rank_of_0_has_levels_and_common_slopes(data: tuple[Any, Any, Any]) -> None:
    """Nothing is asked about directions, and what that would cost goes to the prior mean."""
    X, y, groups = data
    model = PrivateFedRepClassifier(rank=0, epsilon=3.0, random_state=0).fit(X, y, groups=groups)
    assert model.rank_ == 0
    names = {name.split("/")[0] for name, _ in model.privacy_.events}
    assert {"common-1", "common-3"} <= names
    assert not names & {"moments", "round-scout", "families-0"}
