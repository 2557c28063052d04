"""`privrep audit`: words, JSON, exit codes, and the settings of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import Capture, refused, run
from privrep.audit import one_run, report
from privrep.audit.one_run import LOOKS
from privrep.audit.report import FORMAT, Request, run_audit
from privrep.audit.sabotage import WeakNoise
from privrep.cli.audit import KINDS
from privrep.errors import MissingPackage
from privrep.privacy.ledger import Budget, read_ledger

SURE = ["--confidence", "0.9999999", "--canaries", "4096"]  # false alarms: fewer than 1 in 10^6
GOLDEN = Path(__file__).parents[1] / "golden" / "small"


@pytest.fixture(autouse=True)
def loud_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let controls have so little noise that few canaries catch them, with a chance above 1 - 10^-6."""
    monkeypatch.setattr(report, "CONTROL", 1.5)
    monkeypatch.setattr(report, "CONTROLS", (1.5, 2.0))


def test_the_command_knows_every_kind() -> None:
    assert tuple(LOOKS) == KINDS


def test_words_and_json_say_the_same(capsys: Capture, tmp_path: Path) -> None:
    out = tmp_path / "audit.json"
    code, words, notes = run(capsys, "audit", "--kind", "sums", "--epsilon", 4, *SURE, "--out", out)
    assert code == 0
    assert "passed: no release was seen to reveal more" in " ".join(words.split())
    assert "sums" in words
    assert notes == "auditing sums ...\n"
    kept = json.loads(out.read_text())
    (found,) = kept["releases"]
    assert kept["format"] == FORMAT == "privrep-audit/1"
    assert (kept["passed"], kept["fit"], kept["of"], kept["left_out"]) == (True, None, None, {})
    assert (kept["epsilon"], kept["delta"], kept["relation"]) == (4.0, 1e-6, "replace-one-user")
    assert found["lower"] < found["claimed"] < found["control_lower"]
    assert (found["kind"], found["control"], found["caught"], found["passed"]) == ("sums", 1.5, True, True)
    code, printed, _ = run(capsys, "audit", "--kind", "sums", "--epsilon", 4, *SURE, "--json", "--quiet")
    assert json.loads(printed).keys() == kept.keys()
    assert code == 0


def test_a_library_with_too_little_noise_ends_with_1(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_run, "secure_noise", WeakNoise(1.5))
    code, words, _ = run(capsys, "audit", "--kind", "sums", "--kind", "walks", *SURE)
    assert code == 1
    assert "FAILED" in words
    code, printed, _ = run(capsys, "audit", "--kind", "sums", *SURE, "--json")
    assert code == 1
    assert json.loads(printed)["passed"] is False


def test_a_control_that_is_not_caught_ends_with_1(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "CONTROL", 1.0001)
    code, words, _ = run(capsys, "audit", "--kind", "sums", *SURE)
    assert code == 1
    assert "NO" in words


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_a_model_is_audited_at_its_own_prices(name: str) -> None:
    folder = GOLDEN / name / "model"
    found = run_audit(Request(Budget(1.0, 1e-6), None, 2048, 0.9999999, folder))
    ledger = read_ledger(folder / "ledger.jsonl")
    assert found.passed, found
    assert found.budget == ledger.budget
    assert {each.kind for each in found.findings} <= {"sums", "walks", "selections"}
    costs = {type(event).__name__ for event in ledger.entries.charges.values()}
    assert ("selections" in {each.kind for each in found.findings}) == ("Selection" in costs)
    assert all(0 < each.claimed < ledger.budget.epsilon for each in found.findings)
    kept = json.loads(json.dumps(found.to_json()))
    assert all(isinstance(value, str | float | int) for each in kept["releases"] for value in each.values())  # no rows


def test_of_a_model_on_the_command_line(capsys: Capture) -> None:
    code, printed, _ = run(capsys, "audit", "--of", GOLDEN / "pair" / "model", "--kind", "walks", *SURE, "--json")
    told = json.loads(printed)
    assert code == 0
    assert (told["epsilon"], told["delta"], told["of"]) == (8.0, 0.01, str(GOLDEN / "pair" / "model"))
    assert [found["kind"] for found in told["releases"]] == ["walks"]


def test_kinds_that_do_not_go_with_a_relation_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def note(kind: str, *given: Any) -> Any:
        asked.append(kind)
        raise MissingPackage("it is not there")

    monkeypatch.setattr(report, "audit_kind", note)
    found = run_audit(Request(Budget(1.0, 1e-6, "add-or-remove-one-user")))
    assert asked == ["sums", "walks", "selections", "choices"]
    assert set(found.left_out) == set(LOOKS)
    assert not found.passed  # nothing was looked at
    with pytest.raises(MissingPackage):
        run_audit(Request(Budget(1.0, 1e-6), ("nodes",)))
    assert list(report._plan(Request(Budget(1.0, 0.0)))[1]) == ["choices"]


def test_a_whole_fit_on_the_command_line(capsys: Capture) -> None:
    """With few canaries tried, and so few runs, both exit codes are right: the control may be caught or not."""
    words = ("audit", "--kind", "sums", "--full", "--minutes", "0.01", "--epsilon", "8", *SURE)
    code, printed, notes = run(capsys, *words)
    assert code in (0, 1)
    assert notes.endswith("auditing a whole fit ...\n")
    assert "│ fit " in printed
    assert "of the mu² spent apart" in " ".join(printed.split())
    assert "scales/sizes" in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kind", "sum"], "one of sums, samples"),
        (["--relation", "none"], "--relation must be one of"),
        (["--epsilon", "0"], "epsilon must be"),
        (["--confidence", "1"], "chance below 1"),
        (["--canaries", "3"], "16 to 4,194,304"),
        (["--minutes", "3"], "goes with --full"),
        (["--full", "--minutes", "0"], "some minutes"),
        (["--of", "nowhere"], "not a folder of privrep"),
        (["--of", "nowhere", "--epsilon", "2"], "leave them out"),
        (["--of", str(GOLDEN / "table" / "model"), "--kind", "choices"], "has no release of the kind choices"),
        (["--out", "nowhere/audit.json"], "nowhere is no folder"),
        (["--kind", "samples", "--relation", "add-or-remove-one-user"], "replace-one-user alone"),
        (["--kind", "sums", "--delta", "0"], "noise needs a delta"),
    ],
)
def test_what_cannot_be_audited_is_one_sentence(words: list[str], said: str, capsys: Capture) -> None:
    remarks = words[0] == "--kind" and len(words) > 2
    assert said in refused(capsys, "audit", "--quiet", *words, remarks=remarks)
