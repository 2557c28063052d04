"""The one place where budget is spent.

A charge is written, flushed and synced to disk before any noise is drawn, and what does not fit is refused before it
is written. So a process killed anywhere has recorded at least what it released. Entries are only ever appended.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privrep.boundary import refusing
from privrep.errors import BudgetExceeded, InputError, ResumeError
from privrep.privacy.account import Account, Place, check_account
from privrep.privacy.accounting import (
    check_budget,
    check_epsilon,
    check_plausible,
    collect_spending,
    compute_capacity,
    compute_delta_left,
    compute_epsilon,
    describe_accountant,
    drop_sampled,
    gaussian_mu,
    list_pure_epsilons,
    total_mu,
    within_budget,
)
from privrep.privacy.billboard import Post
from privrep.privacy.composition import find_largest_pure_epsilon
from privrep.privacy.events import (
    RELATIONS,
    Batched,
    Event,
    Relation,
    Sampled,
    Selection,
    event_to_json,
)
from privrep.privacy.ledger_file import Contents, Entries, LedgerFile, posted_line, read_file
from privrep.privacy.naming import draw_name
from privrep.privacy.report import PrivacyReport


@dataclass(frozen=True)
class Budget:
    """The budget of a run, and the change of the population that it protects: a user's rows replaced, or a user more.

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
        """Return the budget as mu of Gaussian differential privacy, 0 if it is pure. To split it is to split mu^2."""
        return gaussian_mu(self.epsilon, self.delta) if self.delta else 0.0


class Ledger:
    """A budget and every charge against it. With a path the ledger lives on disk and survives the process.

    Threads may share it: checking, writing and taking note of a charge are one step. A forked child may not: what it
    charged would be unknown to its parent.
    """

    def __init__(
        self, budget: Budget, *, seeded: bool = False, path: Path | None = None, account: Account | None = None
    ) -> None:
        """Open a ledger.

        Args:
            budget: nothing beyond it is ever charged.
            seeded: whether noise is simulated from a seed, so that nothing is private.
            path: of the file, made if it is not there. Raise InputError if it belongs to another run or is in use.
            account: with the population's ledger that the budget is reserved from; None: with none.
        """
        self.budget = budget
        self.seeded = seeded
        self._drawn: set[str] = set()  # names whose noise this process has drawn
        self._closed = False
        self._process, self._lock = os.getpid(), threading.RLock()
        self._stands: Contents | None = None  # of the file that was read, where it is only read
        self._file = None if path is None else LedgerFile(path, self._header())
        self._entries = Entries() if self._file is None else self._file.entries
        self._account, self._run, self._mark = account, "", ""
        try:
            self._join()
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        """Reserve the budget from the population's ledger, under a name that this ledger keeps."""
        account, entries = self._account, self._entries
        check_account(account, entries, seeded=self.seeded, chained=self.chained)
        if account is None:
            return
        if entries.drawn_from is None:
            drawn_from = account.name, draw_name()
            self._write([{"population": drawn_from[0], "run": drawn_from[1]}])
            entries.drawn_from = drawn_from
        self._run = entries.drawn_from[1]
        if mark := account.reserve(self._run, self.budget, self._place):
            entries.opened = self._mark = mark
            self._write([{"opened": mark}])
            if entries.charges:
                account.cover(self._run, list(entries.charges.values()), self.budget, self._place)

    @property
    def _place(self) -> Place:
        """Return how far this ledger is. One in memory has no copy that could be left behind."""
        return Place(self._entries.opened, 0 if self._file is None else len(self._entries.lines))

    @property
    def over(self) -> bool:
        """Return whether the population's ledger counts this run as finished, so that it can charge nothing more."""
        return self._account is not None and not self._mark

    def finish(self) -> None:
        """Return what was not spent to the population's ledger, if there is one: this ledger charges no more."""
        with self._writing():
            if self._account is not None:
                self._account.finish(self._run, list(self._entries.charges.values()), self._place)
                self._account, self._closed = None, True

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of: every entry, but neither file nor lock.

        A copy of a file is closed, and so is one of a run that draws from a population's ledger.
        """
        kept = {
            name: value for name, value in vars(self).items() if name not in ("_lock", "_file", "_process", "_account")
        }
        closed = self._closed or self._file is not None or self._account is not None
        stands = self._stands if self._file is None else self._file.contents
        return {**kept, "_entries": self.entries, "_closed": closed, "_stands": stands}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _file=None, _account=None, _process=os.getpid(), _lock=threading.RLock())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Let one thread at a time check and write. Raise InputError in a forked child."""
        if os.getpid() != self._process:  # first: a fork may have copied a lock that nobody will let go
            raise InputError("this ledger was opened before the process forked. Open the run again in the new process.")
        with self._lock:
            yield

    def _check_open(self) -> None:
        """Raise InputError where the ledger is closed."""
        if self._closed:
            raise InputError("this ledger is closed: what it charged would be on no record. Open it again.")

    def charge(self, events: Mapping[str, Event]) -> None:
        """Spend budget for named releases, durably, or raise `BudgetExceeded` and leave everything as it was.

        A name that was charged before with the same event is not charged again. That charge belongs to a release that
        was under way when a process died. It was never posted, so nothing about it has been seen. Once its page is on
        record as posted, or this very ledger has drawn it, it is refused: one charge never pays for two draws.
        """
        with self._writing():
            self._check_open()
            known, new = self._entries.charges, dict[str, Event]()
            for name, event in events.items():
                page = name.split("/")[0]
                if name not in known:
                    new[name] = event
                elif known[name] != event:
                    raise InputError(
                        f"release {name!r} was charged before at another price; a ledger is never rewritten."
                    )
                elif name in self._drawn or page in self._entries.posted or page in self._entries.abandoned:
                    raise ResumeError(
                        f"release {name!r} was made before, and its page is not on this billboard. A charge pays for "
                        "one draw: restore the page, or start a new run."
                    )
            if new:
                self._check_fits([*known.values(), *new.values()], ", ".join(new))
            if self._account is not None and not self._mark:
                raise ResumeError("this run is finished in its population ledger, so it can charge nothing more.")
            if self._account is not None and new:
                self._account.cover(self._run, [*known.values(), *new.values()], self.budget, self._place)
            self._write([{"charge": name, **event_to_json(event)} for name, event in new.items()])
            known.update(new)
            self._drawn.update(events)

    def check_affordable(self, events: Mapping[str, Event]) -> None:
        """Raise what `charge` would raise for these events, and charge nothing: no rows are looked at in vain."""
        known = self.entries.charges
        new = {name: event for name, event in events.items() if name not in known}
        if new:
            self._check_fits([*known.values(), *new.values()], ", ".join(new))

    def _check_fits(self, events: list[Event], new: str) -> None:
        """Raise BudgetExceeded unless all these events together are within the budget; `new` names the last ones."""
        budget, pures = self.budget, list_pure_epsilons(events)
        if not budget.delta and len(pures) < len(events):
            raise BudgetExceeded(
                f"releasing {new} takes Gaussian noise, and that takes a delta: a budget of delta 0 pays for choices "
                "alone. Give it a delta (1e-6 is usual), or use a method that only chooses."
            )
        if any(isinstance(event, Sampled | Batched) and event.relation != budget.relation for event in events):
            raise InputError(f"{new} is priced for another relation than this ledger's, {budget.relation}.")
        if not within_budget(events, budget.epsilon, budget.delta):
            after = compute_epsilon(events, budget.delta)
            raise BudgetExceeded(
                f"releasing {new} would bring epsilon to {after:.6g}, over the budget of "
                f"{budget.epsilon:g} at delta {budget.delta:g}. Use a larger epsilon, or ask less."
            )

    def record_drawn(self, page: str) -> None:
        """Take note that a page is about to be posted, where the run draws from a population ledger.

        Raise ResumeError if the run goes on elsewhere: what was drawn here is then thrown away, and never seen. Without
        a population ledger nobody knows of other copies of the run, and nothing is noted.
        """
        if self._account is not None:
            with self._writing():
                self._write([{"drawn": page}])

    def record_posted(self, page: Post, events: Mapping[str, Event] | None = None) -> None:
        """Record that a page stands, and what it says. It must say what it said when it was posted.

        Args:
            page: of the billboard.
            events: its releases, which must have been charged at these prices; None for a page computed from others.
        """
        with self._writing():
            for name, event in (events or {}).items():
                if self._entries.charges.get(name) != event:
                    raise ResumeError(f"the billboard has {name!r}, which this ledger never charged at that price.")
            digest, known = page.digest, self._entries.posted.get(page.name)
            if known and known != digest:
                raise ResumeError(
                    f"page {page.name!r} does not say what it said when it was posted. Restore it from a copy."
                )
            if known is None and (events is not None or self.chained):
                self._write([posted_line(page.name, digest if self.chained else "")])
                self._entries.posted[page.name] = digest if self.chained else ""

    def record_abandoned(self, page: str) -> None:
        """Record that a page will never stand although something of it was drawn: its charges pay for no other draw."""
        with self._writing():
            if page not in self._entries.posted and page not in self._entries.abandoned:
                self._write([{"abandoned" if self.chained else "posted": page}])
                self._entries.abandoned.add(page)

    @property
    def entries(self) -> Entries:
        """Return a copy of all charges, and of what is known of pages."""
        if os.getpid() != self._process:
            return self._entries.copy()  # no thread of this process writes
        with self._lock:
            return self._entries.copy()

    @property
    def chained(self) -> bool:
        """Return whether each line carries a hash of all lines before it, and pages one of what they say."""
        head = self._file.head if self._file is not None else "" if self._stands is None else self._stands.head
        return head is not None

    @property
    def seal(self) -> dict[str, Any] | None:
        """Return what identifies the ledger's file as it is now: its lines and the last chain; None without chains."""
        if self._file is not None:
            return self._file.seal
        return None if self._stands is None else self._stands.seal

    @property
    def capacity(self) -> float:
        """Return all of mu^2 that Gaussian releases may spend, spent or not, selections apart: algorithms split it.

        A selection makes it smaller, by its cost and by the part of delta that it sets aside. A choice makes it
        smaller, too. So choose and select first, then split: the number is then the same on every day that the run is
        continued.

        Releases about samples are left out of it, and not measured by mu^2. A split of it must leave room for them,
        which `sampling.plan_noise_multiplier` then plans.
        """
        events = drop_sampled(self.entries.charges.values())
        selections = [event for event in events if isinstance(event, Selection)]
        return max(compute_capacity(events, self.budget.epsilon, self.budget.delta) - total_mu(selections) ** 2, 0.0)

    @property
    def remaining(self) -> float:
        """Return the mu^2 that is left for releases to all users, beside samples that were asked, to four digits.

        A group that was asked for less than others has more left.
        """
        events, budget = list(self.entries.charges.values()), self.budget
        return max(compute_capacity(events, budget.epsilon, budget.delta) - total_mu(drop_sampled(events)) ** 2, 0.0)

    @property
    def pure_left(self) -> float:
        """Return the largest epsilon of one more choice that fits."""
        events = self.entries.charges.values()
        left, sampled = compute_delta_left(events, self.budget.delta), collect_spending(events)
        if sampled is not None:
            return sampled.find_largest_pure_epsilon(self.budget.epsilon, left)
        return find_largest_pure_epsilon(self.budget.epsilon, left, total_mu(events), list_pure_epsilons(events))

    @property
    def epsilon(self) -> float:
        """Return the epsilon spent so far at the budget's delta. It is at most the budget's: no charge goes over it."""
        return compute_epsilon(list(self.entries.charges.values()), self.budget.delta)

    def report(self) -> PrivacyReport:
        """Return the spending so far, as public facts."""
        return PrivacyReport(
            relation=self.budget.relation,
            epsilon=self.epsilon,
            delta=self.budget.delta,
            epsilon_budget=self.budget.epsilon,
            accountant=describe_accountant(list(self.entries.charges.values())),
            events=tuple(self.entries.charges.items()),
            seeded=self.seeded,
            population=self.entries.drawn_from,
        )

    def write(self, path: Path) -> None:
        """Write a copy of this ledger to a new file."""
        copy = LedgerFile(path, self._header(), chained=self.chained)
        try:
            copy.append(self.entries.lines)
        finally:
            copy.close()

    def close(self) -> None:
        """Close the file. Nothing can be charged after that."""
        with self._lock if os.getpid() == self._process else nullcontext():
            if self._file is not None:
                self._file.close()
                self._closed = True

    def _header(self) -> dict[str, Any]:
        """Return the first line of the file but for its format: the budget, and whether the run is a simulation."""
        b = self.budget
        return {"relation": b.relation, "epsilon": b.epsilon, "delta": b.delta, "seeded": self.seeded}

    def _write(self, lines: list[dict[str, Any]]) -> None:
        """Append lines to the file, if there is one, and sync it: they are on disk when this returns.

        The population's ledger, if there is one, takes note. Whatever goes wrong closes this ledger.
        """
        self._check_open()
        try:
            if self._file is not None and lines:
                self._file.append(lines)
            self._entries.lines += lines
            if self._account is not None and self._mark:
                self._account.advance(self._run, self._place)
        except BaseException:
            self._closed = True
            raise


def read_ledger(path: Path) -> Ledger:
    """Return the ledger in a file, which is never written: charges to this ledger stay in memory."""
    if not path.is_file():
        raise InputError(f"{path} does not exist: this folder holds no privrep ledger.")
    found = read_file(path)
    if found.header is None:
        raise InputError(
            f"{path} is empty; restore it from a copy. Only a run that was stopped before its first page has spent "
            "nothing."
        )
    header = found.header
    with refusing(lambda why: f"{path} is damaged ({why}); restore it from a copy."):
        check_plausible(found.entries.charges.values(), header["epsilon"], header["delta"])
    ledger = Ledger(Budget(header["epsilon"], header["delta"], header["relation"]), seeded=header["seeded"])
    ledger._entries, ledger._drawn = found.entries, set(found.entries.charges)  # nothing is drawn again on it
    ledger._stands = found
    return ledger


def read_report(path: Path) -> PrivacyReport:
    """Return the report of a ledger file."""
    return read_ledger(path).report()


def noise_multiplier(mu_squared: float) -> float:
    """Return the noise multiplier that spends this much of mu^2."""
    return 1 / math.sqrt(mu_squared)
