"""Budget is recorded durably before it is spent, never twice, and a damaged ledger is refused rather than guessed."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from privrep.errors import BudgetExceeded, InputError, PrivrepError
from privrep.privacy import ledger_file
from privrep.privacy.accounting import CLOSED_FORM, gaussian_delta, gaussian_epsilon, gaussian_mu, total_mu
from privrep.privacy.events import Event, Gaussian, Selection
from privrep.privacy.groups import Group
from privrep.privacy.ledger import Budget, Ledger, noise_multiplier, read_report
from privrep.privacy.ledger_file import FORMAT, UNCHAINED, chain_line

BUDGET = Budget(2.0, 1e-6)
Open = Callable[..., Ledger]  # the fixture open_ledger


def price(share: float, budget: Budget = BUDGET) -> Gaussian:
    """The event that costs this share of a budget."""
    return Gaussian(noise_multiplier(share * budget.mu**2))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Charging


def test_charges_add_up_and_the_last_must_fit(path: Path, open_ledger: Open) -> None:
    ledger = open_ledger(BUDGET, path)
    ledger.charge({"a": price(0.25), "b": price(0.25)})
    assert ledger.remaining == pytest.approx(BUDGET.mu**2 / 2)
    before = path.read_bytes()
    with pytest.raises(BudgetExceeded) as caught:
        ledger.charge({"c": price(0.4), "d": price(0.2)})
    for word in ("c, d", "2 at delta 1e-06", "larger epsilon"):
        assert word in str(caught.value)
    assert path.read_bytes() == before
    assert ledger.remaining == pytest.approx(BUDGET.mu**2 / 2)
    ledger.charge({"c": price(0.5)})
    assert ledger.remaining == pytest.approx(0.0, abs=1e-12)
    assert ledger.epsilon <= 2.0
    assert ledger.epsilon == pytest.approx(2.0, rel=1e-7)


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=15))
def test_whatever_is_asked_what_is_spent_stays_within_the_budget(shares: list[float]) -> None:
    ledger = Ledger(BUDGET)
    for i, share in enumerate(shares):
        before = ledger.report()
        try:
            ledger.charge({f"release-{i}": price(share)})
        except BudgetExceeded:
            assert ledger.report() == before
    assert ledger.epsilon <= BUDGET.epsilon


@pytest.mark.parametrize("shares", [[0.1] * 10, [1 / 3] * 3, [0.7, 0.2, 0.1], [1e-6] * 10 + [1 - 1e-5]])
def test_shares_that_add_up_to_one_fit_exactly(shares: list[float]) -> None:
    ledger = Ledger(BUDGET)
    for i, share in enumerate(shares):
        ledger.charge({f"release-{i}": price(share)})
    assert ledger.epsilon == pytest.approx(2.0, rel=1e-7)
    with pytest.raises(BudgetExceeded):
        ledger.charge({"more": price(1e-4)})


def test_the_same_name_at_the_same_price_is_free_and_at_another_refused(path: Path, open_ledger: Open) -> None:
    ledger = open_ledger(BUDGET, path)
    ledger.charge({"a": price(0.5)})
    before, remaining = path.read_bytes(), ledger.remaining
    ledger.close()
    ledger = open_ledger(BUDGET, path)  # the process died before it posted, and another continues
    ledger.charge({"a": price(0.5)})
    assert path.read_bytes() == before
    assert ledger.remaining == remaining
    with pytest.raises(InputError, match="'a' was charged before at another price"):
        ledger.charge({"a": price(0.1)})
    with pytest.raises(InputError, match="another price"):
        ledger.charge({"new": price(0.1), "a": price(0.1)})
    assert path.read_bytes() == before
    assert ledger.remaining == remaining


def test_a_charge_is_on_disk_when_the_call_returns(
    path: Path, monkeypatch: pytest.MonkeyPatch, open_ledger: Open
) -> None:
    ledger = open_ledger(BUDGET, path)
    synced: list[bytes] = []
    real = os.fsync

    def recording(descriptor: int) -> None:
        real(descriptor)
        synced.append(path.read_bytes())

    monkeypatch.setattr(os, "fsync", recording)
    ledger.charge({"a": price(0.5)})
    assert synced, "the charge was not synced"
    assert b'"charge": "a"' in synced[-1]
    assert synced[-1] == path.read_bytes()


def test_unknown_events_cannot_be_charged(path: Path, open_ledger: Open) -> None:
    ledger = open_ledger(BUDGET, path)
    before = path.read_bytes()
    with pytest.raises(InputError, match="laplace"):
        ledger.charge({"a": "laplace"})  # type: ignore[dict-item]
    assert path.read_bytes() == before
    assert ledger.report().events == ()


def test_a_closed_ledger_does_not_take_charges_that_no_file_will_hold(path: Path, open_ledger: Open) -> None:
    ledger = open_ledger(BUDGET, path)
    ledger.close()
    with pytest.raises(PrivrepError):
        ledger.charge({"a": price(0.5)})


# Groups and selections


def test_every_group_may_spend_the_whole_budget_once(path: Path, open_ledger: Open) -> None:
    ledger = open_ledger(BUDGET, path)
    for t in range(5):
        ledger.charge({f"round-{t}": Gaussian(price(1.0).noise_multiplier, Group("rounds", t, 5))})
    assert ledger.epsilon == pytest.approx(2.0, rel=1e-7)
    assert ledger.remaining == pytest.approx(0.0, abs=1e-12)
    before = path.read_bytes()
    for event in (price(0.01), Gaussian(price(0.01).noise_multiplier, Group("rounds", 3, 5))):
        with pytest.raises(BudgetExceeded):
            ledger.charge({"more": event})
    with pytest.raises(InputError, match="5 groups in one release and 6"):
        ledger.charge({"more": Gaussian(1e3, Group("rounds", 0, 6))})
    assert path.read_bytes() == before
    assert read_report(path) == ledger.report()


def test_a_selection_makes_the_capacity_smaller(path: Path, open_ledger: Open) -> None:
    ledger = open_ledger(BUDGET, path)
    assert ledger.capacity == BUDGET.mu**2
    ledger.charge({"a/keys": Selection(20.0, 4e-7)})
    whole = gaussian_mu(2.0, 6e-7) ** 2
    assert ledger.capacity == pytest.approx(whole - 1 / 400, rel=1e-9)
    assert ledger.remaining == ledger.capacity
    assert ledger.epsilon == pytest.approx(gaussian_epsilon(6e-7, 1 / 20), rel=1e-9)
    with pytest.raises(BudgetExceeded):
        ledger.charge({"b": Gaussian(noise_multiplier(BUDGET.mu**2 - 1 / 400))})
    ledger.charge({"b": Gaussian(noise_multiplier(ledger.remaining))})
    assert ledger.epsilon == pytest.approx(2.0, rel=1e-7)
    assert ledger.epsilon <= 2.0
    assert "4e-07 of delta" in ledger.report().accountant
    assert read_report(path) == ledger.report()
    ledger.close()
    assert open_ledger(BUDGET, path).capacity == pytest.approx(whole - 1 / 400, rel=1e-9)  # whatever else was spent


@pytest.mark.parametrize("delta", [1e-9, 1e-6, 0.5])
def test_a_selection_that_comes_too_late_is_refused(delta: float) -> None:
    ledger = Ledger(BUDGET)
    ledger.charge({"a": price(1 - 1e-6)})  # leaves enough of mu^2, and not enough of delta
    with pytest.raises(BudgetExceeded):
        ledger.charge({"b/keys": Selection(1e4, delta)})
    assert ledger.capacity == BUDGET.mu**2


EVENTS = st.one_of(
    st.builds(lambda share: price(share), st.floats(0.01, 1.0)),
    st.builds(
        lambda share, t: Gaussian(price(share).noise_multiplier, Group("a", t, 3)),
        st.floats(0.01, 1.0),
        st.integers(0, 2),
    ),
    st.builds(
        lambda share, delta: Selection(price(share).noise_multiplier, delta),
        st.floats(0.01, 0.5),
        st.floats(1e-9, 2e-6),
    ),
)


@given(st.lists(EVENTS, min_size=1, max_size=12))
def test_whatever_is_asked_in_whatever_order_the_guarantee_stands(asked: list[Event]) -> None:
    ledger = Ledger(BUDGET)
    for i, event in enumerate(asked):
        before = ledger.report()
        try:
            ledger.charge({f"release-{i}": event})
        except BudgetExceeded:
            assert ledger.report() == before
    events = [event for _, event in ledger.report().events]
    aside = sum(event.delta for event in events if isinstance(event, Selection))
    for epsilon in (BUDGET.epsilon, ledger.epsilon):  # what a selection set aside covers either
        assert gaussian_delta(epsilon, total_mu(events)) + aside <= BUDGET.delta * (1 + 1e-9)
    assert ledger.epsilon <= BUDGET.epsilon


# The file


def test_a_ledger_begins_with_what_it_is(path: Path) -> None:
    Ledger(Budget(1.5, 1e-7, "add-or-remove-one-user"), seeded=True, path=path).close()
    (line,) = lines(path)
    chain = line.pop("chain")
    assert line == {
        "format": FORMAT, "relation": "add-or-remove-one-user", "epsilon": 1.5, "delta": 1e-7, "seeded": True
    }  # fmt: skip
    assert len(str(chain)) == 32


def test_a_reopened_ledger_goes_on_where_it_was(path: Path, open_ledger: Open) -> None:
    first = open_ledger(BUDGET, path)
    first.charge({"a": price(0.3), "b": price(0.3)})
    before = first.report()
    first.close()
    second = open_ledger(BUDGET, path)
    assert second.report() == before
    second.charge({"a": price(0.3), "c": price(0.4)})
    assert [line.get("charge") for line in lines(path)] == [None, "a", "b", "c"]
    with pytest.raises(BudgetExceeded):
        second.charge({"d": price(0.1)})


@pytest.mark.parametrize(
    "other",
    [
        (Budget(2.5, 1e-6), False),
        (Budget(2.0, 1e-5), False),
        (Budget(2.0, 1e-6, "add-or-remove-one-user"), False),
        (Budget(2.0, 1e-6), True),
    ],
)
def test_another_budget_in_the_same_folder_is_refused(
    path: Path, other: tuple[Budget, bool], open_ledger: Open
) -> None:
    ledger = open_ledger(BUDGET, path)
    ledger.charge({"a": price(0.3)})
    ledger.close()
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"another budget.*epsilon 2, delta 1e-06, replace-one-user, private"):
        Ledger(other[0], seeded=other[1], path=path)
    assert path.read_bytes() == before
    Ledger(BUDGET, path=path).close()  # the refusal left no lock behind


@pytest.mark.parametrize("cut", [2, 5, 30])
def test_a_torn_last_line_is_forgotten_because_its_noise_was_never_drawn(
    path: Path, cut: int, open_ledger: Open
) -> None:
    ledger = open_ledger(BUDGET, path)
    ledger.charge({"a": price(0.3)})
    whole = path.read_bytes()
    ledger.charge({"b": price(0.3)})
    ledger.close()
    path.write_bytes(path.read_bytes()[:-cut])
    assert [name for name, _ in read_report(path).events] == ["a"]
    again = open_ledger(BUDGET, path)
    assert path.read_bytes() == whole
    again.charge({"b": price(0.3)})
    assert [name for name, _ in again.report().events] == ["a", "b"]


def test_a_last_line_without_its_break_is_a_charge(path: Path, open_ledger: Open) -> None:
    """A process may have died between the two; then the line says all that it should."""
    ledger = open_ledger(BUDGET, path)
    ledger.charge({"a": price(0.3)})
    ledger.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert [name for name, _ in read_report(path).events] == ["a"]
    again = open_ledger(BUDGET, path)
    assert path.read_bytes() == whole
    again.charge({"b": price(0.3)})
    again.close()
    assert [name for name, _ in read_report(path).events] == ["a", "b"]
    for other in (b"\x0b", b"}", b" \n{}"):
        path.write_bytes(whole[:-1] + other)
        with pytest.raises(InputError, match="damaged in line 2"):
            read_report(path)


@pytest.mark.parametrize("start", [b"", b'{"format": "privrep-led'])
def test_a_file_without_a_whole_header_is_begun_again(path: Path, start: bytes) -> None:
    path.write_bytes(start)
    with pytest.raises(InputError, match="is empty; restore it from a copy"):
        read_report(path)
    Ledger(BUDGET, path=path).close()
    assert len(lines(path)) == 1


GOOD = b'{"charge": "b", "kind": "gaussian", "noise_multiplier": 5.0}'


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize(
    "line",
    [
        b'{"charge": "b", "kind": "gaus',
        b"\x00\x00\x00\x00",
        b"",
        b"5",
        b"[]",
        b'{"kind": "gaussian", "noise_multiplier": 5.0}',
        b'{"charge": "b", "kind": "gaussian"}',
        b'{"charge": "b", "kind": "gaussian", "noise_multiplier": -5.0}',
        b'{"charge": "b", "kind": "gaussian", "noise_multiplier": null}',
        b'{"charge": "b", "kind": "laplace", "scale": 5.0}',
        b'{"charge": "b", "kind": "gaussian", "noise_multiplier": 5.0, "group": ["a", 3, 3]}',
        b'{"charge": "b", "kind": "selection", "noise_multiplier": 5.0}',
        b'{"charge": "b", "kind": "selection", "noise_multiplier": 5.0, "delta": 0.0}',
        b'{"charge": "a", "kind": "gaussian", "noise_multiplier": 50000.0}',  # "a" again, cheaper
    ],
)
def test_a_damaged_line_is_refused_with_the_file_named_and_untouched(
    path: Path, line: bytes, chained: bool, open_ledger: Open
) -> None:
    """In a ledger of before, and in one whose chain somebody made anew."""
    ledger = open_ledger(BUDGET, path)
    ledger.charge({"a": price(0.3)})
    ledger.close()
    whole, after = path.read_bytes(), GOOD.replace(b'"b"', b'"c"') + b"\n"
    if chained:
        head = json.loads(whole.splitlines()[-1])["chain"]
        line, head = chain_bytes(head, line)
        after, _ = chain_bytes(head, after[:-1])
    else:
        whole = b"".join(chain_line(None, unchained(line))[0] for line in lines(path))
    damaged = whole + line + b"\n" + after + b"\n" * chained
    path.write_bytes(damaged)
    for read in (lambda: Ledger(BUDGET, path=path), lambda: read_report(path)):
        with pytest.raises(InputError) as caught:
            read()
        assert not isinstance(caught.value, json.JSONDecodeError)
        assert len(str(caught.value)) > 20
    assert path.read_bytes() == damaged
    path.write_bytes(whole if chained else whole + after)
    Ledger(BUDGET, path=path).close()  # the refusal left no lock behind


def chain_bytes(before: str, body: bytes) -> tuple[bytes, str]:
    """A line with the chain that somebody who knows how would give it, without its break."""
    head = ledger_file._hash(before, body)
    return body[:-1] + b', "chain": "' + head.encode() + b'"}', head


def unchained(line: dict[str, object]) -> dict[str, object]:
    found = {name: value for name, value in line.items() if name != "chain"}
    return {**found, "format": UNCHAINED} if "format" in found else found


def test_a_ledger_of_before_goes_on_without_chains(path: Path, open_ledger: Open) -> None:
    ledger = open_ledger(BUDGET, path)
    ledger.charge({"a": price(0.3)})
    ledger.close()
    path.write_bytes(b"".join(chain_line(None, unchained(line))[0] for line in lines(path)))
    again = open_ledger(BUDGET, path)
    assert not again.chained
    again.charge({"b": price(0.3)})
    again.close()
    assert all("chain" not in line for line in lines(path))
    assert [name for name, _ in read_report(path).events] == ["a", "b"]
    again.write(path.with_name("copy"))
    assert path.with_name("copy").read_bytes() == path.read_bytes()


def test_a_file_that_is_no_ledger_is_refused(path: Path) -> None:
    path.write_bytes(b'{"format": "privrep-ledger/99"}\n')
    with pytest.raises(InputError, match=FORMAT):
        Ledger(BUDGET, path=path)


SECOND = """
import sys
from pathlib import Path
from privrep.errors import InputError
from privrep.privacy.ledger import Budget, Ledger
for _ in sys.stdin:
    try:
        Ledger(Budget(2.0, 1e-6), path=Path(sys.argv[1])).close()
        print("opened", flush=True)
    except InputError as error:
        print(error, flush=True)
"""


def test_two_processes_cannot_spend_from_one_ledger(path: Path, open_ledger: Open) -> None:
    ledger = open_ledger(BUDGET, path)
    ledger.charge({"a": price(0.3)})
    before = path.read_bytes()
    with pytest.raises(InputError, match="in use"):
        open_ledger(BUDGET, path)  # nor can one process twice
    assert read_report(path).epsilon == ledger.epsilon  # reading needs no lock
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = [sys.executable, "-c", SECOND, str(path)]
    with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as second:
        assert second.stdin is not None
        assert second.stdout is not None
        second.stdin.write("try\n")
        second.stdin.flush()
        assert "in use by another process" in second.stdout.readline()
        assert path.read_bytes() == before
        ledger.close()
        second.stdin.write("try\n")
        second.stdin.close()
        assert second.stdout.readline() == "opened\n"


def test_copying_a_ledger_keeps_every_charge(path: Path, tmp_path: Path, open_ledger: Open) -> None:
    ledger = open_ledger(BUDGET, path)
    ledger.charge({"a": price(0.3), "b": price(0.2), "keys": Selection(40.0, 1e-8)})
    ledger.charge({"c": Gaussian(40.0, Group("rounds", 1, 4))})
    ledger.write(tmp_path / "copy.jsonl")
    assert read_report(tmp_path / "copy.jsonl") == ledger.report()
    assert (tmp_path / "copy.jsonl").read_bytes() == path.read_bytes()


# The report


def test_the_report_says_what_a_reviewer_asks(path: Path, open_ledger: Open) -> None:
    ledger = open_ledger(BUDGET, path)
    ledger.charge({"a": price(0.3), "b": price(0.2)})
    report = ledger.report()
    assert report.relation == "replace-one-user"
    assert report.delta == 1e-6
    assert report.epsilon_budget == 2.0
    assert report.epsilon == pytest.approx(gaussian_epsilon(1e-6, math.sqrt(0.5) * BUDGET.mu), rel=1e-9)
    assert report.accountant == CLOSED_FORM
    assert dict(report.events) == {"a": price(0.3), "b": price(0.2)}
    assert not report.seeded
    for word in ("user level", "replace-one-user", "1e-06", "budget of 2", "2 releases", f"{report.epsilon:.4g}"):
        assert word in str(report)
    assert "SEEDED" not in str(report)
    assert read_report(path) == report


def test_a_simulation_says_so() -> None:
    report = Ledger(BUDGET, seeded=True).report()
    assert report.seeded
    assert "simulation, not private" in str(report)


def test_the_report_of_a_folder_without_a_ledger(path: Path) -> None:
    with pytest.raises(InputError, match="no privrep ledger"):
        read_report(path)


@pytest.mark.parametrize("relation", ["", "replace-one-row", None])
def test_a_relation_is_one_of_two(relation: str) -> None:
    with pytest.raises(InputError, match="relation must be one of"):
        Budget(1.0, 1e-6, relation)  # type: ignore[arg-type]
