"""The bounds have the slopes the paper states."""

from __future__ import annotations

from dataclasses import replace

import pytest
from experiments.theory import Problem, excess_risk, lemma_9, lemma_12, theorem_10

FIGURE_1 = Problem(20_000, 50, 2, 10, 0.01, 1.0, 0.5**0.5, 0.5**0.5)


def ratio(bound, term, **change):
    """By how much a term grows when a quantity of the problem is multiplied."""
    changed = replace(FIGURE_1, **{name: getattr(FIGURE_1, name) * by for name, by in change.items()})
    return getattr(bound(changed), term) / getattr(bound(FIGURE_1), term)


@pytest.mark.parametrize(
    ("change", "privacy", "sampling", "rest"),
    [
        ({"users": 2}, 1 / 4, 1 / 2, 1),
        ({"features": 2}, 4, 2, 1),
        ({"rank": 2}, 2, 1, 2),
        ({"rows": 2}, 1, 1 / 2, 1 / 2),
        ({"sigma_max": 2}, 4, 4, 1),
        ({"sigma_min": 0.5}, 64, 64, 1),
    ],
)
def test_theorem_10(change, privacy, sampling, rest):
    for term, expected in (("privacy", privacy), ("sampling", sampling), ("rest", rest)):
        assert ratio(lambda p: theorem_10(p, 1.0), term, **change) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("change", "privacy", "sampling"),
    [
        ({"users": 2}, 1 / 2, 2**-0.5),
        ({"features": 4}, 8, 2),
        ({"rank": 2}, 1, 1),
        ({"rows": 4}, 1, 1 / 2),
        ({"sigma_min": 0.5}, 4, 4),
    ],
)
def test_lemma_12(change, privacy, sampling):
    assert ratio(lambda p: lemma_12(p, 1.0), "privacy", **change) == pytest.approx(privacy)
    assert ratio(lambda p: lemma_12(p, 1.0), "sampling", **change) == pytest.approx(sampling)


@pytest.mark.parametrize(
    ("change", "privacy", "sampling"),
    [({"users": 4}, 1 / 4, 1 / 2), ({"features": 4}, 4, 2), ({"rank": 4}, 2, 1), ({"rows": 4}, 1, 1 / 2)],
)
def test_lemma_9(change, privacy, sampling):
    assert ratio(lambda p: lemma_9(p, 1.0, 5), "privacy", **change) == pytest.approx(privacy)
    assert ratio(lambda p: lemma_9(p, 1.0, 5), "sampling", **change) == pytest.approx(sampling)


def test_lemma_9_contracts_and_pays_for_its_rounds():
    few, many = lemma_9(FIGURE_1, 1.0, 5), lemma_9(FIGURE_1, 1.0, 20)
    assert many.rest < few.rest < 0.5
    assert many.privacy == pytest.approx(2 * few.privacy)
    assert lemma_9(FIGURE_1, 1.0, 0).rest == 0.5
    assert lemma_9(FIGURE_1, 1.0, 5, step=2.0).rest < few.rest  # eta defaults to 1/(2 sigma_max^2) = 1


def test_epsilon():
    assert theorem_10(FIGURE_1, 2.0).privacy == pytest.approx(theorem_10(FIGURE_1, 1.0).privacy / 4)
    assert lemma_12(FIGURE_1, 2.0).privacy == pytest.approx(lemma_12(FIGURE_1, 1.0).privacy / 2)
    assert lemma_9(FIGURE_1, 2.0, 5).privacy == pytest.approx(lemma_9(FIGURE_1, 1.0, 5).privacy / 2)


def test_known_value():
    """Figure 1's setting by hand: sigma^2 = 1/2, so c = (1 + 1e-4) * 4, and d^2 k / n^2 = 1.25e-5."""
    terms = theorem_10(FIGURE_1, 1.0)
    assert terms.privacy == pytest.approx(4 * 1.0001 * 1.25e-5)
    assert terms.sampling == pytest.approx(4 * 1.0001 * 2.5e-4)
    assert terms.rest == pytest.approx(2e-5)
    assert terms.total == pytest.approx(terms.privacy + terms.sampling + terms.rest)


def test_excess_risk_of_a_distance():
    assert excess_risk(FIGURE_1, 0.1) == pytest.approx(0.01)
    assert excess_risk(FIGURE_1, 7.0) == 1.0  # a sine is at most one
