"""Starts of the methods. Any of them can stand before any method.

Each takes a run and public facts, spends what it is given, and returns an `Estimate`:

  start_spectral           top eigenvectors of the pair moments (Snedeker, Zhou, Bassily 2025, Algorithm 2)
  start_normalised_pairs   the same with every row brought to length one (Jain et al. 2021, Algorithm 3)
  start_power_method       a few products with the pair moments, d x k numbers each (Shen et al. 2023, Algorithm 5)
  start_random             looks at nothing and spends nothing
  start_from               a basis that is public already; one computed from users' data without noise is NOT PRIVATE

All read each user's contribution by its direction alone. Such a bound, far below every user's norm, needs no scale and
was the best choice at every epsilon tried. Without a rank they take as many directions as stand out from the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privrep.linear.class_steps import encode_step
from privrep.linear.label_steps import LabelResidual
from privrep.linear.panel_steps import Residual
from privrep.linear.steps import PairMoments, PowerStep
from privrep.local.losses import Loss
from privrep.local.prior import PriorMean
from privrep.local.representation import Estimate
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import DIRECTION_ONLY, Bound
from privrep.privacy.calibration import Query
from privrep.privacy.moments import symmetrise
from privrep.privacy.protocol import Step
from privrep.privacy.run import Run
from privrep.typing import Array

PURPOSES = dict.fromkeys(("moments", "pairs", "power"), "starting point")
"""Purposes of the pages that this module asks for; see `method.Method.purposes`."""

MAX_AUTO_RANK = 16
MOST_SQUARED = 1024  # features whose pairs are affordable: more draw too much noise, and too much time to draw it


@dataclass(frozen=True)
class Start:
    """The question to an initialiser."""

    run: Run
    transform: FeatureTransform
    rank: int | None  # None: as many directions as stand out from the noise
    mu_squared: float
    intercept: bool
    loss: Loss | None = None  # targets are labels, for this loss; None: numbers
    mean: PriorMean | None = None  # prior mean; the start sees what it leaves of numbers or labels
    level: float = 1.0  # of labels: the variance of levels

    def see_residuals(self, step: Step) -> Step:
        """Return the step as users are asked it: about what the prior mean leaves, where there is one."""
        return see_residuals(step, self.loss, self.mean, self.level)


def see_residuals(step: Step, loss: Loss | None, mean: PriorMean | None, level: float = 1.0) -> Step:
    """Return a step asked about what a prior mean leaves of numbers or labels, or the step itself where there is no
    mean.

    Args:
        step: for targets.
        loss: of labels; None: of numbers.
        mean: the prior mean; None: there is none.
        level: of labels, the variance of levels.
    """
    if mean is None:
        return encode_step(step, loss)
    return Residual(step, mean) if loss is None else LabelResidual(step, mean, loss, level)


Initialiser = Callable[[Start], Estimate]
"""A function that answers the question with a first estimate of the representation."""


def start_spectral(start: Start) -> Estimate:
    """Return the top eigenvectors of the released sum of pair moments."""
    return _start_top(start, "moments", PairMoments(start.transform, start.intercept))


def start_normalised_pairs(start: Start) -> Estimate:
    """Return the top eigenvectors for rows brought to length one: users and rows of any size have the same say."""
    return _start_top(start, "pairs", PairMoments(start.transform, start.intercept, normalised=True))


def _start_top(start: Start, page: str, step: PairMoments) -> Estimate:
    """Return the top eigenvectors of the moments that this step releases on this page."""
    query = Query(Bound(DIRECTION_ONLY, start.run.users.facts.features**2), start.mu_squared)
    return top_eigenvectors(
        symmetrise(start.run.release(page, start.see_residuals(step), {"moments": query})["moments"].value), start.rank
    )


def top_eigenvectors(moments: Array, rank: int | None, sigma: float = 0.0) -> Estimate:
    """Return the top eigenvectors of a released sum, with the error from noise that its eigenvalues show.

    A few eigenvalues may look less noisy than they are, so `sigma` bounds the noise from below.

    Args:
        moments: symmetric, with noise, (d, d).
        rank: how many eigenvectors; None: as many as stand above the noise.
        sigma: standard deviation of the noise in packed entries; 0: not known.
    """
    values, vectors = np.linalg.eigh(moments)
    k = rank if rank is not None else count_above_noise(values, MAX_AUTO_RANK)
    radius = max(find_noise_radius(values), sigma * math.sqrt(2 * len(values)))
    top, half = values[::-1][:k], radius / 2
    spike = (top + np.sqrt(np.maximum(top**2 - 4 * half**2, 0.0))) / 2  # before the noise pushed it up
    error = np.where(
        top > find_noise_edge(values, radius), (half / np.maximum(np.maximum(spike, half), 1e-300)) ** 2, 1.0
    )
    return Estimate(vectors[:, ::-1][:, :k], np.diag(error))


def find_noise_radius(values: Array) -> float:
    """Return the radius of the semicircle that eigenvalues of noise form, (d,): their median size is 0.4040 of it.

    That holds with or without a few signals among them.
    """
    return float(np.median(np.abs(values))) / 0.4040


def find_noise_edge(values: Array, radius: float | None = None) -> float:
    """Return the size at which eigenvalues of noise end: the radius, and room for its fluctuations.

    Args:
        values: all eigenvalues, (d,). Fluctuations are larger with few of them.
        radius: of the noise; None: found from the values.
    """
    return (1.15 + 2 / len(values)) * (find_noise_radius(values) if radius is None else radius)


def count_above_noise(values: Array, most: int) -> int:
    """Return how many eigenvalues stand above the semicircle that the others form: at least one.

    Args:
        values: all eigenvalues, (d,).
        most: the most to return.
    """
    above = int((values > find_noise_edge(values)).sum())
    return min(max(above, 1), most, len(values))


def start_power_method(start: Start, *, rounds: int = 4, page: str = "power") -> Estimate:
    """Return the estimate of a power method: X <- QR of the released sum of Z_i X, from a public random X.

    X has some columns to spare. The last round's singular vectors are the estimate. Noise in it has singular values of
    at most sigma (sqrt d + sqrt c), c the columns. What stands above came from the users.

    Args:
        start: the question.
        rounds: how often X is multiplied, each for an equal part of the budget.
        page: the name of the pages; it also seeds the public X.
    """
    d = start.run.users.facts.features
    wanted = MAX_AUTO_RANK if start.rank is None else start.rank
    columns = min(wanted + 4, d)
    X = random_basis(d, columns, page)
    share = start.mu_squared / rounds
    for t in range(1, rounds + 1):
        step = start.see_residuals(PowerStep(X, start.transform, start.intercept))
        query = Query(Bound(DIRECTION_ONLY, d * columns), share)
        released = start.run.release(f"{page}-{t}", step, {"image": query})["image"]
        image = released.value.reshape(columns, d).T
        X, _ = np.linalg.qr(image)
    return _read_image(image, released.sigma, start.rank)


def _read_image(image: Array, sigma: float, rank: int | None) -> Estimate:
    """Return the best `rank` directions of Z X = image: its largest singular vectors, and their error from noise.

    The users' own scatter is noise as well. It shows in the smaller half of the singular values, where there is nothing
    else unless the rank is larger than that.

    Args:
        image: (d, columns), with noise.
        sigma: standard deviation of the noise in an entry.
        rank: how many directions; None: as many as stand above the noise.
    """
    left, size, _ = np.linalg.svd(image, full_matrices=False)
    d, columns = image.shape
    noise = max(sigma * (math.sqrt(d) + math.sqrt(columns)), 1.2 * float(np.median(size)) if rank is None else 0.0)
    k = rank if rank is not None else min(max(int((size > 1.15 * noise).sum()), 1), MAX_AUTO_RANK, d)
    error = np.minimum(d * sigma**2 / np.maximum(size[:k] ** 2 - d * sigma**2, 1e-300), 1.0)
    return Estimate(left[:, :k], np.diag(error))


def draw_public_order(rows: int, name: str) -> NDArray[np.int64]:
    """Return a public permutation of row numbers, (rows,), the same for the same number and name."""
    return np.random.default_rng([rows, *name.encode()]).permutation(rows)


def random_basis(d: int, k: int, name: str) -> Array:
    """Return a public random orthonormal basis, (d, k), the same for the same name.

    Args:
        d: rows.
        k: columns.
        name: seeds the draw.
    """
    generator = np.random.default_rng([d, k, *name.encode()])
    return np.linalg.qr(generator.standard_normal((d, k)))[0]


def start_random(start: Start) -> Estimate:
    """Return a random basis of the given rank. Nothing of the users is in it."""
    k = 1 if start.rank is None else start.rank
    return Estimate(random_basis(start.run.users.facts.features, k, "random-start"), np.eye(k))


def start_from(basis: Array, error: float) -> Initialiser:
    """Return an initialiser that starts from a given basis.

    Args:
        basis: orthonormal in the coordinates of the transform, (d, k).
        error: about its mean squared sine.
    """
    k = basis.shape[1]
    return lambda start: Estimate(basis, np.eye(k) * error)


INITIALISERS: dict[str, Initialiser] = {
    "spectral": start_spectral,
    "normalised-pairs": start_normalised_pairs,
    "power-method": start_power_method,
    "random": start_random,
}


MOST_SPECTRAL = 256  # features up to which noise of all pairs does less harm than noise of several rounds


def choose_start(features: int, pairs: Initialiser = start_spectral) -> Initialiser:
    """Return `pairs`, whose release is a d x d matrix, or the power method, whose releases are of a few columns each.

    With 20,000 users and epsilon 1 both find the representation of 250 features. Of 500 features only the second does.
    """
    return pairs if features <= MOST_SPECTRAL else start_power_method
