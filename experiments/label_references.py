"""References for labels: what a statistician does without privacy, and what an analyst does with it.

All but `noisy_logistic` are NOT PRIVATE. Each takes a `LabelTask` and returns `Probabilities`. Users of the training
rows are predicted from their training rows, newcomers from their support rows, and strangers, who are the same
newcomers, from no row at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, gammaln, logit, softmax
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from experiments.label_data import LabelTask
from experiments.label_heads import fit_heads, own_probabilities, say_heads
from experiments.table_references import sums_by_user
from experiments.tables_data import Mask
from privrep.privacy.ledger import Budget
from privrep.typing import Array, Integers

BINS = 15  # of the calibration error
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # one over the ridge of pooled regressions, on standardised columns
HELD = 0.2  # of users, on whom the ridge is chosen
RIDGES = (0.3, 1.0, 3.0, 10.0, 100.0)  # of users' own regressions, on standardised columns
LEVEL_RIDGES = (0.1, 0.5)  # of their intercepts
ORACLE_RIDGES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of heads on the true U
LEAST = 1e-12  # probability
GRADIENTS, STEP, CLIP = 25, 2.0, 1.0  # of the analyst's descent
SPREADS, USUAL = (0.3, 0.7, 1.5, 3.0), 2  # of levels on the logit, among which the analyst chooses, and the middle one
SPREAD_SHARE = 0.1  # of the analyst's mu^2, for that choice
LARGEST = 4.0  # standardised value to which the analyst clips columns
WORST = 0.5  # difference of losses to which the analyst clips


@dataclass(frozen=True)
class Quality:
    """How good probabilities are."""

    log_loss: float
    accuracy: float
    ece: float  # expected calibration error

    @classmethod
    def of(cls, said: Array, y: Array) -> Quality:
        """Measure probabilities (rows, classes) by codes (rows,) of what came.

        The calibration error has 15 equal bins of the second of two classes, or of the most probable of several.
        """
        codes = y.astype(np.int64)
        right = said.argmax(axis=1) == codes
        shown, came = (said[:, 1], codes == 1) if said.shape[1] == 2 else (said.max(axis=1), right)
        bins = np.minimum((shown * BINS).astype(np.int64), BINS - 1)
        gaps = np.bincount(bins, shown - came, BINS)
        losses = -np.log(np.maximum(said[np.arange(len(codes)), codes], LEAST))
        return cls(float(losses.mean()), float(right.mean()), float(np.abs(gaps).sum() / len(codes)))


@dataclass(frozen=True)
class Probabilities:
    """What a reference says of the rows that it did not see: (rows, classes) each."""

    test: Array  # of `task.test`, in the order of the rows
    newcomers: Array  # of `task.newcomers`, by what `task.support` says
    strangers: Array  # of `task.newcomers`, as if `task.support` were empty

    def qualities(self, task: LabelTask) -> tuple[Quality, Quality, Quality]:
        """Measure test rows, newcomers and strangers."""
        known, new = task.y[task.test], task.y[task.newcomers]
        return Quality.of(self.test, known), Quality.of(self.newcomers, new), Quality.of(self.strangers, new)


def count_labels(task: LabelTask, rows: Mask) -> Array:
    """Return (users, classes): how often each user has each label in these rows."""
    return sums_by_user(np.eye(task.classes)[task.y[rows].astype(np.int64)], task.codes[rows], task.n_users)


def fit_dirichlet(counts: Array) -> Array:
    """Return (classes,) alpha of a Dirichlet-multinomial of users' counts (users, classes), by maximum likelihood."""
    kinds, times = np.unique(counts[counts.sum(axis=1) > 0], axis=0, return_counts=True)
    totals = kinds.sum(axis=1)

    def loss(logs: Array) -> float:
        alpha = np.exp(np.clip(logs, -12.0, 12.0))
        each = (gammaln(alpha + kinds) - gammaln(alpha)).sum(axis=1)
        return -float(times @ (gammaln(alpha.sum()) - gammaln(alpha.sum() + totals) + each)) / float(times.sum())

    rates = np.maximum(counts.sum(axis=0) / counts.sum(), 1e-4)
    fits = [minimize(loss, np.log(rates * size), method="L-BFGS-B") for size in (1.0, 5.0, 30.0)]
    return np.asarray(np.exp(np.clip(min(fits, key=lambda fit: float(fit.fun)).x, -12.0, 12.0)))


def shrink_counts(counts: Array, alpha: Array) -> Array:
    """Return frequencies, shrunk by alpha: (..., classes) both."""
    return np.asarray((counts + alpha) / (counts + alpha).sum(axis=-1, keepdims=True))


def shrunk_frequency(task: LabelTask) -> Probabilities:
    """Predict each user's own frequencies of classes, shrunk by empirical Bayes."""
    counts = count_labels(task, task.train)
    alpha, new = fit_dirichlet(counts), task.codes[task.newcomers]
    return Probabilities(
        test=shrink_counts(counts[task.codes[task.test]], alpha),
        newcomers=shrink_counts(count_labels(task, task.support)[new], alpha),
        strangers=np.tile(alpha / alpha.sum(), (len(new), 1)),
    )


def standardise(task: LabelTask) -> Array:
    """Return all rows in units of the training rows' deviations, around their means."""
    scale = task.X[task.train].std(axis=0)
    return np.asarray((task.X - task.X[task.train].mean(axis=0)) / np.where(scale > 0, scale, 1.0))


def say(model: Any, rows: Array, classes: int) -> Array:
    """Return probabilities of all classes; next to none of those that were not in training."""
    said = np.full((len(rows), classes), LEAST)
    said[:, model.classes_.astype(np.int64)] = model.predict_proba(rows)
    return said


def fit_pooled(rows: Array, y: Array, users: Integers, classes: int) -> LogisticRegression:
    """Fit one logistic regression to everybody's rows. Its ridge is chosen on a fifth of the users."""
    held = (np.random.default_rng(0).random(int(users.max()) + 1) < HELD)[users]

    def loss(penalty: float) -> float:
        model = LogisticRegression(C=penalty, max_iter=500).fit(rows[~held], y[~held])
        return Quality.of(say(model, rows[held], classes), y[held]).log_loss

    best = min(PENALTIES, key=loss)
    return LogisticRegression(C=best, max_iter=500).fit(rows, y)


def pooled_logistic(task: LabelTask) -> Probabilities:
    """Predict everybody by one logistic regression."""
    rows, new = standardise(task), task.newcomers
    model = fit_pooled(rows[task.train], task.y[task.train], task.codes[task.train], task.classes)
    test, strangers = (say(model, rows[asked], task.classes) for asked in (task.test, new))
    return Probabilities(test, strangers, strangers)


def add_user_columns(task: LabelTask) -> Callable[[Mask], Array]:
    """Return what makes columns of rows: their own, the user's shrunk log-frequencies, the means of its columns.

    In training a row's own label is left out of its user's frequencies.
    """
    rows, given = standardise(task), task.train | task.support
    counts, sizes = count_labels(task, given), np.bincount(task.codes[given], minlength=task.n_users)
    alpha = fit_dirichlet(count_labels(task, task.train))
    means = sums_by_user(rows[given], task.codes[given], task.n_users) / np.maximum(sizes, 1)[:, None]
    own = np.eye(task.classes)[task.y.astype(np.int64)] * task.train[:, None]

    def columns(asked: Mask) -> Array:
        users = task.codes[asked]
        frequencies = np.log(shrink_counts(counts[users] - own[asked], alpha))
        return np.column_stack([rows[asked], frequencies[:, 1:] - frequencies[:, :1], means[users]])

    return columns


def user_columns(task: LabelTask) -> Probabilities:
    """Predict by one logistic regression that also knows users' frequencies and means: much of a mixed model.

    Strangers get the regression that knows neither.
    """
    columns = add_user_columns(task)
    model = fit_pooled(columns(task.train), task.y[task.train], task.codes[task.train], task.classes)
    test, newcomers = (say(model, columns(asked), task.classes) for asked in (task.test, task.newcomers))
    return Probabilities(test, newcomers, pooled_logistic(task).strangers)


def boosting(task: LabelTask) -> Probabilities:
    """Predict by gradient boosting on the same columns. Strangers get a second one, on the rows' own columns alone."""
    columns, y = add_user_columns(task), task.y[task.train]
    with threadpool_limits(1, user_api="openmp"):  # two threads that wait for one core lose much
        model = HistGradientBoostingClassifier(random_state=0).fit(columns(task.train), y)
        plain = HistGradientBoostingClassifier(random_state=0).fit(task.X[task.train], y)
        test, newcomers = (say(model, columns(asked), task.classes) for asked in (task.test, task.newcomers))
        return Probabilities(test, newcomers, say(plain, task.X[task.newcomers], task.classes))


def alone(task: LabelTask) -> Probabilities:
    """Predict each user by its own logistic regression. All have the same ridges, chosen by everybody's last row.

    Strangers get the frequencies of all training rows.
    """
    rows = standardise(task)
    most, last = set_last_aside(task)
    pairs = product(RIDGES, LEVEL_RIDGES)
    ridges = min(pairs, key=lambda pair: loss_of(task, own_probabilities(task, rows, most, last, pair), last))
    level = count_labels(task, task.train).sum(axis=0)
    return Probabilities(
        test=own_probabilities(task, rows, task.train, task.test, ridges),
        newcomers=own_probabilities(task, rows, task.support, task.newcomers, ridges),
        strangers=np.tile(level / level.sum(), (int(task.newcomers.sum()), 1)),
    )


def oracle(task: LabelTask) -> Probabilities:
    """Predict by heads on the true U, without intercepts. Their ridge is the best for the test rows themselves."""
    assert task.basis is not None
    rows, nothing = task.X @ task.basis, np.zeros((len(task.X), 1 if task.classes == 2 else task.classes))

    def heads(given: Mask, asked: Mask, ridge: float) -> Array:
        return say_heads(rows, fit_heads(task, rows, given, ridge, nothing), task.codes, asked, nothing)

    best = min(ORACLE_RIDGES, key=lambda ridge: loss_of(task, heads(task.train, task.test, ridge), task.test))
    strangers = np.full((int(task.newcomers.sum()), task.classes), 1 / task.classes)
    return Probabilities(
        heads(task.train, task.test, best), heads(task.support, task.newcomers, best), strangers
    )  # fmt: skip


REFERENCES: dict[str, Callable[[LabelTask], Probabilities]] = {
    "shrunk frequency": shrunk_frequency,
    "pooled logistic": pooled_logistic,
    "with user columns": user_columns,
    "gradient boosting": boosting,
    "alone": alone,
}
"""NOT PRIVATE, all of them."""


def noisy_logistic(task: LabelTask, epsilon: float, rng: np.random.Generator, delta: float = 1e-6) -> Probabilities:
    """Predict by an analyst's noisy logistic regression and each user's own level. Noise is simulated.

    The regression is the mean of the last half of 25 noisy gradient steps. Levels are posterior modes around it, one
    class against the rest where there are several. As a favour, means and deviations of the columns, which are not
    private, cost nothing.

    Formal guarantee: but for that favour all that is common to users is a function of 25 Gaussian releases, 90% of mu^2
    together, and of one of 10%. With noise that nobody can predict it is (epsilon, delta)-DP at user level under
    replace-one-user.
    """
    mu = Budget(epsilon, delta, "replace-one-user").mu
    rows = np.column_stack([np.ones(len(task.X)), np.clip(standardise(task), -LARGEST, LARGEST)])
    common = rows @ noisy_descent(task, rows, np.sqrt(1 - SPREAD_SHARE) * mu, rng)
    if task.classes > 2:
        common = logit(np.clip(softmax(common, axis=1), LEAST, 1 - LEAST))
    one = np.ones((len(rows), 1))

    def levels(given: Mask, asked: Mask, spread: float) -> Array:
        return say_heads(one, fit_heads(task, one, given, spread**-2, common), task.codes, asked, common)

    most, last = set_last_aside(task)
    losses = np.stack([losses_of(task, levels(most, last, spread), last) for spread in SPREADS])
    spread = SPREADS[noisy_choice(losses, np.sqrt(SPREAD_SHARE) * mu, rng)]
    nothing = np.zeros_like(task.support)
    return Probabilities(
        test=levels(task.train, task.test, spread),
        newcomers=levels(task.support, task.newcomers, spread),
        strangers=levels(nothing, task.newcomers, spread),
    )


def noisy_descent(task: LabelTask, rows: Array, mu: float, rng: np.random.Generator) -> Array:
    """Return (columns, outputs) weights of a logistic regression by noisy steps along users' mean gradients.

    Gradients are clipped at 1, so that replacing a user moves a sum by 2 at most.
    """
    given, users = rows[task.train], task.codes[task.train]
    sizes = np.maximum(np.bincount(users, minlength=task.n_users), 1)[:, None]
    came = np.eye(task.classes)[task.y[task.train].astype(np.int64)]
    came = came[:, 1:] if task.classes == 2 else came
    noise, taking_part = 2 * CLIP * np.sqrt(GRADIENTS) / mu, len(np.unique(users))
    weights, kept = np.zeros((rows.shape[1], came.shape[1])), []
    for _ in range(GRADIENTS):
        outputs = given @ weights
        short = came - (expit(outputs) if task.classes == 2 else softmax(outputs, axis=1))
        each = (given[:, :, None] * short[:, None, :]).reshape(len(given), -1)
        means = sums_by_user(each, users, task.n_users) / sizes
        norms = np.linalg.norm(means, axis=1)
        total = np.minimum(1.0, CLIP / np.maximum(norms, 1e-300)) @ means + noise * rng.standard_normal(weights.size)
        weights = weights + STEP / taking_part * total.reshape(weights.shape)
        kept.append(weights)
    return np.asarray(np.mean(kept[GRADIENTS // 2 :], axis=0))


def noisy_choice(losses: Array, mu: float, rng: np.random.Generator) -> int:
    """Return which spread has the least noisy sum of users' losses, (spreads, users).

    What is summed are differences to the usual spread, clipped at a half: replacing a user moves each by 1 at most.
    """
    others = [place for place in range(len(losses)) if place != USUAL]
    over = np.zeros(len(losses))
    over[others] = np.clip(losses[others] - losses[USUAL], -WORST, WORST).sum(axis=1)
    over[others] += 2 * WORST * np.sqrt(len(others)) / mu * rng.standard_normal(len(others))
    return int(over.argmin())


def set_last_aside(task: LabelTask) -> tuple[Mask, Mask]:
    """Return training rows without the last of each user, and those last rows, of users with two or more."""
    rows = np.flatnonzero(task.train)
    rows = rows[np.argsort(task.codes[rows], kind="stable")]
    users = task.codes[rows]
    ends = np.append(users[1:] != users[:-1], True) & (np.bincount(users)[users] > 1)
    last = np.zeros_like(task.train)
    last[rows[ends]] = True
    return task.train & ~last, last


def losses_of(task: LabelTask, said: Array, rows: Mask) -> Array:
    """Return minus the logarithm of what was said of the labels that came."""
    return np.asarray(-np.log(np.maximum(said[np.arange(len(said)), task.y[rows].astype(np.int64)], LEAST)))


def loss_of(task: LabelTask, said: Array, rows: Mask) -> float:
    return float(losses_of(task, said, rows).mean())
