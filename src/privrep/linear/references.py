"""References that the demo compares a private fit with. NOT PRIVATE, except `fit_alone`, in which nothing is shared.

`fit_fedrep` reads exact sums of users' contributions, which nothing that claims privacy may do. It takes
`BoundedSum.exact_numbers`, under bounds that do not clip. References of experiments alone are in
`experiments/references.py`.
With `intercept` each user's rows are centred by their own mean, which takes its intercept out of the regression.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from privrep.data.table import UserTable
from privrep.heads.regression import fit_own_candidate
from privrep.linear.methods.private_fedrep import fit_head_and_gradient
from privrep.linear.steps import PairMoments
from privrep.local.least_squares import centre_rows
from privrep.local.representation import Representation
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import Bound, Contributions, Losses
from privrep.privacy.contributions import Vectors
from privrep.privacy.moments import pack, packed_size, symmetrise, unpack
from privrep.privacy.protocol import Step, StepSpec, UserBatch, Users
from privrep.typing import Array, Floats

SHORTEST = 2.0**-300  # bound of a statistic of which nobody sends anything


class PlainSums:
    """Exact sums of users' contributions under bounds that reach beyond the longest one: plain sums. NOT PRIVATE.

    A bound that is far too long would leave sums few digits, so bounds follow what was seen. The first pass of a
    statistic does nothing else.
    """

    def __init__(self, users: Users) -> None:
        self._users = users
        self._bounds: dict[str, float] = {}

    def __call__(self, step: Step, sizes: Mapping[str, int]) -> dict[str, Array]:
        """Return the sum of each statistic, (size,); `sizes` says how long each is."""
        while True:
            seen = _Measured(step, {key: [0.0] for key in sizes})
            asked = {key: Bound(self._bounds.get(key, 1.0), size) for key, size in sizes.items()}
            sums = self._users.sums(seen, asked)
            longest = {key: max(lengths) for key, lengths in seen.longest.items()}
            if all(key in self._bounds and 2 * longest[key] <= bound.norm for key, bound in asked.items()):
                return {key: one.exact_numbers for key, one in sums.items()}
            self._bounds |= {key: max(4 * longest[key], self._bounds.get(key, SHORTEST)) for key in asked}


@dataclass(frozen=True)
class _Measured:
    """A step that remembers the longest contribution of each call."""

    step: Step
    longest: dict[str, list[float]]

    @property
    def spec(self) -> StepSpec:
        return self.step.spec

    def __call__(self, batch: UserBatch) -> Mapping[str, Contributions | Losses]:
        sent = self.step(batch)
        for key, kind in sent.items():
            if key in self.longest and not isinstance(kind, Losses):
                norms = kind.norms()
                self.longest[key].append(float(np.max(norms, where=np.isfinite(norms), initial=0.0)))
        return sent


@dataclass(frozen=True)
class LinearModel:
    """A linear predictor for everybody: <x, weights> + intercept."""

    weights: Array  # (d,)
    intercept: float


def fit_fedrep(
    users: Users, rank: int, *, intercept: bool = True, scale: Array | None = None, rounds: int = 100, step: float = 1.0
) -> Representation:
    """Fit FedRep (Collins et al. 2021) with full participation, no clipping and no noise. NOT PRIVATE.

    Every round each user fits its head by least squares on all its rows. It takes the gradient of its mean squared
    error on the same rows. The server takes a gradient step and a QR, and stops early once a round moves nothing.

    Args:
        users: who are asked.
        rank: columns of the representation.
        intercept: whether users have intercepts.
        scale: what features are divided by, (d,); None: nothing.
        rounds: at most.
        step: in units of 1 / (2 sigma_max(V)^2 / n), the longest the theory allows.
    """
    inverse_scale = np.ones(users.facts.features) if scale is None else 1 / scale
    U = _find_spectral_basis(users, rank, inverse_scale, intercept)
    d, k = U.shape
    add_up, sizes = PlainSums(users), {"gradient": d * k, "heads": packed_size(k)}
    for _ in range(rounds):
        sums = add_up(FullGradient(U, inverse_scale, intercept), sizes)
        largest = float(np.linalg.eigvalsh(unpack(sums["heads"]))[-1])
        before, gradient = U, sums["gradient"].reshape(d, k)
        U, _ = np.linalg.qr(U - step / (2 * max(largest, 1e-300)) * gradient)
        if subspace_distance(before, U) < 1e-7:
            break
    return Representation(U, FeatureTransform(1 / inverse_scale), 0.0)


@dataclass(frozen=True)
class FullGradient:
    """The head and the gradient of every user on all its rows. Users whose rows any U can fit send zero."""

    spec: ClassVar[StepSpec] = StepSpec()
    U: Array
    inverse_scale: Array
    intercept: bool

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `gradient`, (users, d k), and the packed second moment of `heads` of each user."""
        X: Floats = batch.X
        y: Floats = batch.y
        rows, targets = (centre_rows(X), centre_rows(y)) if self.intercept else (X, y)
        every = np.arange(X.shape[1] if X.shape[1] > self.U.shape[1] + self.intercept else 0)
        heads, gradient = fit_head_and_gradient(self.U, rows * self.inverse_scale, targets, every, every)
        return {"gradient": Vectors(gradient), "heads": Vectors(pack(heads[:, :, None] * heads[:, None, :]))}


def _find_spectral_basis(users: Users, rank: int, inverse_scale: Array, intercept: bool) -> Array:
    """Return the top eigenvectors of the exact sum of pair moments, (d, rank). NOT PRIVATE.

    That is Algorithm 2 of Snedeker, Zhou, Bassily 2025 without clipping and noise.

    Args:
        users: who are asked.
        rank: how many eigenvectors.
        inverse_scale: factors of the features, (d,).
        intercept: whether users have intercepts.
    """
    step, size = PairMoments(FeatureTransform(1 / inverse_scale), intercept), users.facts.features**2
    total = PlainSums(users)(step, {"moments": size})["moments"]
    return np.linalg.eigh(symmetrise(total))[1][:, ::-1][:, :rank]


def subspace_distance(U: Array, W: Array) -> float:
    """Return the sine of the largest principal angle between the spans of U and W, dist(U, W) of the papers.

    Args:
        U: orthonormal columns, (d, k).
        W: orthonormal columns, (d, k).
    """
    return float(np.linalg.norm(W - U @ (U.T @ W), ord=2))


def fit_pooled(table: UserTable, *, ridge: float = 1e-6, intercept: bool = True) -> LinearModel:
    """Fit one ridge regression on everybody's rows. NOT PRIVATE.

    Args:
        table: of all users.
        ridge: relative to the mean square of the features.
        intercept: whether the model has an intercept.
    """
    d = table.n_features
    normal = np.zeros((d + 2, d + 2))
    for block in table.blocks():
        joined = np.column_stack([block.X, np.full(block.n_rows, float(intercept)), block.y]).astype(np.float64)
        normal += joined.T @ joined
    gram, right = normal[:-1, :-1], normal[:-1, -1]
    penalty = np.append(np.full(d, ridge * np.trace(gram[:d, :d]) / d + 1e-300), 0.0 if intercept else 1.0)
    solution: Array = np.linalg.lstsq(gram + np.diag(penalty), right, rcond=None)[0].astype(np.float64)
    return LinearModel(solution[:d], float(solution[d]))


def fit_alone(table: UserTable, *, intercept: bool = True) -> tuple[Array, Array]:
    """Fit every user's own ridge regression; return weights (n, d) and intercepts (n,). Nothing is shared or spent."""
    weights, intercepts = np.zeros((table.n_users, table.n_features)), np.zeros(table.n_users)
    for users, size in table.positions_by_size():
        for part in np.array_split(users, max(len(users) * size // 8192, 1)):
            X, y = (values.astype(np.float64, copy=False) for values in table.group(part, size))
            fit = fit_own_candidate(X, y, np.ones(table.n_features), intercept)
            weights[part], intercepts[part] = fit.weights, fit.intercept
    return weights, intercepts


def fit_mixed(
    table: UserTable, along: Array, *, follow: bool = True, iterations: int = 60, tolerance: float = 1e-3
) -> tuple[Array, Array]:
    """Fit a mixed model by EM (Liu and Rubin 1994); return weights (n, d) and intercepts (n,). NOT PRIVATE.

    Args:
        table: every user needs a row.
        along: the directions in which users' slopes differ around common ones, (d, k); levels differ, too.
        follow: whether levels may follow the users' mean rows.
        iterations: at most.
        tolerance: largest change of a variance, relative to itself and the noise's, after which to stop.
    """
    m = _Moments.of(table, along, follow)
    n, q, p = table.n_users, 1 + along.shape[1], len(m.normal) - 1
    gram, right, square = m.normal[:p, :p], m.normal[:p, p], m.normal[p, p] / table.n_rows
    little = 1e-9 * np.trace(gram) / p * np.eye(p)
    spread = (square - right @ np.linalg.solve(gram + little, right) / table.n_rows) / 2 / q * np.eye(q)
    noise = m.lines if m.lines is not None else float(spread[0, 0]) * q
    for _ in range(iterations):
        before = np.append(np.diag(spread), noise)
        inverse = np.linalg.inv(m.inner + noise * np.linalg.inv(spread))
        lever = np.stack([sum(m.across[s] * inverse[:, s, r] for s in range(q)) for r in range(q)])
        whole = gram - (lever @ m.across.transpose(0, 2, 1)).sum(axis=0) + little
        fixed = np.linalg.solve(whole, right - sum(lever[r] @ m.part[:, r] for r in range(q)))
        left = m.part - np.stack([fixed @ across for across in m.across], axis=1)
        own = (inverse @ left[:, :, None])[:, :, 0]
        fit = square - (2 * fixed @ right - fixed @ gram @ fixed) / table.n_rows
        fit += float((own * ((m.inner @ own[:, :, None])[:, :, 0] - 2 * left)).sum()) / table.n_rows
        spread = (own.T @ own + noise * inverse.sum(axis=0)) / n + 1e-9 * noise * np.eye(q)
        noise = fit + noise * float((m.inner * inverse).sum()) / table.n_rows
        if (np.abs(np.append(np.diag(spread), noise) - before) / (before + noise)).max() < tolerance:
            break
    d = table.n_features
    level = fixed[0] + own[:, 0] + (m.means @ fixed[1 + d :] if follow else 0.0)
    return fixed[1 : 1 + d] + own[:, 1:] @ along.T, level


@dataclass(frozen=True)
class _Moments:
    """Second moments of rows: F has the p effects that all users share, R the q effects of each user's own."""

    inner: Array  # (n, q, q): R^T R of each user
    across: Array  # (q, p, n): R^T F
    part: Array  # (n, q): R^T y
    means: Array  # (n, d): mean rows
    normal: Array  # (p + 1, p + 1): (F, y)^T (F, y), all users together

    @property
    def lines(self) -> float | None:
        """Return the variance of targets around lines of users' own; None where users have few rows for that."""
        (n, q), rows = self.part.shape, float(self.inner[:, 0, 0].sum())
        if rows < 2 * n * q:
            return None
        little = 1e-9 * np.trace(self.inner.sum(axis=0)) / n * np.eye(q)
        heads = np.linalg.solve(self.inner + little, self.part[:, :, None])[:, :, 0]
        return float(self.normal[-1, -1] - (heads * self.part).sum()) / (rows - n * q)

    @classmethod
    def of(cls, table: UserTable, along: Array, follow: bool) -> _Moments:
        """Return the moments of a table.

        Args:
            table: every user needs a row.
            along: the directions in which users' slopes differ, (d, k).
            follow: whether levels may follow the users' mean rows.
        """
        n, (d, k) = table.n_users, along.shape
        p, q = 1 + (2 * d if follow else d), 1 + k
        found = cls(*(np.zeros(shape) for shape in ((n, q, q), (q, p, n), (n, q), (n, d), (p + 1, p + 1))))
        for users, size in table.positions_by_size():
            X, y = (values.astype(np.float64, copy=False) for values in table.group(users, size))
            ones, mean = np.ones((len(users), size, 1)), X.mean(axis=1, keepdims=True)
            F = np.concatenate([ones, X, *([np.repeat(mean, size, axis=1)] if follow else []), y[:, :, None]], axis=2)
            R = np.concatenate([ones, X @ along], axis=2).transpose(0, 2, 1)
            both = R @ F
            found.inner[users], found.part[users] = R @ R.transpose(0, 2, 1), both[:, :, -1]
            found.across[:, :, users] = both[:, :, :-1].transpose(1, 2, 0)
            found.means[users] = mean[:, 0]
            joined = F.reshape(-1, p + 1)
            found.normal[...] += joined.T @ joined
        return found
