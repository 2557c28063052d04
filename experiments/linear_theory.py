"""The linear case of paper 002 (section 5): loss, model of the data, optimum, error, Theorem 5.1 and private training.

Pairs (x, x~) of d1 and d2 numbers, encoders G = [G1, G2] of shape (r, d1 + d2), and the loss
    L(G) = -1/n sum_i <G1 x_i, G2 x~_i> + 1/(n(n-1)) sum_{i != j} <G1 x_i, G2 x~_j> + (alpha/4) |G G^T - I|^2
         = -tr(G1 S G2^T) + (alpha/4) |G G^T - I|^2,
where S is the sample's unbiased cross-covariance: pairs and pairs of pairs enter through S alone, at a cost of n d1 d2.

Two ways to train privately, under one ledger:
* `fit_by_batches`, Algorithm 1: gradient steps, each on a batch whose gradient is clipped as a whole. One pair may turn
  the whole gradient round, so it moves by 2 c whatever the batch: a larger batch hides nobody better.
* `fit_by_moment`: S is all that the loss takes from the data, so it is released once, every user clipped by itself, and
  what follows is public arithmetic with a closed form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.privacy.bounds import Bound, Contributions
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import BatchTerm, Products
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.privacy.sampling import Fixed, Poisson, plan_noise_multiplier
from privrep.typing import Array


def cross_covariance(left: NDArray[Any], right: NDArray[Any]) -> Array:
    """S, (d1, d2), of pairs in rows, n >= 2: sum_i (x_i - mean)(x~_i - mean)^T / (n - 1)."""
    if len(left) != len(right) or len(left) < 2:
        raise InputError(f"a contrast takes two pairs or more. Got {len(left)} and {len(right)} halves; use more.")
    first, second = left.astype(np.float64), right.astype(np.float64)
    return (first - first.mean(axis=0)).T @ (second - second.mean(axis=0)) / (len(first) - 1)


def loss(G: Array, S: Array, alpha: float) -> float:
    """-tr(G1 S G2^T) + (alpha/4) |G G^T - I|^2, G being [G1, G2]."""
    d1, over = len(S), G @ G.T - np.eye(len(G))
    return float(-np.sum((G[:, :d1] @ S) * G[:, d1:]) + alpha / 4 * np.sum(over**2))


def gradient(G: Array, S: Array, alpha: float) -> Array:
    """Of `loss` in G: [-G2 S^T, -G1 S] + alpha (G G^T - I) G."""
    d1 = len(S)
    contrast = np.concatenate([G[:, d1:] @ S.T, G[:, :d1] @ S], axis=1)
    return alpha * (G @ G.T - np.eye(len(G))) @ G - contrast


def minimiser(S: Array, rank: int, alpha: float) -> Array:
    """A G of least loss (Lemma D.6); V G is another for every rotation V.

    G1 = ((I + Lambda / alpha) / 2)^(1/2) P^T and G2 the same with Q^T, of the `rank` largest singular values of S.
    """
    P, values, Qt = np.linalg.svd(S, full_matrices=False)
    size = np.sqrt((1 + values[:rank, None] / alpha) / 2)
    return np.concatenate([size * P[:, :rank].T, size * Qt[:rank]], axis=1)


def representation_error(G: Array, truth: Array, d1: int) -> float:
    """The larger of min_A |A G1 - G1*| and min_A |A G2 - G2*|, A any (r, r): what of the truth G cannot express."""
    halves = (slice(None, d1), slice(d1, None))
    return max(_left_over(G[:, half], truth[:, half]) for half in halves)


def _left_over(G: Array, truth: Array) -> float:
    fitted = np.linalg.lstsq(G.T, truth.T, rcond=None)[0]
    return float(np.linalg.norm(G.T @ fitted - truth.T))


def distance(G: Array, other: Array) -> float:
    """min over rotations O of |O G - other|: what the theorem asks of the start."""
    turn, _, back = np.linalg.svd(other @ G.T)
    return float(np.linalg.norm(turn @ back @ G - other))


@dataclass(frozen=True)
class Spiked:
    """The spiked covariance model: x = U1 z + xi, x~ = U2 z + xi~, everything normal with mean zero, z, xi, xi~
    independent, the noise isotropic. Theorem 5.1 takes any sub-Gaussian; these are the simplest."""

    U1: Array  # (d1, r), orthonormal columns
    U2: Array  # (d2, r)
    signal: Array  # (r,): the diagonal of Cov(z), falling, the first one
    noise: tuple[float, float]  # standard deviations of the entries of xi and xi~: 1/s1 and 1/s2

    @property
    def d1(self) -> int:
        return len(self.U1)

    @property
    def features(self) -> int:
        return len(self.U1) + len(self.U2)

    @property
    def rank(self) -> int:
        return len(self.signal)

    @property
    def condition(self) -> float:
        """kappa."""
        return float(self.signal[0] / self.signal[-1])

    @property
    def spread(self) -> float:
        """r + s1^-2 r_e(Cov xi) + s2^-2 r_e(Cov xi~), what the statistical error goes with."""
        return self.rank + len(self.U1) * self.noise[0] ** 2 + len(self.U2) * self.noise[1] ** 2

    @property
    def cross_covariance(self) -> Array:
        return (self.U1 * self.signal) @ self.U2.T

    def squared_lengths(self) -> tuple[float, float]:
        """E|x|^2 and E|x~|^2."""
        total = float(self.signal.sum())
        return total + len(self.U1) * self.noise[0] ** 2, total + len(self.U2) * self.noise[1] ** 2

    def minimiser(self, alpha: float) -> Array:
        """G*, of the population's loss."""
        return minimiser(self.cross_covariance, self.rank, alpha)

    def pairs(self, rng: np.random.Generator, users: int) -> UserTable:
        """One pair of each user: rows [x, x~], float32; a y of 0 says that the second half is in the row itself."""
        z = rng.standard_normal((users, self.rank)) * np.sqrt(self.signal)
        halves = [
            z @ U.T + size * rng.standard_normal((users, len(U)))
            for U, size in zip((self.U1, self.U2), self.noise, strict=True)
        ]
        rows = np.concatenate(halves, axis=1).astype(np.float32)
        return UserTable(rows, np.zeros(users, np.float32), np.arange(users + 1), np.arange(users))


def make_spiked(
    rng: np.random.Generator,
    d1: int,
    d2: int,
    rank: int,
    *,
    condition: float = 2.0,
    snr: tuple[float, float] = (1.0, 1.0),
) -> Spiked:
    """Random bases; Cov(z) runs geometrically from 1 to 1/condition; s1, s2 are the two of `snr`."""
    if not 1 <= rank <= min(d1, d2):
        raise InputError(f"rank must lie between 1 and {min(d1, d2)}, the features of a half. Got {rank} instead.")
    if not (condition >= 1 and min(snr) > 0):
        raise InputError(f"condition must be 1 or more and snr positive. Got {condition} and {snr} instead.")
    U1, U2 = (np.linalg.qr(rng.standard_normal((d, rank)))[0] for d in (d1, d2))
    return Spiked(U1, U2, condition ** -np.linspace(0, 1, rank), (1 / snr[0], 1 / snr[1]))


def start_near(rng: np.random.Generator, truth: Array, away: float) -> Array:
    """The truth plus a random matrix of Frobenius norm `away`: the start near the optimum that the theorem supposes.

    It knows the truth, as a model trained on public data would know something of it. At most `away` from the truth
    (`distance`), since a rotation can only bring it nearer.
    """
    moved = rng.standard_normal(truth.shape)
    return truth + away * moved / np.linalg.norm(moved)


@dataclass(frozen=True)
class Bounded:
    """The three terms of Theorem 5.1, every hidden constant one: curves show slopes, never values."""

    optimisation: float
    privacy: float
    statistical: float

    @property
    def total(self) -> float:
        return self.optimisation + self.privacy + self.statistical


def theorem_5_1(
    model: Spiked,
    users: int,
    epsilon: float,
    delta: float,
    steps: int,
    *,
    alpha: float = 1.0,
    start: float = 1.0,
    batch: float = 1.0,
) -> Bounded:
    """The bound on `representation_error` of Algorithm 1 after `steps` from a start this far off (Corollary D.2).

    The formula in the text of the theorem has lost its middle term; it is D.27's. With l = log(T (n + d)),
    sigma = batch sqrt(T log(1/delta)) / (n epsilon) and R = r d + l:
    optimisation = exp(-sqrt(T / R) / (8 kappa sigma)) start, privacy = (1 + alpha) (sigma sqrt(R / T))^(1/2),
    statistical = (alpha + 1/alpha) sqrt(r spread^2 log^3(n + d) / n).

    The paper's sigma is that of batch = 1 whatever the batch (Proposition 3.1). That would be right for a mean of b
    gradients, each clipped, which one pair moves by 2c/b; the gradient of a batch that is clipped as a whole moves by
    2c, and a sample of b of n users makes that cheaper by b/n, not by 1/n. So with batch = b this is the bound with the
    noise that Algorithm 1 needs, and for b = nu n, as the theorem asks, neither of the first two terms falls with n.
    """
    d, r = model.features, model.rank
    size = r * d + math.log(steps * (users + d))
    relative = batch * math.sqrt(math.log(1 / delta)) / (users * epsilon)  # sigma / sqrt T
    scatter = math.sqrt(r * math.log(users + d) ** 3 / users) * model.spread
    return Bounded(
        optimisation=math.exp(-1 / (8 * model.condition * relative * math.sqrt(size))) * start,
        privacy=(1 + alpha) * math.sqrt(relative * math.sqrt(size)),
        statistical=(alpha + 1 / alpha) * scatter,
    )


@dataclass(frozen=True)
class CrossMoment:
    """The mean over a user's rows of (x, unit)(x~, unit)^T: moment, both means and how much was counted, in one
    matrix of rank one a row."""

    spec: ClassVar[StepSpec] = StepSpec()
    d1: int
    unit: float

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        X = batch.X
        users, rows, _ = X.shape
        ones = np.full((users, rows, 1), self.unit)
        left = np.concatenate([X[:, :, : self.d1] / rows, ones / rows], axis=2)
        return {"moment": Products(left, np.concatenate([X[:, :, self.d1 :], ones], axis=2))}


def fit_by_moment(run: Run, d1: int, rank: int, norm: float, *, alpha: float = 1.0, unit: float = 1.0) -> Array:
    """G of least loss on a private cross-covariance: one release, every user's products clipped to `norm`, and SVD.

    `norm` and `unit` are public numbers: about E|x| E|x~|, and at most a small part of either length. Clipping gives
    long pairs less weight, in the means as in the moment; it does not turn the singular vectors of isotropic normals.

    Formal guarantee: the release spends the ledger's whole capacity; all else is post-processing of it.
    """
    shape = (d1 + 1, run.users.facts.features - d1 + 1)
    query = Query(Bound(norm, shape[0] * shape[1]), run.ledger.capacity)
    total = run.release("moment", CrossMoment(d1, unit), {"moment": query})["moment"].value.reshape(shape)
    weight = max(total[-1, -1] / unit**2, 1.0)
    first, second = total[:-1, -1] / (unit * weight), total[-1, :-1] / (unit * weight)
    return minimiser(total[:-1, :-1] / weight - np.outer(first, second), rank, alpha)


@dataclass(frozen=True)
class BatchGradient:
    """The gradient of the loss on a batch, penalty included, as one vector: Algorithm 1's question about it."""

    G: Array
    d1: int
    alpha: float
    rows_per_user: int = 1  # rows of a user that are used

    @property
    def spec(self) -> StepSpec:
        return StepSpec(layout="batch", rows_per_user=self.rows_per_user)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        X, y = batch.X, batch.y
        rows = X.reshape(-1, X.shape[2])[y.ravel() != -1]
        left, right = rows[:, : self.d1], rows[:, self.d1 :]
        S = cross_covariance(left, right) if len(rows) > 1 else np.zeros((left.shape[1], right.shape[1]))
        return {"gradient": BatchTerm(gradient(self.G, S, self.alpha).ravel())}


def fit_by_batches(
    run: Run,
    d1: int,
    start: Array,
    sampling: Fixed | Poisson,
    steps: int,
    norm: float,
    step: float,
    alpha: float = 1.0,
    multiplier: float | None = None,
) -> Array:
    """Algorithm 1: `steps` gradient steps of size `step` from a public start, each on a batch of its own, whose
    gradient is clipped to `norm` as a whole.

    Formal guarantee: noise of standard deviation sigma * norm is charged as a multiplier of sigma / 2, since one pair
    moves the gradient by 2 norm. Unless a multiplier is given, all steps together spend the ledger's budget but for the
    margin of `plan_noise_multiplier`.
    """
    if multiplier is None:
        multiplier = plan_noise_multiplier(run.ledger.budget, sampling, steps, batch_level=True)
    query = Query(Bound(norm, start.size, terms_per_user=1), multiplier**-2)
    walked = run.iterate(
        "batches",
        steps,
        {"G": start},
        lambda state: BatchGradient(state["G"], d1, alpha),
        {"gradient": query},
        lambda state, releases: {"G": state["G"] - step * releases["gradient"].value.reshape(start.shape)},
        sampling,
    )
    return walked["G"]
