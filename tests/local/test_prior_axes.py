"""Axes of users' mean rows, where they are fewer than features."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from privrep.local.prior import PriorMean
from privrep.local.transform import FeatureTransform

D, R = 5, 2


def axes_of(rng: np.random.Generator) -> tuple[PriorMean, FeatureTransform, np.ndarray]:
    """Return a mean whose users differ along two axes, the coordinates, and rows' covariance within users."""
    root = rng.normal(size=(D, D))
    within = root @ root.T + np.eye(D)
    values, vectors = np.linalg.eigh(within)
    whitening = (vectors / np.sqrt(values)) @ vectors.T
    axes = whitening @ np.linalg.qr(rng.normal(size=(D, R)))[0]
    mean = replace(PriorMean.zero(D, 1, True), axes=axes, spread=np.ones(R), context=np.zeros((R, 1)))
    return mean, FeatureTransform(np.ones(D), whitening), within


def test_means_differ_as_rows_of_one_user_do_along_the_axes() -> None:
    """Rows of one user have unit variance along the axes, and means differ nowhere else: then C A is right, C the
    covariance of rows."""
    mean, transform, within = axes_of(np.random.default_rng(0))
    assert np.allclose(mean.axes.T @ within @ mean.axes, np.eye(R))
    assert np.allclose(mean.means_at(transform), within @ mean.axes)
    assert np.allclose(mean.axes.T @ mean.means_at(transform), np.eye(R))


def test_units_of_features_do_not_matter() -> None:
    rng = np.random.default_rng(1)
    mean, transform, _ = axes_of(rng)
    slopes, unit = rng.normal(size=(D, 3)), 10.0 ** np.arange(-2, 3)
    other = replace(mean, axes=mean.axes / unit[:, None])
    scaled = FeatureTransform(unit, transform.whitening)
    assert np.allclose(mean.along_axes(slopes, transform), other.along_axes(slopes / unit[:, None], scaled))
    in_raw_units = np.linalg.lstsq(other.axes, slopes / unit[:, None], rcond=None)[0]
    assert not np.allclose(in_raw_units, mean.along_axes(slopes, transform), rtol=0.5)


def test_what_is_left_of_means_has_nothing_along_axes_of_users_with_many_rows() -> None:
    rng = np.random.default_rng(2)
    mean, transform, _ = axes_of(rng)
    X = rng.normal(size=(4, 1, D)) + np.zeros((4, 100_000, D))
    left = mean.scatter_of_means(X, transform)
    assert np.abs(left @ mean.axes).max() < 1e-3
    assert np.abs(left).max() > 0.1
