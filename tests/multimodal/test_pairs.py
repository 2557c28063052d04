"""Pairs as rows: targets, texts, who owns what, and that nobody's caption depends on anybody else."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.multimodal.pairs import (
    CIFAR10,
    FASHION_MNIST,
    TEMPLATES,
    Pairs,
    captioned,
    captions_by_class,
    labelled,
    prompts,
    read_flickr8k,
    split_by_image,
)

BANK = np.arange(12, dtype=np.float32).reshape(6, 2)
FLICKR = Path(os.environ.get("PRIVREP_DATA", Path(__file__).parents[3] / "shared" / "data")) / "flickr8k"


def images(count, numbers=3):
    return np.arange(count * numbers, dtype=np.float32).reshape(count, numbers) / 7


def test_labelled_pairs_take_the_captions_of_their_class_in_turn():
    pairs = labelled(images(6), np.array([0, 1, 0, 1, 0, 1]), BANK, [[0, 1, 2], [3, 5]])
    assert pairs.table.n_users == 6
    assert pairs.table.X.dtype == pairs.table.y.dtype == np.float32
    assert pairs.table.y.tolist() == [0, 5, 2, 5, 1, 5]
    assert (pairs.image_numbers, pairs.text_numbers, pairs.free) == (3, 0, 6)
    assert np.array_equal(pairs.texts(pairs.table.X, pairs.table.y), BANK[[0, 5, 2, 5, 1, 5]])
    single = labelled(images(3), np.array([1, 0, 1]), BANK, [4, 2])
    assert single.table.y.tolist() == [2, 4, 2]


def test_a_users_captions_do_not_depend_on_who_else_is_there_or_how_much_they_hold():
    """One more user, with an id that sorts elsewhere, leaves everybody else's captions as they were."""
    labels, choices = np.zeros(9, dtype=np.int64), [list(range(6))]
    users = np.array(["b", "c", "b", "d", "c", "b", "d", "d", "b"])
    before = labelled(images(9), labels, BANK, choices, users).table
    other = np.array(["a", "a", "b", "c", "a", "b", "d", "a", "c", "b", "d", "d", "b"])
    after = labelled(images(13), np.zeros(13, dtype=np.int64), BANK, choices, other).table
    for name in "bcd":
        mine, still = (
            table.y[slice(*table.offsets[np.flatnonzero(table.ids == name)[0] :][:2])] for table in (before, after)
        )
        assert mine.tolist() == still.tolist()
    assert len(np.unique(before.y[:4])) == 4  # the four pairs of one user have four different captions


def test_captioned_pairs_hold_their_text_and_say_so():
    texts = -np.ones((4, 2), np.float32) * np.arange(4)[:, None]
    pairs = captioned(images(4), texts, BANK, users=[7, 3, 7, 3])
    assert pairs.table.ids.tolist() == [3, 7]
    assert pairs.table.sizes.tolist() == [2, 2]
    assert pairs.table.y.tolist() == [6] * 4
    assert np.array_equal(pairs.images(pairs.table.X), images(4)[[1, 3, 0, 2]])
    assert np.array_equal(pairs.texts(pairs.table.X, pairs.table.y), texts[[1, 3, 0, 2]])
    mixed = pairs.texts(pairs.table.X, np.array([6, 0, 5, np.nan], np.float32))
    assert np.array_equal(mixed[:3], np.stack([texts[1], BANK[0], BANK[5]]))
    assert np.isnan(mixed[3]).all()
    assert captioned(images(4), texts).bank.shape == (0, 2)


def test_a_target_that_is_no_text_gives_no_text():
    pairs = labelled(images(4), np.zeros(4, dtype=np.int64), BANK, [[0]])
    texts = pairs.texts(pairs.table.X, np.array([-1, 0.5, 6, np.inf], np.float32))
    assert np.isnan(texts).all()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: labelled(images(2), np.array([0, 2]), BANK, [[0], [1]]), "label 2 of row 1"),
        (lambda: labelled(images(2), np.array([0, -1]), BANK, [[0], [1]]), "label -1 of row 1"),
        (lambda: labelled(images(2), np.array([0]), BANK, [[0]]), "one integer for each"),
        (lambda: labelled(images(2), np.array([0.0, 1.0]), BANK, [[0], [1]]), "one integer for each"),
        (lambda: labelled(images(2), np.array([0, 0]), BANK, [[6]]), "names row 6 of a bank of 6"),
        (lambda: labelled(images(2), np.array([0, 0]), BANK, [[]]), r"caption_of\[0\]"),
        (lambda: labelled(images(2), np.array([0, 0]), BANK, []), "names no class"),
        (lambda: labelled(images(2)[0], np.array([0]), BANK, [[0]]), "images must be rows"),
        (lambda: labelled(images(2), np.array([0, 0]), BANK, [[0]], users=["a"]), "users must name"),
        (lambda: labelled(images(2), np.array([0, 0]), BANK * np.nan, [[0]]), "finite"),
        (lambda: captioned(images(2), np.ones((3, 2)), BANK), "every image needs one caption"),
        (lambda: captioned(images(2), np.ones((2, 3)), BANK), "one encoder"),
        (lambda: Pairs(UserTable.from_rows(images(2), np.zeros(2), [0, 1]), 2, 0, BANK), "do not make rows of 3"),
        (lambda: Pairs(UserTable.from_rows(images(2), np.zeros(2), [0, 1]), 3, 0, BANK[:0]), "neither captions"),
        (lambda: prompts(["cat"], ["no place"]), "no place"),
    ],
)
def test_what_cannot_be_pairs_is_refused(make, said):
    with pytest.raises(InputError, match=said):
        make()


def test_prompts_are_all_classes_in_all_templates():
    texts, owner = prompts(CIFAR10)
    assert len(texts) == 10 * len(TEMPLATES) == len(set(texts))
    assert texts[0] == "a photo of a airplane."
    assert all(CIFAR10[label] in text for text, label in zip(texts, owner.tolist(), strict=True))
    choices = captions_by_class(owner)
    assert choices[3] == list(range(3 * len(TEMPLATES), 4 * len(TEMPLATES)))
    assert len(FASHION_MNIST) == len(set(FASHION_MNIST)) == 10


def write_flickr(folder, names, captions=None, sizes=None):
    from PIL import Image

    with tarfile.open(folder / "images_112px.tar", "w") as archive:
        for place, name in enumerate(names):
            stream = io.BytesIO()
            side = 8 if sizes is None else sizes[place]
            Image.new("RGB", (side, 8), (10 * place, 0, 200)).save(stream, "PNG")
            info = tarfile.TarInfo(name)
            info.size = stream.tell()
            archive.addfile(info, io.BytesIO(stream.getvalue()))
    lines = [f'{name},"{k}, of {name}"' for name in (captions or names) for k in range(5)]
    (folder / "captions.csv.gz").write_bytes(gzip.compress("\n".join(["image,caption", *lines]).encode()))


def test_flickr_is_read_in_order_with_all_captions(tmp_path):
    pytest.importorskip("PIL")
    write_flickr(tmp_path, ["c.jpg", "a.jpg", "b.jpg"])
    data = read_flickr8k(tmp_path)
    assert data.ids == ("a.jpg", "b.jpg", "c.jpg")
    assert data.pixels.shape == (3, 8, 8, 3)
    assert data.pixels[:, 0, 0].tolist() == [[10, 0, 200], [20, 0, 200], [0, 0, 200]]
    texts, owner = data.flat()
    assert texts[5] == "0, of b.jpg"
    assert owner.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert len(read_flickr8k(tmp_path, most=2)) == 2


def test_a_broken_flickr_folder_is_refused(tmp_path):
    pytest.importorskip("PIL")
    with pytest.raises(InputError, match="no file"):
        read_flickr8k(tmp_path)
    write_flickr(tmp_path, ["a.jpg", "b.jpg"], captions=["a.jpg"])
    with pytest.raises(InputError, match=r"b\.jpg"):
        read_flickr8k(tmp_path)
    write_flickr(tmp_path, ["a.jpg", "b.jpg"], sizes=[8, 9])
    with pytest.raises(InputError, match="another size"):
        read_flickr8k(tmp_path)
    write_flickr(tmp_path, ["a.jpg"])
    (tmp_path / "images_112px.tar").write_bytes(b"nothing of the kind" * 100)
    with pytest.raises(InputError, match="fetch it again"):
        read_flickr8k(tmp_path)


def test_parts_are_disjoint_and_the_same_for_the_same_seed(tmp_path):
    pytest.importorskip("PIL")
    write_flickr(tmp_path, [f"{n}.jpg" for n in range(12)])
    data = read_flickr8k(tmp_path)
    first, second = split_by_image(data, [7, 4], seed=1)
    assert (len(first), len(second)) == (7, 4)
    assert not set(first.ids) & set(second.ids)
    assert split_by_image(data, [7, 4], seed=1)[0].ids == first.ids
    assert split_by_image(data, [7, 4], seed=2)[0].ids != first.ids
    assert all(name in text for name, some in zip(first.ids, first.captions, strict=True) for text in some)
    place = data.ids.index(first.ids[0])
    assert np.array_equal(first.pixels[0], data.pixels[place])
    with pytest.raises(InputError, match="do not fit"):
        split_by_image(data, [7, 6], seed=1)


@pytest.mark.skipif(not FLICKR.is_dir(), reason="Flickr8k is not in ../shared/data")
def test_the_real_flickr8k():
    data = read_flickr8k(FLICKR, most=20)
    assert data.pixels.shape == (20, 112, 112, 3)
    assert data.pixels.std() > 20
    assert {len(some) for some in data.captions} == {5}


def test_neither_pairs_nor_privrep_needs_torch():
    code = (
        "import sys, privrep, privrep.multimodal.pairs; sys.exit(not {'torch', 'transformers'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
