"""Public features of handwriting: no number of this map was fitted to anybody's rows.

Random 7 x 7 filters, rectified, their means on a 4 x 4 grid; then the 64 directions in which these vary most over
strokes that are drawn at random, not by people. The same numbers every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from privrep.typing import Array

SEED = 7
FILTERS, SIZE, STRIDE, GRID = 32, 7, 2, 4
FEATURES = 64
STROKES = 3_000
AT_A_TIME = 2_000
Images = NDArray[np.float32]  # (images, 28, 28), 0 to 1


@dataclass(frozen=True)
class PublicMap:
    filters: NDArray[np.float32]
    mean: Array
    directions: Array  # each divided by the fourth root of its variance: half way to equal variances

    def __call__(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        parts = [
            (responses(part.astype(np.float32) / 255, self.filters) - self.mean) @ self.directions
            for part in np.array_split(images, max(len(images) // AT_A_TIME, 1))
        ]
        return np.concatenate(parts).astype(np.float32)


def public_map() -> PublicMap:
    rng = np.random.default_rng(SEED)
    filters = rng.standard_normal((FILTERS, SIZE * SIZE)).astype(np.float32)
    filters -= filters.mean(axis=1, keepdims=True)
    filters /= np.linalg.norm(filters, axis=1, keepdims=True)
    seen = responses(strokes(rng, STROKES), filters)
    mean = seen.mean(axis=0)
    values, vectors = np.linalg.eigh(np.cov((seen - mean).T))
    directions = vectors[:, ::-1][:, :FEATURES] / values[::-1][:FEATURES] ** 0.25
    unit = np.sqrt((((seen - mean) @ directions) ** 2).mean())
    return PublicMap(filters, mean, directions / unit)


def responses(images: Images, filters: NDArray[np.float32]) -> Array:
    """(images, grid cells times filters): means of the rectified filters over the cells of a grid."""
    windows = sliding_window_view(images, (SIZE, SIZE), axis=(1, 2))[:, ::STRIDE, ::STRIDE]
    n, side = windows.shape[:2]
    there = np.maximum(windows.reshape(n * side * side, -1) @ filters.T, 0).reshape(n, side, side, -1)
    edges = np.linspace(0, side, GRID + 1).astype(int)
    cells = np.add.reduceat(np.add.reduceat(there, edges[:-1], axis=1), edges[:-1], axis=2)
    areas = np.outer(np.diff(edges), np.diff(edges))
    return (cells / areas[None, :, :, None]).reshape(n, -1).astype(np.float64)


def strokes(rng: np.random.Generator, count: int, pen: float = 1.3) -> Images:
    """Pictures of one to three quadratic curves, each going on where the last one ended."""
    pixels, t = np.arange(28) + 0.5, np.linspace(0, 1, 24)[:, None]
    images = np.zeros((count, 28, 28), dtype=np.float32)
    for image in images:
        at = rng.uniform(5, 23, 2)
        for _ in range(rng.integers(1, 4)):
            bend, to = rng.uniform(4, 24, (2, 2))
            points = (1 - t) ** 2 * at + 2 * t * (1 - t) * bend + t**2 * to
            across, down = (np.exp(-((points[:, [i]] - pixels) ** 2) / (2 * pen**2)) for i in (0, 1))
            np.maximum(image, 1.6 * (across[:, :, None] * down[:, None, :]).max(axis=0), out=image, casting="same_kind")
            at = to
    return np.minimum(images, 1.0)
