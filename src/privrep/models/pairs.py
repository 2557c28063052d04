"""Folders of models of pairs (`DPClip`), and what they say about themselves."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from privrep.errors import InputError
from privrep.models.folder import MODEL, RUN, Described, ModelFolder, ModelKind
from privrep.models.sections import (
    NOT_THERE_YET,
    USERS,
    Inspection,
    Section,
    Unit,
    describe_other_fits,
    make_privacy_sections,
)
from privrep.models.spending import find_share, list_releases_with_samples
from privrep.privacy.events import Batched, Sampled
from privrep.privacy.ledger import Budget
from privrep.privacy.report import PrivacyReport

FORMAT = "privrep-clip/1"
MOST_NUMBERS = 1 << 24  # of a row: memory is made for them before anything else is read
_PARTS = {"config": dict, "modules": dict, "bank": dict, "user_count": int, "image_numbers": int, "text_numbers": int}
_MECHANISM = {
    "bank": "every image is told apart from the public captions of a bank; each user's gradient is clipped alone",
    "batch": "pairs of a batch are told apart from each other; the gradient of the batch is clipped as one, so that a "
    "user moves it by up to twice the clip, and the noise multiplier is relative to that",
    "inside": "pairs of a batch are told apart from each other; the gradient of every similarity is clipped by itself",
}
_PURPOSE = {
    "centre": "mean of the images' features",
    "moment": "second moment of the images' features",
    "steps": "steps on the encoders",
}
_COVERED = "It covers all that this folder holds outside private/: the trained weights, the ledger and every page."
_PAIRS = Unit(
    "pairs",
    "The unit is a pair of an image and a text: a person with several pairs is protected less, each pair by itself.",
    "Whatever one pair is, it makes",
    "in one pair",
    "the pairs",
)
_NOT_PROTECTED = (
    "Membership and the number of users: that someone is among the users is taken as known.",
    "The bank of captions, class names and prompts: taken as public facts.",
    "The encoders' weights at the start, and all that is frozen: taken as public; of those a hash is kept.",
    "Cached features of images and captions: as private as the images, and kept elsewhere.",
    "What is true of the whole population: that is what is learned.",
    "Metrics computed on users' data (an accuracy, a recall, the choice between two fits): publishing them is not "
    "covered.",
    "Side channels: running time, memory and logs of the machine that ran the fit.",
)


def _check(described: Any, path: Path) -> None:
    """Raise InputError for another format, and ValueError or LookupError where a part is missing."""
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        raise InputError(f"{path} is no DP-CLIP model that this version of privrep can read ({FORMAT}).")
    for part, kind in _PARTS.items():
        if not isinstance(described[part], kind):
            raise ValueError(f"{part} is no {kind.__name__}")
    for numbers in (described["image_numbers"], described["text_numbers"], described["bank"]["numbers"]):
        if not 0 <= numbers <= MOST_NUMBERS:
            raise ValueError("its rows have more numbers than any")
    if described["unit"] not in ("user", "pair"):
        raise ValueError("unit is none that is known")
    for key in ("epsilon", "delta", "seed", "mechanism", "settings", "pairs_per_user"):
        described["config"][key]
    for side in ("image", "text"):
        described["modules"][side]["class"]


PAIRS = ModelKind(FORMAT, _check, "settings, weights, texts or users")


def inspect_pairs(folder: ModelFolder) -> Inspection:
    """Return what a folder that names the format of pairs says about itself."""
    described = folder.read_json(MODEL if folder.finished else RUN, PAIRS)
    config = described["config"]
    ledger = folder.read_ledger_so_far(Budget(config["epsilon"], config["delta"]), seeded=config["seed"] is not None)
    report, share = replace(ledger.report(), unit=described["unit"]), find_share(ledger)
    releases = list_releases_with_samples(report, share, _find_purpose)
    return Inspection(
        str(folder.path),
        folder.finished,
        report,
        share,
        releases,
        (
            *_describe_promise(described, report, str(folder.path)),
            Section("What is not protected", (*_NOT_PROTECTED, describe_other_fits(report))),
            Section("The method", tuple(_describe_method(described, report))),
            Section("The model", tuple(_describe_model(described, folder))),
        ),
        [asdict(spent) for spent in releases],
        {part: described[part] for part in _PARTS},
        shared="weights of two encoders" if folder.finished else "",
        sizes=f"{described['user_count']:,} users; images of {described['image_numbers']:,} numbers",
    )


def _describe_promise(described: Described, report: PrivacyReport, folder: str) -> tuple[Section, ...]:
    """Return the sections about privacy, for the unit that the model protects."""
    if described["unit"] == "pair":
        return make_privacy_sections(report, folder, _COVERED, _PAIRS)
    most = described["config"]["pairs_per_user"]
    part = f"Of each user the first {f'{most:,} pairs take' if most > 1 else 'pair takes'} part."
    return make_privacy_sections(report, folder, _COVERED, USERS, [part])


def _describe_method(described: Described, report: PrivacyReport) -> list[str]:
    """Return sentences about how the encoders were trained."""
    config, bank = described["config"], described["bank"]
    settings = config["settings"]
    lines = [
        f"DP-CLIP, {config['mechanism']}: {_MECHANISM[config['mechanism']]}.",
        f"{settings['steps']:,} steps, clipped to {settings['clip']:g}; a bank of {bank['texts']:,} texts.",
    ]
    sampled = [event for _, event in report.events if isinstance(event, Sampled | Batched)]
    if sampled:
        kind = "each user with probability" if settings["sampling"] == "poisson" else "always the part"
        lines.append(f"Each step asks a secret batch, {kind} {sampled[0].rate:.4g}.")
    else:
        lines.append("Each step asks everyone.")
    return lines


def _describe_model(described: Described, folder: ModelFolder) -> list[str]:
    """Return sentences about what the folder holds and how to use it."""
    if not folder.finished:
        return [NOT_THERE_YET]
    names = [described["modules"][side]["class"] for side in ("image", "text")]
    return [
        f"Trained weights of two modules, {names[0]} and {names[1]}, of {described['user_count']:,} users.",
        f"To use it: privrep.DPClip.load({str(folder.path)!r}, image_encoder, text_encoder), or, "
        "after privrep fit-clip, privrep.estimators.clip_assembly.load(CONFIG.toml).",
    ]


def _find_purpose(name: str) -> str:
    """Return what a release is for, by its name (page/statistic); the empty string where nothing is known."""
    return _PURPOSE.get(name.split("/")[0].split("-")[0], "")
