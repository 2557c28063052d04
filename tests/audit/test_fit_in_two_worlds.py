"""The record of a fit in two worlds: exact log-ratios, distances within the sensitivity, and a fault that is found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from privrep.audit import two_worlds
from privrep.audit.fits import Fit, Neighbours
from privrep.audit.sabotage import WeakNoise
from privrep.audit.search import MOST_ROWS, Search, measure_share
from privrep.audit.two_worlds import audit_fit
from privrep.errors import InputError
from privrep.privacy.noise import secure_noise, simulated_noise

FIT = Fit()
ROWS = (
    [-0.00686, -0.00388, -0.00295, 0.00411],
    [0.000439, 0.00041, 0.00131, 0.001],
    [0.00929, 0.00666, 0.0086, 0.0343],
    [0.00304, 0.00225, 0.00375, -0.0125],
    [-0.00686, -0.00388, -0.00295, 0.00411],
    [-0.000219, -0.00448, 0.000255, 0.00653],
    *[[0.00304, 0.00225, 0.00375, -0.0125]] * 4,
    [0.00304, 0.00225, 0.00375, 0.0125],
    [-0.000219, -0.00448, 0.000255, -0.00653],
)
OTHERS = (
    [-40100.0, -17800.0, -44600.0, 165.0],
    [-93900.0, -104000.0, -96500.0, 562.0],
    *[[-38400.0, -30900.0, -38700.0, 200.0]] * 4,
)
CANARY = tuple((np.array(rows)[:, :3], np.array(rows)[:, 3]) for rows in (ROWS, OTHERS))
HERE = (np.ones((3, 3)), np.ones(3))
NOT_HERE = (np.empty((0, 3)), np.empty(0))


@dataclass
class Silence:
    """A noise source that adds nothing, for a ledger that is no simulation."""

    seeded: ClassVar[bool] = False

    def __call__(self, name: str, sigma: float, size: int) -> Any:
        return np.zeros(size, dtype=np.int64)

    def draw_choice(self, name: str, losses: Any, scale: int) -> int:
        raise AssertionError("a fit of numbers chooses nothing")

    def draw_key(self, name: str) -> bytes:
        raise AssertionError("a fit of numbers samples nobody")


@pytest.mark.parametrize("second", [False, True])
def test_without_noise_the_log_ratio_is_half_of_the_squared_distance(second: bool) -> None:
    """What is released is then the total itself, in the one world or in the other."""
    found = Neighbours(FIT, CANARY).learn(second, Silence())
    apart = sum(page.mu_squared for page in found.pages.values())
    assert found.log_ratio == pytest.approx((-1 if second else 1) * apart / 2, rel=1e-6)
    assert apart > 1


def test_log_ratios_have_the_mean_and_deviation_of_their_distance() -> None:
    """False alarms: fewer than 1 in 10^6. Log-ratios of the other sign would be refused."""
    neighbours, runs = Neighbours(FIT, CANARY), 40
    off = []
    for run in range(runs):
        found = neighbours.learn(bool(run % 2), secure_noise)
        apart = sum(page.mu_squared for page in found.pages.values())
        off.append(((-1) ** run * found.log_ratio - apart / 2) / np.sqrt(apart))
    assert abs(np.mean(off)) < 5 / np.sqrt(runs)
    assert 0.5 < np.std(off) < 1.8
    assert np.sqrt(apart) > 1.2 > 5 / np.sqrt(runs)


@pytest.mark.parametrize("relation", ["replace-one-user", "add-or-remove-one-user"])
def test_no_page_moves_farther_than_its_sensitivity(relation: Any) -> None:
    search = Search(Fit(relation=relation, users=20), np.random.default_rng(7))
    for _ in range(8):
        pages = Neighbours(search.fit, search._draw(True)).learn(False, simulated_noise(0)).pages
        assert max(page.moved for page in pages.values()) <= 1
        assert min(page.spent for page in pages.values()) > 0


def test_a_search_goes_uphill_and_ends() -> None:
    search = Search(Fit(users=20), np.random.default_rng(8))
    first = search.go_on(1e9, 1)
    shares = [search.share]
    for most in (3, 6):
        best = search.go_on(1e9, most)
        shares.append(search.share)
        assert search.tries == most
    assert shares == sorted(shares)
    assert measure_share(best, (0, 1, 2)) == search.share >= measure_share(first, (0, 1, 2))
    assert search.go_on(0.0) is best


def test_changes_of_rows_keep_their_shape() -> None:
    search, rows = Search(FIT, np.random.default_rng(9)), HERE
    for _ in range(200):
        rows = search._change(rows)
        assert rows[0].shape == (len(rows[1]), 3)
        assert 1 <= len(rows[1]) < MOST_ROWS


def test_where_users_come_and_go_the_second_world_has_one_user_less() -> None:
    neighbours = Neighbours(Fit(relation="add-or-remove-one-user", users=9), (HERE, NOT_HERE))
    assert [table.n_users for table in neighbours.tables] == [10, 9]
    assert Neighbours(Fit(users=9), CANARY).tables[1].n_users == 10


def test_a_sound_fit_is_not_blamed_and_its_control_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """False alarms: fewer than 1 in 10^6."""
    monkeypatch.setattr(two_worlds, "CONTROLS", (4.0,))
    found = audit_fit(FIT, 1e9, 1e-6, 20, Neighbours(FIT, CANARY))
    assert found.passed, found
    assert (found.runs, found.control_runs, found.control, found.tries) == (40, 40, 4.0, 0)
    assert sum(part for _, part in found.pages.values()) == pytest.approx(1.0)
    assert 0.85 < found.share < 1
    json = found.to_json()
    assert json["pages"]["scales/sizes"].keys() == {"moved", "part"}
    assert (json["sound"], json["caught"], json["passed"]) == (True, True, True)


def test_a_fit_with_too_little_noise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_worlds, "secure_noise", WeakNoise(4.0))
    found = audit_fit(FIT, 1e9, 1e-6, 20, Neighbours(FIT, CANARY))
    assert found.lower > found.claimed
    assert not found.sound
    assert not found.passed


def test_an_audit_takes_time() -> None:
    with pytest.raises(InputError, match="takes some time"):
        audit_fit(FIT, 0.0, 0.01)
