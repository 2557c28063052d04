"""Ledger and billboard check each other: threads, forks, tampering, and models of before."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import tampering
from threads import BUDGET, THREADS, draw_together, price, spend_together, together

from privrep.errors import InputError, PrivrepError
from privrep.models.folder import ModelFolder
from privrep.models.verification import verify
from privrep.privacy.billboard import Billboard, Post, Release
from privrep.privacy.books import check_books, find_fault
from privrep.privacy.events import Event, Gaussian, Pure
from privrep.privacy.ledger import Budget, Ledger, read_ledger, read_report

# Threads and processes


@pytest.mark.parametrize("on_disk", [False, True])
def test_threads_never_spend_more_than_the_budget(tmp_path: Path, on_disk: bool) -> None:
    for trial in range(5 if on_disk else 25):
        assert spend_together(tmp_path / f"{trial}.jsonl" if on_disk else None) == ""


def test_one_charge_pays_for_one_draw_whatever_threads_ask() -> None:
    assert {draw_together() for _ in range(25)} == {""}


@pytest.mark.parametrize("trial", [spend_together, lambda path: draw_together()])
def test_threads_at_a_ledger_without_a_lock_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trial: Callable[[Path], str]
) -> None:
    """A slow check of what fits gives the other threads their chance."""
    check = Ledger._check_fits

    def check_slowly(ledger: Ledger, events: list[Event], new: str) -> None:
        check(ledger, events, new)
        time.sleep(0.01)

    monkeypatch.setattr(Ledger, "_check_fits", check_slowly)
    assert trial(tmp_path / "locked.jsonl") == ""
    monkeypatch.setattr(Ledger, "_writing", lambda ledger: nullcontext())
    assert trial(tmp_path / "ledger.jsonl") != ""


def test_threads_give_each_page_a_number_of_its_own(tmp_path: Path) -> None:
    board = Billboard(tmp_path / "billboard")
    together(lambda number: [board.post_derived(f"p{number}-{k}", {}, {}) for k in range(3)] and None)
    numbers = [path.name[:4] for path in (tmp_path / "billboard").glob("*.safetensors")]
    assert sorted(numbers) == [f"{number:04d}" for number in range(3 * THREADS)]


def test_a_forked_child_cannot_charge(tmp_path: Path) -> None:
    ledger = Ledger(BUDGET, path=tmp_path / "ledger.jsonl")
    ledger.charge({"a/sum": price(0.1)})
    before = (tmp_path / "ledger.jsonl").read_bytes()
    with ledger._lock:  # as if another thread were at work when the process forks
        child = os.fork()
        if not child:
            try:
                ledger.charge({"b/sum": price(0.1)})
            except InputError as error:
                os._exit(0 if "before the process forked" in str(error) and ledger.epsilon > 0 else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    ledger.charge({"b/sum": price(0.1)})
    ledger.close()


# Tampering


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("books") / "model"
    tampering.make_model(folder)
    return folder


@pytest.mark.parametrize("change", tampering.CHANGES, ids=lambda change: change.__name__)
def test_changes_that_change_what_is_reported_are_refused(
    model: Path, tmp_path: Path, change: tampering.Change
) -> None:
    before = tampering.said(model)
    found = [tampering.try_change(model, change, seed, before, tmp_path, seed == 0) for seed in range(12)]
    assert set(found) <= {"refused", "harmless"}
    assert ("refused" in found) == (change not in tampering.HARMLESS)


def test_an_untouched_folder_verifies_whole_and_published(model: Path, tmp_path: Path) -> None:
    found = verify(model)
    assert found.good
    assert {"ledger", "billboard", "seal", "chain", "pages", "says", "charges", "budget", "epsilon"} == {
        finding.name for finding in found.findings
    }
    shutil.copytree(model, tmp_path / "published", ignore=shutil.ignore_patterns("private"))
    assert verify(tmp_path / "published").good
    assert found.epsilon == read_report(model / "ledger.jsonl").epsilon


def test_a_verification_lists_every_fault(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    first, second, *_ = sorted((folder / "billboard").iterdir())
    first.unlink()
    second.write_bytes(b"no page")
    lines = (folder / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "ledger.jsonl").write_bytes(b"".join(lines[:-1]))
    wrong = {finding.name for finding in verify(folder).findings if not finding.good}
    assert wrong == {"billboard", "seal"}
    second.unlink()
    wrong = {finding.name for finding in verify(folder).findings if not finding.good}
    assert wrong == {"says", "seal"}


def test_a_folder_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a folder of privrep"):
        verify(tmp_path)


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[1] / "golden").glob("*/*/model")), ids=str)
def test_models_of_before_verify_and_are_said_to_be_unchained(path: Path) -> None:
    found = verify(path)
    assert found.good
    chained = read_ledger(path / "ledger.jsonl").chained
    assert any("unchained" in finding.words for finding in found.findings) == (not chained)


# One fault at a time


def released(sigma: float = 2.0, multiplier: float = 2.0, value: float = 1.0) -> Release:
    return Release(np.array([value, 2.0]), sigma, 1.0, multiplier)


def books(*, charge: Gaussian | Pure | None = None, page: Post | None = None) -> tuple[Ledger, Billboard]:
    """A ledger with one charge, and a billboard with one page."""
    ledger, board = Ledger(Budget(50.0, 1e-6)), Billboard()
    ledger.charge({"page/sum": charge or Gaussian(2.0)})
    board._post(page or Post("page", {"sum": released().value}, {"releases": {"sum": facts()}}))
    ledger.record_posted(board["page"], {"page/sum": charge or Gaussian(2.0)})
    return ledger, board


def facts(**changed: float) -> dict[str, float]:
    return {"sigma": 2.0, "sensitivity": 1.0, "noise_multiplier": 2.0, **changed}


def page(**changed: float) -> Post:
    return Post("page", {"sum": np.ones(2)}, {"releases": {"sum": facts(**changed)}})


FAULTS = {
    "is charged for less noise": ({"charge": Gaussian(1.9), "page": page(noise_multiplier=1.8, sigma=1.8)}, "another"),
    "states other noise": ({"page": page(sigma=1.0)}, "sigma over sensitivity"),
    "states no noise": ({"page": page(sigma=0.0)}, "none"),
    "is infinite": ({"page": Post("page", {"sum": np.array([np.inf])}, page().facts)}, "no number"),
    "has a table": ({"page": Post("page", {"sum": np.ones((2, 2))}, page().facts)}, "shape"),
    "lacks its numbers": ({"page": Post("page", {}, page().facts)}, "other numbers"),
    "is simulated": ({"page": Post("page", page().arrays, {**page().facts, "simulation": True})}, "what the ledger"),
    "was charged as a choice": ({"charge": Pure(0.1)}, "lacks"),
    "is computed": ({"page": Post("page", {}, {"derived": {}})}, "was charged"),
    "is of two kinds": ({"page": Post("page", {}, {"derived": {}, "choice": {}})}, "no kind"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_page_that_was_not_paid_for_as_it_says_is_a_fault(name: str) -> None:
    given, words = FAULTS[name]
    assert words in find_fault(*books(**given))  # type: ignore[arg-type]


def test_books_in_order_have_no_fault() -> None:
    ledger, board = books()
    assert find_fault(ledger, board) == ""
    more = books(page=page(noise_multiplier=2.5, sigma=2.5))  # nodes may add more noise than was asked for
    assert find_fault(*more) == ""
    ledger.charge({"other/sum": Gaussian(9.0)})
    charges = {each.name: each for each in check_books(ledger, board)}["charges"]
    assert charges.good
    assert "unposted: other" in charges.words


def test_the_last_page_may_stand_on_no_record_while_a_run_is_under_way() -> None:
    ledger, board = books()
    board.post_derived("more", {}, {})
    assert find_fault(ledger, board, finished=False) == ""
    assert "on no record" in find_fault(ledger, board)
    board.post_derived("again", {}, {})
    assert "on no record" in find_fault(ledger, board, finished=False)


def test_a_page_that_changed_is_not_read_by_the_run_that_goes_on(tmp_path: Path) -> None:
    from privrep.privacy.run import Run

    with Run.open(None, Budget(50.0, 1e-6), folder=tmp_path) as run:
        run.derive("first", {"a": np.ones(3)})
        run.derive("second", {"a": np.ones(3)})
    (path,) = (tmp_path / "billboard").glob("*first*")
    path.unlink()
    with pytest.raises(PrivrepError, match="'first' is missing"), Run.open(None, Budget(50.0, 1e-6), folder=tmp_path):
        pass
    Billboard(tmp_path / "billboard").post_derived("first", {"a": np.zeros(3)}, {})
    with pytest.raises(PrivrepError, match="does not say"), Run.open(None, Budget(50.0, 1e-6), folder=tmp_path):
        pass


@pytest.mark.parametrize("number", range(4))
def test_an_edited_line_of_a_run_under_way_is_refused(tmp_path: Path, number: int) -> None:
    """Nothing seals its ledger yet: each line is held by the next one, and the last one by itself."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(Budget(50.0, 1e-6), path=path)
    ledger.charge({"first/sum": Gaussian(2.5)})
    ledger.charge({"second/sum": Gaussian(2.5)})
    ledger.charge({"third/sum": Gaussian(2.5)})
    ledger.close()
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number] = lines[number].replace(b"2.5", b"9.5").replace(b"50.0", b"90.0")
    path.write_bytes(b"".join(lines))
    with pytest.raises(InputError, match=f"damaged in line {number + 1} .its chain is broken"):
        read_ledger(path)


def test_a_sealed_ledger_cannot_be_cut(model: Path, tmp_path: Path) -> None:
    """Even if pages go with the charges: model.json says how many lines there were."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    lines = (folder / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    kept = [number for number, line in enumerate(lines) if b'"posted"' in line][2]
    (folder / "ledger.jsonl").write_bytes(b"".join(lines[: kept + 1]))
    names = [line.split(b'"')[3].decode() for line in lines[: kept + 1] if b'"posted"' in line]
    for path in (folder / "billboard").iterdir():
        if path.stem.partition("-")[2] not in names:
            path.unlink()
    with pytest.raises(InputError, match="not the ledger that the model was finished with"):
        ModelFolder(folder).read_ledger()
