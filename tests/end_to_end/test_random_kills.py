"""Runs are killed at random moments, and nothing is lost, posted unpaid or drawn twice: a small part of `make kills`.

The judge and the killer are shown to see what they look for.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import random_kills
from judging import Books, Judge
from killed_programs import fit_estimator
from killing import DIED, Death, begin
from playing import Killed, Players, play
from random_kills import KILLED

from privrep.models.verification import verify

KILLS = 30


def test_kills_at_random_moments_lose_nothing() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("flwr")
    one = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **one, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = [
        sys.executable,
        random_kills.__file__,
        "--kills",
        str(KILLS),
        "--json",
        "--only",
        *(KILLED.keys() - {"walk"}),
    ]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert told["faults"] == []
    assert sum(told["kills"].values()) >= KILLS
    assert min(told["kills"].values()) > 0
    assert len(told["places"]) > 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody killed, and its population's ledger."""
    place = tmp_path_factory.mktemp("kills") / "whole"
    random_kills._let_run(KILLED["table"], place)
    return place


@pytest.fixture
def place(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "whole")
    return tmp_path / "whole"


def books_of(place: Path) -> Books:
    return Books(place / "run/fit/ledger.jsonl", place / "run/fit/billboard", place / "fit.db", place / "run/fit.log")


def faults_of(place: Path, judge: Judge) -> list[str]:
    books = books_of(place)
    return judge.look(books) + judge.look_at_population(books.population, [books], [books])


def test_a_run_that_nobody_touched_has_no_fault(place: Path) -> None:
    judge = Judge()
    assert faults_of(place, judge) == []
    assert faults_of(place, judge) == []
    assert "before draw of" in books_of(place).log.read_text()


def cut_ledger(place: Path) -> None:
    path = books_of(place).ledger
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def lose_charges(place: Path) -> None:
    """As if the pages had been posted before they were charged."""
    path = books_of(place).ledger
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))


def change_page(place: Path) -> None:
    path = next(iter(books_of(place).board.iterdir()))  # type: ignore[union-attr]
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def note(place: Path, *lines: tuple[str, str]) -> None:
    """Add lines to what the witness wrote, with the ledger as it is."""
    books = books_of(place)
    size = books.ledger.stat().st_size
    with open(books.log, "a") as log:
        log.writelines(f"{size}\t{place}\t{page}\n" for place, page in lines)


def draw_early(place: Path) -> None:
    log = books_of(place).log
    log.write_text(f"0\tlife\t\n0\tbefore draw of scales/feature-0\t\n{log.read_text()}")


def forget_reservation(place: Path) -> None:
    (place / "fit.db").unlink()
    random_kills.make_populations(KILLED["table"], place / "other")
    shutil.move(place / "other/fit.db", place / "fit.db")


SABOTAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a line of the ledger is lost": (cut_ledger, "lines were lost"),
    "pages have no charges": (lose_charges, "has no charge"),
    "a page changes": (change_page, "changed"),
    "a page that stands is drawn again": (
        lambda place: note(place, ("life", ""), ("before draw of scales/any", "")), "and its page stands",
    ),
    "a name is drawn twice": (
        lambda place: note(place, *[("before draw of new/sum", "")] * 2), "new/sum was drawn twice",
    ),
    "noise is drawn before the charge": (draw_early, "drawn before its charge"),
    "a reservation is lost": (forget_reservation, "charges without a reservation"),
}  # fmt: skip


@pytest.mark.parametrize("name", SABOTAGE)
def test_the_judge_sees(place: Path, name: str) -> None:
    judge = Judge()
    assert faults_of(place, judge) == []
    sabotage, words = SABOTAGE[name]
    sabotage(place)
    assert any(words in fault for fault in faults_of(place, judge)), faults_of(place, judge)


def fit_with(sabotage: Callable[[Death], None], place: Path, death: Death) -> Any:
    sabotage(death)
    return fit_estimator(place / "fit", None, death)


def lose_reservation(death: Death) -> None:
    from privrep.privacy.ledger import Ledger

    assert death.population is not None
    path, charge, before = death.population, Ledger.charge, death.population.read_bytes()
    Ledger.charge = lambda ledger, events: [charge(ledger, events), path.write_bytes(before)]  # type: ignore[assignment,method-assign,return-value]


def charge_in_memory(death: Death) -> None:
    from privrep.privacy.ledger import Ledger

    Ledger.charge = lambda ledger, events: ledger._entries.charges.update(events)  # type: ignore[method-assign]


def return_too_early(death: Death) -> None:
    from privrep.privacy.ledger import Ledger

    charge = Ledger.charge

    def charge_and_return(ledger: Ledger, events: Any) -> None:
        charge(ledger, events)
        ledger.finish()
        ledger._closed = False

    Ledger.charge = charge_and_return  # type: ignore[method-assign]


WRONG = {
    "charges without a reservation": lose_reservation,
    "drawn before its charge": charge_in_memory,
    "other events are counted than were charged": return_too_early,
}


@pytest.mark.parametrize("words", WRONG)
def test_a_program_that_does_it_wrong_is_found_out(tmp_path: Path, words: str) -> None:
    killed = Killed({"fit": partial(fit_with, WRONG[words])}, random_kills._find_one, 1.0)
    players = Players(killed, tmp_path / "all/run", random_kills.make_populations(killed, tmp_path / "all"))
    tale = play(players, 60.0, random.Random(0), players.list_books)
    assert any(words in fault for fault in tale.faults), tale.faults


@pytest.mark.parametrize("room", [200, 900, 2_000, 3_500])
def test_a_full_disk_stops_a_run_that_goes_on_when_there_is_room(tmp_path: Path, room: int) -> None:
    """No file may grow beyond `room` bytes: the first is the ledger, which is torn, or a page."""
    folder = tmp_path / "fit"
    books, judge = Books(folder / "ledger.jsonl", folder / "billboard", tmp_path / "none", tmp_path / "log"), Judge()

    def fit(limited: bool) -> None:
        warnings.simplefilter("ignore")
        if limited:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        try:
            fit_estimator(folder, None, Death(None))
        except Exception:
            if not limited:
                raise
            os._exit(DIED)

    ended = []
    for limited in (True, False):
        ended.append(os.waitstatus_to_exitcode(os.waitpid(begin(partial(fit, limited)), 0)[1]))
        assert judge.look(books) == []
    assert ended == [DIED, 0]
    assert verify(folder).good
