"""Missing values of a real panel: filled inside users, dropped, or filled by a mean over all users.

    python -m experiments.missing [--seeds 5] [--epsilons 0.3,1,3]

Log wages of nlswork as the file is: no row is left out beforehand, and among the features are union membership (a third
is missing) and weeks of unemployment (a fifth). Every fit has defaults and (epsilon, 1e-6) under replace-one-user. All
methods predict the same test rows. "global mean" fills by means of all training rows before the fit: what a pipeline
would do, and not private. Seeds are 80 and on, as in `tables`.
Prints root mean squared errors of users who took part, on all their test rows and on those that miss nothing, and of
newcomers with three rows; writes them by seed to results/missing.csv beside this file. The file is looked for in
$PRIVREP_DATA/tables, or in ../shared/data/tables.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet

from experiments.classes import write
from experiments.tables_data import Panel, Task, default_data, split
from privrep import PrivateFedRep
from privrep.typing import Array

RESULTS = Path(__file__).parent / "results"
FIRST_SEED = 80
FEATURES = ["age", "ttl_exp", "tenure", "hours", "wks_work", "south", "not_smsa", "c_city", "msp", "collgrad", "grade"]
GAPPY = ["union", "wks_ue"]
METHODS: Mapping[str, Mapping[str, Any]] = {
    "impute": {},
    "indicator": {"missing_indicator": [len(FEATURES) + j for j in range(len(GAPPY))]},
    "drop": {"missing": "drop"},
    "global mean": {},
}


@dataclass(frozen=True)
class Score:
    """Root mean squared errors of one fit."""

    epsilon: float
    method: str
    seed: int
    test: float  # all test rows of users who took part
    whole: float  # those of them that miss nothing
    newcomers: float


def read_panel() -> Panel:
    """Read all rows of the file, NaN where a value is missing."""
    table = parquet.read_table(default_data() / "nlswork.parquet")
    numbers = [table[name].to_numpy().astype(np.float64) for name in [*FEATURES, *GAPPY]]
    black = np.array(table["race"].to_pylist()) == "black"
    return Panel(np.column_stack([*numbers, black]), table["ln_wage"].to_numpy(), table["idcode"].to_numpy())


def measure(task: Task, method: str, epsilon: float, seed: int) -> Score:
    """Return the errors of one fit."""
    X = task.X
    if method == "global mean":
        X = np.where(np.isnan(X), np.nanmean(X[task.train], axis=0), X)
    model = PrivateFedRep(epsilon=epsilon, delta=1e-6, random_state=seed, **METHODS[method])
    model.fit(X[task.train], task.y[task.train], groups=task.codes[task.train])
    off = model.predict(X[task.test], groups=task.codes[task.test]) - task.y[task.test]
    whole = ~np.isnan(task.X[task.test]).any(axis=1)
    return Score(epsilon, method, seed, _size(off), _size(off[whole]), _size(_newcomers(model, X, task)))


def _newcomers(model: PrivateFedRep, X: Array, task: Task) -> Array:
    off = np.full(len(task.y), np.nan)
    for user in np.unique(task.codes[task.newcomers]):
        mine, asked = task.support & (task.codes == user), task.newcomers & (task.codes == user)
        off[asked] = model.personalize(X[mine], task.y[mine]).predict(X[asked]) - task.y[asked]
    return off[task.newcomers]


def _size(off: Array) -> float:
    return float(np.sqrt(np.mean(off**2)))


def main() -> None:
    asked = argparse.ArgumentParser(description="Missing values of a real panel.")
    asked.add_argument("--seeds", type=int, default=5)
    asked.add_argument("--epsilons", default="0.3,1,3")
    given = asked.parse_args()
    warnings.simplefilter("ignore")
    panel = read_panel()
    tasks = {seed: split(panel, seed) for seed in range(FIRST_SEED, FIRST_SEED + given.seeds)}
    print(f"{'epsilon':>7}  {'method':12} {'all rows':>9} {'whole rows':>10} {'newcomers':>9}")
    scores: list[Score] = []
    for epsilon in map(float, given.epsilons.split(",")):
        for method in METHODS:
            found = [measure(task, method, epsilon, seed) for seed, task in tasks.items()]
            test, whole, new = np.mean([(score.test, score.whole, score.newcomers) for score in found], axis=0)
            print(f"{epsilon:7g}  {method:12} {test:9.4f} {whole:10.4f} {new:9.4f}", flush=True)
            scores += found
    write(RESULTS / "missing.csv", scores)


if __name__ == "__main__":
    main()
