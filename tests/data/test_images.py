"""Readers of images: what they read comes back, and what is broken is said in one sentence."""

from __future__ import annotations

import gzip
import io
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from privrep.data.images import Images, read_cifar, read_idx, read_image_folder, read_image_parquet, read_npz
from privrep.errors import InputError

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (6, 5, 4), dtype=np.uint8)
LABELS = np.array([2, 0, 1, 2, 2, 0])


def idx(values: np.ndarray) -> bytes:
    return bytes((0, 0, 8, values.ndim)) + np.array(values.shape, ">u4").tobytes() + values.astype(np.uint8).tobytes()


def write_idx(folder, pack=lambda content: content):
    paths = folder / "images", folder / "labels"
    for path, values in zip(paths, (GREY, LABELS), strict=True):
        path.write_bytes(pack(idx(values)))
    return paths


def png(pixels: np.ndarray) -> bytes:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("pack", [lambda content: content, gzip.compress], ids=["plain", "gzip"])
def test_idx(tmp_path, pack):
    found = read_idx(*write_idx(tmp_path, pack))
    assert np.array_equal(found.pixels, GREY)
    assert np.array_equal(found.labels, LABELS)
    assert found.names == ("0", "1", "2")
    assert found.shape == (5, 4, 1)
    assert np.allclose(found.rows(np.array([3])), GREY[3].reshape(1, -1) / 255)
    upright = read_idx(tmp_path / "images", tmp_path / "labels", transpose=True, names=("a", "b", "c"))
    assert np.array_equal(upright.pixels, GREY.swapaxes(1, 2))
    assert upright.names == ("a", "b", "c")


def test_broken_idx(tmp_path):
    images, labels = write_idx(tmp_path)
    with pytest.raises(InputError, match="not an idx file of images: it starts with 00000801"):
        read_idx(labels, images)
    with pytest.raises(InputError, match="there is no file"):
        read_idx(tmp_path / "none", labels)
    assert -1 in read_idx(images, labels, names=("a", "b")).labels
    for content, words in [
        (idx(GREY)[:-1], "declares 120 bytes and holds 119"),
        (gzip.compress(idx(GREY))[:-9], "broken or cut short"),
        (b"", "starts with nothing"),
        (idx(GREY[:5]), "5 images and 6 of those"),
    ]:
        images.write_bytes(content)
        with pytest.raises(InputError, match=words):
            read_idx(images, labels)


def test_cifar_binary(tmp_path):
    pixels = RNG.integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    planes = pixels.transpose(0, 3, 1, 2).reshape(4, -1)
    labels = np.array([[9], [0], [3], [9]], np.uint8)
    ten, hundred = tmp_path / "ten", tmp_path / "hundred"
    ten.mkdir()
    hundred.mkdir()
    for batch in (0, 1):
        some = slice(2 * batch, 2 * batch + 2)
        (ten / f"data_batch_{batch + 1}.bin").write_bytes(np.hstack([labels[some], planes[some]]).tobytes())
    found = read_cifar(ten)
    assert np.array_equal(found.pixels, pixels)
    assert found.labels.tolist() == [9, 0, 3, 9]
    assert len(found.names) == 10
    (hundred / "test.bin").write_bytes(np.hstack([labels, 10 * labels, planes]).tobytes())
    assert read_cifar(hundred, "test").labels.tolist() == [90, 0, 30, 90]
    coarse = read_cifar(hundred, "test", coarse=True)
    assert coarse.labels.tolist() == [9, 0, 3, 9]
    assert len(coarse.names) == 20
    assert np.array_equal(coarse.pixels, pixels)
    (hundred / "test.bin").write_bytes(planes.tobytes())
    for call, words in [
        (lambda: read_cifar(hundred, "test"), "whole number of records of 3,074"),
        (lambda: read_cifar(ten, "test"), "no CIFAR images of part test"),
        (lambda: read_cifar(ten, coarse=True), "only CIFAR-100"),
        (lambda: read_cifar(ten, "all"), "train or test"),
        (lambda: read_cifar(tmp_path / "none"), "there is no folder"),
    ]:
        with pytest.raises(InputError, match=words):
            call()


def test_pickled_cifar_is_refused(tmp_path):
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(InputError, match="runs whatever code it holds"):
        read_cifar(tmp_path)


def test_cifar_sheets(tmp_path):
    pixels = RNG.integers(0, 256, (2500, 32, 32, 3), dtype=np.uint8)
    sheet = pixels.reshape(50, 50, 32, 32, 3).swapaxes(1, 2).reshape(1600, 1600, 3)
    (tmp_path / "train_00.png").write_bytes(png(sheet))
    np.savez(tmp_path / "train_labels.npz", labels=np.arange(2500) % 2, classes=np.array(["cat", "dog"]))
    found = read_cifar(tmp_path)
    assert np.array_equal(found.pixels, pixels)
    assert found.names == ("cat", "dog")
    (tmp_path / "train_01.png").write_bytes(png(sheet[:32]))
    with pytest.raises(InputError, match=r"train_01\.png is no sheet"):
        read_cifar(tmp_path)


def test_npz_with_writers(tmp_path):
    path = tmp_path / "digits.npz"
    np.savez(path, images=GREY, labels=LABELS, writers=np.arange(6) // 2)
    found = read_npz(path)
    assert np.array_equal(found.pixels, GREY)
    assert found.users.tolist() == [0, 0, 1, 1, 2, 2]
    assert found.names == ("0", "1", "2")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"images": GREY}, "no array 'labels'"),
        ({"images": GREY, "labels": LABELS[:4]}, "6 images and 4"),
        ({"images": GREY, "labels": LABELS, "writers": np.arange(5)}, "6 images and 6 and 5"),
        ({"images": GREY / 255, "labels": LABELS}, "8 bits"),
        ({"images": GREY, "labels": LABELS / 2}, "list of integers"),
        ({"images": GREY, "labels": LABELS.astype(object)}, "NumPy archive"),  # pickled inside
    ],
)
def test_broken_npz(tmp_path, arrays, words):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(InputError, match=words):
        read_npz(tmp_path / "a.npz")


def test_labels_that_are_no_class_count_for_nothing(tmp_path):
    np.savez(tmp_path / "a.npz", images=GREY, labels=LABELS - 1)
    assert set(read_npz(tmp_path / "a.npz").labels[LABELS == 0]) == {-1}
    np.savez(tmp_path / "a.npz", images=GREY, labels=np.where(LABELS == 0, 10**12, LABELS))
    assert len(read_npz(tmp_path / "a.npz").names) == 1_000


def test_no_npz_at_all(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK but not a zip")
    with pytest.raises(InputError, match="cannot be read as a NumPy archive"):
        read_npz(tmp_path / "a.npz")


def test_folders_of_classes_and_of_users(tmp_path):
    for user, kind, name, value in [("ann", "dog", "a", 10), ("ann", "cat", "b", 20), ("bob", "dog", "c", 30)]:
        folder = tmp_path / user / kind
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.png").write_bytes(png(np.full((4, 6), value, np.uint8)))
        (folder / "notes.txt").write_text("no image")
    found = read_image_folder(tmp_path, (2, 3), colour=False, users=True)
    assert found.pixels.shape == (3, 2, 3)
    assert found.names == ("cat", "dog")
    assert list(zip(found.users, found.labels, found.pixels[:, 0, 0], strict=True)) == [
        ("ann", 0, 20),
        ("ann", 1, 10),
        ("bob", 1, 30),
    ]
    assert read_image_folder(tmp_path / "ann", (4, 6)).pixels.shape == (2, 4, 6, 3)
    (tmp_path / "bob" / "dog" / "d.png").write_bytes(b"\x89PNG broken")
    with pytest.raises(InputError, match=r"d\.png cannot be read as an image"):
        read_image_folder(tmp_path, (2, 3), users=True)
    with pytest.raises(InputError, match="no images in folders class/image"):
        read_image_folder(tmp_path, (2, 3))
    with pytest.raises(InputError, match="height and width"):
        read_image_folder(tmp_path / "ann", (0, 3))


def parquet(path, **columns):
    encoded = [png(np.full((4, 4), 10 * row, np.uint8)) for row in range(3)]
    given = {"image": encoded, "label": ["b", "a", "b"], "who": [7, 7, 9]} | columns
    pq.write_table(pa.table(given), path)
    return path, "image", "label", "who", (4, 4)


@pytest.mark.parametrize("as_struct", [False, True])
def test_parquet(tmp_path, as_struct):
    columns = {}
    if as_struct:  # as Hugging Face writes them
        columns["image"] = [{"bytes": png(np.full((4, 4), 10 * row, np.uint8)), "path": None} for row in range(3)]
    found = read_image_parquet(*parquet(tmp_path / "a.parquet", **columns), colour=False)
    assert found.pixels[:, 0, 0].tolist() == [0, 10, 20]
    assert found.labels.tolist() == [1, 0, 1]
    assert found.names == ("a", "b")
    assert found.users.tolist() == [7, 7, 9]
    args = parquet(tmp_path / "a.parquet", label=[2, 0, 1], who=["x", "y", "x"])
    numbered = read_image_parquet(*args, names=("p", "q", "r", "s"))
    assert numbered.pixels.shape == (3, 4, 4, 3)
    assert numbered.names == ("p", "q", "r", "s")
    assert numbered.users.tolist() == ["x", "y", "x"]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"image": [b"x", b"y", b"z"]}, r"row 0 of .*a\.parquet cannot be read as an image"),
        ({"image": ["x", "y", "z"]}, "holds values of type string"),
        ({"label": ["a", None, "b"]}, "'label' .* is empty in row 1"),
        ({"label": [0.5, 1.0, 2.0]}, "make it integers or text"),
        ({"who": [1, 2, None]}, "'who' .* is empty in row 2"),
    ],
)
def test_broken_parquet(tmp_path, columns, words):
    with pytest.raises(InputError, match=words):
        read_image_parquet(*parquet(tmp_path / "a.parquet", **columns))


def test_more_of_broken_parquet(tmp_path):
    path, *rest = parquet(tmp_path / "a.parquet", image=pa.array([png(GREY[0]), None, b""], pa.binary()))
    with pytest.raises(InputError, match=r"row 1 .* has no image"):
        read_image_parquet(path, *rest)
    args = parquet(tmp_path / "a.parquet")
    assert -1 in read_image_parquet(*args, names=("a", "c")).labels  # one user's label stops nobody's fit
    with pytest.raises(InputError, match="did you mean 'label'"):
        read_image_parquet(args[0], "image", "labels", "who", (4, 4))
    with pytest.raises(InputError, match="there is no file"):
        read_image_parquet(tmp_path / "none.parquet", *rest)
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match="cannot be read as Parquet"):
        read_image_parquet(*args)


def test_deep_images_are_refused(tmp_path):
    deep = png(np.full((4, 4), 1000, np.uint16))
    with pytest.raises(InputError, match="more than 8 bits"):
        read_image_parquet(*parquet(tmp_path / "a.parquet", image=[deep] * 3))


def test_without_pillow_the_extra_is_named(tmp_path, monkeypatch):
    args = parquet(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r"install --constraint constraints.txt .\.\[torch\]"):
        read_image_parquet(*args)


def test_labels_without_images_are_no_images():
    with pytest.raises(InputError, match="one label"):
        Images(GREY, LABELS[:2], ("0", "1", "2"))
