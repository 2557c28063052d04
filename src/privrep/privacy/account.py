"""The account of a run with a population's ledger, as the run's own ledger sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from privrep.errors import InputError, ResumeError
from privrep.privacy.events import Event

if TYPE_CHECKING:
    from privrep.privacy.ledger import Budget
    from privrep.privacy.ledger_file import Entries


@dataclass(frozen=True)
class Place:
    """How far the ledger of a run is: the mark of who opened it last, and how many lines it has.

    A copy of the ledger that was left behind is at another place than the population's ledger knows of.
    """

    opened: str
    lines: int


UNOPENED = Place("", 0)


class Account(Protocol):
    """The account of a run with a population's ledger, as `privacy.population` keeps it."""

    @property
    def name(self) -> str:
        """Return the name of the population's ledger."""
        ...

    def reserve(self, run: str, budget: Budget, place: Place) -> str:
        """Reserve the whole budget of a run, before it draws. Return a new mark; empty: the run is over."""
        ...

    def cover(self, run: str, charges: Sequence[Event], budget: Budget, place: Place) -> None:
        """Raise BudgetExceeded unless the population has room for these charges, and for what may follow."""
        ...

    def advance(self, run: str, place: Place) -> None:
        """Take note of the place of the run's ledger. Raise ResumeError where the run is over, or open elsewhere."""
        ...

    def finish(self, run: str, charges: Sequence[Event], place: Place) -> None:
        """Return what a run that is over has not spent."""
        ...


def check_account(account: Account | None, entries: Entries, *, seeded: bool, chained: bool) -> None:
    """Raise InputError unless a ledger goes with an account, or with none.

    Args:
        account: that the run was given; None: with none.
        entries: of the run's ledger.
        seeded: whether its noise is simulated.
        chained: whether its lines are.
    """
    known = entries.drawn_from
    if account is None:
        if known is not None:
            raise InputError(
                f"this run draws from the population ledger {known[0]}: name its file (population=, --population)."
            )
        return
    refuse_simulation(seeded)
    if known is not None and known[0] != account.name:
        raise ResumeError(f"this run draws from another population ledger, {known[0]}; name that one's file.")
    if known is None and (entries.charges or not chained):
        raise ResumeError("this run was begun without a population ledger; continue it without, or start anew.")


def refuse_simulation(seeded: bool) -> None:
    """Raise InputError where a run that draws from a population ledger is a simulation."""
    if seeded:
        raise InputError(
            "a simulation is not private, so it draws nothing from a population ledger: leave one of both out "
            "(random_state, --simulate; population, --population)."
        )
