"""Where columns lie, read off noisy histograms."""

import math

import numpy as np
import pytest
from scipy.sparse import csr_array

from privrep.data.table import UserTable
from privrep.linear import location
from privrep.linear.location import find_location, read_octaves, read_sizes
from privrep.linear.numbers import NumbersSettings
from privrep.linear.panel_steps import SIGNED_CELLS, find_signed_octaves
from privrep.linear.steps import CELLS, find_octaves
from privrep.privacy.ledger import Budget
from privrep.privacy.run import Run
from privrep.users.memory import InMemoryUsers

USERS = 4000
LIMITS = (0.005, 0.06)


def level_counts(means: np.ndarray, sigma: float, seed: int = 0) -> np.ndarray:
    """A noisy histogram of users' means by signed octave, as one column."""
    counts = np.bincount(find_signed_octaves(means), minlength=SIGNED_CELLS).astype(float)
    return (counts + sigma * np.random.default_rng(seed).normal(size=SIGNED_CELLS))[None]


@pytest.mark.parametrize(
    ("draw", "mean", "spread"),
    [
        (lambda rng: rng.normal(0.0, 3.0, USERS), 0.0, 3.0),
        (lambda rng: rng.normal(100.0, 50.0, USERS), 100.0, 50.0),
        (lambda rng: -rng.exponential(16.0, USERS), -16.0, 16.0),
        (lambda rng: np.where(rng.random(USERS) < 0.25, 1.0, 0.0), 0.25, 0.43),
        (lambda rng: np.where(rng.random(USERS) < 0.4, rng.binomial(4, 0.8, USERS) / 4, 0.0), 0.32, 0.41),
    ],
    ids=["around zero", "far from it", "over many octaves", "zeros and ones", "shares"],
)
def test_means_are_located(draw, mean, spread) -> None:
    """At a noise in which cells of a wide histogram hardly stand out their size is heard, and at half of it where."""
    size = math.hypot(mean, spread)
    for seed in range(5):
        means = draw(np.random.default_rng(seed))
        centre, found, _ = read_octaves(level_counts(means, USERS / 25, seed), USERS / 25, USERS)
        assert size / 2 < math.hypot(centre[0], found[0]) < 2 * size
        centre, found, _ = read_octaves(level_counts(means, USERS / 50, seed), USERS / 50, USERS)
        assert abs(centre[0] - mean) < 0.5 * spread
        assert spread / 2 < found[0] < 2 * spread


def test_narrow_means_far_from_zero_are_looked_at_again() -> None:
    means = np.random.default_rng(0).normal(1998.0, 3.0, USERS)
    _, spread, narrow = read_octaves(level_counts(means, USERS / 50), USERS / 50, USERS)
    assert narrow[0]
    assert spread[0] > 30


def test_noise_alone_locates_nothing() -> None:
    """A column of noise has some 1,300 shapes to look like, each at five standard deviations: 4e-4 in all, and no
    more than five of 1,000 but for one case in 1e5. Half as much is heard at three."""
    noise = np.random.default_rng(1).normal(size=(1000, SIGNED_CELLS))
    _, spread, _ = read_octaves(noise, 1.0, 10.0)
    assert (spread > 0).sum() <= 5


def test_sizes_of_users_who_differ_are_heard() -> None:
    """Sizes over six octaves, no cell of which has a fifth of the users; and sizes that are all alike."""
    rng = np.random.default_rng(2)
    for sizes, least, most in ((2.0 ** rng.uniform(0, 5, USERS), 4, 32), (rng.normal(3.0, 0.3, USERS), 2, 4)):
        counts = np.bincount(find_octaves(sizes), minlength=CELLS) + USERS / 18 * rng.normal(size=(3, CELLS))
        size, heard = read_sizes(counts, USERS / 18)
        assert heard.all()
        assert ((size >= least) & (size <= most)).all()
    _, heard = read_sizes(rng.normal(size=(1000, CELLS)), 1.0)
    assert heard.sum() <= 5


@pytest.mark.parametrize("relation", ["replace-one-user", "add-or-remove-one-user"])
def test_places_cost_no_more_than_they_may(relation) -> None:
    """Whatever the users and the columns: later passes need the rest."""
    rng = np.random.default_rng(3)
    for users, d, form in ((3, 1, np.asarray), (40, 2, csr_array), (300, 1, np.asarray), (300, 6, csr_array)):
        X = 1000 + rng.normal(size=(4 * users, d))  # means that are looked at again, and again
        table = UserTable.from_rows(form(X), 50 + rng.normal(size=4 * users), np.repeat(np.arange(users), 4))
        with Run.open(InMemoryUsers(table), Budget(1.0, 1e-6, relation), seed=0) as run:
            total = run.ledger.capacity
            found, spent = find_location(run, total, True, LIMITS)
            charged = total - run.ledger.remaining
        most = location.MOST if form is csr_array else location.MOST_ALONE
        assert spent <= (most + location.ROWS_SHARE + 1e-9) * total
        assert charged == pytest.approx(spent, rel=1e-9)
        assert np.isfinite(found.centre).all()
        assert (found.between >= 0).all()


def test_all_shares_fit_into_the_budget() -> None:
    """The dearest path there is: every page of it asked for, all windows looked at as often as they may be."""
    s = NumbersSettings()
    after = s.common + s.look + s.start + s.first_families + s.families + s.calibration
    assert location.MOST + location.ROWS_SHARE + s.panel.moments + after < 1
    assert location.MOST_ALONE + location.ROWS_SHARE + after < 1  # no moments of features that nobody can hear


def test_a_count_of_users_that_noise_makes_negative_is_none() -> None:
    """Under add-or-remove the number of users is released. Places stay finite, and near the users' own."""
    rng = np.random.default_rng(4)
    table = UserTable.from_rows(rng.normal(size=(120, 40)), rng.normal(size=120), np.repeat(np.arange(20), 6))
    counted = []
    for seed in range(60):
        with Run.open(InMemoryUsers(table), Budget(0.5, 1e-6, "add-or-remove-one-user"), seed=seed) as run:
            found, _ = find_location(run, run.ledger.capacity, True, LIMITS)
        counted.append(found.users)
        assert np.abs(found.centre).max() < 1e15
        assert found.between.max() < 1e15
    assert min(counted) == 1.0  # some were negative before
