"""Kill runs with a population's ledger at random moments, by SIGKILL from outside: `make kills`.

    python tests/end_to_end/random_kills.py --kills 1000 [--seed 1] [--only table] [--json]

A run is killed once or several times, at a moment drawn uniformly from the time that it takes, and goes on after each.
Some are given up instead. Two runs at a time draw from one population's ledger. After every kill `judging` looks at
what stands on the disk. Prints kills by program and by where they fell, and every fault with the seed of its run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import killed_federation
import killed_programs
from judging import Books
from killing import Attempt, Death, begin
from playing import PATIENCE, Killed, Players, Tale, Work, play

AT_ONCE = 2  # runs that draw from one population's ledger side by side


def _find_one(place: Path, role: str, population: Path) -> list[Books]:
    fit = place / "fit"
    return [Books(fit / "ledger.jsonl", fit / "billboard", population, place / f"{role}.log")]


def _find_nodes(place: Path, role: str, population: Path) -> list[Books]:
    if role == "server":
        return _find_one(place, role, population)
    log = place / f"{role}.log"
    own = [Books(path, path.parent / "billboard", population, log) for path in place.glob(f"{role}/noise/*/*.jsonl")]
    settled = place / "fit/ledger.jsonl"
    return own + [Books(path, None, population, log, settled) for path in place.glob(f"{role}/accounts/*.jsonl")]


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
    killed, faults = sum(told["kills"].values()), len(told["faults"])
    print(f"{killed:,} kills in {told['all']:.0f} s, seed {asked.seed}, {faults} faults{kept}")
    return int(bool(told["faults"]))


if __name__ == "__main__":
    sys.exit(main())
