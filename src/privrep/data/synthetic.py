"""Make populations drawn from the papers' models, whose true error is known exactly.

`make_population`: user i holds rows (x, y) with y = <x, U v_i> + c_i + noise: one orthonormal U for all, a head v_i and
an intercept c_i of its own. Features are centred with identity covariance before `feature_scale` and `feature_mean`
(Snedeker, Zhou, Bassily 2025, Assumption 5), label noise has standard deviation R (Assumption 6). Every kind of feature
and of noise here but "student" is sub-Gaussian with variance proxy one (times R^2 for the noise): E exp(t z) <=
exp(t^2 / 2). More options make real panels: y = <x, U v_i + common> + c_i + noise, users have feature means of their
own, levels c_i follow these means, and some features never vary within a user.

`make_class_population`: user i's label is c with probability softmax_c(<x, U v_ic> + b_ic). Features are standard
normal. Intercepts spread the classes unevenly over users: at a `skew` of 2 most of five classes are rare with any one
user.

`make_margin_population`: what margin selection assumes, and no easier than that. User i's rows are x = U a + w in the
unit ball with labels y = sign <a, v_i>: unit heads v_i are uniform on the sphere. `a` is uniform on the sphere of
radius `inside` but for what is nearer than `margin` to the user's boundary, |<a, v_i>| < margin; w has length sqrt(1 -
inside^2) and a uniform direction orthogonal to U. So every x has length one, and the rest w is the part 1 - inside^2 of
its square.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    """The truth: what the users are. `sample` draws their rows; the errors below are expectations, not estimates."""

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
        """(n, d): the best linear predictor of each user, U v_i + common."""
        own = self.heads @ self.U.T
        return own if self.common is None else own + self.common

    @property
    def covariance(self) -> Array:
        """(d, d): of every user's features around the user's own mean."""
        scale = np.diag(self.feature_scale) if self.feature_scale.ndim == 1 else self.feature_scale
        return scale @ scale.T

    def sample(self, rng: np.random.Generator, dtype: DTypeLike = np.float64) -> UserTable:
        """Fresh rows of every user; the same generator state gives the same rows."""
        rows, d = int(self.sizes.sum()), len(self.U)
        X: NDArray[Any] = np.empty((rows, d), dtype=dtype)
        for kind in np.unique(self.feature_kinds):
            chosen = np.repeat(self.feature_kinds == kind, self.sizes)
            if chosen.all():
                X[...] = _standard(rng, str(kind), (rows, d), X.dtype)
            else:
                X[chosen] = _standard(rng, str(kind), (int(chosen.sum()), d), X.dtype)
        scale = self.feature_scale.astype(X.dtype)
        X = X * scale if scale.ndim == 1 else X @ scale.T
        X += (self.feature_mean if self.means is None else np.repeat(self.means, self.sizes, axis=0)).astype(X.dtype)
        y = np.einsum("rk,rk->r", X @ self.U.astype(X.dtype), np.repeat(self.heads, self.sizes, axis=0))
        if self.common is not None:
            y += X @ self.common.astype(X.dtype)
        y += np.repeat(self.intercepts, self.sizes)
        y += self.noise * _standard(rng, self.noise_kind, (rows, 1), np.dtype(np.float64))[:, 0]
        offsets = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        return UserTable(X, y.astype(X.dtype), offsets, np.arange(len(self.sizes)))

    def user_mse(self, weights: Array, intercepts: Array) -> Array:
        """(n,): expected squared error on a fresh row of each user, of <x, weights_i> + intercepts_i. Exact.

        With e = weights_i - U v_i - common it is e^T Cov(x) e + (<E x, e> + intercept error)^2 + R^2. Covariance and
        mean are those of the user's own rows.
        """
        error = weights - self.weights
        spread = error * self.feature_scale if self.feature_scale.ndim == 1 else error @ self.feature_scale
        mean = error @ self.feature_mean if self.means is None else np.einsum("nd,nd->n", error, self.means)
        shift = mean + intercepts - self.intercepts
        return np.einsum("nd,nd->n", spread, spread) + shift**2 + self.noise**2

    def population_mse(self, weights: Array, intercepts: Array) -> float:
        """The mean of `user_mse`: what the figures of the papers call population MSE, without sampling error."""
        return float(self.user_mse(weights, intercepts).mean())

    @property
    def null_mse(self) -> float:
        """Of predicting zero for everybody."""
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
    """Draw who the users are. `rows` is a number, or a (low, high) range from which each user's number is drawn.

    `heads`: standard normal, or those scaled to unit length. `head_condition` other than 1 stretches the heads so that
    the singular values of V are spread geometrically over exactly this range, their mean square length kept.
    `per_user` gives each user its own kind of sub-Gaussian features instead of `feature_kind`. `feature_scale` is one
    number, one a feature, or a (d, d) matrix. Intercepts are normal with standard deviation `intercept`. A `rank`
    of 0 needs `common` or `intercept`. What the following options draw is drawn last.

    Args:
        level: added to all intercepts.
        common: (d,) slopes added to all users' own; a number is the length of a random direction.
        between: standard deviation, one or (d,), of the users' feature means around `feature_mean`.
        context: (d,) slopes of a user's level in its own mean, less `feature_mean`; or a length, too.
        constant_columns: so many of the last features never vary within a user and have no part in U.
    """
    kinds_of = {"feature_kind": FeatureKind, "noise_kind": NoiseKind, "heads": HeadKind}
    for (name, kind), value in zip(kinds_of.items(), (feature_kind, noise_kind, heads), strict=True):
        if value not in get_args(kind):
            raise InputError(f"{name} must be one of {', '.join(get_args(kind))}. Got {value!r} instead.")
    U, V = _bases(rng, users, features - constant_columns, rank, heads, bool(np.any(common)) or intercept > 0)
    if head_condition != 1.0:
        V = conditioned(V, head_condition)
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
    return _panel(rng, plain, level, common, between, context)


def _bases(
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


def _panel(
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
        plain = replace(plain, common=_slopes(rng, common, d))
    if spread.any():
        own = spread * rng.standard_normal((len(plain.heads), d))
        follow = own @ _slopes(rng, context, d) if np.any(context) else 0.0
        plain = replace(plain, means=plain.feature_mean + own, intercepts=plain.intercepts + follow)
    if constant:
        scale = plain.feature_scale.copy()
        scale[-constant:] = 0.0
        plain = replace(plain, U=np.pad(plain.U, ((0, constant), (0, 0))), feature_scale=scale)
    return plain


def _slopes(rng: np.random.Generator, given: Sizes, d: int) -> Array:
    """Return (d,) slopes as they are given, or of the given length in a random direction."""
    if np.ndim(given):
        return np.broadcast_to(np.asarray(given, dtype=np.float64), d).copy()
    direction = rng.standard_normal(d)
    return np.asarray(given * direction / np.linalg.norm(direction))


def conditioned(V: Array, condition: float) -> Array:
    """V stretched so that its singular values run geometrically over a range of exactly `condition`."""
    n, k = V.shape
    if not (condition >= 1 and n >= k >= 2):
        raise InputError(
            f"head_condition other than 1 must be larger than 1, with rank >= 2 and users >= rank. "
            f"Got {condition}, rank {k} and {n} users instead."
        )
    left, size, right = np.linalg.svd(V, full_matrices=False)
    spread = condition ** -np.linspace(0, 1, k)
    return (left * spread * np.sqrt((size**2).sum() / (spread**2).sum())) @ right


def _standard(rng: np.random.Generator, kind: str, shape: tuple[int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Rows of mean zero and identity covariance."""
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
    """The truth: what the users are. `sample` draws their rows."""

    U: Array  # (d, k), orthonormal columns
    heads: Array  # (n, classes, k)
    intercepts: Array  # (n, classes)
    rows: int  # of each user

    @property
    def classes(self) -> int:
        return self.heads.shape[1]

    def sample(self, rng: np.random.Generator, dtype: DTypeLike = np.float32, rows: int | None = None) -> UserTable:
        """Fresh rows of every user, labels 0 to classes - 1."""
        n, m = len(self.heads), self.rows if rows is None else rows
        X = rng.standard_normal((n * m, len(self.U)), dtype=np.float32).astype(dtype, copy=False)
        users = np.repeat(np.arange(n), m)
        below = np.cumsum(self.probabilities(X, users), axis=1)[:, :-1]
        y = (rng.random(n * m)[:, None] > below).sum(axis=1)
        return UserTable(X, y.astype(X.dtype), np.arange(0, n * m + 1, m), np.arange(n))

    def probabilities(self, X: NDArray[np.floating], users: NDArray[np.int64]) -> Array:
        """(rows, classes): of each class, for rows of these users."""
        P = X @ self.U.astype(X.dtype)
        outputs = np.einsum("rk,rck->rc", P, self.heads[users]) + self.intercepts[users]
        outputs -= outputs.max(axis=1, keepdims=True)
        weights = np.exp(outputs)
        return np.asarray(weights / weights.sum(axis=1, keepdims=True))

    def expected_log_loss(self, predicted: Array, X: NDArray[np.floating], users: NDArray[np.int64]) -> float:
        """Of predicted probabilities on these rows, over labels drawn anew: less noisy than on drawn labels."""
        truth = self.probabilities(X, users)
        return float(-(truth * np.log(np.maximum(predicted, 1e-300))).sum(axis=1).mean())

    def expected_error(self, predicted: NDArray[np.int64], X: NDArray[np.floating], users: NDArray[np.int64]) -> float:
        """The probability that a predicted class is not the label, over labels drawn anew."""
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
    """Draw who the users are. `strength` is the standard deviation of the heads, `skew` that of the intercepts.

    Of two classes the output of the first is zero, so that heads are those of a logistic regression.
    """
    if not 1 <= rank <= features or classes < 2 or min(users, rows) < 1 or strength < 0 or skew < 0:
        raise InputError("a population needs users, rows, a rank of at most its features and two classes or more.")
    U, _ = np.linalg.qr(rng.standard_normal((features, rank)))
    heads = strength * rng.standard_normal((users, classes, rank))
    intercepts = skew * rng.standard_normal((users, classes))
    if classes == 2:
        heads[:, 0], intercepts[:, 0] = 0.0, 0.0
    return ClassPopulation(U, heads, intercepts, rows)


_BLOCK = 1 << 22  # numbers drawn at a time


@dataclass(frozen=True)
class MarginPopulation:
    """The truth; `sample` draws rows of every user."""

    U: Array  # (d, k), orthonormal columns
    heads: Array  # (n, k), of length one
    rows: int  # of each user
    margin: float
    inside: float  # |U^T x|, with |x| = 1

    def sample(self, rng: np.random.Generator) -> UserTable:
        """Fresh rows of every user, in single precision; labels are +-1."""
        n, d = len(self.heads), len(self.U)
        X = np.empty((n * self.rows, d), np.float32)
        y = np.empty(n * self.rows, np.float32)
        for at, some, labels in self.blocks(rng):
            X[at], y[at] = some, labels
        return UserTable(X, y, np.arange(n + 1, dtype=np.int64) * self.rows, np.arange(n))

    def errors(self, rng: np.random.Generator, models: Sequence[tuple[Array, Array]]) -> list[float]:
        """Of models (matrix, heads): the share of fresh rows whose label is not the sign of <x, matrix v_i>.

        As many rows as users have, the same for all models.
        """
        wrong = np.zeros(len(models))
        for at, X, y in self.blocks(rng):
            users = np.arange(at.start, at.stop) // self.rows
            for place, (matrix, heads) in enumerate(models):
                P = (X @ matrix.astype(np.float32)).astype(np.float64)
                wrong[place] += (y * (P * heads[users]).sum(axis=1) <= 0).sum()
        return [float(count) / (len(self.heads) * self.rows) for count in wrong]

    def blocks(self, rng: np.random.Generator) -> Iterator[tuple[slice, NDArray[Any], NDArray[Any]]]:
        """Fresh rows of whole users, a few at a time: where they stand among all, X and y."""
        n, d = len(self.heads), len(self.U)
        U = self.U.astype(np.float32)
        step = max(_BLOCK // (d * self.rows), 1)
        for start in range(0, n, step):
            V = np.repeat(self.heads[start : start + step], self.rows, axis=0)
            y = 2.0 * rng.integers(0, 2, len(V)) - 1.0
            a = (y[:, None] * self._beyond_margin(rng, V)).astype(np.float32)
            W = rng.standard_normal((len(V), d), dtype=np.float32)
            W -= (W @ U) @ U.T
            W *= np.float32(math.sqrt(1 - self.inside**2)) / np.sqrt((W**2).sum(axis=1, keepdims=True))
            W += a @ U.T
            yield slice(start * self.rows, start * self.rows + len(V)), W, y.astype(np.float32)

    def _beyond_margin(self, rng: np.random.Generator, V: Array) -> Array:
        """(rows, k): uniform on the sphere of radius `inside` where <a, v> >= margin, by rejection."""
        a = np.empty_like(V)
        left = np.arange(len(V))
        while len(left):
            z = rng.standard_normal((len(left), V.shape[1]))
            z *= self.inside / np.sqrt((z**2).sum(axis=1, keepdims=True))
            z *= np.sign((z * V[left]).sum(axis=1, keepdims=True))
            good = (z * V[left]).sum(axis=1) >= self.margin
            a[left[good]] = z[good]
            left = left[~good]
        return a


def make_margin_population(
    rng: np.random.Generator,
    users: int,
    features: int,
    rank: int = 2,
    rows: int = 10,
    *,
    margin: float = 0.3,
    inside: float = math.sqrt(0.5),
) -> MarginPopulation:
    """Draw who the users are. By default half of |x|^2 is outside the subspace that decides."""
    if not 1 <= rank < features:
        raise InputError(f"rank must lie between 1 and the number of features less one. Got {rank} instead.")
    if not 0 < margin < inside < 1:
        raise InputError(f"0 < margin < inside < 1 must hold. Got margin {margin} and inside {inside} instead.")
    U, _ = np.linalg.qr(rng.standard_normal((features, rank)))
    V = rng.standard_normal((users, rank))
    V /= np.sqrt((V**2).sum(axis=1, keepdims=True))
    return MarginPopulation(U, V, rows, margin, inside)
