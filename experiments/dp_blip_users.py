"""How many users it takes until what they say is as loud as the noise, for a shift and for a whole decoder.

    python -m experiments.dp_blip_users [--splits dogs plain] [--public 2000] [--users 400]

Users' gradients are clipped far below their length, so that each is a direction. Let rho be the length of the mean
direction, p the number of weights, n the number of users and mu the budget's. Whatever the number of steps, the sum of
all that is released has a signal of n rho and noise of 2 sqrt(p) / mu, in units of the clip. Signal-to-noise is thus
n rho mu / (2 sqrt(p)), and it is one at n = 2 sqrt(p) / (rho mu). Here rho is measured at the start, on tested
photographs, which are of the private ones' kind: for the shift, the cross-attention, and all weights.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor

from experiments.dp_blip_captioner import PAD, loss_of
from experiments.dp_blip_captions import Setting, setting_of
from experiments.dp_blip_data import flickr_seen
from experiments.dp_clip_data import Sources
from privrep.multimodal.words import word_bank
from privrep.privacy.ledger import Budget

EPSILONS = (1.0, 3.0, 10.0)


def mean_length(directions: Callable[[int], Tensor], users: int) -> tuple[float, int]:
    """Return the length of users' mean direction, without the share that chance has in it, and how many weights."""
    total = torch.zeros(1)
    for user in range(users):
        one = directions(user)
        total = total + one / one.norm()
    square = (float(total.norm()) ** 2 - users) / (users * (users - 1))
    return math.sqrt(max(square, 0.0)), total.numel()


def lengths(setting: Setting, users: int) -> dict[str, tuple[float, int]]:
    """Return the mean direction's length and the number of weights of each part that may learn."""
    model, lessons, part = setting.captioner, setting.lessons(setting.parts.tested), setting.parts.tested
    numbers = torch.from_numpy(setting.lens.numbers(part.places))
    along, vectors = setting.shift().directions, torch.from_numpy(word_bank(model).vectors)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad and "word_embeddings" not in name}
    crossing = [p for name, p in named.items() if "crossattention" in name]

    def captions(user: int) -> tuple[Tensor, Tensor]:
        ids = lessons.ids[lessons.photograph == user]
        return lessons.seen[[user]].expand(len(ids), -1, -1), ids

    def of(parameters: list[Tensor]) -> Callable[[int], Tensor]:
        def one(user: int) -> Tensor:
            found = torch.autograd.grad(loss_of(model, *captions(user)), parameters, allow_unused=True)
            return torch.cat([part.flatten() for part in found if part is not None])

        return one

    def of_shift(user: int) -> Tensor:
        seen, ids = captions(user)
        with torch.no_grad():
            chances = (
                model(input_ids=ids, attention_mask=(ids != PAD).long(), encoder_hidden_states=seen)
                .logits[:, :-1]
                .softmax(-1)
            )
            chances.scatter_add_(2, ids[:, 1:, None], -torch.ones(*ids[:, 1:].shape, 1))
            slope = chances[ids[:, 1:] != PAD].mean(0) @ vectors @ along
        return torch.outer(slope, numbers[user]).flatten()

    parts = {"shift": of_shift, "cross-attention": of(crossing), "all weights": of(list(named.values()))}
    return {name: mean_length(one, users) for name, one in parts.items()}


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", nargs="+", choices=("plain", "dogs"), default=["dogs", "plain"])
    parser.add_argument("--public", type=int, default=2_000)
    parser.add_argument("--users", type=int, default=400, help="photographs to measure on")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    seen = flickr_seen(Sources())
    for name in options.splits:
        setting = setting_of(seen, name, options.public, None)
        users = len(setting.parts.private)
        for part, (rho, weights) in lengths(setting, options.users).items():
            mus = [Budget(epsilon, 1 / (2 * users)).mu for epsilon in EPSILONS]
            needed = [2 * math.sqrt(weights) / (max(rho, 1e-9) * mu) for mu in mus]
            words = ", ".join(
                f"epsilon {epsilon:g}: {users / n:.2f} here, 1 at {n:,.0f} users"
                for epsilon, n in zip(EPSILONS, needed, strict=True)
            )
            print(f"{name}, {part}: {weights:,} weights, rho {rho:.3f}; signal-to-noise {words}", flush=True)


if __name__ == "__main__":
    main()
