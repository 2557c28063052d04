"""What all commands share: --quiet, --json, `-` for standard input and output, exit codes, and being stopped."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import typer
from test_cli import BUDGET, COLUMNS, make_rows, write

from commands import Capture, done, run
from privrep import cli
from privrep.cli.console import Bar
from privrep.cli.ending import MEANINGS, ExitCode
from privrep.privacy.ledger import Budget, Ledger

FIT = [*COLUMNS, *BUDGET, "--rank", "2", "--simulate", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, new rows, and a model."""
    folder = tmp_path_factory.mktemp("screen")
    write(folder / "users.csv", make_rows(80))
    write(folder / "users.parquet", make_rows(80))
    write(folder / "new.csv", make_rows(3, first=1000, seed=1))
    done("fit", folder / "users.csv", *FIT, "--out", folder / "model")
    return folder


def give(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Put bytes on standard input."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))


def all_commands(group: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from all_commands(command, (*names, name))
        else:
            yield (*names, name), command


def test_exit_codes_are_those_of_the_document() -> None:
    text = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", text, re.MULTILINE)
    assert rows == [(str(int(code)), MEANINGS[code]) for code in ExitCode]


def test_every_command_can_be_quiet_and_print_json() -> None:
    found = dict(all_commands(typer.main.get_command(cli.app)))
    assert len(found) == 23
    for names, command in found.items():
        options = {option for each in command.params for option in each.opts}
        assert "--quiet" in options, names
        assert ("--json" in options) == (names[0] != "config"), names


def test_flags_show_no_kind_of_value() -> None:
    for names, command in all_commands(typer.main.get_command(cli.app)):
        for each in command.params:
            assert each.metavar == "" or not getattr(each, "is_flag", False), (names, each.name)


# Quiet, and JSON


def test_a_fit_in_json_and_in_silence(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    fit = ["fit", folder / "users.csv", *FIT, "--out"]
    assert run(capsys, *fit, tmp_path / "quiet", "--quiet") == (0, "", "")
    code, out, err = run(capsys, *fit, tmp_path / "model", "--json", "--quiet")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["model"] == str(tmp_path / "model")
    assert (told["users"], told["features"], told["rank"], told["targets"]) == (80, 6, 2, ["y"])
    assert (told["seeded"], told["private"], told["relation"]) == (True, False, "replace-one-user")
    assert 0 < told["epsilon"] <= 4
    assert (told["epsilon_budget"], told["delta"]) == (4, 1e-6)
    other = ["--relation", "add-or-remove-one-user"]
    told = json.loads(run(capsys, *fit, tmp_path / "other", "--json", *other)[1])
    assert "users" not in told  # under this relation their number is no public fact
    assert told["not_private"] == {"users": 80}
    told = json.loads(run(capsys, *fit, tmp_path / "none", "--check", "--json")[1])
    assert told == {"checked": str(folder / "users.csv"), "missing_files": []}
    assert run(capsys, *fit, tmp_path / "none", "--check", "--quiet")[1].startswith("Checked: ")


def test_predict_and_personalize_in_json(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    predict = ["predict", folder / "model", folder / "new.csv", "--out", tmp_path / "p.csv"]
    told = json.loads(run(capsys, *predict, "--json")[1])
    assert told == {
        "predictions": str(tmp_path / "p.csv"),
        "rows": 18,
        "columns": ["prediction"],
        "without_head": {"rows": 18, "users": 3, "treated": "prior"},
        "unknown_values": {},
    }
    assert run(capsys, *predict, "--overwrite", "--quiet") == (0, "", "")
    heads = ["personalize", folder / "model", folder / "new.csv", "--out", tmp_path / "h.csv"]
    assert json.loads(run(capsys, *heads, "--json")[1]) == {"heads": str(tmp_path / "h.csv"), "count": 3}
    assert run(capsys, *heads, "--overwrite", "--quiet") == (0, "", "")


def test_what_was_asked_for_is_shown_in_silence_too(folder: Path, capsys: Capture) -> None:
    for command in (["inspect", folder / "model"], ["budget", "--epsilon", "1e6", "--delta", "1e-6"]):
        loud, quiet = run(capsys, *command), run(capsys, *command, "--quiet")
        assert loud[1] == quiet[1] != ""
        assert quiet[2] == ""
    assert "epsilon 1e+06 is a weak promise" in loud[2]


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (["--noise", "4.4", "--releases", "3"], {"epsilon", "delta", "noise_multiplier", "releases"}),
        (["--epsilon", "1"], {"epsilon", "delta", "relation", "mu", "noise_multiplier", "parts"}),
        (
            ["--epsilon", "1", "--features", "5", "--rank", "0", "--rows", "6", "--users", "900"],
            {"epsilon", "delta", "relation", "problem", "users", "errors", "errors_are", "mean_squared_sine", "goals"},
        ),
        (
            ["--epsilon", "1", "--features", "5", "--rank", "0", "--rows", "6", "--rate", "0.2", "--users", "900"],
            {"epsilon", "delta", "relation", "problem", "users", "errors", "errors_are", "goals"},
        ),
        (
            ["--epsilon", "1", "--items", "50", "--rows", "6", "--users", "900"],
            {"epsilon", "delta", "relation", "problem", "users", "errors", "errors_are"},
        ),
    ],
    ids=["noise", "epsilon", "numbers", "labels", "ratings"],
)
def test_budget_in_json(options: list[str], keys: set[str], capsys: Capture) -> None:
    code, out, _ = run(capsys, "budget", "--delta", "1e-6", *options, "--json")
    assert code == 0
    assert set(json.loads(out)) == keys


# Standard input and output


@pytest.mark.parametrize("name", ["users.csv", "users.parquet"])
def test_a_table_on_standard_input(
    name: str, folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command that reads one says and makes the same as of a file, and keeps no copy of users' rows."""
    workdir = tmp_path / "work"
    workdir.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(workdir))
    give(monkeypatch, (folder / name).read_bytes())
    code, _, err = run(capsys, "fit", "-", *FIT, "--out", tmp_path / "model", "--workdir", workdir)
    assert (code, err) == (0, "")
    for file in ("ledger.jsonl", "private/heads.parquet"):
        assert (tmp_path / "model" / file).read_bytes() == (folder / "model" / file).read_bytes()
    assert run(capsys, "predict", folder / "model", folder / name, "--out", tmp_path / "p.csv")[0] == 0
    give(monkeypatch, (folder / name).read_bytes())
    code, out, err = run(capsys, "predict", folder / "model", "-", "--out", "-")
    assert (code, out) == (0, (tmp_path / "p.csv").read_text())
    made = "made by private heads, not covered by the privacy guarantee"
    assert err == f"480 rows with their prediction: standard output ({made})\n"
    give(monkeypatch, (folder / "new.csv").read_bytes())
    code, out, _ = run(capsys, "personalize", folder / "model", "-", "--out", "-", "--quiet")
    assert [head["user"] for head in json.loads(out)["heads"]] == [1000, 1001, 1002]
    assert list(workdir.iterdir()) == []


def test_what_is_wrong_with_standard_input_is_said_of_it(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pd.read_csv(folder / "users.csv")
    rows.loc[6, "x1"] = float("inf")
    for command in (
        ["fit", "-", *FIT, "--out", tmp_path / "m"],
        ["predict", folder / "model", "-", "--out", "-"],
        ["personalize", folder / "model", "-", "--out", "-"],
    ):
        give(monkeypatch, rows.to_csv(index=False).encode())
        code, out, err = run(capsys, *command)
        assert (code, out) == (2, "")
        assert "of standard input" in err
        assert "privrep-" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_is_written_to_a_file_and_read_from_standard_input(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (["fit-neural"], ["fit-clip"]):
        code, text, _ = run(capsys, "config", "template", *command)
        assert run(capsys, "config", "template", *command, "--out", tmp_path / "c.toml", "--overwrite") == (0, "", "")
        assert (tmp_path / "c.toml").read_text() == text
        give(monkeypatch, text.encode())
        code, out, err = run(capsys, *command, "-", "--check")
        assert (code, out) == (0, "Checked: standard input can be used. No data was read and nothing was spent.\n")
        assert "standard input names it" in err


# Being stopped


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT interrupt, also where the tests run in the background and ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.TERMINATED)]
)
def test_both_signals_say_the_same_and_the_run_is_continued(
    number: int, code: int, folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "model"
    fit = ["fit", folder / "users.csv", *FIT, "--out", out]
    with monkeypatch.context() as patched:
        patched.setattr(Bar, "page", lambda bar, page, epsilon: os.kill(os.getpid(), number))
        found, said, err = run(capsys, *fit)
    kept = f"{out} keeps what was done: run the same command to continue; nothing is spent twice."
    assert (found, said, err) == (code, "", f"privrep: stopped; {kept}\n")
    with closing(Ledger(Budget(4.0, 1e-6), seeded=True, path=out / "ledger.jsonl")):  # another process is at work
        found, said, err = run(capsys, *fit)
        assert (found, said) == (2, "")
        assert "Continuing" not in err
    found, _, err = run(capsys, *fit)
    assert found == 0
    assert err.startswith(f"Continuing the run in {out}; epsilon ")
    assert (out / "ledger.jsonl").read_text() == (folder / "model" / "ledger.jsonl").read_text()


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_commands_without_a_run_are_stopped_alike(
    number: int, code: int, folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privrep.cli.predict.takes_rows_of_images", lambda folder: os.kill(os.getpid(), number))
    predict = ["predict", folder / "model", folder / "users.csv", "--out", tmp_path / "p.csv"]
    assert run(capsys, *predict) == (code, "", "privrep: stopped; run the same command again.\n")
    assert list(tmp_path.iterdir()) == []
