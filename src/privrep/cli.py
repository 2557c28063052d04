"""The command-line face of privrep. Heavy modules are imported by the commands that need them: --help stays quick."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from privrep import __version__
from privrep.errors import InputError, PrivrepError, ResumeError

if TYPE_CHECKING:
    from privrep.data.readers import TableSource
    from privrep.data.user_table import UserTable
    from privrep.heads import Heads
    from privrep.model import Columns, Config, Model

app = typer.Typer(
    name="privrep",
    help="Many users, little data each, one problem in common: learn the part they share under user-level differential "
    "privacy; each user keeps a small head of its own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A model folder, as `fit` made it.")]
TablePath = Annotated[Path, typer.Argument(metavar="TABLE", help="A Parquet or CSV file.")]
UserColumn = Annotated[str | None, typer.Option("--user", help="User column, if it is not named as in the fit.")]
FeatureColumns = Annotated[
    str | None, typer.Option("--features", help="Feature columns A,B,C, if not named as in the fit.")
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the app. What goes wrong on purpose is one sentence on stderr and exit code 2."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="privrep")
    except PrivrepError as error:
        _fail(str(error))
    except OSError as error:
        if error.filename is None:
            raise
        _fail(f"{error.filename}: {(error.strerror or str(error)).lower()}.")


def _fail(sentence: str) -> None:
    print(f"privrep: {sentence}", file=sys.stderr)
    sys.exit(2)


def _version(asked: bool) -> None:
    if asked:
        print(f"privrep {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


# demo


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder to write model, picture and some rows to.")] = Path("demo"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier demo there.")] = False,
) -> None:
    """Train privately on a made-up population of 20,000 users and compare. Takes seconds."""
    made = {"model", "picture.png", "new-rows.csv"}
    if out.exists():
        held = {path.name for path in out.iterdir()} if out.is_dir() else {"a file"}
        if held and not overwrite:
            raise InputError(f"{out} exists already; choose another --out, or pass --overwrite.")
        if not held <= made:
            raise InputError(f"{out} holds more than a demo ({min(held - made)}); choose another --out.")
    from privrep.demo import NOTE, run_demo

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        new = Path(scratch) / "demo"
        new.mkdir()
        with _progress(new / "model") as bar:
            rows = run_demo(new, on_page=bar.page)
        if out.exists():
            shutil.rmtree(out)
        os.replace(new, out)
    table = Table("method", "mean squared error", "epsilon", title="20,000 users, 50 features, rank 2, 10 rows each")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        epsilon = "no privacy" if row.epsilon is None else f"{row.epsilon:.3g}"
        table.add_row(row.method, f"{row.error:#.3g}", epsilon, style="bold" if row.private else "")
    _console().print(table)
    _say(NOTE)
    _say("Label noise alone gives an error of 0.0001. Epsilon 0: nothing about one user reaches another.")
    _say(f"Model: {out / 'model'}   picture: {out / 'picture.png'}")
    _say(f"Next: privrep inspect {out / 'model'}")
    _say(f"      privrep predict {out / 'model'} {out / 'new-rows.csv'} --out predictions.csv")


# fit


@app.command()
def fit(
    table: TablePath,
    user: Annotated[str, typer.Option(help="Column that names the user of each row.")],
    target: Annotated[str, typer.Option(help="Column to predict.")],
    epsilon: Annotated[float, typer.Option(help="Privacy budget, whole fit. Smaller is more private.")],
    delta: Annotated[float, typer.Option(help="Privacy budget, second part; well below 1 / number of users.")],
    out: Annotated[Path, typer.Option(help="Folder of the model. The same command continues a stopped fit.")],
    features: Annotated[str | None, typer.Option(help="Columns A,B,C; all other numeric columns if left out.")] = None,
    rank: Annotated[str, typer.Option(metavar="K|auto", help="Columns of the representation.")] = "auto",
    relation: Annotated[
        str, typer.Option(help="replace-one-user, or add-or-remove-one-user.", metavar="RELATION")
    ] = "replace-one-user",
    no_intercept: Annotated[bool, typer.Option("--no-intercept", help="Users have no intercepts.")] = False,
    no_safety_net: Annotated[
        bool, typer.Option("--no-safety-net", help="Every user uses the shared representation, helpful or not.")
    ] = False,
    scale: Annotated[
        Path | None, typer.Option(metavar="FILE", help='JSON file of public feature sizes: {"column": size, ...}.')
    ] = None,
    simulate: Annotated[
        int | None, typer.Option(metavar="SEED", help="Seeded noise: repeatable and NOT PRIVATE. For experiments.")
    ] = None,
    user_as_text: Annotated[
        bool, typer.Option("--user-as-text", help="CSV: ids that look like numbers are text (keeps leading zeros).")
    ] = False,
    workdir: Annotated[Path | None, typer.Option(help="Folder for temporary files; the system's if left out.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model or another run in --out.")] = False,
) -> None:
    """Learn a shared representation privately, and every user's head, from a table of (user, features, target)."""
    from privrep import model as models
    from privrep.data.readers import TableSource
    from privrep.engines.streaming import StreamingUsers
    from privrep.privacy.accounting import RELATIONS, check_budget
    from privrep.privacy.bounds import MAX_USERS

    check_budget(epsilon, delta)
    if relation not in RELATIONS:
        raise InputError(f"--relation must be one of {', '.join(RELATIONS)}. Got {relation!r} instead.")
    if simulate is not None and simulate < 0:
        raise InputError(f"--simulate must be zero or a positive integer. Got {simulate} instead.")
    wanted_rank = _rank(rank)
    _check_out(out, overwrite)
    source = TableSource(table, user, target, _names(features), user_as_text)
    config = models.Config(
        rank=wanted_rank,
        epsilon=epsilon,
        delta=delta,
        relation=relation,
        intercept=not no_intercept,
        safety_net=not no_safety_net,
        scale=None if scale is None else _read_scale(scale, source.feature_names),
        seed=simulate,
    )
    config.check(len(source.feature_names))
    columns = models.Columns(user, target, source.feature_names)
    left_out = [name for name in source.header if name not in source.columns]
    if features is None and left_out:
        listed = ", ".join(left_out[:8]) + (", ..." if len(left_out) > 8 else "")
        _note(f"Not numbers, so not features: {listed}. Name the features with --features to be sure.")
    try:
        with _progress(out) as bar, StreamingUsers.open(source, workdir) as users:
            if users.count > MAX_USERS:
                raise InputError(f"{table} has {users.count:,} users; one fit takes at most {MAX_USERS:,}.")
            _make_room(out, config, columns, overwrite)
            fitted = models.learn(users, config, folder=out, columns=columns, on_page=bar.page)
            bar.heads(users.count)
            heads = _fit_heads(users.blocks(), fitted, bar.users)
        models.finish(models.with_heads(fitted, heads), out)
    except KeyboardInterrupt:
        kept = (out / "run.json").is_file()
        after = (
            f"{out} keeps what was done: run the same command to continue; nothing is spent twice."
            if kept
            else "nothing was written."
        )
        print(f"privrep: stopped; {after}", file=sys.stderr)
        raise typer.Exit(130) from None
    report, k = fitted.privacy, fitted.representation.basis.shape[1]
    _say(f"Model: {out}")
    _say(f"Privacy: epsilon {report.epsilon:.4g} of {epsilon:g} spent, delta {delta:g}, user level, {relation}")
    _say(f"Users: {len(heads.ids):,}; rank {k} of {users.features} features")
    _say(_kinds(heads))
    if report.seeded:
        _shout("SEEDED NOISE: this is a simulation and NOT PRIVATE. Do not publish it.")
    else:
        _say(f"All of {out} but {out / 'private'} may be published; the heads in there belong to their users.")
    _say(f"Predict with: privrep predict {out} TABLE --out FILE     What it means: privrep inspect {out}")


def _rank(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise InputError(f"--rank must be a positive integer or auto. Got {text!r} instead.") from None


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _read_scale(path: Path, features: tuple[str, ...]) -> tuple[float, ...]:
    try:
        sizes = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise InputError(f"--scale: {path} is not JSON ({error}).") from None
    if not isinstance(sizes, dict):
        raise InputError(f'--scale: {path} must hold {{"column": size, ...}}.')
    for name in features:
        size = sizes.get(name)
        if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size < float("inf"):
            raise InputError(f"--scale: {path} gives no positive number for feature {name!r}.")
    return tuple(float(sizes[name]) for name in features)


def _check_out(out: Path, overwrite: bool) -> None:
    """Refuse a folder that cannot be the model's, before anything is read."""
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(f"--out: {out} is a file; name a folder.")
    if (out / "model.json").is_file():
        if not overwrite:
            raise InputError(f"--out: {out} holds a finished model; choose another folder, or pass --overwrite.")
    elif not (out / "run.json").is_file() and any(out.iterdir()):
        raise InputError(f"--out: {out} is not empty and holds no run of privrep; choose another folder.")


def _make_room(out: Path, config: Config, columns: Columns, overwrite: bool) -> None:
    """Say that a run is continued, or remove what --overwrite replaces: a model, or a run with other settings."""
    from privrep.report.words import inspect_folder

    if not out.exists() or not any(out.iterdir()):
        return
    found = inspect_folder(out)
    spent = f"epsilon {found.privacy.epsilon:.4g} at delta {found.privacy.delta:g}"
    if not found.finished:
        if (found.config, found.columns) == (config, columns):
            _note(f"Continuing the run in {out}; {spent} was spent before.")
            return
        if not overwrite:
            raise ResumeError(
                f"{out} holds a run with other settings or columns; continue it with the same options, choose another "
                "--out, or pass --overwrite to drop it."
            )
    with _sole_owner(out / "ledger.jsonl"):
        shutil.rmtree(out)
    _note(f"Replaced {out}. It had spent {spent}: for users who are in both, the two fits add up.")


@contextmanager
def _sole_owner(ledger: Path) -> Iterator[None]:
    """Refuse to touch a run that another process is working on."""
    import fcntl

    if not ledger.is_file():
        yield
        return
    with open(ledger, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"{ledger.parent} is in use by another process; wait for it, or choose another --out."
            ) from None
        yield


def _fit_heads(
    blocks: Iterable[UserTable], fitted: Model, on_users: Callable[[int], None] = lambda count: None
) -> Heads:
    """Heads a few blocks at a time: never more of the table in memory than those."""
    from privrep.engines.base import default_workers
    from privrep.heads import Heads, fit_heads

    parts, waiting = [], iter(blocks)
    while some := list(islice(waiting, 4 * default_workers())):
        c = fitted.config
        parts.append(fit_heads(some, fitted.representation, intercept=c.intercept, safety_net=c.safety_net))
        on_users(len(parts[-1].ids))
    return Heads.join(parts)


def _kinds(heads: Heads) -> str:
    """How many users use which kind of head. Computed on users' data: for the owner's eyes."""
    counts = [int((heads.kind == kind).sum()) for kind in range(3)]
    return (
        f"Heads: {counts[0]:,} on the shared representation, {counts[1]:,} a regression of their own, {counts[2]:,} a "
        "constant (not private: for your eyes)"
    )


# personalize


@app.command()
def personalize(
    folder: Folder,
    table: TablePath,
    out: Annotated[
        Path | None, typer.Option(help="Write the heads to this .json, .csv or .parquet file instead.")
    ] = None,
    user_id: Annotated[
        str | None, typer.Option(help="The table has no user column: all its rows are this user's.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Users who have a head already get a new one.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file --out.")] = False,
    user: UserColumn = None,
    target: Annotated[str | None, typer.Option(help="Target column, if it is not named as in the fit.")] = None,
    features: FeatureColumns = None,
) -> None:
    """Heads for users who were not in the fit, from their own rows and the public representation. Costs no privacy.

    Without --out they join the heads in FOLDER/private. With --out they go to a file of weights that only you can read.
    """
    import numpy as np

    from privrep import model as models
    from privrep.data.user_table import find_users
    from privrep.engines.streaming import StreamingUsers
    from privrep.heads import Heads
    from privrep.report.words import load_model

    if out is not None:
        _check_file(out, overwrite, (".json", ".csv", ".parquet"))
        if replace:
            raise InputError("--replace is for the heads in the model folder; with --out use --overwrite.")
    fitted = load_model(folder)
    target = target or fitted.columns.target
    if not target:
        raise InputError(f"{folder} was fitted on arrays and names no target column; pass --target.")
    with _with_user_column(table, fitted, user, user_id) as (path, column):
        source = _source(path, fitted, column, target, features)
        with StreamingUsers.open(source) as users:
            new = _fit_heads(users.blocks(), fitted)
    old = fitted.heads
    if out is not None:
        _write_weights(new, fitted, source.feature_names, out)
        _say(f"{len(new.ids):,} {'head' if len(new.ids) == 1 else 'heads'}: {out} (readable by you alone)")
        return
    if old is not None:
        if _id_kind(old.ids) != _id_kind(new.ids):
            raise InputError(
                f"the users of {table} are {_id_kind(new.ids)}, those of {folder} are {_id_kind(old.ids)}."
            )
        position = find_users(old.ids, new.ids)
        known = position >= 0
        if known.any() and not replace:
            raise InputError(
                f"user {new.ids[known].tolist()[0]!r} of {table} has a head in {folder} already; leave it out, "
                "or pass --replace."
            )
        stay = np.ones(len(old.ids), dtype=bool)
        stay[position[known]] = False
        new = Heads.join([_only(old, stay), new])
    models.write_heads(new, folder)
    before = 0 if old is None else len(old.ids)
    _say(f"{len(new.ids) - before:,} users more, {len(new.ids):,} in all, in {folder / 'private'}")


@contextmanager
def _with_user_column(table: Path, fitted: Model, user: str | None, user_id: str | None) -> Iterator[tuple[Path, str]]:
    """The table and its user column. Where it has none, a private copy that has one, for as long as it is needed."""
    import csv

    import pyarrow as pa
    import pyarrow.parquet as pq

    from privrep.data.readers import SUFFIXES

    column = user or fitted.columns.user
    if user_id is None:
        if not column:
            raise InputError("the model was fitted on arrays and names no user column; pass --user, or --user-id.")
        yield table, column
        return
    column = column or "user"
    kind = next((kind for suffix, kind in SUFFIXES.items() if table.name.lower().endswith(suffix)), None)
    if kind is None:
        raise InputError(f"{table} does not end in {', '.join(SUFFIXES)}; convert the file to one of these.")
    if not table.is_file():
        raise InputError(f"there is no file {table}; check the path.")
    name: str | int = _as_id(user_id, fitted)
    with tempfile.TemporaryDirectory(prefix="privrep-") as scratch:
        copy = Path(scratch) / f"rows.{kind}"
        if kind == "parquet":
            rows = pq.read_table(table)
            header = rows.column_names
        else:
            with _open_text(table, "r") as file:
                lines = [line for line in csv.reader(file) if line]
            header = lines[0] if lines else []
        if column in header:
            raise InputError(f"{table} has a user column, {column!r}; leave --user-id out.")
        if kind == "parquet":
            pq.write_table(rows.append_column(column, pa.array([name] * len(rows))), copy)
        else:
            with _open_text(copy, "w") as file:
                csv.writer(file).writerows([column if i == 0 else name, *line] for i, line in enumerate(lines))
        try:
            yield copy, column
        except InputError as error:
            raise InputError(str(error).replace(str(copy), str(table))) from None


def _as_id(text: str, fitted: Model) -> str | int:
    if fitted.heads is None or fitted.heads.ids.dtype.kind not in "iu":
        return text
    try:
        return int(text)
    except ValueError:
        raise InputError(f"--user-id must be an integer, as the ids of this model are. Got {text!r} instead.") from None


def _only(heads: Heads, chosen: Any) -> Heads:
    """The heads at the chosen positions (a mask)."""
    import numpy as np

    from privrep.heads import Heads

    position = heads.own_position[chosen]
    has = position >= 0
    return Heads(
        heads.ids[chosen],
        heads.kind[chosen],
        heads.intercept[chosen],
        heads.shared[chosen],
        np.where(has, np.cumsum(has) - 1, -1),
        heads.own[position[has]],
    )


def _write_weights(heads: Heads, fitted: Model, features: tuple[str, ...], out: Path) -> None:
    """Every user's linear model in the original features: prediction = intercept + sum of weight * feature."""
    import csv

    import pyarrow as pa
    import pyarrow.parquet as pq

    from privrep.heads import KINDS

    kinds = [KINDS[kind] for kind in heads.kind]
    weights = heads.weights(fitted.representation)
    table = {"user": heads.ids.tolist(), "kind": kinds, "intercept": heads.intercept.tolist()}
    with _new_file(out, owner_only=True) as temporary:
        if out.suffix.lower() == ".json":
            people = [
                {
                    **dict(zip(table, row, strict=True)),
                    "weights": dict(zip(features, line.tolist(), strict=True)),
                }
                for row, line in zip(zip(*table.values(), strict=True), weights, strict=True)
            ]
            temporary.write_text(
                json.dumps({"prediction": "intercept + sum of weight * feature", "heads": people}, indent=1)
            )
            return
        table |= {f"weight_{name}": weights[:, j].tolist() for j, name in enumerate(features)}
        if out.suffix.lower() == ".csv":
            with open(temporary, "w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows([list(table), *zip(*table.values(), strict=True)])
        else:
            pq.write_table(pa.table(table), temporary)


# predict


@app.command()
def predict(
    folder: Folder,
    table: TablePath,
    out: Annotated[Path, typer.Option(help="File to write: .parquet, .csv or .csv.gz.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file --out.")] = False,
    user: UserColumn = None,
    features: FeatureColumns = None,
) -> None:
    """Predict every row of a table by its user's own head: the same table with one more column, `prediction`."""
    from privrep.data.readers import SUFFIXES
    from privrep.report.words import load_model

    _check_file(out, overwrite, tuple(SUFFIXES))
    fitted = load_model(folder)
    if fitted.heads is None:
        raise InputError(f"{folder} holds no heads (private/); make some with: privrep personalize {folder} TABLE")
    column = user or fitted.columns.user
    if not column:
        raise InputError(f"{folder} was fitted on arrays and names no user column; pass --user.")
    source = _source(table, fitted, column, None, features)
    if "prediction" in source.header:
        raise InputError(f"{table} has a column 'prediction' already; rename it first.")
    rows = 0
    with _new_file(out) as temporary:
        open_sink = _text_sink if (source.format, SUFFIXES[_suffix(out)]) == ("csv", "csv") else _arrow_sink
        with open_sink(source, temporary, _suffix(out)) as sink:
            for predictions in _predictions(source, fitted, folder):
                sink(predictions)
                rows += len(predictions)
    _say(f"{rows:,} rows with their prediction: {out} (made by private heads: not covered by the privacy guarantee)")


def _predictions(source: TableSource, fitted: Model, folder: Path) -> Iterator[Any]:
    """Arrays of predictions, batch by batch, in the order of the rows."""
    import numpy as np

    from privrep.data.readers import checked_batches, column_values, fill_rows, user_ids

    assert fitted.heads is not None
    ids, rows = fitted.heads.ids, 0
    order = np.argsort(ids)
    ordered = ids[order]
    for batch in checked_batches(source):
        users = user_ids(batch.column(0))
        if _id_kind(users) != _id_kind(ids):
            raise InputError(
                f"the users in column {source.user!r} of {source.path} are {_id_kind(users)}, those of {folder} are "
                f"{_id_kind(ids)}."
            )
        spot = np.minimum(np.searchsorted(ordered, users), len(ids) - 1)
        missing = np.flatnonzero(ordered[spot] != users)
        if len(missing):
            raise InputError(
                f"user {users.tolist()[missing[0]]!r} in row {rows + int(missing[0]) + 1} of {source.path} has no head "
                f"in {folder}; make one from some rows with their target: privrep personalize {folder} TABLE"
            )
        X = fill_rows(
            np.empty((batch.num_rows, len(source.feature_names)), source.dtype),
            [column_values(column) for column in batch.columns[1:]],
        )
        yield fitted.heads.predict(fitted.representation, X, order[spot])
        rows += batch.num_rows


Sink = Callable[[Any], None]


@contextmanager
def _text_sink(source: TableSource, path: Path, suffix: str) -> Iterator[Sink]:
    """CSV to CSV: the next rows of the source, their text as it stands there, each with its prediction."""
    import csv

    with _open_text(Path(source.path), "r") as given, _open_text(path, "w", suffix.endswith(".gz")) as file:
        lines = (line for line in csv.reader(given) if line)
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*next(lines), "prediction"])

        def write(predictions: Any) -> None:
            rows = list(islice(lines, len(predictions)))
            if len(rows) != len(predictions) or any(len(row) != len(source.header) for row in rows):
                raise InputError(f"{source.path} has values with line breaks in them; take them out, or use Parquet.")
            writer.writerows([*row, prediction] for row, prediction in zip(rows, predictions.tolist(), strict=True))

        yield write


@contextmanager
def _arrow_sink(source: TableSource, path: Path, suffix: str) -> Iterator[Sink]:
    """From or to Parquet: the next rows of the source, all columns, each with its prediction."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet as pq

    take = _tables(source)
    with ExitStack() as files:
        writer: Any = None

        def write(predictions: Any) -> None:
            nonlocal writer
            rows = take(len(predictions)).append_column("prediction", pa.array(predictions, pa.float64()))
            try:
                if writer is not None:
                    pass
                elif suffix in (".csv", ".csv.gz"):
                    # by name of the format: the temporary file has another ending
                    stream = pa.output_stream(str(path), compression="gzip" if suffix.endswith(".gz") else None)
                    writer = files.enter_context(pyarrow.csv.CSVWriter(files.enter_context(stream), rows.schema))
                else:
                    writer = files.enter_context(pq.ParquetWriter(path, rows.schema))
                writer.write_table(rows)
            except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
                reason = str(error).splitlines()[0]
                raise InputError(f"{source.path} has a column that --out cannot hold ({reason}).") from None

        yield write


def _tables(source: TableSource) -> Callable[[int], Any]:
    """take(n): the next n rows of the file, all columns, as an Arrow table."""
    import pyarrow as pa

    batches = _full_batches(source)
    waiting: list[Any] = []

    def take(count: int) -> Any:
        nonlocal waiting
        try:
            while sum(batch.num_rows for batch in waiting) < count:
                waiting.append(next(batches))
        except pa.ArrowException as error:
            reason = str(error).splitlines()[0]
            raise InputError(
                f"{source.path}: {reason}; write to a .csv file, which keeps every value as text."
            ) from None
        except StopIteration:
            raise InputError(f"{source.path} changed while it was read; run the command again.") from None
        rows = pa.Table.from_batches(waiting)
        waiting = rows.slice(count).to_batches()
        return rows.slice(0, count)

    return take


def _full_batches(source: TableSource) -> Iterator[Any]:
    import pyarrow.csv
    import pyarrow.parquet as pq

    if source.format == "parquet":
        with pq.ParquetFile(source.path, buffer_size=1 << 16, pre_buffer=False) as file:
            yield from file.iter_batches(1 << 14)
        return
    types = {column.name: column.type for column in source.schema}
    convert = pyarrow.csv.ConvertOptions(column_types=types)
    with pyarrow.csv.open_csv(source.path, convert_options=convert) as reader:
        yield from reader


# inspect


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A model folder, or that of an unfinished run.")],
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """What was spent and what it means: what is protected, against whom, and what is not."""
    from privrep.report import words

    found = words.inspect_folder(folder)
    if as_json:
        print(json.dumps(words.as_json(found), indent=2))
        return
    console = _console()
    state = "a fitted model" if found.finished else "a run that was NOT FINISHED"
    console.print(f"{folder}: {state}", style="bold", soft_wrap=True)
    if found.privacy.seeded:
        _shout(words.SEEDED)
    for heading, sentences in words.sections(found):
        console.print(f"\n{heading}", style="bold")
        for sentence in sentences:
            loud = "bold red" if sentence == words.SEEDED else ""
            grid = Table.grid(padding=(0, 1))
            grid.add_row("-", sentence, style=loud)
            console.print(Padding(grid, (0, 0, 0, 2)))
    table = Table(
        "release", "what for", "noise multiplier", "share of budget", title="The ledger", title_justify="left"
    )
    for spent in found.releases:
        table.add_row(spent.name, spent.purpose, f"{spent.noise_multiplier:.4g}", f"{spent.share:.1%}")
    left = max(1 - sum(spent.share for spent in found.releases), 0.0)
    if left > 5e-4:
        table.add_row("", "not spent", "", f"{left:.1%}")
    _right(table, 2, 3)
    console.print()
    console.print(table)
    console.print(NOISE_MULTIPLIER, style="dim")


NOISE_MULTIPLIER = (
    "Noise multiplier: standard deviation of the noise over the most that one user can change the sum. "
    "Shares are of mu², which adds up over releases as 1 / multiplier²."
)


# budget


@app.command()
def budget(
    delta: Annotated[float, typer.Option(help="Privacy budget, second part.")],
    epsilon: Annotated[float | None, typer.Option(help="Privacy budget: what noise does it ask for?")] = None,
    noise: Annotated[float | None, typer.Option(help="Noise multiplier: what epsilon does it cost?")] = None,
    releases: Annotated[int, typer.Option(help="With --noise: how many releases with that noise.")] = 1,
    features: Annotated[int | None, typer.Option(help="With --epsilon: how many users does a problem need?")] = None,
    rank: Annotated[int | None, typer.Option(help="Columns of the representation, for --features.")] = None,
    rows: Annotated[int | None, typer.Option(help="Rows of each user, for --features.")] = None,
    noise_level: Annotated[
        float, typer.Option(help="Noise of the target as a multiple of what a user's own best model explains.")
    ] = 0.5,
    relation: Annotated[str, typer.Option(help="For --features: the relation of the fit.")] = "replace-one-user",
) -> None:
    """What a budget buys: epsilon to noise, noise to epsilon, or roughly how many users a problem needs."""
    from privrep import planning
    from privrep.privacy.accounting import RELATIONS
    from privrep.privacy.ledger import Budget

    if (epsilon is None) == (noise is None):
        raise InputError("give either --epsilon or --noise.")
    if noise is not None:
        if (features, rank, rows) != (None, None, None):
            raise InputError("--features, --rank and --rows go with --epsilon, not with --noise.")
        cost = planning.epsilon_of_releases(noise, releases, delta)
        what = "1 release" if releases == 1 else f"{releases} releases"
        _say(f"{what} with noise multiplier {noise:g}: epsilon {cost:.6g} at delta {delta:g}")
        return
    assert epsilon is not None
    if releases != 1:
        raise InputError("--releases goes with --noise, not with --epsilon.")
    if relation not in RELATIONS:
        raise InputError(f"--relation must be one of {', '.join(RELATIONS)}. Got {relation!r} instead.")
    whole = Budget(epsilon, delta, relation)
    console = _console()
    if (features, rank, rows) == (None, None, None):
        _say(f"epsilon {epsilon:g}, delta {delta:g}: mu {whole.mu:.6g}")
        _say(f"One release that spends it all: noise multiplier {1 / whole.mu:.6g}")
        table = Table("release of a default fit", "share of budget", "noise multiplier")
        for planned in planning.default_releases(whole):
            table.add_row(planned.name, f"{planned.share:.1%}", f"{planned.noise_multiplier:.4g}")
        _right(table, 1, 2)
        console.print(table)
        console.print(NOISE_MULTIPLIER, style="dim")
        return
    if features is None or rank is None or rows is None:
        missing = next(
            name for name, value in (("features", features), ("rank", rank), ("rows", rows)) if value is None
        )
        raise InputError(f"--features, --rank and --rows go together; --{missing} is missing.")
    problem = planning.Problem(features, rank, rows, noise_level)
    table = Table("what you want", "users you need, roughly")
    for need in planning.needs(problem, whole):
        table.add_row(need.goal, "more than one fit takes" if need.users is None else f"{need.users:,}")
    _right(table, 1)
    _say(
        f"{features} features, rank {rank}, {rows} rows each, noise {noise_level:g} x signal; epsilon {epsilon:g}, "
        f"delta {delta:g}, {relation}"
    )
    console.print(table)
    console.print(
        "Rough: mostly within a factor of two for uncorrelated features and users who differ in all directions alike. "
        "Real data needs more. The step from nothing to found is sudden: plan above it.",
        style="dim",
    )


# What the commands share


class _Bar:
    """Progress of a fit: pages of the billboard, epsilon spent so far, then heads."""

    def __init__(self, progress: Any, folder: Path, pages: int) -> None:
        self._progress, self._folder = progress, folder
        self._task = progress.add_task("reading", total=pages)

    def page(self, name: str) -> None:
        from privrep.privacy.ledger import read_report

        spent = read_report(self._folder / "ledger.jsonl").epsilon
        text = f"{name.replace('-', ' ')}, epsilon {spent:.3f} spent"
        self._progress.update(self._task, description=text, advance=1)

    def heads(self, users: int) -> None:
        self._progress.remove_task(self._task)
        self._task = self._progress.add_task("heads", total=users)

    def users(self, count: int) -> None:
        self._progress.update(self._task, advance=count)


@contextmanager
def _progress(folder: Path) -> Iterator[_Bar]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from privrep.model import PAGES

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield _Bar(progress, folder, PAGES)


def _source(table: Path, fitted: Model, user: str, target: str | None, features: str | None) -> TableSource:
    """A table's columns as the model needs them."""
    from privrep.data.readers import TableSource

    text = fitted.heads is not None and fitted.heads.ids.dtype.kind not in "iuf"
    names = _names(features) or list(fitted.columns.features) or None
    source = TableSource(table, user, target, names, user_as_text=text)
    wanted = len(fitted.representation.scale)
    if len(source.feature_names) != wanted:
        raise InputError(
            f"the model has {wanted} features; {table} gives {len(source.feature_names)}. Pass --features."
        )
    return source


def _id_kind(ids: Any) -> str:
    kind: str = ids.dtype.kind
    return "integers" if kind in "iu" else "decimal numbers" if kind == "f" else "text"


def _check_file(out: Path, overwrite: bool, suffixes: tuple[str, ...]) -> None:
    if not out.name.lower().endswith(suffixes):
        raise InputError(f"--out: {out} must end in {', '.join(suffixes)}.")
    if out.is_dir():
        raise InputError(f"--out: {out} is a folder; name a file.")
    if out.exists() and not overwrite:
        raise InputError(f"--out: {out} exists already; choose another name, or pass --overwrite.")
    if not out.absolute().parent.is_dir():
        raise InputError(f"--out: there is no folder {out.parent}; make it first.")


def _suffix(path: Path) -> str:
    from privrep.data.readers import SUFFIXES

    return max((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), key=len)


@contextmanager
def _new_file(path: Path, *, owner_only: bool = False) -> Iterator[Path]:
    """A path to write to that becomes `path` when all went well, and nothing when it did not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if owner_only else 0o666))
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _open_text(path: Path, mode: str, compressed: bool | None = None) -> Any:
    import gzip

    encoding = "utf-8-sig" if mode == "r" else "utf-8"
    if compressed if compressed is not None else path.suffix.lower() == ".gz":
        return gzip.open(path, f"{mode}t", newline="", encoding=encoding)
    return open(path, mode, newline="", encoding=encoding)


def _console() -> Console:
    return Console(highlight=False, markup=False)


def _right(table: Table, *columns: int) -> None:
    for column in columns:
        table.columns[column].justify = "right"


def _say(text: str) -> None:
    _console().print(text, soft_wrap=True)


def _note(text: str) -> None:
    Console(stderr=True, highlight=False, markup=False).print(text, soft_wrap=True)


def _shout(text: str) -> None:
    _console().print(text, style="bold red")


if __name__ == "__main__":
    main()
