"""Private FedRep of labels: two classes and five, against what one can do without privacy, and without other users.

    python -m experiments.classes [--seeds 5] [--only NAME] [--draw-only]

Labels are drawn from softmax(<x, U v> + b), heads v and intercepts b of each user's own. Two populations, defaults, the
true rank, (epsilon, 1e-6) under replace-one-user with everything charged:

  two classes    20,000 users, 50 features, rank 2, 20 rows
  five classes   10,000 users, 30 features, rank 3, 30 rows, classes skewed from user to user; two seeds at most

and a dozen in which there are too few users for the budget. Losses and errors are those expected of fresh rows, 50 a
user, the same rows for all methods. The oracle has the true U, FedRep (NOT PRIVATE) one learned without noise; both
have the coordinates, the prior and the votes of the private run at epsilon 1, so that heads differ by U alone. Alone is
a user's own logistic regression, with a penalty by leave-one-out, or the mixture on which the safety net falls back;
majority is its own classes' frequencies; all of 1,000 users only.
Noise is simulated from seeds, but for the fits that are timed. Takes about half an hour. Writes results/classes.csv,
results/classes_net.csv and results/classes.png beside this file.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from experiments.classes_picture import draw
from experiments.classes_runs import (
    AT,
    FIVE,
    HOPELESS,
    TWO,
    NetRow,
    Row,
    curve,
    fit_seconds,
    safety_net,
)

RESULTS = Path(__file__).parent / "results"
PARTS = ("two", "five", "net", "time")
SEEDS_FIVE, SEEDS_NET = 2, 2  # at most
TARGET_RATIO, TARGET_SECONDS, TARGET_NET = 1.5, 3.0, 1.02


def write(path: Path, rows: Iterable[Any]) -> None:
    """Dataclasses of one kind, a line each; empty for None."""
    lines = [asdict(row) for row in rows]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(lines[0])
        for line in lines:
            writer.writerow(["" if c is None else f"{c:.6g}" if isinstance(c, float) else c for c in line.values()])


def read(path: Path, kind: type[Any]) -> list[Any]:
    """The rows of a CSV that `write` wrote."""
    if not path.exists():
        return []
    as_type = {"str": str, "int": int, "float": float, "float | None": lambda c: float(c) if c else None}
    with open(path, newline="") as file:
        return [kind(*(as_type[str(f.type)](cells[f.name]) for f in fields(kind))) for cells in csv.DictReader(file)]


def excess_ratio(rows: Iterable[Row], population: str, bare: bool = False) -> tuple[float, float, list[float]]:
    """Excess log-loss of the private fit over that of FedRep, summed over seeds; its standard error; and by seed.

    With one seed there is no error. The error is that over seeds: populations, rows, noise and measurement together.
    """
    rows = [row for row in rows if row.population == population]
    above, below = (
        np.array([(row.bare_excess if bare else row.excess) or 0.0 for row in rows if (row.method, row.epsilon) == key])
        for key in (("private", AT), ("FedRep", None))
    )
    ratio = float(above.sum() / below.sum())
    n = len(above)
    error = float((above - ratio * below).std(ddof=1) / np.sqrt(n) / below.mean()) if n > 1 else float("nan")
    return ratio, error, [float(a / b) for a, b in zip(above, below, strict=True)]


def worst_net(rows: Iterable[NetRow]) -> tuple[NetRow, NetRow]:
    """Where the safety net held least, by log-loss and by error."""
    rows = list(rows)
    return max(rows, key=lambda row: row.log_loss_ratio), max(rows, key=lambda row: row.error_ratio)


def say(rows: list[Row], net: list[NetRow]) -> None:
    for population, method, epsilon in dict.fromkeys((row.population, row.method, row.epsilon) for row in rows):
        same = [row for row in rows if (row.population, row.method, row.epsilon) == (population, method, epsilon)]
        distance = [row.distance for row in same if row.distance is not None]
        print(
            f"{population:13} {method:21} eps {epsilon or '-':>4}  log-loss {np.mean([r.log_loss for r in same]):.5f} "
            f" error {np.mean([r.error for r in same]):.4f}"
            + (f"  dist^2 {np.mean(distance):.2e} (worst {max(distance):.2e})" if distance else "")
        )
    for population in dict.fromkeys(row.population for row in rows):
        for name, bare in (("with the safety net", False), ("all heads on U", True)):
            ratio, error, each = excess_ratio(rows, population, bare)
            by_seed = ", ".join(f"{one:.2f}" for one in each)
            print(
                f"{population}: excess over the oracle, private at {AT:g} / FedRep, {name}: {ratio:.2f} +- {error:.2f} "
                f"({by_seed}); target {TARGET_RATIO}"
            )
    for row in net:
        print(
            f"{row.population:31} eps {row.epsilon:<4} seed {row.seed}  log-loss / best alone {row.log_loss_ratio:.4f} "
            f"+- {row.log_loss_ratio_error:.4f}  error {row.error_ratio:.4f} +- {row.error_ratio_error:.4f}  "
            f"shared heads {row.shared:.2f}"
        )
    if net:
        loss, error_row = worst_net(net)
        print(
            f"worst: log-loss {loss.log_loss_ratio:.4f} ({loss.population}), error {error_row.error_ratio:.4f} "
            f"({error_row.population}); target {TARGET_NET}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=PARTS, help="one part; the rows of the others stay as they are")
    parser.add_argument("--draw-only", action="store_true", help="figures and picture of what has been run")
    arguments = parser.parse_args()
    parts = () if arguments.draw_only else (arguments.only,) if arguments.only else PARTS
    rows: list[Row] = read(RESULTS / "classes.csv", Row)
    net: list[NetRow] = read(RESULTS / "classes_net.csv", NetRow)
    for part, setting, most in (("two", TWO, arguments.seeds), ("five", FIVE, min(SEEDS_FIVE, arguments.seeds))):
        if part in parts:
            rows = [row for row in rows if row.population != setting.name]
            for seed in range(1, most + 1):
                rows += curve(setting, seed)
                write(RESULTS / "classes.csv", rows)
                print(f"{setting.name}, seed {seed} done", flush=True)
    if "net" in parts:
        seeds = range(1, min(SEEDS_NET, arguments.seeds) + 1)
        net = [safety_net(setting, epsilon, seed) for seed in seeds for setting, epsilon in HOPELESS]
        write(RESULTS / "classes_net.csv", net)
    say(rows, net)
    if "time" in parts:
        seconds = [fit_seconds(TWO, seed) for seed in (1, 2, 3)]
        print(
            f"whole fit of {TWO.name}, cryptographic noise, epsilon {AT:g}: {min(seconds):.1f} to {max(seconds):.1f} s "
            f"on whatever else the machine was doing; target {TARGET_SECONDS:g} s"
        )
    if {row.population for row in rows} >= {TWO.name, FIVE.name}:
        draw(rows, RESULTS / "classes.png")


if __name__ == "__main__":
    main()
