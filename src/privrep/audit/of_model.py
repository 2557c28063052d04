"""The settings of an audit of a model: the kinds of release that its ledger charged, each at its costliest."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from privrep.audit.releases import Settings
from privrep.errors import InputError
from privrep.models.folder import ModelFolder
from privrep.privacy.events import Batched, Event, Gaussian, Pure, Sampled, Selection
from privrep.privacy.ledger import Budget

MOST_STEPS = 16  # of a walk; more cost time and tell nothing new


def read_plan(path: Path, canaries: int) -> tuple[Budget, dict[str, Settings], dict[str, str]]:
    """Return a model's budget, the settings of each kind to audit, and why other kinds are left out.

    Args:
        path: of the folder of a model, or of a run that was not finished.
        canaries: of each kind.
    """
    folder = ModelFolder(path)
    if not folder.finished and not folder.begun:
        raise InputError(f"{path} is not a folder of privrep. Name a model's folder.")
    ledger = folder.read_ledger()
    if not ledger.entries.charges:
        raise InputError(f"{path} has charged nothing yet, so there is nothing to audit.")
    whole = Settings(ledger.budget.epsilon, ledger.budget.delta, ledger.budget.relation, canaries)
    plan, left_out = plan_events(list(ledger.entries.charges.values()), whole)
    return ledger.budget, plan, left_out


def plan_events(events: Iterable[Event], whole: Settings) -> tuple[dict[str, Settings], dict[str, str]]:
    """Return the settings of each kind of release among the events, and why other kinds are left out.

    Args:
        events: that a ledger charged.
        whole: the budget, and the effort.
    """
    plan, left_out = dict[str, Settings](), dict[str, str]()
    costliest = dict[str, Event]()
    for event in events:
        kind = _find_kind(event)
        if kind not in costliest or _rank(event) > _rank(costliest[kind]):
            costliest[kind] = event
    for kind, event in costliest.items():
        if isinstance(event, Batched) and whole.relation != "replace-one-user":
            left_out[kind] = "a function of a whole sample has no canaries along axes of their own"
        else:
            plan[kind] = _settle(event, whole)
    return plan, left_out


def _find_kind(event: Event) -> str:
    """Return the kind of release that an event is."""
    if isinstance(event, Gaussian):
        return "sums" if event.count == 1 else "walks"
    kinds: dict[type[Event], str] = {Selection: "selections", Pure: "choices", Sampled: "samples", Batched: "batches"}
    return kinds[type(event)]


def _rank(event: Event) -> float:
    """Return a number that is larger for the costlier of two releases of a kind: about its mu, or its epsilon."""
    if isinstance(event, Pure):
        return event.epsilon
    rate = event.rate if isinstance(event, Sampled | Batched) else 1.0
    return rate * math.sqrt(event.count) / event.noise_multiplier


def _settle(event: Event, whole: Settings) -> Settings:
    """Return the settings that make the release of an event again, on a ledger of the same budget."""
    if isinstance(event, Pure):
        return replace(whole, epsilon=event.epsilon)
    if isinstance(event, Selection):
        return replace(whole, multiplier=event.noise_multiplier, aside=event.delta)
    if isinstance(event, Gaussian):
        return replace(whole, multiplier=event.noise_multiplier, steps=min(event.count, MOST_STEPS))
    return replace(whole, multiplier=event.noise_multiplier, rate=event.rate)
