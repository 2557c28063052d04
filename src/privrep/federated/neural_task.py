"""The task of a neural model: what `Centaur` takes, as public facts, with networks that have names.

How rows are prepared follows from the plan, and the plan from the number of users on all nodes: the server sends it,
once it is known, as `task.with_users(total)`. A node's file is a NumPy archive or a table. An archive of images has the
arrays `images`, `labels` and `writers` (see `data.images.read_npz`), of other rows `X`, `y` and `users`; a table needs
`columns`.
"""

from __future__ import annotations

import json
import math
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from privrep.data.categories import MOST_CLASSES, Categories
from privrep.data.images import Images, read_npz
from privrep.data.missing import REFUSE
from privrep.data.partition import make_natural_table
from privrep.data.readers import TableSource, read_table
from privrep.data.table import UserTable
from privrep.errors import InputError, NothingLearned
from privrep.estimators.network import ROWS, Centaur
from privrep.federated.task import check_users, other_task, read_columns
from privrep.heads.gradient import HeadFit
from privrep.heads.neural import fit_own_heads
from privrep.heads.store import write_heads
from privrep.models.description import Columns
from privrep.models.folder import MODEL, ModelFolder
from privrep.models.networks import NETWORK, PAGE
from privrep.neural.checks import check_parameters, class_numbers, rows_of
from privrep.neural.description import settings_to_json
from privrep.neural.features import Dct, Edges
from privrep.neural.plan import Share
from privrep.neural.rounds import TrainingSettings
from privrep.neural.training import PLAIN, WHOLE, PriorHeads
from privrep.privacy.bounds import MAX_USERS
from privrep.privacy.events import Relation
from privrep.privacy.protocol import Facts, Users
from privrep.schema.sent import read_fields, read_mapping, read_some_fields
from privrep.users.memory import InMemoryUsers

Network = Literal["mlp", "lenet"]
_OWN = "no code travels to nodes"


@dataclass(frozen=True)
class NeuralTask:
    """A `Centaur` whose users are on nodes. Its parameters are those of the same names, but for these:

    feature_map  the public map of rows, `features` there
    settings     all of the rounds' settings; or `training`, those that differ from the usual ones of what is shared
    width        how many numbers a row has, where neither image, map nor columns tell
    columns      of tables: the user, one target of labels, and the features
    users        how many there are on all nodes; see `with_users`
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
        replace(PLAIN, **_training(self.training))
        check_parameters(self._centaur())
        if self.share == "adapters" or (self.share == "all" and self.representation is None):
            needed = "a pretrained module of one's own" if self.share == "adapters" else "a network, mlp or lenet"
            raise InputError(f"share={self.share!r} needs {needed}; choose another share.")
        if self.representation == "lenet" and (self.image is None or self.image[0] != self.image[1]):
            raise InputError("lenet takes square images: say image=(side, side, channels).")
        _check_columns(self.columns)
        self._row_width()
        if self.users is not None and not 2 <= self.users <= MAX_USERS:
            raise InputError(f"a federation has from 2 to {MAX_USERS:,} users on all nodes. Got {self.users} instead.")

    @property
    def relation(self) -> Relation:
        return "replace-one-user"

    @property
    def file_shape(self) -> tuple[int, int, bool]:
        return self._row_width(), 1, False

    @property
    def features(self) -> int:
        model, plan = self._planned()
        own = model.n_features_in_ if model.map_ is None else model.map_.size
        return model._shape_of(plan).raw + own

    @property
    def targets(self) -> int:
        return 1

    @property
    def sparse(self) -> bool:
        return False

    def to_json(self) -> dict[str, Any]:
        map_, own = self.feature_map, ("feature_map", "settings", "columns")
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in own}
        given["feature_map"] = map_ if map_ is None or isinstance(map_, str) else map_.to_json()
        given["settings"] = settings_to_json(self.settings)
        given["columns"] = None if self.columns is None else asdict(self.columns)
        described: dict[str, Any] = json.loads(json.dumps({"kind": "neural", **given}))
        return described

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        others: dict[str, Callable[[Any], Any]] = {
            "feature_map": _map_from_json,
            "settings": lambda found: None if found is None else _settings_from_json(found),
            "training": _training,
            "columns": lambda found: None if found is None else read_columns(found),
        }
        kept = {name: value for name, value in given.items() if name != "kind"}
        return cls(**read_fields(cls, kept, "the task", others))

    def facts(self, path: Path) -> Facts:
        table = self.table(path)
        return Facts(table.n_users, table.n_features, 1, False)

    def with_users(self, total: int) -> NeuralTask:
        return replace(self, users=total)

    @contextmanager
    def open(self, path: Path) -> Iterator[Users]:
        model, plan = self._planned()
        table = self.table(path)
        if self.users is None or table.n_users > self.users:
            raise InputError(f"{path} has more users than the server says there are on all nodes; join again.")
        yield InMemoryUsers(model._prepared(table, plan))

    def learn(self, users: Users, folder: Path, on_page: Callable[[str], None]) -> None:
        task = self if self.users is not None else self.with_users(users.facts.users)
        if (folder / "model.json").is_file():
            task.check_own(folder)
            return
        if task.users != users.facts.users:
            raise InputError(f"the task is of {task.users:,} users. Got {users.facts.users:,} instead.")
        check_users(task, users)
        model, plan = task._planned(run_folder=folder, on_page=lambda page, epsilon: on_page(page))
        model._learn(users, plan)
        model._finish(None)
        if plan.share == "nothing":
            warnings.warn(NothingLearned(plan.words), stacklevel=2)

    def keep(self, folder: Path, users: Users) -> int:
        self.check_own(folder)
        model = Centaur.load(folder)
        if not isinstance(users, InMemoryUsers):
            raise InputError("heads are made where their users' rows are: keep takes the users that open gave.")
        heads = fit_own_heads(model.learned_, users.table)
        write_heads(heads, folder)
        return len(heads.ids)

    def check_own(self, folder: Path) -> None:
        """Whether the model of a folder is of this task."""
        found = ModelFolder(folder).read(NETWORK, PAGE).described
        described = json.loads(json.dumps(self._planned()[0].described_))
        with ModelFolder(folder).damage(MODEL):
            same = all(found[part] == described[part] for part in ("config", "user_count", "feature_count"))
        if not same:
            raise other_task(folder)
        learned = Centaur.load(folder).learned_
        if self.features != learned.raw + len(learned.centre):
            raise InputError(f"{folder} holds a model of other rows than the task prepares; fetch it again.")

    def _centaur(self, **options: Any) -> Centaur:
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

    def _planned(self, **options: Any) -> tuple[Centaur, Any]:
        """The model of a fit with all users, and its plan; with a folder, its run is begun or continued."""
        if self.users is None:
            raise InputError("how rows are prepared follows from the users of all nodes: say with_users(total).")
        model, width = self._centaur(**options), self._row_width()
        if self.training:
            whole = model.planned(self.users, width).share in ("all", "adapters")
            model.settings = replace(WHOLE if whole else PLAIN, **self.training)
        return model, model._begin(self.users, width)

    def _row_width(self) -> int:
        """How many numbers a row has: declared, so that all nodes agree on it."""
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

    def table(self, path: Path, text_ids: bool = False) -> UserTable:
        """The rows of a file as they stand there; `text_ids` reads the ids of a CSV file as text in any case."""
        if not path.name.lower().endswith(".npz"):
            table = self._read_table(path, text_ids)
        else:
            table = (_images if self.image is not None else _rows)(self, path)
        table = replace(table, X=rows_of(table.X), y=table.y.astype(np.float64))
        if table.n_features != self._row_width() or not table.n_users:
            raise InputError(
                f"{path} has {table.n_users:,} users with rows of {table.n_features:,} numbers, and the task takes "
                f"rows of {self._row_width():,}; give the file that the task is about."
            )
        return table

    def _read_table(self, path: Path, text_ids: bool) -> UserTable:
        columns = self.columns_for(path)
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

    def columns_for(self, path: Path) -> Columns:
        """The columns of a table, which a task about archives alone does not name."""
        if self.columns is None:
            raise InputError(f"the task names no columns, as {path} would need; give a NumPy archive, .npz.")
        return self.columns

    def check_images(self, images: Images, path: Path) -> None:
        if images.shape != self.image:
            raise InputError(f"{path} has images of {images.shape}, and the task takes {self.image}; resize them.")

    @property
    def _listed(self) -> Categories:
        return tuple(range(self.classes)) if isinstance(self.classes, int) else self.classes


# Files


def _images(task: NeuralTask, path: Path) -> UserTable:
    """Images as `privrep fit-neural` reads them: labels are places among the classes."""
    images = read_npz(path, list(map(str, task._listed)))
    task.check_images(images, path)
    return make_natural_table(images)


def _rows(task: NeuralTask, path: Path) -> UserTable:
    arrays = read_arrays(path, ("X", "y", "users"))
    X, y, users = arrays["X"], arrays["y"], arrays["users"]
    if y.ndim != 1 or users.ndim != 1 or users.dtype.kind not in "iuU":
        raise InputError(f"y and users of {path} must be lists, of labels and of integers or texts; write them so.")
    return UserTable.from_rows(rows_of(X), class_numbers(y, task._listed), users)


def read_arrays(path: Path, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    if not path.is_file():
        raise InputError(f"there is no file {path}; check the path.")
    try:
        with zipfile.ZipFile(path), np.load(path) as file:
            missing = [name for name in names if name not in file.files]
            arrays = {name: file[name] for name in names if name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{path} cannot be read as a NumPy archive ({error}); write it with numpy.savez.") from None
    if missing:
        wanted = ", ".join(f"{name}=..." for name in names)
        raise InputError(f"{path} has no array {missing[0]!r}; write it with numpy.savez({wanted}).")
    return arrays


# What was sent


def _check_classes(classes: Any) -> None:
    count = classes if isinstance(classes, int) else len(classes)
    kinds = {int} if isinstance(classes, int) else set(map(type, classes))
    if not 2 <= count <= MOST_CLASSES or kinds not in ({int}, {str}):
        raise InputError(f"classes must be a number or a list of names, from 2 to {MOST_CLASSES:,} of them.")


def _check_columns(columns: Columns | None) -> None:
    if columns is None:
        return
    names = (columns.user, *columns.targets, *columns.features)
    if len(columns.targets) != 1 or not columns.features or columns.categorical or columns.classes:
        raise InputError("columns of a neural task are the user, one target of labels, and features of numbers.")
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise InputError("columns of a neural task must have names, each its own.")


def _map_from_json(given: Any) -> Dct | Edges | Literal["auto"] | None:
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
    return TrainingSettings(**read_fields(TrainingSettings, given, "settings", {"head_fit": _head_fit_from_json}))


def _head_fit_from_json(given: Any) -> HeadFit | PriorHeads:
    found = dict(read_mapping(given, "settings.head_fit"))
    kind = found.pop("kind", None)
    if kind == "HeadFit":
        return HeadFit(**read_fields(HeadFit, found, "settings.head_fit"))
    if kind == "PriorHeads":
        return PriorHeads(**read_fields(PriorHeads, found, "settings.head_fit"))
    raise InputError(f"a federation's heads are fitted by HeadFit or PriorHeads: {_OWN}.")


def _training(given: Any) -> dict[str, Any]:
    """Some of the rounds' settings; how many rounds there are is said elsewhere."""
    return read_some_fields(TrainingSettings, given, "training", ("head_fit", "rounds"))
