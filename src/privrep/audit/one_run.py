"""The audit of one release of every kind, each beside a control whose noise is too small and that must be caught."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from privrep.audit.choices import choose_often
from privrep.audit.releases import (
    Settings,
    Told,
    release_batch,
    release_sample,
    release_sums,
    release_walk,
    select_keys,
)
from privrep.audit.sabotage import WeakNoise
from privrep.audit.seen import Lower, bound_epsilon
from privrep.errors import InputError, missing_package
from privrep.privacy.noise import NoiseSource, secure_noise

CONTROL = 1.1  # part by which the control's noise is too small
CONTROLS = (1.1, 1.25, 1.5, 2.0)  # tried in this order where an event of a model is so small that its price is rough
CANARIES_PER_CHOICE = 4


@dataclass(frozen=True)
class Finding:
    """Findings about one kind of release, and its control. Every field is public: all users were made up.

    claimed   epsilon that the ledger of the release states, at `delta`.
    lower     lower bound of the epsilon that it has.
    by        the observation that the bound comes from: coins or noise, odds or draws.
    right     part of the secret coins that were guessed right.
    canaries  how many there were, or draws of a choice.
    control   the part by which the control's noise was too small.
    control_lower, control_by, caught   the same of the control, and whether its bound is above the claim.
    fault     what else is wrong, or empty.
    """

    kind: str
    claimed: float
    delta: float
    relation: str
    lower: float
    by: str
    right: float
    canaries: int
    control: float
    control_lower: float
    control_by: str
    caught: bool
    fault: str
    seconds: float

    @property
    def sound(self) -> bool:
        """Return whether nothing says that the release costs more than its ledger states."""
        return self.lower <= self.claimed and not self.fault

    @property
    def passed(self) -> bool:
        """Return whether the release is sound, and the control was caught."""
        return self.sound and self.caught

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        return {**asdict(self), "sound": self.sound, "passed": self.passed}


@dataclass(frozen=True)
class Observed:
    """One look at a kind of release."""

    claimed: float
    delta: float
    lower: Lower
    canaries: int
    fault: str = ""


Look = Callable[[Settings, NoiseSource, float], Observed]


def _look_by(release: Callable[[Settings, NoiseSource], Told]) -> Look:
    """Return the look at releases of canaries."""

    def look(settings: Settings, noise: NoiseSource, error: float) -> Observed:
        return _read(release(settings, noise), settings, error)

    return look


def _read(told: Told, settings: Settings, error: float) -> Observed:
    """Return what a release of canaries says."""
    lower = bound_epsilon(told.seen, settings.delta, error)
    return Observed(told.claimed, settings.delta, lower, len(told.seen.coins), told.fault)


def _look_at_keys(settings: Settings, noise: NoiseSource, error: float) -> Observed:
    """Look at a selection: at its noisy counts, and at keys that one user holds, with half of the error each."""
    return _read(select_keys(settings, noise, error / 2), settings, error / 2)


def _look_at_choices(settings: Settings, noise: NoiseSource, error: float) -> Observed:
    """Look at many choices. They have no delta."""
    draws = settings.canaries // CANARIES_PER_CHOICE
    claimed, lower = choose_often(settings.epsilon, settings.relation, draws, noise, error)
    return Observed(claimed, 0.0, lower, draws)


def _look_at_nodes(view: int) -> Look:
    """Return the look at what nodes released together, or at what the first of them sent."""

    def look(settings: Settings, noise: NoiseSource, error: float) -> Observed:
        try:
            from privrep.audit.nodes import release_by_nodes
        except ImportError as missing:
            raise missing_package("noise of nodes needs Flower", "federated") from missing
        return _read(release_by_nodes(settings, noise)[view], settings, error)

    return look


LOOKS: Mapping[str, Look] = {
    "sums": _look_by(release_sums),
    "samples": _look_by(release_sample),
    "batches": _look_by(release_batch),
    "walks": _look_by(release_walk),
    "selections": _look_at_keys,
    "choices": _look_at_choices,
    "nodes": _look_at_nodes(0),
    "one-node": _look_at_nodes(1),
}
REPLACED_ALONE = ("samples", "batches", "nodes", "one-node")
"""Kinds that go with replace-one-user alone."""


def audit_kind(kind: str, settings: Settings, error: float, controls: Sequence[float] = (CONTROL,)) -> Finding:
    """Return what is found of one kind of release, and of its control.

    Args:
        kind: one of LOOKS.
        settings: the promise, and the effort.
        error: chance that the lower bound is false; of the control's, too.
        controls: parts by which the control's noise is too small, tried until one is caught.
    """
    if kind not in LOOKS:
        raise InputError(f"a kind of release is one of {', '.join(LOOKS)}. Got {kind!r} instead.")
    if not settings.delta and kind != "choices":
        raise InputError(f"noise needs a delta, and {kind} have noise: an audit of delta 0 is about choices alone.")
    if settings.relation != "replace-one-user" and kind in REPLACED_ALONE:
        raise InputError(f"{kind} go with the relation replace-one-user alone.")
    began, look = time.perf_counter(), LOOKS[kind]
    honest = look(settings, secure_noise, error)
    for factor in controls:
        control = look(settings, WeakNoise(factor), error)
        caught = control.lower.epsilon > honest.claimed
        if caught:
            break
    return Finding(
        kind,
        honest.claimed,
        honest.delta,
        settings.relation,
        honest.lower.epsilon,
        honest.lower.by,
        honest.lower.right,
        honest.canaries,
        factor,
        control.lower.epsilon,
        control.lower.by,
        caught,
        honest.fault,
        time.perf_counter() - began,
    )
