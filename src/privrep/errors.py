"""The errors a user of privrep meets. Each message says what is wrong and what to do instead."""

from __future__ import annotations


class PrivrepError(Exception):
    """Base of every error privrep raises on purpose."""


class InputError(PrivrepError, ValueError):
    """The data, an option or a folder given to privrep cannot be used; the message names it and says what to do."""


class BudgetExceeded(PrivrepError, RuntimeError):
    """A release would spend more than the ledger's budget. Nothing was drawn and nothing was recorded."""


class NothingLearned(UserWarning):
    """The released representation is mostly noise: this population is too small for this budget."""


class ResumeError(PrivrepError, RuntimeError):
    """A run folder holds another run (other data shape, other settings): these arguments cannot continue it."""
