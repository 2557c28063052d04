"""The default of DPClip against a practitioner's logistic regression by noisy gradients, on the same features.

    python -m experiments.dp_clip_reference [--datasets cifar10 fashion-mnist] [--files made.npz] [--pairs 20000]
        [--epsilons 0.25 1 3] [--seeds 1] [--first 101]

The reference descends by gradients of everyone, each pair clipped to 1, with or without momentum, at the same epsilon
and delta. Much is in its favour: its rate and momentum are tuned on the test images themselves, at no charge, and the
mean that is taken off its features is exact and free. DPClip has its defaults, chosen from public numbers and charged
releases. A file of `--files` has arrays train, labels, test, test_labels, prompts and class_of_prompt. Noise of both is
simulated from seeds, reproducible and not private. The last line of a data set has no privacy: the reference without
noise and clipping.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from experiments.dp_clip_data import DATASETS, Floats, Labelled, Sources, labelled_data
from privrep.estimators.clip import DPClip
from privrep.multimodal.encoders import blank
from privrep.multimodal.evaluation import zero_shot
from privrep.multimodal.pairs import captions_by_class, labelled
from privrep.multimodal.towers import TextSpace
from privrep.privacy.ledger import Budget

CENTRE = 0.03
STEPS, CLIP = 40, 1.0
RATES = (8.0, 16.0, 32.0, 64.0, 128.0, 256.0)  # of a step at rest: momentum divides them
MOMENTA = (0.0, 0.9)


@dataclass(frozen=True)
class Tuned:
    """The best of the reference's settings on the test images."""

    accuracy: float
    rate: float
    momentum: float


def default_accuracy(data: Labelled, epsilon: float, seed: int) -> float:
    """Return the zero-shot accuracy of DPClip as the documentation has it."""
    pairs = labelled(data.train, data.labels, data.prompts, captions_by_class(data.class_of_prompt))
    space = TextSpace(data.prompts)
    image = blank(pairs.image_numbers, space.out_features)
    model = DPClip(image, space, epsilon=epsilon, cosine=False, centre=CENTRE, random_state=seed).fit(pairs)
    found = zero_shot(model.images(data.test), model.texts(data.prompts), data.class_of_prompt, data.test_labels)
    return found.accuracy


def reference_accuracy(data: Labelled, epsilon: float, seeds: list[int]) -> Tuned:
    """Return the reference with the rate and momentum whose mean accuracy on the test images is best."""
    train, test = _centred(data)
    found = [
        Tuned(
            float(np.mean([_descended(train, test, data, epsilon, rate, momentum, seed) for seed in seeds])),
            rate,
            momentum,
        )
        for rate, momentum in product(RATES, MOMENTA)
    ]
    return max(found, key=lambda tuned: tuned.accuracy)


def _centred(data: Labelled) -> tuple[Floats, Floats]:
    train, test = _unit(data.train), _unit(data.test)
    mean = train.mean(axis=0, dtype=np.float64).astype(np.float32)
    return _unit(train - mean), _unit(test - mean)


def _unit(rows: Floats) -> Floats:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.float32(1e-12))


def _descended(
    train: Floats, test: Floats, data: Labelled, epsilon: float, rate: float, momentum: float, seed: int
) -> float:
    """Return the accuracy on the test rows after all steps.

    Args:
        train: (pairs, features), of length one.
        test: (pairs, features), of length one.
        data: has the classes of both.
        epsilon: infinite for neither noise nor clipping.
        rate: of a step at rest.
        momentum: how much of a step the next one repeats.
        seed: of the noise.
    """
    count, classes = len(train), int(data.class_of_prompt.max()) + 1
    rng, private = np.random.default_rng([7, seed]), math.isfinite(epsilon)
    sigma = 2 * CLIP * math.sqrt(STEPS) / Budget(epsilon, 1 / (2 * count)).mu if private else 0.0
    weights, pace = np.zeros((classes, train.shape[1]), np.float32), np.zeros((classes, train.shape[1]))
    for _ in range(STEPS):
        slopes = _softmax(train @ weights.T)
        slopes[np.arange(count), data.labels] -= 1
        if private:
            slopes *= np.minimum(1, CLIP / np.maximum(np.linalg.norm(slopes, axis=1, keepdims=True), 1e-12))
        gradient = (slopes.T @ train + sigma * rng.normal(size=weights.shape)) / count
        pace = momentum * pace + gradient
        weights = (weights - rate * (1 - momentum) * pace).astype(np.float32)
    return float(((test @ weights.T).argmax(axis=1) == data.test_labels).mean())


def _softmax(scores: Floats) -> Floats:
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=1, keepdims=True)
    return scores


def _subset(data: Labelled, pairs: int | None, seed: int) -> Labelled:
    """Return the data with so many training pairs, drawn from a seed."""
    if pairs is None or pairs >= len(data.train):
        return data
    kept = np.random.default_rng([11, seed]).permutation(len(data.train))[:pairs]
    return replace(data, train=data.train[kept], labels=data.labels[kept])


def _from_file(path: Path) -> Labelled:
    with np.load(path) as file:
        names = ("train", "labels", "test", "test_labels", "prompts", "class_of_prompt")
        return Labelled(*(file[name] for name in names))


def _sets(args: argparse.Namespace) -> Iterator[tuple[str, Labelled]]:
    for name in args.datasets:
        yield name, labelled_data(name, Sources(cache=args.cache))
    for path in args.files:
        yield path.stem, _from_file(path)


def main() -> None:
    args = _arguments()
    seeds = list(range(args.first, args.first + args.seeds))
    print(
        "dataset         pairs  epsilon  DPClip  reference  difference  rate and momentum of the reference", flush=True
    )
    for name, whole in _sets(args):
        data = _subset(whole, args.pairs, args.first)
        for epsilon in args.epsilons:
            ours = float(np.mean([default_accuracy(data, epsilon, seed) for seed in seeds]))
            best = Tuned(math.nan, math.nan, math.nan) if args.ours else reference_accuracy(data, epsilon, seeds)
            print(
                f"{name:14s} {len(data.train):6,}  {epsilon:7g}  {ours:.4f}  {best.accuracy:9.4f}  "
                f"{ours - best.accuracy:+10.4f}  {best.rate:g} and {best.momentum:g}",
                flush=True,
            )
        if args.open:
            best = reference_accuracy(data, math.inf, seeds[:1])
            print(f"{name:14s} {len(data.train):6,}  no privacy       {best.accuracy:9.4f}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="DPClip against a tuned noisy logistic regression")
    parser.add_argument("--datasets", nargs="*", choices=DATASETS, default=[])
    parser.add_argument("--files", nargs="*", type=Path, default=[], help="archives of features and prompts")
    parser.add_argument("--pairs", type=int, help="so many training pairs; all if you do not say")
    parser.add_argument("--epsilons", nargs="+", type=float, default=[0.25, 1.0, 3.0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=101, help="the first seed")
    parser.add_argument("--ours", action="store_true", help="DPClip alone")
    parser.add_argument("--open", action="store_true", help="also without privacy")
    parser.add_argument("--cache", type=Path, default=Sources().cache, help="where features are kept")
    return parser.parse_args()


if __name__ == "__main__":
    main()
