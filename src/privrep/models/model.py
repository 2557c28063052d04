"""A fitted model: the public part (representation, ledger, billboard) and the users' heads, in memory and in a folder.

folder/model.json        settings and column names; written last, so a folder without it is a run under way
folder/ledger.jsonl      every charge
folder/billboard/        every release and what was computed from it
folder/private/          the heads, readable by the owner only; all the rest is safe to publish
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from privrep.data.categories import MOST_CLASSES, Categories
from privrep.errors import InputError, ResumeError
from privrep.heads.fitting import Heads
from privrep.linear.alternation import AlternationSettings
from privrep.local.losses import Loss
from privrep.local.representation import Representation, read_representation
from privrep.models.description import Columns as Columns
from privrep.models.description import Config as Config
from privrep.models.description import loss_of
from privrep.privacy.billboard import Billboard
from privrep.privacy.ledger import Budget, Ledger, PrivacyReport, read_ledger
from privrep.privacy.protocol import Users
from privrep.privacy.run import Run
from privrep.users.holders import KeyHolders

FORMAT = "privrep-model/2"
KEYS_SHARE = 0.05  # of mu^2, and of delta: for all lists of categories and classes that are not declared together
CLASSES_PAGE = "classes"  # on which they are selected


@dataclass(frozen=True)
class Model:
    """Everything a fit leaves behind."""

    config: Config
    representation: Representation
    privacy: PrivacyReport
    ledger: Ledger = field(repr=False)
    billboard: Billboard = field(repr=False)
    columns: Columns = field(default_factory=Columns)
    heads: Heads | None = None

    @property
    def loss(self) -> Loss | None:
        """What the heads minimise; None: squares."""
        return loss_of(self.config, self.columns)

    @property
    def classes_selected(self) -> bool:
        """Whether the classes were selected privately rather than declared."""
        return CLASSES_PAGE in self.billboard


@dataclass(frozen=True)
class PendingColumns:
    """Users whose rows wait for lists of categories or classes, which are private until they are selected.

    `holders` has, by column, who holds which category, where no list was declared; `labels` who has which label, where
    no classes were. `make` makes the users once all lists are known, in the order of `Columns.categorical`.
    """

    holders: dict[str, KeyHolders]
    make: Callable[[Columns], Users]
    labels: KeyHolders | None = None


def learn(
    users: Users | PendingColumns,
    config: Config,
    *,
    folder: Path | None = None,
    columns: Columns | None = None,
    on_page: Callable[[str], None] | None = None,
) -> Model:
    """Learn the representation privately. With a folder every charge and page is on disk before it is used.

    Calling it again on the same folder continues a run that was stopped: pages that stand are read, not asked again.
    Formal guarantee: the returned model without heads, and the folder, are (epsilon, delta)-DP as its ledger states.
    """
    columns = columns or Columns()
    config.check()
    config.check_columns(columns)
    if not isinstance(users, PendingColumns):
        config.check(users.facts.features)
        config.check_users(users)
    if not isinstance(users, PendingColumns) or users.labels is None:
        loss_of(config, columns)  # refuses labels whose classes are neither there nor to be selected
    if folder is not None:
        _claim(folder, config, columns, users)
    budget, told = Budget(config.epsilon, config.delta, config.relation), on_page or (lambda page: None)
    known = None if isinstance(users, PendingColumns) else users
    with Run.open(known, budget, seed=config.seed, folder=folder, on_release=lambda page, step: told(page)) as run:
        if isinstance(users, PendingColumns):
            columns = _select(users, columns, run)
            run = run.with_users(users.make(columns))
            config.check(run.users.facts.features)
            config.check_users(run.users)
        loss = loss_of(config, columns)
        representation = config.learner.learn(run, config.problem(run.users.facts.features, loss))
    return Model(config, representation, run.ledger.report(), run.ledger, run.billboard, columns)


def _select(users: PendingColumns, columns: Columns, run: Run) -> Columns:
    """The columns with all their lists of categories and classes, those that were not declared selected privately."""
    share, budget = KEYS_SHARE / max(len(users.holders) + (users.labels is not None), 1), run.ledger.budget
    mu_squared, delta = share * budget.mu**2, share * budget.delta

    if users.labels is not None:
        columns = replace(columns, classes=_enough(run.select(CLASSES_PAGE, users.labels, mu_squared, delta)))
    lists = dict(zip(columns.categorical, columns.categories, strict=True))
    for number, (column, holders) in enumerate(users.holders.items(), start=1):
        lists[column] = run.select(f"keys-{number}", holders, mu_squared, delta)
        if not lists[column]:
            raise InputError(
                f"no value of column {column!r} is held by enough users to be named at this epsilon: declare the "
                "list of its values if it is public. What was spent on finding out is spent."
            )
    return replace(columns, categories=tuple(lists[name] for name in columns.categorical))


def _enough(classes: Categories) -> Categories:
    if 2 <= len(classes) <= MOST_CLASSES:
        return classes
    what = (
        "fewer than two classes are held by enough users to be named at this epsilon: declare them"
        if len(classes) < 2
        else f"there are {len(classes):,} classes, more than {MOST_CLASSES:,}: merge some, or declare those that matter"
    )
    raise InputError(f"{what} (--classes, classes=) if they are public. What was spent on finding out is spent.")


PAGES = AlternationSettings().rounds + 4
"""About the most pages a fit asks for: what a progress bar counts to."""


def save(model: Model, folder: Path, *, overwrite: bool = False) -> None:
    """Write a model to a folder, all of it or nothing."""
    if folder.exists() and not overwrite:
        raise InputError(f"{folder} exists already. Choose another folder, or pass overwrite=True.")
    if folder.exists() and not (folder / "model.json").is_file():
        raise InputError(f"{folder} is not a model folder, so it is not overwritten. Choose another folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))  # for the owner only
    new, old = temporary / "new", temporary / "old"
    try:
        new.mkdir()
        model.ledger.write(new / "ledger.jsonl")
        model.billboard.write(new / "billboard")
        finish(model, new)
        os.chmod(new, 0o755)
        if folder.exists():
            os.replace(folder, old)
        os.replace(new, folder)
    except BaseException:
        if old.exists() and not folder.exists():
            os.replace(old, folder)  # should even this fail, the old model stays where it is now
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(temporary, ignore_errors=True)


def finish(model: Model, folder: Path) -> None:
    """Write the heads and, last, model.json into the folder of a run: from then on it is a model."""
    if model.heads is not None:
        write_heads(model.heads, folder)
    write_json(folder / "model.json", {"format": FORMAT, **_describe(model.config, model.columns)})
    (folder / "run.json").unlink(missing_ok=True)


def load(folder: Path) -> Model:
    """Read a model folder. One that is damaged, in whatever way, is an InputError."""
    path = folder / "model.json"
    if not path.is_file():
        unfinished = (folder / "run.json").is_file()
        raise InputError(
            f"{folder} holds a run that was not finished; call fit again with the same arguments to continue it."
            if unfinished
            else f"{folder} is not a model folder: it has no model.json."
        )
    with damage_explained(folder, "model.json"):
        data = json.loads(path.read_text())
        if str(data["format"]).startswith("privrep-neural/"):
            raise InputError(f"{folder} holds a neural model: read it in Python, by Centaur.load({str(folder)!r}).")
        if data["format"] != FORMAT:
            raise InputError(f"{path} is not a model this version of privrep can read ({FORMAT}).")
        config, columns = Config.from_json(data["config"]), Columns.from_json(data["columns"])
        loss = loss_of(config, columns)
    with damage_explained(folder, "billboard"):
        billboard = Billboard.read(folder / "billboard")
        if "representation" not in billboard:
            raise ValueError("there is no representation in it")
        page = billboard["representation"]
        representation = read_representation(page.arrays, page.facts["derived"])
        d, k = representation.matrix.shape
    with damage_explained(folder, "model.json"):
        config.check(d)
    with damage_explained(folder, "ledger.jsonl"):
        ledger = read_ledger(folder / "ledger.jsonl")
        report = ledger.report()
    heads = None
    if (folder / "private" / "heads.parquet").is_file():
        with damage_explained(folder, "private/heads.parquet"):
            heads = read_heads(folder)
            if (heads.shared.shape[1], heads.own.shape[1]) != (k, d):
                raise ValueError("its heads are of another representation")
            if loss is not None and heads.targets != loss.outputs:
                raise ValueError("its heads are of other classes")
    return Model(config, representation, report, ledger, billboard, columns, heads)


@contextmanager
def damage_explained(folder: Path, part: str) -> Iterator[None]:
    """Whatever goes wrong in reading a part of a folder: one sentence that names both."""
    try:
        yield
    except PermissionError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OSError, pa.ArrowException) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error).partition("\n")[0]
        if isinstance(error, InputError) and str(folder) in reason:
            raise  # says it already
        raise InputError(f"{folder} is damaged ({part}: {reason.rstrip('.')}); restore it from a copy.") from None


def with_heads(model: Model, heads: Heads) -> Model:
    return replace(model, heads=heads)


def write_heads(heads: Heads, folder: Path) -> None:
    """Heads as a Parquet file in folder/private, for the owner's eyes only."""
    private = folder / "private"
    private.mkdir(mode=0o700, exist_ok=True)
    own = [None if p < 0 else heads.own[p] for p in heads.own_position]
    ids = ids_to_arrow(heads.ids)
    table = pa.table(
        {
            "user": ids.take(pa.array(np.repeat(np.arange(len(ids)), heads.targets))),
            "kind": pa.array(heads.kind),
            "intercept": pa.array(heads.intercept),
            "shared": pa.FixedSizeListArray.from_arrays(pa.array(heads.shared.ravel()), heads.shared.shape[1]),
            "own": pa.array(own, type=pa.list_(pa.float64())),
        },
        metadata={"features": str(heads.own.shape[1]), "targets": str(heads.targets)},
    )
    temporary = private / "heads.parquet.tmp"
    os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
    pq.write_table(table, temporary)
    os.replace(temporary, private / "heads.parquet")


def read_heads(folder: Path) -> Heads:
    table = pq.read_table(folder / "private" / "heads.parquet")
    d, q = int(table.schema.metadata[b"features"]), int(table.schema.metadata[b"targets"])
    own = table["own"].combine_chunks()
    has_own = np.asarray(own.is_valid())
    shared = table["shared"].combine_chunks()
    return Heads(
        table["user"].to_numpy(zero_copy_only=False)[::q],
        table["kind"].to_numpy(),
        table["intercept"].to_numpy(),
        np.asarray(shared.flatten()).reshape(len(table), -1),
        np.where(has_own, np.cumsum(has_own) - 1, -1),
        np.asarray(own.flatten(), dtype=np.float64).reshape(-1, d),
        q,
    )


def ids_to_arrow(ids: NDArray[Any]) -> pa.Array:
    try:
        array = pa.array(ids.tolist() if ids.dtype == object else ids)
        if array.to_numpy(zero_copy_only=False).tolist() == ids.tolist():
            return array
    except (pa.ArrowException, ValueError, TypeError):
        pass
    raise InputError("a model can be saved only if its user ids are all integers or all strings; rename the users.")


def _describe(config: Config, columns: Columns) -> dict[str, Any]:
    described: dict[str, Any] = json.loads(json.dumps({"config": asdict(config), "columns": asdict(columns)}))
    return described


def _claim(folder: Path, config: Config, columns: Columns, users: Users | PendingColumns) -> None:
    """Make the folder of a run, or check that the one that stands is of this very run."""
    if (folder / "model.json").is_file():
        raise InputError(
            f"{folder} holds a finished model: load it, or choose another folder and spend another budget."
        )
    wanted = _describe(config, columns)
    if not isinstance(users, PendingColumns):
        wanted["feature_count"] = users.facts.features
        if config.relation == "replace-one-user":
            wanted["user_count"] = users.facts.users  # a public fact under this relation only
    path = folder / "run.json"
    if path.is_file():
        stands = json.loads(path.read_text())
        stands |= _describe(Config.from_json(stands["config"]), Columns.from_json(stands["columns"]))
        if stands != wanted:
            raise ResumeError(
                f"{folder} holds a run with other settings, columns or users. Continue it with the same arguments, "
                "or choose another folder."
            )
        return
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty and holds no run of privrep. Choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, wanted)


def write_json(path: Path, data: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(data, indent=2) + "\n")
    os.replace(temporary, path)
