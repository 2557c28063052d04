"""Handwritten digits by writer: a private representation, personal heads, and new writers with few labelled digits.

    python -m experiments.writers [--data ../shared/data/mnist] [--seeds 2] [--draw-only]

Users are the 539 writers of MNIST's training images; each takes part with 20 or (at most) 40 of its digits. Features
come from a map (`writers_features`) none of whose numbers was fitted to anybody's digits. The representation has rank
16 of 64 features and is learned with (epsilon, 1e-5) under replace-one-user, every release charged, in the map's own
coordinates. Which map, and which rank, was decided by looking at a split of the training writers, test writers never:
a choice that no ledger here pays for, and that in earnest would have to be made on public digits.

  training writers   heads from the digits they took part with, tested on all their others
  new writers        the 297 test writers, disjoint: heads from 5, 10 or 20 labelled digits and the public
                     representation, at no privacy cost, tested on their others; writers with five or more of those

"no noise" is the same at epsilon 1e6 and NOT PRIVATE, nor is pooled, one softmax regression on all training writers'
digits. Alone is a writer's own softmax regression on all 64 features, or the mixture on which the safety net falls
back. "random U" is what heads reach on a public random representation, with the prior and the votes of "no noise" but
nothing else of anybody's. Every writer counts alike. Noise is simulated from seeds. Takes about a quarter of an hour.
Writes results/writers.csv and results/writers.png beside this file.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.class_references import LinearClassifiers, pooled_classes
from experiments.classes import read, write
from experiments.classes_runs import alones, outputs_of
from experiments.writers_features import FEATURES, PublicMap, public_map
from experiments.writers_picture import draw
from privrep.data.table import UserTable
from privrep.heads.fitting import fit_heads
from privrep.heads.regression import SHARED
from privrep.linear.methods.private_fedrep import private_fedrep
from privrep.linear.starts import random_basis
from privrep.local.losses import Loss
from privrep.local.representation import Representation
from privrep.local.transform import FeatureTransform
from privrep.privacy.billboard import Billboard
from privrep.privacy.ledger import Budget, Ledger
from privrep.privacy.noise import simulated_noise
from privrep.privacy.run import Run
from privrep.typing import Array
from privrep.users.memory import InMemoryUsers

RESULTS = Path(__file__).parent / "results"
SEED = 20_261_116
EPSILONS = (1.0, 2.0, 4.0, 8.0)
PLENTY = 1e6
DELTA = 1e-5
RANK = 16
ROWS = (20, 40)  # of a training writer, at most
LABELLED = (5, 10, 20)  # of a new writer
LEAST_TESTED = 5
TESTED = 150  # training writers whose own classifiers are fitted: it takes long
DIGITS = Loss("log", 10)


@dataclass(frozen=True)
class Digits:
    features: NDArray[np.float32]
    label: NDArray[np.float32]
    writer: NDArray[np.int64]

    def table(self, rows: NDArray[np.int64]) -> UserTable:
        return UserTable.from_rows(self.features[rows], self.label[rows], self.writer[rows])


@dataclass(frozen=True)
class Split:
    """Rows that writers label, as users, and rows to test on."""

    digits: Digits
    table: UserTable
    test: NDArray[np.int64]

    def first(self, users: int) -> Split:
        users = min(users, self.table.n_users)
        chosen = np.isin(self.digits.writer[self.test], self.table.ids[:users])
        return replace(self, table=self.table.users(0, users), test=self.test[chosen])

    def measure(self, outputs: Callable[[Array, NDArray[np.int64]], Array]) -> dict[str, float]:
        """Mean over writers of their log-loss and error, and the error's standard error."""
        who = np.searchsorted(self.table.ids, self.digits.writer[self.test])
        label = self.digits.label[self.test].astype(np.int64)
        values = outputs(self.digits.features[self.test], who)
        p = DIGITS.probabilities(np.ascontiguousarray(values.T)).T
        tested = np.bincount(who, minlength=self.table.n_users)
        there = tested > 0
        losses, errors = (
            np.bincount(who, each, self.table.n_users)[there] / tested[there]
            for each in (-np.log(np.maximum(p[np.arange(len(p)), label], 1e-300)), p.argmax(axis=1) != label)
        )
        return {
            "writers": len(errors),
            "tested": len(label),
            "log_loss": float(losses.mean()),
            "error": float(errors.mean()),
            "error_error": float(errors.std() / np.sqrt(len(errors))),
        }


@dataclass(frozen=True)
class Row:
    """One method on one group of writers."""

    group: str  # training writers or new writers
    trained: int  # digits a training writer took part with, at most
    labelled: int  # digits a head is made of, at most
    method: str
    epsilon: float | None
    seed: int
    writers: int
    tested: int
    log_loss: float
    error: float
    error_error: float  # standard error, over writers
    shared: float | None = None  # part of the writers who keep the head on the representation
    mean_error: float | None = None  # what the run says of its representation: 1 is nothing learned


def default_data() -> Path:
    shared = Path(__file__).parents[2] / "shared" / "data"
    return Path(os.environ.get("PRIVREP_DATA", shared)) / "mnist"


def read_digits(path: Path, features: PublicMap) -> Digits:
    with np.load(path) as file:
        images, labels, writers = file["images"], file["labels"], file["writers"]
    return Digits(features(images), labels.astype(np.float32), writers.astype(np.int64))


def split(digits: Digits, labelled: int, seed: int, whole: int | None = None) -> Split:
    """`labelled` rows of each writer at random, the others to test on; of writers with LEAST_TESTED of those or more.

    With `whole`, writers with fewer label as many times `whole` rows as they have, and all take part.
    """
    order = np.lexsort((np.random.default_rng([SEED, seed]).random(len(digits.writer)), digits.writer))
    _, starts, sizes = np.unique(digits.writer[order], return_index=True, return_counts=True)
    if whole is None:
        take = np.where(sizes >= labelled + LEAST_TESTED, labelled, 0)
    else:
        take = np.minimum(labelled, np.maximum(sizes // whole, 1) * whole)
    place = np.arange(len(order)) - np.repeat(starts, sizes)
    taken = np.repeat(take, sizes)
    return Split(digits, digits.table(order[place < taken]), order[(place >= taken) & (taken > 0)])


def learn(table: UserTable, epsilon: float, seed: int) -> Representation:
    noise = simulated_noise(int(np.random.SeedSequence([SEED, seed, round(1_000 * epsilon)]).generate_state(1)[0]))
    run = Run(InMemoryUsers(table), Ledger(Budget(epsilon, DELTA), seeded=True), Billboard(None), noise)
    return private_fedrep(run, RANK, loss=DIGITS, transform=FeatureTransform.plain(FEATURES))


def random_model(like: Representation) -> Representation:
    """A random U, with the prior and the votes of another."""
    basis = random_basis(FEATURES, RANK, "writers")
    return Representation(
        basis, FeatureTransform.plain(FEATURES), 0.0, preference=like.preference, precision=like.precision
    )


def with_heads(where: Split, model: Representation) -> dict[str, float]:
    heads = fit_heads(where.table.blocks(), model, loss=DIGITS)
    shared = float((heads.kind == SHARED).mean())
    return where.measure(outputs_of(heads, model)) | {"shared": shared, "mean_error": model.mean_error}


def rows_of(train: Digits, new: Digits, trained: int, seed: int) -> Iterator[Row]:
    at_home = split(train, trained, seed, whole=20)
    groups = [("training writers", trained, at_home.first(TESTED))]
    groups += [("new writers", labelled, split(new, labelled, seed)) for labelled in LABELLED]
    models: dict[tuple[str, float | None], Representation] = {
        ("private", epsilon): learn(at_home.table, epsilon, seed) for epsilon in EPSILONS
    }
    models["no noise", None] = learn(at_home.table, PLENTY, seed)
    models["random U", None] = random_model(models["no noise", None])
    pooled = pooled_classes(at_home.table, DIGITS)
    for group, labelled, where in groups:
        own: dict[str, LinearClassifiers] = {"pooled": pooled}
        if trained == ROWS[0] or group == "training writers":  # those of new writers do not depend on `trained`
            own |= alones(where.table, DIGITS)
        for key, model in models.items():
            yield Row(group, trained, labelled, *key, seed, **with_heads(where, model))
        for name, classifier in own.items():
            yield Row(group, trained, labelled, name, None, seed, **where.measure(classifier.outputs))


def say(rows: list[Row]) -> None:
    for key in dict.fromkeys((r.group, r.trained, r.labelled, r.method, r.epsilon) for r in rows):
        same = [r for r in rows if (r.group, r.trained, r.labelled, r.method, r.epsilon) == key]
        group, trained, labelled, method, epsilon = key
        shared = [r.shared for r in same if r.shared is not None]
        print(
            f"{group:16} trained {trained} labelled {labelled:2} {method:21} eps {epsilon or '-':>4}  "
            f"error {np.mean([r.error for r in same]):.4f} (+- {np.mean([r.error_error for r in same]):.4f}, "
            f"{same[0].writers} writers)  log-loss {np.mean([r.log_loss for r in same]):.3f}"
            + (f"  shared heads {np.mean(shared):.2f}" if shared else "")
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=default_data())
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--draw-only", action="store_true", help="figures and picture of what has been run")
    arguments = parser.parse_args()
    rows: list[Row] = read(RESULTS / "writers.csv", Row) if arguments.draw_only else []
    if not arguments.draw_only:
        if not (arguments.data / "train.npz").is_file():
            raise SystemExit(f"there is no train.npz in {arguments.data}; pass --data, or set PRIVREP_DATA.")
        features = public_map()
        train, new = (read_digits(arguments.data / f"{name}.npz", features) for name in ("train", "test"))
        for seed in range(1, arguments.seeds + 1):
            for trained in ROWS:
                rows += rows_of(train, new, trained, seed)
                write(RESULTS / "writers.csv", rows)
                print(f"seed {seed}, {trained} digits done", flush=True)
    say(rows)
    draw(rows, RESULTS / "writers.png")


if __name__ == "__main__":
    main()
