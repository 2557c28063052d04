"""Kill runs with a population's ledger at random moments, by SIGKILL from outside: `make kills`.

    python tests/end_to_end/random_kills.py --kills 1000 [--seed 1] [--only table] [--json]

A run is killed once or several times, at a moment drawn uniformly from the time that it takes, and goes on after each.
Some are given up instead. Two runs at a time draw from one population's ledger. After every kill `judging` looks at what
stands on the disk. Prints kills by program and by where they fell, and every fault with the seed of its run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import killed_federation
import killed_programs
from judging import LIFE, Books, Judge, read_log
from killing import Attempt, Death, Witness, begin

AT_ONCE = 2  # runs that draw from one population's ledger side by side
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


def _find_one(place: Path, role: str, population: Path) -> list[Books]:
    fit = place / "fit"
    return [Books(fit / "ledger.jsonl", fit / "billboard", population, place / f"{role}.log")]


def _find_nodes(place: Path, role: str, population: Path) -> list[Books]:
    if role == "server":
        return _find_one(place, role, population)
    log = place / f"{role}.log"
    own = [Books(path, path.parent / "billboard", population, log) for path in place.glob(f"{role}/noise/*/*.jsonl")]
    return own + [Books(path, None, population, log) for path in place.glob(f"{role}/accounts/*.jsonl")]


def _alone(attempt: Attempt, share: float, **more: Any) -> Killed:
    """Return a program of one process, as `test_kill` kills it, too."""

    def work(place: Path, death: Death) -> object:
        return attempt(place / "fit", None, death)

    return Killed({"fit": work}, _find_one, share, **more)


def _federate(noise_nodes: int, share: float) -> Killed:
    serve: Work = partial(killed_federation.serve, noise_nodes=noise_nodes)
    nodes: dict[str, Work] = {name: partial(killed_federation.answer, name=name) for name in killed_federation.USERS}
    return Killed({"server": serve, **nodes}, _find_nodes, share, make=killed_federation.write_rows)


def _walk_once() -> None:
    """Take a walk that draws from a population's ledger: prices are found once, before the forks."""
    killed_programs.price_walk()
    with tempfile.TemporaryDirectory() as folder:
        population = make_populations(KILLED["walk"], Path(folder) / "all")["fit"]
        killed_programs.walk(Path(folder) / "fit", None, Death(None, population=population))


KILLED = {
    "table": _alone(killed_programs.fit_estimator, 0.25),
    "choices": _alone(partial(killed_programs.fit_table, epsilon=4.0), 0.15, epsilon=10.0, runs=2),
    "network": _alone(killed_programs.fit_network, 0.15),
    "pairs": _alone(killed_programs.fit_pairs, 0.15),
    "walk": _alone(killed_programs.walk, 0.1, epsilon=20.0, runs=2, prepare=_walk_once),
    "federation": _federate(1, 0.1),
    "noisy nodes": _federate(2, 0.1),
}


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


# One run


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


# Many runs


def prepare(killed: Killed, place: Path) -> float:
    """Import what runs of this kind import, and return the seconds that an undisturbed run takes: the less of two.

    Processes are forked from this one. With all modules there, an attempt takes milliseconds.
    """
    killed.prepare()
    _let_run(killed, place / "scout", scouting=True)
    for names in (place / "scout").glob("run/*.modules"):
        for name in names.read_text().split():
            with suppress(Exception):
                importlib.import_module(name)
    return min(_let_run(killed, place / f"undisturbed-{number}") for number in range(2))


def _let_run(killed: Killed, place: Path, scouting: bool = False) -> float:
    """Return the seconds of a run that nobody kills."""
    players = Players(killed, place / "run", make_populations(killed, place), scouting)
    players.place.mkdir()
    killed.make(players.place)
    began, main = time.monotonic(), next(iter(killed.roles))
    for role in killed.roles:
        players.start(role)
    if players.wait(main, PATIENCE) != 0:
        raise RuntimeError("a run that nobody killed failed")
    took = time.monotonic() - began
    for role in list(players.running):
        players.wait(role, PATIENCE)
    return took


def make_populations(killed: Killed, place: Path) -> dict[str, Path]:
    """Make a population's ledger for each process of a run: nodes have users of their own."""
    from privrep.privacy.population import PopulationLedger

    place.mkdir(parents=True)
    for role in killed.roles:
        PopulationLedger.create(place / f"{role}.db", epsilon=killed.epsilon, delta=1e-2)
    return {role: place / f"{role}.db" for role in killed.roles}


def tell(killed: Killed, place: Path, kills: int, seed: int, seconds: float) -> list[tuple[str, Tale]]:
    """Return what happened to runs of one kind, with their names and seeds, until there were so many kills."""
    tales: list[tuple[str, Tale]] = []
    number = 0
    while (left := kills - sum(sum(tale.kills.values()) for _, tale in tales)) > 0:
        party = place / f"party-{number}"
        populations = make_populations(killed, party)
        runs = min(killed.runs, max(AT_ONCE, left))
        found = _play_party(killed, party, populations, f"{seed}-{number}", seconds, runs)
        tales += found
        if not any(tale.faults for _, tale in found):
            shutil.rmtree(party)
        number += 1
    return tales


def _play_party(
    killed: Killed, party: Path, populations: Mapping[str, Path], seed: str, seconds: float, runs: int
) -> list[tuple[str, Tale]]:
    """Return what happened to the runs of one population, of which several are under way at a time."""

    def listed(role: str) -> list[Books]:
        places = [path for path in party.iterdir() if path.is_dir()]
        return [books for place in places for books in killed.find_books(place, role, populations[role])]

    def play_some(first: int) -> None:
        tales = []
        for number in range(first, runs, AT_ONCE):
            players = Players(killed, party / f"run-{number}", populations)
            tale = play(players, seconds, random.Random(f"{seed}-{number}"), listed)
            tales.append((f"{seed}-{number}", tale.kills, tale.ended, tale.faults))
        (party / f"tales-{first}.json").write_text(json.dumps(tales))

    tellers = [begin(partial(play_some, first)) for first in range(AT_ONCE)]
    for teller in tellers:
        if os.waitpid(teller, 0)[1]:
            raise RuntimeError(f"runs of {party} could not be told")
    told = [tale for first in range(AT_ONCE) for tale in json.loads((party / f"tales-{first}.json").read_text())]
    return [(name, Tale(Counter(kills), ended, faults)) for name, kills, ended, faults in told]


def run(kills: int, seed: int, names: Sequence[str], folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Return kills by program and by place, how runs ended, seconds, and faults."""
    began, chosen = time.monotonic(), {name: KILLED[name] for name in names}
    whole = sum(killed.share for killed in chosen.values())
    told: dict[str, Any] = {"kills": {}, "places": Counter(), "ended": Counter(), "faults": [], "seconds": {}}
    for name, killed in chosen.items():
        place, start = folder / name.replace(" ", "-"), time.monotonic()
        tales = tell(killed, place, round(kills * killed.share / whole), seed, prepare(killed, place))
        counts = sum((tale.kills for _, tale in tales), Counter[str]())
        told["kills"][name], told["seconds"][name] = counts.total(), round(time.monotonic() - start, 1)
        told["places"] += counts
        told["ended"].update(tale.ended for _, tale in tales)
        told["faults"] += [f"{name}, run {run}: {fault}" for run, tale in tales for fault in tale.faults]
        say(f"{name:12s} {counts.total():5,} kills {told['seconds'][name]:7.1f} s")
    return {**told, "all": round(time.monotonic() - began, 1), "seed": seed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=KILLED, nargs="+", default=list(KILLED))
    parser.add_argument("--folder", type=Path, help="keep what faulty runs left here")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="privrep-kills-", dir=asked.folder))
    say = (lambda line: None) if asked.json else partial(print, flush=True)
    told = run(asked.kills, asked.seed, asked.only, folder, say)
    if not told["faults"]:
        shutil.rmtree(folder)
    if asked.json:
        print(json.dumps(told))
        return int(bool(told["faults"]))
    for place, count in sorted(told["places"].items()):
        print(f"{place:45s} {count:5,}")
    print(", ".join(f"{count:,} runs {how}" for how, count in told["ended"].items()))
    for fault in told["faults"]:
        print("FAULT:", fault)
    kept = f"; see {folder}" if told["faults"] else ""
    print(
        f"{sum(told['kills'].values()):,} kills in {told['all']:.0f} s, seed {asked.seed}, {len(told['faults'])} faults{kept}"
    )
    return int(bool(told["faults"]))


if __name__ == "__main__":
    sys.exit(main())
