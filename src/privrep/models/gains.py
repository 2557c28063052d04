"""Sentences about heads with a prior and what they gain, by released numbers with their noise.

Gains are logarithms of squared errors, over the error of a user's own mean (`local.representation.Gains`). Here they
are percentages of squared errors. Each is said with two standard deviations of its noise.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from privrep.linear.tails import NORMAL
from privrep.local.prior import HeadPrior, LabelPrior
from privrep.local.representation import Gains, Representation
from privrep.models.description import Columns
from privrep.models.label_gains import (
    SLOPELESS,
    compare_losses,
    describe_label_gains,
    describe_label_heads,
    make_label_heads_json,
)
from privrep.privacy.report import PrivacyReport
from privrep.typing import Array

FAMILIES = ("common slopes", "slopes along the representation", "slopes in all features")
MOST_NAMED = 5  # common slopes that are named
TAILS = "calibration/tails"  # the release that calibrates intervals, if it can be heard


def find_family(learned: Representation, prior: HeadPrior | LabelPrior) -> int:
    """Return the number of the family in `FAMILIES`."""
    p, (d, k) = prior.factor.shape[1], learned.basis.shape
    return 0 if not p else 2 if p == d and k != d else 1


def judge_nothing(learned: Representation) -> str:
    """Return a sentence that says why nothing was learned; the empty string where something was."""
    if learned.ratings is not None and not len(learned.ratings.offset):
        return (
            "no item is rated by enough users to be named at this epsilon, so that users have their own levels, drawn "
            "towards a typical one, and nothing of the items. Declare the list of items if it is public"
        )
    if not learned.learned_nothing:
        return ""
    if learned.gains is None:
        return (
            "the representation is mostly noise, so users fall back on what they can do alone: it takes more users or "
            "a larger epsilon"
        )
    if isinstance(learned.prior, LabelPrior):
        over = compare_losses(-learned.gains.over_alone, learned.gains.sigma)
        return (
            f"heads were not seen to do better than what users can do alone: the loss of a label is {over}. It takes "
            "more users or a larger epsilon"
        )
    return (
        "heads were not seen to do better than what users can do alone: a typical user's squared error is "
        f"{_compare(-learned.gains.over_alone, learned.gains.sigma)}. It takes more users or a larger epsilon"
    )


def describe_gains(learned: Representation) -> str:
    """Return what a typical user gains, in one sentence; the model must have gains."""
    gains = learned.gains
    assert gains is not None
    if isinstance(learned.prior, LabelPrior):
        return describe_label_gains(gains)
    by = _name_reference(learned)
    if not gains.clear:
        over = _compare(-gains.over_alone, gains.sigma)
        return f"Nothing is gained for sure: a typical user's squared error is {over} than by what it can do alone."
    alone = f", and {_say_percent(-gains.over_alone)} than by the best that it can do alone" if gains.alone < 0 else ""
    return f"A typical user's squared error is {_compare(gains.heads, gains.sigma)} than by {by}{alone}."


def describe_heads(learned: Representation, columns: Columns, report: PrivacyReport) -> list[str]:
    """Return sentences about the heads of a model with a prior and gains.

    Args:
        learned: the model.
        columns: name targets and features.
        report: of its ledger.
    """
    prior, gains = learned.prior, learned.gains
    assert prior is not None
    assert gains is not None
    family, slopes = _describe_family(learned, prior, report), _describe_slopes(learned, prior, columns)
    if isinstance(prior, LabelPrior):
        return [family, *describe_label_heads(prior, gains), slopes]
    how = (
        "Intervals are calibrated by a charged release of how often errors are large."
        if is_calibrated(prior, report)
        else "There were too few users to calibrate intervals: they take errors to be normal."
    )
    return [
        family,
        *_describe_strength(learned, prior),
        describe_gains(learned),
        *_describe_errors(prior, columns),
        describe_newcomers(learned, gains),
        how,
        slopes,
    ]


def is_calibrated(prior: HeadPrior, report: PrivacyReport) -> bool:
    """Return whether the sizes of errors were heard in a release: asked for, and not lost in its noise."""
    asked = any(name == TAILS for name, _ in report.events)
    heard = not (np.allclose(prior.known, NORMAL, rtol=1e-9) or np.allclose(prior.new, NORMAL, rtol=1e-9))
    return asked and heard and bool(np.isfinite(prior.noise).all())


def make_heads_json(learned: Representation, columns: Columns, report: PrivacyReport) -> dict[str, Any] | None:
    """Return the numbers of `describe_heads` for machines; None for a model without a prior or gains.

    Args:
        learned: the model.
        columns: name targets and features.
        report: of its ledger.
    """
    prior, gains = learned.prior, learned.gains
    if prior is None or gains is None:
        return None
    family = FAMILIES[find_family(learned, prior)]
    if isinstance(prior, LabelPrior):
        return make_label_heads_json(learned, prior, gains, family)
    return {
        "family": family,
        "directions": prior.factor.shape[1],
        "learned": gains.clear,
        "level_ratio": prior.level_ratio if math.isfinite(prior.level_ratio) else None,
        "slopes_ratio": find_slopes_ratio(learned, prior),
        "noise_deviation": _drop_infinite(np.sqrt(prior.noise)),
        "log_losses": {"alone": gains.alone, "prior_mean": gains.prior_mean, "heads": gains.heads},
        "log_losses_deviation": gains.sigma,
        "smaller_than_mean": -math.expm1(gains.heads),
        "smaller_than_alone": -math.expm1(-gains.over_alone),
        "nine_in_ten_errors": _find_widths(prior, known=True),
        "nine_in_ten_errors_of_newcomers": _find_widths(prior, known=False),
        "intervals_calibrated": is_calibrated(prior, report),
        "common_slopes": prior.mean.slopes.T.tolist(),
    }


def find_slopes_ratio(learned: Representation, prior: HeadPrior) -> float:
    """Return the variance that users' own slopes add to a target within users, in units of the noise's."""
    if not prior.factor.shape[1]:
        return 0.0
    scaled = prior.factor * learned.scale[:, None]
    whitening = learned.transform.whitening
    return float((scaled**2 if whitening is None else np.linalg.solve(whitening, scaled) ** 2).sum())


def _name_reference(learned: Representation, whose: str = "its") -> str:
    """Return the name of what gains are over: without levels, users' means are not known to anyone."""
    levels = learned.prior is None or learned.prior.mean.intercept
    return f"{whose} own mean" if levels else "predicting zero"


def _say_percent(log: float) -> str:
    """Return how much smaller or larger a squared error is, from a logarithm of ratios."""
    part = 100 * abs(math.expm1(min(log, 20.0)))
    return f"{part:.2f}% smaller" if log < 0 and part > 99 else f"{part:.0f}% {'smaller' if log < 0 else 'larger'}"


def _compare(log: float, sigma: float) -> str:
    """Return `_say_percent` with two standard deviations of its noise."""
    if 2 * sigma > 1:
        return "lost in the noise of the release: neither clearly smaller nor larger"
    points = f"{200 * sigma * math.exp(min(log, 20.0)):.2g}"
    return f"about {_say_percent(log)} (within {points} {'point' if points == '1' else 'points'})"


def _describe_family(learned: Representation, prior: HeadPrior | LabelPrior, report: PrivacyReport) -> str:
    """Return how slopes and levels differ, and how that was decided."""
    (d, k), judged = learned.basis.shape, any(name.startswith("families-1/") for name, _ in report.events)
    kind = (
        "Slopes are common to all users",
        f"Slopes differ between users along the representation (rank {k}), around common ones",
        f"Slopes differ between users in all {d:,} features, around common ones",
    )[find_family(learned, prior)]
    level = "; each user has a level of its own" if prior.mean.intercept else ""
    how = "Released losses decided so." if judged else "There were too few users to compare this with others."
    return f"{kind}{level}. {how}"


def _describe_strength(learned: Representation, prior: HeadPrior) -> list[str]:
    """Return sentences about how far levels and slopes of users differ."""
    lines = []
    if prior.mean.intercept:
        follow = " beyond what their averages tell" if prior.mean.context.any() else ""
        lines.append(
            f"Levels of users differ by {math.sqrt(prior.level_ratio):.2g} times the noise (standard deviations)"
            f"{follow}."
            if math.isfinite(prior.level_ratio)
            else "Levels are the users' own: nothing is known of how far they differ."
        )
    if prior.factor.shape[1]:
        lines.append(
            f"Users' own slopes move a row by {math.sqrt(find_slopes_ratio(learned, prior)):.2g} times the noise."
        )
    return lines


def _drop_infinite(numbers: Array) -> list[float | None]:
    """Return numbers for machines, which have no word for an infinite one: None where nothing is known."""
    return [float(number) if math.isfinite(number) else None for number in numbers]


def _find_widths(prior: HeadPrior, known: bool) -> list[float | None]:
    """Return the distance from a prediction within which nine in ten targets lie, one number a target.

    Args:
        prior: with released quantiles.
        known: whether users have heads; else they are newcomers.
    """
    variance = prior.noise if known else prior.noise * prior.new_ratio
    return _drop_infinite(np.sqrt(variance) * prior.quantile(0.9, known))


def _describe_errors(prior: HeadPrior, columns: Columns) -> list[str]:
    """Return a sentence about the noise of each target."""
    names = columns.targets if len(columns.targets) == len(prior.noise) > 1 else ("",) * len(prior.noise)
    deviations, wide = np.sqrt(prior.noise), _find_widths(prior, known=False)
    if not np.isfinite(deviations).all():
        return ["Noise: how large errors are is not known: there were too few users. Intervals are infinite."]
    return [
        f"Noise{f' of {name}' if name else ''}: rows lie around their user's own line with a standard deviation of "
        f"about {deviation:.3g}. Of users without rows, nine in ten targets lie within {new:.3g} of the prediction."
        for name, deviation, new in zip(names[:MOST_NAMED], deviations, wide, strict=False)
    ]


def describe_newcomers(learned: Representation, gains: Gains) -> str:
    """Return what users without rows are predicted with, and how well that does on users who have some."""
    whose = "a user's"
    mean = "the prior mean" if learned.ratings is None else "the level and the items' offsets"
    if learned.prior is not None and not learned.prior.mean.knows_newcomers:
        return SLOPELESS
    return (
        f"A newcomer without rows gets {mean}. On the users of the fit its squared error is "
        f"{_compare(gains.prior_mean, gains.sigma)} than by {_name_reference(learned, whose)}."
    )


def _describe_slopes(learned: Representation, prior: HeadPrior | LabelPrior, columns: Columns) -> str:
    """Return a sentence that names the strongest common slopes."""
    slopes = prior.mean.slopes[:, 0]
    if not prior.mean.slopes.any():
        return "Common slopes: none stood out from the noise."
    names = _list_feature_names(columns, len(slopes))
    size = slopes * learned.scale
    strongest = [j for j in np.argsort(-np.abs(size), kind="stable")[:MOST_NAMED] if size[j]]
    listed = ", ".join(f"{names[j]} ({slopes[j]:+.3g})" for j in strongest)
    more = f" of {len(slopes):,}" if len(slopes) > len(strongest) else ""
    first = f" For {columns.targets[0]}:" if len(columns.targets) > 1 else ""
    return f"Common slopes, shrunk by their noise.{first} The strongest{more} by the features' scales: {listed}."


def _list_feature_names(columns: Columns, count: int) -> list[str]:
    """Return the names of the features, or numbers for names where there are none."""
    names = list(columns.feature_names)
    return names if len(names) == count else [f"feature {j}" for j in range(count)]
