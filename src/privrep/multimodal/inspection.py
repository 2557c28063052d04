"""What the folder of a DP-CLIP model says about itself, read without PyTorch and without changing anything in it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from privrep.errors import InputError
from privrep.models import model as models
from privrep.models import words
from privrep.models.spending import Spent
from privrep.neural.inspection import for_machines, share_of, shares
from privrep.privacy.accounting import Batched, Sampled
from privrep.privacy.ledger import Budget, Ledger, PrivacyReport, read_ledger

FORMAT = "privrep-clip/1"
_MECHANISM = {
    "bank": "every image is told apart from the public captions of a bank; each user's gradient is clipped alone",
    "batch": "pairs of a batch are told apart from each other; the gradient of the batch is clipped as one, so that a "
    "user moves it by up to twice the clip, and the noise multiplier is relative to that",
    "inside": "pairs of a batch are told apart from each other; the gradient of every similarity is clipped by itself",
}
_PURPOSE = {"centre": "mean of the images' features", "steps": "steps on the encoders"}
_COVERED = "It covers all that this folder holds outside private/: the trained weights, the ledger and every page."
_PAIR = "The unit is a pair of an image and a text: a person with several pairs is protected less, each pair by itself."
_NOT_PROTECTED = (
    "Membership and the number of users: that someone is among the users is taken as known.",
    "The bank of captions, class names and prompts: taken as public facts.",
    "The encoders' weights at the start, and all that is frozen: taken as public; of those a hash is kept.",
    "Cached features of images and captions: as private as the images, and kept elsewhere.",
    "What is true of the whole population: that is what is learned.",
    "Metrics computed on users' data (an accuracy, a recall, the choice between two fits): publishing them is not "
    "covered.",
    "Side channels: running time, memory and logs of the machine that ran the fit.",
    "Other fits on the same users: their budgets add up, and this ledger does not know of them.",
)


@dataclass(frozen=True)
class Inspection:
    """Public facts of a folder: what was asked for and what was spent."""

    folder: str
    finished: bool
    described: dict[str, Any]  # run.json or model.json
    ledger: Ledger

    @property
    def privacy(self) -> PrivacyReport:
        return replace(self.ledger.report(), unit=self.described["unit"])

    @property
    def share_spent(self) -> float:
        return share_of(self.ledger)

    @property
    def releases(self) -> list[Spent]:
        return shares(self.privacy, self.share_spent, lambda name: _PURPOSE.get(name.split("/")[0].split("-")[0], ""))

    def sections(self) -> list[tuple[str, list[str]]]:
        """Headings and their sentences, as `models.words` has them for other models."""
        config, report = self.described["config"], self.privacy
        like = models.Config(None, config["epsilon"], config["delta"], seed=config["seed"])
        common = words.sections(
            words.Inspection(self.folder, self.finished, like, models.Columns(), report, None, None)
        )
        protected = [_COVERED if line.startswith("It covers") else line for line in common[0][1]]
        if self.described["unit"] == "pair":
            protected = [_PAIR if line.startswith("The unit is") else _of_pairs(line) for line in protected]
            common = [(heading, [_of_pairs(line) for line in lines]) for heading, lines in common]
        else:
            most = config["pairs_per_user"]
            protected.append(f"Of each user the first {f'{most:,} pairs take' if most > 1 else 'pair takes'} part.")
        kept = [
            part for part in common[1:] if part[0] not in ("What is not protected", "The method", "The representation")
        ]
        return [
            (common[0][0], protected),
            *kept,
            ("What is not protected", list(_NOT_PROTECTED)),
            ("The method", self._method()),
            ("The model", self._model()),
        ]

    def _method(self) -> list[str]:
        config = self.described["config"]
        settings, bank = config["settings"], self.described["bank"]
        lines = [f"DP-CLIP, {config['mechanism']}: {_MECHANISM[config['mechanism']]}."]
        lines.append(
            f"{settings['steps']:,} steps, clipped to {settings['clip']:g}; a bank of {bank['texts']:,} texts."
        )
        sampled = [event for _, event in self.privacy.events if isinstance(event, Sampled | Batched)]
        if sampled:
            kind = "each user with probability" if settings["sampling"] == "poisson" else "always the part"
            lines.append(f"Each step asks a secret batch, {kind} {sampled[0].rate:.4g}.")
        else:
            lines.append("Each step asks everyone.")
        return lines

    def _model(self) -> list[str]:
        if not self.finished:
            return ["Not there yet: repeat the same fit to continue it; what was spent is not spent again."]
        names = [self.described["modules"][side]["class"] for side in ("image", "text")]
        return [
            f"Trained weights of two modules, {names[0]} and {names[1]}, of {self.described['user_count']:,} users.",
            f"To use it: privrep.estimators.clip.DPClip.load({self.folder!r}, image_encoder, text_encoder), or, "
            "after privrep fit-clip, privrep.estimators.clip_assembly.load(CONFIG.toml).",
        ]

    def as_json(self) -> dict[str, Any]:
        """All of it for machines."""
        return for_machines(self, PARTS)


PARTS = {"config": dict, "modules": dict, "bank": dict, "user_count": int, "image_numbers": int, "text_numbers": int}


def is_multimodal(folder: Path) -> bool:
    """Whether a folder holds a DP-CLIP model, or a run of one that was not finished."""
    for name in ("model.json", "run.json"):
        try:
            described = json.loads((folder / name).read_text())
            return isinstance(described, dict) and str(described.get("format", "")).startswith("privrep-clip/")
        except (OSError, ValueError):
            continue
    return False


def inspect_folder(folder: Path) -> Inspection:
    """Read a folder for which `is_multimodal` holds."""
    finished = (folder / "model.json").is_file()
    described = read_described(folder / ("model.json" if finished else "run.json"))
    config, path = described["config"], folder / "ledger.jsonl"
    if finished or (path.is_file() and path.stat().st_size > 0):
        with models.damage_explained(folder, "ledger.jsonl"):
            ledger = read_ledger(path)
    else:
        ledger = Ledger(Budget(config["epsilon"], config["delta"]), seeded=config["seed"] is not None)
    return Inspection(str(folder), finished, described, ledger)


def read_described(path: Path) -> dict[str, Any]:
    """What model.json or run.json says, all of whose parts must be there."""
    with models.damage_explained(path.parent, path.name):
        described = json.loads(path.read_text())
        if not isinstance(described, dict) or described.get("format") != FORMAT:
            raise InputError(f"{path} is no DP-CLIP model that this version of privrep can read ({FORMAT}).")
        for part, kind in PARTS.items():
            if not isinstance(described[part], kind):
                raise ValueError(f"{part} is no {kind.__name__}")
        for key in ("epsilon", "delta", "seed", "mechanism", "settings", "pairs_per_user"):
            described["config"][key]
        for side in ("image", "text"):
            described["modules"][side]["class"]
    return dict(described)


def _of_pairs(line: str) -> str:
    """The same sentence where every user is one pair."""
    said = {
        "at the level of users": "at the level of pairs",
        "Whatever one user's rows are, they make": "Whatever one pair is, it makes",
        "in the rows, any or all, of one user": "in one pair",
        "The number of users": "The number of pairs",
        "the users' rows": "the pairs",
        "all the other users together": "all the other pairs together",
    }
    for users, pairs in said.items():
        line = line.replace(users, pairs)
    return line
