"""Rows for networks, and for numbers of public features: images or flattened rows, from files of many kinds.

rows.csv, rows.parquet   a table of flattened rows; with --image a Parquet file of encoded images
rows.npz                 arrays X or images, users or writers, and for heads y or labels
folder/                  images user/class/image; to predict, user/image is enough
data.toml                a file of `fit-neural`: its sections [data] and [users]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privrep.boundary import read_json
from privrep.cli.options import split_names
from privrep.errors import InputError

if TYPE_CHECKING:
    from privrep.data.dialects import Dialect
    from privrep.data.images import Images
    from privrep.data.readers import TableSource
    from privrep.schema.sections import ImageParquet

TABLES = (".csv", ".csv.gz", ".parquet", ".pq")


@dataclass(frozen=True)
class RowOptions:
    """Options of a command that say how rows are read, and what is asked for of them."""

    dialect: Dialect
    user: str | None = None
    target: str | None = None
    features: str | None = None
    item: str | None = None
    image: str | None = None
    weight: str | None = None
    user_id: str | None = None
    proba: bool = False


@dataclass(frozen=True)
class Wanted:
    """Rows that a model takes: facts of its folder."""

    folder: Path
    width: int  # numbers of a row
    image: tuple[int, int, int] | None  # height, width and channels, where the model says them
    classes: Sequence[Any] | None  # None: targets are numbers
    text_ids: bool  # whether the ids of its users are text, or there are none
    one_user: bool = False  # whether all rows are one user's, whatever the file says


@dataclass(frozen=True)
class FileRows:
    """Rows in memory, in the order of their file."""

    path: Path
    X: Any  # (rows, width)
    users: Any  # (rows,), or None where the file names none
    y: Any = None  # (rows,): class numbers, -1 for a label that is no class, or numbers; None: not asked for
    beside: Mapping[str, Any] = field(default_factory=dict)  # columns that are written before the predictions


def takes_rows_of_images(folder: Path) -> bool:
    """Return whether a folder holds a network, or numbers of public features; False if it is no model."""
    from privrep.models.networks import is_network

    if is_network(folder):
        return True
    try:
        described = read_json(folder / "model.json")
    except (OSError, ValueError):
        return False
    return isinstance(described, dict) and described.get("public_map") is not None


def refuse_options(folder: Path, given: Mapping[str, Any], kind: str = "networks") -> None:
    """Raise InputError if an option was given that is for other models.

    Args:
        folder: of the model.
        given: values by the names of options.
        kind: of models that the options are for.
    """
    for option, value in given.items():
        if value:
            raise InputError(f"{option} is for {kind}; leave it out for {folder}.")


def is_table(path: Path, how: RowOptions) -> bool:
    """Return whether a file is a table of flattened rows."""
    return path.name.lower().endswith(TABLES) and how.image is None and not path.is_dir()


def open_flat_table(path: Path, wanted: Wanted, how: RowOptions, target: str | None = None) -> TableSource:
    """Return a table of flattened rows, its columns in the order of the file or of --features.

    Args:
        path: of the file.
        wanted: what the model takes.
        how: the options of the command.
        target: its column of targets, if they are needed.
    """
    from privrep.data.missing import REFUSE
    from privrep.data.readers import TableSource

    if how.user is None:
        raise InputError(f"{wanted.folder} was fitted on arrays and names no user column; pass --user.")
    names, classes = split_names(how.features), None
    if target is not None and wanted.classes is not None:
        classes = tuple(wanted.classes)
    more: Any = {"numeric": names or (), "dialect": how.dialect, "missing": REFUSE}
    source = TableSource(path, how.user, target, names, wanted.text_ids, classes=classes, **more)
    if len(source.feature_names) != wanted.width:
        raise InputError(
            f"the model takes rows of {wanted.width:,} numbers; {path} gives {len(source.feature_names):,}. Pass "
            "--features, or leave other columns out of the table."
        )
    return source


def read_rows(path: Path, wanted: Wanted, how: RowOptions, labelled: bool) -> FileRows:
    """Return the rows of a file that is no table of flattened rows.

    Args:
        path: of the file or folder.
        wanted: what the model takes.
        how: the options of the command.
        labelled: whether labels or numbers are asked for.
    """
    _refuse_other_kinds(path, how)
    if path.is_dir():
        found = _from_folder(path, wanted, how, labelled)
    elif path.name.lower().endswith(".npz"):
        found = _from_archive(path, wanted, how, labelled)
    elif path.name.lower().endswith(".toml"):
        found = _from_config(path, wanted, labelled)
    elif how.image is not None:
        found = _from_parquet(path, wanted, how, labelled)
    else:
        kinds = "a table (.csv, .csv.gz, .parquet), an archive (.npz), a folder of images, or a TOML file of fit-neural"
        raise InputError(f"{path} is no file that rows are read from; give {kinds}.")
    if found.X.ndim != 2 or found.X.shape[1] != wanted.width:
        raise InputError(
            f"{path} has rows of {math.prod(found.X.shape[1:]):,} numbers, and the model takes rows of "
            f"{wanted.width:,}; give a file of such rows."
        )
    if not len(found.X):
        raise InputError(f"{path} has no rows; give some.")
    return found


def _refuse_other_kinds(path: Path, how: RowOptions) -> None:
    """Raise InputError for options that are for tables alone."""
    refuse_options(path, {"--features": how.features}, "tables of flattened rows")
    if how.image is None:
        refuse_options(path, {"--user": how.user, "--target": how.target}, "tables")


def _size(wanted: Wanted, path: Path) -> tuple[tuple[int, int], bool]:
    """Return the height and width that images are resized to, and whether they have colours."""
    if wanted.image is None or wanted.image[2] not in (1, 3):
        raise InputError(
            f"{wanted.folder} does not say which images it takes, so {path} cannot be read; give an archive (.npz) of "
            f"rows of {wanted.width:,} numbers."
        )
    return wanted.image[:2], wanted.image[2] == 3


def _from_folder(path: Path, wanted: Wanted, how: RowOptions, labelled: bool) -> FileRows:
    from privrep.data.images import read_image_folder, read_unlabelled_folder

    size, colour = _size(wanted, path)
    if not labelled:
        names, images = read_unlabelled_folder(path, size, colour)
        return FileRows(path, images.rows(), _folder_ids(images.users, wanted), None, {"image": names})
    found = _of_images(path, read_image_folder(path, size, colour, users=how.user_id is None), wanted)
    return replace(found, users=_folder_ids(found.users, wanted))


def _folder_ids(users: Any, wanted: Wanted) -> Any:
    """Return users that folders are named after; as integers, where those of the model are and all names are."""
    import numpy as np

    if users is None or wanted.text_ids:
        return users
    names = users.tolist()
    plain = all(u.isascii() and u.isdigit() and len(u) < 19 and str(int(u)) == u for u in names)
    return users.astype(np.int64) if plain else users


def _from_parquet(path: Path, wanted: Wanted, how: RowOptions, labelled: bool) -> FileRows:
    from privrep.data.images import read_image_parquet

    if how.user is None and how.user_id is None and not wanted.one_user:
        raise InputError(f"{wanted.folder} was fitted on arrays and names no user column; pass --user.")
    if labelled and how.target is None:
        raise no_target(wanted.folder)
    assert how.image is not None
    size, colour = _size(wanted, path)
    images = read_image_parquet(path, how.image, how.target if labelled else None, how.user, size, colour)
    return _of_images(path, images, wanted, labelled)


def no_target(folder: Path) -> InputError:
    """Return the error that a table's column of targets is not known."""
    return InputError(f"{folder} was fitted on arrays and names no target column; pass --target.")


def _from_archive(path: Path, wanted: Wanted, how: RowOptions, labelled: bool) -> FileRows:
    import numpy as np

    from privrep.data.images import Images, read_arrays

    arrays = read_arrays(path, (), ("X", "images", "users", "writers", "y", "labels"))
    taken = {what: next((name for name in names if name in arrays), None) for what, names in _ARRAYS.items()}
    alone = wanted.one_user or how.user_id is not None
    for what, needed in (("X", True), ("users", not alone), ("y", labelled)):
        if needed and taken[what] is None:
            raise InputError(f"{path} has no array {what!r}; write it with numpy.savez({what}=...).")
    users = None if taken["users"] is None else arrays[taken["users"]]
    if how.user_id is not None and users is not None:
        raise InputError(f"{path} names users, in its array {taken['users']!r}; leave --user-id out.")
    if taken["X"] == "images":
        nothing = np.full(len(arrays["images"]) if arrays["images"].ndim else 0, -1)
        images = Images(arrays["images"], nothing, ())
        _check_shape(images, wanted, path)
        X = images.rows()
    else:
        from privrep.neural.features import rows_of

        X = rows_of(arrays["X"])
    y = _targets(arrays, taken["y"], wanted, path) if labelled else None
    if any(each is not None and each.shape != (len(X),) for each in (users, y)):
        raise InputError(f"{path} must have one user, and for heads one target, for each of its {len(X):,} rows.")
    return FileRows(path, X, users, y, {})


_ARRAYS = {"X": ("X", "images"), "users": ("users", "writers"), "y": ("y", "labels")}


def _targets(arrays: Mapping[str, Any], name: str | None, wanted: Wanted, path: Path) -> Any:
    """Return numbers, or the places of labels among the classes: `labels` are such places, `y` labels as written."""
    import numpy as np

    assert name is not None
    found = arrays[name]
    if found.ndim != 1 or found.dtype.kind not in "iufUb":
        raise InputError(f"{name} of {path} must be a list of numbers or texts, one for each row; write it so.")
    if wanted.classes is None:
        if found.dtype.kind == "U" or not np.isfinite(found).all():
            raise InputError(f"{name} of {path} must be finite numbers, for this model predicts numbers; mend it.")
        return found.astype(np.float64)
    if name == "labels":
        if found.dtype.kind not in "iu":
            raise InputError(f"labels of {path} must be class numbers 0, 1, ...; write labels as they are as y.")
        return np.where((found >= 0) & (found < len(wanted.classes)), found, -1).astype(np.float64)
    places = {each: place for place, each in enumerate(wanted.classes)}
    return np.array([places.get(each, -1) for each in found.tolist()], dtype=np.float64)


def _from_config(path: Path, wanted: Wanted, labelled: bool) -> FileRows:
    """Return the images that a file of `fit-neural` names; of dealt ones, with their positions."""
    import numpy as np

    from privrep.data.partition import partition
    from privrep.schema.commands import ImageInput

    asked = ImageInput.read(path)
    names = list(map(str, wanted.classes or ()))
    images = read_images(asked.data, names, asked.users.by)
    found = _of_images(path, images, wanted, labelled)
    if asked.users.partition is None:
        return found
    parts = partition(images.labels, **{"seed": 0, **asked.users.partition.given()})
    held = np.concatenate([parts.train, parts.validation], axis=1)
    rows = held.ravel()
    users = np.repeat(np.arange(len(held)), held.shape[1])
    y = None if found.y is None else found.y[rows]
    return FileRows(path, found.X[rows], users, y, {"image": rows})


def _of_images(path: Path, images: Images, wanted: Wanted, labelled: bool = True) -> FileRows:
    """Return images as rows, and their labels as places among the classes of the model."""
    import numpy as np

    _check_shape(images, wanted, path)
    if not labelled:
        return FileRows(path, images.rows(), images.users)
    if wanted.classes is None:
        raise InputError(
            f"{path} has labels, and {wanted.folder} predicts numbers; give a table, or an archive with an array y."
        )
    places = {str(name): place for place, name in enumerate(wanted.classes)}
    known = np.array([*(places.get(name, -1) for name in images.names), -1], dtype=np.float64)  # -1 stays -1
    return FileRows(path, images.rows(), images.users, known[images.labels])


def _check_shape(images: Images, wanted: Wanted, path: Path) -> None:
    if wanted.image is not None and images.shape != wanted.image:
        raise InputError(f"{path} has images of {images.shape}, and the model takes {wanted.image}; resize them.")


def read_images(data: Any, names: Sequence[str], by: str | None) -> Images:
    """Return the images that a section [data] of `fit-neural` names.

    Args:
        data: the section.
        names: of the classes; labels that are numbers are places among them.
        by: how the data tells users, as users.by has it.
    """
    from privrep.data import images as readers

    if data.kind == "idx":
        return readers.read_idx(data.images, data.labels, data.transpose, names)
    if data.kind == "cifar":
        return replace(readers.read_cifar(data.path, data.part, data.coarse), names=tuple(names))
    if data.kind == "npz":
        return readers.read_npz(data.path, names)
    size = (data.size[0], data.size[1])
    if data.kind == "folder":
        return readers.read_image_folder(data.path, size, data.colour, users=by == "folders")
    return _named_parquet(data, size, by)


def _named_parquet(data: ImageParquet, size: tuple[int, int], by: str | None) -> Images:
    from privrep.data.images import read_image_parquet

    columns = data.columns
    if by is not None and columns.user is None:
        raise InputError("the config must say data.columns.user, the column that names the user of each row.")
    return read_image_parquet(data.path, columns.image, columns.label, columns.user, size, data.colour)
