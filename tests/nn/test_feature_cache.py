"""Features that are kept: read again, never taken for others, and for their owner's eyes only."""

from __future__ import annotations

import os
import stat

import numpy as np
import pytest

from privrep.errors import InputError
from privrep.nn import feature_cache
from privrep.nn.feature_cache import load_or_compute, make_private_folder


def test_a_cache_is_read_again_and_never_taken_for_another(tmp_path):
    path, made = tmp_path / "deep" / "features.npz", []

    def make():
        made.append(1)
        return np.ones((2, 3), np.float32)

    first, second = load_or_compute(path, "ones", make), load_or_compute(path, "ones", make)
    assert np.array_equal(first, second)
    assert second.dtype == np.float32
    assert len(made) == 1
    with pytest.raises(InputError, match="holds ones, not twos"):
        load_or_compute(path, "twos", make)
    assert os.listdir(path.parent) == ["features.npz"]
    for broken in (b"broken", path.read_bytes()[:-30], b""):
        path.write_bytes(broken)
        with pytest.raises(InputError, match="delete it"):
            load_or_compute(path, "ones", make)


def test_an_interrupted_cache_leaves_nothing_that_is_read(tmp_path, monkeypatch):
    def broken(stream, **_):
        stream.write(b"half")
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(feature_cache.np, "savez", broken)
        with pytest.raises(OSError, match="no space"):
            load_or_compute(tmp_path / "a.npz", "ones", lambda: np.ones((1, 1), np.float32))
    assert load_or_compute(tmp_path / "a.npz", "ones", lambda: np.ones((1, 1), np.float32)).tolist() == [[1]]


def test_files_and_folders_are_their_owners_alone(tmp_path):
    folder = make_private_folder(tmp_path / "deep" / "cache")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert make_private_folder(folder) == folder
    load_or_compute(folder / "a.npz", "ones", lambda: np.ones((1, 1), np.float32))
    assert stat.S_IMODE((folder / "a.npz").stat().st_mode) == 0o600
    for mode in (0o755, 0o710, 0o701):
        folder.chmod(mode)
        with pytest.raises(InputError, match="chmod 700"):
            make_private_folder(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="name another"):
        make_private_folder(tmp_path / "file")
