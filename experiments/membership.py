"""A membership-inference check: can one tell from trained encoders who was in the training data?

Not private: computed on data. It can cast doubt on a stated epsilon; that it finds nothing proves nothing.

What (epsilon, delta)-privacy allows: a test of one unit has true positive rate <= e^eps * false positive rate + delta,
and the same with the complements, so their difference (the advantage) is at most (e^eps - 1 + 2 delta)/(e^eps + 1),
reached where the two rates add up to one. The bound is on the mean over training runs, of two candidates for a seat one
of whom was trained on. One run with many seats stands for many runs if a coin decided in every seat, which is the
caller's statement: then each seat's advantage, given the encoders and all other coins, has a mean within the bound
(as in Steinke, Nasr, Jagielski 2023). The interval takes the guesses about different units as independent.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp
from scipy.stats import beta, rankdata

from privrep.data.table import factorize
from privrep.errors import InputError
from privrep.multimodal.evaluation import normalise_rows
from privrep.typing import Array

FALSE_POSITIVES = 0.01
FEWEST = 20  # units of each kind


@dataclass(frozen=True)
class Membership:
    """What an attack by a threshold on scores achieved, and what privacy allows.

    The threshold is chosen on every second unit and measured on the others, which the interval is about.
    """

    auc: float
    true_positives: float  # the rate at a false positive rate of 1%
    advantage: float  # true minus false positive rate at the best threshold
    low: float  # Clopper-Pearson bounds of both rates, combined, at `confidence`
    high: float
    confidence: float
    allowed: float  # the largest advantage that (epsilon, delta)-privacy allows
    epsilon: float
    delta: float

    @property
    def balanced_accuracy(self) -> float:
        return (1 + self.advantage) / 2

    @property
    def compatible(self) -> bool:
        """Whether the advantage may be one that the stated epsilon allows; if not, do not trust the statement."""
        return self.low <= self.allowed

    def describe(self) -> str:
        verdict = "compatible with" if self.compatible else "MORE THAN ALLOWED BY"
        return (
            f"membership advantage {self.advantage:.3f} ({self.low:.3f} to {self.high:.3f} at {self.confidence:.1%}), "
            f"AUC {self.auc:.3f}, {self.true_positives:.1%} found at 1% false alarms: {verdict} epsilon "
            f"{self.epsilon:g}, which allows {self.allowed:.3f}"
        )


def pair_scores(
    image_embeddings: NDArray[Any],
    text_embeddings: NDArray[Any],
    bank_embeddings: NDArray[Any] | None = None,
    temperature: float = 0.07,
) -> Array:
    """How well the encoders know each pair: the cosine of image and text, or minus the loss against a bank of texts."""
    images, texts = normalise_rows(image_embeddings, "images"), normalise_rows(text_embeddings, "texts")
    if images.shape != texts.shape:
        raise InputError(f"every image needs one text of its size. Got shapes {images.shape} and {texts.shape}.")
    own = np.asarray((images * texts).sum(axis=1))
    if bank_embeddings is None:
        return own
    if temperature <= 0:
        raise InputError(f"temperature must be positive. Got {temperature} instead.")
    others = images @ normalise_rows(bank_embeddings, "the bank").T / temperature
    everything = np.concatenate([own[:, None] / temperature, others], axis=1)
    return np.asarray(own / temperature - logsumexp(everything, axis=1))


def unit_scores(scores: NDArray[Any], users: Sequence[Hashable] | NDArray[Any]) -> Array:
    """The mean score of each user's pairs, users in the order of their ids: one number for each unit of privacy."""
    ids, codes = factorize(users)
    if len(codes) != len(scores):
        raise InputError(f"users must name the user of each of {len(scores):,} pairs. Got {len(codes):,} instead.")
    totals = np.bincount(codes, np.asarray(scores, dtype=np.float64), len(ids))
    return np.asarray(totals / np.bincount(codes, minlength=len(ids)))


def membership(
    members: NDArray[Any], others: NDArray[Any], epsilon: float, delta: float, confidence: float = 0.999
) -> Membership:
    """Compare scores of units that were trained on with scores of units that were not, one for each unit of privacy.

    Higher scores are taken to speak for membership.
    """
    inside, outside = _scores(members, "members"), _scores(others, "others")
    if not (epsilon >= 0 and 0 <= delta <= 1 and 0 < confidence < 1):
        raise InputError("epsilon must be at least 0, delta between 0 and 1, confidence strictly so; correct them.")
    threshold = _best_threshold(inside[::2], outside[::2])
    hits, alarms = inside[1::2] >= threshold, outside[1::2] >= threshold
    found, false = (_interval(int(x.sum()), len(x), (1 - confidence) / 2) for x in (hits, alarms))
    ranks = rankdata(np.concatenate([inside, outside]))[: len(inside)]
    pairs = len(inside) * len(outside)
    strict = np.sort(outside)[::-1][int(FALSE_POSITIVES * len(outside))]  # at most so many others lie above it
    return Membership(
        auc=float((ranks.sum() - len(inside) * (len(inside) + 1) / 2) / pairs),
        true_positives=float((inside > strict).mean()),
        advantage=float(hits.mean() - alarms.mean()),
        low=found[0] - false[1],
        high=found[1] - false[0],
        confidence=confidence,
        allowed=largest_advantage(epsilon, delta),
        epsilon=epsilon,
        delta=delta,
    )


def largest_advantage(epsilon: float, delta: float) -> float:
    """(e^eps - 1 + 2 delta)/(e^eps + 1), at most 1."""
    half = math.tanh(epsilon / 2)  # (e^eps - 1)/(e^eps + 1)
    return min(half + delta * (1 - half), 1.0)


def _scores(values: NDArray[Any], what: str) -> Array:
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1 or not np.isfinite(found).all() or len(found) < FEWEST:
        raise InputError(f"{what} must be {FEWEST} or more finite scores. Got shape {found.shape}; score more units.")
    return found


def _best_threshold(inside: Array, outside: Array) -> float:
    """The score from which on to guess membership, of largest advantage."""
    levels = np.unique(np.concatenate([inside, outside]))
    above = [1 - np.searchsorted(np.sort(scores), levels, side="left") / len(scores) for scores in (inside, outside)]
    return float(levels[np.argmax(above[0] - above[1])])


def _interval(successes: int, trials: int, error: float) -> tuple[float, float]:
    """Clopper-Pearson: the rate lies outside with probability `error` at most."""
    low = float(beta.ppf(error / 2, successes, trials - successes + 1)) if successes else 0.0
    high = float(beta.ppf(1 - error / 2, successes + 1, trials - successes)) if successes < trials else 1.0
    return low, high
