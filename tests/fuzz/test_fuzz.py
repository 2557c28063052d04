"""Two thousand changed inputs of all kinds are read or refused in one sentence: `make fuzz` tries a million."""

from __future__ import annotations

import gc
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import targets
from targets import TARGETS

import fuzz
from fuzz import list_targets, share_out, try_case, try_target
from privrep.errors import InputError

CASES = 2_000


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A model of every kind, made once. A case that takes too long is stopped by a signal."""
    before = signal.signal(signal.SIGPROF, fuzz._stop)
    targets.make_models(tmp_path_factory.mktemp("models"))
    gc.freeze()
    yield
    gc.unfreeze()
    signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize("name", list_targets())
def test_changed_input_is_read_or_refused(name: str) -> None:
    count = share_out(CASES, list_targets())[name]
    found = try_target(name, 0, count)
    assert not found.faults, "\n".join(f"--target {name!r} --seed {seed}\n{why}" for seed, why in found.faults.items())
    assert sum(found.ends.values()) == count
    assert found.ends["refused"] >= (0 if name == "Arrow" else 1)  # most changes to a frame are not seen by anybody


def test_the_targets_of_a_table_share_all_cases() -> None:
    shares = share_out(CASES, list(TARGETS))
    assert 0.95 * CASES <= sum(shares.values()) <= CASES + len(TARGETS)
    assert min(shares.values()) >= 20


def test_the_same_seed_makes_the_same_case(tmp_path: Path) -> None:
    seen = []
    for _ in range(2):
        case = TARGETS["CSV"].prepare(tmp_path)
        assert try_case(case, 7, "CSV")[0] != "FAULT"
        seen.append((tmp_path / "table.csv").read_bytes())
    assert seen[0] == seen[1]


def _raise(error: BaseException) -> fuzz.Case:
    def case(rng: random.Random) -> None:
        raise error

    return case


@pytest.mark.parametrize("error", [KeyError("x"), RecursionError(), MemoryError(), InputError("a\nb"), InputError(" ")])
def test_a_traceback_and_an_error_of_two_lines_are_faults(error: BaseException) -> None:
    assert try_case(_raise(error), 0, "CSV")[0] == "FAULT"
    assert try_case(_raise(InputError("a sentence.")), 0, "CSV") == ("refused", "")


def test_a_case_that_takes_too_long_or_too_much_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(rng: random.Random) -> None:
        while True:
            pass

    monkeypatch.setattr(fuzz, "SLOW", 0.05)
    end, why = try_case(busy, 0, "CSV")
    assert (end, "takes over" in why) == ("FAULT", True)
    monkeypatch.setattr(fuzz, "LARGE", -1)
    assert try_case(lambda rng: None, 0, "CSV") == ("FAULT", "it takes 0 bytes")
