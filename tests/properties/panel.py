"""The steps that find the prior of heads, with bounds: for users with one target and with several, dense and sparse."""

from __future__ import annotations

import math

import numpy as np

from privrep.linear.families import ERROR_CELLS, HeadErrors, HeadLosses, HeadVotes
from privrep.linear.gradient_parts import COMMON_CELLS
from privrep.linear.panel_steps import (
    LINEAR_CELLS,
    ROW_CELLS,
    SIGNED_CELLS,
    ColumnSizes,
    CommonGradient,
    LevelCells,
    PanelMoments,
    Residual,
)
from privrep.linear.spreads import HeadSpreads
from privrep.linear.steps import CELLS, SIZES, WIDE_CELLS, LeaveOneOutGradient, PairMoments, PowerStep, gradient_size
from privrep.linear.transform import SPARSE_COLUMNS
from privrep.local.prior import PriorMean
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import DIRECTION_ONLY, Bound
from privrep.privacy.protocol import Step

Question = tuple[Step, dict[str, Bound]]


def prior_mean(d: int, q: int, intercept: bool, whole: bool = True) -> PriorMean:
    """A prior mean with all that one can have, or with level and slopes alone."""
    rng = np.random.default_rng([d, q])
    slopes, level = rng.normal(size=(d, q)), rng.normal(size=q)
    if not intercept:
        return PriorMean(
            np.zeros(q), slopes, np.zeros(d), np.ones(d), np.zeros((d, 0)), np.zeros(0), np.zeros((0, q)), False
        )
    if not whole:
        return PriorMean(
            level, slopes, rng.normal(size=d), np.ones(d), np.zeros((d, 0)), np.zeros(0), np.zeros((0, q)), True
        )
    r = min(d, 2)
    axes, context = rng.normal(size=(d, r)), rng.normal(size=(r, q))
    located = (np.arange(d) % 3 > 0).astype(np.float64)
    return PriorMean(level, slopes, rng.normal(size=d), located, axes, np.array([0.7, 3.0])[:r], context, True)


def head_losses(mean: PriorMean, first: np.ndarray, relative: bool) -> HeadLosses:
    """Losses of candidates of every kind."""
    d, q = mean.slopes.shape
    free = math.inf if mean.intercept else 0.0
    rows = [
        (0, 0.0, 0.5, 1, 1), (1, 0.3, 0.5, 0, 1), (1, 0.3, 0.5, 1, 1), (1, 8.0, free, 1, 1), (2, 2.0, 0.1, 0, 1),
        (2, 100.0, 0.1, 1, 1), (0, 0.0, 0.0, 1, 1), (0, 0.0, free, 1, 0), (2, 1.0, free, 1, 0), (2, 1e9, free, 1, 0),
    ]  # fmt: skip
    factor, slopes, level, own, common = np.array(rows, dtype=np.float64).T.copy()
    second = np.diag(np.ldexp(1.0, np.arange(d) % 5 - 2))
    return HeadLosses(
        mean, first, second, factor, slopes, level, own, common, np.ldexp(1.0, np.arange(q) % 3), 0.9, relative
    )


def panel_questions(d: int, k: int, intercept: bool, targets: int = 1, sparse: bool = False) -> dict[str, Question]:
    """What the passes ask that find the prior mean, the families of heads and their errors."""
    q, rng = targets, np.random.default_rng(9)
    U = np.linalg.qr(rng.normal(size=(d, k)))[0]
    mean, plain = prior_mean(d, q, intercept), prior_mean(d, q, intercept, whole=False)
    columns = d + q
    units = np.ldexp(1.0, np.arange(q) % 3)
    scaled = FeatureTransform(np.ldexp(1.0, 1 - np.arange(d) % 4), None, None if q == 1 else units)
    mixing = rng.normal(size=(d, d))
    whitened = FeatureTransform(scaled.scale, np.eye(d) + mixing @ mixing.T / d, scaled.target_scale)
    parts = 2 if intercept else 1
    width = np.where(np.arange(columns) % 4 == 1, 0.0, np.ldexp(0.3, np.arange(columns) % 3))
    candidates = 10

    def windows(start: np.ndarray, width: np.ndarray) -> Question:
        counted = int((width > 0).sum())
        return LevelCells(start, width), {"cells": Bound(math.sqrt(counted), counted * (LINEAR_CELLS + 2), acute=True)}

    def gradient(mean: PriorMean, transform: FeatureTransform, factor: np.ndarray, full: bool, norm: float) -> Question:
        step = CommonGradient(mean, transform, units, factor, 0.8, 3.0, 0.4, 0.3, full)
        between = 1 + mean.axes.shape[1]
        bounds = {
            "within": Bound(norm, d * q + (d**2 if full else 1)),
            "sizes": Bound(math.sqrt(2.0 * parts), COMMON_CELLS * parts, acute=True),
        }
        if intercept:
            bounds["between"] = Bound(norm, between * q + (between**2 if full else 1))
        return step, bounds

    located: dict[str, Bound] = {
        "sizes": Bound(math.sqrt(min(d, SPARSE_COLUMNS) if sparse else d), d * CELLS, acute=True),
        "target_sizes": Bound(math.sqrt(q), q * CELLS, acute=True),
        "target_levels": Bound(math.sqrt(q), q * SIGNED_CELLS, acute=True),
        "rows": Bound(1.0, ROW_CELLS, acute=True),
    }
    if not sparse:
        located["levels"] = Bound(math.sqrt(d), d * SIGNED_CELLS, acute=True)
    spreads = {"spreads": Bound(math.sqrt(5.0), 5 * WIDE_CELLS, acute=True)}
    pairs = {"moments": Bound(DIRECTION_ONLY, d**2)}
    step = {"step": Bound(0.7, gradient_size(d, k)), "sizes": SIZES}
    losses = {
        "losses": Bound(0.5, candidates + 1),
        "sizes": Bound(1.0, WIDE_CELLS, acute=True),
        "votes": Bound(1.0, candidates, acute=True),
    }
    errors = {
        "noise": Bound(3.0, 2 * q + 2, acute=True),
        "tails": Bound(math.sqrt(2.0) * q, 2 * ERROR_CELLS, acute=True),
    }
    found: dict[str, Question] = {
        "column sizes": (ColumnSizes(intercept), located),
        "level cells": windows(rng.normal(size=columns) - 2, width),
        "level cells, targets": windows(np.full(q, -3.0), np.full(q, 0.25)),
        "common": gradient(mean, scaled, np.zeros((d, 0)), False, 0.7),
        "common, with slopes": gradient(mean, scaled, U * np.linspace(0.2, 3, k), False, 2.0**-40),
        "common, plain mean": gradient(plain, scaled, U, False, DIRECTION_ONLY),
        "head losses": (head_losses(mean, U, False), losses),
        "head losses, relative": (head_losses(mean, U, True), losses),
        "head losses, plain mean": (head_losses(plain, U[:, :1], True), {**losses, "losses": Bound(1e-9, 11)}),
        "head spreads": (HeadSpreads(mean, U, units), spreads),
        "head spreads, no slopes": (
            HeadSpreads(plain, np.zeros((d, 0)), units),
            {"spreads": Bound(math.sqrt(2.0), 5 * WIDE_CELLS, acute=True)},
        ),
        "head errors": (HeadErrors(mean, U, False, 0.4, np.full(q, 2.0), units), errors),
        "head errors, own": (HeadErrors(plain, 1e3 * U, True, math.inf, np.full(q, 2.0), units), errors),
        "head errors, level": (HeadErrors(mean, np.zeros((d, 0)), True, 2.0, np.full(q, 2.0), units), errors),
        "residual gradient": (Residual(LeaveOneOutGradient(U, scaled, 0.3, 0.02, intercept), mean), step),
        "residual power": (Residual(PowerStep(U, scaled, intercept), mean), {"image": Bound(DIRECTION_ONLY, d * k)}),
    }
    if not sparse:
        scale, centre, between = (np.ldexp(1.0, rng.integers(-2, 3, columns)) for _ in range(3))
        moments = {"within": Bound(DIRECTION_ONLY, (columns + 1) ** 2, acute=True)}
        if intercept:
            moments["between"] = Bound(DIRECTION_ONLY, (columns + 1) ** 2, acute=True)
        found |= {
            "panel moments": (PanelMoments(scale, centre, between, intercept), moments),
            "head votes": (
                HeadVotes(mean, U, False, 0.4, scale[:d]),
                {"votes": Bound(1.0, 2, acute=True)},
            ),
            "panel moments, loose": (
                PanelMoments(scale, centre, between, intercept),
                {key: Bound(9.0, bound.size, acute=True) for key, bound in moments.items()},
            ),
            "common, full": gradient(mean, whitened, np.zeros((d, 0)), True, 2.0**-40),
            "common, full, with slopes": gradient(mean, whitened, U, True, 0.7),
            "common, full, many slopes": gradient(plain, whitened, np.diag(scaled.scale), True, 0.7),
            "residual pairs": (Residual(PairMoments(whitened, intercept), mean), pairs),
        }
    return found
