"""An estimate of the training loss for the operator's screen. NOT PRIVATE, and written nowhere.

It is computed beside the run, from rows that the operator has anyway, and nothing of it goes back: a watched run
releases and spends what one that is not watched does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from privrep.data.table import UserTable
from privrep.heads.gradient import cross_entropy, head_scores, labels_of, one_thread, own_copy, rows_of
from privrep.neural.gradient_step import GradientStep
from privrep.neural.local_sgd import LocalSgdStep
from privrep.privacy.billboard import Release
from privrep.privacy.groups import Group
from privrep.privacy.release import Query, Run
from privrep.privacy.sampling import Sampling
from privrep.users.batching import Call, calls
from privrep.users.summing import LocalStep, SlotStep

USERS = 64  # the first of the table

OnLoss = Callable[[str, float], None]


@dataclass(frozen=True)
class WatchedRun(Run):
    """A run that tells `on_loss`, of each round that is over, the mean loss of a few users as the round began."""

    on_loss: OnLoss = lambda page, loss: None
    rows: UserTable | None = field(default=None, repr=False)

    def release(
        self,
        page: str,
        step: LocalStep | SlotStep,
        queries: Mapping[str, Query],
        group: Group | None = None,
        sampling: Sampling | None = None,
    ) -> dict[str, Release]:
        released = super().release(page, step, queries, group, sampling)
        inner = getattr(step, "step", step)  # of a step that also measures lengths
        if self.rows is not None and isinstance(inner, GradientStep | LocalSgdStep):
            self.on_loss(page, training_loss(inner, self.rows))
        return released


def training_loss(step: GradientStep | LocalSgdStep, table: UserTable) -> float:
    """Mean cross-entropy of the first users' rows by heads fitted to those very rows, at the step's weights."""
    some = min(USERS, table.n_users)
    call: Call = next(calls([table.users(0, some)], step.slots, some)).finite()
    split, labels = step.split, labels_of(call.y, step.split.classes)
    with one_thread(), torch.no_grad():
        Z = own_copy(split.representation)(torch.tensor(step.weights), rows_of(call.X).flatten(0, 1))
        Z = Z.reshape(*labels.shape, -1)
        heads = step.head_fit.fit(torch.tensor(step.head_start), Z, labels, split.head)
        return float(cross_entropy(head_scores(heads, Z, split.head), labels).mean())
