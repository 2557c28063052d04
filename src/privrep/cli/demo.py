"""`privrep demo`: two populations made up on the spot, a private fit of each, and what it is compared with.

The truth is known here.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from privrep.cli.console import progress, right, say, show, tell
from privrep.cli.options import flag
from privrep.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from privrep.data.synthetic import Population
    from privrep.data.table import UserTable
    from privrep.models.description import Columns, Config
    from privrep.models.model import Model
    from privrep.privacy.run import OnPage
    from privrep.typing import Array

NOTE = "Errors use the truth of made-up populations: with real users they would not be known, nor free to publish."
FEATURES = tuple(f"x{j}" for j in range(50))
OURS = "privrep"
TABLES = {"visits.csv", "visits.parquet", "answers.parquet", "ratings.parquet", "newcomers.csv"}
MADE = {"model", "picture.png", "new-rows.csv", *TABLES}


def demo(
    out: Annotated[Path, typer.Option(help="Folder to write model, picture and tables to.")] = Path("demo"),
    overwrite: Annotated[bool, flag("--overwrite", help="Replace an earlier demo there.")] = False,
) -> None:
    """Train privately on two made-up populations, of 20,000 and 5,000 users, and compare. Takes seconds."""
    _check_out(out, overwrite)
    from privrep.models.learning import PAGES

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        new = Path(scratch) / "demo"
        new.mkdir()
        with progress(new / "model") as bar:
            bar.begin("reading", PAGES)
            tables = run_demo(new, on_page=bar.page)
        if out.exists():
            shutil.rmtree(out)
        os.replace(new, out)
    for title, rows in tables.items():
        show(_table(title, rows))
    tell_tables(tables)
    say(NOTE)
    say("Label noise alone gives errors of 0.0001 and 1. Epsilon 0: nothing about one user reaches another.")
    say(
        f"Model: {out / 'model'}   picture: {out / 'picture.png'}",
        model=out / "model",
        picture=out / "picture.png",
        new_rows=out / "new-rows.csv",
    )
    say(f"Next: privrep inspect {out / 'model'}")
    say(f"      privrep predict {out / 'model'} {out / 'new-rows.csv'} --out predictions.csv")
    say(f"Tables to try every command on: {', '.join(sorted(TABLES))}, in {out}")


def _check_out(out: Path, overwrite: bool) -> None:
    if not out.exists():
        return
    held = {path.name for path in out.iterdir()} if out.is_dir() else {"a file"}
    if held and not overwrite:
        raise InputError(f"{out} exists already; choose another --out, or pass --overwrite.")
    if not held <= MADE:
        raise InputError(f"{out} holds more than a demo ({min(held - MADE)}); choose another --out.")


def tell_tables(tables: Mapping[str, Sequence[Comparison]]) -> None:
    """Add the tables of a demo to what --json prints."""
    tell(tables=[{"title": " ".join(title.split()), "rows": list(map(asdict, rows))} for title, rows in tables.items()])


def _table(title: str, rows: list[Comparison]) -> Table:
    table = Table("method", "mean squared error", "epsilon", title=title)
    right(table, 1, 2)
    for row in rows:
        epsilon = "no privacy" if row.epsilon is None else f"{row.epsilon:.3g}"
        table.add_row(row.method, f"{row.error:#.3g}", epsilon, style="bold" if row.private else "")
    return table


@dataclass(frozen=True)
class Comparison:
    """One method on one of the demo's populations. `epsilon` is None where the method is not private at all."""

    method: str
    error: float
    epsilon: float | None
    private: bool = False  # whether it is ours


def run_demo(folder: Path, *, users: int = 20_000, on_page: OnPage | None = None) -> dict[str, list[Comparison]]:
    """Fill an empty folder and return the tables to show, by their titles.

    In the folder are model/, the fit of the first population, picture.png, some rows to try `predict` on, and tables to
    try every other command on (`demo_tables`). In the first population users differ in slopes along two directions and
    in nothing else. The second is like real panels: users differ in level, levels follow users' features, and slopes
    are mostly common. It has a quarter of the users.

    Args:
        folder: to fill.
        users: of the first population.
        on_page: hears of every page.
    """
    import numpy as np

    from privrep.cli.demo_tables import write_tables
    from privrep.data.synthetic import make_population
    from privrep.linear.references import fit_fedrep, fit_mixed
    from privrep.models import model as models
    from privrep.models.description import Columns, Config
    from privrep.models.picture import draw_fit
    from privrep.users.memory import InMemoryUsers

    rng = np.random.default_rng(20_250)
    sparse = make_population(rng, users, len(FEATURES), 2, 10, 0.01)
    rows = sparse.sample(rng)
    config, columns = Config(rank=2, epsilon=1.0, delta=1e-6), Columns("user", ("y",), FEATURES)
    fitted, ours = _fit(sparse, rows, config, folder / "model", columns, on_page)
    models.finish(fitted, folder / "model")
    along = fit_fedrep(InMemoryUsers(rows), 2).matrix
    others = _compare(sparse, rows, fit_mixed(rows, along, follow=False))
    tables = {f"{users:,} users, 50 features, 10 rows each:\nslopes differ in 2 directions": [*others, ours]}
    _write_rows(sparse, rng, folder / "new-rows.csv")
    write_tables(folder)
    panel = make_population(
        rng, users // 4, 8, 1, 6, 1.0, level=5.0, intercept=1.0, common=2.0, between=1.0, context=1.0
    )
    rows = panel.sample(rng)
    _, ours = _fit(panel, rows, Config(rank=None, epsilon=1.0, delta=1e-6))
    others = _compare(panel, rows, fit_mixed(rows, np.eye(8)))
    tables[f"{users // 4:,} users, 8 features, 6 rows each:\nlevels differ, slopes are mostly common"] = [*others, ours]
    errors = {title: {row.method: row.error for row in shown} for title, shown in tables.items()}
    draw_fit(folder / "picture.png", fitted.privacy, errors, ours=OURS, note=NOTE)
    return tables


def _fit(
    population: Population,
    rows: UserTable,
    config: Config,
    folder: Path | None = None,
    columns: Columns | None = None,
    on_page: OnPage | None = None,
) -> tuple[Model, Comparison]:
    """Return a private fit with heads, and its error.

    Args:
        population: the truth.
        rows: of every user.
        config: the settings of the fit.
        folder: of the model, if it is kept.
        columns: their names.
        on_page: hears of every page.
    """
    from privrep.heads.fitting import fit_heads
    from privrep.models.learning import learn
    from privrep.models.model import with_heads
    from privrep.users.memory import InMemoryUsers

    fitted = learn(InMemoryUsers(rows), config, folder=folder, columns=columns, on_page=on_page)
    heads = fit_heads(rows.blocks(), fitted.representation)
    error = population.population_mse(heads.weights(fitted.representation), heads.intercept)
    return with_heads(fitted, heads), Comparison(OURS, error, fitted.privacy.epsilon, private=True)


def _compare(population: Population, rows: UserTable, by_mixed: tuple[Array, Array]) -> list[Comparison]:
    """Return the errors of methods that need no privacy, and of methods that have none.

    Args:
        population: the truth.
        rows: of every user, equally many.
        by_mixed: (n, d) weights and (n,) intercepts of a mixed model.
    """
    import numpy as np

    from privrep.linear.references import fit_alone, fit_pooled

    n, d = rows.n_users, rows.n_features
    shared, ones = fit_pooled(rows), np.ones((n, 1))
    means = np.asarray(rows.y, dtype=np.float64).reshape(n, -1).mean(axis=1)
    found = {
        "each user's own mean": (np.zeros((n, d)), means, 0.0),
        "each user alone": (*fit_alone(rows), 0.0),
        "one model for all": (ones * shared.weights, ones[:, 0] * shared.intercept, None),
        "mixed model without privacy": (*by_mixed, None),
    }
    return [
        Comparison(name, population.population_mse(weights, intercepts), epsilon)
        for name, (weights, intercepts, epsilon) in found.items()
    ]


def _write_rows(population: Population, rng: np.random.Generator, path: Path, users: int = 20) -> None:
    """Write fresh rows of the first few users, to try `privrep predict` on.

    Args:
        population: the truth.
        rng: draws the rows.
        path: of the file.
        users: how many.
    """
    import numpy as np

    first = {name: getattr(population, name)[:users] for name in ("heads", "intercepts", "sizes", "feature_kinds")}
    few = replace(population, **first).sample(rng)
    ids = np.repeat(few.ids, few.sizes)
    with open(path, "w", encoding="utf-8") as file:
        file.write(",".join(("user", "y", *FEATURES)) + "\n")
        for user, y, x in zip(ids, few.y, few.X, strict=True):
            file.write(",".join([str(user), f"{y:.6g}", *(f"{value:.6g}" for value in x)]) + "\n")
