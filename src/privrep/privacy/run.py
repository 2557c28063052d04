"""A private computation under way: the doors through which users are asked, and the record of what was answered.

A run charges its ledger and draws (`privacy.release`, or `privacy.node_noise` where nodes add the noise), then posts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from privrep.errors import InputError, PrivrepError, ResumeError
from privrep.privacy.billboard import Billboard, Choice, Release
from privrep.privacy.books import find_fault
from privrep.privacy.bounds import LEVELS, Bound, BoundedSum, LossBound
from privrep.privacy.calibration import (
    Query,
    check_batches,
    check_name,
    check_page,
    check_share,
    check_step,
    compute_sensitivity,
    make_question_error,
    price_iteration,
    price_page,
    price_release,
    price_selection,
)
from privrep.privacy.exponential import compute_scale, price_choice
from privrep.privacy.groups import Group
from privrep.privacy.ledger import Budget, Ledger
from privrep.privacy.node_noise import NoisyUsers, release_by_machines
from privrep.privacy.noise import NoiseSource, secure_noise, simulated_noise
from privrep.privacy.population import Account
from privrep.privacy.protocol import (
    EVERYONE,
    Audience,
    Everyone,
    Facts,
    PlannedAudience,
    Step,
    Users,
    check_planned_audience,
)
from privrep.privacy.release import State, choose, release, release_about_sample, release_iterated, select
from privrep.privacy.sampling import Fixed, Poisson, Sampling
from privrep.privacy.selection import COUNTED, Holders, Key
from privrep.typing import Array

Planned = TypeVar("Planned", bound=PlannedAudience)
OnRelease = Callable[[str, Step | None], None]
"""A hook that hears of a page that stands, and of the step that was asked.

The step is None for a selection and for steps of an iteration.

A step holds public values. One whose users keep a state of their own holds that state, too, so a hook is for the eyes
of whoever holds the rows. Nothing that the hook computes goes back to the run, nor is it written anywhere.
"""
OnPage = Callable[[str, float], None]
"""Hears of a page that stands, and of the epsilon spent so far: public facts, for a screen."""
LOGGER = logging.getLogger(__name__)


def _logged(on_release: OnRelease, ledger: Ledger) -> OnRelease:
    """Return the hook, which tells the log, too, of each page that stands: its name and the epsilon spent so far."""

    def told(page: str, step: Step | None) -> None:
        if LOGGER.isEnabledFor(logging.INFO):
            LOGGER.info("page %s: epsilon %.4g of %g spent", page, ledger.epsilon, ledger.budget.epsilon)
        on_release(page, step)

    return told


class UnknownUsers:
    """Users of a run that has yet to select the keys by which their rows are read: they cannot be asked."""

    @property
    def facts(self) -> Facts:
        raise InputError("the users of this run are not known yet: it can select keys. Give it users first.")

    def sums(
        self, step: Step, bounds: Mapping[str, Bound | LossBound], among: Audience = EVERYONE
    ) -> dict[str, BoundedSum]:
        raise InputError("the users of this run are not known yet: it can select keys. Give it users first.")


@dataclass(frozen=True)
class Run:
    """A private computation under way: where the users live, the budget, the public record, the noise.

    `release`, `iterate`, `select` and `choose` are the only doors: one pass over the users, charged, released and
    posted as one page. A page that stands on the billboard is read from there: a resumed run repeats no pass and spends
    nothing twice. `on_release` hears of every page once it stands.
    """

    users: Users
    ledger: Ledger
    billboard: Billboard
    noise: NoiseSource
    on_release: OnRelease = lambda page, step: None

    @classmethod
    @contextmanager
    def open(
        cls,
        users: Users | None,
        budget: Budget,
        *,
        seed: int | None = None,
        folder: Path | None = None,
        on_release: OnRelease = lambda page, step: None,
        account: Account | None = None,
    ) -> Iterator[Run]:
        """Open a run with a ledger and a billboard of its own, and close the ledger at the end.

        With an account, the whole budget is reserved before this returns. What was not spent returns at the end of a
        run that is over: one that went well, one that keeps nothing on disk, and one that charged nothing.

        Args:
            users: who is asked. None where their rows wait for keys to be selected: see `with_users`.
            budget: what the run may spend.
            seed: of simulated noise, which is not private. None draws noise from the operating system.
            folder: where every charge and page is written before it is used. None keeps them in memory.
            on_release: hears of every page that stands.
            account: with the population's ledger that the budget is reserved from; None: with none.
        """
        path = None if folder is None else folder / "ledger.jsonl"
        ledger = Ledger(budget, seeded=seed is not None, path=path, account=account)
        over = False
        try:
            billboard = Billboard(None if folder is None else folder / "billboard")
            if fault := find_fault(ledger, billboard, finished=False):
                raise ResumeError(f"{folder}: {fault}. Restore ledger and billboard from copies of the same moment.")
            noise = secure_noise if seed is None else simulated_noise(seed)
            hook = _logged(on_release, ledger)
            yield cls(UnknownUsers() if users is None else users, ledger, billboard, noise, hook)
            over = True
        finally:
            try:
                if account is not None and (
                    folder is None or not ledger.entries.charges or (over and not account.lasts)
                ):
                    with nullcontext() if over else suppress(PrivrepError):  # what went wrong first is told
                        ledger.finish()
            finally:
                ledger.close()

    def with_users(self, users: Users) -> Run:
        """Return the same run, on the same ledger and billboard, with these users."""
        return replace(self, users=users)

    def release(
        self, page: str, step: Step, queries: Mapping[str, Query], among: PlannedAudience = EVERYONE
    ) -> dict[str, Release]:
        """Return several statistics of one pass over the users who are asked.

        A pass over a group costs its users alone. A pass over a secret sample costs everyone less; one that fails has
        been paid for.

        Args:
            page: names the pass.
            step: what users compute.
            queries: how each statistic is clipped, and what it spends.
            among: who is asked.
        """
        check_name(page)
        relation, among = self.ledger.budget.relation, self._plan_audience(among)
        check_step(step, [query.bound for query in queries.values()], relation, among)
        events = price_page(page, queries, among, relation)
        if page not in self.billboard:
            released = self._make_releases(page, step, queries, among)
            self.ledger.record_drawn(page)
            self.billboard.post_releases(page, released, simulation=self.ledger.seeded)
        self.ledger.record_posted(self.billboard[page], events)
        released = self.billboard.releases(page)
        for key, query in queries.items():
            wanted = compute_sensitivity(query.bound, relation, among)
            check_page(page, released.get(key), wanted, query.bound.size)
        if released.keys() != queries.keys():
            raise make_question_error(page)
        self.on_release(page, step)
        return released

    def _make_releases(
        self, page: str, step: Step, queries: Mapping[str, Query], among: PlannedAudience
    ) -> dict[str, Release]:
        """Return new releases of a page that does not stand yet, by the way that users and audience ask for."""
        if isinstance(self.users, NoisyUsers):
            if isinstance(among, Poisson | Fixed):
                raise InputError(
                    "who asks for a sample knows it, so machines that add the noise are all asked: rate 1."
                )
            return release_by_machines(self.users, step, queries, self.ledger, page, among)
        if isinstance(among, Poisson | Fixed):
            return release_about_sample(self.users, step, queries, among, self.ledger, self.noise, page)
        self.ledger.check_affordable(price_release(page, queries, among))
        sums = self.users.sums(step, {key: query.bound for key, query in queries.items()}, among)
        return release(sums, queries, self.ledger, self.noise, page, among)

    def _plan_audience(self, among: Planned) -> Planned | Everyone:
        """Return who is asked, after a check: a sample of all users is everyone."""
        check_planned_audience(among)
        if isinstance(among, Fixed):
            check_batches(among, self.ledger.budget.relation, self.users.facts.users)
        return EVERYONE if isinstance(among, Poisson | Fixed) and among.everyone else among

    def iterate(
        self,
        page: str,
        steps: int,
        start: Mapping[str, Array],
        make_step: Callable[[State], Step],
        queries: Mapping[str, Query],
        update: Callable[[State, dict[str, Release]], State],
        among: Everyone | Sampling = EVERYONE,
        on_step: Callable[[int], None] = lambda number: None,
    ) -> State:
        """Return the state in which many small passes ended, under one charge and on one page: training.

        The last state is posted and returned. A page that stands is read, as in `release`.

        Args:
            page: names the passes.
            steps: how many there are.
            start: the public state before the first, arrays of any shapes.
            make_step: makes the step of a pass from the state.
            queries: of one pass. `mu_squared` of a query is what one pass spends on it.
            update: makes the next state, of the same names and shapes, of public numbers alone.
            among: who is asked in a pass. Each pass is about a new sample, or about everyone.
            on_step: hears how many passes were made. Nobody hears more before the end.
        """
        check_name(page)
        if isinstance(among, Group):
            raise InputError("the steps of an iteration ask everyone or a sample, not a group.")
        if isinstance(self.users, NoisyUsers):
            raise InputError("a walk's steps are seen by nobody on their way: it is for users whose sums are exact.")
        relation, among = self.ledger.budget.relation, self._plan_audience(among)
        events = price_iteration(page, queries, among, relation, steps)
        if page not in self.billboard:
            asked = (steps, start, make_step, queries, update, among)
            walk = release_iterated(self.users, *asked, self.ledger, self.noise, page, on_step)
            self.ledger.record_drawn(page)
            self.billboard.post_iterated(page, walk, simulation=self.ledger.seeded)
        self.ledger.record_posted(self.billboard[page], events)
        walk = self.billboard.read_iterated(page)
        shapes = {key: np.shape(value) for key, value in start.items()}
        if walk.steps != steps or {key: value.shape for key, value in walk.state.items()} != shapes:
            raise make_question_error(page)
        for key, query in queries.items():
            facts, wanted = walk.noise.get(key, {}), compute_sensitivity(query.bound, relation, among)
            if facts.get("size") != query.bound.size or not math.isclose(facts["sensitivity"], wanted, rel_tol=1e-6):
                raise make_question_error(page)
        self.on_release(page, None)
        return dict(walk.state)

    def select(self, page: str, holders: Holders, mu_squared: float, delta: float) -> tuple[Key, ...]:
        """Return the keys that enough users hold, sorted; `delta` of the run's delta is set aside for the others.

        Select before splitting `ledger.capacity`. The keys' noisy counts are on the page:
        `billboard.read_selection(page)`. A page that stands is read, as in `release`.

        Args:
            page: names the selection.
            holders: which user of the run holds which keys.
            mu_squared: what the noisy counts spend.
            delta: what is set aside for keys that one user alone holds.
        """
        check_name(page)
        check_share(mu_squared)
        if page not in self.billboard:
            selected = select(holders, mu_squared, delta, self.ledger, self.noise, page)
            self.ledger.record_drawn(page)
            self.billboard.post_selection(page, selected, simulation=self.ledger.seeded)
        self.ledger.record_posted(self.billboard[page], price_selection(page, mu_squared, delta))
        selected = self.billboard.read_selection(page)
        check_page(page, selected.counts, compute_sensitivity(COUNTED, self.ledger.budget.relation), len(selected.keys))
        self.on_release(page, None)
        return selected.keys

    def choose(self, page: str, step: Step, candidates: int, epsilon: float) -> int:
        """Return the index of one of many candidates: the smaller its loss, summed over all users, the likelier.

        It costs epsilon, with no delta. Choose before splitting `ledger.capacity`. A page that stands is read, as in
        `release`.

        Args:
            page: names the choice.
            step: returns {"losses": Losses}, the loss in [0, 1] of each user by each candidate.
            candidates: how many there are.
            epsilon: what the choice spends.
        """
        check_name(page)
        candidates, epsilon = int(candidates), float(epsilon)
        bound, events = LossBound(candidates), price_choice(page, epsilon)
        scale = compute_scale(bound, epsilon, self.ledger.budget.relation) / LEVELS
        check_step(step, [bound], self.ledger.budget.relation)
        if page not in self.billboard:
            losses = self.users.sums(step, {"losses": bound})["losses"]
            choice = choose(losses, epsilon, self.ledger, self.noise, page)
            self.ledger.record_drawn(page)
            self.billboard.post_choice(page, choice, simulation=self.ledger.seeded)
        self.ledger.record_posted(self.billboard[page], events)
        choice = self.billboard.read_choice(page)
        if choice != Choice(choice.index, candidates, epsilon, scale) or not 0 <= choice.index < candidates:
            raise make_question_error(page)
        self.on_release(page, step)
        return choice.index

    def derive(self, page: str, arrays: Mapping[str, Array], **facts: float | int | str | bool | list[float]) -> None:
        """Post values computed from the billboard and public facts.

        Args:
            page: names the values.
            arrays: public arrays of any shapes, by name.
            facts: public facts.
        """
        arrays = {key: np.asarray(value) for key, value in arrays.items()}
        self.ledger.record_posted(self.billboard.post_derived(page, arrays, facts, simulation=self.ledger.seeded))
