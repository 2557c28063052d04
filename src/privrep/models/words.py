"""What a ledger means, in words for people who have not read the papers. Reads a folder and changes nothing in it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from privrep.data.categories import Categories
from privrep.errors import InputError
from privrep.local.representation import Representation
from privrep.models import model as models
from privrep.models.spending import Spent, releases, share_spent
from privrep.privacy.accounting import Selection, event_to_json, total_mu
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

OTHER_LABELS = "Other labels are ignored; the features of those rows still count for scales and users' means."


@dataclass(frozen=True)
class Inspection:
    """What a folder says about itself. Holds nothing but public facts, except for `users`."""

    folder: str
    finished: bool
    config: models.Config
    columns: models.Columns
    privacy: PrivacyReport
    representation: Representation | None  # None: the run is not finished
    users: int | None  # users with heads in private/; None where there are none

    @property
    def releases(self) -> list[Spent]:
        return releases(self.privacy)

    @property
    def selections(self) -> int:
        """How many lists of values of features were selected privately."""
        events = [event for name, event in self.privacy.events if not name.startswith(f"{models.CLASSES_PAGE}/")]
        return sum(isinstance(event, Selection) for event in events)


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
        config, columns = models.Config.from_json(data["config"]), models.Columns.from_json(data["columns"])
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
        f"{spent}{'' if report.delta else ', pure'}, of a budget of epsilon {report.epsilon_budget:g}.",
        "The unit is a user: all the rows of one user together, not one row at a time.",
        meaning(report),
        "It covers all that this folder holds outside private/: the representation, the feature scales, lists of "
        "values that were selected, the ledger and every page of the billboard, taken together.",
    ]
    if report.seeded:
        protected = ["Nothing, because the noise was seeded. With secret noise it would be this:", *protected]
    whom = [
        "Anyone who sees the public part, whatever else they know and can compute: even all the other users together.",
        _who_learns(Path(found.folder) / "federation.json"),
    ]
    accountant = [
        f"{report.accountant}.",
        f"{sum(event.count for _, event in report.events):,} releases so far." if report.events else "No release yet.",
    ]
    noise = "Drawn from the operating system's cryptographic generator, exact on a grid."
    return [
        ("What is protected", protected),
        ("Against whom", whom),
        (f"Relation: {report.relation}", [RELATION[report.relation]]),
        ("Accountant", accountant),
        ("Noise", [SEEDED if report.seeded else noise]),
        ("What is not protected", not_protected(found)),
        ("The method", about_method(found)),
        *([("The classes", about_classes(found))] if found.config.loss is not None else []),
        ("The representation", about_representation(found)),
    ]


def _who_learns(federation: Path) -> str:
    """Against whom it does not protect: that depends on where it was learned."""
    if not federation.is_file():
        return "Not against whoever runs the fit: that machine reads the users' rows."
    try:
        facts = json.loads(federation.read_text())
        nodes, view = int(facts["noise_nodes"]), float(facts["server_epsilon"] or 0)
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(
            f"{federation.parent} is damaged (federation.json: {error}); restore it from a copy."
        ) from None
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


def meaning(report: PrivacyReport) -> str:
    """What epsilon and delta mean to one person."""
    if not report.events:
        return "Nothing was released yet, so nothing was learned about anyone."
    factor = math.exp(report.epsilon) if report.epsilon < 500 else math.inf
    weak = " That is a weak promise." if report.epsilon > 10 else ""
    chance = f", but for a chance of about {report.delta:g}" if report.delta else ""
    return f"Whatever one user's rows are, they make any outcome at most {factor:.3g} times as likely{chance}.{weak}"


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
    if found.config.covariance is not None:
        items.append("The declared covariance: it was taken as a public fact, not computed from the users.")
    if declared := _declared_lists(found):
        items.append(f"The declared {declared}: taken as public facts, not computed from the users.")
    return items


def _declared_lists(found: Inspection) -> str:
    """In words, those lists of values that were not selected privately; empty if there are none."""
    names = found.columns.categorical
    if not found.finished:
        names = tuple(name for name, listed in found.columns.by_category.items() if listed)
    elif found.selections:  # which of several were selected is on the billboard
        count = len(names) - found.selections
        return "" if not count else "list of values" if count == 1 else "lists of values"
    if not names:
        return ""
    if found.config.ratings:
        return "list of items"
    return f"{'list' if len(names) == 1 else 'lists'} of values of {', '.join(names)}"


def about_method(found: Inspection) -> list[str]:
    """What was fitted, to which columns."""
    c, columns = found.config, found.columns
    lines = [c.learner.title]
    if c.configuration == "paper":
        lines.append("In the configuration of its paper, with its constants: for comparison.")
    if c.start is not None:
        lines.append(f"Start: {c.start}, as asked for.")
    if len(columns.targets) > 1:
        lines.append(f"A head for each of the targets {', '.join(columns.targets)}, on one representation for all.")
    return [*lines, *_about_lists(found)]


def _about_lists(found: Inspection) -> list[str]:
    columns = found.columns
    if not columns.categorical:
        return []
    lists = columns.by_category.items()
    sizes = [f"{name} ({len(listed):,})" if listed else f"{name} (not declared)" for name, listed in lists]
    if not found.finished:
        how = "those that are not declared are selected privately"
    elif not found.selections:
        how = "they were declared"
    elif found.selections == len(columns.categorical):
        how = "selected privately, from those that enough users hold"
    else:
        how = "some declared, the others selected privately, from values that enough users hold"
    other = "An item that is not listed" if found.config.ratings else "A value that is not listed"
    effect = "is predicted with the user's mean." if found.config.ratings else "has no feature."
    return [f"Lists of values are public: {', '.join(sizes)}; {how}. {other} {effect}"]


def about_classes(found: Inspection) -> list[str]:
    """Which there are, and how that was found."""
    classes, c = found.columns.classes, found.config
    selected = any(name.startswith(f"{models.CLASSES_PAGE}/") for name, _ in found.privacy.events)
    if not classes:
        return ["Not declared: they are selected privately, from the labels that enough users have."]
    how = (
        "Selected privately, from the labels that enough users have: which others occur stays private."
        if selected and found.finished
        else "Declared (a column of booleans declares False and True): taken as a public fact, not computed from the "
        "users, and so not protected."
    )
    shape = (
        "Outputs: one, whose sign decides."
        if len(classes) == 2
        else "Outputs: one for each class; the largest decides."
    )
    return [f"{in_words(classes)}.", how, f"Loss: {c.loss}. {shape} {OTHER_LABELS}"]


def in_words(classes: Categories) -> str:
    """How many there are and the first of them."""
    return f"{len(classes):,} ({', '.join(map(str, classes[:8]))}{', ...' if len(classes) > 8 else ''})"


def about_representation(found: Inspection) -> list[str]:
    if found.representation is None:
        return [
            "Not there yet: the run was not finished. Repeat the same `privrep fit` command to continue it; what was "
            "spent is not spent again."
        ]
    learned = found.representation
    d, k = learned.basis.shape
    asked = found.config.rank
    chosen = (
        found.config.learner.automatic_rank
        if asked is None
        else "as asked for"
        if asked == k
        else f"of {asked} at most"
    )
    heads = "no heads here" if found.users is None else f"heads of {found.users:,} users in private/"
    if found.users is not None and found.privacy.relation != "replace-one-user":
        heads += " (not private: for your eyes)"
    return [
        f"Rank {k} ({chosen}), {d:,} {'items' if found.config.ratings else 'features'}, {heads}.",
        *_about_frame(found, learned),
        f"Estimated error: mean squared sine {learned.mean_error:.2g} (0 is exact, 1 is nothing learned), from the "
        f"noise of the releases alone. {_judgement(learned)}",
    ]


def _about_frame(found: Inspection, learned: Representation) -> list[str]:
    """The coordinates in which features were seen."""
    c, frame = found.config, learned.frame
    if c.ratings:
        return ["Offsets and factors are in units of a user's own spread of ratings; no range of ratings was assumed."]
    if c.configuration == "paper":
        return ["Features as they come: the paper's method looks for neither scales nor correlations."]
    declared = c.scale is not None or c.covariance is not None
    origin = "declared as public" if declared else "found by a charged release"
    lines = [f"Feature scales from {frame.scale.min():.4g} to {frame.scale.max():.4g}, {origin}."]
    if frame.whitening is not None:
        origin = "the declared covariance" if declared else "a charged release of their second moments"
        lines.append(
            f"Correlations of the features were taken out (whitening) by {origin}, so that noise of one size does the "
            "same harm in every direction."
        )
    elif any(name == "covariance/covariance" for name, _ in found.privacy.events):
        lines.append("Correlations of the features were looked for; what was seen of them is small or within noise.")
    elif any(name == "frequencies/frequencies" for name, _ in found.privacy.events):
        lines.append("Scales allow for how often a feature occurs, so that rare ones count as much as common ones.")
    if frame.target_scale is not None:
        lines.append("Targets were brought to a common size, found by the same release as the feature scales.")
    return lines


def _judgement(learned: Representation) -> str:
    if learned.mostly_noise:
        alone = "what they can do alone" if learned.ratings is None else "their means and the items' offsets"
        return f"It is mostly noise: users fall back on {alone}. It takes more users or a larger epsilon."
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
        "share_spent": share_spent(report),
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
            "mean_squared_sine": learned.mean_error,
        },
        "users_with_heads": found.users,
        "words": dict(sections(found)),
    }
