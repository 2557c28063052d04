"""Users split into groups by their ids: a public rule, the same for a user whatever it or anyone else holds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from privrep.errors import InputError

_WORD = 2**64 - 1


@dataclass(frozen=True)
class Group:
    """Group `index` of the `count` groups of the split of this name.

    Formal guarantee:
    * Every id is a member of exactly one group of a split.
    * The group is a function of the id, the name of the split and the count, and of no other data.
    * It does not change when that user's rows are replaced, nor when other users come or go.
    * It does not change with the type of array that the ids come in.
    """

    split: str
    index: int
    count: int

    def __post_init__(self) -> None:
        if not isinstance(self.split, str):
            raise InputError(f"a split is named by a text. Got {self.split!r} instead.")
        whole = all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in (self.index, self.count))
        if not (whole and 0 <= self.index < self.count < 2**63):
            raise InputError(f"a group is one of 0 to count - 1. Got group {self.index!r} of {self.count!r} instead.")

    def members(self, ids: ArrayLike) -> NDArray[np.bool_]:
        """Return a mask (users,) of the ids that are in the group."""
        return hash_ids(ids, self.split) % np.uint64(self.count) == np.uint64(self.index)


def hash_ids(ids: ArrayLike, name: str) -> NDArray[np.uint64]:
    """Return a public 64-bit hash of each id, (users,), another for each name.

    A number has the hash of the integer it equals, whatever the type of array it comes in.
    """
    seed = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    array = np.asarray(ids)
    if array.dtype.kind in "iub":
        return _mix(array.astype(np.uint64), seed)  # negative numbers modulo 2^64
    if array.dtype.kind == "f":
        array = array.astype(np.float64) + 0.0  # no negative zero
        whole = (np.abs(array) < 2.0**63) & (array == np.rint(array))
        integers = np.where(whole, array, 0.0).astype(np.int64).astype(np.uint64)
        return _mix(np.where(whole, integers, array.view(np.uint64)), seed)
    if array.dtype.kind in "UT":
        return _hash_texts(array.tolist(), seed)
    return _hash_objects(array.astype(object).tolist(), seed)


def _mix(words: NDArray[np.uint64], seed: bytes) -> NDArray[np.uint64]:
    """Return Splitmix64 of words (n,), twice: once to spread them, once more after the seed."""
    mixed = _splitmix(words) ^ np.uint64(int.from_bytes(seed, "little"))
    return _splitmix(mixed)


def _splitmix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return Splitmix64 of each of words (n,)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)  # arrays of integers wrap around
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _hash_texts(texts: Iterable[str], seed: bytes) -> NDArray[np.uint64]:
    """Return the keyed 64-bit BLAKE2b hash of each text."""
    digests = [
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=seed).digest() for text in texts
    ]
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def _hash_objects(ids: list[Any], seed: bytes) -> NDArray[np.uint64]:
    """Return the hashes of ids of several kinds, each as it would be in an array of its own kind."""
    result = np.empty(len(ids), dtype=np.uint64)
    numbers: list[int] = []
    places: list[int] = []
    texts: list[str] = []
    others: list[int] = []
    for place, value in enumerate(ids):
        plain = value.item() if isinstance(value, np.generic) else value
        if isinstance(plain, float) and plain.is_integer():
            plain = int(plain) if abs(plain) < 2.0**63 else plain
        if isinstance(plain, int):
            numbers.append(plain & _WORD)
            places.append(place)
        elif isinstance(plain, float):
            numbers.append(int(np.float64(plain).view(np.uint64)))
            places.append(place)
        else:
            texts.append(plain if isinstance(plain, str) else _write_id(plain))
            others.append(place)
    result[places] = _mix(np.array(numbers, dtype=np.uint64), seed)
    result[others] = _hash_texts(texts, seed)
    return result


def _write_id(value: Any) -> str:
    """Return the text of an id that is neither number nor text. Raise InputError if it has none of its own."""
    if "__repr__" not in {name for kind in type(value).__mro__[:-1] for name in vars(kind)}:
        raise InputError(f"a user id must be a number or a text. Got a {type(value).__name__} instead.")
    return repr(value)
