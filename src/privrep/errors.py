"""Errors and warnings that a user of privrep meets. Each message says what is wrong and what to do instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class PrivrepError(Exception):
    """Base of every error privrep raises on purpose."""


class InputError(PrivrepError, ValueError):
    """Data, an option or a folder that privrep cannot use. The message names it and says what to do."""


class OverLimit(InputError):
    """Input over a limit of `privrep.boundary`. The message names the limit and the variable that raises it."""


class MissingPackage(InputError, ImportError):
    """A package that this part of privrep needs is not installed; the message says how to install it."""


class BudgetExceeded(PrivrepError, RuntimeError):
    """A release that would spend more than the ledger's budget. Nothing was drawn and nothing was recorded."""


class DiskFull(PrivrepError, OSError):
    """A file that could not be written because the disk is full. What was written before stands, and can go on."""


class NothingLearned(UserWarning):
    """Warning: users are no better off than alone, as far as releases tell.

    This population is too small for this budget.
    """


class WeakPrivacy(UserWarning):
    """Warning: the budget promises users little.

    Its epsilon is very large, or its delta is not below one over the users.
    """


class OtherPeople(UserWarning):
    """Warning: most users of a run are not those of earlier runs on its population ledger.

    The message estimates how many are. Not private.
    """


class FittedAgain(UserWarning):
    """Warning: a process fitted the same users before, without a population ledger.

    The message says what all these fits come to together.
    """


class OutsideLedger(UserWarning):
    """Warning: something learned from users' rows before `fit`, and no ledger counts it.

    The message names the step.
    """


class UnknownUsers(UserWarning):
    """Warning: some rows are of users who were not in `fit`, so the prior mean predicted them.

    The message counts both.
    """


class MissingValues(UserWarning):
    """Warning: values were missing in `fit`.

    The message counts the values filled and the rows left out. Not private.
    """


class UnknownLabels(UserWarning):
    """Warning: some labels in `fit` are none of the declared classes.

    The message counts their rows, which are left out. Not private.
    """


class ColumnNote(UserWarning):
    """Warning: a decision of `fit` about a column of a frame that its owner may not expect.

    The message says how to decide.
    """


class ResumeError(PrivrepError, RuntimeError):
    """A run folder that holds another run, of another shape or with other settings, which cannot be continued."""


def missing_package(what: str, extra: str) -> MissingPackage:
    """Return the error for a package that is not installed.

    Args:
        what: who needs which package, such as "Centaur needs PyTorch".
        extra: of pyproject.toml, which has the package.
    """
    command = f"pip install --constraint constraints.txt '.[{extra}]'"
    return MissingPackage(f"{what}; in a clone of privrep run: {command}")


@contextmanager
def needed(package: str, what: str, extra: str) -> Iterator[None]:
    """Turn the failed import of one package into a `MissingPackage`; `missing_package` explains `what` and `extra`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise missing_package(what, extra) from None
