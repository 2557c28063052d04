"""Directions in which classes differ, from two moments of all users: for users whose labels need not mean the same.

  round-t    the sum of users' first updates             -> whether a class means the same for everybody
  scatter    how rows vary within users' classes, and how the means of those classes vary
                                                         -> the directions in which the latter stand out

The eigenvectors are the spine's (`linear.starts`), in coordinates in which rows vary alike in every direction
within classes. Both scatters are positive semi-definite, so replacing a user costs sqrt 2, not 2, of what adding does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from privrep.heads.gradient import labels_of
from privrep.heads.softmax import one_hot
from privrep.linear.starts import top_eigenvectors
from privrep.neural.curvature import Variation
from privrep.nn.threads import one_thread
from privrep.privacy.billboard import Release
from privrep.privacy.bounds import DIRECTION_ONLY, Bound, Contributions
from privrep.privacy.calibration import Query
from privrep.privacy.moments import RowMoments, symmetrise
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.typing import Array

FLOOR = 0.5  # of the noise of a scatter, added to its eigenvalues
SEEN = 2.0  # standard deviations by which a sum of squares must exceed that of noise: classes mostly do agree
CHANCE = 1.5  # times what directions that point anywhere add up to, which it must exceed


@dataclass(frozen=True, eq=False)
class Scatter:
    """The scatter of each user's rows within its classes, and the scatter of the means of its classes."""

    rows_per_user: int
    classes: int
    raw: int

    @property
    def spec(self) -> StepSpec:
        return StepSpec(layout="padded", rows_per_user=self.rows_per_user)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        with one_thread():
            rows, marked, present = _rows(batch.X, batch.y, self.raw, self.classes)
            count = marked.sum(dim=1)[..., None]  # (users, classes, 1)
            means = torch.bmm(marked.mT, rows) / count.clamp(min=1)
            within = torch.where(present, rows - torch.bmm(marked, means), 0.0)
            mean = rows.sum(dim=1, keepdim=True) / present.sum(dim=1, keepdim=True).clamp(min=1)
            between = torch.where(count > 0, (means - mean) * count.sqrt(), 0.0)
        ones = np.ones(len(batch.X))
        return {"within": RowMoments(within.numpy(), ones), "between": RowMoments(between.numpy(), ones)}


def _rows(X: NDArray[Any], y: NDArray[Any], raw: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Public features (users, rows, d), zero where there is no row; classes one-hot; and where there is a row."""
    labels = labels_of(y, classes)
    present = (labels >= 0)[..., None]
    own = torch.from_numpy(np.ascontiguousarray(X[:, :, raw:], dtype=np.float32))
    return torch.where(present, own, 0.0), one_hot(labels, classes), present


def classes_agree(updates: Sequence[Release], users: int, variation: Variation) -> bool:
    """Return whether users' updates add up to more than noise and chance: then one classifier suits many of them.

    Updates are directions of gradients in the scores of classes. Users to whom a class means different things send
    directions that point anywhere; those of n users add up to n in squares, and to n times T squared in T rounds, in
    which a user repeats itself. More rounds are less noisy, and the first ones are the farthest from where they end:
    it is enough that the sum of some of them, from the first on, stands out.

    Gradients are as large as rows, so directions in which rows hardly vary tell noise alone. Each counts by how far
    rows vary there.

    Args:
        updates: of the first rounds, released.
        users: how many there are.
        variation: of rows, in the coordinates of the updates.
    """
    each = variation.each
    total, noise, classes = np.zeros(len(updates[0].value)), 0.0, len(updates[0].value) // len(each)
    expected, spread = classes * float(each.sum()), math.sqrt(2 * classes * float(each @ each))
    for rounds, update in enumerate(updates, 1):
        total, noise = total + update.value, noise + update.sigma**2
        chance = CHANCE * users * (rounds * DIRECTION_ONLY) ** 2 * float(each @ each) / float(each.sum())
        if variation.weighted_square(total.reshape(classes, -1)) > noise * (expected + SEEN * spread) + chance:
            return True
    return False


def directions(run: Run, step: Scatter, rank: int, mu_squared: float) -> Array:
    """Return directions (d, rank) of about unit size, along which classes' means differ most, for how rows vary within.

    Args:
        run: whose users are asked, in one page.
        step: what they compute.
        rank: how many directions.
        mu_squared: what the page spends.
    """
    d = run.users.facts.features - step.raw
    query = Query(Bound(DIRECTION_ONLY, d**2, acute=True), mu_squared / 2)
    released = run.release("scatter", step, {"within": query, "between": query})
    values, vectors = np.linalg.eigh(symmetrise(released["within"].value))
    noise = math.sqrt(2 * d) * released["within"].sigma  # the radius of the semicircle of its eigenvalues
    sizes = np.maximum(values, 0.0) + max(FLOOR * noise, 1e-3 * float(values.max()))
    whitening = vectors / np.sqrt(sizes) @ vectors.T
    turned = whitening @ symmetrise(released["between"].value) @ whitening
    level = float(np.median(np.linalg.eigvalsh(turned)))  # what classes of few rows differ by anyway, in all directions
    above = turned - level * np.eye(d)
    top = top_eigenvectors(above, rank).basis
    strength = np.sqrt(np.maximum(np.diag(top.T @ above @ top), 0.0))
    largest = float(strength.max())
    basis = whitening @ (top * np.sqrt(strength / largest) if largest > 0 else top)
    return np.asarray(basis / max(float(np.linalg.norm(basis, axis=0).max()), 1e-300))
