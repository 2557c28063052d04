"""Kill runs anywhere and let them go on: `killed_programs` are killed, and `test_kill` judges what they leave.

A process of its own imports privrep once and forks another for every attempt. Hooks around every sync, rename, draw,
write and post count the places that an attempt passes, and at a chosen one the process ends without any clean-up. Of a
charge that was not yet synced only a part survives, as in a power cut.

Which places are fatal, `Program.deaths` says. With PRIVREP_KILL_EVERYWHERE=1, every place is.

`random_kills` kills the same programs at random moments from outside. The hooks then write down what was passed.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

SEED = 11
DIED = 9


@dataclass
class Death:
    """Counts the places a process passes; at the fatal one it ends, by exit or by signal in turn."""

    fatal: int | None
    passed: list[str] = field(default_factory=list)
    population: Path | None = None  # the ledger that the run draws from

    def here(self, place: str, last_words: Callable[[], None] = lambda: None, page: str = "") -> None:
        self.passed.append(place)
        if self.fatal == len(self.passed) - 1:
            last_words()
            if self.fatal % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(DIED)


@dataclass
class Witness(Death):
    """Writes down the places a process passes, before it goes on: it may be killed from outside at any moment.

    A line has the bytes of the ledger after the last charge, the place, and the page where there is one.
    """

    fatal: int | None = None
    log: int = -1  # descriptor of a file to append to
    bytes: int = 0

    def here(self, place: str, last_words: Callable[[], None] = lambda: None, page: str = "") -> None:
        os.write(self.log, f"{self.bytes}\t{place}\t{page}\n".encode())


def haunt(death: Death, ledger: Path | None) -> None:
    """Put hooks around everything that leaves a trace. Only ever called in a process of its own.

    Args:
        death: hears of every place.
        ledger: the file of charges; None: every ledger of the process, which a node makes when it hears of a run.
    """
    from privrep.privacy import billboard as boards
    from privrep.privacy.billboard import Billboard
    from privrep.privacy.ledger import Ledger

    replace, save = os.replace, boards.save_file
    charge, post = Ledger.charge, Billboard._post
    safe = [ledger.stat().st_size if ledger and ledger.exists() else 0]  # bytes that a power cut cannot take
    sync, watched = os.fsync, isinstance(death, Witness)

    def new_fsync(descriptor: int) -> None:
        """Sync nothing: what a dead process has written stays, and what a power cut takes is cut off here."""
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path != ledger and (ledger is not None or path.suffix != ".jsonl"):
            if watched:
                sync(descriptor)
            return  # of a page or a folder: the places before and after have hooks of their own

        def tear() -> None:
            size = os.fstat(descriptor).st_size
            os.ftruncate(descriptor, safe[0] + (size - safe[0]) // 2)

        death.here("ledger written, not synced: torn", tear)
        death.here("ledger written, not synced: whole")
        if watched:
            sync(descriptor)
        safe[0] = os.fstat(descriptor).st_size
        death.here("ledger synced")

    def new_replace(source: Any, target: Any) -> None:
        death.here("before rename")
        replace(source, target)
        death.here("after rename")

    def new_save(arrays: Any, path: str, metadata: Any) -> None:
        save(arrays, path, metadata=metadata)
        whole = Path(path).read_bytes()
        death.here("page half written", lambda: Path(path).write_bytes(whole[: len(whole) // 2]) and None)
        death.here("page written, not synced")

    def new_charge(self: Any, events: Any) -> None:
        death.here("before charge")
        charge(self, events)
        if isinstance(death, Witness) and self._file is not None:
            death.bytes = os.fstat(self._file._file.fileno()).st_size
        death.here("after charge, before draw")

    def new_post(self: Any, page: Any) -> None:
        death.here("after draw, before post", page=page.name)
        post(self, page)
        death.here("after post", page=page.name)

    os.fsync, os.replace, boards.save_file = new_fsync, new_replace, new_save  # type: ignore[assignment]
    Ledger.charge, Billboard._post = new_charge, new_post  # type: ignore[method-assign]
    if watched:
        _haunt_more(death)


def _haunt_more(death: Death) -> None:
    """Put hooks around the noise of every run of this process, and around the population's ledger."""
    from privrep.privacy import run as runs
    from privrep.privacy.population import PopulationLedger

    runs.secure_noise = WatchedNoise(runs.secure_noise, death)  # type: ignore[assignment]
    for name in ("reserve", "cover", "finish"):
        _watch(death, PopulationLedger, name)


def _watch(death: Death, owner: type, name: str) -> None:
    """Put a hook around a method."""
    method = getattr(owner, name)

    def watched(*given: Any, **named: Any) -> Any:
        death.here(f"before {name}")
        returned = method(*given, **named)
        death.here(f"after {name}")
        return returned

    setattr(owner, name, watched)


@dataclass(frozen=True)
class WatchedNoise:
    """A noise source at whose draws a process can die."""

    source: Any
    death: Death

    @property
    def seeded(self) -> bool:
        return bool(self.source.seeded)

    def __call__(self, name: str, sigma: float, size: int) -> Any:
        return self._between(f"draw of {name}", lambda: self.source(name, sigma, size))

    def draw_choice(self, name: str, losses: Any, scale: int) -> int:
        return int(self._between(f"draw of {name}", lambda: self.source.draw_choice(name, losses, scale)))

    def draw_key(self, name: str) -> bytes:
        return bytes(self._between(f"key of {name}", lambda: self.source.draw_key(name)))

    def _between(self, what: str, draw: Callable[[], Any]) -> Any:
        self.death.here(f"before {what}")
        drawn = draw()
        self.death.here(f"after {what}")
        return drawn


@contextmanager
def open_run(folder: Path, seed: int | None, death: Death, users: Any, epsilon: float) -> Iterator[Any]:
    """Open a run of a folder whose process can die wherever it leaves a trace."""
    from privrep.privacy.ledger import Budget
    from privrep.privacy.population import Account, PopulationLedger
    from privrep.privacy.run import Run

    folder.mkdir(exist_ok=True)
    haunt(death, folder / "ledger.jsonl")
    account = None if death.population is None else Account(PopulationLedger(death.population))
    with Run.open(users, Budget(epsilon, 1e-6), seed=seed, folder=folder, account=account) as run:
        watched = isinstance(run.noise, WatchedNoise)
        yield run if watched else replace(run, noise=WatchedNoise(run.noise, death))


Attempt = Callable[[Path, int | None, Death], dict[str, Any]]
"""One process's life in a folder, from wherever the last one got to: the result, with what was drawn as "drawn"."""


@dataclass(frozen=True)
class Program:
    """What is killed, where, and what its folders must say."""

    attempt: Attempt
    imports: Sequence[str]  # once, before the forks
    epsilon: float  # of the budget
    spends: float | None  # the part of it, roughly, that is spent in the end; None if little is
    deaths: dict[str, int | None]  # one in how many places is fatal, by kind of run; None: see `choose_deaths`
    places: Sequence[str] = ("torn", "before charge", "after charge, before draw", "after draw, before post")
    least: tuple[int, int] = (20, 3)  # places that an attempt passes, and moments between two lives
    derived: frozenset[str] = frozenset()  # pages that are charged for nothing
    adaptive: bool = False  # what is asked later depends on noise
    often: int = 1  # simulated runs that are killed several times
    prepare: Callable[[], object] = lambda: None  # once, before the forks: what it caches, all of them have


def begin(work: Callable[[], None]) -> int:
    """Return the number of a new process that does some work, and ends with 0 if all went well."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:  # an exception: print it, do not return into the parent's code
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(1)
    return child


def in_a_process(attempt: Attempt, folder: Path, seed: int | None, fatal: int | None) -> bool:
    """Return whether the attempt came to its end. Anything but the end and the death that was asked for is an error."""

    def live() -> None:
        death = Death(fatal)
        result = attempt(folder, seed, death)
        (folder / "result.json").write_text(json.dumps(result))
        (folder / "passed.json").write_text(json.dumps(death.passed))

    child = begin(live)
    status = os.waitpid(child, 0)[1]
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if not killed and os.WEXITSTATUS(status) not in (0, DIED):
        raise RuntimeError(f"attempt in {folder} failed with status {status}")
    return not killed and os.WEXITSTATUS(status) == 0


def state(folder: Path) -> dict[str, Any]:
    """Return what a folder says: the ledger's report, the pages' files by their hashes, and what is on the pages."""
    from privrep.errors import InputError
    from privrep.privacy import billboard as boards
    from privrep.privacy.events import event_to_json
    from privrep.privacy.ledger import read_report

    try:
        report = read_report(folder / "ledger.jsonl")
        spent = {
            "epsilon": report.epsilon,
            "events": [[name, event_to_json(event)] for name, event in report.events],
        }
    except InputError:
        spent = {"epsilon": 0.0, "events": []}
    files = sorted((folder / "billboard").glob("*.safetensors"))
    pages = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    read = [boards._read_page(file) for file in files]  # safetensors orders its metadata as it likes
    content = [[page.name, {k: v.tolist() for k, v in sorted(page.arrays.items())}, page.facts] for page in read]
    result = folder / "result.json"
    said = json.loads(result.read_text()) if result.exists() else None
    return {**spent, "pages": pages, "content": content, "result": said}


def story(attempt: Attempt, folder: Path, seed: int | None, deaths: list[int]) -> dict[str, Any]:
    """Return a folder's life: killed at each of these places in turn, then left to finish."""
    between = []
    for fatal in deaths:
        if in_a_process(attempt, folder, seed, fatal):
            break
        between.append(state(folder))
    else:
        if not in_a_process(attempt, folder, seed, None):
            raise RuntimeError("the last attempt was to finish")
    leftovers = [p.name for p in (folder / "billboard").glob("*.tmp")]
    return {"deaths": deaths, "between": between, "end": state(folder), "leftovers": leftovers}


def choose_deaths(places: Sequence[str], every: int | None) -> list[int]:
    """Return the numbers of the places that are fatal.

    Args:
        places: what an attempt passes, by name.
        every: one in so many of them. None: of each name the first, the middle and the last.
    """
    if os.environ.get("PRIVREP_KILL_EVERYWHERE"):
        return list(range(len(places)))
    if every is not None:
        return list(range(0, len(places), every))
    named: dict[str, list[int]] = {}
    for i, place in enumerate(places):
        named.setdefault(place, []).append(i)
    return sorted({at[i] for at in named.values() for i in (0, len(at) // 2, -1)})


def tell(program: Program, folder: Path) -> dict[str, Any]:
    """Return the stories of a program: undisturbed, killed at one place after the other, and killed several times."""
    for module in program.imports:
        importlib.import_module(module)
    program.prepare()
    told: dict[str, Any] = {}
    for kind, seed in (("simulated", SEED), ("secure", None)):
        told[kind] = {"undisturbed": story(program.attempt, folder / kind, seed, [])}
        places = json.loads((folder / kind / "passed.json").read_text())
        fatal = choose_deaths(places, program.deaths[kind])
        stories = [story(program.attempt, folder / f"{kind}-{i}", seed, [i]) for i in fatal]
        rng = np.random.default_rng(1)
        for i in range(program.often if seed is not None else 1):
            deaths = [3, *(int(d) for d in rng.integers(0, len(places), 3))]
            stories.append(story(program.attempt, folder / f"{kind}-often-{i}", seed, deaths))
        told[kind] |= {"places": places, "stories": stories}
    return told
