"""Clients dealt by shards: equal sizes, few classes, no image twice, the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privrep.data import partition as dealing
from privrep.data.images import Images
from privrep.data.partition import Partition, make_feature_table, make_image_table, make_natural_table, partition
from privrep.errors import InputError

MNIST = np.array([5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])  # images of each digit


def everything(parts: Partition) -> np.ndarray:
    return np.concatenate([parts.train, parts.validation], axis=1)


def check(parts: Partition, labels: np.ndarray, most: int) -> None:
    rows = everything(parts)
    assert max(map(len, parts.classes)) <= most
    assert len(np.unique(rows)) == rows.size  # none twice, among clients and within one
    for client, own in enumerate(rows):
        assert np.array_equal(np.bincount(labels[own], minlength=parts.counts.shape[1]), parts.counts[client])


@pytest.mark.parametrize("clients", [500, 1000, 2000, 5000])
@pytest.mark.parametrize("each", [2, 5])
@pytest.mark.parametrize("supply", [MNIST, np.full(10, 6000)], ids=["mnist", "even"])
def test_the_paper_s_settings_use_every_image(clients, each, supply):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), supply))
    parts = partition(labels, clients, each, 0)
    check(parts, labels, each)
    assert everything(parts).shape == (clients, 60_000 // clients)
    assert parts.validation.shape == (clients, int(60_000 / clients * 0.1 + 0.5))
    assert {len(own) for own in parts.classes} == {each}
    shard = 60_000 // clients / each
    assert np.abs(parts.counts[parts.counts > 0] - shard).max() <= 1  # shards are as good as equal
    assert len({tuple(own) for own in parts.classes}) > {2: 44, 5: 200}[each]  # of 45 and 252 combinations


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(lambda s: sum(s) >= 5),
    st.integers(1, 12),
    st.integers(1, 7),
    st.sampled_from([0.0, 0.1, 0.5]),
)
def test_any_population_that_can_be_dealt(supply, clients, each, validation):
    labels = np.repeat(np.arange(len(supply)), supply)
    each_has = min(each, np.count_nonzero(supply), len(labels) // clients)
    if clients > len(labels) or np.minimum(supply, clients).sum() < clients * each_has:
        with pytest.raises(InputError):
            partition(labels, clients, each, 3, validation)
        return
    parts = partition(labels, clients, each, 3, validation)
    assert set(map(len, parts.classes)) == {each_has}
    check(parts, labels, each)
    size = everything(parts).shape[1]
    assert parts.train.shape[1] >= 1
    assert (parts.validation.shape[1] > 0) == (
        validation > 0 and (size >= 5 or int(size * validation + 0.5) > 0) and size > 1
    )


def test_a_seed_decides_everything():
    labels = np.repeat(np.arange(10), 100)
    one, same, other = (partition(labels, 50, 3, seed) for seed in (1, 1, 2))
    assert np.array_equal(everything(one), everything(same))
    assert not np.array_equal(np.sort(everything(one)), np.sort(everything(other)))
    drawn = [dealing.draw_test_rows(one, labels, 8, seed) for seed in (1, 1, 2)]
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])


def test_a_client_s_rows_are_in_random_order():
    """A step that takes the first rows of a client must not see one class alone."""
    labels = np.repeat(np.arange(10), 600)
    train = labels[partition(labels, 100, 2, 0).train]
    assert np.mean([len(set(own[:8])) for own in train]) > 1.9  # sorted rows give 1; at random 2 but for 1 in 128


def test_test_images_are_of_a_client_s_classes_in_its_proportions():
    labels = np.repeat(np.arange(4), [300, 200, 100, 50])
    parts = partition(labels, 13, 2, 5)
    test = np.tile(np.arange(4), 60)
    rows = dealing.draw_test_rows(parts, test, 20, 0)
    assert rows.shape == (13, 20)
    for own, counts in zip(rows, parts.counts, strict=True):
        assert len(set(own)) == 20
        found = np.bincount(test[own], minlength=4)
        assert np.abs(found - 20 * counts / counts.sum()).max() < 1
        assert not found[counts == 0].any()


def test_tables_of_clients():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 3, 2), dtype=np.uint8)
    labels = np.arange(40) % 4
    images = Images(pixels, labels, tuple("abcd"), np.arange(40) % 7)
    parts = partition(labels, 5, 2, 0)
    table = make_image_table(images, parts.train)
    assert table.X.dtype == np.float32
    assert table.sizes.tolist() == [7] * 5
    for client in range(5):
        own = table.users(client, client + 1)
        assert np.allclose(own.X * 255, pixels[parts.train[client]].reshape(7, -1), atol=1e-4)
        assert np.array_equal(own.y, labels[parts.train[client]])
    mapped = make_feature_table(images.rows()[:, :2], labels, parts.validation)
    assert np.array_equal(mapped.X, images.rows(parts.validation.ravel())[:, :2])
    natural = make_natural_table(images)
    assert natural.ids.tolist() == list(range(7))
    assert np.array_equal(natural.users(2, 3).y, labels[2::7])
    with pytest.raises(InputError, match="have no users"):
        make_natural_table(Images(pixels, labels, tuple("abcd")))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda y: partition(y, 0, 2, 0), "between 1 and the number of images, 40"),
        (lambda y: partition(y, 41, 2, 0), "between 1 and the number of images, 40"),
        (lambda y: partition(y, 4, 0, 0), "classes_per_client must be at least 1"),
        (lambda y: partition(y, 4, 2, 0, 1.0), "validation must be"),
        (lambda y: partition(y, 4, 2, -1), "seed"),
        (lambda y: partition(y - 1, 4, 2, 0), "class numbers"),
        (lambda y: partition(y.astype(float), 4, 2, 0), "class numbers"),
        (lambda y: partition(np.array([0] * 39 + [1]), 20, 2, 0), "ask for fewer"),
        (lambda y: dealing.draw_test_rows(partition(y, 4, 2, 0), y, 0, 0), "per_client"),
        (lambda y: dealing.draw_test_rows(partition(y, 4, 2, 0), y, 39, 0), "lower per_client"),
    ],
)
def test_what_cannot_be_is_refused(call, words):
    with pytest.raises(InputError, match=words):
        call(np.arange(40) % 4)
