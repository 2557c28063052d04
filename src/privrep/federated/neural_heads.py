"""A node's own heads of a neural model without the server: predictions, and heads for users who come later.

Files are read as by the node's task (`federated.neural_task`). Nothing here is released: rows, heads and predictions
stay on the node, and no privacy is spent.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privrep.boundary import read_json
from privrep.data.images import Images
from privrep.data.missing import REFUSE
from privrep.data.readers import TableSource, assemble, read_checked_batches, read_user_ids, read_values
from privrep.data.table import find_users
from privrep.errors import InputError
from privrep.estimators.network import Centaur
from privrep.estimators.network_heads import Joined, check_kinds, join_heads, kind_of
from privrep.federated.neural_task import NeuralTask, read_arrays
from privrep.federated.task import task_from_json
from privrep.models.folder import ModelFolder
from privrep.neural.checks import rows_of
from privrep.neural.features import check_finite


@dataclass(frozen=True)
class Predictions:
    """Predictions for the rows of a file, in its order. They are private: heads made them."""

    users: NDArray[Any]
    classes: NDArray[Any]  # (rows,), predicted
    names: NDArray[Any]  # (classes,), names of the columns of `probabilities`
    probabilities: NDArray[np.float64] | None  # (rows, classes)


def predict(folder: Path, path: Path, probabilities: bool = False) -> Predictions:
    """Return the class of each row by its user's own head, as `Centaur.predict` does.

    Args:
        folder: the node's folder.
        path: a file of rows; labels are not needed.
        probabilities: whether to return the probability of each class, too.
    """
    task, model = _open_model(folder)
    advice = f"privrep node personalize {folder} FILE"
    if model.heads_ is None:
        raise InputError(f"{folder / 'model'} holds no heads (private/); make some with: {advice}")
    rows, users = _read_rows(task, path, kind_of(model.heads_.ids) == "text")
    _check_width(rows, model, path)
    check_kinds(model.heads_.ids, users, path, folder)
    unknown = np.flatnonzero(find_users(model.heads_.ids, users) < 0)
    if len(unknown):
        raise InputError(
            f"user {users.tolist()[unknown[0]]!r} in row {unknown[0] + 1} of {path} has no head in {folder}; make one "
            f"from some rows with their labels: {advice}"
        )
    scores = model._scores(rows, users)
    check_finite(scores, path)
    found = model.classes_[scores.argmax(axis=1)]
    return Predictions(users, found, model.classes_, model.predict_proba(rows, users) if probabilities else None)


def personalize(folder: Path, path: Path, replace: bool = False) -> Joined:
    """Make heads for the users of a file from their rows and the public part, and add them to the node's heads.

    On an error the heads stay what they were.

    Args:
        folder: the node's folder.
        path: a file of rows with labels.
        replace: whether users who have a head get another.
    """
    task, model = _open_model(folder)
    text = model.heads_ is not None and kind_of(model.heads_.ids) == "text"
    table = task.read_rows(path, text_ids=text)
    return join_heads(model, table, folder / "model", path=path, shown=folder, again=replace)


def _open_model(folder: Path) -> tuple[NeuralTask, Centaur]:
    """Return the task and the model of a node's folder; raise InputError if the folder is damaged."""
    hello, model = folder / "hello.json", folder / "model"
    if not hello.is_file():
        raise InputError(
            f"{folder} has no hello.json, which says how files are read, as a folder has that was copied in part; read "
            f"the model in Python, by Centaur.load({str(model)!r})."
        )
    with ModelFolder(folder).damage(hello.name):
        task = task_from_json(read_json(hello)["task"])
    if not isinstance(task, NeuralTask):
        raise InputError(f"{hello} is of a model of tables, and {model} is a neural one; restore them from a copy.")
    task.check_own(model)
    return task, Centaur.load(model)


# Rows whose labels are not asked for


def _read_rows(task: NeuralTask, path: Path, text_ids: bool) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Return the rows of a file, (rows, numbers), and the user of each row; labels are not read.

    Args:
        task: the node's task, which says how files are read.
        path: a table or a NumPy archive.
        text_ids: whether ids of a CSV file are texts in any case.
    """
    if not path.name.lower().endswith(".npz"):
        rows, users = _read_table_rows(task, path, text_ids)
    elif task.image is not None:
        arrays = read_arrays(path, ("images", "writers"))
        pixels, users = arrays["images"], arrays["writers"]
        images = Images(pixels, np.full(len(pixels), -1) if pixels.ndim else pixels, ())
        task.check_images(images, path)
        rows = images.rows()
    else:
        arrays = read_arrays(path, ("X", "users"))
        rows, users = rows_of(arrays["X"]), arrays["users"]
    if users.ndim != 1 or len(users) != len(rows) or not len(rows):
        raise InputError(f"{path} must have rows, and one user for each. Got {len(rows):,} and {users.shape} instead.")
    return rows, users


def _read_table_rows(task: NeuralTask, path: Path, text_ids: bool) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Return the rows of a table and the user of each row, in its order."""
    columns = task.find_columns(path)
    how: Any = {"numeric": columns.features, "missing": REFUSE}
    source = TableSource(path, columns.user, None, columns.features, text_ids, **how)
    users, rows = [], []
    for batch in read_checked_batches(source):
        users.append(read_user_ids(batch.column(0)))
        rows.append(rows_of(assemble(source, [list(map(read_values, batch.columns[1:]))], batch.num_rows)[0]))
    return np.concatenate(rows), np.concatenate(users)


def _check_width(rows: NDArray[Any], model: Centaur, path: Path) -> None:
    """Raise InputError unless rows have as many numbers as the model takes."""
    if rows.shape[1] != model.n_features_in_:
        raise InputError(
            f"{path} has rows of {rows.shape[1]:,} numbers, and the model takes rows of {model.n_features_in_:,}; give "
            "a file of such rows."
        )
