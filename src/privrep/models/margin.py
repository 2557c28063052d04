"""Folders of selections (`PrivateMarginSelector`), and what they say about themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from privrep.errors import InputError
from privrep.heads.store import has_heads
from privrep.models.folder import MODEL, RUN, Described, ModelFolder, ModelKind
from privrep.models.sections import (
    COVERED,
    NOT_THERE_YET,
    Inspection,
    Section,
    describe_unprotected,
    make_privacy_sections,
)
from privrep.models.spending import find_share_spent, list_releases
from privrep.privacy.ledger import Budget

FORMAT = "privrep-margin/1"
PAGE = "representation"  # of the billboard, on which the choice is
SETTINGS = "settings"  # the first page of the billboard: what was asked
_PARTS = {"config": dict, "feature_count": int, "features": list}
_CONFIG = ("rank", "epsilon", "delta", "relation", "margin", "radius", "norm", "projected", "candidates", "rounds")
_MORE = ("loss", "configuration", "classes", "seed")
_DECLARED = "The two classes, the margin, the radius and the norm: declared, taken as public facts."


def _check(described: Any, path: Path) -> None:
    if described["format"] != FORMAT:
        raise InputError(f"{path} is not a selection that this version of privrep can read ({FORMAT}).")
    for part, kind in _PARTS.items():
        if not isinstance(described[part], kind):
            raise ValueError(f"{part} is no {kind.__name__}")
    for key in (*_CONFIG, *_MORE):
        described["config"][key]
    if len(described["config"]["classes"]) != 2:
        raise ValueError("there are not two classes")


MARGIN = ModelKind(FORMAT, _check, "settings, columns or users")


def inspect_margin(folder: ModelFolder) -> Inspection:
    """Read a folder that names the format of selections."""
    described = folder.read_json(MODEL if folder.finished else RUN, MARGIN)
    config = described["config"]
    budget = Budget(config["epsilon"], config["delta"], config["relation"])
    report = folder.read_ledger_so_far(budget, seeded=config["seed"] is not None).report()
    spent = list_releases(report)
    return Inspection(
        str(folder.path),
        folder.finished,
        report,
        find_share_spent(report),
        spent,
        (
            *make_privacy_sections(report, str(folder.path), COVERED),
            describe_unprotected(report, [_DECLARED]),
            Section("The method", tuple(_describe_method(config))),
            Section("The model", tuple(_model(described, folder))),
        ),
        [{"name": each.name, "epsilon": each.epsilon, "share": each.share} for each in spent],
        {part: described[part] for part in _PARTS},
        shared=f"a choice of {config['rank']:,} directions" if folder.finished else "",
        sizes=_describe_sizes(described, folder),
    )


def _describe_method(config: Described) -> list[str]:
    """Return two sentences on how the representation was chosen, from what the folder describes."""
    first, second = config["classes"]
    return [
        f"The exponential mechanism over representations: {config['rounds']:,} rounds, each of "
        f"{config['candidates']:,} candidates, which users judge by their {config['loss']} loss.",
        f"Two classes, {first} and {second}; {config['rank']:,} shared directions.",
    ]


def _describe_sizes(described: Described, folder: ModelFolder) -> str:
    heads = "heads of users in private/" if has_heads(folder.path) else "no heads here"
    return f"{described['feature_count']:,} features; {heads}"


def _model(described: Described, folder: ModelFolder) -> list[str]:
    """Return what is in the folder."""
    if not folder.finished:
        return [NOT_THERE_YET]
    return [
        f"{_describe_sizes(described, folder)}.",
        f"To predict and for new users: privrep.PrivateMarginSelector.load({str(folder.path)!r}).",
    ]
