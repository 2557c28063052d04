"""Everything that privrep opens: valid inputs and how they are changed. A new format joins by a line of TARGETS.

Preparing a target makes its valid inputs in a folder and returns a function that changes one of them, opens it, and
lets every exception through.
"""

from __future__ import annotations

import io
import json
import shutil
import sqlite3
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path += [str(HERE.parents[1]), str(HERE.parent), str(HERE.parent / "models"), str(HERE.parent / "properties")]

from changes import (  # noqa: E402
    Mutate,
    mutate_archive,
    mutate_bytes,
    mutate_csv,
    mutate_footer,
    mutate_json,
    mutate_lines,
    mutate_page,
    mutate_toml,
    mutate_tree,
)

Case = Callable[[Random], None]
Prepare = Callable[[Path], Case]


@dataclass(frozen=True)
class Target:
    """One kind of input, and how often it is tried beside the others."""

    prepare: Prepare
    weight: float = 1.0


def of_file(
    name: str, make: Callable[[Path], Sequence[bytes]], mutate: Mutate, open_file: Callable[[Path, Random], None]
) -> Prepare:
    """Return how a format of files is tried.

    Args:
        name: of the file, whose end may count.
        make: makes valid files; it may write to a folder.
        mutate: changes one of them.
        open_file: opens a file.
    """

    def prepare(folder: Path) -> Case:
        inputs = list(make(folder))

        def case(rng: Random) -> None:
            path = folder / name
            path.write_bytes(mutate(rng.choice(inputs), rng))
            open_file(path, rng)

        return case

    return prepare


# Books


def _ledger_lines() -> list[dict[str, Any]]:
    header = {"format": "privrep-ledger/2", "relation": "replace-one-user", "epsilon": 4.0, "delta": 1e-6}
    sampled = {"noise_multiplier": 9.0, "rate": 0.1, "relation": "replace-one-user"}
    return [
        {**header, "seeded": False},
        {"population": "people", "run": "a"},
        {"charge": "one/sizes", "kind": "gaussian", "noise_multiplier": 12.5, "group": ["half", 0, 2]},
        {"posted": "one", "says": "0" * 32},
        {"charge": "two/choice", "kind": "pure", "epsilon": 0.1},
        {"charge": "three/keys", "kind": "selection", "noise_multiplier": 20.0, "delta": 1e-8},
        {"charge": "four/a+b", "kind": "gaussians", "noise_multiplier": 50.0, "count": 7},
        {"charge": "five/a", "kind": "sampled", **sampled, "count": 3},
        {"charge": "six/a", "kind": "batched", **sampled},
        {"abandoned": "four"},
    ]


def _chain(lines: Sequence[Any]) -> bytes:
    """Return lines of a ledger, each with the right chain, so that what they say is looked at."""
    from privrep.privacy.ledger_file import chain_line

    head: str | None = ""
    written = []
    for line in lines:
        text, head = chain_line(head, line)
        written.append(text)
    return b"".join(written)


def _make_ledgers(folder: Path) -> list[bytes]:
    lines = _ledger_lines()
    few = [line for line in lines if line.get("kind") not in ("sampled", "batched")]
    plain = [{key: value for key, value in line.items() if key != "says"} for line in few]
    return [_chain(few)] * 6 + [_chain(lines), b"".join(json.dumps(line).encode() + b"\n" for line in plain)]


def _mutate_ledger(data: bytes, rng: Random) -> bytes:
    """Change lines, and mostly chain them again, as whoever edits a ledger with some care does."""
    if rng.random() < 0.4:
        return mutate_lines(data, rng)
    lines = [json.loads(line) for line in data.splitlines()]
    for line in lines:
        line.pop("chain", None)
    place = rng.randrange(len(lines))
    lines[place] = mutate_tree(lines[place], rng)
    if not isinstance(lines[place], dict) or not lines[place]:
        return data.replace(b"}", json.dumps(lines[place]).encode(errors="replace"), 1)
    if rng.random() < 0.3:
        rng.shuffle(lines)
    return _chain(lines)


def _open_ledger(path: Path, rng: Random) -> None:
    from privrep.privacy.ledger import read_ledger

    ledger = read_ledger(path)
    str(ledger.report())


def _make_population(folder: Path) -> list[bytes]:
    from privrep.privacy.account import Place
    from privrep.privacy.events import Gaussian, Pure
    from privrep.privacy.ledger import Budget
    from privrep.privacy.people import Sketch
    from privrep.privacy.population import PopulationLedger

    ledger = PopulationLedger.create(folder / "made.db", epsilon=4.0)
    people = Sketch.of_ids(np.arange(50), ledger.salt)
    marks = [ledger.reserve(f"run{number}", Budget(0.5, 1e-7), "a fit", people)[0] for number in range(5)]
    ledger.cover("run0", [Pure(0.01), Gaussian(40.0)], Place(marks[0], 0))
    ledger.finish("run1", [Gaussian(40.0)], Place(marks[1], 0))
    ledger.finish("run2", [], Place(marks[2], 0))
    ledger.give_up("run3")
    return [(folder / "made.db").read_bytes()]


def _prepare_population(folder: Path) -> Case:
    from privrep.privacy.ledger_file import read_chained
    from privrep.privacy.population import PopulationLedger

    (whole,) = _make_population(folder)
    with sqlite3.connect(folder / "made.db") as connection:
        texts = [line for (line,) in connection.execute("SELECT line FROM lines ORDER BY number")]
    lines, head = [], ""
    for text in texts:
        line, head = read_chained(head, text.encode())
        lines.append(line)

    def case(rng: Random) -> None:
        path = folder / "people.db"
        if rng.random() < 0.5:
            path.write_bytes(mutate_bytes(whole, rng))
        else:
            changed = list(lines)
            place = rng.randrange(len(changed))
            changed[place] = mutate_tree(changed[place], rng)
            if rng.random() < 0.2:
                rng.shuffle(changed)
            _write_population(path, changed, rng)
        PopulationLedger(path).read()

    return case


def _write_population(path: Path, lines: Sequence[Any], rng: Random) -> None:
    """Write a database with these lines, chained, or some of them as they come."""
    good = [line for line in lines if isinstance(line, dict) and line]
    written = _chain(good).splitlines()
    if rng.random() < 0.2:
        written[rng.randrange(len(written))] = mutate_json(rng.choice(written), rng)
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA journal_mode = OFF")
    for table in ("lines (number, line)", "seal (only, lines, chain)", "runs (run, opened, before, lines)"):
        connection.execute(f"CREATE TABLE {table}")

    def odd(value: Any) -> Any:
        """Return a value, or seldom another one."""
        return value if rng.random() < 0.97 else rng.choice((str(value).encode(), None, 3, 0.5, -1, "x"))

    for number, line in enumerate(written, start=1):
        connection.execute("INSERT INTO lines VALUES (?, ?)", (odd(number), odd(line.decode(errors="replace"))))
    chain = written[-1].rpartition(b'"chain": "')[2][:-2].decode(errors="replace") if written else ""
    connection.execute("INSERT INTO seal VALUES (1, ?, ?)", (odd(len(written)), odd(chain)))
    for run in ("run0", "run4"):  # the open ones
        connection.execute("INSERT INTO runs VALUES (?, ?, ?, ?)", (odd(run), odd("mark"), odd(""), odd(0)))
    connection.close()


# Pages and model folders


def _prepare_pages(folder: Path) -> Case:
    from privrep.privacy.billboard import Billboard

    pages = [path.read_bytes() for kind in _MADE for path in sorted((get_model(kind) / "billboard").iterdir())]
    (folder / "billboard").mkdir()

    def case(rng: Random) -> None:
        path = folder / "billboard" / "0000-page.safetensors"
        path.write_bytes(mutate_page(rng.choice(pages), rng))
        for page in Billboard.read(path.parent):
            assert page.digest

    return case


MODELS = Path("/dev/shm" if Path("/dev/shm").is_dir() else "/tmp")
_MADE: dict[str, Path] = {}  # folders of models by kind


def make_models(folder: Path) -> None:
    """Fit a model of every kind that can be made here, once for all targets."""
    from folders import KINDS

    for name, kind in KINDS.items():
        if name not in _MADE:
            path = folder / name.replace(" ", "-").replace("'", "")
            kind.fit(path)
            _MADE[name] = path


def get_model(kind: str) -> Path:
    return _MADE[kind]


def _unchain(folder: Path) -> None:
    """Make a folder of before of one, without hashes: what is in its pages is then looked at, whatever it is."""
    path = folder / "ledger.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    lines[0]["format"] = "privrep-ledger/1"
    kept = [{key: value for key, value in line.items() if key not in ("chain", "says")} for line in lines]
    path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in kept if line))
    described = json.loads((folder / "model.json").read_text())
    described.pop("books", None)
    (folder / "model.json").write_text(json.dumps(described))


_BY_SUFFIX: dict[str, Mutate] = {
    ".json": mutate_json,
    ".jsonl": _mutate_ledger,
    ".safetensors": mutate_page,
    ".parquet": mutate_footer,
}


def of_model(kind: str) -> Prepare:
    """Return how folders of a kind of model are tried: with one file changed, loaded, asked and inspected."""

    def prepare(folder: Path) -> Case:
        from folders import KINDS

        from privrep.models.inspection import inspect_folder
        from privrep.models.verification import verify

        path = folder / "model"
        shutil.copytree(get_model(kind), path)
        _unchain(path)
        files = sorted(each for each in path.rglob("*") if each.is_file())
        whole = {each: each.read_bytes() for each in files}
        last = max(each for each in files if each.suffix == ".safetensors")
        likely = [each for each in files if each.suffix != ".safetensors"] * 3 + [last] * 4

        def case(rng: Random) -> None:
            chosen = rng.choice(files + likely)
            changed = _BY_SUFFIX[chosen.suffix](whole[chosen], rng)
            if chosen.suffix == ".parquet" and rng.random() < 0.5:
                changed = _mutate_heads(whole[chosen], rng)
            chosen.write_bytes(changed)
            try:
                if rng.random() < 0.25:
                    inspect_folder(path)
                elif rng.random() < 0.02:
                    verify(path)
                else:
                    _ask(KINDS[kind], path)
            finally:
                chosen.write_bytes(whole[chosen])

        return case

    return prepare


def _ask(kind: Any, path: Path) -> None:
    """Load a model and predict rows of the model as it was; one that is whole and takes other rows may say so."""
    model = kind.load(path)
    kind.released(model)
    try:
        kind.predicted(model)
    except ValueError as error:
        if "is expecting" not in str(error):  # in scikit-learn's words
            raise


def _mutate_heads(data: bytes, rng: Random) -> bytes:
    """Change columns of a file of heads: their types, values, which there are, and what the file says of them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(data))
    place, rows, way = rng.randrange(table.num_columns), table.num_rows, rng.randrange(8)
    name = table.column_names[place]
    if way == 0:
        table = table.drop_columns([name])
    elif way == 1:
        table = table.slice(rng.randrange(rows), rng.choice((0, 1, 3)))
    elif way == 2:
        table = pa.concat_tables([table, table.slice(0, 1)])
    elif way == 3:
        table = table.append_column(name, table[name])
    elif way == 4:
        said = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        changed = mutate_tree(said or {"a": "b"}, rng)
        changed = changed if isinstance(changed, dict) else {}
        said = {ascii(key)[1:-1]: ascii(value)[:99].strip("'") for key, value in changed.items()}
        table = table.replace_schema_metadata(said)
    else:
        odd: list[Any] = [None, float("nan"), 1e308, -1, 2**40, "x", [1.0], [float("inf")] * 3, [], True]
        value = rng.choice(odd)
        values = table[name].to_pylist()
        if way == 5:
            values = [value] * rows
        else:
            values[rng.randrange(rows)] = value
        try:
            column = pa.array(values, type=table.schema.field(name).type if way == 6 else None)
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            column = pa.array([ascii(each) for each in values])
        table = table.set_column(place, name, column)
    try:
        written = io.BytesIO()
        pq.write_table(table, written)
    except (pa.ArrowException, UnicodeError, ValueError):
        return data
    return written.getvalue()


# Tables, arrays and images


@cache
def _frame() -> Any:
    import pyarrow as pa

    rng = np.random.default_rng(0)
    rows = 24
    return pa.table(
        {
            "user": [f"u{number // 3}" for number in range(rows)],
            "y": rng.normal(size=rows),
            "price": rng.normal(size=rows).round(3),
            "count": rng.integers(0, 9, rows),
            "open": rng.integers(0, 2, rows).astype(bool),
            "colour": rng.choice(["red", "green", "blue"], rows),
        }
    )


def _make_csvs(folder: Path) -> list[bytes]:
    import pyarrow.csv as csv

    written = io.BytesIO()
    csv.write_csv(_frame(), written, csv.WriteOptions(quoting_style="none"))
    return [written.getvalue()]


def _make_packed(folder: Path) -> list[bytes]:
    import gzip

    return [gzip.compress(text) for text in _make_csvs(folder)]


def _make_parquets(folder: Path) -> list[bytes]:
    import pyarrow.parquet as pq

    given: list[dict[str, Any]] = [
        {},
        {"compression": "zstd"},
        {"compression": "none", "use_dictionary": False},
        {"row_group_size": 5, "compression": "gzip"},
        {"use_dictionary": False, "column_encoding": {"count": "DELTA_BINARY_PACKED", "user": "DELTA_BYTE_ARRAY"}},
        {"data_page_version": "2.0", "write_statistics": False},
    ]
    made = []
    for options in given:
        written = io.BytesIO()
        pq.write_table(_frame(), written, **options)
        made.append(written.getvalue())
    return made


def _open_table(path: Path, rng: Random) -> None:
    """Read a table as commands do: as numbers, with categories, as labels, as whole columns, or in batches."""
    from privrep.data.files import read_schema
    from privrep.data.readers import TableSource, read_columns, read_table

    way = rng.randrange(5)
    if way == 0:
        read_table(TableSource(path, "user", "y"))
    elif way == 1:
        read_table(TableSource(path, "user", "y", ["price", "count"], categories={"colour": ["red", "green"]}))
    elif way == 2:
        read_table(TableSource(path, "user", "colour", ["price"], classes=("red", "green"), weight="count"))
    elif way == 3:
        read_columns(path, ["user", "colour"])
    else:
        read_schema(path, "user", 1 << 20)
        for batch in TableSource(path, "user", ["y", "price"], ["count", "open"]).batches(checked=True):
            batch.validate(full=True)


def _make_frames(folder: Path) -> list[bytes]:
    import pyarrow as pa

    made = []
    for table in (_frame(), _frame().set_column(5, "colour", _frame()["colour"].dictionary_encode())):
        written = io.BytesIO()
        with pa.ipc.new_stream(written, table.schema) as writer:
            writer.write_table(table)
        made.append(written.getvalue())
    return made


def _open_frame(path: Path, rng: Random) -> None:
    """Read a frame; what Arrow itself does not read, or holds to be invalid, never comes to privrep."""
    import pyarrow as pa

    from privrep.data.frames import read_frame, sort_columns

    try:
        with pa.ipc.open_stream(path.read_bytes()) as reader:
            table = reader.read_all()
        table.validate(full=True)
        table.column_names  # noqa: B018
    except Exception:
        return
    frame = read_frame(table)
    assert frame is not None
    sort_columns(frame, {"colour": None} if rng.random() < 0.5 else {})


def _make_archives(folder: Path) -> list[bytes]:
    rng = np.random.default_rng(0)
    images = {"images": rng.integers(0, 255, (6, 4, 4), np.uint8), "labels": np.arange(6) % 3, "writers": np.arange(6)}
    rows = {"X": rng.normal(size=(6, 3)), "y": np.arange(6) % 2, "users": np.array(list("aabbcc"))}
    made = []
    for save in (np.savez, np.savez_compressed):
        for arrays in ({**images, "classes": np.array(["a", "b", "c"])}, rows):
            written = io.BytesIO()
            save(written, **arrays)  # type: ignore[arg-type]
            made.append(written.getvalue())
    return made


def _open_archive(path: Path, rng: Random) -> None:
    from privrep.data.images import read_arrays, read_npz

    if rng.random() < 0.6:
        read_npz(path).rows()
    else:
        read_arrays(path, ("X", "y", "users"), ())


def _make_idx(folder: Path) -> list[bytes]:
    import gzip
    import struct

    images = struct.pack(">4B3I", 0, 0, 8, 3, 2, 3, 3) + bytes(range(18))
    labels = struct.pack(">4BI", 0, 0, 8, 1, 2) + bytes(2)
    (folder / "labels").write_bytes(labels)
    (folder / "images").write_bytes(images)
    return [images, labels, gzip.compress(images)]


def _open_idx(path: Path, rng: Random) -> None:
    from privrep.data.images import read_idx

    both = (path, path.parent / "labels") if rng.random() < 0.5 else (path.parent / "images", path)
    read_idx(*both, transpose=rng.random() < 0.3)


def _make_images(folder: Path) -> list[bytes]:
    from PIL import Image

    (folder / "class").mkdir(exist_ok=True)
    picture = Image.fromarray(np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3))
    made = []
    for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"):
        written = io.BytesIO()
        picture.save(written, kind)
        made.append(written.getvalue())
    return made


def _open_image(path: Path, rng: Random) -> None:
    from privrep.data.images import read_image_folder

    (path.parent / "class" / "image.png").write_bytes(path.read_bytes())
    read_image_folder(path.parent, (4, 4), colour=rng.random() < 0.5)


def _make_image_tables(folder: Path) -> list[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    image, written = _make_images(folder)[0], io.BytesIO()
    columns = {"user": ["a", "b"], "label": ["x", "y"], "image": [{"bytes": image}, {"bytes": image}]}
    pq.write_table(pa.table(columns), written)
    return [written.getvalue()]


def _open_image_table(path: Path, rng: Random) -> None:
    from privrep.data.images import read_image_parquet

    read_image_parquet(path, "image", "label", "user", (4, 4))


# Configurations and declared facts


@cache
def _registries() -> Any:
    from privrep.cli.config import _registries as made

    return made()


def of_configuration(command: str) -> Prepare:
    """Return how configurations of a command are tried."""

    def make(folder: Path) -> list[bytes]:
        from privrep.schema.template import template

        text = template(command, _registries())
        bare = "\n".join(line for line in text.splitlines() if line and not line.startswith("#"))
        return [text.encode(), bare.encode()]

    def open_file(path: Path, rng: Random) -> None:
        from privrep.schema.template import COMMANDS

        if command == "federate":
            from privrep.federated.config import read_config

            read_config(path)
        COMMANDS[command].read(path).missing_files()

    return of_file("config.toml", make, mutate_toml, open_file)


def _make_facts(folder: Path) -> list[bytes]:
    square = {"columns": ["a", "b"], "covariance": [[2.0, 0.5], [0.5, 1.0]]}
    return [
        json.dumps(each).encode() for each in ({"a": 1.0, "b": 2.5}, square, {"a": ["x", "y"], "b": [1, 2]}, [1, 2])
    ]


def _open_facts(path: Path, rng: Random) -> None:
    from privrep.cli.declared import Declared, read_categories, read_classes, read_covariance, read_items, read_scale

    told = Declared("--file: facts.json", path)
    asked: tuple[Callable[[], Any], ...] = (
        lambda: read_scale(told, ["a", "b"]),
        lambda: read_covariance(told, ["b", "a"]),
        lambda: read_categories(told, ["a", "b"]),
        lambda: read_items(told, "a"),
        lambda: read_classes(str(path), "text"),
    )
    rng.choice(asked)()


# Messages


@cache
def _steps() -> list[tuple[str, dict[str, np.ndarray]]]:
    from asking import D, K, questions, sparse_questions, taste_questions

    from privrep.errors import InputError
    from privrep.federated.wire.step_codec import encode

    asked = {**questions(D, K, True), **sparse_questions(D, K, False), **taste_questions(D, K)}
    steps: list[Any] = [step for step, _ in asked.values()] + _network_steps()
    found = []
    for step in steps:
        try:
            found.append(encode(step))
        except InputError:
            continue  # a step of the tests alone
    return found


def _network_steps() -> list[Any]:
    try:
        from privrep.heads.gradient import HeadFit
        from privrep.neural.gradient_step import GradientStep
        from privrep.neural.models import lenet, mlp
        from privrep.nn.flat_module import FlatModule, Split
    except ImportError:
        return []
    made = []
    for (representation, head), features, rank in ((mlp(3, (4, 2), 3), 3, 2), (lenet(1, 16, (5,), 3), 256, 5)):
        split = Split(FlatModule(representation), FlatModule(head), features, rank, 3)
        weights = split.representation.weights(), split.head.weights()
        made.append(GradientStep(split, *weights, HeadFit(), 0.1, 4))
    return made


def _prepare_steps(folder: Path) -> Case:
    from privrep.federated.wire.step_codec import decode

    steps = _steps()

    def case(rng: Random) -> None:
        text, arrays = rng.choice(steps)
        changed = mutate_json(text.encode(), rng).decode(errors="replace")
        decode(changed, _mutate_arrays(arrays, rng), rng.choice((3, None, 256)), rng.choice((1, 2)))

    return case


def _mutate_arrays(arrays: dict[str, np.ndarray], rng: Random) -> dict[str, np.ndarray]:
    """Change the type, shape, values or name of an array, sometimes."""
    changed = dict(arrays)
    if not changed or rng.random() < 0.5:
        return changed
    name = rng.choice(sorted(changed))
    value = changed.pop(name)
    ways: tuple[Callable[[], np.ndarray], ...] = (
        lambda: value.astype(rng.choice(["f4", "i8", "?", "c16", "U3"])),
        lambda: value.reshape(-1),
        lambda: value[None],
        lambda: np.zeros(rng.choice([(0,), (1,), (5_000,), (5_000, 1), (0, 3), ()])),
        lambda: np.full(value.shape, rng.choice([np.nan, np.inf, -1.0, 1e308])),
    )
    changed[name if rng.random() < 0.8 else "a9"] = rng.choice(ways)()
    return changed


def _prepare_messages(folder: Path) -> Case:
    from flwr.app import ConfigRecord, RecordDict

    from privrep.federated.wire.messages import RECORD, Answer, Question, make_refusal, pack, read_refusal, unpack
    from privrep.federated.wire.step_codec import decode
    from privrep.federated.wire.users import read_facts
    from privrep.privacy.bounds import Bound, LossBound
    from privrep.privacy.groups import Group

    sent = []
    for number, (text, arrays) in enumerate(_steps()):
        step = decode(text, {name: np.array(value) for name, value in arrays.items()})
        bounds = {"a": Bound(1.0, 4), "b": LossBound(3)}
        chosen = np.arange(20) % 2 == 0 if number % 2 else None
        group = Group("half", 0, 2) if number % 3 else None
        sent.append(Question("run", number, step, bounds, group, chosen, 0.5, "page", {"a": 0.1}).to_record())
    sent += [Answer(3, 40, {"a": np.arange(4.0)}).to_record(), make_refusal("failed")]
    sent.append(pack({"users": 3, "features": 4, "targets": 1, "sparse": False}))
    records = [dict(record[RECORD]) for record in sent]  # type: ignore[arg-type]

    def case(rng: Random) -> None:
        record: dict[str, Any] = dict(rng.choice(records))
        way = rng.randrange(8)
        if way < 4:
            record["text"] = mutate_json(record["text"].encode(), rng).decode(errors="replace")
        elif way < 6:
            record["arrays"] = mutate_page(record["arrays"], rng)
        elif way == 6:
            record[rng.choice(["text", "arrays", "version", "more"])] = rng.choice([1, 5, 0.5, "", b"", "{}", [1, 2]])
        else:
            record.pop(rng.choice(sorted(record)))
        content = RecordDict({rng.choice([RECORD] * 9 + ["other"]): ConfigRecord(record)})
        asked: tuple[Callable[[], Any], ...] = (
            lambda: Question.from_record(content, 3, 1),
            lambda: Question.from_record(content, 3, 1),
            lambda: Answer.from_record(content),
            lambda: read_refusal(content),
            lambda: read_facts(unpack(content)[0]),
        )
        rng.choice(asked)()

    return case


def _prepare_tasks(folder: Path) -> Case:
    from privrep.federated.task import TableTask, task_from_json
    from privrep.models.description import Columns, Config

    columns = Columns("user", ("y",), ("a", "b"), ("c",), (("x", "y"),))
    tasks: list[dict[str, Any]] = [TableTask(Config(2, 4.0, 1e-6), columns).to_json()]
    try:
        from privrep.federated.neural_task import NeuralTask

        tasks.append(
            NeuralTask(classes=3, epsilon=20.0, delta=1e-5, share="linear", rows=6, rounds=2, width=36).to_json()
        )
    except ImportError:
        pass
    written = [json.dumps(task).encode() for task in tasks]

    def case(rng: Random) -> None:
        try:
            given = json.loads(mutate_json(rng.choice(written), rng))
        except (ValueError, RecursionError):
            return  # it would be no message
        task_from_json(given)

    return case


TARGETS: dict[str, Target] = {
    "ledgers": Target(of_file("ledger.jsonl", _make_ledgers, _mutate_ledger, _open_ledger), 3),
    "population ledgers": Target(_prepare_population, 2),
    "pages": Target(_prepare_pages, 3),
    "CSV": Target(of_file("table.csv", _make_csvs, mutate_csv, _open_table), 3),
    "packed CSV": Target(of_file("table.csv.gz", _make_packed, mutate_bytes, _open_table)),
    "Parquet": Target(of_file("table.parquet", _make_parquets, mutate_footer, _open_table), 3),
    "Arrow": Target(of_file("frame.arrow", _make_frames, mutate_bytes, _open_frame)),
    "npz": Target(of_file("arrays.npz", _make_archives, mutate_archive, _open_archive), 2),
    "idx": Target(of_file("images.idx", _make_idx, mutate_bytes, _open_idx)),
    "images": Target(of_file("image", _make_images, mutate_bytes, _open_image)),
    "tables of images": Target(of_file("table.parquet", _make_image_tables, mutate_footer, _open_image_table)),
    "declared facts": Target(of_file("facts.json", _make_facts, mutate_json, _open_facts), 2),
    "steps": Target(_prepare_steps, 2),
    "messages": Target(_prepare_messages, 2),
    "tasks": Target(_prepare_tasks, 1),
    **{
        f"{name} configurations": Target(of_configuration(name))
        for name in ("fit", "fit-neural", "fit-clip", "federate")
    },
    **{
        f"models: {name}": Target(of_model(name))
        for name in ("numbers", "classes", "ratings", "selection", "a server", "network", "one user's network", "pairs")
    },
}
"""Everything that is tried, by name."""
