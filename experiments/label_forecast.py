"""Hold forecasts of labels against simulated fits of problems drawn at random: `python -m experiments.label_forecast`.

About a second a fit. Problems 300 to 359, the default, were looked at after the last constant of the forecast was set.
"""

from __future__ import annotations

import argparse
import math
import warnings

import numpy as np
from scipy.special import expit

from privrep import PrivateFedRepClassifier
from privrep.models.label_forecast import LabelProblem, forecast_labels
from privrep.privacy.ledger import Budget
from privrep.typing import Array

DELTA = 1e-6
NEW_ROWS, NEWCOMERS = 10, 12_000


def draw_problem(number: int) -> tuple[int, LabelProblem, Budget]:
    """Return users, problem and budget of a number."""
    rng = np.random.default_rng(1000 + number)
    users = int(np.exp(rng.uniform(math.log(500), math.log(10_000))))
    features = int(np.exp(rng.uniform(math.log(2), math.log(20.99))))
    rows, rank = int(rng.integers(2, 16)), int(rng.integers(0, 2))
    levels = round(float(rng.uniform(0.3, 2)), 2)
    slopes = round(float(rng.uniform(0.3, 1.5)), 2) if rank else 0.0
    common, rate = round(float(rng.uniform(0, 1)), 2), round(float(rng.uniform(0.05, 0.5)), 2)
    problem = LabelProblem(features, rank, rows, rate, levels, slopes, common)
    return users, problem, Budget(float(rng.choice([0.3, 1, 3])), DELTA)


def simulate(users: int, p: LabelProblem, budget: Budget, seed: int) -> tuple[float, float]:
    """Return log-losses of one fit: on new rows of its users, and of users without rows. A rank of 0 is not given."""
    rng, d, m = np.random.default_rng(seed), p.features, p.rows
    slopes, along = rng.normal(size=d), rng.normal(size=d)
    own = p.slopes if p.rank else 0.0
    slopes, along = slopes * p.common / np.linalg.norm(slopes), along / np.linalg.norm(along)

    def draw(count: int, rows: int) -> tuple[Array, Array]:
        level, head = p.levels * rng.normal(size=(count, 1)), own * rng.normal(size=(count, 1))
        X = rng.normal(size=(count, rows, d))
        outputs = p.level + level + X @ slopes + head * (X @ along)
        return X, (rng.random(outputs.shape) < expit(outputs)).astype(int)

    X, y = draw(users, m + NEW_ROWS)
    model = PrivateFedRepClassifier(
        epsilon=budget.epsilon, delta=budget.delta, classes=[0, 1], rank=p.rank or "auto", random_state=seed
    )
    ids = np.arange(users)
    model.fit(X[:, :m].reshape(-1, d), y[:, :m].ravel(), groups=np.repeat(ids, m))

    def lost(X: Array, y: Array, ids: Array) -> float:
        said = model.predict_proba(X.reshape(-1, d), groups=ids)[np.arange(y.size), y.ravel()]
        return float(-np.log(said).mean())

    known = lost(X[:, m:], y[:, m:], np.repeat(ids, NEW_ROWS))
    return known, lost(*draw(NEWCOMERS, 1), np.arange(users, users + NEWCOMERS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=300)
    parser.add_argument("--count", type=int, default=60)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    off, gaps = [], []
    for number in range(asked.first, asked.first + asked.count):
        users, problem, budget = draw_problem(number)
        known, new = simulate(users, problem, budget, number)
        found = forecast_labels(users, problem, budget)
        off.append((found.private / known - 1, found.newcomers / new - 1))
        gaps.append(abs(found.private - known) / (found.own - min(found.shrunk, found.mixed)))
        print(f"{users} users, {problem}, epsilon {budget.epsilon:g}: {known:.3f}, forecast {found.private:.3f}")
    for name, errors in zip(("users who took part", "newcomers"), np.abs(off).T, strict=True):
        within = ", ".join(f"{int((errors < part).sum())} within {part:.0%}" for part in (0.05, 0.1))
        print(f"{name}: of {len(errors)} forecasts, {within}; half within {np.median(errors):.1%}")
    half, most = np.quantile(gaps, (0.5, 0.9))
    print(f"of what there is to gain over own frequencies: half miss up to {half:.0%}, nine in ten {most:.0%}")


if __name__ == "__main__":
    main()
