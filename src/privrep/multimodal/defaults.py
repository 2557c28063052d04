"""What is done if nobody says otherwise, decided from public numbers: users, budget, sizes."""

from __future__ import annotations

from torch import nn

from privrep.multimodal.centre import Centred
from privrep.multimodal.towers import Towers
from privrep.multimodal.training import ClipSettings, Mechanism, Sampler

STEPS = 40
LOGIT_NOISE = 1.1  # standard deviation that noise may add to the logits of a row of length one, from a start of zeros
CAREFUL = 0.35  # the same, from a start that knows something
CLIP = 0.2  # far below most gradients: those of rows that are told apart well count, too
FASTEST = 200.0  # rate with that clip: beyond it steps overshoot


def settings_for(mechanism: Mechanism, model: Towers, users: int, mu: float, temperature: float) -> ClipSettings:
    """Settings of the steps.

    A linear projection of unit features with free lengths (`cosine=False`) has a convex loss under "bank". T steps of
    rate r on everyone, clipped to C, leave noise of standard deviation 2 C r T / (users mu) in every weight: the rate
    is such that the logits of a row have noise of LOGIT_NOISE, or FASTEST if that is less. So a small budget goes a
    short way, and stops early; and less noise is let into weights that are good for something as they are.
    """
    convex = linear(model.image.module) and not model.cosine and not model.text.size
    if mechanism == "bank" and convex:
        noise = CAREFUL if model.image.weights().any() else LOGIT_NOISE
        rate = min(FASTEST, noise * temperature * users * mu / (2 * CLIP * STEPS))
        return ClipSettings("bank", STEPS, None, clip=CLIP, rate=rate, optimiser="sgd", average=0.5, page=10)
    batch = max(min(users // 4, 1024), min(users, 2))
    sampling: Sampler = "fixed" if mechanism == "inside" else "poisson"
    return ClipSettings(
        mechanism, 4 * STEPS, batch, sampling=sampling, clip=0.1 if mechanism == "batch" else 1.0, rate=1e-3
    )


def linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer on features, centred or not."""
    if isinstance(module, nn.Sequential):
        return len(module) == 2 and isinstance(module[0], Centred) and isinstance(module[1], nn.Linear)
    return isinstance(module, nn.Linear)
