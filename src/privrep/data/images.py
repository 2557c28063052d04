"""Labelled images from files, all in memory: idx, CIFAR's binary files and sheets, NumPy archives, folders, Parquet.

Readers take paths and report what they find: pixels, labels, classes and, where the file tells, users. The classes and
users that occur are data. Whoever hands the names of classes on to a fit says that they are public.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from privrep.boundary import check_expansion, refusing, unpack
from privrep.data.archives import read_arrays as read_arrays
from privrep.data.categories import MOST_CLASSES
from privrep.data.files import find_format, is_text, open_parquet, reading_table, require_column
from privrep.data.parquet import iterate_batches
from privrep.errors import InputError, OverLimit, missing_package

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".pgm", ".ppm")
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # none of which another program is started for
_IMAGES = 1024  # rows of a table that are read at once
_BYTES = 12  # of a pixel, while it is decoded, converted and copied
_CIFAR_SIDE = 32
_IDX_BYTES = 0x08  # the only kind of number in an idx file of images
_Path = str | os.PathLike[str]


@dataclass(frozen=True)
class Images:
    """Images of one size, the class of each as its position in `names`, and the user of each where known.

    The names are those that occur or that the format declares: publishing them is the caller's statement that they
    are public.
    """

    pixels: NDArray[np.uint8]  # (n, height, width) or (n, height, width, channels)
    labels: NDArray[np.int64]  # (n,): positions in `names`; -1 for any other label, and such a row counts for nothing
    names: tuple[str, ...]
    users: NDArray[Any] | None = None  # (n,)

    def __post_init__(self) -> None:
        if self.pixels.dtype != np.uint8 or self.pixels.ndim not in (3, 4):
            raise InputError(
                "images must be whole numbers of 8 bits, (images, height, width) or with channels last; convert them. "
                f"Got {self.pixels.dtype} of shape {self.pixels.shape}."
            )
        counts = [len(self.pixels), len(self.labels)] + ([] if self.users is None else [len(self.users)])
        if len(set(counts)) > 1:
            raise InputError(
                f"there must be one label (and one user) for each image. Got {counts[0]:,} images and "
                f"{' and '.join(f'{count:,}' for count in counts[1:])} of those; give files that belong together."
            )
        known = (self.labels >= 0) & (self.labels < len(self.names))
        object.__setattr__(self, "labels", np.where(known, self.labels, -1))  # the dataclass is frozen

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return height, width and channels."""
        height, width, *channels = self.pixels.shape[1:]
        return height, width, channels[0] if channels else 1

    def rows(self, chosen: NDArray[np.int64] | slice = slice(None)) -> NDArray[np.float32]:
        """Return images as float32 rows (n, height * width * channels) from 0 to 1."""
        pixels = self.pixels[chosen]
        return pixels.reshape(len(pixels), -1).astype(np.float32) / np.float32(255)


def read_idx(images: _Path, labels: _Path, transpose: bool = False, names: Sequence[str] | None = None) -> Images:
    """Return the images of MNIST, EMNIST or Fashion-MNIST: two idx files, packed with gzip or not.

    Args:
        images: path of the images.
        labels: path of the labels.
        transpose: puts images upright that lie on their side, as the images of EMNIST do.
        names: of the classes; without them the classes are the numbers from 0 to the largest label.
    """
    pixels, found = _read_idx_array(images, 3), _read_idx_array(labels, 1).astype(np.int64)
    if transpose:
        pixels = np.ascontiguousarray(pixels.swapaxes(1, 2))
    return Images(pixels, found, _number_classes(found) if names is None else tuple(names))


def read_cifar(folder: _Path, part: str = "train", coarse: bool = False) -> Images:
    """Return the images of CIFAR-10 or CIFAR-100 from the folder of the binary distribution or of sheets.

    The binary distribution has data_batch_*.bin and test_batch.bin (CIFAR-10) or train.bin and test.bin (CIFAR-100).
    Sheets are images <part>_*.webp or *.png with 50 rows of 50 images, labels in <part>_labels.npz.

    Args:
        folder: path of the folder.
        part: train or test.
        coarse: whether labels are the 20 coarse classes of CIFAR-100 instead of its 100.
    """
    folder = Path(folder)
    if part not in ("train", "test"):
        raise InputError(f"part must be train or test. Got {part!r} instead.")
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; check the path.")
    batches = sorted(folder.glob("data_batch_*.bin*" if part == "train" else "test_batch.bin*"))
    hundred = sorted(folder.glob(f"{part}.bin*"))
    if coarse and not hundred:
        raise InputError(f"coarse: only CIFAR-100 has coarse classes, and {folder} has no {part}.bin; leave it out.")
    if batches or hundred:
        return _read_cifar_binary(batches or hundred, 1 if batches else 2, coarse)
    if (folder / f"{part}_labels.npz").exists():
        return _read_cifar_sheets(folder, part)
    if any((folder / name).exists() for name in ("data_batch_1", "test_batch", "meta", "batches.meta")):
        raise InputError(
            f"{folder} holds the pickled CIFAR, and unpickling a file runs whatever code it holds; "
            "give the folder of the binary version."
        )
    raise InputError(f"{folder} holds no CIFAR images of part {part}; give the folder of the binary version.")


def read_npz(path: _Path, names: Sequence[str] | None = None) -> Images:
    """Return the images of a NumPy archive: arrays `images`, `labels` and, where images have a natural user, `writers`.

    Its array `classes`, where there is one, names the classes; else they are numbers as in `read_idx`.
    """
    arrays = read_arrays(path, ("images", "labels"), ("writers", "classes"))
    labels = arrays["labels"]
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise InputError(f"labels of {path} must be a list of integers. Got {labels.dtype} of shape {labels.shape}.")
    listed = names if names is not None else arrays.get("classes")
    found = labels.astype(np.int64)
    return Images(
        arrays["images"],
        found,
        _number_classes(found) if listed is None else tuple(map(str, listed)),
        arrays.get("writers"),
    )


def read_image_folder(folder: _Path, size: tuple[int, int], colour: bool = True, users: bool = False) -> Images:
    """Return the images in subfolders named after their classes, which come in sorted order.

    Args:
        folder: path of the folder: class/image, or user/class/image with `users`.
        size: height and width to which all are resized.
        colour: whether pixels have three channels.
        users: whether the folders above the classes are users.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; check the path.")
    depth = "*/*/*" if users else "*/*"
    files = sorted(f for f in folder.glob(depth) if f.suffix.lower() in SUFFIXES and f.is_file())
    if not files:
        layout = "user/class/image" if users else "class/image"
        raise InputError(f"{folder} holds no images in folders {layout}; check the path and the layout.")
    names = tuple(sorted({file.parent.name for file in files}))
    pixels = _decode_all(((str(file), file) for file in files), len(files), size, colour)
    labels = np.array([names.index(file.parent.name) for file in files], dtype=np.int64)
    return Images(pixels, labels, names, np.array([file.parts[-3] for file in files]) if users else None)


def read_unlabelled_folder(folder: _Path, size: tuple[int, int], colour: bool = True) -> tuple[list[str], Images]:
    """Return the paths and the images of a folder, at whatever depth, without labels; a path begins with the user.

    Args:
        folder: path of the folder.
        size: height and width to which all are resized.
        colour: whether pixels have three channels.
    """
    folder = Path(folder)
    files = sorted(f for f in folder.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file())
    paths = [file.relative_to(folder) for file in files]
    alone = next((path for path in paths if len(path.parts) < 2), None)
    if not files or alone is not None:
        told = "holds no images" if alone is None else f"holds {alone} outside of any folder"
        raise InputError(f"{folder} {told}; put the images of each user into a folder named after the user.")
    pixels = _decode_all(((str(file), file) for file in files), len(files), size, colour)
    nothing = np.full(len(files), -1, dtype=np.int64)
    return [path.as_posix() for path in paths], Images(pixels, nothing, (), np.array([p.parts[0] for p in paths]))


def read_image_parquet(
    path: _Path,
    image: str,
    label: str | None,
    user: str | None,
    size: tuple[int, int],
    colour: bool = True,
    names: Sequence[str] | None = None,
) -> Images:
    """Return the images of a Parquet table: a row holds a user, a label and an encoded image.

    Args:
        path: of the table.
        image: column of encoded images, bytes or structs with a field `bytes`.
        label: column of labels, text or integers; None: no image has one.
        user: column of users; None: no user is known.
        size: height and width to which all are resized.
        colour: whether pixels have three channels.
        names: of the classes. Text labels must be among them, integer labels are positions in them. Without names the
            classes are the labels that occur, sorted (integers: as in `read_idx`).
    """
    if find_format(path) != "parquet":
        raise InputError(f"{path} is not a Parquet file; write the table as Parquet.")
    if not Path(path).is_file():
        raise InputError(f"there is no file {path}; check the path.")
    with reading_table(path):
        with open_parquet(path) as file:
            named = [(option, name) for option, name in (("image", image), ("label", label), ("user", user)) if name]
            for option, name in named:
                require_column(name, option, path, file.schema_arrow.names)
        columns = list(dict.fromkeys(name for _, name in named))
        table = pa.Table.from_batches(list(iterate_batches(path, columns, _IMAGES, whole=True)))
        encoded = _read_encoded(path, image, table.column(image))
    rows = ((f"row {row} of {path}", value) for row, value in enumerate(encoded))
    pixels = _decode_all(rows, len(encoded), size, colour)
    labels, listed = np.full(len(encoded), -1, dtype=np.int64), tuple(names or ())
    if label:
        labels, listed = _read_labels(path, label, table.column(label), names)
    return Images(pixels, labels, listed, _read_plain(path, user, "user", table.column(user)) if user else None)


def _read_bytes(path: _Path) -> bytes:
    """Return all bytes of a file, unpacked if they are packed with gzip, whatever its name."""
    if not Path(path).is_file():
        raise InputError(f"there is no file {path}; check the path.")
    content = Path(path).read_bytes()
    if content[:2] != b"\x1f\x8b":
        return content
    with refusing(lambda why: f"{path} is broken or cut short (gzip: {why}); fetch it again."):
        return unpack(content)


def _read_idx_array(path: _Path, axes: int) -> NDArray[np.uint8]:
    """Return the array of an idx file with this many axes, uint8."""
    content = _read_bytes(path)
    if len(content) < 4 + 4 * axes or content[:4] != bytes((0, 0, _IDX_BYTES, axes)):
        what = "images" if axes == 3 else "labels"
        raise InputError(
            f"{path} is not an idx file of {what}: it starts with {content[:4].hex() or 'nothing'}, not "
            f"{bytes((0, 0, _IDX_BYTES, axes)).hex()}; check that images and labels are not swapped."
        )
    shape = struct.unpack(f">{axes}I", content[4 : 4 + 4 * axes])
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * axes)
    expected = int(np.prod(shape, dtype=object))
    if len(values) != expected:
        raise InputError(f"{path} declares {expected:,} bytes and holds {len(values):,}; fetch it again.")
    return values.reshape(shape)


def _number_classes(labels: NDArray[np.int64]) -> tuple[str, ...]:
    """Return the names of classes 0 to the largest of labels (n,), MOST_CLASSES at most; none without a label."""
    return tuple(map(str, range(min(int(labels.max(initial=-1)) + 1, MOST_CLASSES))))


def _read_cifar_binary(files: list[Path], label_bytes: int, coarse: bool) -> Images:
    """Return the images in binary files of records.

    A record is one label byte (CIFAR-10) or a coarse and a fine one (CIFAR-100), then 32 x 32 red, green, blue.
    """
    record = label_bytes + 3 * _CIFAR_SIDE**2
    parts = []
    for file in files:
        values = np.frombuffer(_read_bytes(file), np.uint8)
        if not len(values) or len(values) % record:
            raise InputError(f"{file} is no whole number of records of {record:,} bytes; fetch it again.")
        parts.append(values.reshape(-1, record))
    records = np.concatenate(parts)
    pixels = records[:, label_bytes:].reshape(-1, 3, _CIFAR_SIDE, _CIFAR_SIDE).transpose(0, 2, 3, 1)
    classes = 10 if label_bytes == 1 else 20 if coarse else 100
    labels = records[:, 0 if coarse or label_bytes == 1 else 1].astype(np.int64)
    return Images(np.ascontiguousarray(pixels), labels, tuple(map(str, range(classes))))


def _read_cifar_sheets(folder: Path, part: str) -> Images:
    """Return the images in sheets of 50 x 50, with labels from an archive."""
    arrays = read_arrays(folder / f"{part}_labels.npz", ("labels",), ("classes",))
    labels = arrays["labels"].astype(np.int64)
    sheets = sorted(f for kind in ("webp", "png") for f in folder.glob(f"{part}_*.{kind}"))
    if not sheets:
        raise InputError(f"{folder} has labels of part {part} and no sheets {part}_*.webp; check the folder.")
    side, across = _CIFAR_SIDE, 50
    parts = []
    for sheet in sheets:
        pixels = _decode(str(sheet), sheet, True, None)
        if pixels.shape != (across * side, across * side, 3):
            raise InputError(f"{sheet} is no sheet of 50 x 50 images of 32 x 32; check the folder.")
        parts.append(pixels.reshape(across, side, across, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3))
    listed = arrays.get("classes")
    return Images(np.concatenate(parts), labels, _number_classes(labels) if listed is None else tuple(map(str, listed)))


def _read_encoded(path: _Path, name: str, column: Any) -> list[bytes | None]:
    """Return the bytes of each image in a column, None where there is none."""
    if pa.types.is_struct(column.type) and "bytes" in [field.name for field in column.type]:
        column = pc.struct_field(column, "bytes")  # null where the struct is
    kind = column.type
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or str(kind) == "binary_view"):
        raise InputError(
            f"the image column {name!r} of {path} holds values of type {kind}; write encoded images (PNG, JPEG) as "
            "bytes or as a struct with a field 'bytes'."
        )
    return list(column.to_pylist())


def _read_labels(
    path: _Path, name: str, column: Any, names: Sequence[str] | None
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return the labels (rows,) as positions in the names of classes, and these names."""
    values = _read_plain(path, name, "label", column)
    if values.dtype.kind in "iu":
        found = values.astype(np.int64)
        return found, _number_classes(found) if names is None else tuple(names)
    listed = tuple(sorted(set(values.tolist()))) if names is None else tuple(names)
    places = {value: place for place, value in enumerate(listed)}
    return np.array([places.get(value, -1) for value in values.tolist()], dtype=np.int64), listed


def _read_plain(path: _Path, name: str, what: str, column: Any) -> NDArray[Any]:
    """Return a column of integers or text as an array, (rows,). Raise InputError for any other, or missing values."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not is_text(column.type) and not pa.types.is_integer(column.type):
        raise InputError(f"the {what} column {name!r} of {path} holds {column.type}; make it integers or text.")
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy())[0])
        raise InputError(f"the {what} column {name!r} of {path} is empty in row {row}; fill it in.")
    return np.array(column.to_pylist()) if is_text(column.type) else np.asarray(column.to_numpy())


def _decode_all(
    sources: Iterable[tuple[str, Path | bytes | None]], count: int, size: tuple[int, int], colour: bool
) -> NDArray[np.uint8]:
    """Return pixels, (count, height, width) or, in colour, (count, height, width, 3).

    Args:
        sources: name and image of each; an error says the name.
        count: number of images.
        size: height and width to which all are resized.
        colour: whether pixels have three channels.
    """
    if len(size) != 2 or min(size) < 1:
        raise InputError(f"size must be height and width of the images in pixels. Got {size} instead.")
    pixels = np.empty((count, *size, 3) if colour else (count, *size), dtype=np.uint8)
    for place, (name, source) in enumerate(sources):
        if source is None:
            raise InputError(f"{name} has no image; fill it in or leave the row out.")
        pixels[place] = _decode(name, source, colour, size)
    return pixels


def _decode(name: str, source: Path | bytes, colour: bool, size: tuple[int, int] | None) -> NDArray[np.uint8]:
    """Return the pixels of one encoded image, resized where a size is given."""
    pillow = _import_pillow()
    try:
        with pillow.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=_FORMATS) as image:
            check_expansion(_BYTES * image.width * image.height, _measure(source))
            deep = image.mode[0] in "IF"
            decoded = image.convert("RGB" if colour else "L")
    except OverLimit as error:
        raise InputError(f"{name} cannot be read as an image ({error}); correct or leave it out.") from None
    except Exception as error:  # a decoder's, which may quote what it read
        raise InputError(
            f"{name} cannot be read as an image ({type(error).__name__}); correct or leave it out."
        ) from error
    if deep:
        raise InputError(f"{name} has more than 8 bits a pixel; convert it to 8 bits.")
    if size is not None and decoded.size != size[::-1]:
        decoded = decoded.resize(size[::-1], pillow.Resampling.BILINEAR)
    return np.asarray(decoded)


def _measure(source: Path | bytes) -> int:
    """Return the bytes of an encoded image."""
    return len(source) if isinstance(source, bytes) else source.stat().st_size


def _import_pillow() -> Any:
    """Return the module PIL.Image. Raise InputError if it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_package("reading encoded images needs Pillow", "torch") from error
    return Image
