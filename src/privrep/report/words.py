"""What a ledger means, in words for people who have not read the papers. Reads a folder and changes nothing in it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from privrep import model as models
from privrep.algorithms.representation import Representation
from privrep.errors import InputError
from privrep.privacy.accounting import event_to_json, total_mu
from privrep.privacy.ledger import Budget, Ledger, PrivacyReport, read_report

SEEDED = (
    "THE NOISE WAS SEEDED: this is a simulation and NOT PRIVATE. Whoever knows the seed can subtract the noise. "
    "Do not publish anything of it that was computed from real users."
)

RELATION = {
    "replace-one-user": "Two populations count as neighbours if they differ in the rows, any or all, of one user. The "
    "number of users is taken as public.",
    "add-or-remove-one-user": "Two populations count as neighbours if one has one user more than the other. So whether "
    "a person took part at all is protected, and so is the exact number of users.",
}

_PURPOSE = {
    "scales": "feature scales",
    "moments": "starting point",
    "scout": "first clipping norm",
    "step": "step",
    "sizes": "next clipping norm",
    "paper-moments": "starting point",
    "gradient": "step",
}


@dataclass(frozen=True)
class Spent:
    """One release in the ledger and its part of the budget."""

    name: str
    purpose: str
    noise_multiplier: float
    share: float  # of the budget's mu^2


@dataclass(frozen=True)
class Inspection:
    """What a folder says about itself. Holds nothing but public facts, except for `users`."""

    folder: str
    finished: bool
    config: models.Config
    columns: models.Columns
    privacy: PrivacyReport
    representation: Representation | None  # None: the run is not finished
    users: int | None  # heads in private/; None where there are none

    @property
    def releases(self) -> list[Spent]:
        return releases(self.privacy)


def releases(report: PrivacyReport) -> list[Spent]:
    """Every release with its share of the budget, in the order they were charged."""
    total = Budget(report.epsilon_budget, report.delta, report.relation).mu ** 2
    return [
        Spent(name, purpose(name), event.noise_multiplier, event.noise_multiplier**-2 / total)
        for name, event in report.events
    ]


def purpose(name: str) -> str:
    """What a release is for, by its name in the ledger (page/statistic)."""
    page, _, statistic = name.partition("/")
    return _PURPOSE.get(page) or _PURPOSE.get(statistic, "")


def inspect_folder(folder: Path) -> Inspection:
    """Read a model folder or the folder of a run that was not finished."""
    if (folder / "model.json").is_file():
        fitted = models.load(folder)
        users = None if fitted.heads is None else len(fitted.heads.ids)
        return Inspection(
            str(folder), True, fitted.config, fitted.columns, fitted.privacy, fitted.representation, users
        )
    if not (folder / "run.json").is_file():
        missing = "is a file" if folder.exists() else "does not exist"
        what = "has no model.json and no run.json" if folder.is_dir() else missing
        raise InputError(f"{folder} is not a folder of privrep: it {what}.")
    try:
        data = json.loads((folder / "run.json").read_text())
        scale = data["config"].pop("scale")
        config = models.Config(**data["config"], scale=None if scale is None else tuple(scale))
        columns = models.Columns(**{**data["columns"], "features": tuple(data["columns"]["features"])})
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{folder} is damaged (run.json: {error}); restore it from a copy.") from None
    budget = Budget(config.epsilon, config.delta, config.relation)
    ledger = folder / "ledger.jsonl"
    begun = ledger.is_file() and ledger.stat().st_size > 0
    report = read_report(ledger) if begun else Ledger(budget, seeded=config.seed is not None).report()
    return Inspection(str(folder), False, config, columns, report, None, None)


def sections(found: Inspection) -> list[tuple[str, list[str]]]:
    """Headings and their sentences: what is protected, against whom, under which relation, and what is not."""
    report = found.privacy
    spent = f"({report.epsilon:.4g}, {report.delta:g})-differential privacy at the level of users"
    protected = [
        f"{spent}, of a budget of epsilon {report.epsilon_budget:g}.",
        "The unit is a user: all the rows of one user together, not one row at a time.",
        meaning(report),
        "It covers all that this folder holds outside private/: the representation, the feature scales, the ledger and "
        "every page of the billboard, taken together.",
    ]
    if report.seeded:
        protected = ["Nothing, because the noise was seeded. With secret noise it would be this:", *protected]
    whom = [
        "Anyone who sees the public part, whatever else they know and can compute: even all the other users together.",
        "Not against whoever runs the fit: that machine reads the users' rows.",
    ]
    accountant = [
        f"{report.accountant}.",
        f"{len(report.events)} releases so far." if report.events else "No release yet.",
    ]
    noise = "Drawn from the operating system's cryptographic generator, exact on a grid."
    return [
        ("What is protected", protected),
        ("Against whom", whom),
        (f"Relation: {report.relation}", [RELATION[report.relation]]),
        ("Accountant", accountant),
        ("Noise", [SEEDED if report.seeded else noise]),
        ("What is not protected", not_protected(found)),
        ("The representation", about_representation(found)),
    ]


def meaning(report: PrivacyReport) -> str:
    """What epsilon and delta mean to one person."""
    if not report.events:
        return "Nothing was released yet, so nothing was learned about anyone."
    factor = math.exp(report.epsilon) if report.epsilon < 500 else math.inf
    weak = " That is a weak promise." if report.epsilon > 10 else ""
    return (
        f"Whatever one user's rows are, they make any outcome at most {factor:.3g} times as likely, but for a chance "
        f"of about {report.delta:g}.{weak}"
    )


def not_protected(found: Inspection) -> list[str]:
    items = [
        "The heads in private/: each is made of one user's own rows. Keep them with their users. A head that is "
        "published tells of its own user without any protection; of the other users it tells no more than the public "
        "part does.",
        "What is true of the whole population: that is what is learned, and it may tell something about a person who "
        "took no part.",
        "Metrics computed on users' data (an error, a score, the choice between two fits): looking at them is free, "
        "publishing them is not covered.",
        "Side channels: running time, file sizes, memory and logs of the machine that ran the fit.",
        "Other fits on the same users: their budgets add up, and this ledger does not know of them.",
    ]
    if found.privacy.relation == "replace-one-user":
        items.insert(1, "Membership and the number of users: that someone is among the users is taken as known.")
    if found.config.scale is not None:
        items.append("The declared feature scales: they were taken as public facts, not computed from the users.")
    return items


def about_representation(found: Inspection) -> list[str]:
    if found.representation is None:
        return [
            "Not there yet: the run was not finished. Repeat the same `privrep fit` command to continue it; what was "
            "spent is not spent again."
        ]
    learned = found.representation
    d, k = learned.basis.shape
    mean = learned.mean_error
    low, high = learned.scale.min(), learned.scale.max()
    origin = "declared as public" if found.config.scale is not None else "found by a charged release"
    if found.config.method == "paper":
        origin = "which the paper's method does not look for"
    chosen = "read off a released spectrum" if found.config.rank is None else "as asked for"
    heads = "no heads here" if found.users is None else f"heads of {found.users:,} users in private/"
    if found.users is not None and found.privacy.relation != "replace-one-user":
        heads += " (not private: for your eyes)"
    return [
        f"Rank {k} ({chosen}), {d} features, {heads}.",
        f"Feature scales from {low:.4g} to {high:.4g}, {origin}.",
        f"Estimated error: mean squared sine {mean:.2g} (0 is exact, 1 is nothing learned), from the noise of the "
        f"releases alone. {_judgement(learned)}",
    ]


def _judgement(learned: Representation) -> str:
    if learned.mostly_noise:
        return "It is mostly noise: users fall back on their own regressions. It takes more users or a larger epsilon."
    if learned.mean_error < 0.03:
        return "The representation was found."
    return "It was found roughly: more users or a larger epsilon would help."


def as_json(found: Inspection) -> dict[str, Any]:
    """All of it for machines."""
    report, learned = found.privacy, found.representation
    return {
        "folder": found.folder,
        "finished": found.finished,
        "seeded": report.seeded,
        "private": not report.seeded,
        "relation": report.relation,
        "epsilon": report.epsilon,
        "epsilon_budget": report.epsilon_budget,
        "delta": report.delta,
        "mu": total_mu(event for _, event in report.events),
        "accountant": report.accountant,
        "events": [
            {"name": spent.name, **event_to_json(event), "share": spent.share}
            for spent, (_, event) in zip(releases(report), report.events, strict=True)
        ],
        "config": asdict(found.config),
        "columns": asdict(found.columns),
        "representation": None
        if learned is None
        else {
            "rank": learned.basis.shape[1],
            "features": learned.basis.shape[0],
            "scale": learned.scale.tolist(),
            "error": learned.error,
            "mean_squared_sine": learned.error / learned.basis.shape[1],
        },
        "users_with_heads": found.users,
        "words": dict(sections(found)),
    }
