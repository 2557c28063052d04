"""One run of several processes, which is killed at random moments, judged, and continued or given up."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from judging import LIFE, Books, Judge, read_log
from killing import Death, Witness, begin

PATIENCE = 60.0  # seconds until a run that does not end is a fault
GIVEN_UP = 0.15  # the part of killed runs that nobody continues
POWER_CUT = 0.2  # the part of kills that end all processes of a run
REFUSED = 7  # exit status of a run that was given up, and was refused
Work = Callable[[Path, Death], object]


@dataclass(frozen=True)
class Killed:
    """A kind of run: its processes by name, of which the first ends it, and the files of each."""

    roles: Mapping[str, Work]
    find_books: Callable[[Path, str, Path], list[Books]]  # of a run's place, a role, and its population's file
    share: float  # of all kills
    prepare: Callable[[], object] = lambda: None
    make: Callable[[Path], object] = lambda place: None  # writes what is needed to a run's place
    epsilon: float = 2_000.0  # of the population
    runs: int = 6  # that it has room for


@dataclass
class Tale:
    """One run: how often it was killed, where, and what was wrong."""

    kills: Counter[str] = field(default_factory=Counter)
    ended: str = ""
    faults: list[str] = field(default_factory=list)


@dataclass
class Players:
    """The processes of a run, under way."""

    killed: Killed
    place: Path
    populations: Mapping[str, Path]
    scouting: bool = False  # whether each process writes down at its end which modules it has
    running: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)  # exit status of processes that ended by themselves

    def start(self, role: str) -> None:
        def live() -> None:
            from privrep.errors import ResumeError

            log = os.open(self.place / f"{role}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
            death = Witness(population=self.populations[role], log=log)
            death.here(LIFE)
            warnings.simplefilter("ignore")
            try:
                self.killed.roles[role](self.place, death)
            except ResumeError as error:
                if "given up" not in str(error):
                    raise
                os._exit(REFUSED)
            if self.scouting:
                (self.place / f"{role}.modules").write_text("\n".join(sys.modules))

        self.ended.pop(role, None)
        self.running[role] = begin(live)

    def has_ended(self, role: str) -> int | None:
        """Return the exit status of a process that ended by itself; None while it runs."""
        if role in self.running:
            found, status = os.waitpid(self.running[role], os.WNOHANG)
            if found:
                del self.running[role]
                self.ended[role] = os.waitstatus_to_exitcode(status)
        return self.ended.get(role)

    def kill(self, role: str) -> bool:
        """Kill a process; return False if it had ended before."""
        if self.has_ended(role) is not None:
            return False
        os.kill(self.running[role], signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self.running.pop(role), 0)[1])
        if status != -signal.SIGKILL:
            self.ended[role] = status
        return status == -signal.SIGKILL

    def wait(self, role: str, seconds: float) -> int | None:
        """Return the exit status of a process as soon as it ends; None if it is still running then."""
        until = time.monotonic() + seconds
        while (status := self.has_ended(role)) is None and time.monotonic() < until:
            time.sleep(0.001)
        return status

    def list_books(self, *roles: str) -> list[Books]:
        """Return the books of these processes, or of all."""
        found = self.killed.find_books
        return [
            books for role in roles or self.killed.roles for books in found(self.place, role, self.populations[role])
        ]


def play(players: Players, seconds: float, rng: random.Random, listed: Callable[[str], list[Books]]) -> Tale:
    """Return what happened to one run, which is killed, judged and continued until it ends or is given up.

    Args:
        players: of the run, none of them started.
        seconds: that it takes undisturbed.
        rng: draws the moments.
        listed: returns the books of all runs that draw from a role's population.
    """
    tale, judge, (main, *others) = Tale(), Judge(), players.killed.roles
    players.place.mkdir()
    players.killed.make(players.place)
    for role in players.killed.roles:
        players.start(role)
    for turn in range(rng.choice((1, 1, 2, 3))):
        if players.wait(main, rng.uniform(0, seconds / (turn + 1))) is not None:
            break
        victims = [rng.choice([main, rng.choice(others)])] if others else [main]
        victims = list(players.running) if rng.random() < POWER_CUT else victims
        dead = [victim for victim in victims if players.kill(victim)]
        for victim in dead:
            tale.kills[find_place(players.place / f"{victim}.log")] += 1
            for books in players.list_books(victim):
                tale.faults += judge.look(books)
            tale.faults += judge.look_at_population(players.populations[victim], listed(victim))
        if main in dead and rng.random() < GIVEN_UP:
            tale.faults += _give_up(players, judge, listed)
            tale.ended = "given up"
            return tale
        for victim in dead:
            players.start(victim)
    status = players.wait(main, PATIENCE)
    tale.ended = "finished"
    tale.faults += [] if status == 0 else [f"{main} ended with {status}"]
    for role in others:
        ended = players.wait(role, 5.0) if status == 0 else None
        tale.faults += [] if ended == 0 or status != 0 else [f"{role} ended with {ended}"]
    for role in list(players.running):
        players.kill(role)
    tale.faults += _look_at_end(players, judge, listed)
    return tale


def _look_at_end(players: Players, judge: Judge, listed: Callable[[str], list[Books]]) -> list[str]:
    """Return the faults of a run that came to its end."""
    from privrep.models.verification import verify

    faults = []
    for role in players.killed.roles:
        mine = players.list_books(role)
        faults += [fault for books in mine for fault in judge.look(books)]
        faults += judge.look_at_population(players.populations[role], listed(role), mine)
        faults += [] if mine else [f"{role} kept no books"]
    for model in players.place.glob("*/model.json"):
        faults += [f"{model.parent.name} does not verify"] if not verify(model.parent).good else []
    left = [*players.place.rglob("*.page.tmp"), *players.place.rglob("*-journal")]
    return [*faults, *(f"{path.name} is left over" for path in left)]


def _give_up(players: Players, judge: Judge, listed: Callable[[str], list[Books]]) -> list[str]:
    """Give up a run whose processes are dead then, and return the faults: all of its reservation must count."""
    from privrep.privacy.ledger import read_ledger
    from privrep.privacy.population import PopulationLedger

    main, faults = next(iter(players.killed.roles)), list[str]()
    for role in list(players.running):
        players.kill(role)
    for role in players.killed.roles:
        ledger = PopulationLedger(players.populations[role])
        for books in players.list_books(role):
            try:
                known = read_ledger(books.ledger).entries.drawn_from
            except ValueError:
                continue  # the run was killed before it began
            share = ledger.read().shares.get("" if known is None else known[1])
            if known is None or share is None or share.status != "open":
                continue
            ledger.give_up(known[1])
            faults += judge.look(books) + judge.look_at_population(players.populations[role], listed(role))
            if ledger.read().shares[known[1]].events != share.events:
                faults.append(f"{role}: other events are counted since it was given up")
            if (
                role == main
                and players.killed.roles.keys() == {main}
                and not (players.place / "fit/model.json").exists()
            ):
                players.start(main)
                status = players.wait(main, PATIENCE)
                faults += [] if status == REFUSED else [f"a run that was given up goes on, and ends with {status}"]
    return faults


# Where a kill fell


def find_place(log: Path) -> str:
    """Return where a process was when it was killed, by the last lines that it wrote."""
    lines = [place for _, place, _ in read_log(log)]
    life = lines[len(lines) - 1 - lines[::-1].index(LIFE) :] if LIFE in lines else [LIFE]
    last = life[-1]
    if last == LIFE:
        return "before the reservation"
    if last in ("before reserve", "before cover", "before finish"):
        return f"in {last.removeprefix('before ')} of the population's ledger"
    if last == "after reserve":
        return "between reservation and first charge"
    if last == "after finish":
        return "after the return of what was left"
    if last in ("before charge", "after cover"):
        return "while charging"
    if last.startswith("ledger"):
        charging = "before charge" in life and "after charge, before draw" not in life[_rfind(life, "before charge") :]
        noted = "between note and next charge" if last == "ledger synced" else "while noting a page"
        return "while charging" if charging else noted
    if last.startswith(("after charge", "before draw", "before key", "after key")):
        return "between charge and draw"
    return "between page and its note" if last in ("after rename", "after post") else "between draw and page"


def _rfind(lines: Sequence[str], wanted: str) -> int:
    return len(lines) - 1 - lines[::-1].index(wanted)
