"""The account of a command's run with a population ledger."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from privrep.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from privrep.data.readers import TableSource
    from privrep.privacy.population import Account


def open_account(
    population: Path | None, seed: int | None, what: str, ids: Callable[[], ArrayLike] | None = None
) -> Account | None:
    """Return the account of a run; None where no population ledger is named.

    Args:
        population: the file of the ledger.
        seed: of simulated noise, which does not go with a ledger.
        what: the run in words.
        ids: returns the ids of the run's users; None where they are not known.
    """
    from privrep.privacy.population import Account, PopulationLedger

    if population is None:
        return None
    if seed is not None:
        raise InputError(
            "--simulate does not go with --population: a simulation is not private, and draws nothing from the ledger "
            "of a population."
        )
    return Account(PopulationLedger(population), what, ids)


def list_users(source: TableSource) -> ArrayLike:
    """Return the ids of a table's users, (users,), in any order."""
    import pyarrow.compute as pc

    from privrep.data.readers import read_columns, read_user_ids

    column = read_columns(source.path, [source.user], source.user_as_text, source.dialect)[source.user]
    return read_user_ids(pc.unique(column.combine_chunks() if hasattr(column, "combine_chunks") else column))
