"""Zero-shot accuracy, retrieval, a linear probe and the membership check, on cases whose answers are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from experiments.membership import largest_advantage, membership, pair_scores, unit_scores

from privrep.errors import InputError
from privrep.multimodal.evaluation import linear_probe, retrieval, zero_shot


def test_zero_shot_takes_the_mean_of_unit_prompts():
    texts = np.array([[1.0, 0.0], [0.0, 9.0], [-1.0, 0.1]])  # the first two are one class: its direction is (1, 1)
    images = np.array([[5.0, 4.0], [0.1, 0.2], [-3.0, 1.0]])
    found = zero_shot(images, texts, [0, 0, 1], np.array([0, 1, 1]))
    assert found.predicted.tolist() == [0, 0, 1]
    assert found.accuracy == pytest.approx(2 / 3)
    long = zero_shot(np.array([[0.99, -0.1]]), np.array([[1.0, 0], [0, 9.0], [0.8, -0.7]]), [0, 0, 1], np.array([0]))
    assert long.predicted.tolist() == [1]


def test_retrieval_counts_ranks_both_ways():
    images = np.eye(3)
    texts = np.array([[1, 0.1, 0], [0.5, 1, 0], [0, 1, 0.5], [0, 0.1, 1.0], [0.2, 1, 0], [0.9, 0, 1]])
    owner = [0, 0, 1, 1, 2, 2]
    found = retrieval(images, texts, owner, at=(1, 2, 3, 4))
    # own ranks of the texts among the images: 1, 2, 1, 2, 3, 1
    assert found.text_to_image == {1: 3 / 6, 2: 5 / 6, 3: 1.0, 4: 1.0}
    # best own text of each image: first for image 0; for image 1 its 0.894 comes after 0.981 and, at 0.894, an equal;
    # for image 2 its 0.743 comes after 0.995
    assert found.image_to_text == {1: 1 / 3, 2: 2 / 3, 3: 1.0, 4: 1.0}


def test_collapsed_embeddings_find_nothing():
    found = retrieval(np.ones((20, 4)), np.ones((40, 4)), np.repeat(np.arange(20), 2))
    assert found.image_to_text == found.text_to_image == {1: 0.0, 5: 0.0, 10: 0.0}


def test_retrieval_is_the_same_in_blocks(monkeypatch):
    rng = np.random.default_rng(3)
    images, texts, owner = rng.normal(size=(12, 5)), rng.normal(size=(36, 5)), np.repeat(np.arange(12), 3)
    texts += images[owner]
    whole = retrieval(images, texts, owner)
    monkeypatch.setattr("privrep.multimodal.evaluation._AT_A_TIME", 30)
    assert retrieval(images, texts, owner) == whole
    assert 0.1 < whole.image_to_text[1] < 1


def test_a_linear_probe_finds_what_is_linear_at_any_scale():
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 3, 200)
    rows = (np.eye(3)[labels] * 3 + rng.normal(size=(200, 3))) * [1e-4, 1.0, 1e4]
    assert linear_probe(rows[:150], labels[:150], rows[150:], labels[150:]) > 0.85
    mixed = rng.permutation(labels)
    assert linear_probe(rows[:150], mixed[:150], rows[150:], mixed[150:]) < 0.6


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: zero_shot(np.ones((2, 3)), np.ones((2, 4)), [0, 1], np.array([0, 1])), "one size"),
        (lambda: zero_shot(np.ones((2, 3)), np.ones((2, 3)), [0, 2], np.array([0, 1])), "numbered from 0"),
        (lambda: zero_shot(np.ones((2, 3)), np.ones((2, 3)), [0, 1], np.array([0])), "labels"),
        (lambda: zero_shot(np.full((2, 3), np.nan), np.ones((2, 3)), [0, 1], np.array([0, 1])), "finite"),
        (lambda: zero_shot(np.ones((1, 3)), np.ones((0, 3)), np.zeros(0, int), np.array([0])), "give both"),
        (lambda: retrieval(np.ones((2, 3)), np.ones((2, 3)), [0, 0]), "at least once"),
        (lambda: membership(np.ones(5), np.ones(50), 1.0, 0.0), "score more units"),
        (lambda: membership(np.ones(50), np.ones(50), -1.0, 0.0), "epsilon"),
        (lambda: pair_scores(np.ones((2, 3)), np.ones((3, 3))), "one text"),
        (lambda: unit_scores(np.ones(3), ["a"]), "users"),
    ],
)
def test_what_cannot_be_measured_is_refused(make, said):
    with pytest.raises(InputError, match=said):
        make()


def test_scores_are_cosines_or_losses_against_the_bank():
    images, texts, bank = np.array([[2.0, 0], [1, 1]]), np.array([[3.0, 0], [0, 1]]), np.array([[0.0, 1]])
    assert pair_scores(images, texts) == pytest.approx([1, math.sqrt(0.5)])
    half = math.log(2)
    expected = [-math.log1p(math.exp(-2)), -half]
    assert pair_scores(images, texts, bank, temperature=0.5) == pytest.approx(expected)
    assert unit_scores(np.array([1.0, 2, 6]), ["b", "a", "b"]).tolist() == [2, 3.5]


def test_the_largest_advantage():
    assert largest_advantage(0, 0) == 0
    assert largest_advantage(1, 0) == pytest.approx((math.e - 1) / (math.e + 1))
    assert largest_advantage(2, 0.1) == pytest.approx((math.exp(2) - 1 + 0.2) / (math.exp(2) + 1))
    assert largest_advantage(1000, 0) == 1


def test_randomised_response_at_the_bound_is_compatible_and_beyond_it_is_not():
    """Scores that are a coin of bias e^eps/(1 + e^eps) reach the bound: at eps 2, of 2,000 units, the interval at
    1 - 2e-6 misses the truth with probability 2e-6 at most; a claim of eps 1 (0.462) is 20 deviations off."""
    rng = np.random.default_rng(7)
    inside, outside = ((rng.random(2_000) < p).astype(float) for p in (0.8808, 0.1192))
    right = membership(inside, outside, 2.0, 0.0, confidence=1 - 2e-6)
    assert right.low < largest_advantage(2, 0) < right.high
    assert right.compatible
    assert "compatible" in right.describe()
    wrong = membership(inside, outside, 1.0, 0.0, confidence=1 - 2e-6)
    assert not wrong.compatible
    assert "MORE THAN ALLOWED" in wrong.describe()


def test_encoders_that_memorise_are_found_out_and_others_are_not():
    """Members' texts lie at their images' embeddings, as if learned by heart: advantage 1. Without a leak the interval
    at 1 - 2e-6 holds zero."""
    rng = np.random.default_rng(11)
    images, texts = rng.normal(size=(600, 16)), rng.normal(size=(600, 16))
    learned = texts.copy()
    learned[:300] = images[:300] + 0.3 * texts[:300]
    leaked = pair_scores(images, learned)
    found = membership(leaked[:300], leaked[300:], 1.0, 1e-5, confidence=1 - 2e-6)
    assert found.auc > 0.99
    assert found.true_positives > 0.9
    assert found.advantage > 0.9
    assert not found.compatible
    fresh = pair_scores(images, texts)
    nothing = membership(fresh[:300], fresh[300:], 1.0, 1e-5, confidence=1 - 2e-6)
    assert nothing.low < 0 < nothing.high
    assert nothing.compatible
    assert abs(nothing.auc - 0.5) < 5 / math.sqrt(12 * 150)  # 5 deviations: 6e-7
    assert nothing.true_positives < 0.1


def test_auc_and_the_rate_at_one_percent_on_known_scores():
    inside, outside = np.arange(100.0), np.arange(100.0)
    same = membership(inside, outside, 1.0, 0.0)
    assert same.auc == pytest.approx(0.5)
    assert same.true_positives == 0.01  # one of the others lies above 98, and so does one member
    constant = membership(np.ones(40), np.ones(40), 0.0, 0.0)
    assert constant.auc == 0.5
    assert constant.true_positives == constant.advantage == 0
