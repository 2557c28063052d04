"""Heads as posterior means, for many users of equal size at once, with leave-one-out in closed form.

A user's residuals r around the prior mean are b + P v + e. Here b ~ N(0, rho s^2), v ~ N(0, s^2 I), e ~ N(0, s^2 I),
and P are the user's rows less an origin, times the public factor. With B = (I + rho 11^T + P P^T)^-1 the posterior
means are b = rho 1^T B r and v = P^T B r. The residual of row j by the posterior without its target is (B r)_j / B_jj.
The row's features stay: they are part of the user's mean row either way.

Each user's numbers are a function of its own rows to the last bit (see `local.least_squares`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privrep.data.sparse import SparseRows
from privrep.local.least_squares import centre_rows, invert, move_users_last, sum_columns, sum_rows
from privrep.local.prior import HeadPrior, PriorMean
from privrep.privacy.moments import pack, packed_size
from privrep.typing import Array, Floats

FAR = 4.0  # standard deviations of levels beyond which a user's own counts for more than the prior says
LARGEST = 1e11  # of squares of a user's images, in units of the noise: beyond, a user keeps its level alone
FEW = 8  # coordinates, up to which the systems of all users are solved side by side


@dataclass(frozen=True)
class Fits:
    """Posterior means of users with equally many rows, and what leaving each target out would have given."""

    level: Array  # (users,)
    coordinates: Array  # (users, p): v
    left: Array  # (users, m): r_j minus its prediction without y_j
    certainty: Array  # (users, m): B_jj, the noise's variance over the variance of `left`
    dual: Array  # (users, m): B r


@dataclass(frozen=True)
class Spread:
    """Users' rows as the slopes' prior weighs them, before levels: B_0 r, B_0 1 and the diagonal of B_0, (users, m)."""

    images: Array  # P, (users, m, p)
    targets: Array  # B_0 r
    ones: Array  # B_0 1
    diagonal: Array
    lost: NDArray[np.bool_]  # (users,): whose images were too large and count as zero
    inverse: Array  # (users, m, m) or (users, p, p), whichever is smaller

    def apply(self, values: Array) -> Array:
        """Return B_0 times values (users, m, c)."""
        _, m, p = self.images.shape
        if p == 0:
            return values
        if m <= p:
            return self.inverse @ values
        return values - self.images @ (self.inverse @ (self.images.transpose(0, 2, 1) @ values))

    def level_gain(self, ratio: float | Array) -> Array:
        """Return the variance that is left of levels, (users,), in units of the noise's.

        Args:
            ratio: variance of levels over the noise's, a number or (users,).
        """
        whole = self.ones.sum(axis=1)
        return 1 / (np.maximum(whole, 1e-300) + 1 / np.maximum(ratio, 1e-300))

    def raise_ratios(self, ratio: float | Array, noise: float) -> Array:
        """Return the ratio of levels for each user, (users,): larger where its own level lies FAR off the prior mean.

        Levels have heavier tails than normal ones have, and a user who is unlike all others is not to pay for it.

        Args:
            ratio: variance of levels over the noise's, a number or (users,).
            noise: variance of the noise.
        """
        whole, pull = np.maximum(self.ones.sum(axis=1), 1e-300), self.targets.sum(axis=1)
        beyond = (pull / whole) ** 2 / max(noise, 1e-300) - FAR**2 * (ratio + 1 / whole)
        return ratio + np.where(beyond > 0, beyond, 0.0)

    def with_levels(self, ratio: float | Array) -> Fits:
        """Return the fits for a variance of levels over the noise's, a number or (users,); infinity: levels are
        free."""
        m = self.ones.shape[1]
        pull, gain = self.targets.sum(axis=1), self.level_gain(ratio)
        dual = self.targets - self.ones * (gain * pull)[:, None]
        diagonal = np.maximum(self.diagonal - gain[:, None] * self.ones**2, 0.5e-6 / m)
        coordinates = np.matmul(dual[:, None, :], self.images)[:, 0]
        return Fits(gain * pull, coordinates, dual / diagonal, diagonal, dual)


def make_images(X: Floats | SparseRows, factor: Array, mean: PriorMean, own: bool) -> Array:
    """Return users' rows, less their origins, times the factor: (users, m, p).

    A user's origin is its mean row (`own`), or the public centre except in columns where no centre is known. Without
    intercepts it is zero.

    Args:
        X: rows (users, m, d).
        factor: the directions along which slopes vary, (d, p).
        mean: the prior mean, with the centre.
        own: whether the origin is the user's own mean row.
    """
    if isinstance(X, SparseRows):
        images = X.project(factor)
    elif _is_diagonal(factor):
        images = (X * np.diag(factor).astype(X.dtype)).astype(np.float64)
    else:
        images = (X @ factor.astype(X.dtype)).astype(np.float64)
    if not mean.intercept or not factor.shape[1]:
        return images
    if own:
        return centre_rows(images)
    return images - make_origins(X, factor, mean, own)


def _is_diagonal(factor: Array) -> bool:
    """Return whether a factor (d, p) is a diagonal matrix."""
    d, p = factor.shape
    return d == p and not (factor - np.diag(np.diag(factor))).any()


def make_origins(X: Floats | SparseRows, factor: Array, mean: PriorMean, own: bool) -> Array:
    """Return the images of users' origins, (users, 1, p) or (1, 1, p).

    Args:
        X: rows (users, m, d).
        factor: the directions along which slopes vary, (d, p).
        mean: the prior mean, with the centre.
        own: whether the origin is the user's own mean row.
    """
    if not mean.intercept:
        return np.zeros((1, 1, factor.shape[1]))
    if own:
        return mean.project_means(X, np.zeros(len(factor)), factor)
    public: Array = ((mean.centre * mean.located) @ factor)[None, None]
    if mean.located.all():
        return public
    return public + mean.project_means(X, np.zeros(len(factor)), factor * (1 - mean.located)[:, None])


def make_spread(images: Array, residuals: Array) -> Spread:
    """Return users' residuals as the slopes' prior weighs them.

    Args:
        images: rows in the prior's units, (users, m, p).
        residuals: targets less the prior mean, (users, m).
    """
    users, m, p = images.shape
    if p == 0:
        ones = np.ones((users, m))
        return Spread(images, residuals, ones, ones, np.zeros(users, bool), np.zeros((users, 0, 0)))
    largest = np.abs(images).max(axis=(1, 2), initial=0.0)
    lost = ~(largest**2 * m * p < LARGEST)
    if lost.any():
        images = np.where(lost[:, None, None], 0.0, images)
    if p <= FEW and p < m:
        return _spread_few(images, residuals, lost)
    right = np.stack([residuals, np.ones((users, m))], axis=2)  # (users, m, 2)
    if m <= p:
        inverse = np.linalg.inv(images @ images.transpose(0, 2, 1) + np.eye(m))
        solved = inverse @ right
        diagonal = np.ascontiguousarray(inverse[:, np.arange(m), np.arange(m)])
    else:
        inverse = np.linalg.inv(images.transpose(0, 2, 1) @ images + np.eye(p))
        turned = images @ inverse
        solved = right - turned @ (images.transpose(0, 2, 1) @ right)
        diagonal = 1 - (turned * images).sum(axis=2)
    solved, diagonal = np.ascontiguousarray(solved.transpose(2, 0, 1)), np.maximum(diagonal, 1e-12)
    return Spread(images, solved[0], solved[1], diagonal, lost, np.asarray(inverse, dtype=np.float64))


def _spread_few(images: Array, residuals: Array, lost: NDArray[np.bool_]) -> Spread:
    """Return `make_spread` of few coordinates: with the users last every operation is one long loop.

    Args:
        images: rows in the prior's units, (users, m, p), zero for users who are lost.
        residuals: targets less the prior mean, (users, m).
        lost: (users,), a mask.
    """
    P, y, p = move_users_last(images), move_users_last(residuals), images.shape[2]
    gram = np.empty((p, p, len(images)))
    for a in range(p):
        for b in range(a + 1):
            gram[a, b] = gram[b, a] = sum_rows(P[a] * P[b]) + (a == b)
    inverse = invert(gram)
    solved, ones, diagonal = y.copy(), np.ones_like(y), np.ones_like(y)
    for a in range(p):
        turned = sum_columns(inverse[a][:, None] * P)
        solved -= turned * sum_rows(P[a] * y)
        ones -= turned * sum_rows(P[a])
        diagonal -= turned * P[a]
    solved, ones, diagonal = (np.ascontiguousarray(part.T) for part in (solved, ones, np.maximum(diagonal, 1e-12)))
    return Spread(images, solved, ones, diagonal, lost, np.ascontiguousarray(inverse.transpose(2, 0, 1)))


@dataclass(frozen=True)
class PosteriorHeads:
    """Heads of users with equally many rows, for one target: intercept + <x, slopes + factor coordinates>.

    The doubt about a prediction at x, in units of the noise's variance, is (1, p)^T S (1, p) for p = factor^T x -
    origin.
    S is packed in `doubt` where there are at most MOST_PACKED coordinates. With more of them `doubt` has two numbers:
    what is left of the level's variance and of the mean variance of a coordinate.
    """

    intercept: Array  # (users,)
    coordinates: Array  # (users, p)
    origin: Array  # (users, p)
    doubt: Array  # (users, packed (1 + p)) or (users, 2)
    loss: Array  # (users,): mean square of what each target left out would have been off


MOST_PACKED = 6


def count_doubt(p: int) -> int:
    """Return how many numbers the doubt of a head with p coordinates has."""
    return packed_size(1 + p) if p <= MOST_PACKED else 2


def fit_posterior(X: Floats | SparseRows, y: Array, prior: HeadPrior, target: int) -> PosteriorHeads:
    """Return the heads of users with equally many rows, for one target.

    Args:
        X: rows (users, m, d).
        y: the target, (users, m).
        prior: of heads.
        target: its position among the prior's targets.
    """
    mean, m = prior.mean, X.shape[1]
    ratio = prior.level_ratio_at(m, target) if mean.intercept else 0.0
    residuals = y - mean.predict_users(X)[:, :, target]
    images = make_images(X, prior.factor, mean, prior.own_origin)
    spread = make_spread(images, residuals)
    ratios = spread.raise_ratios(ratio, float(prior.noise[target])) if mean.intercept else np.zeros(len(y))
    fits = spread.with_levels(ratios)
    base = np.full(len(y), mean.constant[target])
    origin = np.zeros((len(y), images.shape[2]))
    origin += make_origins(X, prior.factor, mean, prior.own_origin)[:, 0]
    if mean.intercept:
        moved = mean.project_means(X, mean.centre * mean.located, mean.mean_weights(m)[:, target, None])
        base = base + moved[:, 0, 0]
    coordinates = np.where(spread.lost[:, None], 0.0, fits.coordinates)
    intercept = base + fits.level - (origin * coordinates).sum(axis=1)
    return PosteriorHeads(intercept, coordinates, origin, _find_doubt(spread, ratios), (fits.left**2).mean(axis=1))


def _find_doubt(spread: Spread, ratio: Array) -> Array:
    """Return what is left to doubt, (users, packed (1 + p)) or (users, 2); see `PosteriorHeads`.

    Args:
        spread: the users' rows.
        ratio: variance of levels over the noise's, (users,).
    """
    users, m, p = spread.images.shape
    gain = spread.level_gain(ratio)
    if p > MOST_PACKED:
        across = spread.images.transpose(0, 2, 1)
        gram = spread.images @ across if m <= p else across @ spread.images
        explained = np.trace(np.linalg.solve(np.eye(gram.shape[1]) + gram, gram), axis1=1, axis2=2)
        return np.stack([gain, 1 - explained / p], axis=1)
    gram = spread.images.transpose(0, 2, 1) @ spread.images
    slopes = np.linalg.inv(np.eye(p) + gram) if p else np.zeros((users, 0, 0))
    pull = np.matmul(spread.ones[:, None, :], spread.images)  # (users, 1, p): 1^T B_0 P
    joint = np.empty((users, 1 + p, 1 + p))
    joint[:, 0, 0] = gain
    joint[:, 0, 1:] = joint[:, 1:, 0] = -gain[:, None] * pull[:, 0]
    joint[:, 1:, 1:] = slopes + gain[:, None, None] * (pull.transpose(0, 2, 1) @ pull)
    return pack(joint)


def find_doubt_at(doubt: Array, p: Array) -> Array:
    """Return the doubt about predictions, (rows,), in units of the noise's variance.

    Args:
        doubt: of each row's user, (rows, .).
        p: coordinates of the rows, (rows, p).
    """
    if p.shape[1] > MOST_PACKED:
        return np.asarray(doubt[:, 0] + doubt[:, 1] * (p**2).sum(axis=1))
    joined = np.concatenate([np.ones((len(p), 1)), p], axis=1)
    products = pack(joined[:, :, None] * joined[:, None, :])
    return np.asarray((products * doubt).sum(axis=1))
