"""Weights of rows on a real panel, some of whose rows were made noisy.

    python -m experiments.weights [--seeds 3] [--epsilon 1]

Log wages of nlswork. To half of the training rows noise is added, once or three times as large as wages vary, and to
the rest nothing. Each fit has defaults and (epsilon, 1e-6) under replace-one-user. It is told nothing, that all weights
are 2, weights drawn from 1, 2 and 3 that mean nothing, the inverse of each row's variance, or weight 0 for noisy rows.
The weighted ridge is of scikit-learn, with a level for each user, and not private. Test rows are as observed.
Prints root mean squared errors of users who took part, and writes them by seed to results/weights.csv beside this file.
The file is looked for in $PRIVREP_DATA/tables, or in ../shared/data/tables.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import sparse
from sklearn.linear_model import Ridge

from experiments.classes import write
from experiments.tables_data import Task, read_task
from privrep import PrivateFedRep
from privrep.typing import Array

RESULTS = Path(__file__).parent / "results"
WITHIN = 0.3  # standard deviation of wages around their prediction, roughly
SIZES = (1.0, 3.0)  # of the noise that is added, over how far wages vary
KINDS = ("none", "all 2", "1 to 3, at random", "inverse variance", "0 where noisy")


@dataclass(frozen=True)
class Score:
    """Root mean squared errors of two fits on the same rows and weights."""

    weights: str
    noise: float
    seed: int
    privrep: float
    ridge: float


def measure(task: Task, kind: str, noise: float, epsilon: float, seed: int) -> Score:
    """Return the errors of one kind of weights."""
    rng = np.random.default_rng(seed)
    X, y, users = task.X[task.train], task.y[task.train], task.codes[task.train]
    scale = noise * float(np.std(y))
    noisy = rng.random(len(y)) < 0.5
    y = y + np.where(noisy, scale, 0.0) * rng.standard_normal(len(y))
    weights = {
        "none": None,
        "all 2": np.full(len(y), 2.0),
        "1 to 3, at random": rng.integers(1, 4, len(y)).astype(np.float64),
        "inverse variance": np.where(noisy, 1 / (WITHIN**2 + scale**2), 1 / WITHIN**2),
        "0 where noisy": np.where(noisy, 0.0, 1.0),
    }[kind]
    model = PrivateFedRep(epsilon=epsilon, delta=1e-6, random_state=seed)
    model.fit(X, y, groups=users, sample_weight=weights)
    tested, truth = task.X[task.test], task.y[task.test]
    off = model.predict(tested, groups=task.codes[task.test]) - truth
    ridge = _ridge(task, y, weights) - truth
    return Score(kind, noise, seed, float(np.sqrt(np.mean(off**2))), float(np.sqrt(np.mean(ridge**2))))


def _ridge(task: Task, y: Array, weights: Array | None) -> Array:
    """Return predictions of test rows by a weighted ridge regression with a level for each user."""
    X = task.X[task.train]
    centre, scale = X.mean(axis=0), np.maximum(X.std(axis=0), 1e-9)
    users = 1 + int(task.codes.max())

    def design(rows: Array) -> sparse.csr_array:
        n = int(rows.sum())
        levels = sparse.csr_array((np.ones(n), (np.arange(n), task.codes[rows])), (n, users))
        return sparse.csr_array(sparse.hstack([sparse.csr_array((task.X[rows] - centre) / scale), levels]))

    ridge = Ridge(1.0, solver="sparse_cg", tol=1e-8).fit(design(task.train), y, sample_weight=weights)
    return np.asarray(ridge.predict(design(task.test)))


def main() -> None:
    asked = argparse.ArgumentParser(description="Weights of rows on a real panel.")
    asked.add_argument("--seeds", type=int, default=3)
    asked.add_argument("--epsilon", type=float, default=1.0)
    given = asked.parse_args()
    warnings.simplefilter("ignore")
    tasks = {seed: read_task("nlswork", seed) for seed in range(given.seeds)}
    runs = [(kind, noise) for noise in SIZES for kind in KINDS]
    scores = [measure(task, *run, given.epsilon, seed) for run in runs for seed, task in tasks.items()]
    print(f"{'noise':>5} {'weights':20} {'privrep':>8} {'ridge':>8}")
    for kind, noise in runs:
        found = [(score.privrep, score.ridge) for score in scores if (score.weights, score.noise) == (kind, noise)]
        private, ridge = np.mean(found, axis=0)
        print(f"{noise:5g} {kind:20} {private:8.4f} {ridge:8.4f}")
    write(RESULTS / "weights.csv", scores)


if __name__ == "__main__":
    main()
