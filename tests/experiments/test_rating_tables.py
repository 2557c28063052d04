"""The experiment on ratings: what its references recover where the truth is known, its runs, its verdicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from experiments.jester import Ratings, alternating_least_squares
from experiments.rating_data import FILMS, JOKES, SOURCES, RatingTask, read_ratings, split_ratings
from experiments.rating_references import (
    BOTH_MEANS,
    FACTORS,
    LARGEST,
    PRESENCE,
    USER_MEAN,
    Means,
    find_pull,
    fit_factors,
    item_and_user_means,
    no_ratings,
    noisy_level,
    noisy_means,
    noisy_sums,
    user_means,
)
from experiments.rating_runs import ANALYST, FACTORIZATION, RatingScore, meet_newcomers, run_rating_task
from experiments.rating_targets import GOALS, OVER_SIMPLE, RatingResults, judge_ratings
from experiments.tables_data import SUPPORT, default_data

from privrep import PrivateFactorization
from privrep.errors import InputError

USERS, ITEMS = 400, 12


def made(users: int = USERS) -> tuple[Ratings, np.ndarray]:
    """Ratings from -10 to 10 with users' levels (deviation 2) and items' offsets (3), and the offsets."""
    rng = np.random.default_rng(181)
    present = rng.random((users, ITEMS)) < 0.7
    present[:, :4] = True
    user, item = np.nonzero(present)
    offsets = 3 * rng.standard_normal(ITEMS)
    offsets -= offsets.mean()
    value = 1.0 + 2 * rng.standard_normal(users)[user] + offsets[item] + rng.standard_normal(len(user))
    return Ratings(user, item, np.clip(value, -10, 10)), offsets


@pytest.fixture(scope="module")
def task() -> RatingTask:
    return split_ratings(made()[0], 0, -10.0, 10.0, declared=True)


@pytest.fixture(scope="module")
def scores(task: RatingTask) -> list[RatingScore]:
    return list(run_rating_task(FILMS, task, 0, (3.0,)))


def test_newcomers_take_no_part_in_the_second_fit(task: RatingTask) -> None:
    new = set(task.newcomers.user)
    assert len(new) == USERS // 10
    assert not new & set(task.others.user)
    assert set(task.support.user) == new
    assert np.bincount(task.support.user).max() == SUPPORT
    assert set(task.train.user) == set(range(USERS))
    seen = set(zip(task.support.user, task.support.item, strict=True))
    assert not seen & set(zip(task.newcomers.user, task.newcomers.item, strict=True))
    assert (task.items, task.n_users) == (ITEMS, USERS)


def test_means_are_shrunk_as_if_there_were_more_ratings() -> None:
    model = Means(1.0, np.array([0.5, -0.5]), 2.0)
    own = Ratings(np.array([0, 0]), np.array([0, 1]), np.array([4.5, 3.5]))
    asked = Ratings(np.array([0, 1]), np.array([1, 1]), np.zeros(2))
    np.testing.assert_allclose(model.predict(own, asked), [1 - 0.5 + (3 + 3) / 4, 1 - 0.5])
    np.testing.assert_allclose(model.predict(no_ratings(), asked), [0.5, 0.5])


def test_shrinkage_is_that_of_the_population() -> None:
    """Deviations 2 between and 1 within: a pull of 1/4, within a tenth for 20,000 groups."""
    rng = np.random.default_rng(1)
    groups = np.repeat(np.arange(20_000), rng.integers(1, 6, 20_000))
    values = 2 * rng.standard_normal(20_000)[groups] + rng.standard_normal(len(groups))
    assert find_pull(groups, values) == pytest.approx(0.25, rel=0.1)
    assert find_pull(groups, rng.standard_normal(len(groups))) > 10


def test_offsets_of_items_are_found() -> None:
    ratings, offsets = made(3_000)
    found = item_and_user_means(ratings, ITEMS).offsets
    np.testing.assert_allclose(found - found.mean(), offsets, atol=0.3)  # clipped ratings pull a little
    assert (user_means(ratings, ITEMS).offsets == 0).all()


def test_factors_predict_as_alternating_least_squares_does(task: RatingTask) -> None:
    """One more half step for users changes little after twelve rounds."""
    values, present = task.train.table(USERS, ITEMS)
    full = alternating_least_squares(values, present, 2, 10.0, np.random.default_rng(0))
    found = fit_factors(task.train, ITEMS, 2, 10.0).predict(task.train, task.test)
    np.testing.assert_allclose(found, full[task.test.user, task.test.item], atol=0.3)


def test_noise_is_what_the_analyst_loses_most_by(task: RatingTask) -> None:
    rng = np.random.default_rng(0)
    alone, both, quiet, loud = (
        task.errors(model.predict(task.train, task.test), task.test)[0]
        for model in (
            user_means(task.train, ITEMS),
            item_and_user_means(task.train, ITEMS),
            noisy_means(task.train, task, 1e3, rng),
            noisy_means(task.train, task, 0.05, rng),
        )
    )
    assert both < quiet < 1.25 * both
    assert 1.5 * quiet < loud < 1.1 * alone


def test_what_the_analyst_releases_is_as_sensitive_as_it_says(task: RatingTask) -> None:
    """Replace one user by one who rated everything, with the largest deviations, and many times."""
    quiet = np.random.default_rng(0)
    keep = task.train.user != 0
    old = task.train.take(keep)
    many = 40 * ITEMS
    added = Ratings(np.zeros(many, np.int64), np.tile(np.arange(ITEMS), 40), np.full(many, 10.0))
    changed = Ratings(*(np.concatenate(pair) for pair in zip(
        (added.user, added.item, added.value), (old.user, old.item, old.value), strict=True
    )))  # fmt: skip
    limit = np.sqrt((2 * PRESENCE**2 + 4) * LARGEST)
    sums = []
    for ratings, sign in ((task.train, -1.0), (changed, 1.0)):
        apart = np.where(ratings.user == 0, sign, 0.5)
        total, noise = noisy_sums(ratings, apart, ITEMS, 1e12, quiet)
        sums.append(total * np.array([[PRESENCE], [1.0]]))
        assert noise == pytest.approx(limit / 1e12)
    assert 0 < np.linalg.norm(sums[0] - sums[1]) <= limit


def test_many_ratings_of_one_user_are_as_sensitive_as_it_says() -> None:
    """Two users with 500 items each, all different, in one of two places: the distance is that of the proof."""
    items = 1_000
    one, two = (
        Ratings(np.zeros(500, np.int64), start + np.arange(500), np.zeros(500)) for start in (0, 500)
    )  # fmt: skip
    found = [
        noisy_sums(each, np.ones(500), items, 1e12, np.random.default_rng(0))[0] * np.array([[PRESENCE], [1.0]])
        for each in (one, two)
    ]
    assert np.linalg.norm(found[0] - found[1]) == pytest.approx(np.sqrt((2 * PRESENCE**2 + 2) * LARGEST))


def test_a_level_lies_within_the_range(task: RatingTask) -> None:
    means = np.bincount(task.train.user, task.train.value) / np.bincount(task.train.user)
    assert noisy_level(task.train, task, 1e9, np.random.default_rng(0)) == pytest.approx(means.mean())
    assert -10 <= noisy_level(task.train, task, 1e-6, np.random.default_rng(0)) <= 10


def test_everybody_is_run_on_the_same_split(scores: list[RatingScore], task: RatingTask) -> None:
    assert [(s.method, s.epsilon) for s in scores] == [
        (USER_MEAN, None), (BOTH_MEANS, None), (FACTORS, None), (ANALYST, 3.0), (FACTORIZATION, 3.0),
    ]  # fmt: skip
    both = item_and_user_means(task.train, ITEMS)
    assert (scores[1].test, scores[1].nmae_test) == task.errors(both.predict(task.train, task.test), task.test)
    assert scores[1].test < scores[0].test
    without = item_and_user_means(task.others, ITEMS)
    said = without.predict(no_ratings(), task.newcomers)
    assert scores[1].strangers == task.errors(said, task.newcomers)[0]
    ours = scores[-1]
    assert ours.epsilon_spent is not None
    assert 0 < ours.epsilon_spent <= 3.0


def test_newcomers_get_tastes_of_their_own(task: RatingTask) -> None:
    model = PrivateFactorization(epsilon=30.0, items=list(range(ITEMS)), random_state=0)
    model.fit(task.others.user, task.others.item, task.others.value)
    said, user = meet_newcomers(task, model), task.newcomers.user[-1]
    own, asked = task.support.take(task.support.user == user), task.newcomers.user == user
    taste = model.personalize(own.item, own.value)
    np.testing.assert_array_equal(said[asked], taste.predict(task.newcomers.item[asked]))


def made_up(method: str, epsilon: float | None, test: float, nmae: float, **more: float) -> RatingScore:
    return RatingScore(JOKES, 10, 0, method, epsilon, test, nmae, 5.0, 0.2, **more)


def test_numbers_are_compared_with_what_they_should() -> None:
    lines = [
        made_up(USER_MEAN, None, 4.0, 0.2),
        made_up(ANALYST, 1.0, 5.0, 0.2),
        made_up(FACTORIZATION, 1.0, 3.0, 0.154, prior=2.5),
    ]
    verdicts = {v.figure: v for v in judge_ratings(RatingResults(lines))}
    assert (verdicts["test rows: NMAE"].mean, verdicts["test rows: NMAE"].met) == (0.154, "yes")
    simple = verdicts[f"test rows: {OVER_SIMPLE}"]
    assert (simple.mean, simple.met) == (pytest.approx(1.2), "NO")
    assert verdicts["test rows: RMSE over the analyst's"].mean == pytest.approx(0.6)
    assert "test rows: RMSE" not in verdicts  # asked of films alone
    without = [replace(line, prior=None) for line in lines]
    (simple,) = (v for v in judge_ratings(RatingResults(without)) if v.figure == f"test rows: {OVER_SIMPLE}")
    assert simple.mean == pytest.approx(0.75)


def test_targets_are_those_that_were_set() -> None:
    asked = {(goal.name, panel): most for goal in GOALS for panel, most in goal.asked.items() if any(most)}
    assert asked == {
        ("test rows: RMSE", FILMS): (None, 1.025, 0.99),
        ("test rows: NMAE", JOKES): (0.1600, 0.1545, 0.153),
        **{(f"test rows: {OVER_SIMPLE}", panel): (1.005,) * 3 for panel in SOURCES},
    }


def test_films() -> None:
    if not (default_data().parent / SOURCES[FILMS].file).exists():
        pytest.skip(f"there is no {SOURCES[FILMS].file} in {default_data().parent}")
    task = read_ratings(FILMS, 0)
    assert (task.n_users, task.items, len(task.train.user) + len(task.test.user)) == (943, 1_682, 100_000)
    rmse = task.errors(item_and_user_means(task.train, task.items).predict(task.train, task.test), task.test)[0]
    assert 0.92 < rmse < 0.96


def test_a_file_that_is_not_there_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no ml-100k/ratings\.parquet in"):
        read_ratings(FILMS, 0, tmp_path)
