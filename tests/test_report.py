"""What people read: the words about a folder, and the picture."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest

from privrep import PrivateFedRep
from privrep import model as models
from privrep.data.synthetic import make_population
from privrep.engines.in_memory import InMemoryUsers
from privrep.errors import InputError
from privrep.heads import fit_heads
from privrep.privacy.ledger import read_report
from privrep.report import words
from privrep.report.picture import draw_fit


def make_model(folder: Path, **options: object) -> models.Model:
    rng = np.random.default_rng(0)
    table = make_population(rng, 400, 6, 2, 6, 0.1).sample(rng)
    settings = {"rank": 2, "epsilon": 4.0, "delta": 1e-6, **options}
    config = models.Config(**settings)  # type: ignore[arg-type]
    fitted = models.learn(InMemoryUsers(table), config, folder=folder)
    fitted = models.with_heads(fitted, fit_heads(table.blocks(), fitted.representation))
    models.finish(fitted, folder)
    return fitted


def everything(found: words.Inspection) -> str:
    return "\n".join([heading + "\n" + "\n".join(lines) for heading, lines in words.sections(found)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "model"
    make_model(path)
    return path


def test_words_state_what_a_reviewer_asks_for(folder: Path) -> None:
    text = everything(words.inspect_folder(folder))
    for said in ("replace-one-user", "epsilon 4", "(4, 1e-06)", "Gaussian differential privacy", "cryptographic"):
        assert said in text
    for unprotected in ("heads", "Membership", "number of users", "Metrics", "Side channels", "Other fits"):
        assert unprotected in text
    assert "SEEDED" not in text
    assert "heads of 400 users" in text


def test_a_seeded_run_says_so_loudly(tmp_path: Path) -> None:
    make_model(tmp_path / "m", seed=3)
    text = everything(words.inspect_folder(tmp_path / "m"))
    assert "NOT PRIVATE" in text
    assert "Nothing, because the noise was seeded" in text
    assert words.as_json(words.inspect_folder(tmp_path / "m"))["private"] is False


def test_the_other_relation_protects_membership(tmp_path: Path) -> None:
    make_model(tmp_path / "m", relation="add-or-remove-one-user")
    found = words.inspect_folder(tmp_path / "m")
    assert "took part at all is protected" in everything(found)
    assert not any("Membership" in line for line in words.not_protected(found))


def test_shares_add_up_to_the_budget(folder: Path) -> None:
    spent = words.inspect_folder(folder).releases
    assert sum(one.share for one in spent) == pytest.approx(1.0, rel=1e-6)
    assert all(one.purpose for one in spent)


def test_every_release_of_the_paper_has_a_purpose_too(tmp_path: Path) -> None:
    make_model(tmp_path / "m", method="paper", intercept=False, safety_net=False)
    spent = words.inspect_folder(tmp_path / "m").releases
    assert {one.name.partition("/")[0].rstrip("0123456789"): one.purpose for one in spent} == {
        "paper-moments": "starting point",
        "paper-round-": "step",
    }


def test_json_holds_numbers_and_words(folder: Path) -> None:
    data = json.loads(json.dumps(words.as_json(words.inspect_folder(folder))))
    assert data["finished"] is True
    assert data["epsilon"] == pytest.approx(4.0, rel=1e-6)
    assert data["representation"]["rank"] == 2
    assert len(data["representation"]["scale"]) == 6
    assert data["events"][0]["name"] == "scales/sizes"
    assert "What is not protected" in data["words"]


def test_an_unfinished_run_is_read_and_left_alone(tmp_path: Path, folder: Path) -> None:
    run = tmp_path / "run"
    config, columns = models.Config(2, 4.0, 1e-6), models.Columns()

    class Killed(Exception):
        pass

    def stop(page: str) -> None:
        if page == "moments":
            raise Killed

    rng = np.random.default_rng(0)
    users = InMemoryUsers(make_population(rng, 400, 6, 2, 6, 0.1).sample(rng))
    with pytest.raises(Killed):
        models.learn(users, config, folder=run, columns=columns, on_page=stop)
    half_written = run / "billboard" / "0002-scout.tmp"
    half_written.write_bytes(b"of a process that is still at work")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    found = words.inspect_folder(run)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert not found.finished
    assert [spent.name for spent in found.releases] == ["scales/sizes", "moments/moments"]
    assert 0 < found.privacy.epsilon < 4
    assert "not finished" in everything(found)
    (run / "ledger.jsonl").unlink()
    assert words.inspect_folder(run).privacy.epsilon == 0


def test_folders_that_are_no_model_are_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        words.inspect_folder(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"no model\.json"):
        words.inspect_folder(tmp_path)
    (tmp_path / "model.json").write_text((folder / "model.json").read_text())
    with pytest.raises(InputError, match="billboard"):
        words.inspect_folder(tmp_path)
    assert not (tmp_path / "billboard").exists()


DAMAGE: dict[str, tuple[str, bytes | None]] = {
    "model.json, torn": ("model.json", b"{"),
    "model.json, a list": ("model.json", b"[]"),
    "model.json, nothing in it": ("model.json", b"{}"),
    "model.json, no config": ("model.json", b'{"format": "privrep-model/1"}'),
    "model.json, not text": ("model.json", b"\xff\xfe"),
    "billboard, a page": ("billboard/0000-scales.safetensors", b"no"),
    "billboard, no representation": ("billboard/*-representation.safetensors", None),
    "ledger, missing": ("ledger.jsonl", None),
    "ledger, empty": ("ledger.jsonl", b""),
    "ledger, a line": ("ledger.jsonl", b"no\n"),
    "ledger, its budget": ("ledger.jsonl", b'{"format": "privrep-ledger/1"}\n'),
    "heads, no Parquet": ("private/heads.parquet", b"no"),
    "heads, empty": ("private/heads.parquet", b""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_one_sentence_however_it_is_read(damage: str, tmp_path: Path, folder: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(folder, broken)
    pattern, content = DAMAGE[damage]
    (path,) = broken.glob(pattern)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    for read in (models.load, PrivateFedRep.load, words.inspect_folder):
        with pytest.raises(InputError) as caught:
            read(broken)
        message = str(caught.value)
        assert str(broken) in message
        assert pattern.partition("/")[0] in message
        assert message.count("\n") == 0


def test_heads_of_another_model_are_refused(tmp_path: Path, folder: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(folder, broken)
    make_model(tmp_path / "other", rank=1)
    shutil.copy(tmp_path / "other" / "private" / "heads.parquet", broken / "private" / "heads.parquet")
    with pytest.raises(InputError, match="heads are of another representation"):
        models.load(broken)


def test_saving_over_a_model_keeps_the_old_one_until_the_new_one_stands(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    old, new = models.load(folder), make_model(tmp_path / "new", rank=1)
    shutil.rmtree(tmp_path / "new")
    models.save(old, target)
    rename = os.replace

    def fails(source: Path, to: Path) -> None:
        if Path(to) == target and Path(source).name == "new":
            assert not target.exists()
            raise OSError("the disk is gone")
        rename(source, to)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails)
        with pytest.raises(OSError, match="the disk is gone"):
            models.save(new, target, overwrite=True)
    assert models.load(target).config.rank == 2
    assert list(tmp_path.iterdir()) == [target]
    models.save(new, target, overwrite=True)
    assert models.load(target).config.rank == 1
    assert list(tmp_path.iterdir()) == [target]
    assert stat.S_IMODE(target.stat().st_mode) == 0o755


def test_the_picture_is_a_png_of_about_a_thousand_pixels(tmp_path: Path, folder: Path) -> None:
    report = read_report(folder / "ledger.jsonl")
    draw_fit(tmp_path / "both.png", report, {"private": 1e-4, "alone": 0.9}, note="A note.")
    draw_fit(tmp_path / "budget.png", report)
    widths = []
    for name in ("both.png", "budget.png"):
        data = (tmp_path / name).read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        widths.append(int.from_bytes(data[16:20], "big"))
    assert widths == [1000, 600]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["both.png", "budget.png"]
