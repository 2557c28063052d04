"""The boundary for input that others made: limits name themselves and what raises them; bombs and NaN are refused."""

from __future__ import annotations

import gzip
import json
import resource
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from commands import refused
from privrep import PrivateFedRep
from privrep.boundary import LIMITS, check_depth, is_full, parse_json, parse_toml, read_json, refusing, say_why, writing
from privrep.data.images import read_idx, read_image_folder, read_npz
from privrep.data.readers import TableSource, read_columns, read_table
from privrep.errors import DiskFull, InputError, OverLimit
from privrep.models.model import load
from privrep.privacy.ledger import read_report

# Limits


def test_a_limit_is_its_default_or_what_its_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = LIMITS["depth"]
    assert limit.value == limit.default
    monkeypatch.setenv(limit.variable, "100")
    assert limit.value == 100


@pytest.mark.parametrize("odd", ["0", "-1", "many", "1e9", " 5", "9" * 19, "²"])
def test_a_limit_that_is_no_whole_number_is_refused(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVREP_MAX_DEPTH", odd)
    with pytest.raises(InputError, match="PRIVREP_MAX_DEPTH must be a whole number above 0"):
        _ = LIMITS["depth"].value


def test_limits_are_documented_with_their_defaults() -> None:
    text = (Path(__file__).parents[1] / "docs" / "deploy.md").read_text()
    for limit in LIMITS.values():
        assert f"| `{limit.variable}` | {limit.default:,} | {limit.what} |" in text


# Texts


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("depth", [65, 2_000, 200_000])
def test_json_that_is_nested_deeply_is_refused_and_says_how_deep_it_may_be(opening: str, depth: int) -> None:
    closing = "]" if opening == "[" else "}"
    with pytest.raises(OverLimit, match=r"limit of 64; if you trust it, set PRIVREP_MAX_DEPTH"):
        parse_json(opening * depth + "1" + closing * depth)


def test_brackets_side_by_side_and_in_texts_are_no_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [[["["] * 50, {"}{": '\\"[' * 40}]] * 100
    assert parse_json(json.dumps(many)) == many
    deep: Any = 1
    for _ in range(64):
        deep = [deep]
    assert parse_json(json.dumps(deep)) == deep
    monkeypatch.setenv("PRIVREP_MAX_DEPTH", "80")
    assert parse_json(f"[{json.dumps(deep)}]") == [deep]


def test_depth_of_a_text_that_does_not_end_takes_no_longer_than_its_length() -> None:
    check_depth(b'"' + b'\\"' * 500_000 + b"{" * 100)  # quadratic time would be hours
    with pytest.raises(ValueError, match="Unterminated"):
        parse_json('"' + '\\"' * 1_000 + "{" * 100)


def test_a_text_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "long.json").write_text(json.dumps("x" * 200))
    assert read_json(tmp_path / "long.json") == "x" * 200
    monkeypatch.setenv("PRIVREP_MAX_TEXT", "100")
    with pytest.raises(OverLimit, match=r"202 bytes are over the limit of 100; .* PRIVREP_MAX_TEXT"):
        read_json(tmp_path / "long.json")


def test_numbers_that_no_field_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="400 digits"):
        parse_json("[" + "9" * 400 + "]")
    assert np.isnan(parse_json("NaN"))
    with pytest.raises(ValueError, match="NaN"):
        parse_json("[NaN]", finite=True)


@pytest.mark.parametrize("text", ["a = " + "[" * 3_000, "a" + ".a" * 3_000 + " = 1", "a = " + "[" * 70 + "]" * 70])
def test_toml_that_is_nested_deeply_is_refused(text: str) -> None:
    with pytest.raises((OverLimit, ValueError)) as caught:
        parse_toml(text.encode())
    assert "PRIVREP_MAX_DEPTH" in str(caught.value)


def test_a_configuration_that_is_nested_deeply_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fit.toml").write_text("a = " + "[" * 3_000 + "]" * 3_000)
    assert "PRIVREP_MAX_DEPTH" in refused(capsys, "fit", tmp_path / "fit.toml", "--check")


# Errors


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("name"), "'name' is missing"),
        (RecursionError("maximum recursion depth exceeded"), "it is nested too deeply"),
        (MemoryError(), "there is not enough memory for it"),
        (ValueError("one\ntwo"), "one"),
        (ValueError("a.\u2028b"), "a"),
        (ValueError("x" * 1_000), "x" * 300 + "..."),
        (ValueError("\x1b[31mred"), "?[31mred"),
        (IndexError(), "IndexError"),
    ],
)
def test_whatever_goes_wrong_becomes_one_line(error: Exception, said: str) -> None:
    with pytest.raises(InputError) as caught, refusing(lambda why: f"<{why}>"):
        raise error
    assert str(caught.value) == f"<{said}>"
    assert say_why(error) == said


def test_limits_are_told_again_and_other_refusals_pass() -> None:
    with pytest.raises(InputError, match=r"^f: too deep$"), refusing(lambda why: f"f: {why}"):
        raise OverLimit("too deep")
    with pytest.raises(InputError, match=r"^mine\.$"), refusing(lambda why: f"f: {why}"):
        raise InputError("mine.")
    with pytest.raises(PermissionError), refusing(lambda why: why, (PermissionError,)):
        raise PermissionError


def test_other_errors_than_of_a_full_disk_pass_a_writer() -> None:
    assert not is_full(OSError(2, "No such file or directory"))
    with pytest.raises(FileNotFoundError), writing("file"):
        raise FileNotFoundError(2, "No such file or directory", "file")
    with pytest.raises(DiskFull, match="file cannot be written, because the disk is full"), writing("file"):
        raise OSError(28, "No space left on device")


# What is packed


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that small files go over, so that tests are quick."""
    monkeypatch.setenv("PRIVREP_MAX_EXPANDED", "100000")
    monkeypatch.setenv("PRIVREP_MAX_RATIO", "20")


ROWS = 200_000


def pack_csv(path: Path) -> Callable[[], Any]:
    with gzip.open(path / "t.csv.gz", "wb") as file:
        file.write(b"user,y,x\n" + b"1,2,3\n" * ROWS)
    return lambda: read_table(TableSource(path / "t.csv.gz", "user", "y"))


def pack_pages(path: Path) -> Callable[[], Any]:
    zeros = np.zeros(ROWS)
    table = pa.table({"user": np.arange(ROWS) % 7, "y": zeros, "x": zeros})
    pq.write_table(table, path / "t.parquet", compression="zstd", use_dictionary=False, data_page_size=1 << 24)
    return lambda: read_table(TableSource(path / "t.parquet", "user", "y"))


def pack_runs(path: Path) -> Callable[[], Any]:
    zeros = np.zeros(ROWS, np.int64)
    pq.write_table(pa.table({"user": zeros, "y": zeros, "x": zeros}), path / "t.parquet")
    return lambda: read_table(TableSource(path / "t.parquet", "user", "y"))


def pack_text(path: Path) -> Callable[[], Any]:
    users = pa.DictionaryArray.from_arrays(np.zeros(2_000, np.int32), pa.array(["x" * 30_000]))
    table = pa.table({"user": np.arange(2_000), "c": users})
    pq.write_table(table, path / "t.parquet", compression="zstd", store_schema=False)
    return lambda: read_columns(path / "t.parquet", ["user", "c"])


def pack_arrays(path: Path) -> Callable[[], Any]:
    np.savez_compressed(path / "a.npz", images=np.zeros((ROWS, 2, 2), np.uint8), labels=np.zeros(ROWS, np.int64))
    return lambda: read_npz(path / "a.npz")


def pack_idx(path: Path) -> Callable[[], Any]:
    (path / "images.gz").write_bytes(gzip.compress(struct.pack(">4B3I", 0, 0, 8, 3, ROWS, 2, 2) + bytes(4 * ROWS)))
    return lambda: read_idx(path / "images.gz", path / "images.gz")


def pack_image(path: Path) -> Callable[[], Any]:
    image = pytest.importorskip("PIL.Image")
    (path / "a").mkdir()
    image.new("L", (800, 800)).save(path / "a" / "x.png")
    return lambda: read_image_folder(path, (2, 2))


@pytest.mark.parametrize("pack", [pack_csv, pack_pages, pack_runs, pack_text, pack_arrays, pack_idx, pack_image])
def test_a_small_file_does_not_become_a_huge_one(
    pack: Callable[[Path], Callable[[], Any]], small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = pack(tmp_path)
    with pytest.raises(
        InputError, match=r"would become .*, and the limit .* 100,000; .* PRIVREP_MAX_EXPANDED"
    ) as caught:
        read()
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("PRIVREP_MAX_EXPANDED", "100000000")
    if pack is not pack_idx:  # whose labels are none
        read()


def test_a_long_text_in_many_rows_is_read_a_few_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVREP_MAX_EXPANDED", "4000000")
    colours = pa.DictionaryArray.from_arrays(np.zeros(5_000, np.int32), pa.array(["x" * 40_000]))
    table = pa.table({"user": np.arange(5_000), "y": np.zeros(5_000), "c": colours})
    pq.write_table(table, tmp_path / "t.parquet", compression="zstd", store_schema=False)
    source = TableSource(tmp_path / "t.parquet", "user", "y", [], categories={"c": ["a"]})
    rows = [batch.num_rows for batch in source.batches()]
    assert sum(rows) == 5_000
    assert max(rows) <= 100


def test_an_array_has_the_size_that_its_header_says(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for name in ("images", "labels"):
            with archive.open(f"{name}.npy", "w") as file:
                header = {"descr": "<f8", "fortran_order": False, "shape": (10**12,)}
                np.lib.format.write_array_header_1_0(file, header)  # type: ignore[arg-type]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match="says 8,000,000,000,000 bytes, and there are fewer"):
        read_npz(tmp_path / "a.npz")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 17  # kB


def test_a_large_table_that_packs_well_is_no_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of codes that hardly vary, more than a hundred columns, many times what anything may become."""
    monkeypatch.setenv("PRIVREP_MAX_EXPANDED", "1000000")
    rows = 20_000
    columns = {f"x{number}": np.repeat([0, 1], rows // 2) for number in range(120)}
    table = pa.table({"user": np.arange(rows) // 50, "y": np.random.default_rng(0).normal(size=rows), **columns})
    with pq.ParquetWriter(tmp_path / "t.parquet", table.schema) as writer:
        for _ in range(10):
            writer.write_table(table)
    source = TableSource(tmp_path / "t.parquet", "user", "y", ["x0", "x1"])
    assert sum(batch.num_rows for batch in source.batches()) == 10 * rows


# Model folders and ledgers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of before, whose pages have no hashes: what they say is all there is to look at."""
    path = tmp_path_factory.mktemp("boundary") / "model"
    rng = np.random.default_rng(0)
    X, users = rng.normal(size=(240, 4)), np.repeat(np.arange(60), 4)
    PrivateFedRep(2, epsilon=8.0, random_state=0).fit(X, X.sum(axis=1), groups=users).save(path)
    lines = [json.loads(line) for line in (path / "ledger.jsonl").read_bytes().splitlines()]
    lines[0]["format"] = "privrep-ledger/1"
    kept = [{name: value for name, value in line.items() if name not in ("chain", "says")} for line in lines]
    (path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    described = json.loads((path / "model.json").read_text())
    del described["books"]
    (path / "model.json").write_text(json.dumps(described))
    load(path)
    return path


@pytest.mark.parametrize("name", ["basis", "scale", "spread", "prior_slopes", "prior_level"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_representation_of_what_is_no_number_is_refused(name: str, value: float, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    (page,) = (tmp_path / "model" / "billboard").glob("*-representation.safetensors")
    with safe_open(str(page), framework="numpy") as file:
        arrays, metadata = {key: file.get_tensor(key).copy() for key in file.keys()}, dict(file.metadata())  # noqa: SIM118
    arrays[name].flat[0] = value
    save_file(arrays, str(page), metadata=metadata)
    with pytest.raises(InputError, match=r"is damaged \(billboard: .*(finite|no number|do not fit)"):
        load(tmp_path / "model")


def test_arrays_of_another_size_are_refused(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    (page,) = (tmp_path / "model" / "billboard").glob("*-representation.safetensors")
    with safe_open(str(page), framework="numpy") as file:
        arrays, metadata = {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata())  # noqa: SIM118
    for name, value in {"scale": np.ones(3), "basis": np.ones(4), "spread": np.ones(5)}.items():
        save_file({**arrays, name: value}, str(page), metadata=metadata)
        with pytest.raises(InputError, match=r"is damaged \(billboard: "):
            load(tmp_path / "model")


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("rank", "2"),
        ("epsilon", None),
        ("seed", 10**30),
        ("scale", [["x"]]),
        ("intercept", 1),
        ("epsilon", float("nan")),
    ],
)
def test_settings_of_another_type_are_refused(part: str, value: Any, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    described = json.loads((model / "model.json").read_text())
    described["config"][part] = value
    (tmp_path / "model" / "model.json").write_text(json.dumps(described))
    with pytest.raises(InputError, match=rf"is damaged \(model\.json: config\.{part} is not what it should be"):
        load(tmp_path / "model")


def test_a_model_that_is_nested_deeply_names_folder_and_limit(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "model.json").write_text('{"a":' * 90_000)
    with pytest.raises(InputError, match=r"model is damaged \(model\.json: .* PRIVREP_MAX_DEPTH"):
        load(tmp_path / "model")


HEADER = {"format": "privrep-ledger/1", "relation": "replace-one-user", "epsilon": 1.0, "delta": 1e-6, "seeded": False}


@pytest.mark.parametrize("missing", [name for name in HEADER if name != "format"])
def test_a_header_without_a_part_is_one_sentence(missing: str, tmp_path: Path) -> None:
    header = {name: value for name, value in HEADER.items() if name != missing}
    (tmp_path / "ledger.jsonl").write_text(json.dumps(header) + "\n")
    with pytest.raises(InputError, match=rf"damaged in line 1 \('{missing}' is missing\)"):
        read_report(tmp_path / "ledger.jsonl")


@pytest.mark.parametrize(
    "charge",
    [
        {"kind": "pure", "epsilon": 1e300},
        {"kind": "gaussian", "noise_multiplier": 1e-90},
        {"kind": "pure", "epsilon": 2},
    ],
)
def test_a_charge_beyond_its_budget_is_refused_before_it_is_added_up(charge: dict[str, Any], tmp_path: Path) -> None:
    lines = [HEADER, {"charge": "a/b", **charge}]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InputError, match="one charge alone is over the budget of epsilon 1"):
        read_report(tmp_path / "ledger.jsonl")
