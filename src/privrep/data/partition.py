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
    """Images that each client trains on and validates on: positions in the labels that were dealt, none used twice.

    All clients have equally many of both, in random order.
    """

    train: Rows  # (clients, rows)
    validation: Rows  # (clients, rows), maybe none
    counts: Rows  # (clients, all classes): images of each class a client has, validation included

    @property
    def clients(self) -> int:
        """Return the number of clients."""
        return len(self.counts)

    @property
    def classes(self) -> list[Rows]:
        """Return the classes of each client."""
        return [np.flatnonzero(row) for row in self.counts]


def partition(
    labels: NDArray[Any], clients: int, classes_per_client: int, seed: int, validation: float = 0.1
) -> Partition:
    """Deal images to clients of equal size with at most `classes_per_client` classes each.

    By shards, as Collins et al. (2021) do. Every class is cut into shards as equal as whole images allow, as many as
    its share of all images. A client gets shards of that many different classes at random. Clients are as large as they
    can all be. The same seed deals the same.

    Args:
        labels: (images,), class numbers 0, 1, ...
        clients: number of clients.
        classes_per_client: most classes of one client.
        seed: of the dealing.
        validation: part of each client's images that is held out, rounded, at least one where a client has five.
    """
    labels = _check_labels(labels)
    _check_options(len(labels), clients, classes_per_client, validation, seed)
    rng = np.random.default_rng([seed, len(labels), clients, classes_per_client])
    supply = np.bincount(labels)
    each = min(classes_per_client, int((supply > 0).sum()), len(labels) // clients)
    held = _deal_classes(_count_shards(supply, clients, each), clients, rng)
    amounts = _find_amounts(held, supply)
    counts = np.zeros((clients, len(supply)), dtype=np.int64)
    np.put_along_axis(counts, held, amounts, axis=1)
    rows = rng.permuted(_deal_images(labels, counts, rng), axis=1)
    size = rows.shape[1]
    kept = size - _count_held_out(size, validation)
    return Partition(rows[:, :kept], rows[:, kept:], counts)


def draw_test_rows(parts: Partition, labels: NDArray[Any], per_client: int, seed: int) -> Rows:
    """Return positions in the labels of a test set, (clients, per_client), of each client's classes in its proportions.

    No image comes twice with one client; several clients may have the same.

    Args:
        parts: the clients.
        labels: of the test set, (images,).
        per_client: images of each.
        seed: of the drawing.
    """
    labels = _check_labels(labels)
    if per_client < 1 or seed < 0:
        raise InputError(f"per_client must be at least 1 and seed at least 0. Got {per_client} and {seed} instead.")
    rng = np.random.default_rng([seed, len(labels), per_client])
    pools = [np.flatnonzero(labels == label) for label in range(parts.counts.shape[1])]
    wanted = _round_in_proportion(parts.counts, per_client)
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


def make_image_table(images: Images, rows: Rows) -> UserTable:
    """Return the table of clients who hold these images, (clients, rows), as float32 rows from 0 to 1 with labels."""
    return make_client_table(images.rows(rows.ravel()), images.labels[rows.ravel()], rows.shape[0])


def make_feature_table(features: NDArray[np.float32], labels: NDArray[Any], rows: Rows) -> UserTable:
    """Return the table of clients whose rows are images of a public feature map.

    Args:
        features: of all images, (images, features).
        labels: (images,).
        rows: positions of each client's images, (clients, rows).
    """
    return make_client_table(features[rows.ravel()], labels[rows.ravel()], rows.shape[0])


def make_client_table(X: NDArray[np.float32], labels: NDArray[Any], clients: int) -> UserTable:
    """Return the table of rows that lie client after client, equally many of each.

    Args:
        X: (rows, features).
        labels: (rows,).
        clients: number of clients.
    """
    offsets = np.arange(clients + 1, dtype=np.int64) * (len(X) // clients)
    return UserTable(np.ascontiguousarray(X, np.float32), labels.astype(np.float32), offsets, np.arange(clients))


def make_natural_table(images: Images) -> UserTable:
    """Return the table of images whose users are known, as float32 rows from 0 to 1 with their labels."""
    if images.users is None:
        raise InputError("these images have no users; read them with their users or deal them with partition.")
    return UserTable.from_rows(images.rows(), images.labels.astype(np.float32), images.users)


def _check_labels(labels: NDArray[Any]) -> Rows:
    """Return labels (images,) as int64. Raise InputError unless they are class numbers 0, 1, ..."""
    found = np.asarray(labels)
    if found.ndim != 1 or found.dtype.kind not in "iu" or not len(found) or found.min() < 0:
        raise InputError("labels must be a list of class numbers 0, 1, ...; give one for each image.")
    return found.astype(np.int64)


def _check_options(images: int, clients: int, classes_per_client: int, validation: float, seed: int) -> None:
    """Raise InputError unless images can be dealt with these options."""
    if not 1 <= clients <= images:
        raise InputError(f"clients must lie between 1 and the number of images, {images:,}. Got {clients:,} instead.")
    if classes_per_client < 1:
        raise InputError(f"classes_per_client must be at least 1. Got {classes_per_client} instead.")
    if not 0 <= validation < 1:
        raise InputError(f"validation must be at least 0 and less than 1. Got {validation} instead.")
    if seed < 0:
        raise InputError(f"seed must not be negative. Got {seed} instead.")


def _count_held_out(size: int, validation: float) -> int:
    """Return how many of a client's images are held out."""
    if validation == 0:
        return 0
    return min(max(int(size * validation + 0.5), int(size >= _HELD_OUT_FROM)), size - 1)


def _count_shards(supply: Rows, clients: int, each: int) -> Rows:
    """Return how many shards each class is cut into, (classes,).

    The number is in proportion to the class's images, `supply`, (classes,), at most one for each client or image.
    `each` is the classes of a client.
    """
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


def _deal_classes(shards: Rows, clients: int, rng: np.random.Generator) -> Rows:
    """Return different classes for every client, (clients, each), every class as often as it has shards, (classes,)."""
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


def _find_amounts(held: Rows, supply: Rows) -> Rows:
    """Return images of each class of each client, (clients, each): as many as shards that are nearly even allow.

    All clients have equally many. `held` is the classes of each, `supply` the images of each class.
    """
    clients, each = held.shape
    low, size = each, int(supply.sum()) // clients
    high, best = size, np.ones_like(held)
    while low < high:
        found = _find_even_amounts(held, supply, size)
        if found is not None:
            low, best = size, found
        else:
            high = size - 1
        size = (low + high + 1) // 2
    return best


def _find_even_amounts(held: Rows, supply: Rows, size: int) -> Rows | None:
    """Return amounts of clients of this size, as even as can be; None if one is off an equal shard by over half.

    Arrays are as in `_find_amounts`.
    """
    whole, more = divmod(size, held.shape[1])
    width = 0
    while width <= max(whole // 2, 1):
        found = _solve_flow(held, supply, size, max(whole - width, 1), whole + (more > 0) + width)
        if found is not None:
            return found
        width = max(2 * width, 1)
    return None


def _solve_flow(held: Rows, supply: Rows, size: int, least: int, most: int) -> Rows | None:
    """Return whole amounts between least and most with the sums asked for, as a flow from classes to clients.

    None if there is no such flow. Arrays are as in `_find_amounts`.
    """
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


def _deal_images(labels: Rows, counts: Rows, rng: np.random.Generator) -> Rows:
    """Return positions of images, (clients, size), in random order within a class.

    `counts` is the images of each class of each client, (clients, classes).
    """
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


def _round_in_proportion(counts: Rows, total: int) -> Rows:
    """Return whole numbers that sum to `total` in every row of `counts`, (rows, columns), in proportion to it.

    Largest remainders are rounded up.
    """
    shares = counts * (total / counts.sum(axis=1, keepdims=True))
    whole = np.floor(shares + 1e-9).astype(np.int64)
    order = np.argsort(-(shares - whole), axis=1, kind="stable")
    rank = np.argsort(order, axis=1, kind="stable")
    return whole + (rank < total - whole.sum(axis=1, keepdims=True))
