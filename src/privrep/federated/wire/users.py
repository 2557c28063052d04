"""The engine of users who live on Flower nodes: ask every node for one sum, check what comes, add it up.

Formal guarantee, with honest nodes: `FlowerUsers.sums` is what `privacy.bounds` promises of a sum over all
users behind the answers. Two neighbouring populations differ on one node, whose sum is within the error of its own
blocks; adding up the nodes' sums, in the order of their names, adds an error of users * nodes * C * 2^-54, at most
2^-14 C here. A node that does not answer counts as users who send zeros: noise and divisors are public constants, so
that costs accuracy, not privacy. A dishonest node of m users can move a sum by m C and no further: longer sums, other
shapes and numbers that are not finite are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import count as counter
from typing import Any

import numpy as np

from privrep.errors import InputError
from privrep.federated.wire.messages import Answer, Question
from privrep.federated.wire.rounds import Conversation
from privrep.privacy.bounds import MAX_USERS, Bound, BoundedSum, LossBound
from privrep.privacy.calibration import Query, calibrate
from privrep.privacy.events import Relation
from privrep.privacy.groups import Group
from privrep.privacy.node_noise import Noisy, NoisyUsers
from privrep.privacy.protocol import EVERYONE, Audience, Everyone, Facts, Step, check_audience
from privrep.privacy.sampling import FixedSample, Sample
from privrep.typing import Array
from privrep.users.isolated import check_sums

MAX_USERS_TIMES_NODES = 2**40


def read_facts(fields: Mapping[str, Any]) -> Facts:
    """Return what a node says of itself when it joins: public facts, the same for the whole run."""
    whole = all(type(fields.get(name)) is int for name in ("users", "features", "targets"))
    if set(fields) != {"users", "features", "targets", "sparse"} or not whole:
        raise InputError("a node's facts are its numbers of users, features and targets, and whether it is sparse.")
    if type(fields["sparse"]) is not bool:
        raise InputError("a node's rows are sparse or not: true or false.")
    facts = Facts(**fields)
    check_facts(facts)
    return facts


def check_facts(facts: Facts) -> None:
    """Raise InputError unless a node may have so many users, and rows of this shape."""
    if not (1 <= facts.users <= MAX_USERS and facts.features >= 1 and facts.targets >= 1):
        raise InputError(f"a node has 1 to {MAX_USERS:,} users, and features and targets. Got {facts} instead.")


class FlowerUsers:
    """Users on the nodes of a roster, the server being trusted with the sums of each. `shape` is that of the rows as
    steps see them: features, targets, whether they are sparse."""

    def __init__(
        self, conversation: Conversation, run: str, roster: Mapping[str, Facts], shape: tuple[int, int, bool]
    ) -> None:
        self.roster = dict(sorted(roster.items()))
        self._conversation, self._run, self._numbers = conversation, run, counter(1)
        if not self.roster:
            raise InputError("no node has joined, so there are no users.")
        shapes = {(facts.features, facts.targets, facts.sparse) for facts in self.roster.values()}
        if len(shapes) > 1:
            raise InputError(f"nodes hold rows of different shapes ({sorted(shapes)}); give all the same columns.")
        users = sum(facts.users for facts in self.roster.values())
        if users > MAX_USERS or users * len(self.roster) > MAX_USERS_TIMES_NODES:
            raise InputError(f"one sum takes at most {MAX_USERS:,} users. Got {users:,} instead.")
        self.facts = Facts(users, *shape)

    def sums(
        self, step: Step, bounds: Mapping[str, Bound | LossBound], among: Audience = EVERYONE
    ) -> dict[str, BoundedSum]:
        """One trip to every node, however many statistics."""
        check_audience(among)
        if step.spec.batch_level or isinstance(among, FixedSample):
            raise InputError("batches of a fixed size, and functions of whole batches, need all rows in one place.")
        group, sample = _group(among), among if isinstance(among, Sample) else None
        question = Question(self._run, next(self._numbers), step, bounds, group)
        answers = self._answers(question, sample, partial(check_sums, bounds))
        return {key: BoundedSum(self._added(answers, key, bound.size), bound) for key, bound in bounds.items()}

    def _answers(self, question: Question, sample: Sample | None, check: Any) -> dict[str, Answer]:
        """The answers that are what they should be, by node."""
        asked = dict.fromkeys(self.roster, question)
        if sample is not None:
            ends = np.cumsum([facts.users for facts in self.roster.values()])
            masks = np.split(sample.members(self.facts.users), ends[:-1])
            asked = {
                name: replace(question, chosen=mask, rate=sample.rate)
                for name, mask in zip(self.roster, masks, strict=True)
            }

        def accept(name: str, answer: Answer) -> Answer:
            users = self.roster[name].users
            if answer.number != question.number:
                raise InputError("it answers another question")
            if answer.users != users:
                raise InputError(f"it says it has {answer.users:,} users, and joined with {users:,}")
            check(answer.sums, users)
            return answer

        sizes = {name: facts.users for name, facts in self.roster.items()}
        return self._conversation.answers(f"question {question.number}", asked, sizes, accept)

    def _added(self, answers: Mapping[str, Answer], key: str, size: int) -> Array:
        total = np.zeros(size)
        for name in self.roster:  # in the order of names, whoever came first
            if name in answers:
                total += answers[name].sums[key]
        return total


class NoisyFlowerUsers(FlowerUsers, NoisyUsers):
    """Users on nodes that add noise themselves, each on its own ledger's account: the server sees noisy sums alone.

    Every node is asked for `noise_nodes` times the mu^2 of the query, so that the noise of so many of them makes up
    what the query asks for; that many must answer. Where more answer there is more noise than needed: the release says
    how much.
    """

    def __init__(
        self,
        conversation: Conversation,
        run: str,
        roster: Mapping[str, Facts],
        shape: tuple[int, int, bool],
        noise_nodes: int,
    ) -> None:
        super().__init__(conversation, run, roster, shape)
        self.noise_nodes = noise_nodes
        if noise_nodes > len(self.roster):
            raise InputError(f"noise_nodes is {noise_nodes}, and {len(self.roster)} nodes have joined.")

    def sums(
        self, step: Step, bounds: Mapping[str, Bound | LossBound], among: Audience = EVERYONE
    ) -> dict[str, BoundedSum]:
        raise InputError(
            "nodes that add the noise release no exact sums: choices and samples are for a trusted server."
        )

    def noisy_sums(
        self,
        page: str,
        step: Step,
        queries: Mapping[str, Query],
        relation: Relation,
        among: Everyone | Group = EVERYONE,
    ) -> dict[str, Noisy]:
        """See `privacy.node_noise.NoisyUsers`."""
        shares = {key: query.mu_squared * self.noise_nodes for key, query in queries.items()}
        sigmas = {key: calibrate(queries[key].bound, share, relation).sigma for key, share in shares.items()}
        bounds = {key: query.bound for key, query in queries.items()}
        check_audience(among)
        question = Question(self._run, next(self._numbers), step, bounds, _group(among), page=page, mu_squared=shares)
        answers = self._answers(question, None, partial(check_sums, bounds, sigmas=sigmas))
        if len(answers) < self.noise_nodes:
            raise InputError(f"{len(answers)} nodes added noise, and {self.noise_nodes} must; nothing was released.")
        return {
            key: Noisy(self._added(answers, key, bounds[key].size), sigma * math.sqrt(len(answers)))
            for key, sigma in sigmas.items()
        }


def _group(among: Audience) -> Group | None:
    return among if isinstance(among, Group) else None
