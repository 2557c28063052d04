"""`privrep budget --items`: what a budget buys where users rate items."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from privrep.cli.budget import ERRORS, show_forecast
from privrep.cli.console import show, tell

if TYPE_CHECKING:
    from privrep.models.rating_forecast import RatingProblem
    from privrep.privacy.ledger import Budget

ROUGH = (
    "Rough: a few items are taken to be rated often and most rarely, and all users to rate alike. What tastes explain "
    "cannot be told beforehand and comes on top."
)


def show_ratings(users: int, p: RatingProblem, whole: Budget) -> None:
    """Say how good predictions will be.

    Args:
        users: how many there are.
        p: what is expected of the ratings.
        whole: the budget.
    """
    from privrep.models.rating_forecast import forecast_ratings

    found = forecast_ratings(users, p, whole)
    tell(problem=asdict(p))
    show(
        f"{p.items:,} items, {p.rows} ratings each; epsilon {whole.epsilon:g}, delta {whole.delta:g}, {whole.relation}"
    )
    show(f"Deviations: noise {p.noise:g}, levels {p.levels:g}, offsets of items {p.offsets:g}")
    errors = {
        "each user's own mean": found.mean,
        "the same, drawn towards that of all": found.shrunk,
        "levels and offsets without privacy": found.exact,
        "privrep": found.private,
        "privrep, of users without ratings": found.newcomers,
    }
    show_forecast(users, {name: math.sqrt(error) for name, error in errors.items()}, *ERRORS, power=2)
    show(ROUGH, style="dim", wrap=True)
