"""Clients of `experiments.table1`: images dealt to clients with few classes each, public features, writers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from privrep.data.images import Images, read_cifar, read_idx, read_npz
from privrep.data.partition import draw_test_rows, make_feature_table, make_image_table, partition
from privrep.data.table import UserTable
from privrep.neural.features import Dct, Edges, efficientnet_features

SEED = 20_261_116
CLASSES = 10
TESTED = 50  # test images of a client
DATASETS = ("mnist", "fashion-mnist", "cifar10", "cifar10 features")
MOST_ROWS = 100  # of a writer
FEATURE_SIDE = 112  # pixels, to which images are enlarged for the frozen encoder


def default_data() -> Path:
    return Path(os.environ.get("PRIVREP_DATA", Path(__file__).parents[2] / "shared" / "data"))


@dataclass(frozen=True)
class Sources:
    """Where data lies. Features of the frozen encoder are computed once and kept in `cache`."""

    data: Path = field(default_factory=default_data)
    fashion: Path = Path("/usr/share/datasets/fashion-mnist")
    cache: Path = field(default_factory=lambda: Path(tempfile.gettempdir()) / "privrep-table1")


@dataclass(frozen=True, eq=False)
class Clients:
    """Rows of all clients: to train on, to choose settings by, and to report on."""

    train: UserTable
    validation: UserTable | None
    test: UserTable
    image: tuple[int, int, int] | None  # height, width, channels; None: rows are features

    @property
    def slots(self) -> int:
        return int(self.train.sizes.max())

    @property
    def features(self) -> int:
        return self.train.n_features

    def first(self, clients: int) -> Clients:
        """The same with the first clients alone."""
        count = min(clients, self.train.n_users)
        validation = None if self.validation is None else self.validation.users(0, count)
        return Clients(self.train.users(0, count), validation, self.test.users(0, count), self.image)

    def mapped(self, public: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> Clients:
        """The same with rows of a public map."""

        def of(table: UserTable) -> UserTable:
            return UserTable(public(table.X), table.y, table.offsets, table.ids)

        validation = None if self.validation is None else of(self.validation)
        return Clients(of(self.train), validation, of(self.test), None)

    def centred(self) -> Clients:
        """The same with each client's own mean taken from its rows, brought to a mean square of one, and in coordinates
        of the span of its own training rows: fits that start at zero never leave it. Of clients of one size."""
        count, slots = self.train.n_users, self.slots
        train = self.train.X.reshape(count, slots, -1)
        mean = train.mean(axis=1, keepdims=True)
        size = np.sqrt(((train - mean) ** 2).sum(axis=2).mean(axis=1))[:, None, None]
        basis = np.linalg.qr((train - mean).transpose(0, 2, 1))[0] / np.maximum(size, 1e-6)

        def of(table: UserTable) -> UserTable:
            rows = (table.X.reshape(count, -1, self.features) - mean) @ basis
            return UserTable(rows.reshape(-1, basis.shape[2]), table.y, table.offsets, table.ids)

        validation = None if self.validation is None else of(self.validation)
        return Clients(of(self.train), validation, of(self.test), None)


@dataclass(frozen=True)
class Unit:
    """A public map, each row brought to one length: then one penalty, and one step, suits all of them."""

    public: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None
    length: float = 1.0

    def __call__(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        found = rows if self.public is None else self.public(rows)
        length = np.linalg.norm(found, axis=1, keepdims=True)
        return (found * (self.length / np.maximum(length, 1e-6))).astype(np.float32)


@lru_cache(maxsize=3)
def mapped(clients: Clients, public: Unit, centred: bool = False) -> Clients:
    """Clients with rows of a public map, remembered."""
    there = clients.mapped(public)
    return there.centred() if centred else there


def public_maps(image: tuple[int, int, int] | None) -> dict[str, Unit]:
    """Of what each client's own logistic regression is made: rows as they are, and features of images."""
    if image is None:
        return {"features": Unit(None)}
    return {"pixels": Unit(None), "DCT 99": Unit(Dct(*image, keep=99)), "edges 256": Unit(Edges(*image, keep=256))}


def linear_map(image: tuple[int, int, int] | None) -> Unit:
    """Of the one shared linear layer: the public features that the default has."""
    return Unit(None if image is None else Edges(*image, keep=256), length=8.0)


def dealt(dataset: str, clients: int, classes_per_client: int, seed: int, sources: Sources) -> Clients:
    """Clients as in the CENTAUR paper, with test images of their own classes in their own proportions."""
    train, test = images_of(dataset, sources)
    parts = partition(train.labels, clients, classes_per_client, SEED + seed)
    tested = draw_test_rows(parts, test.labels, TESTED, SEED + seed)
    if dataset != "cifar10 features":
        tables = [
            make_image_table(train, parts.train),
            make_image_table(train, parts.validation),
            make_image_table(test, tested),
        ]
        return Clients(tables[0], tables[1], tables[2], train.shape)
    features, new = (encoded(part, sources) for part in ("train", "test"))
    tables = [make_feature_table(features, train.labels, rows) for rows in (parts.train, parts.validation)]
    return Clients(tables[0], tables[1], make_feature_table(new, test.labels, tested), None)


@lru_cache(maxsize=2)
def images_of(dataset: str, sources: Sources) -> tuple[Images, Images]:
    if dataset == "mnist":
        train, test = (read_npz(sources.data / "mnist" / f"{part}.npz") for part in ("train", "test"))
    elif dataset == "fashion-mnist":
        train, test = (
            read_idx(*(sources.fashion / f"{part}-{what}-ubyte.gz" for what in ("images-idx3", "labels-idx1")))
            for part in ("train", "t10k")
        )
    else:
        train, test = (read_cifar(sources.data / "cifar10", part) for part in ("train", "test"))
    return train, test


@lru_cache(maxsize=2)
def encoded(part: str, sources: Sources) -> NDArray[np.float32]:
    """CIFAR-10 through the frozen public EfficientNet-Lite0, (images, 1280); a quarter of an hour the first time."""
    path, images = sources.cache / f"cifar_{part}.npz", images_of("cifar10", sources)[part != "train"]
    if not path.exists():
        sources.cache.mkdir(parents=True, exist_ok=True)
        np.savez(path, features=efficientnet_features(images.pixels, FEATURE_SIDE), labels=images.labels)
    with np.load(path) as file:
        features, labels = file["features"], file["labels"]
    if not np.array_equal(labels, images.labels):
        raise SystemExit(f"{path} holds features of other images; delete it.")
    found: NDArray[np.float32] = features
    return found


def writers(seed: int, sources: Sources) -> Clients:
    """MNIST's 539 training writers: a tenth of each one's digits to report on, at most MOST_ROWS of the others."""
    images, _ = images_of("mnist", sources)
    if images.users is None:
        raise SystemExit(f"{sources.data / 'mnist'} does not tell who wrote which digit; --writers needs that.")
    order = np.lexsort((np.random.default_rng([SEED, seed]).random(len(images)), images.users))
    _, starts, sizes = np.unique(images.users[order], return_index=True, return_counts=True)
    place = np.arange(len(order)) - np.repeat(starts, sizes)
    held = np.repeat(np.maximum(sizes // 10, 1), sizes)
    tables = [
        UserTable.from_rows(images.rows(rows), images.labels[rows].astype(np.float32), images.users[rows])
        for rows in (order[(place >= held) & (place < held + MOST_ROWS)], order[place < held])
    ]
    return Clients(tables[0], None, tables[1], images.shape)
