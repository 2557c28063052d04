"""What the folder of a neural model says about itself, read without PyTorch and without changing anything in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from privrep.errors import InputError
from privrep.models import model as models
from privrep.models import words
from privrep.models.spending import Spent, releases, whole_budget
from privrep.privacy.accounting import Batched, Sampled
from privrep.privacy.billboard import Billboard
from privrep.privacy.ledger import Budget, Ledger, PrivacyReport, read_ledger

FORMAT = "privrep-neural/1"
_PURPOSE = {
    "centre": "mean of the public features",
    "look": "whether a class means the same to all",
    "scatter": "directions in which classes differ",
    "round": "step on the shared part",
    "short": "next clipping norm",
    "heads": "how heads weigh the shared part",
}


@dataclass(frozen=True)
class Inspection:
    """Public facts of a folder: what was asked for, what was planned and what was spent."""

    folder: str
    finished: bool
    described: dict[str, Any]  # run.json or model.json
    ledger: Ledger
    heads: bool  # whether private/ holds heads
    shared: str | None  # what the plan came to; None: the run is not finished

    @property
    def privacy(self) -> PrivacyReport:
        return self.ledger.report()

    @property
    def share_spent(self) -> float:
        return share_of(self.ledger)

    @property
    def releases(self) -> list[Spent]:
        return shares(self.privacy, self.share_spent, _purpose)

    def sections(self) -> list[tuple[str, list[str]]]:
        """Headings and their sentences, as `models.words` has them for other models."""
        config = self.described["config"]
        like = models.Config(None, config["epsilon"], config["delta"], seed=config["seed"])
        common = words.sections(
            words.Inspection(self.folder, self.finished, like, models.Columns(), self.privacy, None, None)
        )
        kept = [part for part in common if part[0] not in ("The method", "The representation")]
        return [*kept, ("The method", self._method()), ("The classes", self._classes()), ("The model", self._model())]

    def _method(self) -> list[str]:
        plan = self.described["plan"]
        other = plan.get("otherwise")
        if other is not None and self.shared == other["share"]:
            plan = other
        lines = ["CENTAUR: a part that all share, learned privately, and a head of everyone's own.", plan["words"]]
        if other is not None and self.shared is None:
            lines.append(f"Or, if a class turns out not to mean the same to everybody: {other['words']}")
        rates = {event.rate for _, event in self.privacy.events if isinstance(event, Sampled | Batched)}
        if rates:
            lines.append(f"Each round asks a secret sample of the users, each with probability {min(rates):g}.")
        return lines

    def _classes(self) -> list[str]:
        classes = self.described["config"]["classes"]
        listed = words.in_words(tuple(classes)) if isinstance(classes, list) else f"{classes:,}"
        return [f"{listed}. Declared: taken as a public fact, not computed from the users, and so not protected."]

    def _model(self) -> list[str]:
        if not self.finished:
            return ["Not there yet: repeat the same fit to continue it; what was spent is not spent again."]
        heads = f"heads of {self.described['user_count']:,} users in private/" if self.heads else "no heads here"
        return [
            f"Rows of {self.described['feature_count']:,} numbers; {heads}.",
            f"To predict and for new users: privrep.Centaur.load({self.folder!r}), then predict or personalize.",
        ]

    def as_json(self) -> dict[str, Any]:
        """All of it for machines."""
        return for_machines(self, ("config", "plan", "user_count", "feature_count"))


class Inspected(Protocol):
    """What a folder of either kind says about itself."""

    @property
    def folder(self) -> str: ...
    @property
    def finished(self) -> bool: ...
    @property
    def described(self) -> dict[str, Any]: ...
    @property
    def privacy(self) -> PrivacyReport: ...
    @property
    def share_spent(self) -> float: ...
    @property
    def releases(self) -> list[Spent]: ...
    def sections(self) -> list[tuple[str, list[str]]]: ...


def for_machines(found: Inspected, parts: Iterable[str]) -> dict[str, Any]:
    """JSON of what was spent, of these parts of the description, and of the words."""
    report = found.privacy
    return {
        "folder": found.folder,
        "finished": found.finished,
        "seeded": report.seeded,
        "private": not report.seeded,
        "relation": report.relation,
        "epsilon": report.epsilon,
        "epsilon_budget": report.epsilon_budget,
        "delta": report.delta,
        "share_spent": found.share_spent,
        "accountant": report.accountant,
        "events": [asdict(spent) for spent in found.releases],
        **{key: found.described[key] for key in parts},
        "words": dict(found.sections()),
    }


def share_of(ledger: Ledger) -> float:
    """Of the budget: what no release to all users could spend any more."""
    return max(1 - ledger.remaining / whole_budget(ledger.report()), 0.0)


def shares(report: PrivacyReport, spent: float, purpose: Callable[[str], str]) -> list[Spent]:
    """Every release and its share; samples, which no mu measures, share what others have not spent, each step alike."""
    events = dict(report.events)
    samples = {name: event for name, event in events.items() if isinstance(event, Sampled | Batched)}
    plain = replace(report, events=tuple((name, event) for name, event in events.items() if name not in samples))
    known = {one.name: replace(one, purpose=purpose(one.name)) for one in releases(plain)}
    rest = spent - sum(one.share for one in known.values())
    steps = sum(event.count for event in samples.values())
    for name, event in samples.items():
        share = rest * event.count / steps
        known[name] = Spent(name, purpose(name), event.noise_multiplier, share, count=event.count)
    return [known[name] for name in events]


def is_neural(folder: Path) -> bool:
    """Whether a folder holds a neural model, or a run of one that was not finished."""
    for name in ("model.json", "run.json"):
        try:
            described = json.loads((folder / name).read_text())
            return isinstance(described, dict) and str(described.get("format", "")).startswith("privrep-neural/")
        except (OSError, ValueError):
            continue
    return False


def inspect_folder(folder: Path) -> Inspection:
    """Read a folder for which `is_neural` holds."""
    finished = (folder / "model.json").is_file()
    described = read_described(folder / ("model.json" if finished else "run.json"))
    config, path = described["config"], folder / "ledger.jsonl"
    begun = path.is_file() and path.stat().st_size > 0
    if finished or begun:
        ledger = read_ledger(path)
    else:
        ledger = Ledger(Budget(config["epsilon"], config["delta"]), seeded=config["seed"] is not None)
    heads = (folder / "private" / "heads.parquet").is_file()
    return Inspection(str(folder), finished, described, ledger, heads, _shared(folder) if finished else None)


def _shared(folder: Path) -> str:
    with models.damage_explained(folder, "billboard"):
        return str(Billboard.read(folder / "billboard")["network"].facts["derived"]["share"])


def read_described(path: Path) -> dict[str, Any]:
    """What model.json or run.json says, all of whose parts must be there."""
    try:
        described = json.loads(path.read_text())
        if described["format"] != FORMAT:
            raise InputError(f"{path} is not a neural model that this version of privrep can read ({FORMAT}).")
        for part, kind in (("config", dict), ("plan", dict), ("user_count", int), ("feature_count", int)):
            if not isinstance(described[part], kind):
                raise ValueError(f"{part} is no {kind.__name__}")
        for key in ("epsilon", "delta", "seed", "classes"):
            described["config"][key]
        described["plan"]["words"]
    except (ValueError, LookupError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error).partition("\n")[0]
        raise InputError(f"{path.parent} is damaged ({path.name}: {reason}); restore it from a copy.") from None
    return dict(described)


def _purpose(name: str) -> str:
    page, _, statistic = name.partition("/")
    return _PURPOSE.get(statistic) or _PURPOSE.get(page.split("-")[0], "")
