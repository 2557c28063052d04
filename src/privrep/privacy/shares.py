"""The runs of one population, and what they come to together: the composition of runs, as data.

Formal guarantee. Consider all runs that draw from one budget, started at any time, in any order, side by side or one
after another, each chosen by whatever earlier ones released. Let `Accounts.list_events` fit the budget. Together the
runs are (epsilon, delta)-DP, with that budget, under its relation, for every user of any of them.
* An open run is counted by all that it may come to (`bound_events`), one that is over by its charges. A run's ledger
  refuses a charge beyond what is counted, so every run is dominated by the events that are counted for it.
* Interactive mechanisms compose side by side as they do one after another, with budgets chosen as they go (Vadhan and
  Zhang 2023; Haney et al. 2023). So the counted events compose as those of one ledger.
* A split of one name is another split in another run. That is an upper bound, see `privacy.accounting`.
* The delta' of a selection costs (1 + e^epsilon) delta' at the epsilon that is promised. A run's ledger sets that aside
  at the epsilon of the run. Here it is set aside at the epsilon of all runs together (`restate_selection`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from privrep.errors import BudgetExceeded
from privrep.privacy.accounting import (
    compute_capacity,
    compute_epsilon,
    drop_sampled,
    gaussian_epsilon,
    total_mu,
    within_budget,
)
from privrep.privacy.events import Event, Gaussian, Pure, Selection
from privrep.privacy.ledger import Budget

Status = Literal["open", "finished", "returned", "given up"]


@dataclass(frozen=True)
class Share:
    """One run's part of a population's budget.

    Args:
        run: its name, which its ledger holds, too.
        what: the run in words.
        when: it was reserved, in UTC.
        budget: that it reserved.
        users: how many there were, None where that is not known.
        events: what is counted for it.
        status: open; finished; returned, where nothing was drawn; or given up, and counted whole.
    """

    run: str
    what: str
    when: str
    budget: Budget
    users: int | None
    events: tuple[Event, ...]
    status: Status = "open"

    @property
    def epsilon(self) -> float:
        """Return the epsilon of what is counted, at the delta of the run's budget."""
        return compute_epsilon(self.events, self.budget.delta)


@dataclass(frozen=True)
class Accounts:
    """The state of a population's file: its budget, and the shares of runs by name, in their order."""

    name: str
    budget: Budget
    salt: str
    shares: Mapping[str, Share] = field(default_factory=dict)

    def list_events(self, *, without: str | None = None) -> list[Event]:
        """Return all events that are counted at the budget of the file, but for one run's."""
        counted = [share for share in self.shares.values() if share.run != without and share.status != "returned"]
        return combine_events([(share.run, share.budget.epsilon, share.events) for share in counted], self.budget)

    @property
    def epsilon(self) -> float:
        """Return the epsilon of all events that are counted, at the delta of the file."""
        return compute_epsilon(self.list_events(), self.budget.delta)

    @property
    def epsilon_left(self) -> float:
        """Return the largest epsilon of one more run of Gaussian releases, at the delta of the file."""
        if not self.budget.delta:
            return max(self.budget.epsilon - self.epsilon, 0.0)
        events = self.list_events()
        left = compute_capacity(events, self.budget.epsilon, self.budget.delta) - total_mu(drop_sampled(events)) ** 2
        return gaussian_epsilon(self.budget.delta, math.sqrt(left)) if left > 0 else 0.0

    def forecast(self, epsilon: float) -> float:
        """Return the epsilon in all after one more run of Gaussian releases of this epsilon; infinite beyond delta."""
        budget = replace(self.budget, epsilon=epsilon)
        return compute_epsilon([*self.list_events(), *bound_events((), budget)], self.budget.delta)

    def check_fits(self, run: str, events: Sequence[Event], budget: Budget) -> None:
        """Raise BudgetExceeded unless these events of a run fit beside all other runs'."""
        others = self.list_events(without=run)
        try:
            mine = combine_events([(run, budget.epsilon, events)], self.budget)
            fits = within_budget([*others, *mine], self.budget.epsilon, self.budget.delta)
        except OverflowError:
            fits = False
        if not fits:
            reserved = sum(share.status == "open" for share in self.shares.values() if share.run != run)
            waiting = f"; {reserved} open runs hold a part of it" if reserved else ""
            raise BudgetExceeded(
                f"the population's budget has no room for this run: epsilon {self.budget.epsilon:g} at delta "
                f"{self.budget.delta:g}, of which one more run may take {self.epsilon_left:.4g}{waiting}. Ask for a "
                "smaller epsilon; privrep population show lists all runs."
            )


def bound_events(charges: Sequence[Event], budget: Budget) -> tuple[Event, ...]:
    """Return events that dominate all that a run may come to, whatever else its ledger lets it charge.

    They are all charges but Gaussian ones, and as much Gaussian noise as fits beside them, or as was charged.

    Args:
        charges: of the run so far.
        budget: of the run.
    """
    if not budget.delta:
        return (Pure(budget.epsilon),)
    others = [event for event in charges if not isinstance(event, Gaussian)]
    charged = total_mu([event for event in charges if isinstance(event, Gaussian)]) ** 2
    taken = total_mu([event for event in others if isinstance(event, Selection)]) ** 2
    rest = max(compute_capacity(others, budget.epsilon, budget.delta) - taken, charged)
    return (*others, Gaussian(1 / math.sqrt(rest))) if rest > 0 else tuple(others)


def combine_events(runs: Sequence[tuple[str, float, Sequence[Event]]], budget: Budget) -> list[Event]:
    """Return the events of several runs as those of one ledger. Raise OverflowError if a selection's delta is too much.

    Args:
        runs: the name, the epsilon of the budget, and the events of each.
        budget: of all together.
    """
    return [_restate(event, run, epsilon, budget.epsilon) for run, epsilon, events in runs for event in events]


def _restate(event: Event, run: str, epsilon: float, promised: float) -> Event:
    if isinstance(event, Selection):
        return restate_selection(event, epsilon, promised)
    if isinstance(event, Gaussian) and event.group is not None:
        return replace(event, group=replace(event.group, split=f"{run}/{event.group.split}"))
    return event


def restate_selection(event: Selection, epsilon: float, promised: float) -> Selection:
    """Return a selection that sets aside (1 + e^promised) delta' of delta, where it did so at another epsilon.

    Raise OverflowError if that is all of delta, or more.
    """
    log_ratio = float(np.logaddexp(0, promised) - np.logaddexp(0, epsilon))
    delta = event.delta * math.exp(min(max(log_ratio, -600.0), 600.0)) * (1 if promised == epsilon else 1 + 1e-12)
    if delta >= 1:
        raise OverflowError("a selection takes all of delta")
    return Selection(event.noise_multiplier, max(delta, 1e-300))
