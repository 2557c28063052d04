"""A population made up on the spot, a private fit of it, and what it is compared with. The truth is known here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from privrep.data.synthetic import Population, make_population
from privrep.heads.fitting import fit_heads
from privrep.linear.references import alone, fedrep, pooled
from privrep.models import model as models
from privrep.models.description import Columns, Config
from privrep.models.learning import learn
from privrep.models.picture import draw_fit
from privrep.users.memory import InMemoryUsers

NOTE = "Errors use the truth of a made-up population: with real users they would not be known, nor free to publish."
FEATURES = tuple(f"x{j}" for j in range(50))


@dataclass(frozen=True)
class Comparison:
    """One method on the demo's population. `epsilon` is None where the method is not private at all."""

    method: str
    error: float
    epsilon: float | None
    private: bool = False


def run_demo(folder: Path, *, users: int = 20_000, on_page: Callable[[str], None] | None = None) -> list[Comparison]:
    """Fill an empty folder: model/, picture.png and some rows to try `predict` on. Returns the table to show."""
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
    first = {name: getattr(population, name)[:users] for name in ("heads", "intercepts", "sizes", "feature_kinds")}
    few = replace(population, **first).sample(rng)
    ids = np.repeat(few.ids, few.sizes)
    with open(path, "w", encoding="utf-8") as file:
        file.write(",".join(("user", "y", *FEATURES)) + "\n")
        for user, y, x in zip(ids, few.y, few.X, strict=True):
            file.write(",".join([str(user), f"{y:.6g}", *(f"{value:.6g}" for value in x)]) + "\n")
