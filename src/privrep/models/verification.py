"""Verification of a folder of any kind of model: its books, from the files alone. It changes nothing in the folder."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from privrep.errors import InputError
from privrep.models.folder import BILLBOARD, LEDGER, MODEL, RUN, ModelFolder
from privrep.privacy.accounting import collect_spending, compute_epsilon_by_pld
from privrep.privacy.billboard import Billboard
from privrep.privacy.books import Finding, check_books
from privrep.privacy.ledger import Ledger, read_ledger

STEPS = 1000  # of losses up to epsilon: finer ones take seconds, and change the fourth digit
APART = 0.01  # relative difference of two accountants from which on one of them is wrong


@dataclass(frozen=True)
class Verification:
    """All that was looked at in a folder."""

    folder: str
    finished: bool
    findings: tuple[Finding, ...]
    epsilon: float | None  # None where the ledger cannot be read
    delta: float | None

    @property
    def good(self) -> bool:
        """Return whether nothing was found wrong."""
        return all(finding.good for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        return {**asdict(self), "good": self.good}


def verify(path: Path) -> Verification:
    """Return what is found of the books of a folder: each check, whether it is good, and what it says.

    Args:
        path: of a model, of a published copy, or of a run that was not finished.
    """
    folder = ModelFolder(path)
    if not folder.finished and not folder.begun:
        raise InputError(f"{path} is not a folder of privrep: there is no {MODEL} and no {RUN}.")
    findings, ledger, billboard = _read(folder)
    if ledger is not None:
        findings.append(_find_seal(folder, ledger))
        if billboard is not None:
            findings += check_books(ledger, billboard, finished=folder.finished)
        findings.append(_compare_accountants(ledger))
        if drawn := ledger.entries.drawn_from:
            findings.append(Finding("population", True, f"run {drawn[1]} draws from population ledger {drawn[0]}"))
    spent = (None, None) if ledger is None else (ledger.epsilon, ledger.budget.delta)
    return Verification(str(path), folder.finished, tuple(findings), *spent)


def _read(folder: ModelFolder) -> tuple[list[Finding], Ledger | None, Billboard | None]:
    """Return what reading the parts of a folder found, and those that can be read."""
    findings: list[Finding] = []
    ledger: Ledger | None = None
    billboard: Billboard | None = None
    try:
        with folder.damage(LEDGER):
            if folder.unspent:
                return [Finding("ledger", True, "the run has not begun to spend")], None, None
            ledger = read_ledger(folder.ledger)
        findings.append(Finding("ledger", True, "the ledger can be read"))
    except InputError as error:
        findings.append(Finding("ledger", False, str(error)))
    try:
        with folder.damage(BILLBOARD):
            billboard = Billboard.read(folder.path / BILLBOARD)
        findings.append(Finding("billboard", True, "all pages can be read"))
    except InputError as error:
        findings.append(Finding("billboard", False, str(error)))
    return findings, ledger, billboard


def _find_seal(folder: ModelFolder, ledger: Ledger) -> Finding:
    """Return whether the ledger is the one that the model was finished with."""
    try:
        with folder.damage(MODEL):
            folder.check_seal(ledger)
    except InputError as error:
        return Finding("seal", False, str(error))
    if not folder.finished:
        return Finding("seal", True, "the run is not finished, so nothing seals its ledger")
    sealed = "the ledger is the one that the model was finished with"
    return Finding("seal", True, sealed if ledger.chained else "the ledger is of before: nothing seals it")


def _compare_accountants(ledger: Ledger) -> Finding:
    """Return whether both accountants come to the same epsilon; about samples there is one."""
    events, delta = list(ledger.entries.charges.values()), ledger.budget.delta
    ours = ledger.epsilon
    if collect_spending(events) is not None:
        return Finding("epsilon", True, f"{ours:.6g} at delta {delta:g}, by privacy loss distributions")
    if not delta:
        return Finding("epsilon", True, f"{ours:.6g} at delta 0: the epsilons of choices, added up")
    theirs = compute_epsilon_by_pld(events, delta, max(1e-4, ours / STEPS))
    words = f"{ours:.6g} at delta {delta:g} in closed form, {theirs:.6g} by dp-accounting's privacy loss distributions"
    return Finding("epsilon", not events or math.isclose(ours, theirs, rel_tol=APART, abs_tol=APART), words)
