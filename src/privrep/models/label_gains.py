"""Sentences about heads of classifiers with a prior and what they gain, by released numbers with their noise.

Gains are differences of losses to the loss by the frequencies of a user's own classes (`local.representation.Gains`).
They are in nats a label, or for the hinge loss in its own units.
"""

from __future__ import annotations

import math
from typing import Any

from privrep.local.prior import LabelPrior
from privrep.local.representation import Gains, Representation

SLOPELESS = (
    "A newcomer without rows gets a level, and no slopes of features of which no release says where they lie. How "
    "that compares with a user's own rows was not released."
)


def compare_losses(difference: float, sigma: float) -> str:
    """Return how much smaller or larger a loss is, with two standard deviations of its noise."""
    if 2 * sigma > 0.5:
        return "lost in the noise of the release: neither clearly smaller nor larger"
    return f"about {abs(difference):.3f} {'smaller' if difference < 0 else 'larger'} (within {2 * sigma:.2g})"


def describe_label_gains(gains: Gains) -> str:
    """Return what a typical user gains, in one sentence."""
    if not gains.clear:
        over = compare_losses(-gains.over_alone, gains.sigma)
        return f"Nothing is gained for sure: the loss of a label is {over} than by what a user can do alone."
    alone = f", and {gains.over_alone:.3f} smaller than by the best that it can do alone" if gains.alone < 0 else ""
    first = compare_losses(gains.heads, gains.sigma)
    return f"The loss of a label is {first} than by the frequencies of its user's own classes{alone}."


def describe_label_heads(prior: LabelPrior, gains: Gains) -> list[str]:
    """Return sentences about how strong the prior is, and what it gains."""
    lines = []
    if prior.mean.intercept:
        follow = " beyond what their averages tell" if prior.mean.context.any() else ""
        lines.append(f"Levels of users differ by {math.sqrt(prior.level):.2g} in the output{follow}.")
    lines.append(describe_label_gains(gains))
    lines.append(
        "A newcomer without rows gets the prior mean. On the users of the fit its loss of a label is "
        f"{compare_losses(gains.prior_mean, gains.sigma)} than by the frequencies of a user's own classes."
        if prior.mean.knows_newcomers
        else SLOPELESS
    )
    if prior.logits:
        lines.append(
            "Probabilities allow for what is left to doubt about a user's head, and were calibrated by charged "
            f"releases: outputs count {prior.known:.2f} times, those of users without rows {prior.new:.2f} times."
        )
    return lines


def make_label_heads_json(learned: Representation, prior: LabelPrior, gains: Gains, family: str) -> dict[str, Any]:
    """Return the same numbers for machines.

    Args:
        learned: the model.
        prior: its prior.
        gains: its gains.
        family: the name of the prior's family.
    """
    return {
        "family": family,
        "directions": prior.factor.shape[1],
        "learned": gains.clear,
        "level_variance": prior.level,
        "losses": {"alone": gains.alone, "prior_mean": gains.prior_mean, "heads": gains.heads},
        "losses_deviation": gains.sigma,
        "smaller_than_frequencies": -gains.heads,
        "smaller_than_alone": gains.over_alone,
        "factor_of_outputs": prior.known,
        "factor_of_outputs_of_newcomers": prior.new,
        "common_slopes": prior.mean.slopes.T.tolist(),
    }
