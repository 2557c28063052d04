"""A method is one file and one line: the registry finds all of it, and callers ask nothing else."""

from __future__ import annotations

import pickle
import pkgutil
import subprocess
import sys

import pytest
from sklearn.base import clone

import privrep
import privrep.linear.methods
from privrep.errors import InputError
from privrep.estimators.regression import Regressor
from privrep.linear import registry
from privrep.linear.method import Method, Problem
from privrep.linear.registry import ESTIMATORS, METHODS, REFUSALS, check_accepted, find_method, find_purposes
from privrep.linear.starts import INITIALISERS


@pytest.mark.parametrize("name", METHODS)
def test_the_registry_finds_all_of_a_method(name: str) -> None:
    method = METHODS[name]
    assert isinstance(method, Method)
    assert method.name == name
    assert f"({name})." in method.title
    assert "numbers" in method.accepts
    assert method.accepts <= {"numbers", "rank 0", *REFUSALS}
    assert (method.own_start in INITIALISERS) == ("start" in method.accepts)
    assert set(method.purposes) <= set(find_purposes())


@pytest.mark.parametrize(("estimator", "name"), ESTIMATORS.items())
def test_every_method_has_an_estimator(estimator: str, name: str) -> None:
    kind = getattr(privrep, estimator)
    assert issubclass(kind, Regressor)
    assert kind.method == name
    assert estimator in dir(privrep)
    assert pickle.loads(pickle.dumps(clone(kind(2, epsilon=3.0)))).get_params() == kind(2, epsilon=3.0).get_params()


def test_every_file_of_a_method_is_registered() -> None:
    files = {each.name for each in pkgutil.iter_modules(privrep.linear.methods.__path__)}
    elsewhere = {"margin_selection", "lipschitz_selection"}  # the registry says why
    registered = {file for file, _ in (*registry._REGISTERED.values(), registry._RATINGS)}
    assert files == registered | elsewhere


def test_ratings_have_a_method_of_their_own() -> None:
    assert find_method("private-fedrep", ratings=True).accepts >= {"ratings", "sparse"}
    with pytest.raises(InputError, match="no configuration of a paper"):
        find_method("private-fedrep", ratings=True).paper(None, 1)


def test_the_paper_takes_a_rank() -> None:
    with pytest.raises(InputError, match="takes a rank"):
        METHODS["centaur"].learn(None, Problem(rank=None, configuration="paper"))


def test_names_are_known_without_loading_a_method() -> None:
    code = (
        "import sys; from privrep.linear.registry import METHODS, name_methods; "
        "assert list(METHODS)[0] in name_methods(); sys.exit('numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("word", REFUSALS)
def test_what_a_method_does_not_accept_is_refused_in_one_sentence(word: str) -> None:
    class Nothing(Method):
        name, title, accepts, purposes = "nothing", "Nothing (nothing).", frozenset({"numbers"}), {}

        def default(self, run, problem): ...

    with pytest.raises(InputError, match=r"nothing .*private-fedrep( or .*)?\.$"):
        check_accepted(Nothing(), [word])
    check_accepted(METHODS["private-fedrep"], [word])


def test_two_meanings_of_one_page_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS["centaur"], "purposes", {"scales": "something else"}, raising=False)
    find_purposes.cache_clear()
    try:
        with pytest.raises(ValueError, match="two purposes of scales"):
            find_purposes()
    finally:
        find_purposes.cache_clear()
