"""`privrep inspect`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.table import Table

from privrep.cli.shared import NOISE_MULTIPLIER, console, in_words, right, shout

if TYPE_CHECKING:
    from privrep.report.words import Inspection, Spent


def inspect(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A model folder, or that of an unfinished run.")],
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """What was spent and what it means: what is protected, against whom, and what is not."""
    from privrep.report import words

    found = words.inspect_folder(folder)
    labels = {"The classes": _about_classes(found)} if found.config.loss is not None else {}
    if as_json:
        told = words.as_json(found)
        print(json.dumps({**told, "words": {**told["words"], **labels}}, indent=2))
        return
    out = console()
    state = "a fitted model" if found.finished else "a run that was NOT FINISHED"
    out.print(f"{folder}: {state}", style="bold", soft_wrap=True)
    if found.privacy.seeded:
        shout(words.SEEDED)
    for heading, sentences in [*words.sections(found), *labels.items()]:
        out.print(f"\n{heading}", style="bold")
        for sentence in sentences:
            item = Table.grid(padding=(0, 1))
            item.add_row("-", sentence, style="bold red" if sentence == words.SEEDED else "")
            out.print(Padding(item, (0, 0, 0, 2)))
    out.print()
    out.print(_ledger(found.releases, words.share_spent(found.privacy)))
    out.print(NOISE_MULTIPLIER, style="dim")
    if any(spent.group for spent in found.releases):
        out.print(_GROUPS, style="dim")


def _about_classes(found: Inspection) -> list[str]:
    """Which there are, and how that was found."""
    from privrep.model import CLASSES_PAGE

    classes, c = found.columns.classes, found.config
    selected = any(name.startswith(f"{CLASSES_PAGE}/") for name, _ in found.privacy.events)
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
    return [f"{in_words(classes)}.", how, f"Loss: {c.loss}. {shape} A row with another label counts for nothing."]


_GROUPS = "Each user is in one group of a split and pays for that alone, so shares of different groups do not add up."


def _ledger(releases: list[Spent], share_spent: float) -> Table:
    remarks = any(spent.remark for spent in releases)
    headers = ["release", "what for", "noise\nmultiplier", "share of\nbudget", *([""] if remarks else [])]
    table = Table(*headers, title="The ledger", title_justify="left")
    right(table, 2, 3)
    for column in (0, *range(2, len(headers))):
        table.columns[column].no_wrap = True
    for spent in releases:
        noise = "" if spent.noise_multiplier is None else f"{spent.noise_multiplier:.4g}"
        row = [spent.name, spent.purpose, noise, f"{spent.share:.1%}", spent.remark]
        table.add_row(*row[: len(headers)])
    if share_spent < 1 - 5e-4:
        table.add_row("", "not spent", "", f"{1 - share_spent:.1%}")
    return table
