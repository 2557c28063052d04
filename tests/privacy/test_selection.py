"""Keys are named only where enough users hold them, and nothing else about the keys that occur gets out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, norm

from privrep.data.table import UserTable
from privrep.errors import BudgetExceeded, InputError
from privrep.privacy import release as module
from privrep.privacy.accounting import gaussian_delta
from privrep.privacy.billboard import Billboard
from privrep.privacy.bounds import MAX_SIZE, NORM_SLACK
from privrep.privacy.events import Relation, Selection
from privrep.privacy.groups import hash_ids
from privrep.privacy.ledger import Budget, Ledger, noise_multiplier
from privrep.privacy.noise import NoiseSource, secure_noise, simulated_noise
from privrep.privacy.run import Run
from privrep.privacy.selection import COUNTED, MOST_KEYS, compute_log_chance, compute_threshold, make_counts_bound
from privrep.users import holders as engine
from privrep.users.holders import KeyHolders
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance

BUDGET = Budget(2.0, 1e-6)
SHARE, DELTA = 0.1 * BUDGET.mu**2, 1e-7
ALARM = 1e-6
Open = Callable[..., Ledger]  # the fixture open_ledger


def holders_of(held: dict[Any, list[Any]]) -> KeyHolders:
    """From a dictionary of users to their keys."""
    users = [user for user, keys in held.items() for _ in keys]
    return KeyHolders.from_columns(users, [key for keys in held.values() for key in keys])


def counts_of(holders: KeyHolders) -> dict[Any, float]:
    total = holders.count_keys(make_counts_bound(holders)).exact_numbers
    return dict(zip(holders.private_keys, total, strict=False))


@pytest.fixture
def run_with(population: Callable[..., UserTable]) -> Callable[..., Run]:
    def make(noise: NoiseSource, ledger: Ledger | None = None, board: Billboard | None = None) -> Run:
        users = InMemoryUsers(population(n=3), Performance(1))
        return Run(users, ledger or Ledger(BUDGET), Billboard() if board is None else board, noise)

    return make


# The threshold


@pytest.mark.parametrize("sigma", [0.05, 0.3, 1.0, 7.0, 100.0])
@pytest.mark.parametrize("logarithm", [-1e4, -1014.0, -640.0, *np.log([1e-12, 1e-7, 0.05, 0.4])])
def test_the_threshold_is_the_smallest_that_every_number_of_keys_respects(sigma: float, logarithm: float) -> None:
    t = np.arange(1, MOST_KEYS + 1)

    def worst(tau: float) -> float:
        return float((np.log(t) + norm.logsf((tau - 1 / np.sqrt(t)) / sigma)).max())

    tau = compute_threshold(sigma, logarithm)
    assert (tau > 1 / np.sqrt(t)).all()
    assert worst(tau) <= logarithm
    assert worst(tau - 1e-6 * max(sigma, 1.0)) > logarithm


@pytest.mark.parametrize("sigma", [0.4, 1.0, 2.5, 17.0])
def test_the_tail_of_discrete_noise_is_below_that_of_continuous_noise_one_step_earlier(sigma: float) -> None:
    x = np.arange(-60 * 17, 60 * 17 + 1)
    weights = np.exp(-((x / sigma) ** 2) / 2)
    tails = np.cumsum((weights / weights.sum())[::-1])[::-1]
    beyond = (x >= 1) & (tails > 1e-290)
    assert (tails[beyond] <= norm.sf((x[beyond] - 1) / sigma) * (1 + 1e-9)).all()


@given(st.floats(1e-4, 50.0), st.floats(1e-30, 0.01))
def test_what_is_set_aside_pays_for_both_sides(epsilon: float, delta: float) -> None:
    assert (1 + math.exp(epsilon)) * math.exp(compute_log_chance(delta, epsilon)) == pytest.approx(delta, rel=1e-12)


@pytest.mark.parametrize(
    ("delta", "epsilon"), [(0.0, 1.0), (1.0, 1.0), (-1e-9, 1.0), (1e-6, math.inf), (math.nan, 1.0)]
)
def test_a_chance_that_means_nothing_is_refused(delta: float, epsilon: float) -> None:
    with pytest.raises(InputError, match="a selection needs"):
        compute_log_chance(delta, epsilon)


# What neighbours see

HELD = st.dictionaries(st.integers(0, 12), st.lists(st.integers(0, 9), max_size=8), max_size=10)
MINE = st.lists(st.integers(0, 14), max_size=8)


@given(HELD, MINE, MINE, st.sampled_from(["replace-one-user", "add-or-remove-one-user"]))
def test_counts_on_the_keys_of_others_move_by_at_most_the_sensitivity(
    others: dict[int, list[int]], mine: list[int], instead: list[int], relation: Relation
) -> None:
    """And every other key is that user's alone, with a count of one over the root of how many keys it has."""
    instead = instead if relation == "replace-one-user" else []
    here, there = (counts_of(holders_of({**others, "me": rows})) for rows in (mine, instead))
    common = {key for keys in others.values() for key in keys}
    moved = math.sqrt(math.fsum((here.get(key, 0.0) - there.get(key, 0.0)) ** 2 for key in common))
    assert moved <= COUNTED.sensitivity(relation)
    for counts, rows in ((here, mine), (there, instead)):
        alone = set(counts) - common
        assert alone <= set(rows)
        assert all(counts[key] <= 1 / math.sqrt(len(set(rows))) + COUNTED.step / 2 for key in alone)


def test_the_sensitivity_is_attained() -> None:
    others = {"x": [0, 1], "y": [0, 1]}
    here, there = (counts_of(holders_of({**others, "me": rows})) for rows in ([0], [1]))
    moved = math.hypot(*(here[key] - there[key] for key in (0, 1)))
    assert math.sqrt(2) - 2 * COUNTED.step <= moved <= COUNTED.sensitivity("replace-one-user") <= 1.01 * math.sqrt(2)


def test_a_user_with_too_many_keys_brings_no_more_than_the_cap_and_the_same_in_any_company(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A key that its only holder leaves out must not occur: its noise alone could make it named."""
    monkeypatch.setattr(engine, "MOST_KEYS", 5)
    rng = np.random.default_rng(0)
    for kind in (int, str):
        mine = [kind(key) for key in rng.permutation(100)[:30]]
        alone = holders_of({"me": mine})
        by_hash = sorted(mine, key=lambda key: hash_ids([key], "keys of a user")[0])
        assert list(alone.private_keys) == sorted(by_hash[:5])
        (count,) = set(counts_of(alone).values())
        assert count == np.rint(1 / math.sqrt(5) / COUNTED.step) * COUNTED.step
        others = {user: [kind(key) for key in rng.integers(200, 300, 4)] for user in range(20)}
        crowd = holders_of({**others, "me": mine[::-1] + mine, "small": [kind(0)]})
        assert set(mine) & set(crowd.private_keys) - {kind(0)} == set(alone.private_keys) - {kind(0)}
        assert all(any(key in keys for keys in (*others.values(), mine, [kind(0)])) for key in crowd.private_keys)


def selected_users(noise: NoiseSource, users: int, keys: int, share: float, lower: float = 0.0) -> int:
    """How many of users who share nothing have a key named, if the chance is to be 0.05 for each."""
    holders = KeyHolders.from_columns(np.repeat(np.arange(users), keys), np.arange(users * keys))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "compute_log_chance", lambda delta, epsilon: math.log(0.05))
        patch.setattr(
            module, "compute_threshold", lambda sigma, chance: compute_threshold(sigma, chance) - lower * sigma
        )
        ledger = Ledger(Budget(1e4, 1e-3), seeded=noise is not secure_noise)
        found = module.select(holders, share, DELTA, ledger, noise, "page")
    return len({int(key) // keys for key in found.keys if isinstance(key, int)})


@pytest.mark.parametrize(
    ("noise", "n"), [(secure_noise, 5000), (simulated_noise(3), 50_000)], ids=["secure", "simulated"]
)
def test_a_key_of_one_user_is_named_as_rarely_as_promised(noise: NoiseSource, n: int) -> None:
    """Users with one key each, false-alarm rate 1e-6; a threshold that is two sigma lower is rejected.

    With little noise, here 0.047, one key is the worst case, and is named about as often as it may be.
    """
    found = selected_users(noise, n, 1, 30.0**2)
    assert binom.ppf(ALARM, n, 0.05) <= found <= binom.isf(ALARM, n, 0.05)
    assert selected_users(noise, n, 1, 30.0**2, lower=2.0) > binom.isf(ALARM, n, 0.05)


@pytest.mark.parametrize(("share", "rejects"), [(30.0**2, False), (1.0, True), (0.01, True)])
@pytest.mark.parametrize(("users", "keys"), [(10_000, 32), (100, MOST_KEYS)])
def test_users_with_many_keys_of_their_own_have_one_named_as_rarely(
    users: int, keys: int, share: float, rejects: bool
) -> None:
    """The same for users with many keys; with little noise their keys are far below the threshold of single ones."""
    allowed = binom.isf(ALARM, users, 0.05)
    assert selected_users(simulated_noise(4), users, keys, share) <= allowed
    assert (selected_users(simulated_noise(4), users, keys, share, lower=2.0) > allowed) == rejects


def test_nothing_below_the_threshold_is_on_record(
    run_with: Callable[..., Run], tmp_path: Path, open_ledger: Open
) -> None:
    rare = {f"user-{i}": ["common-key", f"rare-key-{i}", f"scarce-key-{i // 3}"] for i in range(600)}
    ledger, board = open_ledger(BUDGET, tmp_path / "ledger.jsonl"), Billboard(tmp_path / "board")
    run = run_with(secure_noise, ledger, board)
    assert run.select("items", holders_of(rare), SHARE, DELTA) == ("common-key",)
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"common-key" in written
    assert b"rare-key" not in written
    assert b"scarce-key" not in written
    assert board["items"].arrays["counts"].shape == (1,)
    selected = Billboard(tmp_path / "board").read_selection("items")
    assert selected.counts.value[0] > selected.threshold
    assert abs(selected.counts.value[0] - 600 / math.sqrt(3)) < 6 * selected.counts.sigma
    assert not any("key" in text for text in (repr(holders_of(rare)), str(holders_of(rare))))


def test_nothing_on_record_but_the_keys_depends_on_the_keys_that_occur(
    run_with: Callable[..., Run], spy: Any, tmp_path: Path
) -> None:
    """Not even the scale of the noise, by way of how many coordinates are rounded; nor is a table without keys told
    from one whose keys are all rare."""
    records = set()
    for n, rare in enumerate(({}, {1: [5]}, {user: list(range(user, user + 40)) for user in range(0, 40_000, 40)})):
        ledger, folder = Ledger(BUDGET), tmp_path / f"board-{n}"
        assert run_with(spy, ledger, Billboard(folder)).select("items", holders_of(rare), SHARE, DELTA) == ()
        (file,) = folder.iterdir()
        page = Billboard(folder)["items"]  # not the bytes of the file: safetensors writes its metadata in any order
        shapes = [(key, array.shape) for key, array in page.arrays.items()]
        records.add((file.name, file.stat().st_size, json.dumps(page.facts), str(shapes), str(ledger.report())))
    assert len(records) == 1
    assert len({sigma for _, sigma, _ in spy.calls}) == 1


# What is released


def test_the_noise_is_charged_and_scaled_as_stated(run_with: Callable[..., Run], spy: Any) -> None:
    ledger = Ledger(BUDGET)
    run = run_with(spy, ledger)
    held = {user: [7, -3] if user % 2 else [7] for user in range(300)}
    assert run.select("items", holders_of(held), SHARE, DELTA) == (-3, 7)
    selected = run.billboard.read_selection("items")
    assert selected.counts.value == pytest.approx([150 / math.sqrt(2), 150 + 150 / math.sqrt(2)], rel=1e-9)
    assert selected.counts.sigma == pytest.approx(COUNTED.sensitivity("replace-one-user") / math.sqrt(SHARE), rel=1e-14)
    rounding = COUNTED.reach - (1 + NORM_SLACK)  # of as many coordinates as there may be
    assert rounding == pytest.approx(math.sqrt(MAX_SIZE) * COUNTED.step / 2, rel=2.0**-9)
    assert selected.counts.sigma > math.sqrt(2) * (1 + NORM_SLACK + rounding / 2) / math.sqrt(SHARE)
    assert selected.threshold == compute_threshold(selected.counts.sigma, compute_log_chance(DELTA, 2.0))
    ((name, _, size),) = spy.calls
    assert (name, size) == ("items/keys", 2)
    event = Selection(noise_multiplier(SHARE), DELTA)
    assert ledger.report().events == (("items/keys", event),)
    whole = gaussian_delta(2.0, math.sqrt(ledger.capacity + SHARE)) + (1 + math.exp(2.0)) * math.exp(
        compute_log_chance(DELTA, 2.0)
    )
    assert whole == pytest.approx(BUDGET.delta, rel=1e-6)
    assert whole <= BUDGET.delta


def test_the_order_of_keys_is_that_of_their_names(run_with: Callable[..., Run], spy: Any) -> None:
    users = np.repeat(np.arange(200), 3)
    keys = np.tile(np.array(["b", "é", "a"]), 200)
    for order in (np.arange(600), np.arange(600)[::-1], np.random.default_rng(0).permutation(600)):
        holders = KeyHolders.from_columns(users[order], keys[order])
        assert run_with(spy).select("items", holders, SHARE, DELTA) == ("a", "b", "é")


def test_a_later_release_has_what_is_left(run_with: Callable[..., Run], spy: Any) -> None:
    ledger = Ledger(BUDGET)
    run = run_with(spy, ledger)
    run.select("items", holders_of({1: [1]}), SHARE, DELTA)
    assert ledger.capacity < BUDGET.mu**2
    with pytest.raises(BudgetExceeded):
        run.select("more", holders_of({1: [1]}), SHARE, BUDGET.delta - DELTA)
    with pytest.raises(BudgetExceeded):
        run.select("more", holders_of({1: [1]}), ledger.remaining, 1e-9)
    assert len(spy.calls) == 1
    assert "more" not in run.billboard


@pytest.mark.parametrize(("share", "delta"), [(0.0, DELTA), (math.nan, DELTA), (SHARE, 0.0), (SHARE, 1.5)])
def test_a_price_that_means_nothing_is_refused(
    run_with: Callable[..., Run], spy: Any, share: float, delta: float
) -> None:
    run = run_with(spy)
    with pytest.raises(InputError):
        run.select("items", holders_of({1: [1]}), share, delta)
    assert spy.calls == []
    assert run.ledger.report().events == ()


# Columns


@given(st.lists(st.tuples(st.integers(0, 6), st.one_of(st.none(), st.integers(-4, 8))), max_size=60))
def test_counts_are_those_of_the_definition(rows: list[tuple[int, int | None]]) -> None:
    holders = KeyHolders.from_columns([user for user, _ in rows], [key for _, key in rows])
    held: dict[int, set[int]] = {}
    for user, key in rows:
        if key is not None:
            held.setdefault(user, set()).add(key)
    wanted = {
        key: sum(1 / math.sqrt(len(keys)) for keys in held.values() if key in keys)
        for key in set().union(*held.values())
    }
    assert counts_of(holders) == pytest.approx(wanted)
    assert list(holders.private_keys) == sorted(wanted)


@pytest.mark.parametrize("users", [[1, 1, 2, 3], ["x", "x", "y", "z"], [(1,), (1,), "y", 3.5]])
@pytest.mark.parametrize(
    "keys",
    [
        [5, 6, 5, None],
        np.array([5.0, 6.0, 5.0, np.nan]),
        np.array([5, 6, 5, None], dtype=object),
        pd.Series([5, 6, 5, None], dtype="Int64"),
        pd.Series([5, 6, 5, None]),
        pa.array([5, 6, 5, None], type=pa.uint8()),
        pa.chunked_array([[5], [6, 5, None]]),
    ],
    ids=lambda keys: type(keys).__name__,
)
def test_columns_of_any_kind_say_the_same(users: list[Any], keys: Any) -> None:
    assert counts_of(KeyHolders.from_columns(users, keys)) == pytest.approx({5: 1 + 2**-0.5, 6: 2**-0.5})
    texts = pd.Series([None if pd.isna(key) else f"é{key:g}" for key in pd.Series(list(map(_plain, keys)))])
    for column in (texts, texts.astype("category"), pa.array(texts, type=pa.large_string()), list(texts)):
        counts = counts_of(KeyHolders.from_columns(users, column))
        assert counts == pytest.approx({"é5": 1 + 2**-0.5, "é6": 2**-0.5})


def _plain(key: Any) -> Any:
    return key.as_py() if isinstance(key, pa.Scalar) else key


def test_keys_are_plain_values_that_json_holds() -> None:
    for keys in (np.array([2**63 + 1, 1], dtype=np.uint64), np.array(["a", "b"]), np.array([-5, 5], dtype=np.int8)):
        holders = KeyHolders.from_columns([1, 2], keys)
        assert json.loads(json.dumps(holders.private_keys)) == sorted(keys.tolist())


@pytest.mark.parametrize(
    "keys", [[1, "a"], [True, False], [1.5, 2.0], [b"x", b"y"], [(1,), (2,)], [2**70, 1], [math.inf, 1.0]]
)
def test_keys_that_are_neither_all_integers_nor_all_texts_are_refused(keys: list[Any]) -> None:
    with pytest.raises(InputError, match="all integers or all texts"):
        KeyHolders.from_columns([1, 2], keys)


@pytest.mark.parametrize("users", [[1, None], pd.Series([1.0, math.nan]), ["a", None], [(1,), None]])
def test_a_row_without_a_user_is_refused(users: Any) -> None:
    with pytest.raises(InputError, match="user"):
        KeyHolders.from_columns(users, [1, 2])


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(InputError, match="every key needs a user"):
        KeyHolders.from_columns([1, 2], [1])
