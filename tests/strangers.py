"""Users in another's place: what steps of networks are asked with, and what must hold then. A new step joins by a case.

Two properties make a step private: nobody's numbers depend on anybody else's rows, to the last bit, and the clipped sum
moves by no more than the bound says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from privrep.data.table import UserTable
from privrep.privacy.bounds import Bound
from privrep.privacy.protocol import Step
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance

Rows = tuple[np.ndarray, np.ndarray]
REPLACED = 4  # the user whose rows are replaced in a sum


def strangers(X: np.ndarray, y: np.ndarray) -> dict[str, Rows]:
    """Return rows to put in place of a user's, by what is strange about them; X and y are of an ordinary crowd."""
    other, label = X[0], y[0]
    return {
        "another": (other, label),
        "empty": (np.zeros_like(other), np.full_like(label, -1)),
        "zeros": (np.zeros_like(other), label),
        "huge": (np.full_like(other, 1e30), label),
        "largest": (np.where(other > 0, 3e38, -3e38).astype(np.float32), label),
        "not finite": (np.where(other > 0, np.nan, np.inf).astype(np.float32), label),
        "no classes": (other, np.full_like(label, 1e9)),
        "odd classes": (1e30 * other, np.full_like(label, 0.5)),
        "all alike": (np.repeat(other[:1], len(other), axis=0), np.zeros_like(label)),
        "tiny": ((other * 1e-42).astype(np.float32), label),
    }


def numbers(contributions: Any, user: int) -> np.ndarray:
    """Return all that says what a user sends, its norm included."""
    if hasattr(contributions, "parts"):
        return np.concatenate([numbers(part, user) for part in contributions.parts])
    arrays = [np.asarray(getattr(contributions, field.name))[user].ravel() for field in fields(contributions)]
    return np.concatenate([*arrays, contributions.norms()[[user]]])


def replacements(crowd: Rows, strange: dict[str, Rows], places: tuple[int, ...]) -> Iterator[tuple[str, int, Rows]]:
    """Yield the crowd with a stranger in each of these places."""
    for place in places:
        for words, (rows, labels) in strange.items():
            X, y = (part.copy() for part in crowd)
            X[place], y[place] = rows, labels
            yield words, place, (X, y)


def assert_nobody_else_moves(
    send: Callable[[np.ndarray, np.ndarray], Any],
    crowd: Rows,
    strange: dict[str, Rows],
    places: tuple[int, ...],
    *,
    equal_nan: bool = False,
) -> list[Any]:
    """Check that a stranger changes what nobody else sends, and return what all send beside each stranger."""
    before, sent = send(*crowd), []
    for words, place, replaced in replacements(crowd, strange, places):
        after = send(*replaced)
        with np.errstate(all="ignore"):
            for user in set(range(len(crowd[0]))) - {place}:
                same = np.array_equal(numbers(after, user), numbers(before, user), equal_nan=equal_nan)
                assert same, (words, user)
        sent.append(after)
    return sent


def assert_sum_stays_within_bound(
    step: Step, key: str, bound: Bound, crowd: Rows, strange: dict[str, Rows], least: float
) -> None:
    """Check that a stranger moves the clipped sum by the stated sensitivity at most, and some by more than `least`."""
    X, y = crowd
    rows = [(mine[labels >= 0], labels[labels >= 0]) for mine, labels in zip(X, y, strict=True)]

    def total(users: list[Rows]) -> Any:
        offsets = np.cumsum([0, *(len(labels) for _, labels in users)]).astype(np.int64)
        flat = np.concatenate([x for x, _ in users]), np.concatenate([labels for _, labels in users])
        table = UserTable(*flat, offsets, np.arange(len(users)))
        return InMemoryUsers(table, Performance(2)).sums(step, {key: bound})[key]

    before, moved = total(rows), []
    for other, labels in [*strange.values(), (np.repeat(X[0], 9, axis=0), np.repeat(y[0], 9))]:
        known = labels >= 0
        after = total([*rows[:REPLACED], (other[known], labels[known]), *rows[REPLACED + 1 :]])
        moved.append(np.linalg.norm(after.exact_numbers - before.exact_numbers))
    assert max(moved) <= before.sensitivity("replace-one-user")
    assert max(moved) > least  # there was something to see
