"""`privrep audit`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from privrep.cli.console import note, right, show, tell
from privrep.cli.options import Relations, check_relation, flag, was_given, words
from privrep.errors import InputError

if TYPE_CHECKING:
    from privrep.audit.report import Audit
    from privrep.audit.two_worlds import FitFinding

KINDS = ("sums", "samples", "batches", "walks", "selections", "choices", "nodes", "one-node")


def audit(
    context: typer.Context,
    of: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A model: its budget, and its costliest release of each kind.")
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help=f"{', '.join(KINDS)}; all of them if left out. May be repeated.",
            autocompletion=words(*KINDS),
        ),
    ] = None,
    epsilon: Annotated[float, typer.Option(help="Promise to audit.")] = 1.0,
    delta: Annotated[float, typer.Option(help="Promise to audit, second part.")] = 1e-6,
    relation: Relations = "replace-one-user",
    canaries: Annotated[int, typer.Option(help="Made-up users of each kind of release.")] = 1 << 16,
    confidence: Annotated[float, typer.Option(help="Chance that no lower bound of an honest release is false.")] = 0.99,
    full: Annotated[bool, flag("--full", help="Audit a whole small fit, too: in two worlds, many times.")] = False,
    minutes: Annotated[float, typer.Option(help="With --full: how long it takes.")] = 10.0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON file for what was found.")] = None,
) -> None:
    """Measure what releases of made-up users reveal, against what their ledgers state.

    Ends with 1 if a release reveals more, or if noise that is too small on purpose is not caught.
    """
    from privrep.audit.report import Request, run_audit
    from privrep.privacy.ledger import Budget

    if of is not None and any(was_given(context, name) for name in ("epsilon", "delta", "relation")):
        raise InputError("--of takes epsilon, delta and relation from the model; leave them out.")
    if was_given(context, "minutes") and not full:
        raise InputError("--minutes goes with --full.")
    if out is not None and not out.parent.is_dir():
        raise InputError(f"{out.parent} is no folder. Make it, or choose another place for --out.")
    budget = Budget(epsilon, delta, check_relation(relation))
    request = Request(budget, kind or None, canaries, confidence, of, minutes if full else None)
    found = run_audit(request, lambda what: note(f"auditing {'a whole fit' if what == 'fit' else what} ..."))
    tell(**found.to_json())
    if out is not None:
        out.write_text(json.dumps(found.to_json(), indent=2) + "\n")
    _show(found)
    if not found.passed:
        raise typer.Exit(1)


def _show(found: Audit) -> None:
    """Print what was found of each kind."""
    table = Table(
        title=f"epsilon at delta {found.budget.delta:g}; "
        f"all bounds but the controls' hold with a chance of {found.confidence:g}"
    )
    for column in ("", "claimed", "at least", "by", "control", "at least", "caught", "time"):
        table.add_column(column, no_wrap=True)
    right(table, 1, 2, 5, 7)
    rows = [(each.kind, each) for each in found.findings] + ([] if found.fit is None else [("fit", found.fit)])
    for name, one in rows:
        table.add_row(
            name,
            f"{one.claimed:.4g}",
            f"{one.lower:.4g}",
            one.by,
            f"/ {one.control:g}",
            f"{one.control_lower:.4g}",
            "yes" if one.caught else "NO",
            f"{one.seconds:.0f} s",
            style="" if one.passed else "bold red",
        )
    show(table)
    for one in found.findings:
        if one.fault:
            show(f"{one.kind}: {one.fault}", style="bold red", wrap=True)
    if found.fit is not None:
        _show_pages(found.fit)
    for name, why in found.left_out.items():
        show(f"left out: {name}: {why}", wrap=True)
    verdict = "passed: no release was seen to reveal more than its ledger states, and every control was caught"
    if not found.passed:
        verdict = "FAILED: a release reveals more than its ledger states, or a control was not caught"
    show(verdict, style="bold" if found.passed else "bold red", wrap=True)


def _show_pages(fit: FitFinding) -> None:
    """Print what each page contributes."""
    show(
        f"the canary's two versions are {fit.share:.2f} of the mu² spent apart, in {fit.runs:,} fits; "
        f"{fit.tries:,} canaries were tried",
        wrap=True,
    )
    table = Table()
    for column in ("statistic", "moved, of what one user may", "part of the mu² spent"):
        table.add_column(column)
    right(table, 1, 2)
    for name, (moved, part) in fit.pages.items():
        table.add_row(name, f"{moved:.3f}", f"{part:.3f}")
    show(table)
