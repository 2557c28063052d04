"""Answers of a node: one pass over its own users, clipped there, with noise of its own if that was agreed on.

Formal guarantee:
* An answer is what the node's engine makes of its users, each clipped by itself.
* Whether a node answers does not depend on what its users hold.
* A step that fails on made-up rows is refused before any row is looked at.
* A user on whose rows another step fails counts as one who sends zeros (`IsolatedUsers`).
* So a user changes a sum by no more than the bound says, even if others share the node.
* How long an answer takes may depend on rows; see docs/federated.md.
"""

from __future__ import annotations

import numpy as np

from privrep.errors import InputError
from privrep.federated.wire.messages import Answer, Question
from privrep.privacy.bounds import Bound, LossBound
from privrep.privacy.calibration import Query
from privrep.privacy.protocol import EVERYONE, Audience, Users
from privrep.privacy.run import Run
from privrep.privacy.sampling import ListedSample


def answer(question: Question, users: Users, own: Run | None) -> Answer:
    """Return the sums that a question asks for.

    A trusted server gets exact sums. A node with a ledger of its own gives noisy sums, charged to it. A page that the
    node has answered is answered again with the same numbers.

    Args:
        question: the step, the bounds and whom to ask.
        users: the node's users.
        own: the run of the node's own noise; None where the server is trusted.
    """
    if (own is None) != (question.page is None):
        mine = "noise of its own" if own is not None else "none"
        raise InputError(f"this node was told to add {mine}, and is asked for another kind of sums.")
    if own is not None and question.page is not None:
        shares = question.mu_squared
        if shares is None or set(shares) != set(question.bounds) or question.chosen is not None:
            raise InputError("a question to a node with noise of its own says what each statistic spends.")
        queries = {key: Query(_require_norm_bound(bound), shares[key]) for key, bound in question.bounds.items()}
        released = own.release(question.page, question.step, queries, question.group or EVERYONE)
        return Answer(question.number, users.facts.users, {key: one.value for key, one in released.items()})
    if question.group is not None and question.chosen is not None:
        raise InputError("a sample is of all users. Ask a group or a sample, not both.")
    among: Audience = question.group or EVERYONE
    if question.chosen is not None:
        among = ListedSample(question.rate, b"", question.chosen)
    sums = users.sums(question.step, question.bounds, among)
    return Answer(
        question.number, users.facts.users, {key: np.asarray(one.total, np.int64) for key, one in sums.items()}
    )


def _require_norm_bound(bound: Bound | LossBound) -> Bound:
    """Return a bound of norms; raise InputError for a bound of losses, which a trusted server alone can ask for."""
    if not isinstance(bound, Bound):
        raise InputError("losses are for a choice, which a trusted server alone can make.")
    return bound
