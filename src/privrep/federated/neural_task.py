"""The task of a neural model: the parameters of `Centaur` as public facts, with networks that have names.

How rows are prepared follows from the plan, and the plan from the number of users on all nodes. The server sends that
number, once it is known, as `task.with_users(total)`.

A node's file is a NumPy archive or a table. An archive of images has the arrays `images`, `labels` and `writers` (see
`data.images.read_npz`); one of other rows has `X`, `y` and `users`. A table needs `columns`.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from privrep.data.archives import open_archive
from privrep.data.categories import MOST_CLASSES, Categories
from privrep.data.images import Images, read_npz
from privrep.data.missing import REFUSE
from privrep.data.partition import make_natural_table
from privrep.data.readers import TableSource, read_table
from privrep.data.table import UserTable
from privrep.errors import InputError, NothingLearned
from privrep.estimators.network import ROWS, Centaur
from privrep.federated.task import check_users, make_other_task_error, read_columns
from privrep.heads.gradient import HeadFit
from privrep.heads.neural import fit_own_heads
from privrep.heads.store import write_heads
from privrep.models.description import Columns
from privrep.models.folder import MODEL, ModelFolder
from privrep.models.networks import NETWORK, PAGE
from privrep.neural.checks import check_parameters, find_class_numbers, rows_of
from privrep.neural.description import settings_to_json
from privrep.neural.features import Dct, Edges
from privrep.neural.plan import Share
from privrep.neural.rounds import TrainingSettings
from privrep.neural.training import PLAIN, WHOLE, PriorHeads
from privrep.privacy.bounds import MAX_USERS
from privrep.privacy.events import Relation
from privrep.privacy.population import Account
from privrep.privacy.protocol import Facts, Users
from privrep.schema.sent import read_fields, read_mapping, read_some_fields
from privrep.users.memory import InMemoryUsers

Network = Literal["mlp", "lenet"]
_OWN = "no code travels to nodes"


@dataclass(frozen=True)
class NeuralTask:
    """A `Centaur` whose users are on nodes. Its parameters have the names of Centaur's, but for these:

    feature_map  the public map of rows, `features` there
    settings     all settings of the rounds; or `training`, the settings that differ from the usual ones
    width        numbers of a row, where neither image, map nor columns tell
    columns      the user, the target of labels and the features of a table
    users        the number of users on all nodes; see `with_users`
    """

    classes: int | Categories
    epsilon: float
    delta: float
    share: Share = "auto"
    representation: Network | None = None
    image: tuple[int, int, int] | None = None
    feature_map: Dct | Edges | Literal["auto"] | None = "auto"
    rows: int = ROWS
    rounds: int | None = None
    settings: TrainingSettings | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    width: int | None = None
    columns: Columns | None = None
    users: int | None = None

    def __post_init__(self) -> None:
        for name in ("classes", "image"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))  # the dataclass is frozen
        if self.representation is not None and self.representation not in get_args(Network):
            raise InputError(f"a federation shares a network that has a name, mlp or lenet: {_OWN}.")
        if (
            self.feature_map is not None
            and self.feature_map != "auto"
            and not isinstance(self.feature_map, Dct | Edges)
        ):
            raise InputError(f"a federation's features are a map that has a name, edges or dct: {_OWN}.")
        kind = type(self.settings.head_fit) if isinstance(self.settings, TrainingSettings) else None
        if self.settings is not None and kind not in (HeadFit, PriorHeads):
            raise InputError(f"a federation's heads are fitted by HeadFit or PriorHeads: {_OWN}.")
        if self.settings is not None and self.training:
            raise InputError("give settings as a whole, or in training those that differ from the usual ones.")
        _check_classes(self.classes)
        replace(PLAIN, **_read_training(self.training))
        check_parameters(self._make_centaur())
        if self.share == "adapters" or (self.share == "all" and self.representation is None):
            needed = "a pretrained module of one's own" if self.share == "adapters" else "a network, mlp or lenet"
            raise InputError(f"share={self.share!r} needs {needed}; choose another share.")
        if self.representation == "lenet" and (self.image is None or self.image[0] != self.image[1]):
            raise InputError("lenet takes square images: say image=(side, side, channels).")
        _check_columns(self.columns)
        self._find_row_width()
        if self.users is not None and not 2 <= self.users <= MAX_USERS:
            raise InputError(f"a federation has from 2 to {MAX_USERS:,} users on all nodes. Got {self.users} instead.")

    @property
    def relation(self) -> Relation:
        return "replace-one-user"

    @property
    def file_shape(self) -> tuple[int, int, bool]:
        return self._find_row_width(), 1, False

    @property
    def features(self) -> int:
        """Return how many numbers steps see of a row: raw columns and public features."""
        model, plan = self._plan()
        own = model.n_features_in_ if model.map_ is None else model.map_.size
        return model._shape_of(plan).raw + own

    @property
    def targets(self) -> int:
        return 1

    @property
    def rate(self) -> float:
        usual = TrainingSettings() if self.settings is None else self.settings
        return float(self.training.get("rate", usual.rate))

    @property
    def sparse(self) -> bool:
        return False

    def to_json(self) -> dict[str, Any]:
        """Return the task as JSON values; maps and settings are described by name and numbers."""
        map_, own = self.feature_map, ("feature_map", "settings", "columns")
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in own}
        given["feature_map"] = map_ if map_ is None or isinstance(map_, str) else map_.to_json()
        given["settings"] = settings_to_json(self.settings)
        given["columns"] = None if self.columns is None else asdict(self.columns)
        described: dict[str, Any] = json.loads(json.dumps({"kind": "neural", **given}))
        return described

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """Read a task that was sent; raise InputError if a field is missing, unknown or of another type."""
        others: dict[str, Callable[[Any], Any]] = {
            "feature_map": _map_from_json,
            "settings": lambda found: None if found is None else _settings_from_json(found),
            "training": _read_training,
            "columns": lambda found: None if found is None else read_columns(found),
        }
        kept = {name: value for name, value in given.items() if name != "kind"}
        return cls(**read_fields(cls, kept, "the task", others))

    def read_facts(self, path: Path) -> Facts:
        """Count the users and columns of a node's file; see `Task.read_facts`."""
        table = self.read_rows(path)
        return Facts(table.n_users, table.n_features, 1, False)

    def with_users(self, total: int) -> NeuralTask:
        """Return the task for this number of users on all nodes."""
        return replace(self, users=total)

    @contextmanager
    def open(self, path: Path) -> Iterator[Users]:
        """Open a node's file, and return its users with rows prepared by the plan."""
        model, plan = self._plan()
        table = self.read_rows(path)
        if self.users is None or table.n_users > self.users:
            raise InputError(f"{path} has more users than the server says there are on all nodes; join again.")
        yield InMemoryUsers(model._prepared(table, plan))

    def learn(self, users: Users, folder: Path, on_page: Callable[[str], None], account: Account | None = None) -> None:
        """Train on the server; see `Task.learn`. Warn if the budget is so small that nothing is shared."""
        task = self if self.users is not None else self.with_users(users.facts.users)
        if (folder / "model.json").is_file():
            task.check_own(folder)
            return
        if task.users != users.facts.users:
            raise InputError(f"the task is of {task.users:,} users. Got {users.facts.users:,} instead.")
        check_users(task, users)
        model, plan = task._plan(run_folder=folder, on_page=lambda page, epsilon: on_page(page))
        model._learn(users, plan, account=account)
        model._finish(None)
        if plan.share == "nothing":
            warnings.warn(NothingLearned(plan.words), stacklevel=2)

    def keep(self, folder: Path, users: Users) -> int:
        """Fit and write the heads of a node's users, and return how many there are; see `Task.keep`."""
        self.check_own(folder)
        model = Centaur.load(folder)
        if not isinstance(users, InMemoryUsers):
            raise InputError("heads are made where their users' rows are: keep takes the users that open gave.")
        heads = fit_own_heads(model.learned_, users.table)
        write_heads(heads, folder)
        return len(heads.ids)

    def check_own(self, folder: Path) -> None:
        """Raise InputError unless a folder holds a model of this task."""
        found = ModelFolder(folder).read(NETWORK, PAGE).described
        described = json.loads(json.dumps(self._plan()[0].described_))
        with ModelFolder(folder).damage(MODEL):
            same = all(found[part] == described[part] for part in ("config", "user_count", "feature_count"))
        if not same:
            raise make_other_task_error(folder)
        learned = Centaur.load(folder).learned_
        if self.features != learned.raw + len(learned.centre):
            raise InputError(f"{folder} holds a model of other rows than the task prepares; fetch it again.")

    def _make_centaur(self, **options: Any) -> Centaur:
        """Return a `Centaur` with the parameters of the task, and these options."""
        return Centaur(
            self.representation,
            classes=self.classes if isinstance(self.classes, int) else list(self.classes),
            epsilon=self.epsilon,
            delta=self.delta,
            share=self.share,
            image=self.image,
            features=self.feature_map,
            rows=self.rows,
            rounds=self.rounds,
            settings=self.settings,
            random_state=self.seed,
            **options,
        )

    def _plan(self, **options: Any) -> tuple[Centaur, Any]:
        """Return a Centaur for all users, and its plan; with a run folder, its run is begun or continued."""
        if self.users is None:
            raise InputError("how rows are prepared follows from the users of all nodes: say with_users(total).")
        model, width = self._make_centaur(**options), self._find_row_width()
        if self.training:
            whole = model.planned(self.users, width).share in ("all", "adapters")
            model.settings = replace(WHOLE if whole else PLAIN, **self.training)
        return model, model._begin(self.users, width)

    def _find_row_width(self) -> int:
        """Return how many numbers a row has: declared, so that all nodes agree on it."""
        map_, told = self.feature_map, []
        if self.image is not None:
            told.append(math.prod(self.image))
        if isinstance(map_, Dct | Edges):
            told.append(map_.height * map_.width * map_.channels)
        if self.columns is not None:
            told.append(len(self.columns.features))
        told += [] if self.width is None else [self.width]
        if not told or min(told) < 1 or len(set(told)) > 1:
            found = " and ".join(map(str, dict.fromkeys(told))) or "nothing"
            raise InputError(f"image, map, columns or width must say how many numbers a row has. Got {found} instead.")
        return told[0]

    def read_rows(self, path: Path, text_ids: bool = False) -> UserTable:
        """Return the rows of a file as they stand there, with labels as places among the classes.

        Args:
            path: a table or a NumPy archive.
            text_ids: whether ids of a CSV file are texts in any case.
        """
        if not path.name.lower().endswith(".npz"):
            table = self._read_table(path, text_ids)
        else:
            table = (_read_images if self.image is not None else _read_rows)(self, path)
        table = replace(table, X=rows_of(table.X), y=table.y.astype(np.float64))
        if table.n_features != self._find_row_width() or not table.n_users:
            raise InputError(
                f"{path} has {table.n_users:,} users with rows of {table.n_features:,} numbers, and the task takes "
                f"rows of {self._find_row_width():,}; give the file that the task is about."
            )
        return table

    def _read_table(self, path: Path, text_ids: bool) -> UserTable:
        """Return the rows of a CSV or Parquet file, by the columns of the task."""
        columns = self.find_columns(path)
        return read_table(
            TableSource(
                path,
                columns.user,
                columns.targets,
                columns.features,
                text_ids,
                classes=self._listed,
                numeric=columns.features,
                missing=REFUSE,
            )
        )

    def find_columns(self, path: Path) -> Columns:
        """Return the columns of a table; raise InputError if the task is about archives alone."""
        if self.columns is None:
            raise InputError(f"the task names no columns, as {path} would need; give a NumPy archive, .npz.")
        return self.columns

    def check_images(self, images: Images, path: Path) -> None:
        """Raise InputError unless images have the size that the task declares."""
        if images.shape != self.image:
            raise InputError(f"{path} has images of {images.shape}, and the task takes {self.image}; resize them.")

    @property
    def _listed(self) -> Categories:
        return tuple(range(self.classes)) if isinstance(self.classes, int) else self.classes


# Files


def _read_images(task: NeuralTask, path: Path) -> UserTable:
    """Return a table of images as `privrep fit-neural` reads them: labels are places among the classes."""
    images = read_npz(path, list(map(str, task._listed)))
    task.check_images(images, path)
    return make_natural_table(images)


def _read_rows(task: NeuralTask, path: Path) -> UserTable:
    """Return a table of the rows of an archive with the arrays X, y and users."""
    arrays = read_arrays(path, ("X", "y", "users"))
    X, y, users = arrays["X"], arrays["y"], arrays["users"]
    if y.ndim != 1 or users.ndim != 1 or users.dtype.kind not in "iuU":
        raise InputError(f"y and users of {path} must be lists, of labels and of integers or texts; write them so.")
    return UserTable.from_rows(rows_of(X), find_class_numbers(y, task._listed), users)


def read_arrays(path: Path, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """Return these arrays of a NumPy archive; raise InputError if one is missing or the file cannot be read."""
    arrays = open_archive(path, names)
    if missing := [name for name in names if name not in arrays]:
        wanted = ", ".join(f"{name}=..." for name in names)
        raise InputError(f"{path} has no array {missing[0]!r}; write it with numpy.savez({wanted}).")
    return arrays


# Checks of what was sent


def _check_classes(classes: Any) -> None:
    """Raise InputError unless classes are a number or a list of names, at least two."""
    count = classes if isinstance(classes, int) else len(classes)
    kinds = {int} if isinstance(classes, int) else set(map(type, classes))
    if not 2 <= count <= MOST_CLASSES or kinds not in ({int}, {str}):
        raise InputError(f"classes must be a number or a list of names, from 2 to {MOST_CLASSES:,} of them.")


def _check_columns(columns: Columns | None) -> None:
    """Raise InputError unless columns name a user, one target and features of numbers."""
    if columns is None:
        return
    names = (columns.user, *columns.targets, *columns.features)
    if len(columns.targets) != 1 or not columns.features or columns.categorical or columns.classes:
        raise InputError("columns of a neural task are the user, one target of labels, and features of numbers.")
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise InputError("columns of a neural task must have names, each its own.")


def _map_from_json(given: Any) -> Dct | Edges | Literal["auto"] | None:
    """Return the public map that was sent; raise InputError for a map without a name."""
    if given is None or given == "auto":
        return None if given is None else "auto"
    found = dict(read_mapping(given, "feature_map"))
    kind = found.pop("map", None)
    if kind == "dct":
        return Dct(**read_fields(Dct, found, "feature_map"))
    if kind == "edges":
        return Edges(**read_fields(Edges, found, "feature_map"))
    raise InputError(f"a federation's features are a map that has a name, edges or dct: {_OWN}.")


def _settings_from_json(given: Any) -> TrainingSettings:
    """Return the settings of the rounds that were sent."""
    return TrainingSettings(**read_fields(TrainingSettings, given, "settings", {"head_fit": _head_fit_from_json}))


def _head_fit_from_json(given: Any) -> HeadFit | PriorHeads:
    """Return the way of fitting heads that was sent."""
    found = dict(read_mapping(given, "settings.head_fit"))
    kind = found.pop("kind", None)
    if kind == "HeadFit":
        return HeadFit(**read_fields(HeadFit, found, "settings.head_fit"))
    if kind == "PriorHeads":
        return PriorHeads(**read_fields(PriorHeads, found, "settings.head_fit"))
    raise InputError(f"a federation's heads are fitted by HeadFit or PriorHeads: {_OWN}.")


def _read_training(given: Any) -> dict[str, Any]:
    """Return some settings of the rounds; the number of rounds is said elsewhere."""
    return read_some_fields(TrainingSettings, given, "training", ("head_fit", "rounds"))
