"""Hashes of modules: what is frozen always counts, what is trained only if it is asked for."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from privrep.nn.flat_module import fingerprint, fingerprints  # noqa: E402


def module(seed: int = 0, frozen: int = 0) -> nn.Module:
    torch.manual_seed(frozen)
    first = nn.Linear(3, 2).requires_grad_(False)
    torch.manual_seed(seed)
    return nn.Sequential(first, nn.Linear(2, 2))


def test_trained_weights_count_only_where_they_are_asked_for() -> None:
    one, other = module(seed=1), module(seed=2)
    assert fingerprint(one, trainable=False) == fingerprint(other, trainable=False)
    assert fingerprint(one, trainable=True) != fingerprint(other, trainable=True)
    assert fingerprints(one) == {
        "all": fingerprint(one, trainable=True),
        "frozen": fingerprint(one, trainable=False),
    }


def test_frozen_weights_and_buffers_always_count() -> None:
    for trainable in (True, False):
        assert fingerprint(module(frozen=1), trainable=trainable) != fingerprint(module(frozen=2), trainable=trainable)
        thawed = module().requires_grad_(True)
        assert fingerprint(thawed, trainable=trainable) != fingerprint(module(), trainable=trainable)
        norm = nn.BatchNorm1d(3)
        before = fingerprint(norm, trainable=trainable)
        norm.running_mean += 1
        assert fingerprint(norm, trainable=trainable) != before
