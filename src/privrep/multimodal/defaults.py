"""What is done if nobody says otherwise, decided from public numbers: users, budget, sizes."""

from __future__ import annotations

from torch import nn

from privrep.multimodal.towers import Layout, Towers
from privrep.multimodal.training import Mechanism, Settings

STEPS = 40
LOGIT_NOISE = 1.4  # standard deviation that noise may add to the logits of a row of length one
FASTEST = 20.0  # rate of a linear projection: beyond it steps overshoot


def settings_for(
    mechanism: Mechanism, model: Towers, layout: Layout, users: int, mu: float, temperature: float
) -> Settings:
    """Settings of the steps.

    A linear projection of unit features with free lengths (`cosine=False`) has a convex loss under "bank". T steps of
    rate r on everyone, clipped to C, leave noise of standard deviation 2 C r T / (users mu) in every weight: the rate is
    such that the logits of a row have noise of LOGIT_NOISE, or FASTEST if that is less. So a small budget goes a short
    way, and stops early.
    """
    convex = isinstance(model.image.module, nn.Linear) and not model.cosine and not model.text.size
    if mechanism == "bank" and convex:
        rate = min(FASTEST, LOGIT_NOISE * temperature * users * mu / (2 * STEPS))
        return Settings("bank", STEPS, None, clip=1.0, rate=rate, optimiser="sgd", average=0.5, page=10)
    batch = max(min(users // 4, 1024), min(users, 2))
    sampling = "fixed" if mechanism == "inside" else "poisson"
    return Settings(mechanism, 4 * STEPS, batch, sampling=sampling, clip=0.1 if mechanism == "batch" else 1.0, rate=1e-3)
