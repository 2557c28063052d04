"""Users and the keys that each of them holds, in memory: a private selection of keys counts these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from privrep.data.table import factorize
from privrep.errors import InputError
from privrep.privacy.bounds import Bound, BoundedSum, clip_and_sum
from privrep.privacy.contributions import Counts
from privrep.privacy.grid import Total
from privrep.privacy.groups import hash_ids
from privrep.privacy.selection import MOST_KEYS, Key
from privrep.typing import Integers

_CELLS = 1 << 20  # of one sum, padding included
_NO_COLUMN = (pa.ArrowException, ValueError, TypeError, OverflowError)  # what Arrow says of values of several kinds
_USERS = 1 << 16  # of one sum


@dataclass(frozen=True)
class KeyHolders:
    """User u adds to the keys `places[offsets[u]:offsets[u + 1]]` of `private_keys`.

    Formal guarantee: the keys that a user adds to are distinct, at most MOST_KEYS, and a function of that user's rows.
    Of more keys, it adds to the ones of smallest hash. Every key in `private_keys` has a user who adds to it.
    """

    private_keys: tuple[Key, ...] = field(repr=False)
    places: Integers = field(repr=False)
    offsets: Integers = field(repr=False)

    @classmethod
    def from_columns(cls, users: Any, keys: Any) -> KeyHolders:
        """Return the holders of two equally long columns: arrays of NumPy or Arrow, series, lists.

        A row whose key is null has no key. Keys are all integers or all texts. Numbers with a fraction part of zero
        count as integers: integers become such numbers where some are missing.

        Args:
            users: the user of each row, (rows,).
            keys: the key of each row, (rows,).
        """
        if len(users) != len(keys):
            raise InputError(f"every key needs a user. Got {len(users)} users and {len(keys)} keys instead.")
        user = _encode_users(users)
        names, key = _encode_keys(keys)
        user, key = user[key >= 0], key[key >= 0]
        pairs = np.sort(user * max(len(names), 1) + key)  # below 2^63 for what fits in memory
        pairs = pairs[np.diff(pairs, prepend=-1) > 0]
        user, key = np.divmod(pairs, max(len(names), 1))
        user, key = _cap_keys(user, key, names)
        present, places = np.unique(key, return_inverse=True)
        starts = np.flatnonzero(np.diff(user, prepend=-1))
        offsets = np.append(starts, len(user)).astype(np.int64)
        return cls(tuple(names[present].tolist()), places.astype(np.int64), offsets)

    def count_keys(self, bound: Bound) -> BoundedSum:
        """Return how many users hold each key, users clipped to the bound; one zero if there are no keys."""
        total = Total(bound.size)
        for cells in self._pad_cells():
            total.add(clip_and_sum(Counts(cells, bound.size), bound), len(cells))
        return BoundedSum(total.integers, bound)

    def _pad_cells(self) -> Iterator[Integers]:
        """Yield the places of users who have about as many, padded with -1 to the next power of two: (users, width)."""
        sizes = np.diff(self.offsets)
        widths = 1 << np.ceil(np.log2(np.maximum(sizes, 1))).astype(np.int64)
        for width in np.unique(widths).tolist():
            members = np.flatnonzero(widths == width)
            step = min(max(_CELLS // width, 1), _USERS)
            for start in range(0, len(members), step):
                some = members[start : start + step]
                spots = self.offsets[some][:, None] + np.arange(width)
                inside = spots < self.offsets[some + 1][:, None]
                yield np.where(inside, self.places[np.minimum(spots, len(self.places) - 1)], -1)


def _cap_keys(user: Integers, key: Integers, names: NDArray[Any]) -> tuple[Integers, Integers]:
    """Return at most MOST_KEYS keys of each user: of smallest hash, the smaller key where hashes are equal.

    Args:
        user: code of the user of each pair, (pairs,), sorted.
        key: place of the key of each pair in `names`, (pairs,).
        names: the distinct keys.
    """
    if not len(user):
        return user, key
    many = np.bincount(user)[user] > MOST_KEYS
    if not many.any():
        return user, key
    spots = np.flatnonzero(many)
    chosen = spots[np.lexsort((key[spots], hash_ids(names[key[spots]], "keys of a user"), user[spots]))]
    owner = user[chosen]
    rank = np.arange(len(owner)) - np.searchsorted(owner, owner)
    kept = np.sort(np.concatenate([np.flatnonzero(~many), chosen[rank < MOST_KEYS]]))
    return user[kept], key[kept]


def _encode_users(users: Any) -> Integers:
    """Return the code of each row's user, (rows,). Raise InputError if a row has none."""
    try:
        column = _to_arrow(users)
    except _NO_COLUMN:
        return factorize(list(users))[1]
    if column.null_count:
        raise InputError("some rows have no user; give every row one.")
    if not (pa.types.is_integer(column.type) or pa.types.is_string(column.type)):
        named = users.to_numpy(zero_copy_only=False) if isinstance(users, pa.Array) else users
        return factorize(named.to_numpy() if isinstance(named, pa.ChunkedArray) else named)[1]  # as a table has them
    return _encode_column(column)[1]


def _encode_keys(keys: Any) -> tuple[NDArray[Any], Integers]:
    """Return the distinct keys, sorted, and each row's place among them, (rows,), -1 where it has none."""
    refused = "keys must be all integers or all texts, integers of 64 bits at most. Turn them into one or the other."
    try:
        column = _to_arrow(keys)
        if pa.types.is_floating(column.type):
            column = column.cast(pa.int64())  # refuses numbers that are not whole
    except _NO_COLUMN:
        raise InputError(refused) from None
    if pa.types.is_null(column.type):
        return np.empty(0, dtype=np.int64), np.full(len(column), -1)
    if not (pa.types.is_integer(column.type) or pa.types.is_string(column.type)):
        raise InputError(refused)
    distinct, codes = _encode_column(column)
    names = distinct.to_numpy(zero_copy_only=False)
    order = np.argsort(names)
    place = np.append(np.argsort(order), -1)
    return names[order], place[codes]


def _encode_column(column: Any) -> tuple[Any, Integers]:
    """Return distinct values in order of appearance, and the code of each row, (rows,), -1 for null."""
    encoded = column.dictionary_encode()
    codes = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return encoded.dictionary, codes


def _to_arrow(values: Any) -> Any:
    """Return values as one Arrow array.

    Values that pandas takes for missing are null in it, texts are of one type, and categories are decoded.
    """
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    column = values if isinstance(values, pa.Array) else pa.array(values, from_pandas=True)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_large_string(column.type) or str(column.type) == "string_view":
        column = column.cast(pa.string())
    return column
