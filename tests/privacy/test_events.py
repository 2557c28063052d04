"""Events survive their way through a ledger, and refuse numbers that mean nothing."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from privrep.errors import InputError
from privrep.privacy.events import Gaussian, Selection, event_from_json, event_to_json
from privrep.privacy.groups import Group


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-9, math.nan])
def test_a_selection_sets_something_aside(delta: float) -> None:
    with pytest.raises(InputError, match="sets a part of delta aside"):
        Selection(3.0, delta)


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "laplace", "scale": 1.0},
        {"noise_multiplier": 3.0},
        {},
        {"kind": "pure", "epsilon": 1.0, "count": 9},  # of a later version, perhaps: nine are not one
        {"kind": "selection", "noise_multiplier": 3.0, "delta": 1e-9, "count": 9},
        {"kind": "gaussian", "noise_multiplier": 3.0, "rate": 0.5},
        {"kind": "gaussian", "noise_multiplier": 3.0, "count": 2},
        {"kind": "gaussians", "noise_multiplier": 3.0},
    ],
)
def test_unknown_recorded_events_are_refused_by_name(data: dict[str, object]) -> None:
    with pytest.raises(InputError, match="unknown privacy event") as caught:
        event_from_json(data)
    assert repr(data.get("kind")) in str(caught.value)


@given(st.floats(1e-6, 1e12))
def test_events_survive_json_exactly(multiplier: float) -> None:
    assert event_from_json(event_to_json(Gaussian(multiplier))) == Gaussian(multiplier)


@given(st.floats(1e-6, 1e12), st.text(), st.integers(0, 9), st.floats(1e-300, 0.99))
def test_groups_and_selections_survive_json_exactly(multiplier: float, split: str, index: int, delta: float) -> None:
    for event in (Gaussian(multiplier, Group(split, index, 10)), Selection(multiplier, delta)):
        assert event_from_json(json.loads(json.dumps(event_to_json(event)))) == event


def test_a_release_to_all_is_recorded_as_it_always_was() -> None:
    assert event_to_json(Gaussian(3.0)) == {"kind": "gaussian", "noise_multiplier": 3.0}
    assert event_from_json({"kind": "gaussian", "noise_multiplier": 3.0}) == Gaussian(3.0)


@pytest.mark.parametrize("group", [["a", 2, 2], ["a", 0.5, 2], ["a", 0], None, 5, ["a", "0", 2], [1, 0, 2]])
def test_a_recorded_group_that_is_none_is_refused(group: object) -> None:
    with pytest.raises((InputError, TypeError)):
        event_from_json({"kind": "gaussian", "noise_multiplier": 3.0, "group": group})


@pytest.mark.parametrize("multiplier", [0.0, -1.0, math.nan, math.inf])
def test_a_noise_multiplier_must_mean_something(multiplier: float) -> None:
    with pytest.raises(InputError, match="noise_multiplier"):
        Gaussian(multiplier)
    with pytest.raises(InputError, match="noise_multiplier"):
        Selection(multiplier, 1e-7)
