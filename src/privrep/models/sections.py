"""An inspection as data: sections of sentences, and what every kind of model says of its privacy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from privrep.boundary import read_json, refusing
from privrep.data.categories import Categories
from privrep.models.promise import LARGEST_EPSILON
from privrep.models.spending import Spent, count_releases
from privrep.privacy.events import Relation
from privrep.privacy.report import PrivacyReport

SEEDED = (
    "THE NOISE WAS SEEDED: this is a simulation and NOT PRIVATE. Whoever knows the seed can subtract the noise. "
    "Do not publish anything of it that was computed from real users."
)
_SECRET = "Drawn from the operating system's cryptographic generator, exact on a grid."
_WOULD_BE = "Nothing, because the noise was seeded. With secret noise it would be this:"
COVERED = (
    "It covers all that this folder holds outside private/: the representation, the feature scales, lists of values "
    "that were selected, the ledger and every page of the billboard, taken together."
)
NOT_THERE_YET = "Not there yet: repeat the same fit to continue it; what was spent is not spent again."


@dataclass(frozen=True)
class Section:
    """A heading and its sentences."""

    heading: str
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Inspection:
    """A folder's account of itself: for people in sections, for machines in facts. Reading it changes nothing."""

    folder: str
    finished: bool
    privacy: PrivacyReport
    share_spent: float
    releases: list[Spent]
    sections: tuple[Section, ...]
    events: list[dict[str, Any]] = field(repr=False)  # the releases for machines
    facts: Mapping[str, Any] = field(repr=False)  # of this kind of model, for machines
    mu: float | None = None  # None: not every release has one
    shared: str = ""  # what was learned for all, in a few words; empty: the run is not finished
    sizes: str = ""  # users and features, in a few words

    @property
    def summary(self) -> dict[str, str]:
        """Return five lines that say the most, by label: the rest of an inspection explains them."""
        report = self.privacy
        promise = f"({report.epsilon:.4g}, {report.delta:g})-differential privacy for each {report.unit}"
        of = "mu²" if report.delta else "epsilon"
        count, drawn = count_releases(report), report.population
        return {
            "guarantee": f"none: with secret noise, {promise}" if report.seeded else f"{promise}, {report.relation}",
            "spent": f"epsilon {report.epsilon:.4g} of {report.epsilon_budget:g}: {self.share_spent:.1%} of {of}, in "
            f"{count:,} {'release' if count == 1 else 'releases'}",
            **({} if drawn is None else {"population": f"ledger {drawn[0]}, run {drawn[1]}"}),
            "shared": self.shared or "nothing yet: the run was not finished",
            "sizes": self.sizes,
            "simulation": "YES: seeded noise, NOT PRIVATE" if report.seeded else "no: secret noise",
        }

    @property
    def words(self) -> dict[str, list[str]]:
        """Return the sentences by heading."""
        return {section.heading: list(section.sentences) for section in self.sections}

    def to_json(self) -> dict[str, Any]:
        """Return all of it for machines."""
        report, drawn = self.privacy, self.privacy.population
        return {
            "folder": self.folder,
            "finished": self.finished,
            "seeded": report.seeded,
            "private": not report.seeded,
            "relation": report.relation,
            "epsilon": report.epsilon,
            "epsilon_budget": report.epsilon_budget,
            "delta": report.delta,
            **({} if self.mu is None else {"mu": self.mu}),
            **({} if drawn is None else {"population": {"ledger": drawn[0], "run": drawn[1]}}),
            "summary": self.summary,
            "share_spent": self.share_spent,
            "accountant": report.accountant,
            "events": self.events,
            **self.facts,
            "words": self.words,
        }


@dataclass(frozen=True)
class Unit:
    """Words for whom the promise is made to."""

    level: str
    meant: str
    makes: str
    differ: str
    rows: str


USERS = Unit(
    "users",
    "The unit is a user: all the rows of one user together, not one row at a time.",
    "Whatever one user's rows are, they make",
    "in the rows, any or all, of one user",
    "the users' rows",
)


def make_privacy_sections(
    report: PrivacyReport, folder: str, covered: str, unit: Unit = USERS, more: Sequence[str] = ()
) -> tuple[Section, ...]:
    """Return what is protected, against whom, under which relation, by which accountant and which noise.

    Args:
        report: of the ledger.
        folder: of the model, which may say that it was learned over nodes.
        covered: the sentence about all that the promise covers.
        unit: whom it is made to.
        more: sentences to add about what is protected.
    """
    spent = f"({report.epsilon:.4g}, {report.delta:g})-differential privacy at the level of {unit.level}"
    protected = (
        *([_WOULD_BE] if report.seeded else []),
        f"{spent}{'' if report.delta else ', pure'}, of a budget of epsilon {report.epsilon_budget:g}.",
        unit.meant,
        describe_meaning(report, unit),
        covered,
        *more,
    )
    whom = (
        f"Anyone who sees the public part, whatever else they know and can compute: even all the other {unit.level} "
        "together.",
        _describe_adversaries(Path(folder) / "federation.json", unit),
    )
    releases = f"{count_releases(report):,} releases so far."
    return (
        Section("What is protected", protected),
        Section("Against whom", whom),
        Section(f"Relation: {report.relation}", (describe_neighbours(report.relation, unit),)),
        Section("Accountant", (f"{report.accountant}.", releases if report.events else "No release yet.")),
        Section("Noise", (SEEDED if report.seeded else _SECRET,)),
    )


def describe_meaning(report: PrivacyReport, unit: Unit = USERS) -> str:
    """Return what epsilon and delta mean to one person."""
    if not report.events:
        return "Nothing was released yet, so nothing was learned about anyone."
    chance = f", but for a chance of about {report.delta:g}" if report.delta else ""
    if report.epsilon >= LARGEST_EPSILON:
        times = f"e^{math.ceil(report.epsilon):,} times as likely{chance}"
        return f"{unit.makes} any outcome at most {times}. No limit of that size protects anybody."
    factor, weak = math.exp(report.epsilon), " That is a weak promise." if report.epsilon > 10 else ""
    return f"{unit.makes} any outcome at most {factor:.3g} times as likely{chance}.{weak}"


def describe_neighbours(relation: Relation, unit: Unit = USERS) -> str:
    """Return which change of the population the promise speaks of."""
    if relation == "replace-one-user":
        return (
            f"Two populations count as neighbours if they differ {unit.differ}. The number of {unit.level} is taken as "
            "public."
        )
    return (
        "Two populations count as neighbours if one has one user more than the other. So whether a person took part at "
        "all is protected, and so is the exact number of users."
    )


def describe_unprotected(report: PrivacyReport, declared: Sequence[str] = ()) -> Section:
    """Return what the promise does not cover.

    Args:
        report: of the ledger.
        declared: sentences about public facts that the fit was given.
    """
    known = "Membership and the number of users: that someone is among the users is taken as known."
    return Section(
        "What is not protected",
        (
            "The heads in private/: each is made of one user's own rows. Keep them with their users. A head that is "
            "published tells of its own user without any protection; of the other users it tells no more than the "
            "public part does.",
            *([known] if report.relation == "replace-one-user" else []),
            "What is true of the whole population: that is what is learned, and it may tell something about a person "
            "who took no part.",
            "Metrics computed on users' data (an error, a score, the choice between two fits): looking at them is "
            "free, publishing them is not covered.",
            "Side channels: running time, file sizes, memory and logs of the machine that ran the fit.",
            describe_other_fits(report),
            *declared,
        ),
    )


def say_classes(classes: Categories) -> str:
    """Return how many classes there are and the first of them."""
    return f"{len(classes):,} ({', '.join(map(str, classes[:8]))}{', ...' if len(classes) > 8 else ''})"


def _describe_adversaries(federation: Path, unit: Unit) -> str:
    """Return against whom the promise does not protect, which depends on where the model was learned."""
    if not federation.is_file():
        return f"Not against whoever runs the fit: that machine reads {unit.rows}."
    damaged = f"{federation.parent} is damaged ({federation.name}"
    with refusing(lambda why: f"{damaged}: {why}); restore it from a copy.", (PermissionError,)):
        facts = read_json(federation)
        nodes, view = int(facts["noise_nodes"]), float(facts["server_epsilon"] or 0)
    if not view:
        return (
            "Learned over nodes, which keep the rows. Not against the server, which sees exact sums of each node, nor "
            "against whoever runs a user's own node."
        )
    return (
        f"Learned over nodes, which keep the rows and add the noise. The server learns at most epsilon {view:.3g} of a "
        f"user; what is said above needs {nodes} or more nodes that do add it, and is not true of whoever runs nodes "
        "and knows their part of the noise: against them it is the noise of the others that protects. Not against "
        "whoever runs a user's own node."
    )


def describe_other_fits(report: PrivacyReport) -> str:
    """Return the sentence about other fits on the same users."""
    if report.population is None:
        return "Other fits on the same users: their budgets add up, and this ledger does not know of them."
    return (
        f"Other fits on the same users, beyond the sum that population ledger {report.population[0]} keeps. This one "
        f"draws from it as run {report.population[1]}."
    )
