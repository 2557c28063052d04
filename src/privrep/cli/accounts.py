"""The account of a command's run with a population ledger."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from privrep.data.readers import TableSource
    from privrep.privacy.ledger import Budget
    from privrep.privacy.population import Account


def open_account(
    population: Path | None,
    what: str,
    budget: Budget | None,
    begun: Path | None,
    *,
    seeded: bool,
    ids: Callable[[], ArrayLike] | None = None,
) -> Account | None:
    """Return the account of a run; None where no population ledger is named.

    Raise BudgetExceeded if there is no room for a new run, before a row is read. Nothing is reserved.

    Args:
        population: the file of the ledger.
        what: the run in words.
        budget: of the run; None where it follows from the number of users.
        begun: the folder of a run that this one may go on with; None: there is none.
        seeded: whether noise is simulated, which does not go with a ledger.
        ids: returns the ids of the run's users; None where they are not known.
    """
    from privrep.privacy.account import refuse_simulation
    from privrep.privacy.population import Account, PopulationLedger

    if population is None:
        return None
    refuse_simulation(seeded)
    account = Account(PopulationLedger(population), what, ids)
    if budget is not None:
        account.check(budget, None if begun is None else begun / "ledger.jsonl", seeded=seeded)
    return account


def list_users(source: TableSource) -> ArrayLike:
    """Return the ids of a table's users, (users,), in any order."""
    import pyarrow.compute as pc

    from privrep.data.readers import read_columns, read_user_ids

    column = read_columns(source.path, [source.user], source.user_as_text, source.dialect)[source.user]
    return read_user_ids(pc.unique(column))
