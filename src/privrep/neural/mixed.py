"""Tell whether users are of two sorts: most agree on what classes mean, and many others have meanings of their own.

  alone      how many users do better without the shared scores, halfway through the rounds
                                              -> whether what is left buys them directions, in place of further rounds

Rounds find the classifier of those who agree. It tells the others nothing, and their own few rows are all they have;
with released directions they go much farther. One number is asked, so it costs next to nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from privrep.heads.gradient import labels_of
from privrep.heads.neural import View
from privrep.heads.softmax import Candidate, left_out_losses
from privrep.neural.plan import SharingPlan, signal
from privrep.nn.threads import one_thread, rows_of
from privrep.privacy.bounds import Bound, Contributions
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Vectors
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.run import Run

VERDICT = "mixed"  # the page with the verdict
ASKED_SHARE = 0.01  # of mu squared
MANY, FEW = 0.5, 0.1  # of users, for a signal of one and at least: fewer are not worth what directions take from others
WORTH_ASKING = 2.0  # signal of directions with half of what is left, below which nobody is asked
CLEARLY = 0.02  # nats by which a user's rows must be better off alone
EITHER = Bound(0.5, 1)  # one half or minus one half
WITH_SCORES = tuple(Candidate("shared", 0.3, penalty, scale) for penalty, scale in ((0.0, 1.0), (0.3, 1.0), (0.3, 2.0)))
WITHOUT = tuple(Candidate("alone", 0.3, penalty) for penalty in (0.01, 0.1))


@dataclass(frozen=True, eq=False)
class BetterAlone:
    """Say whether each user loses less by heads without the shared scores, on rows that heads have not seen."""

    view: View
    rows_per_user: int

    @property
    def spec(self) -> StepSpec:
        held = self.rows_per_user * (8 * self.rows_per_user + 8 * self.view.classes)
        return StepSpec(layout="padded", rows_per_user=self.rows_per_user, floats_per_user=held)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        with one_thread(), torch.no_grad():
            labels = labels_of(batch.y, self.view.classes)
            losses = left_out_losses((*WITH_SCORES, *WITHOUT), self.view(rows_of(batch.X)), labels).numpy()
        best, alone = losses[:, : len(WITH_SCORES)].min(axis=1), losses[:, len(WITH_SCORES) :].min(axis=1)
        return {"better": Vectors(np.where(alone < best - CLEARLY, 0.5, -0.5)[:, None])}


def directions_signal(plan: SharingPlan, users: int, mu_squared: float) -> float:
    """Return the signal of directions with this much of mu squared; 0 where the plan has none."""
    if plan.otherwise is None or mu_squared <= 0:
        return 0.0
    return signal(users, math.sqrt(2 * mu_squared), 1, plan.otherwise.parameters)


def are_mixed(run: Run, step: BetterAlone, mu_squared: float, half: float) -> bool:
    """Return whether so many users do better alone that directions are worth what rounds lose to them.

    The verdict is posted. A run that goes on elsewhere reads it: numbers round in another way there, and could flip it.

    Args:
        run: whose users are asked, in one page.
        step: what they compute.
        mu_squared: what the page spends.
        half: the signal that directions have with one half of what is left.
    """
    released = run.release("alone", step, {"better": Query(EITHER, mu_squared)})["better"]
    users = run.users.facts.users
    part = 0.5 + float(released.value[0]) / users
    if VERDICT not in run.billboard:
        run.derive(VERDICT, {}, mixed=bool(part > max(MANY / math.sqrt(half), FEW) + released.sigma / users))
    return bool(run.billboard[VERDICT].facts["derived"]["mixed"])
