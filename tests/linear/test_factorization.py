"""Ratings: planted factors are found, odd users and items do no harm, and what is public does not depend on order."""

from __future__ import annotations

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from sklearn.base import clone

from privrep import InputError, NothingLearned, PrivateFactorization, ResumeError
from privrep.linear.methods import factorization

ITEMS, RANK, USERS, EACH = 30, 2, 3000, 12


def planted(users=USERS, items=ITEMS, rank=RANK, each=EACH, seed=0, noise=0.4):
    """(user, item, rating): r = 3 + a_u + spread_u (b_j + <F_j, v_u> + noise), items rated more and less often."""
    rng = np.random.default_rng(seed)
    b, F = 0.4 * rng.normal(size=items), rng.normal(size=(items, rank)) / np.sqrt(rank)
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
    assert [name for name, _ in fitted.privacy_.events] == ["taste/taste"]


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
    assert [name for name, _ in model.privacy_.events] == ["keys-1/keys", "taste/taste"]
    assert model.privacy_.epsilon <= 8.0
    assert model.privacy_.epsilon > 7.5
    assert error(model, data[1]) < 1.1 * error(fitted, data[1])
    assert np.allclose(model.predict([0], [1000]), model.predict([0], [4242]))  # both unknown: the user's mean


def test_nothing_above_the_threshold_is_an_error_that_says_what_to_do():
    with pytest.raises(InputError, match="declare the list"):
        PrivateFactorization(1, epsilon=0.1, random_state=0).fit([0, 0, 1], ["a", "b", "c"], [1.0, 2.0, 3.0])


@pytest.mark.parametrize("paired", [8, 20])
def test_more_items_than_can_be_paired(data, monkeypatch, paired):
    train, test, (_, F) = data
    monkeypatch.setattr(factorization, "MOST_PAIRED", paired)
    model = PrivateFactorization(RANK, epsilon=20.0, items=range(ITEMS), random_state=0).fit(*train)
    assert [name for name, _ in model.privacy_.events] == ["means/means", "taste/taste", "tail/image"]
    assert model.privacy_.epsilon == pytest.approx(20.0, rel=1e-6)
    assert error(model, test) < 0.75 * means_error(train, test)
    head = np.sort(np.argsort(-np.linspace(2.0, 0.5, ITEMS))[:paired])
    tail = np.setdiff1d(np.arange(ITEMS), head)
    A = np.linalg.lstsq(model.item_factors_, F, rcond=None)[0]
    assert np.linalg.norm(model.item_factors_[tail] @ A - F[tail]) < 0.7 * np.linalg.norm(F[tail])


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
    assert np.mean((predicted - mean[user[few]]) ** 2) < np.var(rating[few])


# Odd users, odd items


def test_odd_users_and_items_do_no_harm(data, fitted):
    (user, item, rating), test, _ = data
    odd = [(USERS, 0, 5.0), (USERS, 1, 5.0), (USERS, 2, 5.0), (USERS + 1, 3, 2.0)]  # all alike; a single rating
    odd += [(USERS + 2, 4, value) for value in (1.0, 2.0, 4.0)]  # the same item three times
    odd += [(USERS + 3, 5, 1e300), (USERS + 3, 6, -1e300), (USERS + 4, 7, 1e-300), (USERS + 4, 8, 2e-300)]
    more = tuple(np.append(a, b) for a, b in zip((user, item, rating), zip(*odd, strict=True), strict=True))
    model = clone(fitted).set_params(items=[*range(ITEMS), 777]).fit(*more)  # and an item that never occurs
    assert error(model, test) < 1.05 * error(fitted, test)
    assert model.predict([USERS] * 3, [0, 9, 777]) == pytest.approx([5.0] * 3)
    assert model.predict([USERS + 1], [3])[0] == pytest.approx(2.0)
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


@pytest.mark.parametrize("rank", [ITEMS + 1, 0])
def test_a_rank_that_cannot_be(rank, data):
    with pytest.raises(InputError, match="rank must lie between 1 and the number of features"):
        PrivateFactorization(rank, items=range(ITEMS), random_state=0).fit(*data[0])


def charges(folder):
    ledger = folder / "ledger.jsonl"
    return ledger.read_text().count('"charge"') if ledger.exists() else 0


def test_what_is_refused_is_refused_before_it_costs(data, tmp_path):
    """Items are selected first, for a part of the budget: what can be told to be wrong before that must be."""
    user, item, rating = data[0]
    with pytest.raises(InputError, match="rank must lie"):
        PrivateFactorization(0, run_folder=tmp_path / "rank").fit(user, item, rating)
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
    with pytest.warns(NothingLearned):
        model = PrivateFactorization(epsilon=8.0, items=["x", "y", "z"], random_state=0).fit(
            data[0][0], data[0][1].astype(str), data[0][2]
        )
    assert np.isfinite(model.predict([0], ["x"])).all()


def test_bad_calls(data, fitted):
    (user, item, rating), _, _ = data
    for arguments in ((user[1:], item, rating), (user, item[1:], rating), (user, item, rating[1:])):
        with pytest.raises(InputError, match="equally long"):
            clone(fitted).fit(*arguments)
    with pytest.raises(InputError, match=r"no finite number in row 3"):
        clone(fitted).fit(user, item, np.where(np.arange(len(rating)) == 3, np.nan, rating))
    with pytest.raises(InputError, match="one column of numbers"):
        clone(fitted).fit(user, item, rating[:, None])
    with pytest.raises(InputError, match="the items of this model are integers"):
        fitted.predict([0], ["a"])
    with pytest.raises(InputError, match=r"user 99999 .* was not in fit"):
        fitted.predict([99999], [0])
    with pytest.raises(InputError, match="equally long"):
        fitted.predict([0, 1], [0])
    with pytest.raises(InputError):
        clone(fitted).fit(user, item, ["good"] * len(user))
    with pytest.raises(InputError, match="at least one rating"):
        fitted.personalize([], [])
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
@pytest.mark.parametrize("last", ["keys-1", "means", "taste", "tail"])
def test_a_killed_fit_is_continued(tmp_path, data, monkeypatch, last, selected):
    if last == "keys-1" and not selected:
        pytest.skip("nothing is selected")
    import privrep.privacy.run as kernel
    from privrep.models import learning

    monkeypatch.setattr(factorization, "MOST_PAIRED", 20)
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
