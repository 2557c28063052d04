"""An audit as a whole, and its report as data: `privrep-audit/1`. It holds public numbers alone, and no row."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from privrep import __version__
from privrep.audit.fits import Fit
from privrep.audit.of_model import read_plan
from privrep.audit.one_run import CONTROL, CONTROLS, LOOKS, REPLACED_ALONE, Finding, audit_kind
from privrep.audit.releases import Settings
from privrep.audit.two_worlds import FitFinding, audit_fit
from privrep.errors import InputError, MissingPackage
from privrep.privacy.ledger import Budget

FORMAT = "privrep-audit/1"
CONFIDENCE = 0.99
OnFinding = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """The audit that is wanted.

    budget       promise to audit; of a model, the model's.
    kinds        of releases; None for all that there are.
    canaries     of each kind.
    confidence   with which all lower bounds hold together, but for the controls' bounds.
    of           folder of a model; None for no model.
    minutes      of the audit of a whole fit; None for no fit.
    """

    budget: Budget
    kinds: Sequence[str] | None = None
    canaries: int = 1 << 16
    confidence: float = CONFIDENCE
    of: Path | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if not 0.5 <= self.confidence <= 1 - 1e-12:
            raise InputError(f"the confidence of an audit is a chance below 1, such as 0.99. Got {self.confidence:g}.")
        if self.minutes is not None and not 0 < self.minutes <= 24 * 60:
            raise InputError(f"an audit of a fit takes some minutes, at most a day. Got {self.minutes:g}.")
        unknown = [kind for kind in self.kinds or () if kind not in LOOKS]
        if unknown:
            raise InputError(f"a kind of release is one of {', '.join(LOOKS)}. Got {unknown[0]!r} instead.")


@dataclass(frozen=True)
class Audit:
    """All that an audit found."""

    budget: Budget
    confidence: float
    of: str | None
    findings: tuple[Finding, ...]
    left_out: dict[str, str]
    fit: FitFinding | None
    seconds: float
    version: str = field(default=__version__)

    @property
    def passed(self) -> bool:
        """Return whether every release is sound and every control was caught."""
        looked = [found.passed for found in self.findings]
        looked += [] if self.fit is None else [self.fit.passed]
        return bool(looked) and all(looked)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        return {
            "format": FORMAT,
            "privrep": self.version,
            "of": self.of,
            "epsilon": self.budget.epsilon,
            "delta": self.budget.delta,
            "relation": self.budget.relation,
            "confidence": self.confidence,
            "releases": [found.to_json() for found in self.findings],
            "left_out": self.left_out,
            "fit": None if self.fit is None else self.fit.to_json(),
            "seconds": self.seconds,
            "passed": self.passed,
        }


def run_audit(request: Request, on_kind: OnFinding = lambda kind: None) -> Audit:
    """Return what an audit finds.

    Formal guarantee. The error that is left by the confidence is divided evenly among all lower bounds of sound
    releases. So the chance that any of them is false is at most that error, and a sound library fails an audit with at
    most this chance, but for controls that are not caught.

    Args:
        request: what is audited.
        on_kind: hears what is looked at next.
    """
    began = time.monotonic()
    budget, plan, left_out = _plan(request)
    fits = request.minutes is not None
    error = (1 - request.confidence) / max(len(plan) + fits, 1)
    findings = []
    for kind, settings in plan.items():
        on_kind(kind)
        try:
            findings.append(audit_kind(kind, settings, error, (CONTROL,) if request.of is None else CONTROLS))
        except MissingPackage as missing:
            if request.kinds is not None:
                raise
            left_out[kind] = str(missing)
    fit = None
    if request.minutes is not None:
        on_kind("fit")
        fit = audit_fit(Fit(budget.epsilon, budget.delta, budget.relation), 60 * request.minutes, error)
    of = None if request.of is None else str(request.of)
    return Audit(budget, request.confidence, of, tuple(findings), left_out, fit, time.monotonic() - began)


def _plan(request: Request) -> tuple[Budget, dict[str, Settings], dict[str, str]]:
    """Return the budget, the settings of each kind to audit, and why kinds that nobody asked for are left out."""
    if request.of is not None:
        budget, plan, left_out = read_plan(request.of, request.canaries)
    else:
        budget, left_out = request.budget, {}
        settings = Settings(budget.epsilon, budget.delta, budget.relation, request.canaries)
        plan = dict.fromkeys(LOOKS, settings)
    if request.kinds is not None:
        missing = [kind for kind in request.kinds if kind not in plan]
        if missing:
            raise InputError(f"{request.of} has no release of the kind {missing[0]}; it has {', '.join(plan)}.")
        return budget, {kind: plan[kind] for kind in request.kinds}, left_out
    if request.of is None:
        for kind in LOOKS:
            if not budget.delta and kind != "choices":
                left_out[kind] = "it has noise, and that takes a delta"
            elif budget.relation != "replace-one-user" and kind in REPLACED_ALONE:
                left_out[kind] = "it goes with replace-one-user alone"
    return budget, {kind: each for kind, each in plan.items() if kind not in left_out}, left_out
