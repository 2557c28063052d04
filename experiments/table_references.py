"""References on real panels: what a statistician does without privacy, and what an analyst does with it.

All but `noisy_ridge` are NOT PRIVATE. Each takes a `Task` and returns `Predictions`. Users of the training rows are
predicted from their training rows, newcomers from their support rows, and strangers, who are the same newcomers, from
no row at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm
from sklearn.ensemble import HistGradientBoostingRegressor
from threadpoolctl import threadpool_limits

from experiments.tables_data import Mask, Task
from privrep.data.synthetic import Population
from privrep.data.table import UserTable
from privrep.privacy.ledger import Budget
from privrep.typing import Array, Integers

TINY = 1e-8  # ridge that keeps matrices regular where columns never vary within a user
SCALES_SHARE = 0.05  # of the analyst's mu^2, for the columns' scales
OCTAVES = np.arange(-20, 21)  # from a millionth to a million
NEAR = 3  # octaves around the fullest among which the analyst looks for the median
FALSE_ALARM = 0.01  # chance that the noise of an empty octave, of any column, looks like users
MOST_ROWS = 20  # rows of a user that count with the analyst, less one
LARGEST = 10.0  # Frobenius norm to which the analyst clips second moments


@dataclass(frozen=True)
class Predictions:
    """What a reference says of the rows that it did not see."""

    test: Array  # of `task.test`, in the order of the rows
    newcomers: Array  # of `task.newcomers`, by what `task.support` says
    strangers: Array  # of `task.newcomers`, as if `task.support` were empty

    def errors(self, task: Task) -> tuple[float, float, float]:
        """Return root mean squared errors for test rows, newcomers and strangers."""
        known, new = task.y[task.test], task.y[task.newcomers]
        pairs = ((self.test, known), (self.newcomers, new), (self.strangers, new))
        test, newcomers, strangers = (float(np.sqrt(np.mean((said - y) ** 2))) for said, y in pairs)
        return test, newcomers, strangers


@dataclass(frozen=True)
class Heads:
    """Linear models <x, weights> + intercept: one for each user with rows, and one for users without."""

    weights: Array  # (users, d)
    intercepts: Array  # (users,)
    weights_of_strangers: Array  # (d,)
    intercept_of_strangers: float

    def predict(self, task: Task) -> Predictions:
        X, strange = task.X[task.newcomers], (self.weights_of_strangers, self.intercept_of_strangers)
        return Predictions(self._of(task, task.test), self._of(task, task.newcomers), X @ strange[0] + strange[1])

    def _of(self, task: Task, rows: Mask) -> Array:
        users = task.codes[rows]
        return np.einsum("rd,rd->r", task.X[rows], self.weights[users]) + self.intercepts[users]


def user_mean(task: Task) -> Predictions:
    """Predict each user's own mean. Users without rows get the mean of all training rows."""
    level, d = float(task.y[task.train].mean()), task.X.shape[1]
    counts, means = _user_means(task, task.y[:, None])
    intercepts = np.where(counts > 0, means[:, 0], level)
    return Heads(np.zeros((task.n_users, d)), intercepts, np.zeros(d), level).predict(task)


def pooled_ridge(task: Task, ridge: float = 1.0) -> Predictions:
    """Predict everybody by one ridge regression on standardised columns."""
    units = Units.of(task)
    design = units.design(task)[task.train]
    penalty = ridge * np.diag(np.arange(design.shape[1] - 1) > 0)
    head = np.linalg.solve(design[:, :-1].T @ design[:, :-1] + penalty, design[:, :-1].T @ design[:, -1])
    return units.heads(np.tile(head, (task.n_users, 1)), head).predict(task)


def mixed_intercepts(task: Task) -> Predictions:
    """Predict by a mixed model with common slopes and a random intercept for each user."""
    return _mixed(task, slopes=False)


def mixed_slopes(task: Task) -> Predictions:
    """Predict by a mixed model with a random intercept and random slopes for each user."""
    return _mixed(task, slopes=True)


def boosting(task: Task) -> Predictions:
    """Predict by gradient boosting on the columns, the user's shrunk mean and its number of rows.

    In training a row's own target is left out of its user's mean. Means are shrunk by one row at the global mean.
    """
    level = task.y[task.train].mean()
    counts, means = _user_means(task, task.y[:, None])
    totals, codes = counts * means[:, 0], task.codes

    def columns(rows: Mask, total: Array, count: Array) -> Array:
        return np.column_stack([task.X[rows], (total + level) / (count + 1), count])

    train, users = task.y[task.train], codes[task.train]
    model = HistGradientBoostingRegressor(max_iter=300, learning_rate=0.06, early_stopping=True, random_state=0)
    with threadpool_limits(1, user_api="openmp"):  # two threads that wait for one core lose much
        model.fit(columns(task.train, totals[users] - train, counts[users] - 1), train)
    old, new = codes[task.test], codes[task.newcomers]
    nothing = np.zeros(len(new))
    return Predictions(
        test=model.predict(columns(task.test, totals[old], counts[old])),
        newcomers=model.predict(columns(task.newcomers, totals[new], counts[new])),
        strangers=model.predict(columns(task.newcomers, nothing, nothing)),
    )


REFERENCES: dict[str, Callable[[Task], Predictions]] = {
    "user mean": user_mean,
    "pooled ridge": pooled_ridge,
    "mixed model, intercepts": mixed_intercepts,
    "mixed model, slopes": mixed_slopes,
    "gradient boosting": boosting,
}
"""NOT PRIVATE, all of them."""


def noisy_ridge(task: Task, epsilon: float, rng: np.random.Generator, delta: float = 1e-6) -> Predictions:
    """Predict by an analyst's noisy slopes and each user's raw intercept. Noise is simulated.

    An intercept is the user's mean of y - <x, w>. The analyst spends nothing on levels. As a favour, strangers get the
    mean of all training rows, which is not private, and no slopes.

    Formal guarantee: the slopes w are a function of two Gaussian releases, of 5% and of 95% of mu^2. With noise that
    nobody can predict they are (epsilon, delta)-DP at user level under replace-one-user.
    """
    mu = Budget(epsilon, delta, "replace-one-user").mu
    rows, users = np.column_stack([task.X, task.y])[task.train], task.codes[task.train]
    within, counts = within_moments(rows, users, task.n_users)
    scales = noisy_scales(within, counts, np.sqrt(SCALES_SHARE) * mu, rng)
    slopes = noisy_slopes(within, counts, scales, np.sqrt(1 - SCALES_SHARE) * mu, rng)
    level = float(task.y[task.train].mean())
    owned, intercepts = _user_means(task, (task.y - task.X @ slopes)[:, None])
    has = owned > 0
    weights, nothing = np.where(has[:, None], slopes, 0.0), np.zeros(len(slopes))
    return Heads(weights, np.where(has, intercepts[:, 0], level), nothing, level).predict(task)


def noisy_scales(within: Array, counts: Array, mu: float, rng: np.random.Generator) -> Array:
    """Return the median octave of the users' standard deviations, column by column, with noise.

    Each user is counted once a column at most. Replacing a user moves 2 counts a column, a distance of sqrt(2 columns).
    A column has nan where no octave has more users than noise explains.

    Args:
        within: (users, columns, columns) sums of squares around the users' means.
        counts: (users,) rows.
        mu: what the release may cost.
        rng: of the noise.
    """
    columns = within.shape[1]
    variances = np.einsum("nii->ni", within) / np.maximum(counts - 1, 1)[:, None]
    varies = (counts > 1)[:, None] & (variances > 1e-18)
    place = np.clip(np.rint(np.log2(np.where(varies, variances, 1.0)) / 2), OCTAVES[0], OCTAVES[-1]) - OCTAVES[0]
    noise = np.sqrt(2 * columns) / mu
    least = noise * norm.isf(FALSE_ALARM / (columns * len(OCTAVES)))
    scales = np.full(columns, np.nan)
    for j in range(columns):
        seen = np.bincount(place[varies[:, j], j].astype(np.int64), minlength=len(OCTAVES)).astype(np.float64)
        seen += noise * rng.standard_normal(len(OCTAVES))
        fullest = int(seen.argmax())
        if seen[fullest] > least:
            below = np.cumsum(np.where(np.abs(np.arange(len(seen)) - fullest) <= NEAR, np.maximum(seen, 0.0), 0.0))
            scales[j] = 2.0 ** OCTAVES[np.searchsorted(below, below[-1] / 2)]
    return scales


def noisy_slopes(within: Array, counts: Array, scales: Array, mu: float, rng: np.random.Generator) -> Array:
    """Return (d,) slopes of the last column in the others: ridge regression on noisy sums of clipped second moments.

    Contributions are positive semi-definite, so two of them are at most sqrt(2) clipping norms apart. The ridge is
    about the largest eigenvalue of the noise. Columns whose scale is not known have no slope.
    """
    known = np.isfinite(scales)
    slopes = np.zeros(len(scales) - 1)
    if not known[-1] or known.sum() < 2:
        return slopes
    size = scales[known]
    fewer = np.minimum(counts - 1, MOST_ROWS) / np.maximum(counts - 1, 1)
    parts = within[:, known][:, :, known] / np.outer(size, size) * fewer[:, None, None]
    norms = np.sqrt((parts**2).sum(axis=(1, 2)))
    total = np.tensordot(np.minimum(1.0, LARGEST / np.maximum(norms, 1e-300)), parts, axes=1)
    noise = np.sqrt(2) * LARGEST / mu
    drawn = np.triu(rng.standard_normal(total.shape))  # entries off the diagonal stand for two, hence the half
    total += noise * (drawn + drawn.T) * np.where(np.eye(len(total)) > 0, 0.5, np.sqrt(0.5))
    values, axes = np.linalg.eigh(total[:-1, :-1])
    ridge = noise * np.sqrt(len(total))
    slopes[known[:-1]] = axes @ (axes.T @ total[:-1, -1] / (np.maximum(values, 0.0) + ridge)) * size[-1] / size[:-1]
    return slopes


@dataclass(frozen=True)
class Units:
    """Mean and standard deviation of the columns and of the target on training rows. Columns that never vary keep 1."""

    centre: Array  # (d + 1,), the target last
    scale: Array  # (d + 1,)

    @classmethod
    def of(cls, task: Task) -> Units:
        rows = np.column_stack([task.X, task.y])[task.train]
        scale = rows.std(axis=0)
        return cls(rows.mean(axis=0), np.where(scale > 0, scale, 1.0))

    def design(self, task: Task) -> Array:
        """Return (rows, 1 + d + 1): a one, the standardised columns, the standardised target."""
        rows = (np.column_stack([task.X, task.y]) - self.centre) / self.scale
        return np.column_stack([np.ones(len(rows)), rows])

    def heads(self, own: Array, stranger: Array) -> Heads:
        """Return heads for rows as they are, from (users, 1 + d) and (1 + d,) for standardised rows."""
        every = np.vstack([own, stranger]) * self.scale[-1]
        weights = every[:, 1:] / self.scale[:-1]
        intercepts = self.centre[-1] + every[:, 0] - weights @ self.centre[:-1]
        return Heads(weights[:-1], intercepts[:-1], weights[-1], float(intercepts[-1]))


@dataclass(frozen=True)
class MixedModel:
    """A linear mixed model y = <z, fixed + u_i> + e, where u_i has the first q entries of z = (1, x) alone."""

    fixed: Array  # (1 + d,)
    spread: Array  # (q, q): covariance of u_i
    noise: float  # variance of e

    def posterior(self, moments: Array) -> Array:
        """Return (users, 1 + d): each user's fixed + u_i given its moments, (users, 2 + d, 2 + d). No rows: fixed."""
        q = len(self.spread)
        gram, right = moments[:, :q, :q], moments[:, :q, -1] - moments[:, :q, :-1] @ self.fixed
        own = np.linalg.solve(gram + self.noise * np.linalg.inv(self.spread), right[:, :, None])[:, :, 0]
        return self.fixed + np.pad(own, ((0, 0), (0, len(self.fixed) - q)))


def fit_mixed(moments: Array, *, slopes: bool, iterations: int = 60, tolerance: float = 1e-6) -> MixedModel:
    """Fit a mixed model by maximum likelihood.

    Fixed effects are generalised least squares given the variances, variances a step of EM given the fixed effects
    (Liu and Rubin 1994).

    Args:
        moments: (users, 2 + d, 2 + d) second moments of (1, x, y), standardised, of users with rows.
        slopes: whether users have slopes of their own, or intercepts alone.
        iterations: at most.
        tolerance: largest relative change of a variance after which to stop.
    """
    gram, right, square = moments[:, :-1, :-1], moments[:, :-1, -1], moments[:, -1, -1].sum()
    n, p, rows = len(gram), gram.shape[1], moments[:, 0, 0].sum()
    q = p if slopes else 1
    inner, across, part = gram[:, :q, :q], gram[:, :, :q], right[:, :q]
    little = TINY * rows * np.eye(p)
    fixed = np.linalg.solve(gram.sum(axis=0) + little, right.sum(axis=0))
    noise = max(square - fixed @ right.sum(axis=0), TINY * rows) / rows / 2
    spread = noise * np.eye(q) / q
    for _ in range(iterations):
        before = np.append(np.diag(spread), noise)
        inverse = np.linalg.inv(inner + noise * np.linalg.inv(spread))
        lever = across @ inverse
        whole = (gram - lever @ across.transpose(0, 2, 1)).sum(axis=0)
        fixed = np.linalg.solve(whole + little, (right - (lever @ part[:, :, None])[:, :, 0]).sum(axis=0))
        left = part - across.transpose(0, 2, 1) @ fixed
        own = (inverse @ left[:, :, None])[:, :, 0]
        errors = square - 2 * fixed @ right.sum(axis=0) + fixed @ gram.sum(axis=0) @ fixed
        errors += np.sum(own * ((inner @ own[:, :, None])[:, :, 0] - 2 * left))
        spread = (own.T @ own + noise * inverse.sum(axis=0)) / n
        spread += TINY * (np.trace(spread) / q + TINY) * np.eye(q)
        noise = max(errors + noise * np.sum(inner * inverse), TINY * rows) / rows
        after = np.append(np.diag(spread), noise)
        if np.abs(after / before - 1).max() < tolerance:
            break
    return MixedModel(fixed, spread, float(noise))


def _mixed(task: Task, *, slopes: bool) -> Predictions:
    units = Units.of(task)
    design = units.design(task)
    train = user_moments(design[task.train], task.codes[task.train], task.n_users)
    model = fit_mixed(train[train[:, 0, 0] > 0], slopes=slopes)
    brought = user_moments(design[task.support], task.codes[task.support], task.n_users)
    return units.heads(model.posterior(train + brought), model.fixed).predict(task)


def informed(truth: Population, table: UserTable) -> tuple[Array, Array]:
    """Return (n, d) weights and (n,) intercepts by one who knows the population: best linear prediction of heads.

    Known are U, common slopes, the noise, and means and covariances over users of heads, levels and feature means. Not
    known are a user's own head, level and feature mean. Every user needs a row.
    """
    n, sizes, d = table.n_users, table.sizes.astype(np.float64), table.n_features
    users = np.repeat(np.arange(n), table.sizes)
    X, common = np.asarray(table.X, dtype=np.float64), np.zeros(d) if truth.common is None else truth.common
    design = np.column_stack([np.ones(len(X)), X @ truth.U, X, table.y - X @ common])
    k = truth.U.shape[1]
    moments = user_moments(design[:, [*range(k + 1), -1]], users, n)
    averages = sums_by_user(X, users, n) / sizes[:, None]
    means = np.broadcast_to(truth.feature_mean, (n, d)) if truth.means is None else truth.means
    level, apart = truth.intercepts.mean(), means - means.mean(axis=0)
    covariance, along = apart.T @ apart / n, apart.T @ (truth.intercepts - level) / n
    prior, spread = np.empty(n), np.zeros((n, k + 1, k + 1))
    spread[:, 1:, 1:] = truth.heads.T @ truth.heads / n
    for m in np.unique(sizes):
        gain = np.linalg.pinv(covariance + truth.covariance / m) @ along
        prior[sizes == m] = level + (averages[sizes == m] - means.mean(axis=0)) @ gain
        spread[sizes == m, 0, 0] = truth.intercepts.var() - along @ gain
    left = moments[:, :-1, -1] - moments[:, :-1, 0] * prior[:, None]
    whole = moments[:, :-1, :-1] @ spread + truth.noise**2 * np.eye(k + 1)
    own = (spread @ np.linalg.solve(whole, left[:, :, None]))[:, :, 0]
    return own[:, 1:] @ truth.U.T + common, prior + own[:, 0]


def user_moments(rows: Array, users: Integers, count: int) -> Array:
    """Return (count, columns, columns): the sum of outer products of each user's rows."""
    return np.stack([sums_by_user(rows * column[:, None], users, count) for column in rows.T], axis=1)


def within_moments(rows: Array, users: Integers, count: int) -> tuple[Array, Array]:
    """Return `user_moments` around the users' own means, and how many rows they have."""
    counts = np.bincount(users, minlength=count).astype(np.float64)
    means = sums_by_user(rows, users, count) / np.maximum(counts, 1)[:, None]
    return user_moments(rows - means[users], users, count), counts


def sums_by_user(rows: Array, users: Integers, count: int) -> Array:
    """Return (count, columns): the sum of each user's rows."""
    order = np.argsort(users, kind="stable")
    present, starts = np.unique(users[order], return_index=True)
    sums = np.zeros((count, rows.shape[1]))
    if len(present):
        sums[present] = np.add.reduceat(rows[order], starts, axis=0)
    return sums


def _user_means(task: Task, values: Array) -> tuple[Array, Array]:
    """Return how many training or support rows each user has, and the mean of their values, (users, columns)."""
    rows = task.train | task.support
    counts = np.bincount(task.codes[rows], minlength=task.n_users).astype(np.float64)
    return counts, sums_by_user(values[rows], task.codes[rows], task.n_users) / np.maximum(counts, 1)[:, None]
