"""`privrep demo`: a population made up on the spot, a private fit of it, and what it is compared with.

The truth is known here.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from privrep.cli.console import console, progress, right, say
from privrep.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from privrep.data.synthetic import Population

NOTE = "Errors use the truth of a made-up population: with real users they would not be known, nor free to publish."
FEATURES = tuple(f"x{j}" for j in range(50))
MADE = {"model", "picture.png", "new-rows.csv"}


def demo(
    out: Annotated[Path, typer.Option(help="Folder to write model, picture and some rows to.")] = Path("demo"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier demo there.")] = False,
) -> None:
    """Train privately on a made-up population of 20,000 users and compare. Takes seconds."""
    _check_out(out, overwrite)
    from privrep.models.learning import PAGES

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        new = Path(scratch) / "demo"
        new.mkdir()
        with progress(new / "model") as bar:
            bar.begin("reading", PAGES)
            rows = run_demo(new, on_page=bar.page)
        if out.exists():
            shutil.rmtree(out)
        os.replace(new, out)
    console().print(_table(rows))
    say(NOTE)
    say("Label noise alone gives an error of 0.0001. Epsilon 0: nothing about one user reaches another.")
    say(f"Model: {out / 'model'}   picture: {out / 'picture.png'}")
    say(f"Next: privrep inspect {out / 'model'}")
    say(f"      privrep predict {out / 'model'} {out / 'new-rows.csv'} --out predictions.csv")


def _check_out(out: Path, overwrite: bool) -> None:
    if not out.exists():
        return
    held = {path.name for path in out.iterdir()} if out.is_dir() else {"a file"}
    if held and not overwrite:
        raise InputError(f"{out} exists already; choose another --out, or pass --overwrite.")
    if not held <= MADE:
        raise InputError(f"{out} holds more than a demo ({min(held - MADE)}); choose another --out.")


def _table(rows: list[Comparison]) -> Table:
    table = Table("method", "mean squared error", "epsilon", title="20,000 users, 50 features, rank 2, 10 rows each")
    right(table, 1, 2)
    for row in rows:
        epsilon = "no privacy" if row.epsilon is None else f"{row.epsilon:.3g}"
        table.add_row(row.method, f"{row.error:#.3g}", epsilon, style="bold" if row.private else "")
    return table


@dataclass(frozen=True)
class Comparison:
    """One method on the demo's population. `epsilon` is None where the method is not private at all."""

    method: str
    error: float
    epsilon: float | None
    private: bool = False


def run_demo(folder: Path, *, users: int = 20_000, on_page: Callable[[str], None] | None = None) -> list[Comparison]:
    """Fill an empty folder: model/, picture.png and some rows to try `predict` on. Returns the table to show."""
    import numpy as np

    from privrep.data.synthetic import make_population
    from privrep.heads.fitting import fit_heads
    from privrep.linear.references import alone, fedrep, pooled
    from privrep.models import model as models
    from privrep.models.description import Columns, Config
    from privrep.models.learning import learn
    from privrep.models.picture import draw_fit
    from privrep.users.memory import InMemoryUsers

    rng = np.random.default_rng(20_250)
    population = make_population(rng, users, len(FEATURES), 2, 10, 0.01)
    table = population.sample(rng)
    engine = InMemoryUsers(table)
    config = Config(rank=2, epsilon=1.0, delta=1e-6)
    columns = Columns("user", ("y",), FEATURES)
    fitted = learn(engine, config, folder=folder / "model", columns=columns, on_page=on_page)
    heads = fit_heads(table.blocks(), fitted.representation)
    fitted = models.with_heads(fitted, heads)
    models.finish(fitted, folder / "model")

    open_book = fedrep(engine, 2)
    open_heads = fit_heads(table.blocks(), open_book)
    shared = pooled(table)
    ones = np.ones((users, 1))
    rows = [
        Comparison(
            "private",
            population.population_mse(heads.weights(fitted.representation), heads.intercept),
            fitted.privacy.epsilon,
            private=True,
        ),
        Comparison("not private", population.population_mse(open_heads.weights(open_book), open_heads.intercept), None),
        Comparison("each user alone", population.population_mse(*alone(table)), 0.0),
        Comparison(
            "one model for all",
            population.population_mse(ones * shared.weights, ones[:, 0] * shared.intercept),
            None,
        ),
        Comparison("predict zero", population.null_mse, 0.0),
    ]
    draw_fit(folder / "picture.png", fitted.privacy, {row.method: row.error for row in rows}, note=NOTE)
    _write_rows(population, rng, folder / "new-rows.csv")
    return rows


def _write_rows(population: Population, rng: np.random.Generator, path: Path, users: int = 20) -> None:
    """Fresh rows of the first few users, as a file to try `privrep predict` on."""
    import numpy as np

    first = {name: getattr(population, name)[:users] for name in ("heads", "intercepts", "sizes", "feature_kinds")}
    few = replace(population, **first).sample(rng)
    ids = np.repeat(few.ids, few.sizes)
    with open(path, "w", encoding="utf-8") as file:
        file.write(",".join(("user", "y", *FEATURES)) + "\n")
        for user, y, x in zip(ids, few.y, few.X, strict=True):
            file.write(",".join([str(user), f"{y:.6g}", *(f"{value:.6g}" for value in x)]) + "\n")
