"""DP-CLIP on Fashion-MNIST and CIFAR-10: zero-shot accuracy against epsilon, three mechanisms, paper 002's Table 1.

    python -m experiments.dp_clip [--datasets cifar10 fashion-mnist] [--seeds 3] [--only bank] [--choose] [--draw-only]

Projections over cached features: EfficientNet-Lite0's of images (1,280 numbers, less their released mean), MiniLM's of
prompts in the 16 directions in which the prompts differ most. The unit of privacy is a pair (an image and the prompt of
its class), replace-one-user, delta 1/(2n). An image is given the class whose prompts, averaged, are nearest.

  bank                 contrast with the public prompts, everyone in every step, each pair clipped alone
  batch                Algorithm 1 of the paper: the CLIP loss of a batch, its gradient clipped as one, at sigma/2
  batch of 1,024       the same with batches as large as those of inside
  inside               private negatives: the sigmoid loss of a batch, the gradient of every similarity clipped alone
  bank, no noise       the same steps as bank at epsilon 1, clipped, without noise: the same training without privacy
  bank, no privacy     neither clipped nor noisy, its rate chosen by itself

Bank, batch and their twin without privacy start from a projection of zeros; inside needs directions and starts from a
random one. Rates, steps and batches of batch, inside and the open training were chosen once by `--choose` (of batch's
grid the likelier half was run), at epsilon 1, on 10,000 images held out of CIFAR-10's training set, at no charge: in
their favour. Bank's are the defaults. Noise is simulated from seeds, reproducible and not private; seed 0 is for
choosing, 1 and up are reported.

The paper's own figures are of another starting point: CLIP's ViT-L/14, trained on 400 million pairs of images and
texts, which is right on most of these images before it sees one. Ours has seen ImageNet's images and no caption of
them. The paper charges its noise as if a batch's gradient moved by c, and not by 2c, when a pair is replaced.

Writes results/dp_clip.csv, one row a run, and dp_clip.png. A row that stands is not run again; after a change of the
algorithms delete the csv.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import cast, get_args

import numpy as np
import torch
from torch import nn

from experiments.dp_clip_data import DATASETS, Floats, Labelled, Sources, labelled_data
from experiments.dp_clip_picture import draw
from experiments.figure1 import RESULTS
from experiments.membership import membership, pair_scores
from experiments.multimodal_references import train_openly
from privrep.estimators.clip import DPClip
from privrep.multimodal.encoders import Projection, blank
from privrep.multimodal.evaluation import linear_probe, zero_shot
from privrep.multimodal.pairs import Pairs, captions_by_class, labelled
from privrep.multimodal.towers import Centred, TextSpace, layout_of, make_towers
from privrep.multimodal.training import ClipSettings, Mechanism, Question, choose_settings
from privrep.privacy.ledger import Budget
from privrep.typing import Singles
from privrep.users.memory import InMemoryUsers

SEED = 20_261_119
EPSILONS = (0.25, 0.5, 1.0, 3.0, 10.0)
OPEN, SILENT, LARGE = "bank, no privacy", "bank, no noise", "batch of 1,024"
METHODS = (*get_args(Mechanism), LARGE, SILENT, OPEN)
DIM, TEMPERATURE, CENTRE = 16, 0.1, 0.03
CHOSEN = {  # by --choose
    "batch": ClipSettings("batch", 10_000, 32, clip=0.1, rate=0.0003, optimiser="adam", page=1000),
    LARGE: ClipSettings("batch", 200, 1024, clip=0.1, rate=0.001, optimiser="adam", page=50),
    "inside": ClipSettings("inside", 100, 1024, "fixed", clip=1.0, rate=0.01, optimiser="adam", average=0.5, page=25),
    OPEN: ClipSettings("bank", 40, None, rate=8.0, optimiser="sgd", average=0.5),
}
GRIDS: dict[str, dict[str, tuple[float | int, ...]]] = {
    "batch": {"rate": (0.0001, 0.0003, 0.001, 0.003), "steps": (1000, 4000, 10_000), "batch": (16, 32, 128)},
    LARGE: {"rate": (0.001, 0.003, 0.01, 0.03), "steps": (20, 200)},
    "inside": {"rate": (0.001, 0.003, 0.01, 0.03), "steps": (40, 100)},
    OPEN: {"rate": (2.0, 4.0, 8.0)},
}


@dataclass(frozen=True)
class Result:
    dataset: str
    method: str
    epsilon: float
    seed: int
    accuracy: float
    probe: float
    advantage: float  # of a membership attack by the loss, on half of the data; not more than epsilon allows
    seconds: float


def main() -> None:
    args = _arguments()
    path = RESULTS / "dp_clip.csv"
    if args.choose:
        for method in args.only or CHOSEN:
            _choose(method, labelled_data("cifar10", args.sources).to_choose_by())
        return
    results = _read(path)
    if not args.draw_only:
        for dataset in args.datasets:
            for result in _missing(dataset, args, results):
                results.append(result)
                _write(path, results)
                print(f"{dataset} {result.method} epsilon {result.epsilon:g}: {result.accuracy:.4f}", flush=True)
    draw(results, RESULTS / "dp_clip.png")
    print(_table(results))


def _missing(dataset: str, args: argparse.Namespace, results: list[Result]) -> Iterator[Result]:
    have = {(r.dataset, r.method, r.epsilon, r.seed) for r in results}
    wanted = [
        (method, epsilon, seed)
        for seed in range(1, args.seeds + 1)
        for method in args.only or METHODS
        for epsilon in ((np.inf,) if method in (OPEN, SILENT) else args.epsilons)
        if (dataset, method, epsilon, seed) not in have and (seed == 1 or epsilon < np.inf)
    ]
    if wanted:
        data = labelled_data(dataset, args.sources)
        yield from (_run(data, dataset, method, epsilon, seed) for method, epsilon, seed in wanted)


def _run(data: Labelled, dataset: str, method: str, epsilon: float, seed: int) -> Result:
    began = time.perf_counter()
    model = fitted(data, method, epsilon, seed, CHOSEN.get(method))
    seconds = time.perf_counter() - began
    images, prompts = model.images(data.test), model.texts(data.prompts)
    accuracy = zero_shot(images, prompts, data.class_of_prompt, data.test_labels).accuracy
    some = np.random.default_rng([SEED, seed]).permutation(len(data.train))[: len(data.test)]
    members = model.images(data.train[some])
    probe = linear_probe(members, data.labels[some], images, data.test_labels)
    first = np.searchsorted(data.class_of_prompt, np.arange(data.class_of_prompt.max() + 1))
    scores = [
        pair_scores(images_, prompts[first[labels]], prompts, TEMPERATURE)
        for images_, labels in ((members, data.labels[some]), (images, data.test_labels))
    ]
    attack = membership(scores[0], scores[1], min(epsilon, 1e3), 1 / (2 * len(data.train)))
    return Result(dataset, method, epsilon, seed, accuracy, probe, attack.advantage, seconds)


@dataclass(frozen=True, eq=False)
class Opened:
    """Trained without privacy."""

    question: Question
    weights: Singles

    def images(self, rows: Floats) -> Floats:
        return self.question.towers.embed_images(self.weights, rows)

    def texts(self, rows: Floats) -> Floats:
        return self.question.towers.embed_texts(self.weights, rows)


def fitted(data: Labelled, method: str, epsilon: float, seed: int, settings: ClipSettings | None) -> DPClip | Opened:
    """A trained model, by one of the methods."""
    torch.set_num_threads(2)
    pairs = labelled(data.train, data.labels, data.prompts, captions_by_class(data.class_of_prompt))
    space, numbers = TextSpace(data.prompts, DIM), pairs.image_numbers
    if method in (OPEN, SILENT):
        return _opened(pairs, blank(numbers, DIM), space, settings)
    inside = method == "inside"
    model = DPClip(
        Projection(numbers, DIM, seed=1) if inside else blank(numbers, DIM),
        nn.Sequential(space, Projection(DIM, DIM, seed=2)) if inside else space,
        epsilon=epsilon,
        mechanism=cast(Mechanism, "batch" if method == LARGE else method),
        settings=settings,
        temperature=TEMPERATURE,
        cosine=inside,
        centre=CENTRE,
        random_state=int(np.random.default_rng([SEED, seed]).integers(2**31)),
    )
    return model.fit(pairs)


def _opened(pairs: Pairs, projection: nn.Module, space: nn.Module, settings: ClipSettings | None) -> Opened:
    """Without privacy: the mean of features as it is, no noise, and no clipping if there are settings for that."""
    lengths = np.linalg.norm(pairs.table.X, axis=1, keepdims=True)
    mean = (pairs.table.X / np.maximum(lengths, 1e-12)).mean(axis=0, dtype=np.float64).astype(np.float32)
    layout, users = layout_of(pairs), InMemoryUsers(pairs.table)
    image = nn.Sequential(Centred(mean), projection)
    model = make_towers(image, space, layout.image_numbers, layout.bank.shape[1], cosine=False)
    clipped = settings is None
    mu = Budget(1.0, 1 / (2 * users.facts.users)).mu * math.sqrt(1 - CENTRE)
    settings = settings or choose_settings("bank", model, users.facts.users, mu, TEMPERATURE)
    question = Question(model, layout, settings, TEMPERATURE, 1, users.facts.users)
    return Opened(question, train_openly(users, question, model.weights(TEMPERATURE), clipped))


def _choose(method: str, data: Labelled) -> None:
    """Every setting of the grid once, on images held out of the training set. Not private, and not reported."""
    for values in product(*GRIDS[method].values()):
        settings = replace(CHOSEN[method], **dict(zip(GRIDS[method], values, strict=True)))
        model = fitted(data, method, 1.0, 0, settings)
        found = zero_shot(model.images(data.test), model.texts(data.prompts), data.class_of_prompt, data.test_labels)
        print(method, dict(zip(GRIDS[method], values, strict=True)), f"{found.accuracy:.4f}", flush=True)


def _table(results: list[Result]) -> str:
    lines = ["dataset        method             epsilon  seeds  zero-shot  worst   linear probe  membership advantage"]
    for dataset, method, epsilon in sorted({(r.dataset, r.method, r.epsilon) for r in results}):
        some = [r for r in results if (r.dataset, r.method, r.epsilon) == (dataset, method, epsilon)]
        accuracies = [r.accuracy for r in some]
        means = [float(np.mean([getattr(r, key) for r in some])) for key in ("accuracy", "probe", "advantage")]
        lines.append(
            f"{dataset:14s} {method:18s} {epsilon:7g}  {len(some):5d}  {means[0]:9.4f}  {min(accuracies):.4f}  "
            f"{means[1]:12.4f}  {means[2]:10.4f}"
        )
    return "\n".join(lines)


def _read(path: Path) -> list[Result]:
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [
            Result(
                row["dataset"],
                row["method"],
                float(row["epsilon"]),
                int(row["seed"]),
                *(float(row[key]) for key in ("accuracy", "probe", "advantage", "seconds")),
            )
            for row in csv.DictReader(file)
        ]


def _write(path: Path, results: list[Result]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in fields(Result)])
        writer.writerows(astuple(result) for result in results)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="DP-CLIP: zero-shot accuracy against epsilon")
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=list(DATASETS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument("--seeds", type=int, default=3, help="seeds 1 to this one are reported")
    parser.add_argument("--only", nargs="+", choices=METHODS, help="these methods")
    parser.add_argument("--choose", action="store_true", help="run the grids on held-out images, and nothing else")
    parser.add_argument("--draw-only", action="store_true")
    parser.add_argument("--cache", type=Path, default=Sources().cache, help="where features are kept")
    args = parser.parse_args()
    args.sources = Sources(cache=args.cache)
    return args


if __name__ == "__main__":
    main()
