"""One training step of DP-CLIP over cached features against the same step without privacy, as a ratio within one run.

    python -m benchmarks.multimodal [--batch 1024] [--steps 100]

50,000 pairs of 1,280 image features and a caption of a public bank of 160 texts, a projection to 64 numbers. Without
privacy: PyTorch draws a batch, differentiates the mean loss against the bank and takes a step of Adam. With it: the
same loss and optimiser by `Run.iterate`: charge, secret sample, clipping pair by pair, exact noise from a cryptographic
source for 81,920 numbers, step, page. All of a walk is divided by its steps. CPU seconds are compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.measure import measure_cpu, print_ratios
from privrep.multimodal.encoders import Projection
from privrep.multimodal.pairs import Pairs, labelled
from privrep.multimodal.towers import TextSpace, layout_of, make_towers, normalise_rows
from privrep.multimodal.training import ClipSettings, Mechanism, Question, plan_step_noise, train
from privrep.privacy.billboard import Billboard
from privrep.privacy.ledger import Budget, Ledger
from privrep.privacy.noise import secure_noise
from privrep.privacy.run import Run
from privrep.users.memory import InMemoryUsers

USERS, NUMBERS, TEXTS, DIM, CLASSES = 50_000, 1280, 160, 64, 10
TEMPERATURE = 0.1


def made(seed: int = 0) -> Pairs:
    """Features of images around their classes, and texts around theirs."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, USERS)
    images = rng.normal(size=(CLASSES, NUMBERS))[labels] + 2 * rng.normal(size=(USERS, NUMBERS))
    images /= np.linalg.norm(images, axis=1, keepdims=True)
    texts = np.repeat(rng.normal(size=(CLASSES, 384)), TEXTS // CLASSES, axis=0) + 0.3 * rng.normal(size=(TEXTS, 384))
    rows = np.arange(TEXTS).reshape(CLASSES, -1).tolist()
    return labelled(images.astype(np.float32), labels, texts.astype(np.float32), rows)


def open_steps(pairs: Pairs, batch: int, steps: int, contrast: bool = False) -> Callable[[], None]:
    """The step without privacy, as anyone would write it; `contrast` pairs with each other in place of the bank."""
    rows, targets = torch.from_numpy(pairs.table.X), torch.from_numpy(pairs.table.y.astype(np.int64))
    image, space = Projection(NUMBERS, DIM, 1), TextSpace(pairs.bank, DIM)
    optimiser = torch.optim.Adam(image.parameters(), lr=1e-3, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(1)

    def run() -> None:
        for _ in range(steps):
            chosen = torch.randperm(USERS, generator=generator)[:batch]
            bank = normalise_rows(space(torch.from_numpy(pairs.bank)))
            texts = bank[targets[chosen]] if contrast else bank
            logits = normalise_rows(image(rows[chosen])) @ texts.T / TEMPERATURE
            if contrast:
                own = torch.arange(batch)
                loss = (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2
            else:
                loss = cross_entropy(logits, targets[chosen])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

    return run


def private_steps(pairs: Pairs, batch: int, steps: int, mechanism: Mechanism) -> Callable[[], None]:
    """The same by a walk, with a new ledger and billboard each time, as in a run without a folder."""
    settings = ClipSettings(mechanism, steps, batch, "fixed", rate=1e-3, page=steps)
    layout, budget, users = layout_of(pairs), Budget(1.0, 1e-5), InMemoryUsers(pairs.table)
    text: nn.Module = TextSpace(pairs.bank, DIM)
    model = make_towers(Projection(NUMBERS, DIM, 1), text, NUMBERS, pairs.bank.shape[1])
    question = Question(model, layout, settings, TEMPERATURE, 1, USERS)
    multiplier = plan_step_noise(Run(users, Ledger(budget), Billboard(), secure_noise), settings)

    def run() -> None:
        train(Run(users, Ledger(budget), Billboard(), secure_noise), question, model.weights(TEMPERATURE), multiplier)

    return run


def measure(pairs: Pairs, batch: int, steps: int, repeats: int) -> dict[str, float]:
    """Return the fewest CPU seconds of a step in each way, in turns.

    PyTorch has one thread. With two it waits by spinning where other work takes a core, and CPU seconds would count
    that. Engines have as many threads as they like.
    """
    ways = {
        "public bank, open": open_steps(pairs, batch, steps),
        "public bank": private_steps(pairs, batch, steps, "bank"),
        "pairs with each other, open": open_steps(pairs, batch, steps, contrast=True),
        "pairs with each other": private_steps(pairs, batch, steps, "batch"),
    }
    best, threads = dict.fromkeys(ways, float("inf")), torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(repeats):
        for name, run in ways.items():
            best[name] = min(best[name], measure_cpu(run, 1) / steps)
    torch.set_num_threads(threads)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    best = measure(made(), args.batch, args.steps, args.repeats)
    for name in ("public bank", "pairs with each other"):
        print_ratios({each: best[each] for each in (f"{name}, open", name)}, f"{name}, open")


if __name__ == "__main__":
    main()
