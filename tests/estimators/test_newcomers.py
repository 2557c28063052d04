"""Heads for many newcomers at once: what one at a time makes, and what `privrep personalize` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from commands import done
from privrep import InputError, PrivAltMin, PrivateFedRep, PrivateFedRepClassifier, UnknownUsers
from privrep.models import model as models

USERS, ROWS, NEW = 300, 5, 6
BUDGET: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-6, "random_state": 0}
NAMES = ["x", "z", "shop"]


def visits(users: int, first: int, seed: int) -> pd.DataFrame:
    """Levels differ, a value of x is missing here and there, and the shop matters."""
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(users), ROWS)
    data = pd.DataFrame({"who": who + first, "x": rng.normal(size=len(who)), "z": rng.normal(size=len(who))})
    data["shop"] = rng.choice(["a", "b"], len(who))
    data["y"] = rng.normal(size=users)[who] + data.x + (data.shop == "a") + 0.1 * rng.normal(size=len(who))
    data.loc[3::17, "x"] = np.nan
    return data.sample(frac=1, random_state=0, ignore_index=True)


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return visits(USERS, 0, 0)


@pytest.fixture(scope="module")
def new() -> pd.DataFrame:
    return visits(NEW, 1000, 1)


@pytest.fixture(scope="module")
def fitted(table: pd.DataFrame) -> PrivateFedRep:
    model = PrivateFedRep(rank=1, categories={"shop": ["a", "b"]}, **BUDGET)
    with pytest.warns(UserWarning, match="missing"):
        return model.fit(table[NAMES], table.y, table.who)


def each(model: Any, rows: pd.DataFrame) -> Any:
    """Yield the rows of each user, a mask, and the head that `personalize` makes of them."""
    for user in rows.who.unique():
        own = np.array(rows.who == user)
        yield own, model.personalize(rows[NAMES][own], rows.y[own])


def test_many_newcomers_get_the_heads_that_one_at_a_time_would(
    fitted: PrivateFedRep, table: pd.DataFrame, new: pd.DataFrame
) -> None:
    joined = fitted.personalize_users(new[NAMES], new.y, new.who)
    found, (low, high) = joined.predict(new[NAMES], new.who), joined.predict_interval(new[NAMES], new.who)
    for own, head in each(fitted, new):
        np.testing.assert_allclose(found[own], head.predict(new[NAMES][own]), rtol=1e-9)
        one = head.predict_interval(new[NAMES][own])
        np.testing.assert_allclose(np.stack([low[own], high[own]]), np.stack(one), rtol=1e-9)
    assert np.array_equal(joined.predict(table[NAMES], table.who), fitted.predict(table[NAMES], table.who))
    assert len(joined.users_) == USERS + NEW
    assert len(fitted.users_) == USERS  # as it was
    assert joined.privacy_ == fitted.privacy_
    with pytest.warns(UnknownUsers):
        fitted.predict(new[NAMES], new.who)


def test_they_are_the_heads_that_the_command_writes(fitted: PrivateFedRep, new: pd.DataFrame, tmp_path: Path) -> None:
    fitted.save(tmp_path / "model")
    new.to_parquet(tmp_path / "new.parquet")
    done("personalize", tmp_path / "model", tmp_path / "new.parquet", "--user", "who", "--target", "y")
    written = models.load(tmp_path / "model").heads
    fitted.personalize_users(new[NAMES], new.y, new.who).save(tmp_path / "joined")
    joined = models.load(tmp_path / "joined").heads
    assert written is not None
    assert joined is not None
    for part, other in zip(vars(written).values(), vars(joined).values(), strict=True):
        np.testing.assert_array_equal(part, other)


def test_a_published_model_has_newcomers_alone(fitted: PrivateFedRep, new: pd.DataFrame, tmp_path: Path) -> None:
    fitted.save(tmp_path / "model")
    (tmp_path / "model" / "private" / "heads.parquet").unlink()
    public = PrivateFedRep.load(tmp_path / "model").personalize_users(new[NAMES], new.y, new.who)
    assert sorted(public.users_.tolist()) == list(range(1000, 1000 + NEW))
    joined = fitted.personalize_users(new[NAMES], new.y, new.who)
    assert np.array_equal(public.predict(new[NAMES], new.who), joined.predict(new[NAMES], new.who))


def test_users_who_have_a_head_are_refused_or_replaced(fitted: PrivateFedRep, new: pd.DataFrame) -> None:
    again = new.assign(who=new.who - 1000)
    with pytest.raises(InputError, match=r"user 0 of groups has a head in the model already.*pass replace=True"):
        fitted.personalize_users(again[NAMES], again.y, again.who)
    other = fitted.personalize_users(again[NAMES], again.y, again.who, replace=True)
    assert len(other.users_) == USERS
    found = fitted.personalize_users(new[NAMES], new.y, new.who).predict(new[NAMES], new.who)
    assert np.array_equal(other.predict(again[NAMES], again.who), found)
    with pytest.raises(InputError, match="users of groups are text, those of the model are integers"):
        fitted.personalize_users(new[NAMES], new.y, new.who.astype(str))
    with pytest.raises(InputError, match="needs groups"):
        fitted.personalize_users(new[NAMES], new.y, None)  # type: ignore[arg-type]


def test_classifiers_do_the_same(table: pd.DataFrame, new: pd.DataFrame) -> None:
    known, fresh = (rows.assign(y=np.where(rows.y > 0, "yes", "no")).fillna(0.0) for rows in (table, new))
    model = PrivateFedRepClassifier(rank=1, classes=["no", "yes"], categories={"shop": ["a", "b"]}, **BUDGET)
    model.fit(known[NAMES], known.y, known.who)
    joined = model.personalize_users(fresh[NAMES], fresh.y, fresh.who)
    found = joined.predict_proba(fresh[NAMES], fresh.who)
    for own, head in each(model, fresh):
        np.testing.assert_allclose(found[own], head.predict_proba(fresh[NAMES][own]), rtol=1e-9)


def test_methods_without_a_prior_do_the_same(table: pd.DataFrame, new: pd.DataFrame) -> None:
    numbers, known, fresh = NAMES[:2], table.fillna(0.0), new.fillna(0.0)
    model = PrivAltMin(rank=1, **BUDGET).fit(known[numbers], known.y, known.who)
    joined = model.personalize_users(fresh[numbers], fresh.y, fresh.who)
    found = joined.predict(fresh[numbers], fresh.who)
    for user in fresh.who.unique():
        own = fresh[fresh.who == user]
        head = model.personalize(own[numbers], own.y)
        np.testing.assert_allclose(found[fresh.who == user], head.predict(own[numbers]), rtol=1e-9)
