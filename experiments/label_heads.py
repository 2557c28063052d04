"""Logistic heads of many users at once, for the references of `label_references`: plain Newton's method.

They share nothing with the package's own heads, which they are compared with.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, log_expit, softmax

from experiments.label_data import LabelTask
from experiments.tables_data import Mask
from privrep.typing import Array, Integers

STEPS, FARTHEST = 15, 3.0  # of Newton's method, and how far one may go
BLOCK = 1 << 22  # numbers of users' rows at a time


def by_size(users: Integers, rows: Mask, width: int) -> Iterator[tuple[Integers, Integers]]:
    """Yield users with equally many of these rows, and where the rows are, (users, rows each)."""
    places = np.flatnonzero(rows)
    places = places[np.argsort(users[places], kind="stable")]
    who, starts, sizes = np.unique(users[places], return_index=True, return_counts=True)
    for size in np.unique(sizes):
        same = np.flatnonzero(sizes == size)
        for some in np.array_split(same, max(len(same) * int(size) * width // BLOCK, 1)):
            yield who[some], places[starts[some][:, None] + np.arange(size)]


def fit_heads(task: LabelTask, rows: Array, given: Mask, ridge: float | Array, common: Array) -> Array:
    """Return (users, outputs, columns) logistic heads on the rows given; zero for users without.

    Args:
        task: whose labels and users count.
        rows: (rows, columns).
        given: rows to fit.
        ridge: of each column, or of all.
        common: (rows, outputs) what is added to outputs.
    """
    outputs = common.shape[1]
    heads = np.zeros((task.n_users, outputs, rows.shape[1]))
    for users, places in by_size(task.codes, given, rows.shape[1]):
        for output in range(outputs):
            came = task.y[places] == (1 if task.classes == 2 else output)
            heads[users, output] = newton(rows[places], came, ridge, common[places, output])
    return heads


def newton(rows: Array, came: NDArray[np.bool_], ridge: float | Array, common: Array) -> Array:
    """Return (users, columns) posterior modes of logistic heads, by Newton's method with bounded steps.

    Args:
        rows: (users, m, columns).
        came: (users, m) labels.
        ridge: of each column, or of all.
        common: (users, m) added to outputs.
    """
    heads = np.zeros((len(rows), rows.shape[2]))
    penalty = np.broadcast_to(np.asarray(ridge, dtype=np.float64), rows.shape[2:])
    for _ in range(STEPS):
        said = expit(common + (rows @ heads[:, :, None])[:, :, 0])
        slope = ((came - said)[:, None, :] @ rows)[:, 0] - penalty * heads
        curve = rows.transpose(0, 2, 1) @ (rows * np.maximum(said * (1 - said), 1e-3)[:, :, None]) + np.diag(penalty)
        move = np.linalg.solve(curve, slope[:, :, None])[:, :, 0]
        heads += move * np.minimum(1.0, FARTHEST / np.maximum(np.linalg.norm(move, axis=1), 1e-300))[:, None]
    return heads


def say_heads(rows: Array, heads: Array, users: Integers, asked: Mask, common: Array) -> Array:
    """Return probabilities (asked rows, classes) by users' heads."""
    outputs = np.einsum("rc,roc->ro", rows[asked], heads[users[asked]]) + common[asked]
    return spread_over_classes(outputs)


def spread_over_classes(outputs: Array) -> Array:
    """Return probabilities of classes from outputs (rows, 1), or (rows, classes) one against the rest."""
    if outputs.shape[1] == 1:
        return np.column_stack([expit(-outputs), expit(outputs)])
    return np.asarray(softmax(log_expit(outputs), axis=1))


def own_probabilities(task: LabelTask, rows: Array, given: Mask, asked: Mask, ridges: tuple[float, float]) -> Array:
    """Return probabilities of the rows asked for, from users' own regressions on the rows given.

    Ridges are those of slopes and of intercepts.
    Regressions are made in the span of a user's own rows where these are fewer than columns.
    """
    outputs, d = (1 if task.classes == 2 else task.classes), rows.shape[1]
    weights, levels = np.zeros((task.n_users, outputs, d)), np.zeros((task.n_users, outputs))
    for users, places in by_size(task.codes, given, d):
        own = rows[places]
        axes = np.eye(d)[None] if own.shape[1] >= d else np.linalg.svd(own, full_matrices=False)[2]
        seen = np.concatenate([own @ axes.transpose(0, 2, 1), np.ones((*own.shape[:2], 1))], axis=2)
        penalty = np.append(np.full(seen.shape[2] - 1, ridges[0]), ridges[1])
        for output in range(outputs):
            came = task.y[places] == (1 if task.classes == 2 else output)
            heads = newton(seen, came, penalty, np.zeros(places.shape))
            weights[users, output] = (heads[:, None, :-1] @ axes)[:, 0]
            levels[users, output] = heads[:, -1]
    of = task.codes[asked]
    return spread_over_classes(np.einsum("rd,rod->ro", rows[asked], weights[of]) + levels[of])
