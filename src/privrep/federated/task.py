"""The task of a federation: what is learned, as public facts that travel from the server to the nodes. No code travels.

A node opens its own file by the task, so that steps see its users' rows as a fit of one file would. The server learns
with an engine that asks the nodes, and writes a model without heads. A node then makes its users' heads with that
model, in a folder of its own.

Formal guarantee:
* A task holds nothing that was computed from users but their number, which is public under replace-one-user.
* Heads and ids are written on the node and nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import pyarrow as pa
import pyarrow.compute as pc

from privrep.data.categories import check_classes, check_lists, is_wide
from privrep.data.readers import TableSource, read_checked_batches
from privrep.data.table import UserTable
from privrep.errors import InputError, missing_package
from privrep.federated.wire.travelling import check_travels
from privrep.heads.fitting import fit_heads
from privrep.heads.store import write_heads
from privrep.models import model as models
from privrep.models.description import Columns, Config, make_loss
from privrep.models.learning import learn
from privrep.privacy.events import Relation
from privrep.privacy.population import Account
from privrep.privacy.protocol import Facts, Users
from privrep.schema.sent import check_names, read_fields, read_mapping, shortly
from privrep.users.memory import InMemoryUsers
from privrep.users.streaming import StreamingUsers

IN_MEMORY = 1 << 30  # bytes of numbers of a file that a node holds in memory; more than that is streamed

LONGEST = 400  # characters of a sentence about what was sent


class Task(Protocol):
    """The task of a federation; see `TableTask` and `privrep.federated.neural_task.NeuralTask`."""

    @property
    def relation(self) -> Relation: ...
    @property
    def epsilon(self) -> float: ...
    @property
    def delta(self) -> float: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def file_shape(self) -> tuple[int, int, bool]:
        """Return the numbers and targets of a row of a node's file, and whether it is sparse."""
        ...

    @property
    def features(self) -> int:
        """Return how many numbers steps see of a row; a neural task can tell after `with_users` alone."""
        ...

    @property
    def targets(self) -> int: ...
    @property
    def sparse(self) -> bool: ...
    @property
    def rate(self) -> float:
        """Return the probability with which a round asks each user."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return the task as it travels to the nodes."""
        ...

    def read_facts(self, path: Path) -> Facts:
        """Return how many users and columns a node's file has; raise InputError if the file does not suit the task."""
        ...

    def with_users(self, total: int) -> Task:
        """Return the task for this number of users on all nodes, which decides how rows are prepared."""
        ...

    def open(self, path: Path) -> AbstractContextManager[Users]:
        """Open a node's file, and return its users with rows as steps see them."""
        ...

    def learn(self, users: Users, folder: Path, on_page: Callable[[str], None], account: Account | None = None) -> None:
        """Begin or continue the run of a folder on the server, and finish it as a model without heads.

        A folder that holds the finished model of this very task stays as it is, and nothing is spent.

        Args:
            users: the users on all nodes.
            folder: the run's folder, which becomes the model's.
            on_page: told the name of each release.
            account: with the population ledger that the budget is reserved from; None: with none.
        """
        ...

    def check_own(self, folder: Path) -> None:
        """Raise InputError unless a folder holds a model of this task; no row is looked at."""
        ...

    def keep(self, folder: Path, users: Users) -> int:
        """Make and write the heads of a node's users, and return how many there are.

        Called again, it does the same work and leaves the same file.

        Args:
            folder: the published model on the node, where the heads are written.
            users: what `open` gave.
        """
        ...


@dataclass(frozen=True)
class TableTask:
    """Regression, classification or ratings of a table whose columns, categories and classes are all declared."""

    config: Config
    columns: Columns

    def __post_init__(self) -> None:
        columns = _check_columns(self.columns, labels=self.config.loss is not None)
        object.__setattr__(self, "columns", columns)  # the dataclass is frozen; this is its construction
        self.config.check(self.features)
        self.config.check_columns(columns)
        check_travels(self.config.learner)
        make_loss(self.config, columns)
        seed = self.config.seed
        if seed is not None and seed < 0:
            raise InputError(f"a seed must be zero or a positive integer. Got {seed} instead.")
        if self.config.configuration == "paper" and len(columns.targets) > 1:
            raise InputError("the configuration paper takes one target; fit each by itself, or use the default.")
        if self.config.covariance is not None and columns.categorical:
            raise InputError("a declared covariance is for tables of numbers; leave it or the categories out.")

    @property
    def relation(self) -> Relation:
        return self.config.relation

    @property
    def epsilon(self) -> float:
        return self.config.epsilon

    @property
    def delta(self) -> float:
        return self.config.delta

    @property
    def seed(self) -> int | None:
        return self.config.seed

    @property
    def file_shape(self) -> tuple[int, int, bool]:
        return self.features, self.targets, self.sparse

    @property
    def features(self) -> int:
        return len(self.columns.feature_names)

    @property
    def targets(self) -> int:
        return len(self.columns.targets)

    @property
    def rate(self) -> float:
        return 1.0

    @property
    def sparse(self) -> bool:
        wide = self.config.ratings or is_wide(self.features)
        return bool(self.columns.categorical) and wide and not self.config.dense

    def to_json(self) -> dict[str, Any]:
        """Return the settings and columns as JSON values."""
        described: dict[str, Any] = json.loads(
            json.dumps({"config": asdict(self.config), "columns": asdict(self.columns)})
        )
        return {"kind": "table", **described}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """Read a task that was sent; raise InputError if a field is missing, unknown or of another type."""
        check_names(given, ("kind", "config", "columns"), "a task of a table")
        config = Config(**read_fields(Config, given["config"], "config"))
        return cls(config, read_columns(given["columns"]))

    def read_facts(self, path: Path) -> Facts:
        """Count the users of a node's file; raise InputError if a row of it cannot be read by the task."""
        users = [pc.unique(batch.column(0)) for batch in read_checked_batches(self._make_source(path))]
        count = int(pc.count_distinct(pa.chunked_array(users)).as_py())
        return Facts(count, self.features, self.targets, self.sparse)

    def with_users(self, total: int) -> TableTask:
        """Return the task itself: how rows of a table are prepared does not depend on the number of users."""
        return self

    @contextmanager
    def open(self, path: Path) -> Iterator[Users]:
        """Open a node's file: rows in memory where they fit, else read from disk in every pass, to the same bits."""
        with StreamingUsers.open(self._make_source(path)) as users:
            stored = len(users.source.columns) - 1
            each = users.source.dtype.itemsize + (4 if users.facts.sparse else 0)
            if users.rows * stored * each > IN_MEMORY:
                yield users
                return
            [table] = users.blocks(1 << 62)
        yield InMemoryUsers(table)

    def _make_source(self, path: Path) -> TableSource:
        """Return the reader of a file's columns, with the task's lists and its rule for missing values."""
        columns = self.columns
        lists: dict[str, Any] = {"categories": columns.by_category or None, "classes": columns.classes or None}
        lists |= {"missing": columns.policy, "weight": columns.weight or None, "numeric": columns.features}
        lists |= {"items": self.config.ratings, "dense": self.config.dense}
        return TableSource(path, columns.user, columns.targets, columns.features, **lists)

    def learn(self, users: Users, folder: Path, on_page: Callable[[str], None], account: Account | None = None) -> None:
        """Learn the representation on the server; see `Task.learn`."""
        if (folder / "model.json").is_file():
            self.check_own(folder)
            return
        check_users(self, users)

        def told(page: str, epsilon: float) -> None:
            on_page(page)

        fitted = learn(users, self.config, folder=folder, columns=self.columns, on_page=told, account=account)
        models.finish(fitted, folder)

    def keep(self, folder: Path, users: Users) -> int:
        """Fit and write the heads of a node's users, and return how many there are; see `Task.keep`."""
        self.check_own(folder)
        model, config = self.load_own_model(folder), self.config
        heads = fit_heads(
            iterate_blocks(users),
            model.representation,
            intercept=config.intercept,
            safety_net=config.safety_net,
            loss=model.loss,
            keep_means=count_means_to_keep(users, self.columns),
        )
        write_heads(heads, folder)
        return len(heads.ids)

    def check_own(self, folder: Path) -> None:
        """Raise InputError unless a folder holds a model of this task, for as many features."""
        model = self.load_own_model(folder)
        if (model.representation.ratings is not None) != self.config.ratings:
            raise make_other_task_error(folder)
        if len(model.representation.matrix) != self.features:
            raise InputError(f"{folder} holds a representation of other features than the task names; fetch it again.")

    def load_own_model(self, folder: Path) -> models.Model:
        """Return the model of a folder; raise InputError if it is of another task."""
        model = models.load(folder)
        if (model.config, model.columns) != (self.config, self.columns):
            raise make_other_task_error(folder)
        return model


def task_from_json(given: Mapping[str, Any]) -> Task:
    """Read a task that was sent, and take nothing of it on trust: whatever is wrong with it is an InputError."""
    try:
        kind = read_mapping(given, "a task").get("kind")
        if kind == "table":
            return TableTask.from_json(given)
        if kind == "neural":
            return _read_neural_task(given)
    except InputError as error:
        text = str(error)
        raise InputError(text if len(text) <= LONGEST else f"{text[:LONGEST]}...") from None
    except Exception as error:
        raise InputError(f"this is no task that privrep knows ({type(error).__name__}); send it again.") from None
    raise InputError(f"a task is of kind table or neural. Got {shortly(kind)} instead.")


def read_columns(given: Any) -> Columns:
    """Return the columns of a table from JSON; classes may be texts, integers or booleans."""
    classes = {"classes": lambda listed: () if listed == [] else check_classes(listed)}
    return Columns(**read_fields(Columns, given, "columns", classes))


def _read_neural_task(given: Mapping[str, Any]) -> Task:
    """Read a neural task that was sent; raise InputError if PyTorch is not installed."""
    try:
        from privrep.federated.neural_task import NeuralTask
    except ImportError:
        raise missing_package("neural models need PyTorch", "torch") from None
    return NeuralTask.from_json(given)


def iterate_blocks(users: Users) -> Iterator[UserTable]:
    """Return the rows of users on this machine, in blocks; raise InputError for users elsewhere."""
    if isinstance(users, InMemoryUsers):
        return users.table.blocks()
    if isinstance(users, StreamingUsers):
        return users.blocks()
    raise InputError("heads are made where their users' rows are: keep takes the users that open gave.")


def count_means_to_keep(users: Users, columns: Columns) -> int:
    """Return for how many columns each user's means are kept.

    These are all columns of numbers if values may be missing, or none.
    """
    if isinstance(users, StreamingUsers):
        return users.means_to_keep
    return len(columns.features) if columns.missing != "refuse" else 0


def make_other_task_error(folder: Path) -> InputError:
    """Return the error for a folder that holds a finished model of another task."""
    return InputError(f"{folder} holds a finished model of another task. Choose another folder.")


def check_users(task: Task, users: Users) -> None:
    """Raise InputError unless users' rows have the shape that the task speaks of."""
    facts = users.facts
    if (facts.features, facts.targets, facts.sparse) != (task.features, task.targets, task.sparse):
        raise InputError(
            f"the users' rows have {facts.features} numbers and {facts.targets} targets, and those of the task "
            f"{task.features} and {task.targets}; open them by the same task."
        )


def _check_columns(columns: Columns, labels: bool) -> Columns:
    """Return the columns; raise InputError unless everything that nodes must agree on is declared.

    Args:
        columns: the columns as they were given or sent.
        labels: whether the target is a class, and not a number.
    """
    if not columns.user or not columns.targets or not (columns.features or columns.categorical):
        raise InputError("a federation must name its columns: the user, the targets and the features.")
    names = (columns.user, *columns.targets, *columns.features, *columns.categorical)
    if not all(isinstance(name, str) and name for name in names):
        raise InputError("columns are named by texts that are not empty.")
    if len(set(names)) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise InputError(f"the task names column {twice!r} more than once; name it once.")
    _ = columns.policy
    if not all(0 <= place < len(columns.features) for place in columns.indicators):
        raise InputError("an indicator of missing values is of a column of numbers; name one of those.")
    if columns.weight in names:
        raise InputError(f"the column of weights, {columns.weight!r}, has another part in the task; name another.")
    if len(columns.categories) != len(columns.categorical):
        raise InputError("every column of categories needs its list, declared: nodes cannot select one together.")
    check_lists(columns.by_category)
    if not labels:
        if columns.classes:
            raise InputError("classes go with a loss, of labels; leave them out, or choose a loss.")
        return columns
    if not columns.classes:
        raise InputError("labels need their classes declared: nodes cannot select them together.")
    if len(columns.targets) > 1:
        raise InputError("labels are one target column; fit each of several by itself.")
    return replace(columns, classes=check_classes(columns.classes))
