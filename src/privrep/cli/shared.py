"""What several commands need: options, the console, progress, files."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from privrep.errors import InputError

if TYPE_CHECKING:
    from privrep.data.categories import Categories
    from privrep.data.readers import TableSource
    from privrep.data.table import UserTable
    from privrep.models.model import Model
    from privrep.privacy.accounting import Relation

# Options

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A model folder, as `fit` made it.")]
TablePath = Annotated[Path, typer.Argument(metavar="TABLE", help="A Parquet or CSV file.")]
UserColumn = Annotated[str | None, typer.Option("--user", help="User column, if it is not named as in the fit.")]
FeatureColumns = Annotated[
    str | None, typer.Option("--features", help="Columns of numbers A,B,C, if not named as in the fit.")
]
ItemColumn = Annotated[
    str | None, typer.Option("--item", help="Ratings: item column, if it is not named as in the fit.")
]


def split_names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def check_relation(text: str) -> Relation:
    from privrep.privacy.accounting import RELATIONS

    if text not in RELATIONS:
        raise InputError(f"--relation must be one of {', '.join(RELATIONS)}. Got {text!r} instead.")
    return text


# The console

NOISE_MULTIPLIER = (
    "Noise multiplier: standard deviation of the noise over the most that one user can change the sum. "
    "Shares are of mu², which adds up over releases as 1 / multiplier²."
)


def console() -> Console:
    return Console(highlight=False, markup=False)


def say(text: str) -> None:
    console().print(text, soft_wrap=True)


def note(text: str) -> None:
    Console(stderr=True, highlight=False, markup=False).print(text, soft_wrap=True)


def shout(text: str) -> None:
    console().print(text, style="bold red")


def right(table: Table, *columns: int) -> None:
    for column in columns:
        table.columns[column].justify = "right"


# Progress


class Bar:
    """Progress on the operator's screen: pages and the epsilon spent so far, images encoded, steps, heads."""

    def __init__(self, shown: Any, folder: Path | None = None) -> None:
        self._shown, self._folder, self._task, self._loss = shown, folder, None, ""

    @property
    def visible(self) -> bool:
        """Whether anyone sees it: elsewhere than on a terminal nothing is computed for it."""
        return not self._shown.disable

    def begin(self, what: str, total: int) -> None:
        """Show a new bar in place of the old one."""
        if self._task is not None:
            self._shown.remove_task(self._task)
        self._task = self._shown.add_task(what, total=total)

    def at(self, done: int, /) -> None:
        self._shown.update(self._task, completed=done)

    def page(self, name: str, epsilon: float | None = None) -> None:
        """Count a page that was posted; without an epsilon, what was spent is read from the folder's ledger."""
        if not self.visible:
            return
        if epsilon is None and self._folder is not None:
            from privrep.privacy.ledger import read_report

            epsilon = read_report(self._folder / "ledger.jsonl").epsilon
        text = f"{name.replace('-', ' ')}, epsilon {epsilon:.3f} spent{self._loss}"
        self._shown.update(self._task, description=text, advance=1)

    def loss(self, page: str, loss: float) -> None:
        """Show, from the next page on, a training loss that is not private."""
        self._loss = f", training loss about {loss:.3f} (not private)"

    def heads(self, blocks: Iterable[UserTable], users: int) -> Iterator[UserTable]:
        """The same blocks; the bar moves as they are taken."""
        self.begin("heads", users)
        for block in blocks:
            yield block
            self._shown.update(self._task, advance=block.n_users)


@contextmanager
def progress(folder: Path | None = None) -> Iterator[Bar]:
    """Show a bar on a terminal, and nothing elsewhere; `folder` is that of the run whose pages it counts."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        yield Bar(shown, folder)


# Tables and files


def open_table(
    table: Path,
    fitted: Model,
    user: str,
    targets: Sequence[str] | None,
    features: str | None = None,
    item: str | None = None,
) -> TableSource:
    """A table's columns as the model needs them."""
    from privrep.data.readers import TableSource

    lists = _lists(fitted, features, item)
    _check_kinds(table, user, lists, fitted.config.ratings)
    text = fitted.heads is None or id_kind(fitted.heads.ids) == "text"  # no heads to tell: keep ids as they are written
    names = split_names(features)
    if names is None and (fitted.columns.features or lists):
        names = list(fitted.columns.features)
    categories: Any = lists or None
    classes = fitted.columns.classes if targets is not None else ()
    source = TableSource(table, user, targets, names, text, categories, classes or None)
    wanted = len(fitted.representation.scale)
    if len(source.feature_names) != wanted:
        raise InputError(
            f"the model has {wanted} features; {table} gives {len(source.feature_names)}. Pass --features."
        )
    return source


def _lists(fitted: Model, features: str | None, item: str | None) -> dict[str, Categories]:
    """The columns of categories and their lists, under the names they have in this table."""
    lists = fitted.columns.by_category
    if fitted.config.ratings and features is not None:
        raise InputError("this is a model of ratings, which has items rather than features; leave --features out.")
    if item is None:
        return lists
    if not fitted.config.ratings:
        raise InputError("this is no model of ratings; leave --item out.")
    return {item: fitted.columns.categories[0]}


def _check_kinds(table: Path, user: str, lists: Mapping[str, Categories], ratings: bool) -> None:
    """The columns of categories must be there and, where a file declares types, hold what the lists hold."""
    from privrep.data.files import file_format, file_schema, is_text, require
    from privrep.data.readers import BATCH_BYTES

    found: Any = file_schema(table, user, BATCH_BYTES // 4) if lists else None
    for name, listed in lists.items():
        require(name, "--item" if ratings else "categories", table, found.names)
        if file_format(table) == "csv":
            continue
        declared = found.field(name).type
        kind, wanted = getattr(declared, "value_type", declared), isinstance(listed[0], str)
        if is_text(kind) != wanted:
            raise InputError(
                f"column {name!r} of {table} holds values of type {declared}, the model knows "
                f"{'text' if wanted else 'integers'} there; convert the column."
            )


def id_kind(ids: Any) -> str:
    kind: str = ids.dtype.kind
    return "integers" if kind in "iu" else "decimal numbers" if kind == "f" else "text"


def suffix_of(path: Path, suffixes: Iterable[str]) -> str | None:
    return next((suffix for suffix in suffixes if path.name.lower().endswith(suffix)), None)


def check_file(out: Path, overwrite: bool, suffixes: Iterable[str], folder: Path) -> str:
    """Refuse a file that cannot be written or has no place in the model folder, before anything is read.

    Returns its suffix.
    """
    suffix = suffix_of(out, suffixes)
    if suffix is None:
        raise InputError(f"--out: {out} must end in {', '.join(suffixes)}.")
    real, private = out.resolve(), folder.resolve() / "private"
    model = (folder / "model.json").is_file()
    if model and real.is_relative_to(private.parent) and not real.is_relative_to(private):
        raise InputError(
            f"--out: {out} would be private and in {folder}, where everything outside {folder / 'private'} may be "
            "published; choose another place."
        )
    if real == private / "heads.parquet":
        raise InputError(f"--out: {out} holds the heads of the model itself; choose another name.")
    if out.is_dir():
        raise InputError(f"--out: {out} is a folder; name a file.")
    if out.exists() and not overwrite:
        raise InputError(f"--out: {out} exists already; choose another name, or pass --overwrite.")
    if not out.absolute().parent.is_dir():
        raise InputError(f"--out: there is no folder {out.parent}; make it first.")
    return suffix


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A path to write to that becomes `path`, readable by its owner only, when all went well; nothing when not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def open_text(path: Path, mode: str, *, packed: bool) -> IO[str]:
    """A CSV file as text, bytes that are not UTF-8 kept as they are."""
    opened: Any = gzip.open if packed else open
    encoding = "utf-8-sig" if mode == "r" else "utf-8"
    file: IO[str] = opened(path, f"{mode}t", newline="", encoding=encoding, errors="surrogateescape")
    return file
