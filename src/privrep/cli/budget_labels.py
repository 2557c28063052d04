"""`privrep budget --rate`: what a budget buys where targets are yes/no labels."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from privrep.cli.budget import make_goal_table, show_forecast
from privrep.cli.console import show, tell
from privrep.errors import InputError

if TYPE_CHECKING:
    from privrep.models.label_forecast import LabelProblem
    from privrep.privacy.ledger import Budget

ROUGH = (
    "Rough: of 60 simulated fits of made-up populations, 57 had log-losses within a tenth of what is said here, 50 "
    "within 5%. But losses lie close together: of what there is to gain, half of the forecasts missed up to 21%, one "
    "in ten more than 85%. Where nothing turns into something, a factor of two in users may decide. Real data "
    "needs more."
)


def make_label_problem(
    shape: tuple[int, int, int], rate: float, noise_level: float, deviations: tuple[float, float, float]
) -> LabelProblem:
    """Return the problem that options describe, or raise InputError.

    Args:
        shape: features, rank and rows.
        rate: share of the rarer class.
        noise_level: must be left at 1.
        deviations: of levels, of users' own slopes and of common slopes.
    """
    from privrep.models.label_forecast import LabelProblem

    if noise_level != 1.0:
        raise InputError("--noise-level is for numbers: what is random in labels follows from --rate; leave it out.")
    return LabelProblem(*shape, rate, *deviations)


def show_labels(users: int | None, p: LabelProblem, whole: Budget, gain: float | None) -> None:
    """Say how good predictions will be, and what goals take.

    Args:
        users: how many there are, if that is known.
        p: what is expected of the data.
        whole: the budget.
        gain: what is wanted, if that was said.
    """
    tell(problem=asdict(p))
    own = f"users' own slopes {p.slopes:g}, " if p.rank else ""
    show(
        f"{p.features} features, rank {p.rank}, {p.rows} labels each, {p.rate:g} of them of the rarer class; "
        f"epsilon {whole.epsilon:g}, delta {whole.delta:g}, {whole.relation}"
    )
    show(f"Deviations on the logit: levels {p.levels:g}, {own}common slopes {p.common:g}")
    if users is not None:
        _show_losses(users, p, whole)
    _show_goals(users, p, whole, gain)


def _show_losses(users: int, p: LabelProblem, whole: Budget) -> None:
    from privrep.models.label_forecast import forecast_labels

    found = forecast_labels(users, p, whole)
    losses = {
        "each user's own frequency, smoothed": found.own,
        "the same, drawn towards that of all, without privacy": found.shrunk,
        "a pooled model without privacy": found.pooled,
        "a mixed model without privacy": found.mixed,
        "privrep": found.private,
        "privrep, of users without rows": found.newcomers,
    }
    show_forecast(users, losses, "log-loss", "against own\nfrequencies")


def _show_goals(users: int | None, p: LabelProblem, whole: Budget, gain: float | None) -> None:
    from privrep.models.label_forecast import find_label_goals

    goals = find_label_goals(p, whole, users, gain)
    if len(goals) == (gain is not None):
        show("Even a mixed model without privacy gains next to nothing over users' own frequencies here.")
    if goals:
        show(make_goal_table(goals, users, whole, "log-loss"))
    show(ROUGH, style="dim", wrap=True)
