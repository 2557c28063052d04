"""Every refusal of every command: exit code 2, one sentence on stderr, nothing on stdout, no file made or changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import BUDGET_OPTIONS, COLUMNS, Case, all_cases

from commands import Capture, done, refused, run
from configs import FEDERATED_NETWORK, FEDERATED_TABLE, merged, write_config

CASES = list(all_cases())
FIRST = {tuple(word for word in each.arguments[:2] if word.isalpha()): each for each in reversed(CASES)}
CONFIGS: dict[str, Mapping[str, Any] | str] = {}  # by world: its configuration


def _make_tables(folder: Path) -> None:
    from test_cli import make_rows, write

    write(folder / "users.csv", make_rows(60))
    write(folder / "new.csv", make_rows(5, first=1000, seed=1))


def _make_model(folder: Path) -> None:
    _make_tables(folder)
    options = [*COLUMNS, *BUDGET_OPTIONS, "--rank", "2", "--simulate", "0", "--out", folder / "model"]
    done("fit", folder / "users.csv", *options)


def _make_gaps(folder: Path) -> None:
    from test_missing_cli import made

    made(60).to_csv(folder / "rows.csv", index=False)


def _make_pairs(folder: Path) -> None:
    pytest.importorskip("torch")
    from test_fit_clip import WHOLE, write_pairs

    write_pairs(folder)
    CONFIGS["pairs"] = WHOLE


def _make_images(folder: Path) -> None:
    pytest.importorskip("torch")
    from test_fit_neural import WHOLE, write_idx

    write_idx(folder)
    (folder / "broken.toml").write_text("[data\n")
    CONFIGS["images"] = WHOLE


def _make_networks(folder: Path) -> None:
    pytest.importorskip("torch")
    from test_networks import PIXELS, ROWS, make_folder

    make_folder(folder)
    bad = ROWS[:3].copy()
    bad[1, 5] = np.nan
    np.savez(folder / "small.npz", images=PIXELS[:3, :4, :4], writers=[0, 1, 2])
    np.savez(folder / "narrow.npz", X=ROWS[:3, :5], users=[0, 1, 2])
    np.savez(folder / "bad.npz", X=bad, users=[0, 1, 2])
    np.savez(folder / "texts.npz", X=ROWS[:3], users=["a", "b", "c"])
    np.savez(folder / "users.npz", X=ROWS[:3], users=[0, 1])
    np.savez(folder / "empty.npz", X=ROWS[:0], users=np.zeros(0, int))
    np.savez(folder / "none.npz", Z=ROWS[:3])
    np.savez(folder / "nobody.npz", X=ROWS[:3])
    (folder / "rows.txt").write_text("1 2 3")
    (folder / "bad.toml").write_text("[users]\nby = 'writers'\n")


def _make_federation(folder: Path) -> None:
    pytest.importorskip("flwr")
    (folder / "rows.parquet").touch()
    CONFIGS["federation"] = FEDERATED_TABLE


def _make_federated_network(folder: Path) -> None:
    pytest.importorskip("flwr")
    pytest.importorskip("torch")
    CONFIGS["federated network"] = FEDERATED_NETWORK


WORLDS: dict[str, Callable[[Path], None]] = {
    "tables": _make_tables,
    "model": _make_model,
    "gaps": _make_gaps,
    "pairs": _make_pairs,
    "images": _make_images,
    "networks": _make_networks,
    "federation": _make_federation,
    "federated network": _make_federated_network,
}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a world, made when it is first asked for. Refusals change nothing, so all share it."""
    made: dict[str, Path] = {}

    def find(world: str) -> Path:
        if world not in made:
            folder = tmp_path_factory.mktemp(world.replace(" ", "-"))
            WORLDS[world](folder)
            made[world] = folder
        return made[world]

    return find


Enter = Callable[[Case], Path]


@pytest.fixture
def enter(worlds: Callable[[str], Path], capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> Enter:
    """Enter the folder of a case's world, with its configuration written."""

    def go(case: Case) -> Path:
        folder = worlds(case.world)
        _write_config(case, folder)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("FLWR_HOME", "")
        capsys.readouterr()
        return folder

    return go


def _write_config(case: Case, folder: Path) -> None:
    config = CONFIGS.get(case.world)
    if isinstance(config, str):
        old, new = case.text or ("", "")
        assert old in config
        (folder / "c.toml").write_text(config.replace(old, new) if old else config)
    elif config is not None:
        write_config(folder / "c.toml", merged(config, case.changes))


def _state(folder: Path) -> dict[Path, tuple[int, int]]:
    found = {path: path.stat() for path in folder.rglob("*")}
    return {path: (about.st_size, about.st_mtime_ns) for path, about in found.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_refusal_is_one_sentence_and_changes_nothing(case: Case, enter: Enter, capsys: Capture) -> None:
    folder = enter(case)
    before = _state(folder)
    assert case.sentence in refused(capsys, *case.arguments, remarks=case.remarks)
    assert _state(folder) == before


@pytest.mark.parametrize("case", FIRST.values(), ids=str)
def test_it_is_the_same_sentence_with_quiet_and_json(case: Case, enter: Enter, capsys: Capture) -> None:
    enter(case)
    for option in (["--quiet"], ["--json"])[: 1 if case.arguments[0] == "config" else 2]:
        code, out, err = run(capsys, *case.arguments, *option)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert case.sentence in err
