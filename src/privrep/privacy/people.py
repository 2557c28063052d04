"""Sketches of who is in a population: enough to tell that two runs are about the same people, and little more.

A sketch holds the smallest of all hashes of ids, keyed by a salt. Of two sketches with one salt, the smallest hashes of
both together are a uniform sample of all their users. A sketch is no release: it stays with whoever holds the rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from privrep.privacy.groups import hash_ids

SIZE = 1024  # hashes that are kept: parts are told to about two percent


@dataclass(frozen=True, eq=False)
class Sketch:
    """The smallest hashes of users' ids, sorted, (at most SIZE,), and how many users there are as far as is known."""

    hashes: NDArray[np.uint64]
    count: int

    @classmethod
    def of_ids(cls, ids: ArrayLike, salt: str) -> Sketch:
        """Return the sketch of users' ids, (users,); an id counts once however often it occurs.

        A text of digits counts as the number, so that the same people are known again in a file of text.
        """
        given: NDArray[Any] = np.asarray(ids)
        if given.dtype.kind not in "iu":
            given = np.array([_read_number(name) for name in given.ravel().tolist()], dtype=object)
        hashes = np.unique(hash_ids(given, salt))
        return cls(hashes[:SIZE], len(hashes))

    @classmethod
    def of_hashes(cls, hashes: Iterable[int]) -> Sketch:
        """Return a sketch of hashes that were kept."""
        kept = np.unique(np.array(list(hashes), dtype=np.uint64))
        return cls(kept[:SIZE], len(kept))

    def merge(self, other: Sketch) -> Sketch:
        """Return the sketch of all users of both."""
        return Sketch.of_hashes([*self.hashes.tolist(), *other.hashes.tolist()])

    def estimate_part_in(self, other: Sketch) -> float:
        """Return the estimated part of this sketch's users who are among the other's, from 0 to 1."""
        # below this hash both sketches are complete: a uniform sample of all users
        limits = [each.hashes[-1] for each in (self, other) if len(each.hashes) == SIZE]
        mine = self.hashes if not limits else self.hashes[self.hashes <= min(limits)]
        return float(np.isin(mine, other.hashes).mean()) if len(mine) else 0.0


def _read_number(name: Any) -> Any:
    """Return the number that a text of digits says, and any other id as it is."""
    whole = isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 19
    return int(name) if whole and str(int(name)) == name else name
