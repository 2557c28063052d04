"""The same training without privacy, for comparison. Nothing here is private."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from privrep.errors import InputError
from privrep.multimodal.training import Question, move_weights, start_state
from privrep.privacy.protocol import EVERYONE, Users
from privrep.typing import Singles

NO_CLIP = 2.0**8  # a bound that no gradient reaches


def train_openly(users: Users, question: Question, start: Singles, clipped: bool = False) -> Singles:
    """NOT PRIVATE: the steps of `training.train` on everyone, without noise, and clipped only if that is asked for."""
    settings, state = question.settings, start_state(start)
    question.check()
    if settings.choose_audience(users.facts.users) != EVERYONE:
        raise InputError("open training is of everyone in every step: leave batch at None.")
    for _ in range(settings.steps):
        step = question.step(state["weights"].astype(np.float32))
        bound = question.choose_bound(step)
        bound = bound if clipped else replace(bound, norm=NO_CLIP)
        total = users.sums(step, {"gradient": bound})["gradient"].exact_numbers
        state = move_weights(state, step.to_gradient(total / question.divisor), settings)
    return (state["average"] if settings.average else state["weights"]).astype(np.float32)
