"""Simulated clients: labelled images dealt to users who see a few classes each, as experiments on federations do.

All draws here are public simulation draws from a seed: they decide who holds what before anybody has data to protect.
Nothing here is part of a fit, and no seed here may be one of a noise source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import maximum_flow

from privrep.data.images import Images
from privrep.data.table import UserTable
from privrep.errors import InputError

Rows = NDArray[np.int64]
_SWAPS = 200  # rounds of swapping classes between random pairs of clients; a class changes hands dozens of times
_HELD_OUT_FROM = 5  # rows of a client from which on it holds out one at least


@dataclass(frozen=True)
class Partition:
    """Which images each client trains on and validates on: positions in the labels that were dealt, none used twice.

    All clients have equally many of both, in random order.
    """

    train: Rows  # (clients, rows)
    validation: Rows  # (clients, rows), maybe none
    counts: Rows  # (clients, all classes): images of each class a client has, validation included

    @property
    def clients(self) -> int:
        return len(self.counts)

    @property
    def classes(self) -> list[Rows]:
        """The classes of each client."""
        return [np.flatnonzero(row) for row in self.counts]


def partition(
    labels: NDArray[Any], clients: int, classes_per_client: int, seed: int, validation: float = 0.1
) -> Partition:
    """Deal images to clients of equal size with at most so many classes each (Collins et al. 2021, by shards).

    Every class is cut into shards as equal as whole images allow, as many as its share of all images; a client gets
    shards of that many different classes at random. Clients are as large as they can all be. A part `validation` of
    each client's images, rounded and at least one where a client has five, is held out. The same seed deals the same.
    """
    labels = _checked(labels)
    _check(len(labels), clients, classes_per_client, validation, seed)
    rng = np.random.default_rng([seed, len(labels), clients, classes_per_client])
    supply = np.bincount(labels)
    each = min(classes_per_client, int((supply > 0).sum()), len(labels) // clients)
    held = _dealt(_shards(supply, clients, each), clients, rng)
    amounts = _amounts(held, supply)
    counts = np.zeros((clients, len(supply)), dtype=np.int64)
    np.put_along_axis(counts, held, amounts, axis=1)
    rows = rng.permuted(_images(labels, counts, rng), axis=1)
    size = rows.shape[1]
    kept = size - _held_out(size, validation)
    return Partition(rows[:, :kept], rows[:, kept:], counts)


def test_rows(parts: Partition, labels: NDArray[Any], per_client: int, seed: int) -> Rows:
    """(clients, per_client): positions in the labels of a test set, of each client's classes in its proportions.

    No image comes twice with one client; several clients may have the same.
    """
    labels = _checked(labels)
    if per_client < 1 or seed < 0:
        raise InputError(f"per_client must be at least 1 and seed at least 0. Got {per_client} and {seed} instead.")
    rng = np.random.default_rng([seed, len(labels), per_client])
    pools = [np.flatnonzero(labels == label) for label in range(parts.counts.shape[1])]
    wanted = _in_proportion(parts.counts, per_client)
    short = [label for label, pool in enumerate(pools) if len(pool) < wanted[:, label].max()]
    if short:
        raise InputError(
            f"a client needs {wanted[:, short[0]].max():,} test images of class {short[0]} and there are "
            f"{len(pools[short[0]]):,}; lower per_client."
        )
    rows = np.empty((parts.clients, per_client), dtype=np.int64)
    for client, many in enumerate(wanted):
        drawn = [rng.choice(pools[label], many[label], replace=False) for label in np.flatnonzero(many)]
        rows[client] = np.concatenate(drawn)
    return rows


def image_table(images: Images, rows: Rows) -> UserTable:
    """Clients who hold these images, (clients, rows), as float32 rows from 0 to 1 with their labels."""
    return client_table(images.rows(rows.ravel()), images.labels[rows.ravel()], rows.shape[0])


def feature_table(features: NDArray[np.float32], labels: NDArray[Any], rows: Rows) -> UserTable:
    """The same with rows of a public feature map instead of pixels."""
    return client_table(features[rows.ravel()], labels[rows.ravel()], rows.shape[0])


def client_table(X: NDArray[np.float32], labels: NDArray[Any], clients: int) -> UserTable:
    """Rows that lie client after client, equally many of each."""
    offsets = np.arange(clients + 1, dtype=np.int64) * (len(X) // clients)
    return UserTable(np.ascontiguousarray(X, np.float32), labels.astype(np.float32), offsets, np.arange(clients))


def natural_table(images: Images) -> UserTable:
    """Images whose users are known, as float32 rows from 0 to 1 with their labels."""
    if images.users is None:
        raise InputError("these images have no users; read them with their users or deal them with partition.")
    return UserTable.from_rows(images.rows(), images.labels.astype(np.float32), images.users)


def _checked(labels: NDArray[Any]) -> Rows:
    found = np.asarray(labels)
    if found.ndim != 1 or found.dtype.kind not in "iu" or not len(found) or found.min() < 0:
        raise InputError("labels must be a list of class numbers 0, 1, ...; give one for each image.")
    return found.astype(np.int64)


def _check(images: int, clients: int, classes_per_client: int, validation: float, seed: int) -> None:
    if not 1 <= clients <= images:
        raise InputError(f"clients must lie between 1 and the number of images, {images:,}. Got {clients:,} instead.")
    if classes_per_client < 1:
        raise InputError(f"classes_per_client must be at least 1. Got {classes_per_client} instead.")
    if not 0 <= validation < 1:
        raise InputError(f"validation must be at least 0 and less than 1. Got {validation} instead.")
    if seed < 0:
        raise InputError(f"seed must not be negative. Got {seed} instead.")


def _held_out(size: int, validation: float) -> int:
    if validation == 0:
        return 0
    return min(max(int(size * validation + 0.5), int(size >= _HELD_OUT_FROM)), size - 1)


def _shards(supply: Rows, clients: int, each: int) -> Rows:
    """How many shards each class is cut into: in proportion to its images, at most one for each client or image."""
    most = np.minimum(clients, supply)
    shards = np.zeros_like(supply)
    while (left := clients * each - shards.sum()) > 0:
        open_ = shards < most
        if not open_.any():
            raise InputError(f"{clients:,} clients cannot have {each} classes each of these; ask for fewer of either.")
        shares = np.where(open_, supply, 0) / supply[open_].sum() * left
        whole = np.floor(shares).astype(np.int64)
        if not whole.any():  # a few are left: to the largest remainders
            whole[np.argsort(-shares, kind="stable")[:left]] = 1
        shards = np.minimum(shards + whole, most)
    return shards


def _dealt(shards: Rows, clients: int, rng: np.random.Generator) -> Rows:
    """(clients, each): different classes for every client, every class as often as it has shards."""
    slots = np.repeat(np.arange(len(shards)), shards)
    held = slots.reshape(-1, clients).T.copy()  # no class has more shards than clients: none comes twice to one
    each = held.shape[1]
    for _ in range(_SWAPS):
        order = rng.permutation(clients)
        a, b = order[: clients // 2], order[clients // 2 : clients // 2 * 2]
        i, j = rng.integers(0, each, (2, len(a)))
        x, y = held[a, i], held[b, j]
        fine = ~(held[a] == y[:, None]).any(axis=1) & ~(held[b] == x[:, None]).any(axis=1)
        held[a[fine], i[fine]], held[b[fine], j[fine]] = y[fine], x[fine]
    return held


def _amounts(held: Rows, supply: Rows) -> Rows:
    """(clients, each): images of each class; all clients equally many, as many as shards that are nearly even allow."""
    clients, each = held.shape
    low, size = each, int(supply.sum()) // clients
    high, best = size, np.ones_like(held)
    while low < high:
        found = _even(held, supply, size)
        if found is not None:
            low, best = size, found
        else:
            high = size - 1
        size = (low + high + 1) // 2
    return best


def _even(held: Rows, supply: Rows, size: int) -> Rows | None:
    """Amounts of clients of this size, as even as can be; None if one would be off an equal shard by more than half."""
    whole, more = divmod(size, held.shape[1])
    width = 0
    while width <= max(whole // 2, 1):
        found = _flow(held, supply, size, max(whole - width, 1), whole + (more > 0) + width)
        if found is not None:
            return found
        width = max(2 * width, 1)
    return None


def _flow(held: Rows, supply: Rows, size: int, least: int, most: int) -> Rows | None:
    """Whole amounts between least and most with the sums that are asked for, as a flow from classes to clients."""
    clients, each = held.shape
    classes = len(supply)
    spare = supply - least * np.bincount(held.ravel(), minlength=classes)
    need = size - least * each
    if spare.min() < 0 or need < 0:
        return None
    source, sink = clients + classes, clients + classes + 1
    owner = np.repeat(np.arange(clients), each)
    tails = np.concatenate([np.full(classes, source), clients + held.ravel(), np.arange(clients)])
    heads = np.concatenate([clients + np.arange(classes), owner, np.full(clients, sink)])
    room = np.concatenate([spare, np.full(clients * each, most - least), np.full(clients, need)]).astype(np.int32)
    graph = csr_array(coo_array((room, (tails, heads)), shape=(sink + 1, sink + 1)))
    result = maximum_flow(graph, source, sink)
    if result.flow_value < need * clients:
        return None
    moved = csr_array(result.flow)[clients + held.ravel(), owner]
    return np.asarray(least + np.asarray(moved).reshape(clients, each), dtype=np.int64)


def _images(labels: Rows, counts: Rows, rng: np.random.Generator) -> Rows:
    """(clients, size): images of each client's classes, a class's images in random order from client to client."""
    clients = len(counts)
    size = int(counts[0].sum())
    dealt = np.empty((clients, size), dtype=np.int64)
    at = np.cumsum(counts, axis=1) - counts
    for label in range(counts.shape[1]):
        many = counts[:, label]
        pool = rng.permutation(np.flatnonzero(labels == label))[: many.sum()]
        owner = np.repeat(np.arange(clients), many)
        place = np.arange(len(pool)) - np.repeat(np.cumsum(many) - many, many) + at[owner, label]
        dealt[owner, place] = pool
    return dealt


def _in_proportion(counts: Rows, total: int) -> Rows:
    """Whole numbers that sum to `total` in every row, in proportion to the row's counts, by largest remainders."""
    shares = counts * (total / counts.sum(axis=1, keepdims=True))
    whole = np.floor(shares + 1e-9).astype(np.int64)
    order = np.argsort(-(shares - whole), axis=1, kind="stable")
    rank = np.argsort(order, axis=1, kind="stable")
    return whole + (rank < total - whole.sum(axis=1, keepdims=True))
