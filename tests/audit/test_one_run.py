"""One release of every kind is sound, its control is caught, and faults of any part of the way are found out.

Every test here is statistical. Sound releases fail with a chance below ERROR for each kind, so below 10^-6 in all.
Controls have 1.5 times too little noise: a bound then lies above the claim by more than ten times its own deviation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from privrep.audit import one_run
from privrep.audit.choices import _bound_by_draws, _bound_by_odds, _make_tables, choose_often
from privrep.audit.of_model import plan_events
from privrep.audit.one_run import LOOKS, REPLACED_ALONE, Finding, audit_kind
from privrep.audit.releases import Settings
from privrep.audit.sabotage import WeakNoise
from privrep.errors import InputError
from privrep.privacy import bounds, calibration, release
from privrep.privacy.bounds import LEVELS
from privrep.privacy.events import Gaussian, Pure, Selection
from privrep.privacy.groups import Group
from privrep.privacy.noise import secure_noise
from privrep.privacy.sampling import Fixed, Poisson, Sample

ERROR = 1e-7
SETTINGS = Settings(4.0, 1e-5, canaries=4096)


def look(kind: str, settings: Settings = SETTINGS) -> Finding:
    if kind in ("nodes", "one-node"):
        pytest.importorskip("flwr")
    return audit_kind(kind, settings, ERROR, (1.5,))


@pytest.mark.parametrize("kind", LOOKS)
def test_a_release_is_sound_and_its_control_is_caught(kind: str) -> None:
    found = look(kind)
    assert found.passed, found
    assert 0.6 * found.claimed < found.lower <= found.claimed < found.control_lower
    assert found.delta == (0.0 if kind == "choices" else 1e-5)
    assert found.claimed == pytest.approx(4.0, rel=0.01) or kind == "one-node"
    assert found.to_json() | {"sound": True, "passed": True} == found.to_json()


@pytest.mark.parametrize("kind", [kind for kind in LOOKS if kind not in REPLACED_ALONE])
def test_so_it_is_where_users_come_and_go(kind: str) -> None:
    assert look(kind, Settings(4.0, 1e-5, "add-or-remove-one-user", 4096)).passed


@pytest.mark.parametrize("kind", REPLACED_ALONE)
def test_other_kinds_are_refused_there(kind: str) -> None:
    with pytest.raises(InputError, match="replace-one-user alone"):
        look(kind, Settings(4.0, 1e-5, "add-or-remove-one-user", 4096))


def test_one_node_is_claimed_to_tell_more_than_what_is_published() -> None:
    assert look("one-node").claimed > 1.8 * look("nodes").claimed


def weaken(patch: pytest.MonkeyPatch) -> None:
    """Let the library draw too little noise."""
    patch.setattr(one_run, "secure_noise", WeakNoise(1.5))


def miscalibrate(patch: pytest.MonkeyPatch) -> None:
    """Let releases plan too little noise."""
    sigma = calibration.Calibration.sigma.fget  # type: ignore[attr-defined]
    patch.setattr(calibration.Calibration, "sigma", property(lambda plan: sigma(plan) / 1.5))


def clip_too_late(patch: pytest.MonkeyPatch) -> None:
    """Let users add twice what the bound says."""
    clip = bounds._clip_vectors
    patch.setattr(bounds, "_clip_vectors", lambda *given: 2 * clip(*given))


def ask_too_many(patch: pytest.MonkeyPatch) -> None:
    """Let twice as many users be in a sample."""
    members = Sample.members
    patch.setattr(Sample, "members", lambda sample, count: members(Sample(2 * sample.rate, sample.key), count))


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        *((kind, weaken) for kind in LOOKS),
        *((kind, miscalibrate) for kind in ("sums", "samples", "batches", "walks", "selections")),
        *((kind, clip_too_late) for kind in ("sums", "batches", "walks", "selections", "nodes")),
        ("samples", ask_too_many),
    ],
)
def test_a_fault_is_found_out(
    kind: str, spoil: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch)
    found = look(kind)
    assert not found.sound
    assert not found.passed
    assert found.lower > found.claimed


def test_keys_of_one_user_that_are_named_too_often_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "compute_threshold", lambda sigma, log_chance: 1 + 2 * sigma)
    found = look("selections")
    assert "of 4,096 keys that one user holds were named" in found.fault
    assert not found.sound


def test_a_control_that_is_not_caught_fails_the_audit() -> None:
    found = audit_kind("sums", SETTINGS, ERROR, (1.0001,))
    assert (found.sound, found.caught, found.passed) == (True, False, False)


def test_controls_are_tried_until_one_is_caught() -> None:
    assert audit_kind("sums", SETTINGS, ERROR, (1.0001, 1.5, 2.0)).control == 1.5


def test_what_cannot_be_audited_is_said() -> None:
    with pytest.raises(InputError, match="a kind of release is one of sums"):
        audit_kind("sum", SETTINGS, ERROR)
    with pytest.raises(InputError, match="noise needs a delta"):
        audit_kind("sums", Settings(1.0, 0.0), ERROR)
    with pytest.raises(InputError, match="16 to 4,194,304 canaries"):
        Settings(1.0, 1e-6, canaries=3)


# Choices


def draw_choices(x: float, draws: int, rng: np.random.Generator) -> tuple[Any, Any, Any]:
    """Return coins, choices, and totals of an exponential mechanism of this epsilon."""
    totals = np.array([[0.0, 2.0, 1.0, 3.0], [2.0, 0.0, 3.0, 1.0]]) * LEVELS
    coins = rng.random(draws) < 0.5
    weights = np.exp(-x * totals / np.ptp(totals[0] - totals[1]))
    chances = np.cumsum(weights / weights.sum(axis=1, keepdims=True), axis=1)[coins.astype(int)]
    return coins, (rng.random((draws, 1)) > chances).sum(axis=1), totals


@pytest.mark.parametrize("x", [1.0, 3.0])
def test_the_bounds_of_a_choice_are_false_as_seldom_as_they_say(x: float) -> None:
    """False alarms: fewer than 1 in 10^6. A third of epsilon would nearly always be refused by odds."""
    rng, times = np.random.default_rng(6), 150
    made = [draw_choices(x, 2000, rng) for _ in range(times)]
    by_odds = np.array([_bound_by_odds(*each, 0.05) for each in made])
    by_draws = np.array([_bound_by_draws(each[0], each[1], 0.05) for each in made])
    for found in (by_odds, by_draws):
        assert (found > x).sum() <= int(binom.isf(1e-6, times, 0.05))
    assert (by_odds > x / 3).mean() > 0.99
    assert by_draws.mean() > 0.2 * x


def test_draws_alone_tell_of_a_choice_that_is_no_exponential_mechanism() -> None:
    coins = np.arange(4000) % 2 == 1
    assert _bound_by_draws(coins, coins.astype(int), 1e-6) > 4
    assert _bound_by_odds(coins, coins.astype(int), np.ones((2, 4)), 1e-6) == 0.0


@pytest.mark.parametrize(("relation", "range_"), [("replace-one-user", 2), ("add-or-remove-one-user", 1)])
def test_the_canary_moves_the_totals_of_a_choice_as_far_as_a_user_may(relation: Any, range_: int) -> None:
    first, second = (np.clip(table.X, 0, 1).sum(axis=0) for table in _make_tables(1.0, relation))
    assert np.ptp(first - second) == range_
    claimed, lower = choose_often(1.0, relation, 200, secure_noise, 0.01)
    assert claimed == 1.0
    assert 0 < lower.epsilon < 1.5


# Of a model


def test_each_kind_of_a_ledger_is_audited_at_its_costliest() -> None:
    whole = Settings(8.0, 1e-5, canaries=64)
    events = [
        Gaussian(9.0),
        Gaussian(4.0, Group("a", 0, 2)),
        Gaussian(30.0, count=400),
        Selection(5.0, 1e-7),
        Pure(0.1),
        Pure(0.3),
        Poisson(0.01).make_event(0.25, "replace-one-user", steps=9),
        Fixed(3, 300).make_event(1.0, "replace-one-user"),
    ]
    plan, left_out = plan_events(events, whole)
    assert not left_out
    assert {kind: each.multiplier for kind, each in plan.items()} == {
        "sums": 4.0,
        "walks": 30.0,
        "selections": 5.0,
        "choices": None,
        "samples": 2.0,
        "batches": 1.0,
    }
    assert (plan["walks"].steps, plan["selections"].aside, plan["choices"].epsilon) == (16, 1e-7, 0.3)
    assert (plan["samples"].rate, plan["batches"].rate) == (0.01, 0.01)
    assert {each.epsilon for kind, each in plan.items() if kind != "choices"} == {8.0}


def test_functions_of_whole_samples_are_left_out_where_users_come_and_go() -> None:
    event = Poisson(0.1).make_event(0.25, "add-or-remove-one-user", batch_level=True)
    plan, left_out = plan_events([event, Gaussian(4.0)], Settings(8.0, 1e-5, "add-or-remove-one-user"))
    assert set(plan) == {"sums"}
    assert set(left_out) == {"batches"}


@pytest.mark.parametrize("kind", ["samples", "batches", "walks", "selections"])
def test_events_of_a_model_are_audited_at_their_own_price(kind: str) -> None:
    settings = Settings(8.0, 1e-5, canaries=4096, multiplier=2.5, rate=0.2, aside=1e-7, steps=3)
    found = audit_kind(kind, settings, ERROR, (1.5, 2.0))
    assert found.passed, found
    assert 0.1 < found.claimed < 5
    assert math.isfinite(found.control_lower)
