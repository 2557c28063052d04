"""A full disk ends a run with one sentence, and the run goes on once there is room: nothing is lost, drawn or charged
twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from folders import contents, fit_numbers, rows

from commands import refused
from privrep.errors import DiskFull, InputError
from privrep.models.folder import ModelFolder, write_json
from privrep.privacy.events import Gaussian
from privrep.privacy.ledger import Budget, Ledger, read_ledger

GROWING = """
import resource, sys
from pathlib import Path
from folders import contents, fit_numbers
from privrep.errors import DiskFull
folder, stopped = Path(sys.argv[1]), 0
for limit in (100, 400, 700, 1_000, 1_500, 2_000, 3_000, 4_000, 6_000, 9_000, 1 << 20):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        fit_numbers(folder)
    except DiskFull as error:
        assert "because the disk is full" in str(error) and "\\n" not in str(error), error
        stopped += 1
    else:
        break
print(stopped)
"""


def test_a_run_that_is_stopped_by_a_full_disk_again_and_again_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    """No file may grow beyond a limit, which is raised from one fit to the next."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    fit_numbers(whole)
    here = [str(Path(__file__).parent), *sys.path]
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", GROWING, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(here)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert int(told.stdout) >= 5
    assert contents(folder) == contents(whole)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 96 kB. It takes the right to mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(path)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("a small disk takes the right to mount one")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_is_one_sentence_of_every_writer(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filler = small_disk / "filler"
    run, table = small_disk / "run", small_disk.parent / "table.csv"
    X, y, users = rows()
    np.savetxt(table, np.column_stack([users, y, X]), delimiter=",", header="user,y,a,b,c,d", comments="")
    asked = [
        "fit",
        table,
        "--user",
        "user",
        "--target",
        "y",
        "--rank",
        2,
        "--epsilon",
        8,
        "--delta",
        1e-6,
        "--out",
        run,
    ]
    filler.write_bytes(bytes(40_000))
    assert "disk is full" in refused(capsys, *asked, remarks=True)
    charged = read_ledger(run / "ledger.jsonl").entries.charges if (run / "ledger.jsonl").stat().st_size else {}
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    from privrep import cli

    with pytest.raises(SystemExit) as end:
        cli.main([str(each) for each in asked])
    assert not end.value.code
    after = read_ledger(run / "ledger.jsonl").entries.charges
    assert list(after)[: len(charged)] == list(charged)
    assert ModelFolder(run).finished


def test_a_ledger_that_could_not_grow_is_as_it_was_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(Budget(4.0, 1e-6), path=path)
    ledger.charge({"one/a": Gaussian(10.0)})
    before = path.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(DiskFull, match=r"ledger\.jsonl cannot be written"):
            ledger.charge({"two/a": Gaussian(10.0)})
    assert path.read_bytes() == before
    assert list(ledger.entries.charges) == ["one/a"]
    with pytest.raises(InputError, match="Open it again"):
        ledger.charge({"two/a": Gaussian(10.0)})
    ledger.close()
    ledger = Ledger(Budget(4.0, 1e-6), path=path)
    ledger.charge({"two/a": Gaussian(10.0)})
    ledger.close()
    assert list(read_ledger(path).entries.charges) == ["one/a", "two/a"]


def test_a_description_is_written_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "run.json", {"a": 1})

    def fail(*given: object) -> None:
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(DiskFull) as caught:
        write_json(tmp_path / "run.json", {"a": 2})
    assert not isinstance(caught.value, InputError)
    assert json.loads((tmp_path / "run.json").read_text()) == {"a": 1}
