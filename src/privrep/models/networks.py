"""Folders of networks (`Centaur`), and what they say about themselves."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from privrep.errors import InputError
from privrep.heads.store import has_heads
from privrep.models.folder import BILLBOARD, MODEL, RUN, Described, ModelFolder, ModelKind
from privrep.models.sections import (
    COVERED,
    NOT_THERE_YET,
    Inspection,
    Section,
    describe_unprotected,
    make_privacy_sections,
    say_classes,
)
from privrep.models.spending import find_share, list_releases_with_samples
from privrep.neural.plan import count_deciding_rounds
from privrep.privacy.events import Batched, Sampled
from privrep.privacy.ledger import Budget
from privrep.privacy.report import PrivacyReport

FORMAT = "privrep-neural/1"
PAGE = "network"  # of the billboard, on which the shared part is
PERSONAL = "personal"  # in model.json: the folder is of one user, whose head alone is in private/
_PARTS = {"config": dict, "plan": dict, "user_count": int, "feature_count": int}
_PURPOSE = {
    "centre": "mean of the public features",
    "spread": "sizes of the public features",
    "moment": "directions in which rows vary",
    "look": "whether a class means the same to all",
    "alone": "how many do better without what is shared",
    "scatter": "directions in which classes differ",
    "round": "step on the shared part",
    "short": "next clipping norm",
    "heads": "how heads weigh the shared part",
}

_SHARED = {
    "nothing": "nothing: users have the public features alone",
    "linear": "a linear layer on public features",
    "directions": "directions in which classes differ",
    "both": "a linear layer on public features, and directions in which classes differ",
    "adapters": "adapters on a pretrained network",
    "all": "a whole network",
}


def _check(described: Any, path: Path) -> None:
    """Raise InputError for another format, and ValueError or LookupError where a part is missing."""
    if described["format"] != FORMAT:
        raise InputError(f"{path} is not a neural model that this version of privrep can read ({FORMAT}).")
    for part, kind in _PARTS.items():
        if not isinstance(described[part], kind):
            raise ValueError(f"{part} is no {kind.__name__}")
    for key in ("epsilon", "delta", "seed", "classes"):
        described["config"][key]
    described["plan"]["words"]


NETWORK = ModelKind(FORMAT, _check, "settings, weights or users")


def is_network(path: Path) -> bool:
    """Return whether a folder holds a network, or a run of one that was not finished."""
    return ModelFolder(path).format.startswith("privrep-neural/")


def is_personal(folder: ModelFolder) -> bool:
    """Return whether a folder holds the network of one user; False if it is no model, or a damaged one."""
    with suppress(InputError):
        return folder.finished and PERSONAL in folder.read_json(MODEL, NETWORK)
    return False


def inspect_network(folder: ModelFolder) -> Inspection:
    """Return what a folder that names the format of networks says about itself."""
    described = folder.read_json(MODEL if folder.finished else RUN, NETWORK)
    config = described["config"]
    ledger = folder.read_ledger_so_far(Budget(config["epsilon"], config["delta"]), seeded=config["seed"] is not None)
    report, share = ledger.report(), find_share(ledger)
    plan, usual = described["plan"], config.get("settings") is None  # rounds that were asked for decide nothing
    deciding = count_deciding_rounds(int(plan.get("rounds", 1)), usual and plan.get("otherwise") is not None)
    releases = list_releases_with_samples(report, share, partial(_find_purpose, deciding=deciding))
    facts = _Facts(folder, described, report, _read_shared(folder) if folder.finished else None)
    return Inspection(
        str(folder.path),
        folder.finished,
        report,
        share,
        releases,
        facts.sections(),
        [asdict(spent) for spent in releases],
        {part: described[part] for part in _PARTS},
        shared=facts.describe_shared(),
        sizes=f"{described['user_count']:,} users; rows of {described['feature_count']:,} numbers",
    )


@dataclass(frozen=True)
class _Facts:
    """Facts of a folder of networks, finished or not."""

    folder: ModelFolder
    described: Described
    report: PrivacyReport
    shared: str | None  # name of the shared part; None: the run is not finished

    def sections(self) -> tuple[Section, ...]:
        """Return everything that the folder says about itself."""
        return (
            *make_privacy_sections(self.report, str(self.folder.path), COVERED),
            describe_unprotected(self.report),
            Section("The method", tuple(self._method())),
            Section("The classes", (self._classes(),)),
            Section("The model", tuple(self._model())),
        )

    def describe_shared(self) -> str:
        """Return what was learned for all, in a few words; the empty string where the run is not finished."""
        if self.shared is None:
            return ""
        return _SHARED.get(self.shared, self.shared)

    def _method(self) -> list[str]:
        """Return sentences about how the network was learned."""
        plan = self.described["plan"]
        other = plan.get("otherwise")
        if other is not None and self.shared == other["share"]:
            plan = other
        lines = ["CENTAUR: a part that all share, learned privately, and a head of everyone's own.", plan["words"]]
        if other is not None and self.shared is None:
            lines.append(f"Or, if a class turns out not to mean the same to everybody: {other['words']}")
        rates = {event.rate for _, event in self.report.events if isinstance(event, Sampled | Batched)}
        if rates:
            lines.append(f"Each round asks a secret sample of the users, each with probability {min(rates):g}.")
        return lines

    def _classes(self) -> str:
        """Return a sentence that names the classes."""
        classes = self.described["config"]["classes"]
        listed = say_classes(tuple(classes)) if isinstance(classes, list) else f"{classes:,}"
        return f"{listed}. Declared: taken as a public fact, not computed from the users, and so not protected."

    def _model(self) -> list[str]:
        """Return sentences about what the folder holds and how to use it."""
        if not self.folder.finished:
            return [NOT_THERE_YET]
        there, users = has_heads(self.folder.path), self.described["user_count"]
        heads = f"heads of {users:,} users in private/" if there else "no heads here"
        if PERSONAL in self.described:
            heads = "the head of one user in private/" if there else "no head here"
            load = f"privrep predict, or privrep.PersonalNetwork.load({str(self.folder.path)!r})"
            return [f"Rows of {self.described['feature_count']:,} numbers; {heads}.", f"To predict: {load}."]
        load = f"privrep predict and privrep personalize, or privrep.Centaur.load({str(self.folder.path)!r})"
        return [
            f"Rows of {self.described['feature_count']:,} numbers; {heads}.",
            f"To predict and for new users: {load}.",
        ]


def _read_shared(folder: ModelFolder) -> str:
    """Return what the plan came to: the name of the part that is shared."""
    billboard = folder.read_billboard()
    with folder.damage(BILLBOARD):
        return str(billboard[PAGE].facts["derived"]["share"])


def _find_purpose(name: str, deciding: int) -> str:
    """Return what a release is for; the empty string where nothing is known.

    Args:
        name: of the release: page/statistic.
        deciding: rounds, the first ones, that also tell whether a class means the same to all.
    """
    page, _, statistic = name.partition("/")
    kind, _, number = page.partition("-")
    if kind == "round" and statistic == "update" and number.isdecimal() and int(number) <= deciding:
        return f"{_PURPOSE[kind]}, and {_PURPOSE['look']}"
    return _PURPOSE.get(statistic) or _PURPOSE.get(page.split("-")[0], "")
