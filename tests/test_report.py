"""What people read: the words about a folder, and the picture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

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
