"""Mutations stay applicable: see `mutate`, and `make mutations`, which tries them."""

from __future__ import annotations

from pathlib import Path

import mutate

MUTATIONS = mutate.read_mutations()


def test_every_mutation_can_still_be_tried() -> None:
    assert {one.name: one.fault(mutate.ROOT) for one in MUTATIONS} == dict.fromkeys(one.name for one in MUTATIONS)


def test_there_are_thirty_and_they_reach_every_package_that_privacy_rests_on() -> None:
    assert len({one.name for one in MUTATIONS}) == len(MUTATIONS) >= 30
    packages = {Path(one.file).parts[2] for one in MUTATIONS}
    assert packages >= {"privacy", "users", "linear", "nn", "neural", "federated"}
