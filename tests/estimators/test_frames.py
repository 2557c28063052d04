"""Frames as they come: text and categories, columns in any order, models that go to the command line and back."""

from __future__ import annotations

import datetime
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import sparse

import privrep
from privrep import ColumnNote, InputError, PrivateFedRep, PrivateFedRepClassifier, PrivateMarginSelector, cli
from privrep.data.frames import read_frame, read_rows, sort_columns
from privrep.estimators import leaks
from privrep.models.learning import KEYS_SHARE
from privrep.privacy.ledger import Budget

USERS, ROWS = 300, 4
BUDGET: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-6, "random_state": 0}


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    """Levels differ, and the shop matters: everybody knows a and b, one user alone has been to z."""
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(USERS), ROWS)
    shop = rng.choice(["a", "b"], len(who))
    shop[0] = "z"
    data = pd.DataFrame({"who": who, "x": rng.normal(size=len(who)), "shop": shop, "vip": rng.random(len(who)) > 0.5})
    data["y"] = rng.normal(size=USERS)[who] + data.x + (data.shop == "a") + 0.1 * rng.normal(size=len(who))
    return data


@pytest.fixture(scope="module")
def fitted(table: pd.DataFrame) -> PrivateFedRep:
    return PrivateFedRep(rank=1, **BUDGET).fit(table[["x", "shop", "vip"]], table.y, table.who)


def features(table: pd.DataFrame) -> pd.DataFrame:
    return table[["x", "shop", "vip"]]


KINDS: dict[str, Any] = {
    "object": lambda X: X.astype({"shop": object}),
    "nullable": lambda X: X.convert_dtypes(),
    "category": lambda X: X.astype({"shop": pd.CategoricalDtype(["z", "nobody", "b", "a"])}),
    "float32 as object": lambda X: X.astype({"x": object}),
    "index": lambda X: X.set_index(X.index * 7 + 3),
    "polars": pl.from_pandas,
    "polars categorical": lambda X: pl.from_pandas(X).with_columns(pl.col("shop").cast(pl.Categorical)),
    "polars enum": lambda X: pl.from_pandas(X).with_columns(pl.col("shop").cast(pl.Enum(["b", "a", "z", "q"]))),
    "arrow": lambda X: pa.Table.from_pandas(X, preserve_index=False),
    "arrow pieces": lambda X: pa.concat_tables(
        [pa.Table.from_pandas(part, preserve_index=False) for part in (X[:70], X[70:])]
    ),
}


@pytest.mark.parametrize("kind", KINDS, ids=list(KINDS))
def test_frames_of_all_kinds(kind: str, table: pd.DataFrame, fitted: PrivateFedRep) -> None:
    """The same rows make the same model and the same predictions, to the bit, whoever holds them."""
    X = KINDS[kind](features(table))
    wanted = fitted.predict(features(table), table.who)
    np.testing.assert_array_equal(fitted.predict(X, table.who), wanted)
    other = PrivateFedRep(rank=1, **BUDGET).fit(X, table.y, table.who)
    np.testing.assert_array_equal(other.predict(X, table.who), wanted)
    assert other.categories_ == {"shop": ("a", "b")}  # z is in the dictionary of some, and one user's alone
    assert other.feature_names_in_.tolist() == ["x", "shop", "vip"]
    assert other.n_features_in_ == 3


def test_selection_is_charged_and_lists_are_not(table: pd.DataFrame, fitted: PrivateFedRep) -> None:
    budget, event = Budget(8.0, 1e-6), dict(fitted.privacy_.events)["keys-1/keys"]
    assert event.noise_multiplier**-2 == pytest.approx(KEYS_SHARE * budget.mu**2)
    assert event.delta == pytest.approx(KEYS_SHARE * budget.delta)
    declared = PrivateFedRep(rank=1, categories={"shop": ["b", "z", "a"]}, **BUDGET)
    declared.fit(features(table), table.y, table.who)
    assert not any(name.startswith("keys") for name, _ in declared.privacy_.events)
    assert declared.categories_ == {"shop": ("b", "z", "a")}
    assert declared.representation_.shape == (5, 1)


def test_one_user_of_a_value_changes_no_feature(table: pd.DataFrame, fitted: PrivateFedRep) -> None:
    other = table.assign(shop=["only me", *table.shop[1:]])
    found = PrivateFedRep(rank=1, **BUDGET).fit(features(other), other.y, other.who)
    assert found.categories_ == fitted.categories_
    assert found.representation_.shape == fitted.representation_.shape


def test_columns_are_found_by_name(table: pd.DataFrame, fitted: PrivateFedRep) -> None:
    X, wanted = features(table), fitted.predict(features(table), table.who)
    np.testing.assert_array_equal(fitted.predict(X[["vip", "shop", "x"]], table.who), wanted)
    np.testing.assert_array_equal(fitted.predict(table, table.who), wanted)  # user and target are known by name
    head, same = fitted.personalize(X[:4], table.y[:4]), fitted.personalize(X[["vip", "x", "shop"]][:4], table.y[:4])
    np.testing.assert_array_equal(head.predict(X[["shop", "vip", "x"]]), same.predict(X))
    assert head.predict_interval(pl.from_pandas(X))[0].shape == (len(X),)
    assert fitted.personalize(X[:0], table.y[:0]).predict(X[:2]).shape == (2,)
    encoded = np.column_stack([X.x, X.vip, X.shop == "a", X.shop == "b"]).astype(float)
    np.testing.assert_allclose(fitted.predict(encoded, table.who), wanted)  # who encodes by hand may


def test_unknown_and_missing_values_have_no_feature(table: pd.DataFrame, fitted: PrivateFedRep) -> None:
    rows, who = features(table)[1:5], table.who[1:5]
    none = fitted.predict(rows.assign(shop="never seen"), who)
    for shop in (None, np.nan, "", "A"):
        np.testing.assert_array_equal(
            fitted.predict(rows.assign(shop=pd.Series([shop] * 4, index=rows.index)), who), none
        )


AT_PREDICT: dict[str, tuple[Any, str]] = {
    "missing": (lambda X: X[["x"]], "X does not have 'vip', 'shop', which the model was fitted on; give the columns"),
    "extra": (lambda X: X.assign(a=1, b=2), "X has 'a', 'b', which the model does not know; leave them out."),
    "both": (lambda X: X.rename(columns={"x": "X"}), "X does not have 'x', .* and has 'X', which the model does not"),
    "array": (lambda X: X[["x", "vip"]].to_numpy(), r"has categories \(shop\): give X as a frame"),
    "text for numbers": (lambda X: X.assign(x="low"), "'x' of X is not a number in 1,200 rows, first in row 0"),
    "dates for numbers": (
        lambda X: X.assign(x=pd.Timestamp("2020-01-01")),
        "'x' of X holds dates or times; turn dates",
    ),
    "numbers for text": (lambda X: X.assign(shop=3), "'shop' of X holds numbers where categories are text"),
    "infinite": (
        lambda X: X.assign(x=X.x.where(X.index > 2, np.inf)),
        "'x' of X has no finite number in 3 rows, first in row 0",
    ),
}


@pytest.mark.parametrize("case", AT_PREDICT, ids=list(AT_PREDICT))
def test_frames_that_do_not_fit_the_model(case: str, table: pd.DataFrame, fitted: PrivateFedRep) -> None:
    change, said = AT_PREDICT[case]
    with pytest.raises(InputError, match=said):
        fitted.predict(change(features(table)), table.who)


def mixed(X: pd.DataFrame) -> pd.Series:
    values = X.shop.astype(object).copy()
    values[7], values[9] = 3, 4.5
    return values


AT_FIT: dict[str, tuple[Any, str]] = {
    "dates": (lambda X: X.assign(day=pd.Timestamp("2020-01-01")), "column 'day' of X holds dates or times; turn dates"),
    "date objects": (lambda X: X.assign(day=[datetime.date(2020, 1, 1)] * len(X)), "holds dates or times; turn dates"),
    "dates as text": (
        lambda X: X.assign(day="2020-01-01"),
        "'day' of X holds dates or times in 1,200 rows, first in row 0",
    ),
    "mixed": (lambda X: X.assign(m=mixed(X)), "'m' of X holds text in most rows and numbers in 2 rows, first in row 7"),
    "lists": (lambda X: X.assign(m=[[1]] * len(X)), "'m' of X holds values of type list<item: int64>, not numbers"),
    "nothing": (lambda X: X.assign(m=None), "'m' of X holds no values; fill it or leave it out"),
    "one infinite": (
        lambda X: X.assign(m=np.where(X.index == 5, np.inf, 1.0)),
        "'m' of X has no finite number in row 5",
    ),
    "infinite": (lambda X: X.assign(m=np.inf), "'m' of X has no finite number in 1,200 rows, first in row 0"),
    "polars": (
        lambda X: pl.from_pandas(X).with_columns(l=pl.lit([1]), s=pl.struct(["x"]), d=pl.date(2020, 1, 1)),
        "3 columns of X cannot be used: 'l' holds .*; 's' holds .*; 'd' holds dates or times. To go on: turn it into",
    ),
    "lazy": (lambda X: pl.from_pandas(X).lazy(), "lazy frame; collect it"),
    "twice": (lambda X: pd.concat([X, X[["x"]]], axis=1), "column 'x' is in X more than once"),
    "names": (lambda X: X.rename(columns={"x": 1}), "names that are text and others do not"),
    "no names": (lambda X: X.set_axis([0, 1, 2], axis=1), "without names; give columns names"),
    "array of text": (lambda X: np.array([["007", "1"]] * len(X)), "X is an array of text"),
}


@pytest.mark.parametrize("case", AT_FIT, ids=list(AT_FIT))
def test_frames_that_cannot_be_fitted(case: str, table: pd.DataFrame, tmp_path: Path) -> None:
    """One sentence, and nothing is written or spent."""
    change, said = AT_FIT[case]
    model = PrivateFedRep(rank=1, run_folder=tmp_path / "run", **BUDGET)
    with pytest.raises(InputError, match=said) as caught:
        model.fit(change(features(table)), table.y, table.who)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"categories": {"shop": "a"}}, r"must be a list; write \['a'\]"),
        ({"categories": ["shop"]}, "categories must map columns to lists"),
        ({"categories": {"town": ["a"]}}, "there is no column 'town' in X"),
        ({"categories": {"x": None}}, "'x' of X is not an integer in 1,200 rows"),
        ({"categories": {"vip": None}}, "'vip' of X holds values of type bool, not categories"),
        ({"feature_scale": [1.0] * 4}, "feature_scale needs all features to be known: list the values of 'shop'"),
        ({"feature_covariance": np.eye(4)}, "feature_covariance is for numbers"),
    ],
)
def test_parameters_that_do_not_fit(options: dict[str, Any], said: str, table: pd.DataFrame) -> None:
    with pytest.raises(InputError, match=said):
        PrivateFedRep(rank=1, **BUDGET, **options).fit(features(table), table.y, table.who)
    if options.get("categories"):
        with pytest.raises(InputError, match="categories"):
            PrivateFedRep(rank=1, **BUDGET, **options).fit(table[["x"]].to_numpy(), table.y, table.who)


def test_text_that_looks_like_numbers_is_refused_unless_it_is_declared(table: pd.DataFrame) -> None:
    """One value that is no number makes text of a column: that must not change what the features are."""
    X = features(table).assign(shop=np.where(table.shop == "a", "007", "12"))
    odd = X.assign(shop=["x", *X.shop[1:]])
    for each in (X, odd):
        with pytest.raises(InputError, match="'shop' of X is text most of which is written as numbers"):
            PrivateFedRep(rank=1, **BUDGET).fit(each, table.y, table.who)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ColumnNote)
        found = PrivateFedRep(rank=1, categories={"shop": None}, **BUDGET).fit(X, table.y, table.who)
    assert found.categories_ == {"shop": ("007", "12")}


def test_a_column_of_which_nothing_can_be_named(table: pd.DataFrame) -> None:
    X = features(table).assign(name=[f"user {who}" for who in table.who])
    with pytest.warns(ColumnNote, match="no value of column 'name' is held by enough users"):
        found = PrivateFedRep(rank=1, **BUDGET).fit(X, table.y, table.who)
    assert found.categories_ == {"shop": ("a", "b")}
    without = found.predict(X.drop(columns="name"), table.who)
    np.testing.assert_array_equal(found.predict(X, table.who), without)
    with pytest.raises(InputError, match="no value of column 'name' is held by enough users"):
        PrivateFedRep(rank=1, **BUDGET).fit(X[["name"]], table.y, table.who)


@pytest.mark.parametrize("name", ["PrivAltMin", "CentaurLinear", "DPFedAvg"])
def test_other_methods(name: str, table: pd.DataFrame) -> None:
    """Those that take dense features alone get them dense."""
    model = getattr(privrep, name)(rank=1, **BUDGET).fit(features(table), table.y, table.who)
    assert model.categories_ == {"shop": ("a", "b")}
    assert model.representation_.shape == (4, 1)
    assert np.isfinite(model.predict(features(table), table.who)).all()


def test_classes(table: pd.DataFrame, tmp_path: Path) -> None:
    labels = pd.Series(np.where(table.y > 0.5, "high", "low"), name="level")
    model = PrivateFedRepClassifier(rank=1, **BUDGET).fit(features(table), labels, table.who)
    assert model.categories_ == {"shop": ("a", "b")}
    assert model.classes_.tolist() == ["high", "low"]
    model.save(tmp_path / "model")
    again = PrivateFedRepClassifier.load(tmp_path / "model")
    X = features(table)[["vip", "x", "shop"]]
    np.testing.assert_array_equal(again.predict_proba(X, table.who), model.predict_proba(features(table), table.who))
    head = model.personalize(features(table)[:4], labels[:4])
    assert set(head.predict(X[:4])) <= {"high", "low"}


# The command line, and back


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    return int(end.value.code or 0)


OPTIONS = ["--user", "who", "--target", "y", "--epsilon", 8, "--delta", 1e-6, "--rank", 1, "--simulate", 0]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_models_of_the_command_line_and_of_python_are_the_same(
    suffix: str, table: pd.DataFrame, fitted: PrivateFedRep, tmp_path: Path
) -> None:
    rows, out = tmp_path / f"rows.{suffix}", tmp_path / "model"
    table.to_csv(rows, index=False) if suffix == "csv" else table.to_parquet(rows)
    assert command("fit", rows, *OPTIONS, "--categorical", "shop", "--out", out) == 0
    loaded = PrivateFedRep.load(out)
    np.testing.assert_array_equal(loaded.representation_, fitted.representation_)
    assert loaded.feature_names_in_.tolist() == ["x", "vip", "shop"]
    wanted = fitted.predict(features(table), table.who)
    np.testing.assert_array_equal(loaded.predict(table, table.who), wanted)
    fitted.save(tmp_path / "python")
    for folder in (out, tmp_path / "python"):
        made = tmp_path / f"{folder.name}.parquet"
        assert command("predict", folder, rows, "--out", made) == 0
        np.testing.assert_array_equal(pq.read_table(made)["prediction"].to_numpy(), wanted)
        assert command("inspect", folder) == 0
    new = tmp_path / f"new.{suffix}"
    few = table[:4].assign(who=9999)
    few.to_csv(new, index=False) if suffix == "csv" else few.to_parquet(new)
    assert command("personalize", tmp_path / "python", new) == 0
    head = fitted.personalize(features(few), few.y)
    joined = PrivateFedRep.load(tmp_path / "python").predict(few, few.who)
    np.testing.assert_allclose(joined, head.predict(features(few)))


def test_other_dialects_give_the_same_predictions(
    table: pd.DataFrame, fitted: PrivateFedRep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted.save(tmp_path / "model")
    rows, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    table.to_csv(rows, sep=";", decimal=",", encoding="cp1252")  # with an index, which has no name
    assert command("predict", tmp_path / "model", rows, "--out", out) == 0
    assert f"Reading {rows} separated by semicolons" in capsys.readouterr().err
    found = pd.read_csv(out, sep=";", decimal=",")
    np.testing.assert_array_equal(found.prediction, fitted.predict(features(table), table.who))
    table[:3].drop(columns="who").to_csv(rows, sep=";", decimal=",", index=False)
    assert command("personalize", tmp_path / "model", rows, "--user-id", 7777) == 0
    assert f"Reading {rows} separated by semicolons" in capsys.readouterr().err


def test_columns_of_a_frame() -> None:
    """Types decide what a column is; decimals and booleans are numbers."""
    frame = read_frame(
        pa.table(
            {
                "decimal": pa.array([1, 2], pa.decimal128(5, 1)),
                "flag": [True, None],
                "small": pa.array([1, 2], pa.uint8()),
                "code": pa.array([5, 6]).dictionary_encode(),
                "text": ["7", "8"],
            }
        )
    )
    assert frame is not None
    numbers, categories = sort_columns(frame, {})
    assert (numbers, categories) == (("decimal", "flag", "small"), ("code", "text"))
    rows = read_rows(frame, numbers, {"code": (6,), "text": ()}, may_miss=True)
    np.testing.assert_array_equal(rows.values[:, :3], [[1.0, 1.0, 1.0], [2.0, np.nan, 2.0]])
    assert rows.encode(rows.values, {"code": (6,), "text": ("8",)})[:, 3:].tolist() == [
        [0.0, 0.0],
        [1.0, 1.0],
    ]
    more = rows.encode(np.column_stack([rows.values, [8.0, 9.0]]), {"code": (6,)})
    assert more[:, 2:].tolist() == [[1.0, 8.0, 0.0], [2.0, 9.0, 1.0]]  # numbers that were added come after numbers
    assert rows.keys("code", rows.values[::-1]).to_pylist() == [6, 5]
    assert read_frame(np.zeros((2, 2))) is None
    assert read_frame(pd.DataFrame(np.zeros((2, 2)))) is None


def test_columns_of_margin_selection_are_found_by_name() -> None:
    rng = np.random.default_rng(0)
    X, users = rng.uniform(-0.5, 0.5, (600, 3)), np.repeat(np.arange(60), 10)
    frame, y = pd.DataFrame(X, columns=list("abc")), np.where(X[:, 0] > 0, 1, -1)
    model = PrivateMarginSelector(1, epsilon=3.0, random_state=0).fit(frame, y, users)
    for other in (frame[list("cab")], pl.DataFrame(frame[list("bca")].to_dict("list"))):
        assert np.array_equal(model.predict(other, users), model.predict(frame, users))
    mine = users == 3
    head = model.personalize(frame[list("cba")][mine], y[mine])
    assert np.array_equal(head.predict(X[mine]), model.personalize(frame[mine], y[mine]).predict(X[mine]))
    with pytest.raises(InputError, match="'b'"):
        model.predict(frame[["a", "c"]], users)


@pytest.mark.parametrize("kind", [pd.DataFrame, pl.from_pandas])
def test_a_target_left_in_the_frame_is_refused_by_name_before_anything_is_spent(
    kind: Any, table: pd.DataFrame, tmp_path: Path
) -> None:
    frame = kind(table)
    model = PrivateFedRep(run_folder=tmp_path / "run", **BUDGET)
    with pytest.raises(InputError, match="column 'y' of X has the name of the target y; leave it out"):
        model.fit(frame[["x", "shop", "y"]], frame["y"], frame["who"])
    assert not (tmp_path / "run").exists()


def test_a_target_left_in_the_frame_under_another_name_is_refused(table: pd.DataFrame, tmp_path: Path) -> None:
    model = PrivateFedRep(run_folder=tmp_path / "run", **BUDGET)
    hidden = table.assign(spent=table.y).drop(columns=["y", "who"])
    several = np.column_stack([table.x, table.y])
    refusal = "column 'spent' of X holds the very values of y; take the target out of X"
    with pytest.raises(InputError, match=refusal):
        model.fit(hidden, table.y, table.who)
    with pytest.raises(InputError, match=refusal):
        model.fit(hidden.drop(columns="x"), several, table.who)
    holes = np.where(np.arange(len(table)) % 7, table.y, np.nan)
    with pytest.raises(InputError, match=refusal):
        model.fit(hidden.assign(spent=holes), holes, table.who)
    rows = np.column_stack([table.x, table.y]).astype(np.float32)
    with pytest.warns(ColumnNote, match="column 1 of X holds the very values of y"):  # scikit-learn's checks do so
        PrivateFedRep(**BUDGET).fit(rows, table.y, table.who)
    assert not (tmp_path / "run").exists()


def test_labels_left_in_the_frame_are_refused(table: pd.DataFrame) -> None:
    model = PrivateFedRepClassifier(classes=["a", "b"], **BUDGET)
    with pytest.raises(InputError, match="column 'shop' of X holds the very values of y"):
        model.fit(table[["x", "shop"]], table["shop"].rename("label"), table.who)
    with pytest.raises(InputError, match="column 'vip' of X holds the very values of y"):
        PrivateFedRepClassifier(**BUDGET).fit(table[["x", "vip"]], table["vip"].to_numpy(), table.who)


def test_a_target_of_one_value_is_no_column_of_ones(table: pd.DataFrame) -> None:
    leaks.refuse_target_values(np.ones((4, 2)), np.ones(4), [], None)
    leaks.refuse_target_values(np.eye(4), np.array([0.0, 1.0, 0.0, 1.0]), [], None)
    for X in (np.eye(4), sparse.csr_array(np.eye(4))):
        with pytest.warns(ColumnNote, match="column 2 of X"):
            leaks.refuse_target_values(X, np.eye(4)[2], [], None)
        with pytest.raises(InputError, match="column 'c' of X"):
            leaks.refuse_target_values(X, np.eye(4)[2], ["a", "b", "c", "d"], None)


def test_a_selection_takes_no_text_and_shows_none(table: pd.DataFrame) -> None:
    model = PrivateMarginSelector(rank=1, epsilon=1.0, classes=[0, 1], radius=5.0, random_state=0)
    labels = (table.y > 0).astype(int).rename("label")
    with pytest.raises(InputError, match="column 'shop' of X is text, and PrivateMarginSelector takes numbers"):
        model.fit(table[["x", "shop"]], labels, table.who)
    with pytest.raises(InputError, match="column 'label' of X has the name of the target y"):
        model.fit(table[["x"]].assign(label=labels), labels, table.who)
    with pytest.raises(InputError, match="column 'same' of X holds the very values of y"):
        model.fit(table[["x"]].assign(same=labels), labels, table.who)


def test_a_refusal_of_text_among_numbers_does_not_show_it() -> None:
    X = np.array([[1.0, 2.0]] * 3 + [[1.0, "the secret one"]], dtype=object)
    for estimator in (PrivateFedRep(rank=1), PrivateFedRepClassifier(rank=1, classes=[0, 1])):
        with pytest.raises(InputError, match="values that are not numbers") as caught:
            estimator.fit(X, [0, 1, 0, 1], ["a", "a", "b", "b"])
        assert "secret" not in str(caught.value)
