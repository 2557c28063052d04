"""Accuracy of users' images against epsilon: the default, everybody alone, and what nobody private reaches.

    python -m experiments.image_users [--data digits cifar10] [--users 500 1000] [--epsilons 0.5 1 3] [--seed 500]

Users hold 40 images of 5 classes in proportions of their own, and are tested on 20 others. Data sets:

  mnist, fashion-mnist, cifar10   public features of edges
  digits                          MNIST's digits between others, in changing contrast and noise: edges
  permuted                        the same; every user has names of its own for the classes
  mixed                           the same; every other user has names of its own
  cifar10 features                frozen EfficientNet-Lite0

Methods: "default" is `Centaur`, all charged, noise SIMULATED from seeds; "nothing" is share="nothing"; "ridge" is each
user's own least squares, its penalty tuned on the test images of all; "pooled" is one logistic regression for all with
each user's class frequencies, NOT PRIVATE. "newcomers" are 60 others with 5 and with 20 images.

Rows that stand in results/image_users.csv are not run again. Writes that file and image_users.png beside it.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments import style
from experiments.classes import read, write
from experiments.table1_data import Sources, encoded, images_of
from privrep.errors import NothingLearned
from privrep.neural.features import Edges

RESULTS = Path(__file__).parent / "results" / "image_users.csv"
DATA = ("mnist", "fashion-mnist", "cifar10", "digits", "permuted", "mixed", "cifar10 features")
DRAWN = DATA[1:]  # a picture has six panels at most
TITLES = {
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "digits": "Digits between others",
    "permuted": "Digits, names by user",
    "mixed": "Digits, names by half of users",
    "cifar10 features": "CIFAR-10, frozen network",
}
METHODS = ("nothing", "ridge", "pooled", "default")
ROWS, TESTED, CLASSES, HELD = 40, 20, 10, 5
NEWCOMERS, DELTA = 60, 1e-5
MARKED = (0.1, 1.0, 8.0, 1000.0)  # epsilons with a number on the axis
RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Row:
    """One run. Epsilon is 0 where nothing is spent; newcomers are empty where a method has none."""

    data: str
    users: int
    method: str
    epsilon: float
    seed: int
    accuracy: float = 0.0
    newcomers_5: float | None = None
    newcomers_20: float | None = None
    shared: str = ""
    seconds: float = 0.0

    @property
    def key(self) -> tuple[object, ...]:
        return self.data, self.users, self.method, self.epsilon, self.seed


@dataclass(frozen=True, eq=False)
class Users:
    """Rows of length one (users, rows, features) and classes (users, rows), to train on and to test on."""

    X: Floats
    y: NDArray[np.int64]
    tested: Floats
    labels: NDArray[np.int64]


def cluttered(pixels: NDArray[np.uint8], rng: np.random.Generator) -> Floats:
    """Return digits at places that vary, with parts of others beside them, as rows of 32 x 32 pixels."""
    digits, n = pixels.astype(np.float32) / 255, len(pixels)
    scene = np.zeros((n, 40, 80), np.float32)
    down, across = rng.integers(3, 10, n), rng.integers(23, 30, n)
    beside = (
        (rng.permutation(n), across - rng.integers(18, 23, n)),
        (rng.permutation(n), across + rng.integers(18, 22, n)),
    )
    for others, places in (*beside, (np.arange(n), across)):
        for i in range(n):
            there = scene[i, down[i] : down[i] + 28, places[i] : places[i] + 28]
            np.maximum(there, digits[others[i]], out=there)
    shape = (n, 1, 1)
    contrast = rng.uniform(0.15, 0.6, shape) * rng.choice([-1, 1], shape)
    light = rng.uniform(0.3, 0.7, shape) + rng.normal(0, 0.1, shape) * np.linspace(-1, 1, 32)
    seen = light + contrast * (scene[:, 4:36, 24:56] - 0.5) + rng.normal(0, 0.04, (n, 32, 32))
    return np.clip(seen, 0, 1).astype(np.float32).reshape(n, -1)


@lru_cache(maxsize=2)
def features_of(name: str, sources: Sources) -> tuple[Floats, NDArray[np.int64], Floats, NDArray[np.int64]]:
    """Return features of training and of test images, each of length one, and their classes."""
    source = {"digits": "mnist", "permuted": "mnist", "mixed": "mnist", "cifar10 features": "cifar10"}.get(name, name)
    parts, rng = images_of(source, sources), np.random.default_rng(7)
    found = []
    for part, images in zip(("train", "test"), parts, strict=True):
        if name == "cifar10 features":
            rows = encoded(part, sources)
        elif name in ("digits", "permuted", "mixed"):
            rows = Edges(32, 32, 1, keep=256)(cluttered(images.pixels, rng))
        else:
            rows = Edges(*images.shape, keep=256)(images.rows(np.arange(len(images))))
        length = np.linalg.norm(rows, axis=1, keepdims=True)
        found += [(rows / np.maximum(length, 1e-12)).astype(np.float32), images.labels.astype(np.int64)]
    return found[0], found[1], found[2], found[3]


def deal(name: str, users: int, rows: int, seed: int, sources: Sources) -> Users:
    """Return users with few classes each; no training image is dealt twice before all were."""
    train, classes, test, test_classes = features_of(name, sources)
    rng = np.random.default_rng([20_261_118, seed])
    stock = [rng.permutation(np.flatnonzero(classes == c)) for c in range(CLASSES)]
    others, taken = [np.flatnonzero(test_classes == c) for c in range(CLASSES)], np.zeros(CLASSES, np.int64)
    place, labels, new, new_labels = [], [], [], []
    for number in range(users):
        held, often = rng.permutation(CLASSES)[:HELD], rng.dirichlet(3 * np.ones(HELD))
        mine, later = rng.choice(held, rows, p=often), rng.choice(held, TESTED, p=often)
        for c in mine:
            place.append(stock[c][taken[c] % len(stock[c])])
            taken[c] += 1
        new += [rng.choice(others[c]) for c in later]
        own = name == "permuted" or (name == "mixed" and number % 2)
        names = rng.permutation(CLASSES) if own else np.arange(CLASSES)
        labels.append(names[mine])
        new_labels.append(names[later])
    width = train.shape[1]
    rows_of = train[place].reshape(users, rows, width), test[new].reshape(users, TESTED, width)
    return Users(rows_of[0], np.array(labels), rows_of[1], np.array(new_labels))


def run_default(users: Users, newcomers: Users, row: Row) -> Row:
    """Return the row with what the default, or everybody alone, comes to."""
    from privrep import Centaur

    n, rows, d = users.X.shape
    share = "nothing" if row.method == "nothing" else "auto"
    options = {"classes": CLASSES, "features": None, "rows": rows, "share": share, "random_state": row.seed}
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingLearned)
        model = Centaur(epsilon=row.epsilon or 1.0, delta=DELTA, **options).fit(
            users.X.reshape(-1, d), users.y.ravel(), np.repeat(np.arange(n), rows)
        )
    seconds = time.perf_counter() - began
    accuracy = model.score(users.tested.reshape(-1, d), users.labels.ravel(), np.repeat(np.arange(n), TESTED))
    new = [
        float(
            np.mean([np.mean(model.personalize(X[:some], y[:some]).predict(Z) == z) for X, y, Z, z in each(newcomers)])
        )
        for some in (5, 20)
    ]
    return Row(*row.key, accuracy, *new, model.plan_.share, seconds)  # type: ignore[arg-type]


def each(users: Users) -> Iterator[tuple[Floats, NDArray[np.int64], Floats, NDArray[np.int64]]]:
    return zip(users.X, users.y, users.tested, users.labels, strict=True)


def ridge_alone(users: Users) -> float:
    """Return the accuracy of each user's own least squares, with the penalty that does best on all test images."""
    right = np.zeros(len(RIDGES))
    for X, y, Z, z in each(users):
        mean, hot = X.mean(axis=0), np.eye(CLASSES)[y]
        A, often = X - mean, hot.mean(axis=0)
        pairs, beside = A @ A.T, (Z - mean) @ A.T
        scale = np.trace(pairs) / len(A)
        for number, ridge in enumerate(RIDGES):
            scores = often + beside @ np.linalg.solve(pairs + ridge * scale * np.eye(len(A)), hot - often)
            right[number] += np.sum(scores.argmax(axis=1) == z)
    return float(right.max() / users.labels.size)


def pooled(users: Users, steps: int = 40) -> float:
    """Return the accuracy of one logistic regression for all, with each user's class frequencies. Not private."""
    d = users.X.shape[2]
    hot = np.eye(CLASSES, dtype=np.float32)[users.y]
    often = np.log(hot.sum(axis=1, keepdims=True) + 0.3)
    F = users.X.reshape(-1, d) - users.X.mean(axis=(0, 1))
    moment = (F.T @ F / len(F)).astype(np.float64)
    bend = np.linalg.inv(moment / 2 + 1e-4 * np.trace(moment) / 2 * np.eye(d)).astype(np.float32)
    weights = before = np.zeros((d, CLASSES), np.float32)
    offset = np.broadcast_to(often, hot.shape).reshape(-1, CLASSES)
    for step in range(steps):
        ahead, before = weights + step / (step + 3) * (weights - before), weights
        scores = F @ ahead + offset
        chance = np.exp(scores - scores.max(axis=1, keepdims=True))
        chance /= chance.sum(axis=1, keepdims=True)
        weights = ahead - bend @ (F.T @ (chance - hot.reshape(-1, CLASSES)) / len(F))
    scores = (users.tested - users.X.mean(axis=(0, 1))) @ weights + often
    return float(np.mean(scores.argmax(axis=2) == users.labels))


def run(row: Row, sources: Sources) -> Row:
    users = deal(row.data, row.users, ROWS, row.seed, sources)
    if row.method in ("default", "nothing"):
        return run_default(users, deal(row.data, NEWCOMERS, TESTED, row.seed + 1_000, sources), row)
    began = time.perf_counter()
    accuracy = ridge_alone(users) if row.method == "ridge" else pooled(users)
    return Row(*row.key, accuracy, seconds=time.perf_counter() - began)  # type: ignore[arg-type]


def wanted(data: list[str], users: list[int], epsilons: list[float], seed: int) -> Iterator[Row]:
    for name in data:
        for count in users:
            for method in METHODS:
                for epsilon in epsilons if method == "default" else (0.0,):
                    yield Row(name, count, method, epsilon, seed)


def draw(rows: list[Row], path: Path) -> None:
    """Draw accuracy against epsilon, a panel a data set."""
    names = [name for name in DRAWN if any(r.data == name for r in rows)]
    most = max(r.users for r in rows)
    note = f"Users have {ROWS} images of {HELD} classes. Everything is charged; noise is simulated, delta {DELTA:g}."
    with style.picture(
        path, math.ceil(len(names) / 3), 3, panel=(4.6, 3.0), title="Accuracy on users' own test images", note=note
    ) as panels:
        for panel, name in zip(panels.flat, names, strict=False):
            for users in sorted({r.users for r in rows if r.data == name}):
                found = [r for r in rows if (r.data, r.users, r.method) == (name, users, "default")]
                found.sort(key=lambda r: r.epsilon)
                look = style.OURS if users == most else {**style.OURS, "color": style.PALE, "linewidth": 1.6}
                panel.plot([r.epsilon for r in found], [r.accuracy for r in found], label=f"{users:,} users", **look)
            for method, words, colour in (
                ("ridge", "alone, tuned", style.ALONE),
                ("pooled", "one for all, not private", style.NOT_PRIVATE),
            ):
                known = [r.accuracy for r in rows if (r.data, r.users, r.method) == (name, most, method)]
                if known and min(known) > 0.4:  # one model for users with names of their own is no ceiling
                    style.level(panel, float(np.mean(known)), words, colour=colour)
            panel.set_title(TITLES[name])
            style.epsilon_axis(panel, MARKED)
            style.number_axis(panel, "accuracy")


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--users", nargs="+", type=int, default=[500, 1_000])
    parser.add_argument("--epsilons", nargs="+", type=float, default=[0.1, 0.25, 0.5, 1.0, 3.0, 8.0, 1000.0])
    parser.add_argument("--seed", type=int, default=500)
    chosen = parser.parse_args(given)
    done = read(RESULTS, Row) if RESULTS.exists() else []
    for row in wanted(chosen.data, chosen.users, chosen.epsilons, chosen.seed):
        if any(row.key == old.key for old in done):
            continue
        found = run(row, Sources())
        done.append(found)
        write(RESULTS, done)
        new = "" if found.newcomers_5 is None else f"  newcomers {found.newcomers_5:.3f} {found.newcomers_20:.3f}"
        name = f"{found.data:17} {found.users:5,} users {found.method:8} epsilon {found.epsilon:<6g}"
        print(f"{name} {found.accuracy:.3f}{new} {found.shared} {found.seconds:.0f} s", flush=True)
    draw(done, RESULTS.with_suffix(".png"))


if __name__ == "__main__":
    main()
