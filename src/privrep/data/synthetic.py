"""Populations drawn from the papers' models, whose true error is known exactly.

`make_population`: user i holds rows (x, y) with y = <x, U v_i> + c_i + noise. There is one orthonormal U for all, a
head v_i and an intercept c_i for each user. Features are centred with identity covariance before `feature_scale` and
`feature_mean` (Snedeker, Zhou and Bassily 2025, Assumption 5). Label noise has standard deviation R (Assumption 6).
Every kind of feature and of noise here but "student" is sub-Gaussian with variance proxy one (times R^2 for the noise):
E exp(t z) <= exp(t^2 / 2).

More options make real panels: y = <x, U v_i + common> + c_i + noise, users have feature means of their own, levels c_i
follow these means, and some features never vary within a user.

`make_class_population`: user i's label is c with probability softmax_c(<x, U v_ic> + b_ic). Features are standard
normal. Intercepts spread the classes unevenly over users: at a `skew` of 2 most of five classes are rare with any one
user.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import DTypeLike, NDArray

from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.typing import Array

FeatureKind = Literal["gaussian", "rademacher", "uniform", "sphere", "student"]
NoiseKind = Literal["gaussian", "rademacher", "uniform", "student"]
HeadKind = Literal["unit", "gaussian"]
Sizes = float | Array  # one for all features, or (d,)
SUB_GAUSSIAN: tuple[FeatureKind, ...] = ("gaussian", "rademacher", "uniform", "sphere")
STUDENT_FREEDOM = 5  # "student": unit variance, a finite fourth moment and little more; outside what the papers assume


@dataclass(frozen=True)
class Population:
    """The true model of each user. `sample` draws rows; the errors below are expectations, not estimates."""

    U: Array  # (d, k), orthonormal columns
    heads: Array  # (n, k)
    intercepts: Array  # (n,)
    sizes: NDArray[np.int64]  # (n,): rows of each user
    noise: float  # R, standard deviation of the label noise
    noise_kind: NoiseKind
    feature_kinds: NDArray[np.str_]  # (n,): the FeatureKind of each user
    feature_scale: Array  # (d,): x = feature_mean + feature_scale * z, or (d, d): x = feature_mean + feature_scale z
    feature_mean: Array  # (d,)
    common: Array | None = None  # (d,): slopes that all users share; None: zero
    means: Array | None = None  # (n, d): the users' own feature means; None: all have feature_mean

    @property
    def weights(self) -> Array:
        """Return the best linear predictor of each user, U v_i + common: (n, d)."""
        own = self.heads @ self.U.T
        return own if self.common is None else own + self.common

    @property
    def covariance(self) -> Array:
        """Return the covariance of every user's features around the user's own mean, (d, d)."""
        scale = np.diag(self.feature_scale) if self.feature_scale.ndim == 1 else self.feature_scale
        return scale @ scale.T

    def sample(self, rng: np.random.Generator, dtype: DTypeLike = np.float64) -> UserTable:
        """Return fresh rows of every user; the same generator state gives the same rows."""
        rows, d = int(self.sizes.sum()), len(self.U)
        X: NDArray[Any] = np.empty((rows, d), dtype=dtype)
        for kind in np.unique(self.feature_kinds):
            chosen = np.repeat(self.feature_kinds == kind, self.sizes)
            if chosen.all():
                X[...] = _draw_standard(rng, str(kind), (rows, d), X.dtype)
            else:
                X[chosen] = _draw_standard(rng, str(kind), (int(chosen.sum()), d), X.dtype)
        scale = self.feature_scale.astype(X.dtype)
        X = X * scale if scale.ndim == 1 else X @ scale.T
        X += (self.feature_mean if self.means is None else np.repeat(self.means, self.sizes, axis=0)).astype(X.dtype)
        y = np.einsum("rk,rk->r", X @ self.U.astype(X.dtype), np.repeat(self.heads, self.sizes, axis=0))
        if self.common is not None:
            y += X @ self.common.astype(X.dtype)
        y += np.repeat(self.intercepts, self.sizes)
        y += self.noise * _draw_standard(rng, self.noise_kind, (rows, 1), np.dtype(np.float64))[:, 0]
        offsets = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        return UserTable(X, y.astype(X.dtype), offsets, np.arange(len(self.sizes)))

    def user_mse(self, weights: Array, intercepts: Array) -> Array:
        """Return the expected squared error of <x, weights_i> + intercepts_i on a fresh row of each user, (n,). Exact.

        With e = weights_i - U v_i - common it is e^T Cov(x) e + (<E x, e> + intercept error)^2 + R^2. Covariance and
        mean are those of the user's own rows.

        Args:
            weights: (n, d).
            intercepts: (n,).
        """
        error = weights - self.weights
        spread = error * self.feature_scale if self.feature_scale.ndim == 1 else error @ self.feature_scale
        mean = error @ self.feature_mean if self.means is None else np.einsum("nd,nd->n", error, self.means)
        shift = mean + intercepts - self.intercepts
        return np.einsum("nd,nd->n", spread, spread) + shift**2 + self.noise**2

    def population_mse(self, weights: Array, intercepts: Array) -> float:
        """Return the mean of `user_mse`: the papers' population MSE, without sampling error.

        Arguments are as in `user_mse`.
        """
        return float(self.user_mse(weights, intercepts).mean())

    @property
    def null_mse(self) -> float:
        """Return the population MSE of predicting zero for everybody."""
        return self.population_mse(np.zeros_like(self.weights), np.zeros_like(self.intercepts))


def make_population(
    rng: np.random.Generator,
    users: int,
    features: int,
    rank: int,
    rows: int | tuple[int, int],
    noise: float,
    *,
    feature_kind: FeatureKind = "gaussian",
    noise_kind: NoiseKind = "gaussian",
    heads: HeadKind = "unit",
    head_condition: float = 1.0,
    per_user: bool = False,
    feature_scale: float | Array | None = None,
    feature_mean: float | Array = 0.0,
    intercept: float = 0.0,
    level: float = 0.0,
    common: Sizes = 0.0,
    between: Sizes = 0.0,
    context: Sizes = 0.0,
    constant_columns: int = 0,
) -> Population:
    """Draw a population of linear models. A `rank` of 0 needs `common` or `intercept`.

    Args:
        rng: source of all draws; the panel options, from `level` on, draw last.
        users, features, rank: the numbers n, d and k.
        rows: rows of each user, or a (low, high) range from which each user's number is drawn.
        noise: R, standard deviation of the label noise.
        feature_kind, noise_kind: distributions of features and noise.
        heads: standard normal ("gaussian"), or scaled to unit length ("unit").
        head_condition: range over which singular values of V spread geometrically; 1 leaves heads as they are.
        per_user: gives each user its own kind of sub-Gaussian features instead of `feature_kind`.
        feature_scale, feature_mean: one number, or (d,); the scale may be a (d, d) matrix.
        intercept, level: standard deviation and mean of the normal intercepts.
        common: (d,) slopes added to all users' own; a number is the length of a random direction.
        between: standard deviation, one or (d,), of the users' feature means around `feature_mean`.
        context: (d,) slopes of a user's level in its own mean, less `feature_mean`; or a length, too.
        constant_columns: number of last features that never vary within a user and have no part in U.
    """
    kinds_of = {"feature_kind": FeatureKind, "noise_kind": NoiseKind, "heads": HeadKind}
    for (name, kind), value in zip(kinds_of.items(), (feature_kind, noise_kind, heads), strict=True):
        if value not in get_args(kind):
            raise InputError(f"{name} must be one of {', '.join(get_args(kind))}. Got {value!r} instead.")
    U, V = _draw_bases(rng, users, features - constant_columns, rank, heads, bool(np.any(common)) or intercept > 0)
    if head_condition != 1.0:
        V = condition_heads(V, head_condition)
    low, high = (rows, rows) if isinstance(rows, int) else rows
    scale = np.asarray(1.0 if feature_scale is None else feature_scale, dtype=np.float64)
    kinds = rng.choice(SUB_GAUSSIAN, users) if per_user else np.full(users, feature_kind)
    plain = Population(
        U=U,
        heads=V,
        intercepts=intercept * rng.standard_normal(users),
        sizes=rng.integers(low, high, users, endpoint=True),
        noise=noise,
        noise_kind=noise_kind,
        feature_kinds=kinds,
        feature_scale=scale if scale.ndim == 2 else np.broadcast_to(scale, features).copy(),
        feature_mean=np.broadcast_to(np.asarray(feature_mean, dtype=np.float64), features).copy(),
    )
    return _add_panel_terms(rng, plain, level, common, between, context)


def _draw_bases(
    rng: np.random.Generator, users: int, varying: int, rank: int, heads: HeadKind, levels: bool
) -> tuple[Array, Array]:
    """Return U, (varying, k), and V, (n, k). A rank of 0 needs `levels`: something else that tells users apart."""
    if not (0 if levels else 1) <= rank <= varying:
        raise InputError(
            f"rank must lie between 1 and the number of features, {varying} without constant ones. It may be 0 with "
            f"common slopes or intercepts. Got {rank} instead."
        )
    U, _ = np.linalg.qr(rng.standard_normal((varying, rank)))
    V = rng.standard_normal((users, rank))
    return U, V / np.linalg.norm(V, axis=1, keepdims=True) if heads == "unit" else V


def _add_panel_terms(
    rng: np.random.Generator, plain: Population, level: float, common: Sizes, between: Sizes, context: Sizes
) -> Population:
    """Return the population with a level, common slopes, users' own feature means and features that never vary."""
    d = len(plain.feature_mean)
    constant = d - len(plain.U)
    spread = np.broadcast_to(np.asarray(between, dtype=np.float64), d)
    if min(constant, *spread) < 0 or not spread[len(plain.U) :].all() or (np.any(context) and not spread.any()):
        raise InputError("between must not be negative; with context or constant columns it must be positive.")
    if level:
        plain = replace(plain, intercepts=plain.intercepts + level)
    if np.any(common):
        plain = replace(plain, common=_draw_slopes(rng, common, d))
    if spread.any():
        own = spread * rng.standard_normal((len(plain.heads), d))
        follow = own @ _draw_slopes(rng, context, d) if np.any(context) else 0.0
        plain = replace(plain, means=plain.feature_mean + own, intercepts=plain.intercepts + follow)
    if constant:
        scale = plain.feature_scale.copy()
        scale[-constant:] = 0.0
        plain = replace(plain, U=np.pad(plain.U, ((0, constant), (0, 0))), feature_scale=scale)
    return plain


def _draw_slopes(rng: np.random.Generator, given: Sizes, d: int) -> Array:
    """Return (d,) slopes as they are given, or of the given length in a random direction."""
    if np.ndim(given):
        return np.broadcast_to(np.asarray(given, dtype=np.float64), d).copy()
    direction = rng.standard_normal(d)
    return np.asarray(given * direction / np.linalg.norm(direction))


def condition_heads(V: Array, condition: float) -> Array:
    """Return V, (n, k), stretched so that its singular values run geometrically over a range of exactly `condition`."""
    n, k = V.shape
    if not (condition >= 1 and n >= k >= 2):
        raise InputError(
            f"head_condition other than 1 must be larger than 1, with rank >= 2 and users >= rank. "
            f"Got {condition}, rank {k} and {n} users instead."
        )
    left, size, right = np.linalg.svd(V, full_matrices=False)
    spread = condition ** -np.linspace(0, 1, k)
    return (left * spread * np.sqrt((size**2).sum() / (spread**2).sum())) @ right


def _draw_standard(rng: np.random.Generator, kind: str, shape: tuple[int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return rows of this shape with mean zero and identity covariance."""
    wide: Any = dtype if dtype in (np.float32, np.float64) else np.float64
    if kind == "gaussian":
        return rng.standard_normal(shape, dtype=wide)
    if kind == "rademacher":
        return np.where(rng.integers(0, 2, shape, dtype=np.int8) == 1, 1, -1).astype(dtype)
    if kind == "uniform":
        return (rng.random(shape, dtype=wide) * 2 - 1) * np.sqrt(3).astype(dtype)
    if kind == "sphere":  # uniform on the sphere of radius sqrt(d): uncorrelated but dependent coordinates
        z = rng.standard_normal(shape, dtype=wide)
        return z * (np.sqrt(shape[1]) / np.linalg.norm(z, axis=1, keepdims=True)).astype(dtype)
    if kind == "student":
        return (rng.standard_t(STUDENT_FREEDOM, shape) * np.sqrt(1 - 2 / STUDENT_FREEDOM)).astype(dtype)
    raise InputError(f"no way is known to draw features of kind {kind!r}.")


@dataclass(frozen=True)
class ClassPopulation:
    """The true model of each user. `sample` draws rows."""

    U: Array  # (d, k), orthonormal columns
    heads: Array  # (n, classes, k)
    intercepts: Array  # (n, classes)
    rows: int  # of each user

    @property
    def classes(self) -> int:
        """Return the number of classes."""
        return self.heads.shape[1]

    def sample(self, rng: np.random.Generator, dtype: DTypeLike = np.float32, rows: int | None = None) -> UserTable:
        """Return fresh rows of every user, labels 0 to classes - 1.

        Args:
            rng: source of all draws.
            dtype: of rows and labels.
            rows: of each user; None for the population's own number.
        """
        n, m = len(self.heads), self.rows if rows is None else rows
        X = rng.standard_normal((n * m, len(self.U)), dtype=np.float32).astype(dtype, copy=False)
        users = np.repeat(np.arange(n), m)
        below = np.cumsum(self.probabilities(X, users), axis=1)[:, :-1]
        y = (rng.random(n * m)[:, None] > below).sum(axis=1)
        return UserTable(X, y.astype(X.dtype), np.arange(0, n * m + 1, m), np.arange(n))

    def probabilities(self, X: NDArray[np.floating], users: NDArray[np.int64]) -> Array:
        """Return the probability of each class, (rows, classes), for rows X (rows, d) of these users, (rows,)."""
        P = X @ self.U.astype(X.dtype)
        outputs = np.einsum("rk,rck->rc", P, self.heads[users]) + self.intercepts[users]
        outputs -= outputs.max(axis=1, keepdims=True)
        weights = np.exp(outputs)
        return np.asarray(weights / weights.sum(axis=1, keepdims=True))

    def expected_log_loss(self, predicted: Array, X: NDArray[np.floating], users: NDArray[np.int64]) -> float:
        """Return the log loss of predicted probabilities, expected over labels: less noisy than on drawn labels.

        Args:
            predicted: (rows, classes).
            X: (rows, d).
            users: of each row, (rows,).
        """
        truth = self.probabilities(X, users)
        return float(-(truth * np.log(np.maximum(predicted, 1e-300))).sum(axis=1).mean())

    def expected_error(self, predicted: NDArray[np.int64], X: NDArray[np.floating], users: NDArray[np.int64]) -> float:
        """Return the probability that a predicted class (rows,) is not the label of its row; X and users as above."""
        truth = self.probabilities(X, users)
        return float(1 - truth[np.arange(len(truth)), predicted].mean())


def make_class_population(
    rng: np.random.Generator,
    users: int,
    features: int,
    rank: int,
    rows: int,
    classes: int = 2,
    *,
    strength: float = 2.0,
    skew: float = 0.0,
) -> ClassPopulation:
    """Draw a population of classifiers.

    Of two classes the output of the first is zero, so that heads are those of a logistic regression.

    Args:
        rng: source of all draws.
        users: number of users, n.
        features: number of features, d.
        rank: columns of U, k.
        rows: of each user.
        classes: number of classes.
        strength: standard deviation of the heads.
        skew: standard deviation of the intercepts.
    """
    if not 1 <= rank <= features or classes < 2 or min(users, rows) < 1 or strength < 0 or skew < 0:
        raise InputError("a population needs users, rows, a rank of at most its features and two classes or more.")
    U, _ = np.linalg.qr(rng.standard_normal((features, rank)))
    heads = strength * rng.standard_normal((users, classes, rank))
    intercepts = skew * rng.standard_normal((users, classes))
    if classes == 2:
        heads[:, 0], intercepts[:, 0] = 0.0, 0.0
    return ClassPopulation(U, heads, intercepts, rows)
