"""Numbers from images: how far digits slant and how much ink they have, by writer, from public features of edges.

    python -m experiments.image_numbers [--data ../shared/data/mnist] [--rows 30] [--seeds 2]

Users are the 539 writers of MNIST's training images, with at most `rows` digits each. Three quarters of a writer's
digits are to learn from, the others to predict. A tenth of the writers are newcomers, with three digits each. The slant
is the covariance of places across and down over the variance down, of ink; the ink is the mean pixel. How many features
are kept follows from public sizes (`privrep.neural.plan.plan_features`). Its two constants were chosen on these very
writers: a choice that no ledger here pays for.

  user mean    what each writer's own digits say, without any image
  noisy ridge  an analyst's private slopes on the same features, and raw intercepts (`experiments.table_references`)
  ridge        one ridge regression on the same features, NOT PRIVATE
  privrep      `CentaurRegressor`; noise is simulated from seeds

Prints root mean squared errors of test rows, of newcomers, and of newcomers without rows.
"""

from __future__ import annotations

import argparse
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.table_references import Predictions, noisy_ridge, pooled_ridge, user_mean
from experiments.tables_data import Panel, Task, split
from privrep import CentaurRegressor
from privrep.errors import NothingLearned, UnknownUsers
from privrep.neural.features import Edges
from privrep.typing import Array

EPSILONS = (1.0, 3.0)
DELTA = 1e-5
SIDE = 28


@dataclass(frozen=True)
class Digits:
    """Images of writers."""

    images: Array  # (n, side, side), from 0 to 1
    writers: NDArray[np.int64]


def default_data() -> Path:
    """Return the folder with the digits."""
    shared = Path(__file__).parents[2] / "shared" / "data"
    return Path(os.environ.get("PRIVREP_DATA", shared)) / "mnist"


def read_digits(folder: Path, rows: int) -> Digits:
    """Read at most so many digits of each writer, at random."""
    with np.load(folder / "train.npz") as file:
        images, writers = file["images"], file["writers"].astype(np.int64)
    order = np.lexsort((np.random.default_rng(0).random(len(writers)), writers))
    _, starts, sizes = np.unique(writers[order], return_index=True, return_counts=True)
    kept = order[np.arange(len(order)) - np.repeat(starts, sizes) < rows]
    return Digits(images[kept] / 255.0, writers[kept])


def slant(images: Array) -> Array:
    """Return how far the ink leans, (n,): its covariance of places across and down over its variance down."""
    places = np.arange(SIDE) - (SIDE - 1) / 2
    ink = images.sum(axis=(1, 2))
    down = places - (images.sum(axis=2) @ places / ink)[:, None]
    across = places - (images.sum(axis=1) @ places / ink)[:, None]
    both = np.einsum("nij,ni,nj->n", images, down, across) / ink
    return np.asarray(both / (np.einsum("nij,ni->n", images, down**2) / ink))


TARGETS = {"slant": slant, "ink": lambda images: images.mean(axis=(1, 2))}


def by_privrep(task: Task, rows: Array, epsilon: float, seed: int) -> tuple[Predictions, CentaurRegressor]:
    """Fit on training rows, and predict by users' own heads, by newcomers' new ones, and by the prior."""
    model = CentaurRegressor(image=(SIDE, SIDE, 1), epsilon=epsilon, delta=DELTA, random_state=seed)
    model.fit(rows[task.train], task.y[task.train], task.codes[task.train])
    newcomers = np.empty(int(task.newcomers.sum()))
    users = task.codes[task.newcomers]
    for user in np.unique(users):
        brought = task.support & (task.codes == user)
        head = model.personalize(rows[brought], task.y[brought])
        newcomers[users == user] = head.predict(rows[task.newcomers][users == user])
    test = model.predict(rows[task.test], task.codes[task.test])
    return Predictions(test, newcomers, model.predict(rows[task.newcomers], users)), model


def compare(name: str, digits: Digits, epsilons: tuple[float, ...], seeds: int) -> None:
    """Print the errors of one target."""
    rows = digits.images.reshape(len(digits.images), -1)
    task = split(Panel(rows, TARGETS[name](digits.images), digits.writers), 0)
    features = Edges(SIDE, SIDE, 1, 256)(rows.astype(np.float32)).astype(np.float64)
    print(f"{name}: {len(np.unique(task.codes[task.train])):,} users, {int(task.train.sum()):,} rows to learn from")
    _show("user mean", [user_mean(task).errors(task)])
    for epsilon in epsilons:
        found = [by_privrep(task, rows, epsilon, seed) for seed in range(seeds)]
        kept = found[0][1].plan_.keep
        some = Task(features[:, :kept], *(getattr(task, each) for each in list(vars(task))[1:]))
        noisy = [noisy_ridge(some, epsilon, np.random.default_rng(seed), DELTA).errors(some) for seed in range(seeds)]
        _show(f"epsilon {epsilon:g}, {kept} features: ridge, NOT PRIVATE", [pooled_ridge(some).errors(some)])
        _show(f"epsilon {epsilon:g}, {kept} features: noisy ridge", noisy)
        _show(f"epsilon {epsilon:g}, {kept} features: privrep", [each.errors(task) for each, _ in found])


def _show(what: str, errors: list[tuple[float, float, float]]) -> None:
    test, newcomers, strangers = np.mean(errors, axis=0)
    print(f"  {what:<52} test {test:.4f}  newcomers {newcomers:.4f}  without rows {strangers:.4f}", flush=True)


def main() -> None:
    """Run all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=default_data())
    parser.add_argument("--rows", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    for category in (NothingLearned, UnknownUsers):
        warnings.simplefilter("ignore", category)
    digits = read_digits(options.data, options.rows)
    for name in TARGETS:
        compare(name, digits, EPSILONS, options.seeds)


if __name__ == "__main__":
    main()
