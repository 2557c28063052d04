"""What the tests of neighbours share: every statistic that the algorithms ask for, and users to ask."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

import numpy as np
from experiments.fedavg import LocalUpdate
from hypothesis import Phase
from hypothesis import strategies as st
from panel import panel_questions
from scipy import sparse

from privrep.data.sparse import SparseRows
from privrep.data.table import UserTable
from privrep.heads.regression import Preference
from privrep.linear.methods.fedavg import ModelUpdate
from privrep.linear.methods.private_fedrep import BatchGradient, FirstHalfPairs
from privrep.linear.rating_steps import (
    LEVEL_NORM,
    LEVEL_PARTS,
    LOSS_NORM,
    LOSS_PARTS,
    ItemPull,
    RatedItems,
    RatingLevels,
    RatingLosses,
    RatingPairs,
)
from privrep.linear.steps import (
    CELLS,
    SIZES,
    FeatureSizes,
    Frequencies,
    LeaveOneOutGradient,
    PairMoments,
    PowerStep,
    ResidualMoments,
    SecondMoments,
    gradient_size,
)
from privrep.linear.transform import SPARSE_COLUMNS
from privrep.local.representation import Ratings
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import DIRECTION_ONLY, Bound, BoundedSum, Contributions
from privrep.privacy.events import Relation
from privrep.privacy.protocol import Step, StepSpec, UserBatch, Users

D, K = 3, 2
PHASES = [Phase.explicit, Phase.generate]  # users are made from seeds, which do not shrink
REPLACE: Relation = "replace-one-user"
ADD: Relation = "add-or-remove-one-user"
User = tuple[np.ndarray, np.ndarray]
Question = tuple[Step, dict[str, Bound]]
Engine = Callable[[UserTable, Path], AbstractContextManager[Users]]


# Questions: every statistic that is ever released


def basis(d: int, k: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(5).normal(size=(d, k)))[0]


def transforms(d: int, targets: int = 1) -> tuple[FeatureTransform, FeatureTransform]:
    """One of scales, and one of a covariance that is far from the identity."""
    scale = np.ldexp(1.0, 1 - np.arange(d))
    mixing = np.random.default_rng(6).normal(size=(d, d))
    several = None if targets == 1 else np.ldexp(1.0, np.arange(targets))
    return FeatureTransform(scale, None, several), FeatureTransform(scale, np.eye(d) + mixing @ mixing.T, several)


def questions(d: int, k: int, intercept: bool, targets: int = 1) -> dict[str, Question]:
    """What the algorithms ask of dense rows: their steps, with their bounds where those are fixed."""
    U = basis(d, k)
    scaled, whitened = transforms(d, targets)
    far = FeatureTransform(scaled.scale * 2.0**-60, None, scaled.target_scale)
    columns = d + (targets if targets > 1 else 0)
    directions = Bound(DIRECTION_ONLY, d**2)
    step = {"step": Bound(0.7, gradient_size(d, k)), "sizes": SIZES}
    tight = {"step": Bound(2.0**-40, gradient_size(d, k)), "sizes": SIZES}
    image = {"image": Bound(DIRECTION_ONLY, d * k)}
    second = {"covariance": Bound(DIRECTION_ONLY, d**2, acute=True)}
    return {
        "feature sizes": (FeatureSizes(intercept), {"sizes": Bound(math.sqrt(columns), columns * CELLS, acute=True)}),
        "second moments": (SecondMoments(scaled, intercept), second),
        "second moments, whitened": (SecondMoments(whitened, intercept), second),
        "pairs": (PairMoments(scaled, intercept), {"moments": Bound(1.0, d**2)}),
        "directions": (PairMoments(scaled, intercept), {"moments": directions}),
        "directions, whitened": (PairMoments(whitened, intercept), {"moments": directions}),
        "normalised pairs": (PairMoments(whitened, intercept, normalised=True), {"moments": directions}),
        "residuals": (ResidualMoments(U, scaled, 0.02, intercept), {"moments": directions}),
        "residuals, whitened": (ResidualMoments(U, whitened, 1e-3, intercept), {"moments": directions}),
        "power": (PowerStep(U, whitened, intercept), image),
        "gradient": (LeaveOneOutGradient(U, scaled, 0.3, 0.02, intercept), step),
        "gradient, whitened": (LeaveOneOutGradient(U, whitened, 0.3, 0.02, intercept), step),
        "gradient, no ridge": (LeaveOneOutGradient(U, FeatureTransform.plain(d), 1.0, 0.0, intercept), tight),
        "gradient, wild weight": (LeaveOneOutGradient(U, far, 1e30, 1e-3, intercept), step),
    } | (panel_questions(d, k, intercept, targets) | (of_papers(d, k, intercept) if targets == 1 else {}))


def of_papers(d: int, k: int, intercept: bool) -> dict[str, Question]:
    U = basis(d, k)
    move = {"update": Bound(0.3, d + 1), "sizes": Bound(1.0, CELLS, acute=True)}
    return {
        "paper's power": (PowerStep(U, FeatureTransform.plain(d), False, own_rows=True), {"image": Bound(10.0, d * k)}),
        "paper's pairs": (FirstHalfPairs(), {"moments": Bound(10.0, d**2)}),
        "paper's gradient": (BatchGradient(U, "page"), {"gradient": Bound(10.0, d * k)}),
        "paper's gradient, same rows": (BatchGradient(U, "page", None, False), {"gradient": Bound(1e-6, d * k)}),
        "preference": (
            Preference(transforms(d)[1].to_original(U), transforms(d)[1], intercept),
            {"votes": Bound(1.0, 3, acute=True)},
        ),
        "dp-fedavg": (LocalUpdate(np.ones(d + 1), 0.1, intercept), move),
        "fedavg": (ModelUpdate(np.ones(d), transforms(d)[1], 0.1, intercept), {**move, "update": Bound(0.3, d)}),
    }


def sparse_questions(d: int, k: int, intercept: bool, targets: int = 1) -> dict[str, Question]:
    """What the algorithms ask of sparse rows."""
    transform = transforms(d, targets)[0]
    columns = d + (targets if targets > 1 else 0)
    sizes = Bound(math.sqrt(min(columns, SPARSE_COLUMNS)), columns * CELLS, acute=True)
    asked = questions(d, k, intercept, targets)
    return {
        **{name: question for name, question in asked.items() if "whitened" not in name and "full" not in name},
        **panel_questions(d, k, intercept, targets, sparse=True),
        "feature sizes": (FeatureSizes(intercept), {"sizes": sizes}),
        "frequencies": (Frequencies(transform.scale), {"frequencies": Bound(math.sqrt(2.0), d + 1)}),
        "power": (PowerStep(basis(d, k), transform, intercept), {"image": Bound(DIRECTION_ONLY, d * k)}),
    }


def taste_questions(d: int, k: int) -> dict[str, Question]:
    """What is asked of ratings: levels known and not, all items paired and some of them, with tastes."""
    offset, matrix = np.linspace(-1.0, 1.0, d)[:, None], np.column_stack([np.linspace(-1.0, 1.0, d), basis(d, k)])
    known, free = Ratings(offset[:, 0], 0.7, 3.0, 1.1, 0.5), Ratings(offset[:, 0], 0.7, 0.0)
    pairs = {
        f"pairs of {len(items)}": (
            RatingPairs(items, offset, known),
            {name: Bound(1.0, (len(items)) ** 2, acute=True) for name in ("pairs", "together")},
        )
        for items in (np.arange(d), np.arange(0, d, 2))
    }
    return pairs | {
        "rated items": (RatedItems(), {"items": Bound(1.0, d, acute=True)}),
        "pull": (ItemPull(offset, known), {"pull": Bound(1.0, 2 * d, acute=True)}),
        "pull, free levels": (ItemPull(offset, free), {"pull": Bound(1.0, 2 * d, acute=True)}),
        "rating levels": (RatingLevels(offset, 1.1, 3.0, 0.7), {"levels": Bound(LEVEL_NORM, LEVEL_PARTS)}),
        "rating losses": (RatingLosses(matrix, known), {"losses": Bound(LOSS_NORM, LOSS_PARTS)}),
        "rating losses, free levels": (RatingLosses(matrix, free), {"losses": Bound(LOSS_NORM, LOSS_PARTS)}),
    }


NAMES = tuple(questions(D, K, True))
NO_INTERCEPT = {"paper's power", "paper's pairs", "paper's gradient", "paper's gradient, same rows"}  # the same
CASES = [(name, intercept) for name in NAMES for intercept in (True, False) if not (intercept and name in NO_INTERCEPT)]


# Users, sane and otherwise

HUGE = [1e8, 1e19, 1e30, 3e38, 1e77, 1e150, 1e154, 1e200, 1e300, 1.7e308]
TINY = [1e-8, 1e-20, 1e-38, 1e-45, 1e-77, 1e-154, 1e-162, 1e-200, 1e-300, 5e-324]
EDGES = [0.0, -0.0, 1.0, -1.0, math.sqrt(0.5), 2.0**-0.5, 1 + 2**-52, *HUGE[::2], *TINY[::2]]
KINDS = ["normal", "zeros", "constant", "huge", "tiny", "edges", "mixed", "cancel", "lopsided", "repeated", "collinear"]


@np.errstate(all="ignore")
def make_user(kind: str, m: int, seed: int, spoil: float | None, dtype: type, targets: int = 1) -> User:
    rng = np.random.default_rng(seed)
    width = D + targets
    rows = rng.normal(size=(m, width))
    if kind == "zeros":
        rows[:] = 0.0
    elif kind == "constant":
        rows[:] = rng.normal(size=width) * rng.choice([1.0, *HUGE, *TINY])
    elif kind == "huge":
        rows *= rng.choice(HUGE)
    elif kind == "tiny":
        rows *= rng.choice(TINY)
    elif kind == "edges":
        rows = rng.choice(EDGES, size=(m, width))
    elif kind == "mixed":
        rows = rows * rng.choice([1.0, *HUGE, *TINY], size=(m, width))
    elif kind == "cancel" and m:
        rows[-1] = -rows[:-1].sum(axis=0)  # the rows add up to nothing, or to rounding errors
        rows *= rng.choice([1.0, *HUGE[:6]])
    elif kind == "lopsided" and m:
        rows[0] *= rng.choice(HUGE)  # one huge row, the others tiny: almost everything cancels in s s^T - A^T A
        rows[1:] *= rng.choice([1.0, *TINY])
    elif kind == "repeated":
        rows[:] = rows[:1] * rng.choice([1.0, 1e16, 1e-16])
    elif kind == "collinear":
        rows[:, :D] = rng.normal(size=(m, 1)) * rng.normal(size=D) * rng.choice([1.0, 1e4, 1e12])
    if spoil is not None and m:
        rows[rng.integers(m), rng.integers(width)] = spoil
    rows = rows.astype(dtype)
    return rows[:, :D], rows[:, D] if targets == 1 else rows[:, D:]


def user(dtype: type, whole: bool, targets: int = 1) -> st.SearchStrategy[User]:
    """Any user. `whole`: with at least one row and nothing but finite numbers."""
    spoils = [None] if whole else [None, None, None, math.nan, math.inf, -math.inf]
    made = st.builds(
        make_user,
        st.sampled_from(KINDS),
        st.sampled_from([1, 2, 2, 3, 5, 8] if whole else [0, 1, 2, 2, 3, 5, 8]),
        st.integers(0, 2**32 - 1),
        st.sampled_from(spoils),
        st.just(dtype),
        st.just(targets),
    )
    return made.map(finite) if whole else made


def finite(user: User) -> User:
    return np.nan_to_num(user[0]), np.nan_to_num(user[1])


def table_of(users: list[User], dtype: type, d: int = D) -> UserTable:
    offsets = np.cumsum([0, *(len(y) for _, y in users)]).astype(np.int64)
    X = np.concatenate([np.zeros((0, d)), *(X for X, _ in users)]).astype(dtype)
    several = users[0][1].shape[1:] if users else ()
    y = np.concatenate([np.zeros((0, *several)), *(y for _, y in users)]).astype(dtype)
    return UserTable(X, y, offsets, np.arange(len(users)))


def sparse_table_of(users: list[User], dtype: type, d: int = D) -> UserTable:
    table = table_of(users, dtype, d)
    return UserTable(sparse.csr_array(table.X), table.y, table.offsets, table.ids)


def assert_within(one: dict[str, BoundedSum], other: dict[str, BoundedSum], relation: Relation) -> None:
    for key, bounded in one.items():
        norm = bounded.bound.norm
        a, b = bounded.exact_numbers / norm, other[key].exact_numbers / norm
        assert np.isfinite(a).all(), key
        assert np.isfinite(b).all(), key
        moved, most = float(np.linalg.norm(a - b)), bounded.sensitivity(relation) / norm
        assert moved <= most, f"{key} moved by {moved:.4g} bounds, {most:.4g} were stated for {relation}"


@dataclasses.dataclass(frozen=True)
class Every:
    """All questions in one pass over the users."""

    spec: ClassVar[StepSpec] = StepSpec(accepts_sparse=True)  # and dense for the steps that are not
    asked: dict[str, Question]

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        X, y = batch.X, batch.y
        dense = X.dense() if isinstance(X, SparseRows) else X
        sent = {
            name: step(UserBatch(X if step.spec.accepts_sparse else dense, y)) for name, (step, _) in self.asked.items()
        }
        return {f"{name}/{key}": sent[name][key] for name, key in self._keys()}

    def bounds(self) -> dict[str, Bound]:
        return {f"{name}/{key}": self.asked[name][1][key] for name, key in self._keys()}

    def _keys(self) -> list[tuple[str, str]]:
        return [(name, key) for name, (_, bounds) in self.asked.items() for key in bounds]
