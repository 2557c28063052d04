"""The location of columns, by charged histograms: their sizes within users, and users' means of them.

A noisy histogram is read by matched filters: of many shapes that a histogram may have, the shape that explains most of
it. That hears what no single cell would show, because the noise of many cells together is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privrep.linear.class_steps import encode_step
from privrep.linear.histogram_shapes import (
    UNIT_LENGTH,
    UNIT_MEAN,
    UNIT_SPREAD,
    make_octave_shapes,
    make_unit_shape,
    make_window_shapes,
)
from privrep.linear.panel_steps import (
    LINEAR_CELLS,
    ROW_CELLS,
    SIGNED_CELLS,
    ColumnSizes,
    LevelCells,
    list_typical_rows,
)
from privrep.linear.steps import CELLS, LOWEST
from privrep.linear.transform import SPARSE_COLUMNS
from privrep.local.losses import Loss
from privrep.privacy.billboard import Release
from privrep.privacy.bounds import Bound
from privrep.privacy.calibration import Query
from privrep.privacy.run import Run
from privrep.typing import Array

HEARD = 5.0  # least answer of a filter, in standard deviations of its noise
ZOOMS = 3  # most times that windows narrow; each costs half of a histogram by octaves
THIN = 0.6  # a spread, in cells of a window, that is looked at again
OUTSIDE = 0.04  # share of users outside of where most means are, from which on they count for the spread
ROWS_SHARE = 0.005  # of mu^2
DEAR = 3.0  # most that a target's histograms cost, over the features' histograms
MOST, MOST_ALONE = 0.42, 0.6  # of mu^2, for all histograms together; where features cannot be heard at all


@dataclass(frozen=True)
class Location:
    """The location of columns: features, then targets. Of sparse features nothing is known but their size within
    users."""

    scale: Array  # (d + q,), within users
    varies: NDArray[np.bool_]  # (d + q,): whether users' rows were seen to vary in the column
    centre: Array  # (d + q,)
    between: Array  # (d + q,): scale of users' means around the centre, zero where it is not known
    rows: Array  # (ROW_CELLS,): users by their number of rows
    users: float  # users who took part, roughly

    @property
    def typical_rows(self) -> float:
        """Return the number of rows whose inverse is the mean inverse over users."""
        counts = self.rows
        return float(counts.sum() / max((counts / list_typical_rows()).sum(), 1e-9)) if counts.sum() > 0 else 4.0

    @property
    def most_rows(self) -> int:
        """Return the number of rows that few users exceed."""
        seen = np.flatnonzero(self.rows > 0.02 * self.rows.sum())
        return int(list_typical_rows()[seen[-1]]) if len(seen) else 1 << 20


def price_histogram(run: Run, total: float, columns: int, limits: tuple[float, float], hard: float = 4.0) -> float:
    """Return the mu^2 with which filters hear a histogram of each column.

    Fourteen standard deviations are then half of the users, or fewer where the most that may be spent does not reach.
    Return 0 where the most is `hard` times too little, and the most where the number of users is not public.

    Args:
        run: tells the relation and the number of users.
        total: mu^2 of the whole fit.
        columns: how many columns have a histogram.
        limits: the least and the most part of `total` to spend.
        hard: how many times too little the most may be.
    """
    least, most = limits
    if run.ledger.budget.relation != "replace-one-user":
        return most * total
    needed = (14 * math.sqrt(2 * columns) / (run.users.facts.users / 2)) ** 2
    return 0.0 if needed > hard * most * total else float(np.clip(needed, least * total, most * total))


def make_histogram_queries(
    run: Run, total: float, intercept: bool, limits: tuple[float, float], declared: bool, labels: bool = False
) -> dict[str, Query]:
    """Return the queries of the first page: histograms of columns, each at its price, and of numbers of rows.

    Histograms of features that nobody could hear are left out. Histograms of targets are not, because without them
    there is nothing to predict. The location of labels is known. All together, windows that narrow included, cost at
    most MOST, or MOST_ALONE.

    Args:
        run: tells sizes and the relation.
        total: mu^2 of the whole fit.
        intercept: whether users have levels.
        limits: the least and the most part of `total` for one histogram.
        declared: whether sizes of features are declared.
        labels: whether targets are labels.
    """
    facts = run.users.facts
    d, q = facts.features, facts.targets
    columns = min(d, SPARSE_COLUMNS) if facts.sparse else d
    shares = {
        "sizes": (price_histogram(run, total, columns, limits, 16.0), columns, d * CELLS),
        "target_sizes": (0.0, q, q * CELLS),
        "levels": (price_histogram(run, total, d, limits), d, d * SIGNED_CELLS),
        "target_levels": (0.0, q, q * SIGNED_CELLS),
    }
    features = (shares["sizes"][0] + (1 + ZOOMS / 2) * shares["levels"][0]) / total
    most = MOST if features or declared or facts.sparse else MOST_ALONE
    dear = limits[0], min(DEAR * limits[1], (most - features) / (2 + ZOOMS / 2))  # targets: nothing goes without
    for name in ("target_sizes", "target_levels"):
        shares[name] = (price_histogram(run, total, q, dear, 40.0) or limits[1] * total, *shares[name][1:])
    if labels:
        del shares["target_sizes"], shares["target_levels"]
    if declared:
        del shares["sizes"]
    if facts.sparse or not intercept:
        del shares["levels"]
    if not intercept:
        shares.pop("target_levels", None)
    queries = {
        name: Query(Bound(math.sqrt(count), size, acute=True), share)
        for name, (share, count, size) in shares.items()
        if share
    }
    queries["rows"] = Query(Bound(1.0, ROW_CELLS, acute=True), ROWS_SHARE * total)
    return queries


def find_location(
    run: Run,
    total: float,
    intercept: bool,
    limits: tuple[float, float],
    declared: Array | None = None,
    loss: Loss | None = None,
) -> tuple[Location, float]:
    """Return where columns lie, and what of mu^2 it cost.

    Args:
        run: asks the users.
        total: mu^2 of the whole fit.
        intercept: whether users have levels.
        limits: the least and the most part of `total` for one histogram.
        declared: public scales of the features, (d,), which are then not asked for.
        loss: of labels, whose targets are numbers of known size (see `class_steps.Encoded`); None: of numbers.
    """
    facts = run.users.facts
    d, q = facts.features, facts.targets if loss is None else loss.outputs
    queries = make_histogram_queries(run, total, intercept, limits, declared is not None, loss is not None)
    released = run.release("scales", encode_step(ColumnSizes(intercept, declared is None), loss), queries)
    spent = sum(query.mu_squared for query in queries.values())
    scale, varies = np.ones(d + q), np.zeros(d + q, bool)
    if declared is not None:
        scale[:d], varies[:d] = declared, True
    for name, part in (("sizes", slice(None, d)), ("target_sizes", slice(d, None))):
        if name in released:
            count = len(scale[part])
            scale[part], varies[part] = read_sizes(released[name].value.reshape(count, CELLS), released[name].sigma)
    rows = np.where(released["rows"].value > 3 * released["rows"].sigma, released["rows"].value, 0.0)
    public = run.ledger.budget.relation == "replace-one-user"
    users = float(facts.users if public else max(released["rows"].value.sum(), 1.0))
    centre, between = np.zeros(d + q), np.zeros(d + q)
    if loss is not None:
        centre[d:], between[d:], scale[d:] = (0.0, 0.7, 1.0) if q == 1 else (1 / q, 0.35, 0.5)
    for name, part in (("levels", slice(None, d)), ("target_levels", slice(d, None))):
        if name in released:
            pages = "levels" if name == "levels" else "target"
            share = 0.5 * queries[name].mu_squared
            found, cost = _find_levels(run, released[name], pages, part, d + q, share, users, loss)
            centre[part], between[part] = found
            spent += cost
    centre = np.where(np.abs(centre) < 0.3 * between, 0.0, centre)  # zero is as good an origin, and has no noise
    if not facts.sparse:
        _fill_levels(centre[:d], between[:d], np.where(varies, scale, 0.0)[:d])
    location = Location(scale, varies, centre, between, rows, users)
    least = np.where(varies & (between > 0), 0.5 * scale / math.sqrt(location.typical_rows), 0.0)
    return Location(scale, varies, centre, np.maximum(between, least), rows, users), spent


def _fill_levels(centre: Array, between: Array, scale: Array) -> None:
    """Fill in spreads of users' means that were not heard.

    They are taken to lie around zero, like all means that were heard, or to be many octaves wide. Means that lie close
    together far from zero are heard before all others.

    Args:
        centre: of each feature, (d,).
        between: spread of its means, (d,), zero where nothing was heard; changed in place.
        scale: of its rows within users, (d,); zero where that was not heard.
    """
    heard = between > 0
    missing = ~heard & (scale > 0)
    if not heard.any() or not missing.any():
        return
    if 2 * heard.sum() >= len(heard):
        between[missing] = WIDE * scale[missing]
    elif 8 * heard.sum() >= len(heard) and not centre[heard].any():
        known = heard & (scale > 0)
        between[missing] = scale[missing] * (float(np.median(between[known] / scale[known])) if known.any() else 1.0)


WIDE = 1.5  # spread of users' means over the spread of rows within users, where means cover many octaves


_KERNELS = tuple(  # histograms of a column's sizes by octave: of users who are alike, and who differ
    kernel / np.linalg.norm(kernel)
    for kernel in (
        np.array([0, 0, 0, 0.2, 0.6, 1, 0.6, 0.2, 0, 0, 0]),
        np.array([0.1, 0.2, 0.3, 0.45, 0.65, 1, 0.4, 0.1, 0, 0, 0]),
    )
)


def read_sizes(counts: Array, sigma: float) -> tuple[Array, NDArray[np.bool_]]:
    """Return the size of each column within users, and whether it was heard, (columns,) each.

    A column that was not heard gets the size of all columns together, or 1 if even that is lost in noise.

    Args:
        counts: users by octave of their size, (columns, CELLS), with noise.
        sigma: standard deviation of the noise in each count.
    """
    if not len(counts):
        return np.ones(0), np.zeros(0, bool)
    smooth = np.maximum(*(np.apply_along_axis(np.correlate, 1, counts, kernel, mode="same") for kernel in _KERNELS))
    together = np.maximum(*(np.correlate(counts.sum(axis=0), kernel, mode="same") for kernel in _KERNELS))
    heard = smooth.max(axis=1) > HEARD * sigma
    common = int(together.argmax()) if together.max() > HEARD * sigma * math.sqrt(len(counts)) else -LOWEST
    return np.ldexp(1.0, np.where(heard, smooth.argmax(axis=1), common) + LOWEST), heard


def _find_levels(
    run: Run,
    levels: Release,
    pages: str,
    part: slice,
    columns: int,
    mu_squared: float,
    users: float,
    loss: Loss | None,
) -> tuple[tuple[Array, Array], float]:
    """Return centres and spreads of users' means of some columns, (centre, spread), and what of mu^2 it cost.

    A spread of 0 says that nothing was heard. Columns that octaves cannot tell are looked at again, in windows that
    narrow.

    Args:
        run: asks the users.
        levels: the released histograms of these columns, by signed octave.
        pages: begins the names of the pages that look again.
        part: which of all columns these are.
        columns: how many there are in all.
        mu_squared: of each histogram.
        users: how many there are, roughly.
        loss: of labels; None: of numbers.
    """
    counts = levels.value.reshape(-1, SIGNED_CELLS)
    centre, spread, active = read_octaves(counts, levels.sigma, users, anywhere=pages == "target")
    width = np.where(active, 1.2 * np.abs(centre) / LINEAR_CELLS, 0.0)
    reach = LINEAR_CELLS / 2 * width
    start, spent = centre - reach, 0.0
    shapes, places, spreads, sizes = make_window_shapes()
    for t in range(1, ZOOMS + 1):
        looked = np.flatnonzero(active)
        if not len(looked):
            break
        size = len(looked) * (LINEAR_CELLS + 2)
        query = Query(Bound(math.sqrt(len(looked)), size, acute=True), mu_squared)
        starts, widths = np.zeros(columns), np.zeros(columns)
        starts[part], widths[part] = start, np.where(active, width, 0.0)
        released = run.release(f"{pages}-{t}", encode_step(LevelCells(starts, widths), loss), {"cells": query})["cells"]
        spent += mu_squared
        answers = released.value.reshape(-1, LINEAR_CELLS + 2)[:, 1:-1] @ shapes.T
        few = (spreads < THIN) & (answers / sizes < 0.6 * users)  # some users have one and the same mean, and not most
        best = np.where(few, -np.inf, answers).argmax(axis=1)
        clear = answers.max(axis=1) > HEARD * released.sigma
        active[looked[~clear]] = False
        ends = released.value.reshape(-1, LINEAR_CELLS + 2)[:, [0, -1]].sum(axis=1) - math.sqrt(2.0) * released.sigma
        outside = np.clip(ends / max(users, 1.0), 0.0, 1.0)[clear]
        found, best = looked[clear], best[clear]
        centre[found] = start[found] + width[found] * places[best]
        farther = np.sqrt(outside) * reach[found]  # of users whose means are not where most are
        spread[found] = np.maximum(width[found] * spreads[best], np.where(outside > OUTSIDE, farther, 0.0))
        active[found] = (spreads[best] < THIN) & (outside <= OUTSIDE)  # all within a cell or two: narrower still
        width[found] = np.where(active[found], 8 * spread[found] / LINEAR_CELLS, width[found])
        start[found] = np.where(active[found], centre[found] - LINEAR_CELLS / 2 * width[found], start[found])
    return (centre, spread), spent


def read_octaves(counts: Array, sigma: float, users: float, anywhere: bool = False) -> tuple[Array, Array, Array]:
    """Return the centre and spread of users' means of each column, and whether it is too narrow for octaves to tell.

    Means are about normal, but for users whose mean is zero. A spread of 0 says that nothing was heard. Means that no
    shape around zero explains may lie elsewhere if they may be `anywhere`. For a feature a wrong place costs more.

    Args:
        counts: users by signed octave of their mean, (columns, SIGNED_CELLS), with noise.
        sigma: standard deviation of the noise in each count.
        users: how many there are, roughly.
        anywhere: whether to prefer a place off zero to hearing nothing.

    Returns:
        Three arrays (columns,).
    """
    zeros, rest = np.maximum(counts[:, CELLS], 0.0), counts.copy()
    rest[:, CELLS] = 0.0
    shapes, facts = make_octave_shapes()
    answers = rest @ shapes.T
    plain = np.where(facts[:, 0] == 0, answers, -np.inf)  # around zero, which is preferred unless it is clearly worse
    around = (answers.max(axis=1) > plain.max(axis=1) + 3 * sigma) | (_measure_lean(rest, sigma) > 0.3 * users)
    around |= anywhere & (plain.max(axis=1) <= HEARD * sigma)
    best = np.where(around, answers.argmax(axis=1), plain.argmax(axis=1))
    middle, deviation, narrow, length = facts[best].T
    answer = np.take_along_axis(answers, best[:, None], axis=1)[:, 0]
    others = answer / length  # users whose mean is not zero
    zeros = np.where(zeros > np.maximum(HEARD * sigma, 0.1 * users), zeros, 0.0)
    heard = (answer > HEARD * sigma) & (others > 0.05 * users) & (others + zeros > 0.3 * users)
    ones = rest @ make_unit_shape()  # of columns of zeros and ones: the likeliest, so that less is enough to hear them
    indicator = ~heard & (zeros > 0.2 * users) & (ones > UNIT_HEARD * sigma)
    others = np.where(indicator, np.minimum(ones / UNIT_LENGTH, users), others)
    middle, deviation = np.where(indicator, UNIT_MEAN, middle), np.where(indicator, UNIT_SPREAD, deviation)
    heard |= indicator
    share = np.where(heard, others / np.maximum(others + zeros, 1e-300), 0.0)
    centre = share * middle
    variance = share * (deviation**2 + middle**2) - centre**2
    return centre, np.sqrt(np.maximum(variance, 0.0)), heard & ~indicator & (narrow > 0) & (share > 0.8)


UNIT_HEARD = 3.0


def _measure_lean(counts: Array, sigma: float) -> Array:
    """Return how many more users have a mean of one sign than of the other, of each column, at least.

    Args:
        counts: users by signed octave of their mean, (columns, SIGNED_CELLS), with noise.
        sigma: standard deviation of the noise in each count.
    """
    sides = counts[:, CELLS + 1 :], counts[:, :CELLS][:, ::-1]
    peak = (sides[0] + sides[1]).argmax(axis=1)
    near = np.abs(np.arange(CELLS) - peak[:, None]) <= 5
    more = np.abs(((sides[0] - sides[1]) * near).sum(axis=1))
    return np.asarray(more - 2 * sigma * np.sqrt(2.0 * near.sum(axis=1)))
