"""Weak budgets, and budgets that were not spent, are remarked upon in one place."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from privrep import PrivateFactorization, PrivateFedRep, PrivateFedRepClassifier, PrivateMarginSelector, WeakPrivacy
from privrep.models.promise import describe_rest, find_weaknesses
from privrep.models.sections import describe_meaning
from privrep.privacy.events import Gaussian, Pure, Relation, Selection
from privrep.privacy.ledger import Budget, Ledger, noise_multiplier
from privrep.privacy.report import PrivacyReport

REPLACE: Relation = "replace-one-user"
ADD: Relation = "add-or-remove-one-user"


@pytest.mark.parametrize(
    ("epsilon", "delta", "relation", "users", "said"),
    [
        (1.0, 1e-6, REPLACE, 1000, []),
        (20.0, 1e-6, REPLACE, 1000, []),
        (21.0, 1e-6, REPLACE, 1000, ["epsilon 21 is a weak promise"]),
        (1e4, 1e-6, ADD, 1000, ["epsilon 10000"]),
        (1.0, 1e-3, REPLACE, 999, []),
        (1.0, 1e-3, REPLACE, 1000, ["delta 0.001 is a weak promise to 1,000 users"]),
        (1.0, 1e-4, ADD, 10**9, []),
        (1.0, 2e-4, ADD, 10, ["delta 0.0002 is a weak promise: keep it"]),
        (30.0, 0.01, REPLACE, 200, ["epsilon 30", "delta 0.01"]),
        (1.0, 0.0, REPLACE, 200, []),
    ],
)
def test_weak_budgets(epsilon: float, delta: float, relation: Relation, users: int, said: list[str]) -> None:
    found = find_weaknesses(epsilon, delta, relation, users)
    assert len(found) == len(said)
    for sentence, begins in zip(found, said, strict=True):
        assert sentence.startswith(begins)
        assert "\n" not in sentence


def test_what_no_number_says_is_said_in_words() -> None:
    ledger = Ledger(Budget(1e6, 1e-6))
    ledger.charge({"a/b": Gaussian(1e-3)})
    said = describe_meaning(ledger.report())
    assert "inf" not in said
    times = int(said.partition("at most e^")[2].partition(" ")[0].replace(",", ""))
    assert times >= ledger.report().epsilon > 500
    assert said.endswith("No limit of that size protects anybody.")
    (weak,) = find_weaknesses(1e6, 1e-6, REPLACE, 100, "pair")
    assert "one pair may make an outcome any number of times as likely" in weak


def made(rows: int = 4, users: int = 120) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((rows * users, 3))
    return X, X[:, 0] + rng.standard_normal(rows * users), np.repeat(np.arange(users), rows)


def warned(fit: object, *arguments: object) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(*arguments)  # type: ignore[operator]
    weak = [warning for warning in caught if warning.category is WeakPrivacy]
    assert all(warning.filename == __file__ for warning in weak)  # it points at whoever called fit
    return [str(warning.message) for warning in weak]


def test_fits_of_tables_warn() -> None:
    X, y, users = made()
    assert warned(lambda: PrivateFedRep(rank=1, epsilon=1.0, random_state=0).fit(X, y, users)) == []
    for estimator, target in (
        (PrivateFedRep(rank=1, epsilon=50.0, delta=0.009, random_state=0), y),
        (PrivateFedRepClassifier(rank=1, epsilon=50.0, delta=0.009, classes=[0, 1], random_state=0), (y > 0) * 1),
    ):
        found = warned(lambda estimator=estimator, target=target: estimator.fit(X, target, users))
        assert [sentence.split()[0] for sentence in found] == ["epsilon", "delta"]
        assert "120 users" in found[1]
    hidden = PrivateFedRep(rank=1, epsilon=1.0, delta=0.009, relation="add-or-remove-one-user", random_state=0)
    (said,) = warned(lambda: hidden.fit(X, y, users))
    assert "120" not in said
    ratings = PrivateFactorization(1, epsilon=50.0, items=[0, 1, 2], random_state=0)
    assert len(warned(lambda: ratings.fit(users, np.arange(len(users)) % 3, y))) == 1
    chosen = PrivateMarginSelector(1, epsilon=50.0, candidates=8, rounds=1, random_state=0)
    assert len(warned(lambda: chosen.fit(X, np.where(y > 0, 1, -1), users))) == 1


def report_of(share: float, *, selection: bool = False) -> PrivacyReport:
    ledger = Ledger(Budget(1.0, 1e-6))
    if selection:
        ledger.charge({"keys-1/keys": Selection(noise_multiplier(0.05 * ledger.budget.mu**2), 4e-7)})
    if share:
        ledger.charge({"scales/sizes": Gaussian(noise_multiplier(share * ledger.remaining))})
    return ledger.report()


def test_what_was_left_is_the_share_of_mu_squared() -> None:
    assert report_of(0.3).unspent == pytest.approx(0.7, rel=1e-6)
    assert report_of(1.0).unspent == pytest.approx(0.0, abs=1e-6)
    assert report_of(0.0).unspent == 1.0
    assert report_of(1.0, selection=True).unspent == pytest.approx(0.0, abs=1e-6)
    pure = Ledger(Budget(2.0, 0.0))
    pure.charge({"choice/choice": Pure(0.5)})
    assert pure.report().unspent == pytest.approx(0.75)


def test_a_fit_that_stopped_early_says_so() -> None:
    assert describe_rest(report_of(0.99)) == ""
    assert "It stopped early: 40% of the budget was not spent (of mu², in which releases add up" in describe_rest(
        report_of(0.6)
    )
