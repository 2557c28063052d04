"""The runs of one population, and what they come to together: the composition of runs, as data.

Formal guarantee. Consider all runs that draw from one budget, started at any time, in any order, side by side or one
after another. Let `Accounts.list_events` fit the budget, at any time. Together the runs are (epsilon, delta)-DP, with
that budget, under its relation, for every user of any of them.
* An open run is counted by all that it may come to (`bound_events`), one that is over by its charges. A run's ledger
  refuses a charge beyond what is counted, so every run is dominated by the events that are counted for it.
* Every release is one draw, and all draws of all runs happen in some order. So runs side by side compose as the draws
  of one run do, each chosen by whatever earlier ones released.
* A split of one name is another split in another run. That is an upper bound, see `privacy.accounting`.

Who chooses. Where all that is counted is Gaussian releases, to everyone or to groups, runs and budgets may be chosen by
what earlier runs released: mu^2 adds up on every path, and has one limit (Smith and Thakurta 2022). Choices, selections
and samples are not measured by one number. With them the guarantee is for runs whose kinds and budgets were not chosen
by what earlier runs released: a choice between kinds by results may gain more than the sum says.

Selections. One of delta' in a run of epsilon sets aside (1 + e^epsilon) delta' (`privacy.selection`). That is at least
2 delta'. At any epsilon 2 delta' is enough, so it is enough at the epsilon of all runs together. The argument, in the
words of that module, with Delta for the sum of all delta':
1. Let T be the outcomes all of whose selected keys are in K. On T, R(D) is R_K(D) where no key outside K was selected.
   Each time that has probability 1 - delta' or more, whatever was released, for the noise of each key is its own. So
   P(R(D) in S and T) lies between (1 - Delta) P(R_K(D) in S and T) and P(R_K(D) in S and T), for D and for D'.
2. Let x = e^epsilon P(R(D') in S). Then P(R(D) in S) <= P(R(D) in S and T) + Delta
   <= e^epsilon P(R_K(D') in S and T) + delta_G + Delta <= x / (1 - Delta) + delta_G + Delta.
3. If x <= 1 - Delta, that is at most x + delta_G + 2 Delta. Otherwise x + delta_G + 2 Delta is above 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

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
        """Return all events that are counted, as those of one ledger, but for one run's."""
        counted = [share for share in self.shares.values() if share.run != without and share.status != "returned"]
        return [event for share in counted for event in rename_splits(share.run, share.events)]

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

    def check_fits(self, run: str, events: Sequence[Event]) -> None:
        """Raise BudgetExceeded unless these events of a run fit beside all other runs'."""
        together = [*self.list_events(without=run), *rename_splits(run, events)]
        fits = within_budget(together, self.budget.epsilon, self.budget.delta)
        if not fits:
            reserved = sum(share.status == "open" for share in self.shares.values() if share.run != run)
            waiting = f"; {reserved} open runs hold a part of it" if reserved else ""
            remedy = "Ask for a smaller epsilon, at a delta no larger than that"
            if not self.budget.delta:
                remedy = "A budget without a delta is for choices alone: make one with a delta, or ask for a delta of 0"
            raise BudgetExceeded(
                f"the population's budget has no room for this run: epsilon {self.budget.epsilon:g} at delta "
                f"{self.budget.delta:g}, of which one more run may take {self.epsilon_left:.4g} at that delta"
                f"{waiting}. {remedy}; privrep population show lists all runs."
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


def rename_splits(run: str, events: Sequence[Event]) -> list[Event]:
    """Return the events of a run with splits of its own, for a list of several runs' events."""
    return [
        replace(event, group=replace(event.group, split=f"{run}/{event.group.split}"))
        if isinstance(event, Gaussian) and event.group is not None
        else event
        for event in events
    ]
