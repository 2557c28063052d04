"""The contract of all estimators: parameters, clones, repr, folders, verbose fits. A new one joins by an entry here."""

from __future__ import annotations

import inspect
import io
import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from sklearn.base import BaseEstimator, clone
from sklearn.exceptions import NotFittedError
from sklearn.utils.estimator_checks import (
    check_get_params_invariance,
    check_no_attributes_set_in_init,
    check_set_params,
    parametrize_with_checks,
)

import privrep
from privrep.data.synthetic import make_population
from privrep.errors import BudgetExceeded, FittedAgain, InputError, WeakPrivacy
from privrep.estimators import progress
from privrep.linear.registry import ESTIMATORS
from privrep.models.inspection import inspect_folder
from privrep.models.verification import verify
from privrep.privacy.accounting import compute_epsilon
from privrep.privacy.billboard import Post
from privrep.privacy.ledger import Budget, Ledger
from privrep.privacy.population import PopulationLedger
from privrep.privacy.shares import Share

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

TORCH = pytest.mark.skipif(torch is None, reason="needs PyTorch")


@cache
def rows() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    table = make_population(rng, 40, 4, 2, 5, 0.1).sample(rng)
    return table.X, table.y, np.repeat(table.ids, table.sizes)


def fit_rows(model: Any) -> Any:
    return model.fit(*rows())


def fit_signs(model: Any) -> Any:
    X, y, groups = rows()
    return model.fit(X, np.where(y > 0, 1, -1), groups)


def fit_ratings(model: Any) -> Any:
    rng = np.random.default_rng(0)
    return model.fit(np.repeat(np.arange(40), 4), rng.integers(0, 5, 160), rng.normal(size=160))


def fit_pairs(model: Any) -> Any:
    from privrep.multimodal.pairs import labelled

    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 40)
    images = (rng.normal(size=(40, 5)) + 2 * np.eye(3, 5)[y]).astype(np.float32)
    return model.fit(labelled(images, y, np.eye(3, 6, dtype=np.float32), [0, 1, 2]))


def encoders() -> tuple[Any, Any]:
    from privrep.multimodal.encoders import Projection

    return Projection(5, 4, 1), Projection(6, 4, 2).requires_grad_(False)


def make_pairs(**options: Any) -> Any:
    from privrep.multimodal.training import ClipSettings

    settings = ClipSettings("bank", steps=3, page=2, rate=0.5, optimiser="sgd")
    return privrep.DPClip(*encoders(), **{"settings": settings, **options})


def predict_rows(model: Any) -> Any:
    X, _, groups = rows()
    return model.predict(X, groups)


@dataclass(frozen=True)
class Kind:
    """How an estimator is made, fitted, read, and what it then says."""

    make: Callable[..., Any]
    fit: Callable[[Any], Any] = fit_rows
    says: Callable[[Any], Any] = predict_rows
    load: Callable[[Path], Any] | None = None  # None: by the class alone


def named(name: str, *given: Any, **options: Any) -> Callable[..., Any]:
    return lambda **more: getattr(privrep, name)(*given, **{**options, **more})


KINDS = {
    **{name: Kind(named(name, 1)) for name in ESTIMATORS},
    "PrivateFedRepClassifier": Kind(named("PrivateFedRepClassifier", 1, classes=[-1, 1]), fit_signs),
    "PrivateFactorization": Kind(
        named("PrivateFactorization", 1, items=range(5)), fit_ratings, lambda model: model.predict([1, 2], [3, 4])
    ),
    "PrivateMarginSelector": Kind(named("PrivateMarginSelector", 1, candidates=8, rounds=2), fit_signs),
    "CentaurRegressor": Kind(named("CentaurRegressor")),
    "Centaur": Kind(named("Centaur", classes=[-1, 1], share="linear", rounds=1), fit_signs),
    "DPClip": Kind(
        make_pairs,
        fit_pairs,
        lambda model: model.images(np.eye(3, 5, dtype=np.float32)),
        lambda folder: privrep.DPClip.load(folder, *encoders()),
    ),
}
MARKED = [pytest.param(name, marks=TORCH if name in ("Centaur", "DPClip") else ()) for name in KINDS]
every = pytest.mark.parametrize("name", MARKED)


def make(name: str, **options: Any) -> Any:
    return KINDS[name].make(**{"epsilon": 4.0, "random_state": 0, **options})


def load(name: str, folder: Path) -> Any:
    read = KINDS[name].load
    return getattr(privrep, name).load(folder) if read is None else read(folder)


def contents(folder: Path) -> dict[str, Any]:
    """Return every file by name; of a page the parts, for the library writes its metadata in a random order."""

    def parts(data: bytes) -> Any:
        end = 8 + int.from_bytes(data[:8], "little")
        return json.loads(data[8:end]), data[end:]

    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {
        name: parts(path.read_bytes()) if path.suffix == ".safetensors" else path.read_bytes()
        for name, path in files.items()
    }


def test_all_estimators_are_here() -> None:
    found = {
        name
        for name in privrep.__all__
        if inspect.isclass(getattr(privrep, name)) and issubclass(getattr(privrep, name), BaseEstimator)
    }
    assert found == {*KINDS} - ({"Centaur", "DPClip"} if torch is None else set())


# Parameters


def values(model: Any) -> dict[str, Any]:
    """Return the parameters, modules by their weights: clones have modules of their own."""
    if torch is None:
        return dict(model.get_params())
    return {
        key: [part.tolist() for part in value.state_dict().values()] if isinstance(value, torch.nn.Module) else value
        for key, value in model.get_params().items()
    }


@every
def test_parameters_are_kept_as_they_were_given(name: str) -> None:
    model = make(name)
    given = inspect.signature(type(model).__init__).parameters
    assert set(model.get_params()) == set(given) - {"self"}
    assert model.get_params(deep=False) == vars(model)
    assert given["verbose"].default is False
    folder = Path("somewhere")
    assert model.set_params(run_folder=folder).run_folder is folder
    with pytest.raises(ValueError, match="Invalid parameter"):
        model.set_params(nonsense=1)


@every
def test_a_clone_is_the_same_and_not_fitted(name: str) -> None:
    model = KINDS[name].fit(make(name))
    again = clone(model)
    assert values(again) == values(model)
    assert vars(again).keys() == again.get_params().keys()
    assert np.array_equal(KINDS[name].says(KINDS[name].fit(again)), KINDS[name].says(model))


@every
def test_its_repr_names_what_differs_from_the_default(name: str) -> None:
    text = repr(make(name))
    assert text.startswith(f"{name}(")
    assert "epsilon=4.0" in text
    assert "run_folder" not in text


@TORCH
@pytest.mark.parametrize(
    "check",
    [check_no_attributes_set_in_init, check_get_params_invariance, check_set_params],
    ids=lambda one: one.__name__,
)
def test_checks_of_parameters_for_pairs(check: Any) -> None:
    """All of scikit-learn's checks that fit no rows: `DPClip` takes pairs, and has two parameters without a default."""
    check("DPClip", make("DPClip"))


# Folders


@every
def test_it_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model = KINDS[name].fit(make(name))
    with pytest.raises((NotFittedError, InputError)):
        make(name).save(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    model.save(tmp_path / "model")
    back = load(name, tmp_path / "model")
    assert type(back) is type(model)
    assert np.array_equal(KINDS[name].says(back), KINDS[name].says(model))
    assert back.privacy_ == model.privacy_
    with pytest.raises(InputError, match="pass overwrite=True"):
        model.save(tmp_path / "model")
    model.save(tmp_path / "model", overwrite=True)
    found = inspect_folder(tmp_path / "model")
    assert found.finished
    assert found.privacy == model.privacy_


@every
def test_before_a_fit_it_says_nothing(name: str) -> None:
    with pytest.raises((NotFittedError, InputError)):
        KINDS[name].says(make(name))


# What is said meanwhile


@every
def test_a_verbose_fit_writes_the_same_bytes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar is drawn on a made-up terminal, and shows something."""
    screen = io.StringIO()
    monkeypatch.setattr("rich.console.Console", lambda **_: Console(file=screen, force_terminal=True, width=100))
    quiet = KINDS[name].fit(make(name, run_folder=tmp_path / "quiet"))
    assert screen.getvalue() == ""
    loud = KINDS[name].fit(make(name, run_folder=tmp_path / "loud", verbose=True))
    assert contents(tmp_path / "loud") == contents(tmp_path / "quiet")
    assert np.array_equal(KINDS[name].says(loud), KINDS[name].says(quiet))
    assert re.search(r"\d+/\d+", screen.getvalue())
    assert repr(loud.privacy_) == repr(quiet.privacy_)


def test_a_bar_is_for_terminals(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.watch(True, 3) as bar:
        assert bar is None
    assert capsys.readouterr() == ("", "")


@every
def test_a_fit_is_logged_page_by_page_and_releases_the_same(
    name: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    model = KINDS[name].fit(make(name))
    assert not caplog.messages
    with caplog.at_level(logging.INFO, logger="privrep"):
        again = KINDS[name].fit(make(name))
    assert np.array_equal(KINDS[name].says(again), KINDS[name].says(model))
    pages = {event.partition("/")[0] for event, _ in model.privacy_.events}
    assert pages <= {message.split()[1].rstrip(":") for message in caplog.messages}
    assert all(re.fullmatch(r"page \S+: epsilon \S+ of 4 spent", message) for message in caplog.messages)
    assert {record.name.partition(".")[0] for record in caplog.records} == {"privrep"}
    assert capsys.readouterr() == ("", "")


@every
def test_a_budget_that_promises_nothing_is_remarked_on(name: str) -> None:
    with pytest.warns(WeakPrivacy, match="epsilon 1e\\+06 is a weak promise") as caught:
        KINDS[name].fit(make(name, epsilon=1e6))
    weak = [warning for warning in caught if warning.category is WeakPrivacy]
    assert len(weak) == 1
    if name != "CentaurRegressor":  # its fit calls the one of tables
        assert weak[0].filename == __file__
    assert "inf" not in str(weak[0].message)


# Fits of the same users


@dataclass(frozen=True)
class People:
    """A population's ledger with room for one fit and a half, and estimators that draw from it."""

    ledger: PopulationLedger
    folder: Path

    def make(self, name: str, folder: str = "run", **options: Any) -> Any:
        drawn = {
            "delta": 1e-6,
            "random_state": None,
            "population": self.ledger.path,
            "run_folder": self.folder / folder,
        }
        return make(name, **{**drawn, **options})

    @property
    def shares(self) -> list[Share]:
        return list(self.ledger.read().shares.values())


@pytest.fixture
def people(tmp_path: Path) -> People:
    return People(PopulationLedger.create(tmp_path / "people.db", epsilon=5.0, delta=1e-6), tmp_path)


def fit_nothing(name: str, model: Any) -> None:
    """Fit what is no data: an error about the budget came before any row was looked at."""
    given = {"PrivateFactorization": (None, None, None), "Centaur": (None, [1], [0]), "DPClip": ()}
    if name == "DPClip":
        fit_pairs(model)  # pairs, of which sizes are public
        return
    model.fit(*given.get(name, (None, None, [0])))


@every
def test_a_fit_draws_from_a_population_and_its_books_name_it(name: str, people: People) -> None:
    model = KINDS[name].fit(people.make(name))
    (share,) = people.shares
    assert (share.status, share.users) == ("finished", 40)
    assert share.what == f"{name}, run folder {people.folder / 'run'}"
    assert share.events == tuple(event for _, event in model.privacy_.events)
    assert share.epsilon == pytest.approx(model.privacy_.epsilon)
    assert model.privacy_.population == (people.ledger.name, share.run)
    for folder in (people.folder / "run", people.folder / "saved"):
        if folder.name == "saved":
            model.save(folder)
        told = inspect_folder(folder).to_json()
        assert told["population"] == {"ledger": people.ledger.name, "run": share.run}
        assert people.ledger.name in told["summary"]["population"]
        assert any(f"population ledger {people.ledger.name}" in each for each in told["words"]["What is not protected"])
        found = verify(folder)
        assert found.good
        assert f"run {share.run} draws from population ledger {people.ledger.name}" in found.findings[-1].words


@every
def test_a_fit_over_what_is_left_is_refused_before_a_row_is_read(name: str, people: People) -> None:
    people.ledger.reserve("another", Budget(3.0, 1e-6), "another run")
    before = people.ledger.path.read_bytes()
    with pytest.raises(BudgetExceeded, match="the population's budget has no room for this run: epsilon 5 at delta"):
        fit_nothing(name, people.make(name))
    assert people.ledger.path.read_bytes() == before
    assert not (people.folder / "run").exists()


@every
def test_a_simulation_draws_from_no_population(name: str, people: People) -> None:
    with pytest.raises(InputError, match="a simulation is not private, so it draws nothing from a population ledger"):
        fit_nothing(name, people.make(name, random_state=0))
    assert people.shares == []
    assert not (people.folder / "run").exists()


@every
def test_a_fit_that_was_stopped_goes_on_with_its_reservation(
    name: str, people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Ledger.record_posted

    def stop(ledger: Ledger, page: Post, events: Any = None) -> None:
        if events:
            raise KeyboardInterrupt
        record(ledger, page)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "record_posted", stop)
        with pytest.raises(KeyboardInterrupt):
            KINDS[name].fit(people.make(name))
    assert [share.status for share in people.shares] == ["open"]
    assert people.ledger.read().epsilon == pytest.approx(4.0, rel=1e-4)
    with pytest.raises(InputError, match=r"draws from the population ledger .*name its file"):
        KINDS[name].fit(people.make(name, population=None))
    with pytest.raises(BudgetExceeded, match="1 open runs hold a part of it"):
        KINDS[name].fit(people.make(name, "another"))
    model = KINDS[name].fit(people.make(name))
    (share,) = people.shares
    assert (share.status, share.events) == ("finished", tuple(event for _, event in model.privacy_.events))


@every
def test_a_process_that_fits_the_same_users_again_is_told_the_sum(name: str) -> None:
    model = KINDS[name].fit(make(name, random_state=None))
    KINDS[name].fit(make(name))  # a simulation is no fit of theirs
    with pytest.warns(FittedAgain, match="this process has made 2 fits of users with these ids") as caught:
        again = KINDS[name].fit(make(name, random_state=None))
    (told,) = [str(each.message) for each in caught if each.category is FittedAgain]
    events = [event for _, event in (*model.privacy_.events, *again.privacy_.events)]
    total, found = compute_epsilon(events, model.privacy_.delta), re.search(r"up to epsilon ([\d.]+) at", told)
    assert found
    assert total <= float(found[1]) <= total + 1e-3  # rounded up to four digits
    assert f"at delta {model.privacy_.delta:g}, not {again.privacy_.epsilon:.4g}." in told
    assert total > again.privacy_.epsilon


# The checks of scikit-learn. Those of tables are in test_estimators.py and test_classifier.py


def _count(X: Any) -> int:
    return X.shape[0] if hasattr(X, "shape") else len(np.asarray(X))


class GroupedClasses:
    """scikit-learn's checks know nothing of groups, and declare no classes: this gives every fifth row to one user, and
    declares the classes that occur, which real data must not."""

    def fit(self, X: Any, y: Any) -> Any:
        declared: Any = self.classes  # type: ignore[has-type]
        try:
            if y is not None and len(found := np.unique(np.asarray(y)).tolist()):
                other = f"not {found[0]}" if isinstance(found[0], str) else found[0] + 1
                self.classes = found if len(found) > 1 else [*found, other]
            return super().fit(X, y, groups=np.arange(0 if X is None else _count(X)) % 5)  # type: ignore[misc]
        finally:
            self.classes = declared

    def predict(self, X: Any, groups: Any = None) -> Any:
        return super().predict(X, groups=np.zeros(_count(X), dtype=int))  # type: ignore[misc]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        from sklearn.metrics import accuracy_score

        return float(accuracy_score(y, self.predict(X), sample_weight=sample_weight))


class GroupedSelector(GroupedClasses, privrep.PrivateMarginSelector):
    def decision_function(self, X: Any, groups: Any = None) -> Any:
        return super().decision_function(X, groups=np.zeros(_count(X), dtype=int))


class GroupedNumbers(privrep.CentaurRegressor):
    def fit(self, X: Any, y: Any) -> Any:
        return super().fit(X, y, groups=np.arange(_count(X)) % 5)

    def predict(self, X: Any) -> Any:
        return super().predict(X, groups=np.zeros(_count(X), dtype=int))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        from sklearn.metrics import r2_score

        return float(r2_score(y, self.predict(X), sample_weight=sample_weight))


CHECKED: list[Any] = [
    GroupedSelector(1, epsilon=1e3, random_state=0, candidates=16, rounds=1),
    GroupedNumbers(rank=1, epsilon=1e4, random_state=0),
]
if torch is not None:

    class GroupedCentaur(GroupedClasses, privrep.Centaur):
        def predict_proba(self, X: Any, groups: Any = None) -> Any:
            return super().predict_proba(X, groups=np.zeros(_count(X), dtype=int))

    CHECKED.append(GroupedCentaur(epsilon=1e3, random_state=0, share="linear", rounds=1))

OWN = "it is refused in a sentence of privrep's own"
DECLARED = "classes are declared: this class declares whatever occurs, and users' labels outside them are left out"
EXCEPTIONS: dict[str, dict[str, str]] = {
    "GroupedSelector": {
        "check_classifier_not_supporting_multiclass": f"{OWN}; and {DECLARED}",
        "check_classifiers_regression_target": DECLARED,
    },
    "GroupedNumbers": {
        "check_fit2d_predict1d": OWN,
        "check_n_features_in_after_fitting": OWN,
        "check_dtype_object": f"{OWN}, a ValueError where the check wants a TypeError",
        "check_estimators_empty_data_messages": OWN,
    },
    "GroupedCentaur": {
        "check_n_features_in_after_fitting": OWN,
        "check_dtype_object": f"{OWN}, a ValueError where the check wants a TypeError",
        "check_supervised_y_2d": f"{OWN}; a column of labels is no list of them",
        "check_fit2d_1sample": OWN,
        "check_fit2d_predict1d": OWN,
        "check_estimators_empty_data_messages": OWN,
        "check_requires_y_none": OWN,
        "check_classifier_data_not_an_array": "labels are read one by one, so that no type is common to all users'",
        "check_classifiers_regression_target": DECLARED,
    },
}
"""The checks of scikit-learn that do not apply, and why."""


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(CHECKED, expected_failed_checks=lambda estimator: EXCEPTIONS[type(estimator).__name__])
def test_scikit_learn_checks(estimator: Any, check: Any) -> None:
    """Every check scikit-learn has for such estimators, run on them as they are apart from groups and classes."""
    check(estimator)
