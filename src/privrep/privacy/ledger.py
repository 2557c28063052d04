"""The one place where budget is spent.

A charge is written, flushed and synced to disk before any noise is drawn, and what does not fit is refused before it
is written. So a process killed anywhere has recorded at least what it released. Entries are only ever appended.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privrep.errors import BudgetExceeded, InputError, ResumeError
from privrep.privacy.accounting import (
    LEAST_EPSILON,
    accountant_of,
    check_budget,
    check_epsilon,
    delta_left,
    epsilon_spent,
    gaussian_mu,
    pure_epsilons,
    spending,
    total_mu,
    within_budget,
    without_samples,
)
from privrep.privacy.composition import most_gaussian, most_pure
from privrep.privacy.events import (
    RELATIONS,
    Batched,
    Event,
    Relation,
    Sampled,
    Selection,
    event_from_json,
    event_to_json,
)
from privrep.privacy.report_words import describe_report, report_to_html

FORMAT = "privrep-ledger/1"


@dataclass(frozen=True)
class Budget:
    """What a run may spend, and against which change of the population: one user's rows replaced, or one user more.

    A delta of exactly 0 makes it pure: it takes choices alone, whose epsilons add up to at most `epsilon`.
    """

    epsilon: float
    delta: float
    relation: Relation = "replace-one-user"

    def __post_init__(self) -> None:
        if self.delta == 0:
            check_epsilon(self.epsilon)
        else:
            check_budget(self.epsilon, self.delta)
        if self.delta > 0.01:
            raise InputError(
                f"delta must be at most 0.01, and should be far below one over the users. Got {self.delta}."
            )
        if self.relation not in RELATIONS:
            raise InputError(f"relation must be one of {', '.join(RELATIONS)}. Got {self.relation!r} instead.")

    @property
    def mu(self) -> float:
        """The budget as mu of Gaussian differential privacy; 0 if it is pure. Splitting it means splitting mu^2."""
        return gaussian_mu(self.epsilon, self.delta) if self.delta else 0.0


@dataclass(frozen=True)
class PrivacyReport:
    """What was spent, in the words a reviewer asks for. Holds nothing but public facts."""

    relation: Relation
    epsilon: float
    delta: float
    epsilon_budget: float
    accountant: str
    events: tuple[tuple[str, Event], ...]
    seeded: bool
    unit: str = "user"  # what is protected as a whole: the word for a user of the run

    @property
    def unspent(self) -> float:
        """Return the share of the budget that was left: of mu^2, or of epsilon where the budget is pure."""
        left = delta_left((event for _, event in self.events), self.delta)
        if left <= 0:
            return max(1 - self.epsilon / self.epsilon_budget, 0.0)
        if self.epsilon < LEAST_EPSILON:
            return 1.0
        return max(1 - (gaussian_mu(self.epsilon, left) / gaussian_mu(self.epsilon_budget, left)) ** 2, 0.0)

    def __repr__(self) -> str:
        return describe_report(self)

    def _repr_html_(self) -> str:
        return report_to_html(self)

    def __str__(self) -> str:
        seeded = "  SEEDED: a simulation, not private" if self.seeded else ""
        pure = "" if self.delta else " pure,"
        releases = sum(event.count for _, event in self.events)
        return (
            f"({self.epsilon:.4g}, {self.delta:g})-DP,{pure} {self.unit} level, {self.relation}, of a budget of "
            f"{self.epsilon_budget:g}, {releases} releases{seeded}"
        )


class Ledger:
    """Budget and every charge against it. With a path the ledger lives on disk and survives the process."""

    def __init__(self, budget: Budget, *, seeded: bool = False, path: Path | None = None) -> None:
        self.budget = budget
        self.seeded = seeded
        self._entries: dict[str, Event] = {}
        self._posted: set[str] = set()  # pages that stand on a billboard
        self._drawn: set[str] = set()  # names whose noise this process has drawn
        self._closed = False
        self._file: Any = None
        if path is not None:
            self._open(path)

    def charge(self, events: Mapping[str, Event]) -> None:
        """Spend budget for named releases, durably, or raise `BudgetExceeded` and leave everything as it was.

        A name that was charged before with the same event is not charged again: that charge belongs to a release that
        was under way when a process died and was never posted, so nothing about it has been seen. Once `posted`, or
        drawn by this very ledger, it is refused: one charge never pays for two draws.
        """
        if self._closed:
            raise InputError("this ledger is closed: what it charged would be on no record. Open it again.")
        new: dict[str, Event] = {}
        for name, event in events.items():
            if name not in self._entries:
                new[name] = event
            elif self._entries[name] != event:
                raise InputError(f"release {name!r} was charged before at another price; a ledger is never rewritten.")
            elif name in self._drawn or name.split("/")[0] in self._posted:
                raise ResumeError(
                    f"release {name!r} was made before, and its page is not on this billboard. A charge pays for one "
                    "draw: restore the page, or start a new run."
                )
        if not new:
            self._drawn.update(events)
            return
        events_after = [*self._entries.values(), *new.values()]
        self._check_fits(events_after, ", ".join(new))
        self._write([{"charge": name, **event_to_json(event)} for name, event in new.items()])
        self._entries.update(new)
        self._drawn.update(events)

    def check_affordable(self, events: Mapping[str, Event]) -> None:
        """Raise what `charge` would if these do not fit, and charge nothing: before rows are looked at for nothing."""
        new = {name: event for name, event in events.items() if name not in self._entries}
        if new:
            self._check_fits([*self._entries.values(), *new.values()], ", ".join(new))

    def _check_fits(self, events: list[Event], new: str) -> None:
        budget, pures = self.budget, pure_epsilons(events)
        if not budget.delta and len(pures) < len(events):
            raise BudgetExceeded(
                f"releasing {new} takes Gaussian noise, and that takes a delta: a budget of delta 0 pays for choices "
                "alone. Give it a delta (1e-6 is usual), or use a method that only chooses."
            )
        if any(isinstance(event, Sampled | Batched) and event.relation != budget.relation for event in events):
            raise InputError(f"{new} is priced for another relation than this ledger's, {budget.relation}.")
        if not within_budget(events, budget.epsilon, budget.delta):
            after = epsilon_spent(events, budget.delta)
            raise BudgetExceeded(
                f"releasing {new} would bring epsilon to {after:.6g}, over the budget of "
                f"{budget.epsilon:g} at delta {budget.delta:g}. Use a larger epsilon, or ask less."
            )

    def posted(self, page: str, events: Mapping[str, Event]) -> None:
        """Record that a page stands, whose releases must have been charged at these prices."""
        for name, event in events.items():
            if self._entries.get(name) != event:
                raise ResumeError(f"the billboard has {name!r}, which this ledger never charged at that price.")
        if page not in self._posted:
            self._write([{"posted": page}])
            self._posted.add(page)

    def abandoned(self, page: str) -> None:
        """Record that a page will never stand although something of it was drawn: its charges pay for no other draw."""
        if page not in self._posted:
            self._write([{"posted": page}])
            self._posted.add(page)

    @property
    def capacity(self) -> float:
        """What an algorithm splits: all of mu^2 that the run may spend on Gaussian releases, selections apart, spent or
        not.

        A selection makes it smaller, by what it costs and by the part of delta that it sets aside, and a choice makes
        it smaller, too. So choose and select first, then split: the same number then on every day that the run is
        continued. Releases about samples are left out of it, and not measured by mu^2: a split of it must leave room
        for them, which `sampling.noise_multiplier_for` then plans.
        """
        events = without_samples(self._entries.values())
        selections = [event for event in events if isinstance(event, Selection)]
        return max(self._capacity(events) - total_mu(selections) ** 2, 0.0)

    def _capacity(self, events: Collection[Event]) -> float:
        """Nothing, if selections set aside all of delta, or if there is none.

        Formal guarantee: with mu^2 within it, the run is (epsilon, delta_G + (1 + e^epsilon) delta')-DP at the epsilon
        of the budget, delta_G being what is left of delta and the other term what selections set aside. It looks at
        all events together, pure ones included, so the order of charges does not matter.
        """
        epsilon, left, pures = self.budget.epsilon, delta_left(events, self.budget.delta), pure_epsilons(events)
        if left <= 0:
            return 0.0
        mu, sampled = gaussian_mu(epsilon, left), spending(events)
        if sampled is not None:
            return sampled.most_mu(epsilon, left, mu) ** 2
        return most_gaussian(epsilon, left, pures, mu) ** 2 if pures else mu**2

    @property
    def remaining(self) -> float:
        """What is left of mu^2 for releases to all users, beside samples that were asked, to four digits; a group that
        was asked for less than others has more left."""
        events = self._entries.values()
        return max(self._capacity(events) - total_mu(without_samples(events)) ** 2, 0.0)

    @property
    def pure_left(self) -> float:
        """The largest epsilon of one more choice that fits."""
        events = self._entries.values()
        left, sampled = delta_left(events, self.budget.delta), spending(events)
        if sampled is not None:
            return sampled.most_pure(self.budget.epsilon, left)
        return most_pure(self.budget.epsilon, left, total_mu(events), pure_epsilons(events))

    @property
    def epsilon(self) -> float:
        """Epsilon spent so far, at the budget's delta; at most the budget's epsilon, because no charge goes over it."""
        return epsilon_spent(list(self._entries.values()), self.budget.delta)

    def report(self) -> PrivacyReport:
        return PrivacyReport(
            relation=self.budget.relation,
            epsilon=self.epsilon,
            delta=self.budget.delta,
            epsilon_budget=self.budget.epsilon,
            accountant=accountant_of(list(self._entries.values())),
            events=tuple(self._entries.items()),
            seeded=self.seeded,
        )

    def write(self, path: Path) -> None:
        """Write a copy of this ledger to a new file."""
        copy = Ledger(self.budget, seeded=self.seeded, path=path)
        copy._write([{"charge": name, **event_to_json(event)} for name, event in self._entries.items()])
        copy._write([{"posted": page} for page in sorted(self._posted)])
        copy.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self._closed = True

    def _header(self) -> dict[str, Any]:
        b = self.budget
        return {
            "format": FORMAT,
            "relation": b.relation,
            "epsilon": b.epsilon,
            "delta": b.delta,
            "seeded": self.seeded,
        }

    def _open(self, path: Path) -> None:
        self._file = open(path, "a+b")  # noqa: SIM115
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise InputError(
                f"{path} is in use by another process. Wait for it to end, or use another folder."
            ) from None
        try:
            header, entries, posted, good = _parse(path)
        except BaseException:
            self.close()
            raise
        if header is None:
            self._file.truncate(0)
            self._write([self._header()])
            _sync_folder(path.parent)
            return
        if header != self._header():
            self.close()
            raise InputError(
                f"{path} belongs to a run with another budget ({_describe(header)}). Continue it with the same "
                "epsilon, delta, relation and random_state, or use another folder."
            )
        self._file.truncate(good)  # a torn last line was never synced, so its noise was never drawn
        self._entries, self._posted = entries, posted

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self._file is None:
            return
        self._file.seek(0, os.SEEK_END)
        self._file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())


def read_ledger(path: Path) -> Ledger:
    """The ledger in a file, without opening the file for writing: what is charged to it now stays in memory."""
    if not path.is_file():
        raise InputError(f"{path} does not exist: this folder holds no privrep ledger.")
    header, entries, posted, _ = _parse(path)
    if header is None:
        raise InputError(f"{path} is empty: the run was stopped before it began. Nothing was spent.")
    ledger = Ledger(Budget(header["epsilon"], header["delta"], header["relation"]), seeded=header["seeded"])
    ledger._entries, ledger._posted, ledger._drawn = entries, posted, set(entries)  # nothing is drawn again on it
    return ledger


def read_report(path: Path) -> PrivacyReport:
    """The report of a ledger file."""
    return read_ledger(path).report()


def _parse(path: Path) -> tuple[dict[str, Any] | None, dict[str, Event], set[str], int]:
    """Header, charges, pages posted, and how many bytes are whole lines. All but a torn last line is refused if odd."""
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    header: dict[str, Any] | None = None
    entries: dict[str, Event] = {}
    posted: set[str] = set()
    for number, line in enumerate(raw[:whole].split(b"\n")[:-1], start=1):
        try:
            data = json.loads(line)
            if number == 1:
                if data["format"] != FORMAT:
                    raise InputError(f"{path} is not a ledger this version of privrep can read ({FORMAT}).")
                header = data
            elif "posted" in data:
                posted.add(data["posted"])
            elif data["charge"] in entries:
                raise ValueError(f"{data['charge']!r} charged twice")
            else:
                entries[data["charge"]] = event_from_json(data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, InputError) and number == 1:
                raise
            raise InputError(
                f"{path} is damaged in line {number} ({error}); restore it from a copy. What it says was spent cannot "
                "be trusted, so the run cannot go on."
            ) from None
    return header, entries, posted, whole


def _describe(header: Mapping[str, Any]) -> str:
    kind = "simulation" if header["seeded"] else "private"
    return f"epsilon {header['epsilon']:g}, delta {header['delta']:g}, {header['relation']}, {kind}"


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def noise_multiplier(mu_squared: float) -> float:
    """The noise multiplier that spends this much of mu^2."""
    return 1 / math.sqrt(mu_squared)
