"""Ratings: planted factors are found, odd users and items do no harm, and what is public does not depend on order."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from sklearn.base import clone

from privrep import InputError, MissingValues, NothingLearned, PrivateFactorization, ResumeError, UnknownUsers
from privrep.linear.methods import factorization

ITEMS, RANK, USERS, EACH = 30, 2, 3000, 12


def planted(users=USERS, items=ITEMS, rank=RANK, each=EACH, seed=0, noise=0.4):
    """(user, item, rating): r = 3 + a_u + spread_u (b_j + <F_j, v_u> + noise), items rated more and less often."""
    rng = np.random.default_rng(seed)
    b, F = 0.4 * rng.normal(size=items), rng.normal(size=(items, rank)) / np.sqrt(max(rank, 1))
    popularity = np.linspace(2.0, 0.5, items)
    chosen = np.argsort(rng.gumbel(size=(users, items)) + np.log(popularity), axis=1)[:, -each:]
    user, item = np.repeat(np.arange(users), each), chosen.ravel()
    spread, taste = np.exp(0.3 * rng.normal(size=users)), rng.normal(size=(users, rank))
    signal = b[item] + np.einsum("rk,rk->r", F[item], taste[user]) + noise * rng.normal(size=len(item))
    rating = 3 + rng.normal(size=users)[user] + spread[user] * signal
    held = np.arange(len(user)) % each >= each - 2  # two of every user's ratings are for measuring
    return (user[~held], item[~held], rating[~held]), (user[held], item[held], rating[held]), (b, F)


@pytest.fixture(scope="module")
def data():
    return planted()


@pytest.fixture(scope="module")
def fitted(data):
    return PrivateFactorization(RANK, epsilon=8.0, items=range(ITEMS), random_state=0).fit(*data[0])


def means_error(train, test):
    """Of the user's mean plus how far an item is rated above its raters' means."""
    user, item, rating = train
    counts = np.bincount(user)
    mean = np.bincount(user, rating) / counts
    items = max(item.max(), test[1].max()) + 1
    offset = np.bincount(item, rating - mean[user], minlength=items) / np.maximum(np.bincount(item, minlength=items), 1)
    return np.mean((test[2] - mean[test[0]] - offset[test[1]]) ** 2)


def pages(model):
    """Names of the pages that were paid for, without their numbers, in order."""
    return list(dict.fromkeys(name.split("/")[0].split("-")[0] for name, _ in model.privacy_.events))


def error(model, test):
    return np.mean((test[2] - model.predict(test[0], test[1])) ** 2)


# Learning


def test_planted_factors_are_found(data, fitted):
    train, test, (b, F) = data
    assert error(fitted, test) < 0.6 * means_error(train, test)
    assert fitted.rank_ == RANK
    assert fitted.item_factors_.shape == (ITEMS, RANK)
    assert np.corrcoef(fitted.item_offsets_, b)[0, 1] > 0.9
    Q = np.linalg.qr(fitted.item_factors_)[0]
    assert np.linalg.norm(F - Q @ (Q.T @ F)) < 0.3 * np.linalg.norm(F)
    assert fitted.privacy_.epsilon == pytest.approx(8.0, rel=1e-6)
    assert pages(fitted)[0] == "scales"
    assert {"presence", "offsets", "levels", "taste", "losses"} <= set(pages(fitted))


def test_the_number_of_factors_is_read_off_the_noise(data):
    train, test, _ = data
    model = PrivateFactorization(epsilon=1.0, items=range(ITEMS), random_state=0).fit(*train)
    assert model.rank_ == RANK
    assert error(model, test) < 0.6 * means_error(train, test)


def test_items_are_selected_privately_unless_declared(data, fitted):
    user, item, rating = data[0]
    rare = np.array([1000, 1001, 1002])  # each rated by one user alone
    model = PrivateFactorization(RANK, epsilon=8.0, random_state=0)
    model.fit(np.append(user, [0, 1, 2]), np.append(item, rare), np.append(rating, [1.0, 2.0, 3.0]))
    assert model.items_ == tuple(range(ITEMS))
    assert pages(model)[0] == "keys"
    assert model.privacy_.epsilon <= 8.0
    assert model.privacy_.epsilon > 7.5
    assert error(model, data[1]) < 1.1 * error(fitted, data[1])
    assert np.allclose(model.predict([0], [1000]), model.predict([0], [4242]))  # both unknown: the user's level


def test_if_no_item_can_be_named_users_have_shrunk_levels_and_a_warning(tmp_path):
    rng = np.random.default_rng(0)
    level, user = 4 + 0.5 * rng.normal(size=5000), np.append(np.arange(5000), np.arange(2000))
    ratings = level[user] + 2 * rng.normal(size=7000)
    model = PrivateFactorization(epsilon=3.0, random_state=0)
    with pytest.warns(NothingLearned, match="no item is rated by enough users"):
        model.fit(user, np.arange(7000), ratings)  # no item twice
    assert model.items_ == ()
    assert model.privacy_.epsilon == pytest.approx(3.0, rel=1e-3)
    assert np.mean((model.predict(np.arange(5000), np.arange(5000)) - level) ** 2) < 0.1 * 2.0**2  # own rating: 4
    assert model.level_ == pytest.approx(4.0, abs=0.2)
    assert model.personalize([], []).predict([7]) == pytest.approx([model.level_])
    model.save(tmp_path / "model")
    loaded = PrivateFactorization.load(tmp_path / "model")
    assert np.array_equal(loaded.predict([1, 2], [3, 4]), model.predict([1, 2], [3, 4]))


@pytest.mark.parametrize("epsilon", [0.1, 1000.0])
def test_items_are_selected_at_any_epsilon(data, epsilon):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PrivateFactorization(epsilon=epsilon, random_state=0).fit(*data[0])
    assert model.privacy_.epsilon <= epsilon
    assert model.privacy_.epsilon > 0.99 * epsilon
    assert (len(model.items_) == ITEMS) == (epsilon > 1)


def test_more_items_than_can_be_paired(data, monkeypatch):
    train, test, _ = data
    monkeypatch.setattr(factorization, "MOST_PAIRED", 20)
    model = PrivateFactorization(RANK, epsilon=20.0, items=range(ITEMS), random_state=0).fit(*train)
    assert model.privacy_.epsilon == pytest.approx(20.0, rel=1e-6)
    assert (model.item_factors_ != 0).any(axis=1).sum() == 20  # those rated most
    assert error(model, test) < 0.85 * means_error(train, test)


def test_what_factors_would_have_cost_is_spent_on_offsets():
    """Ratings without tastes: no factors, and the whole budget is spent all the same."""
    train, _, (b, _) = planted(rank=0, noise=1.0, seed=2)
    model = PrivateFactorization(epsilon=2.0, items=range(ITEMS), random_state=2).fit(*train)
    assert model.rank_ == 0
    assert model.privacy_.epsilon == pytest.approx(2.0, rel=1e-6)
    numbers = [name for name, _ in model.privacy_.events if name.startswith("offsets-")]
    assert "taste-2/pairs" not in dict(model.privacy_.events)
    assert len(numbers) > 4  # more passes than where factors are found
    assert np.corrcoef(model.item_offsets_, b)[0, 1] > 0.95


@pytest.mark.parametrize("seed", range(2))
def test_a_larger_epsilon_is_never_worse(seed):
    """Items rated together very unevenly: at a large epsilon that must not be taken for tastes."""
    rng = np.random.default_rng(seed)
    users, items, groups = 1500, 120, 12
    group = rng.integers(groups, size=users)
    user = np.repeat(np.arange(users), 9)
    item = (group[user] * (items // groups) + rng.integers(items // groups, size=len(user))) % items
    rating = 3 + 0.4 * rng.normal(size=items)[item] + 0.5 * rng.normal(size=users)[user] + rng.normal(size=len(user))
    held = np.arange(len(user)) % 9 >= 7
    errors = []
    for epsilon in (1.0, 10.0, 1000.0):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = PrivateFactorization(epsilon=epsilon, items=range(items), random_state=seed)
            model.fit(user[~held], item[~held], rating[~held])
        errors.append(error(model, (user[held], item[held], rating[held])))
    assert errors[1] < 1.005 * errors[0]
    assert errors[2] < 1.005 * errors[1]


def test_levels_of_users_with_one_rating_are_shrunk():
    """Most users have one rating, some four. By their own rating they have a squared error of 2; the best is 1.2."""
    rng = np.random.default_rng(0)
    level, user = 3 + 0.5 * rng.normal(size=6000), np.append(np.arange(6000), np.repeat(np.arange(2000), 3))
    item, rating = rng.integers(10, size=len(user)), level[user] + rng.normal(size=len(user))
    model = PrivateFactorization(epsilon=3.0, items=range(10), random_state=0).fit(user, item, rating)
    single = np.arange(2000, 6000)
    again = level[single] + rng.normal(size=4000)
    assert np.mean((again - model.predict(single, item[single])) ** 2) < 1.03 * 1.2


@pytest.mark.parametrize("seed", range(3))
def test_hopeless_budgets_fall_back_on_users_means_and_say_so(data, seed):
    (user, item, rating), _, _ = data
    few = user < 40
    model = PrivateFactorization(epsilon=0.05, items=range(ITEMS), random_state=seed)
    with pytest.warns(NothingLearned):
        model.fit(user[few], item[few], rating[few])
    predicted = model.predict(user[few], item[few])
    mean = np.bincount(user[few], rating[few]) / np.bincount(user[few])
    assert np.isfinite(predicted).all()
    assert model.rank_ == 0
    assert np.mean((predicted - mean[user[few]]) ** 2) < 0.1 * np.var(rating[few])


# Odd users, odd items


def test_odd_users_and_items_do_no_harm(data, fitted):
    (user, item, rating), test, _ = data
    odd = [(USERS, 0, 5.0), (USERS, 1, 5.0), (USERS, 2, 5.0), (USERS + 1, 3, 2.0)]  # all alike; a single rating
    odd += [(USERS + 2, 4, value) for value in (1.0, 2.0, 4.0)]  # the same item three times
    odd += [(USERS + 3, 5, 1e300), (USERS + 3, 6, -1e300), (USERS + 4, 7, 1e-300), (USERS + 4, 8, 2e-300)]
    odd += [(USERS + 5, item, 1e6) for item in range(9)]  # far from all others
    more = tuple(np.append(a, b) for a, b in zip((user, item, rating), zip(*odd, strict=True), strict=True))
    model = clone(fitted).set_params(items=[*range(ITEMS), 777]).fit(*more)  # and an item that never occurs
    assert error(model, test) < 1.05 * error(fitted, test)
    assert np.abs(model.predict([USERS] * 3, [0, 9, 777]) - 5.0).max() < 1.5
    assert model.level_ - 1.0 < model.predict([USERS + 1], [777])[0] < model.level_  # one rating of 2: drawn down
    assert model.predict([USERS + 5], [777]) == pytest.approx([1e6], rel=1e-3)
    assert np.isfinite(model.predict([USERS + 2, USERS + 4, 0], [4, 8, 777])).all()
    assert np.isfinite(model.item_offsets_).all()
    assert np.abs(model.item_factors_[-1]).max() < np.abs(model.item_factors_[:-1]).max()


def test_a_rating_given_twice_counts_for_its_user(fitted, data):
    (user, item, rating), _, _ = data
    mine = user == 7
    once = fitted.personalize(item[mine], rating[mine])
    twice = fitted.personalize(np.tile(item[mine], 2), np.tile(rating[mine], 2))
    assert twice.mean == pytest.approx(once.mean, abs=1.0)
    left = [np.mean((rating[mine] - taste.predict(item[mine])) ** 2) for taste in (once, twice)]
    assert left[1] < left[0]  # more evidence for the same taste: closer to it


def test_ratings_of_items_without_factors_count_for_the_mean(fitted):
    taste = fitted.personalize([0, 9999], [4.0, 2.0])
    assert taste.predict([12345])[0] == pytest.approx(taste.mean)
    assert 1.5 < taste.mean < 4.5


def test_a_rank_that_cannot_be(data):
    with pytest.raises(InputError, match="rank must lie between 0 and the number of features"):
        PrivateFactorization(-1, items=range(ITEMS), random_state=0).fit(*data[0])


def test_a_rank_above_the_number_of_items_keeps_what_there_is(data):
    model = PrivateFactorization(ITEMS + 1, epsilon=8.0, items=range(ITEMS), random_state=0).fit(*data[0])
    assert RANK <= model.rank_ <= RANK + 2


def charges(folder):
    ledger = folder / "ledger.jsonl"
    return ledger.read_text().count('"charge"') if ledger.exists() else 0


def test_what_is_refused_is_refused_before_it_costs(data, tmp_path):
    """Items are selected first, for a part of the budget: what can be told to be wrong before that must be."""
    user, item, rating = data[0]
    with pytest.raises(InputError, match="rank must lie"):
        PrivateFactorization(-1, run_folder=tmp_path / "rank").fit(user, item, rating)
    assert charges(tmp_path / "rank") == 0
    with pytest.raises(InputError, match="equally long"):
        PrivateFactorization(1, run_folder=tmp_path / "length").fit(user, item, rating[1:])
    assert charges(tmp_path / "length") == 0
    with pytest.raises(InputError):
        PrivateFactorization(1, run_folder=tmp_path / "ids").fit([(1, int(u)) for u in user], item, rating)
    assert charges(tmp_path / "ids") == 0


@pytest.mark.parametrize("declared", [False, True])
def test_whole_numbers_that_came_as_floats(data, tmp_path, declared):
    """What integers become in a frame where one is missing: taken, or refused before anything is spent."""
    user, item, rating = data[0]
    floats = item.astype(float)
    floats[5] = np.nan
    items = range(ITEMS) if declared else None
    model = PrivateFactorization(1, epsilon=8.0, items=items, random_state=0, run_folder=tmp_path / "run")
    try:
        model.fit(user, floats, rating)
    except InputError:
        assert charges(tmp_path / "run") == 0
    else:
        assert model.items_ == tuple(range(ITEMS))


def test_items_that_nobody_rated_have_no_factors(data):
    model = PrivateFactorization(epsilon=8.0, items=["x", "y", "z"], random_state=0).fit(
        data[0][0], data[0][1].astype(str), data[0][2]
    )
    assert model.rank_ == 0
    assert np.abs(model.item_offsets_).max() < 0.1
    assert np.isfinite(model.predict([0], ["x"])).all()


def test_the_variance_of_levels_is_what_was_seen_or_the_guess():
    def found(value, noise, apart=1.0):
        return factorization.estimate_level_variance(value, noise, 2.0, apart, 4.0)

    assert [found(value, 0.001) for value in (0.05, 0.6, 3.0)] == pytest.approx([0.05, 0.6, 3.0], rel=0.05)
    guess = found(0.6, 1e6)
    assert found(-1e5, 1e6) == pytest.approx(guess, rel=0.05)
    assert 0.1 < guess / 2.0 < 0.6
    assert 0 < found(-0.5, 0.05) < 0.03
    assert found(9000.0, 800.0, 10000.0) == pytest.approx(9000, rel=0.2)  # levels are far apart
    assert 1000 < found(9000.0, 1e6, 10000.0) < 20000


@pytest.mark.parametrize(("users", "epsilon", "levels"), [(1200, 0.3, 0.3), (3000, 0.1, 0.3), (3000, 0.3, 1.0)])
def test_few_users_with_few_ratings_do_about_as_well_as_with_variances_known(users, epsilon, levels):
    """Over 14 seeds the ratio is 1.007 in the mean at most, and varies by 0.0045: false alarms below 1e-5."""
    ratios = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        user, level = np.repeat(np.arange(users), 7), 3 + levels * rng.normal(size=users)
        item = rng.integers(0, 20, len(user))
        rating = level[user] + rng.normal(size=len(user))
        own = np.arange(len(user)) % 7 < 4
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = PrivateFactorization(epsilon=epsilon, items=range(20), random_state=seed)
            model.fit(user[own], item[own], rating[own])
        mean = np.bincount(user[own], rating[own]) / 4
        shrunk = 3 + (mean - 3) * levels**2 / (levels**2 + 1 / 4)
        best = np.mean((rating[~own] - shrunk[user[~own]]) ** 2)
        ratios.append(np.sqrt(error(model, (user[~own], item[~own], rating[~own])) / best))
    assert np.mean(ratios) < 1.02


def test_rank_zero_is_levels_and_offsets(data, fitted):
    model = clone(fitted).set_params(rank=0).fit(*data[0])
    assert (model.rank_, model.item_factors_.shape) == (0, (ITEMS, 0))
    assert "taste" not in pages(model)
    assert error(model, data[1]) < 1.02 * means_error(data[0], data[1])
    with pytest.raises(InputError, match="rank must lie between 0"):
        clone(fitted).set_params(rank=-1).fit(*data[0])


@pytest.mark.parametrize("declared", [True, False])
def test_rows_without_a_rating_are_left_out(data, fitted, declared):
    (user, item, rating), test, _ = data
    lost = (np.arange(len(rating)) % 7 == 0) & (np.arange(len(rating)) % (EACH - 2) > 0)
    model = clone(fitted).set_params(items=range(ITEMS) if declared else None)
    with pytest.warns(MissingValues, match=f"^{lost.sum():,} rows of {len(rating):,} left out: no target"):
        missed = clone(model).fit(user, item, np.where(lost, np.nan, rating))
    without = clone(model).fit(user[~lost], item[~lost], rating[~lost])
    assert np.array_equal(missed.predict(*test[:2]), without.predict(*test[:2]))
    own = missed.personalize([1, 2, 3], [2.0, np.nan, 4.0])
    assert np.array_equal(own.predict([5]), missed.personalize([1, 3], [2.0, 4.0]).predict([5]))
    with pytest.raises(InputError, match="no row is left"):
        clone(model).fit(user, item, np.full(len(user), np.nan))


def test_bad_calls(data, fitted):
    (user, item, rating), _, _ = data
    for arguments in ((user[1:], item, rating), (user, item[1:], rating), (user, item, rating[1:])):
        with pytest.raises(InputError, match="equally long"):
            clone(fitted).fit(*arguments)
    with pytest.raises(InputError, match=r"no finite number in row 3"):
        clone(fitted).fit(user, item, np.where(np.arange(len(rating)) == 3, np.inf, rating))
    with pytest.raises(InputError, match="one column of numbers"):
        clone(fitted).fit(user, item, rating[:, None])
    with pytest.raises(InputError, match="the items of this model are integers"):
        fitted.predict([0], ["a"])
    with pytest.raises(InputError, match=r"user 99999 .* was not in fit"):
        clone(fitted).set_params(unknown_users="refuse").fit(*data[0]).predict([99999], [0])
    with pytest.raises(InputError, match='must be "prior" or "refuse"'):
        clone(fitted).set_params(unknown_users="skip").fit(*data[0])
    with pytest.raises(InputError, match="equally long"):
        fitted.predict([0, 1], [0])
    with pytest.raises(InputError):
        clone(fitted).fit(user, item, ["good"] * len(user))
    with pytest.raises(InputError, match="more than once"):
        PrivateFactorization(1, items=[1, 1]).fit(user, item, rating)
    with pytest.raises(InputError, match="all text or all integers"):
        PrivateFactorization(1, items=[1, "a"]).fit(user, item, rating)


# What is public, what is kept, what comes back


def test_personalize_is_predict(fitted, data):
    (user, item, rating), _, _ = data
    everything = np.arange(ITEMS)
    for someone in (0, 7, 99):
        taste = fitted.personalize(item[user == someone], rating[user == someone])
        assert taste.predict(everything) == pytest.approx(fitted.predict(np.full(ITEMS, someone), everything), rel=1e-9)


def test_newcomers_have_the_level_and_the_offsets(fitted, data):
    """Users without ratings: the level, and offsets in units of a typical spread. A warning counts them."""
    _, test, (b, _) = data
    everything = np.arange(ITEMS)
    with pytest.warns(UnknownUsers, match="31 rows of 2 users"):
        predicted = fitted.predict([*[70000] * ITEMS, 70001], [*everything, 0])
    assert predicted[0] == predicted[-1]
    nobody = fitted.personalize([], [])
    assert nobody.predict(everything) == pytest.approx(predicted[:-1], rel=1e-12)
    assert nobody.predict([12345]) == pytest.approx([fitted.level_])
    assert np.corrcoef(predicted[:-1], b)[0, 1] > 0.9
    by_level = np.mean((test[2] - np.mean(data[0][2])) ** 2)
    assert np.mean((test[2] - nobody.predict(test[1])) ** 2) < by_level


def test_the_order_of_rows_changes_nothing_public(data, fitted):
    order = np.random.default_rng(1).permutation(len(data[0][0]))
    again = clone(fitted).fit(*(column[order] for column in data[0]))
    assert again.items_ == fitted.items_
    assert again.item_offsets_ == pytest.approx(fitted.item_offsets_, abs=1e-6)
    assert again.item_factors_ == pytest.approx(fitted.item_factors_, abs=1e-6)
    assert again.privacy_ == fitted.privacy_
    assert again.rank_ == fitted.rank_


def test_nor_does_it_where_items_are_selected(data):
    model = PrivateFactorization(RANK, epsilon=8.0, random_state=3).fit(*data[0])
    order = np.random.default_rng(1).permutation(len(data[0][0]))
    again = clone(model).fit(*(column[order] for column in data[0]))
    assert again.items_ == model.items_
    assert again.item_factors_ == pytest.approx(model.item_factors_, abs=1e-6)


@pytest.mark.parametrize("kind", ["text", "pandas", "polars", "arrow", "lists", "categories"])
def test_columns_of_any_kind(kind, data, fitted):
    user, item, rating = data[0]
    names = [f"film {i:02d}" for i in item]
    columns = {
        "text": lambda: (user, np.array(names), rating),
        "pandas": lambda: (pd.Series(user), pd.Series(names), pd.Series(rating)),
        "polars": lambda: (pl.Series(user), pl.Series(names), pl.Series(rating)),
        "arrow": lambda: (pa.chunked_array([user]), pa.chunked_array([names]), pa.chunked_array([rating])),
        "lists": lambda: (user.tolist(), names, rating.tolist()),
        "categories": lambda: (pd.Series(user), pd.Series(names, dtype="category"), pd.Series(rating)),
    }[kind]()
    listed = [f"film {i:02d}" for i in range(ITEMS)]
    model = clone(fitted).set_params(items=listed).fit(*columns)
    assert model.items_ == tuple(listed)
    assert model.item_factors_ == pytest.approx(fitted.item_factors_, rel=1e-9)
    assert model.predict(columns[0][:5], columns[1][:5]) == pytest.approx(fitted.predict(user[:5], item[:5]))
    with pytest.raises(InputError, match="the items of this model are text"):
        model.predict([0], [3])
    selected = clone(model).set_params(items=None).fit(*columns)
    assert selected.items_ == tuple(listed)


def test_save_and_load(tmp_path, data, fitted):
    test = data[1]
    fitted.save(tmp_path / "model")
    loaded = PrivateFactorization.load(tmp_path / "model")
    assert np.array_equal(loaded.predict(*test[:2]), fitted.predict(*test[:2]))
    assert loaded.items_ == fitted.items_
    assert loaded.privacy_ == fitted.privacy_
    assert (loaded.rank, loaded.epsilon) == (RANK, 8.0)
    assert loaded.personalize([1, 2], [3.0, 4.0]).predict([3]) == fitted.personalize([1, 2], [3.0, 4.0]).predict([3])
    assert (tmp_path / "model" / "private").stat().st_mode & 0o077 == 0


class Killed(Exception):
    pass


@pytest.mark.parametrize("selected", [False, True])
@pytest.mark.parametrize("last", ["keys-1", "presence", "offsets-2", "taste-1", "losses"])
def test_a_killed_fit_is_continued(tmp_path, data, monkeypatch, last, selected):
    if last == "keys-1" and not selected:
        pytest.skip("nothing is selected")
    import privrep.privacy.run as kernel
    from privrep.models import learning

    items = None if selected else range(ITEMS)
    model = PrivateFactorization(RANK, epsilon=8.0, items=items, random_state=0)
    whole = clone(model).fit(*data[0])
    original, learn = kernel.Billboard, learning.learn

    class Stopping(original):
        """A billboard that dies as soon as the page stands."""

        def _died(self, page):
            if page == last:
                raise Killed

        def post_releases(self, page, *args, **kwargs):
            super().post_releases(page, *args, **kwargs)
            self._died(page)

        def post_selection(self, page, *args, **kwargs):
            super().post_selection(page, *args, **kwargs)
            self._died(page)

    model.set_params(run_folder=tmp_path / "run")
    monkeypatch.setattr(kernel, "Billboard", Stopping)
    with pytest.raises(Killed):
        model.fit(*data[0])
    monkeypatch.setattr(kernel, "Billboard", original)
    assert learning.learn is learn
    with pytest.raises(ResumeError, match="other settings"):
        clone(model).set_params(epsilon=9.0).fit(*data[0])
    model.fit(*data[0])
    assert np.array_equal(model.item_factors_, whole.item_factors_)
    assert model.privacy_.events == whole.privacy_.events
    with pytest.raises(InputError, match="finished model"):
        clone(model).fit(*data[0])
