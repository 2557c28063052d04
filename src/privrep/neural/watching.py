"""An estimate of the training loss for the operator's screen. NOT PRIVATE, and written nowhere.

It is computed beside the run, from rows that the operator has anyway, and nothing of it goes back: a watched run
releases and spends what one that is not watched does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from privrep.data.table import UserTable
from privrep.heads.gradient import cross_entropy, head_scores, labels_of, one_thread, own_copy, rows_of
from privrep.neural.gradient_step import GradientStep
from privrep.neural.local_sgd import LocalSgdStep
from privrep.neural.rounds import MeasuredStep
from privrep.privacy.protocol import Step
from privrep.users.batching import finite_batch, padded_batches

USERS = 64  # the first of the table

OnLoss = Callable[[str, float], None]


def report_loss(on_loss: OnLoss, rows: UserTable, page: str, step: Step | None) -> None:
    """Tell `on_loss`, of a round that is over, the mean loss of a few users as the round began.

    Args:
        on_loss: hears the page and the loss.
        rows: of the users, as steps get them.
        page: of the round. Pages that are not of rounds are passed over.
        step: what users were asked in it.
    """
    inner = step.step if isinstance(step, MeasuredStep) else step
    if isinstance(inner, GradientStep | LocalSgdStep):
        on_loss(page, training_loss(inner, rows))


def training_loss(step: GradientStep | LocalSgdStep, table: UserTable) -> float:
    """Mean cross-entropy of the first users' rows by heads fitted to those very rows, at the step's weights."""
    some = min(USERS, table.n_users)
    batch = finite_batch(next(padded_batches([table.users(0, some)], step.rows_per_user, some)))
    split, labels = step.split, labels_of(batch.y, step.split.classes)
    with one_thread(), torch.no_grad():
        Z = own_copy(split.representation)(torch.tensor(step.weights), rows_of(batch.X).flatten(0, 1))
        Z = Z.reshape(*labels.shape, -1)
        heads = step.head_fit.fit(torch.tensor(step.head_start), Z, labels, split.head)
        return float(cross_entropy(head_scores(heads, Z, split.head), labels).mean())
