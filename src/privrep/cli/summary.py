"""What `privrep fit` says it did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from privrep.cli.console import say, shout
from privrep.linear.registry import DEFAULT

if TYPE_CHECKING:
    from privrep.heads.fitting import Heads
    from privrep.models.description import Columns
    from privrep.models.model import Model

_NOT_PRIVATE = "(not private: for your eyes)"


def summarise(fitted: Model, out: Path, asked: Columns) -> None:
    report = fitted.privacy
    assert fitted.heads is not None
    say(f"Model: {out}")
    say(
        f"Privacy: epsilon {report.epsilon:.4g} of {report.epsilon_budget:g} spent, delta {report.delta:g}, "
        f"{report.unit} level, {report.relation}"
    )
    for line in _contents(fitted, fitted.heads, asked):
        say(line)
    if fitted.representation.mostly_noise:
        what = "NO FACTORS WERE" if fitted.config.ratings else "NOTHING WAS"
        shout(f"{what} LEARNED: the representation is mostly noise. It takes more users or a larger epsilon.")
    if report.seeded:
        shout("SEEDED NOISE: this is a simulation and NOT PRIVATE. Do not publish it.")
    else:
        say(f"All of {out} but {out / 'private'} may be published; the heads in there belong to their users.")
    say(f"Predict with: privrep predict {out} TABLE --out FILE     What it means: privrep inspect {out}")


def _contents(fitted: Model, heads: Heads, asked: Columns) -> Iterator[str]:
    """What is in the model, a line each."""
    from privrep.models.sections import in_words

    c, (features, rank) = fitted.config, fitted.representation.basis.shape
    label = "" if c.relation == "replace-one-user" else f" {_NOT_PRIVATE}"  # else their number is no public fact
    if c.ratings:
        yield f"{len(heads.ids):,} users{label}, {features:,} items, rank {rank}"
    else:
        yield f"Users: {len(heads.ids):,}{label}; rank {rank} of {features:,} features"
    if (c.method, c.configuration) != (DEFAULT, "default"):
        yield f"Method: {c.method}{', as its paper has it' if c.configuration == 'paper' else ''}"
    if c.loss is not None:
        how = "selected privately" if fitted.classes_selected else "declared"
        yield f"Classes: {in_words(fitted.columns.classes)}, {how}; other labels are ignored"
    elif heads.targets > 1:
        yield f"Targets: {', '.join(fitted.columns.targets)}; a head for each"
    for name, listed in fitted.columns.by_category.items():
        how = "declared" if asked.by_category[name] else "selected privately"
        other = "other items are predicted with a user's mean" if c.ratings else "rows with others have no such feature"
        yield f"Values of {name}: {len(listed):,} named ({how}); {other}"
    if not c.ratings:
        yield _kinds(heads, c.loss is not None)


def _kinds(heads: Heads, labels: bool) -> str:
    """How many users use which kind of head. Computed on users' data: for the owner's eyes."""
    kinds = heads.kind[:: heads.targets] if labels else heads.kind  # a classifier's outputs are all of one kind
    counts = [int((kinds == kind).sum()) for kind in range(3)]
    own = "classifier" if labels else "regression"
    return (
        f"Heads: {counts[0]:,} on the shared representation, {counts[1]:,} a {own} of their own, {counts[2]:,} a "
        f"constant {_NOT_PRIVATE}"
    )
