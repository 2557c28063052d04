"""The engine of users who live on Flower nodes: ask every node for one sum, check what comes, add it up.

Formal guarantee, with honest nodes and C the bound of a user's contribution:
* `FlowerUsers.sums` is what `privacy.bounds` promises of a sum over all users behind the answers.
* Nodes answer in whole steps of the grid, which are added up exactly. So the sum does not depend on which node a user
  is on, nor on the order of answers.
* A node that does not answer counts as users who send zeros. Noise and divisors are public constants, so that costs
  accuracy, not privacy.
* A dishonest node of m users can move a sum by m times the bound's reach, but for rounding, and no further. Longer
  sums, other shapes and numbers that are not finite are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import count as counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privrep.errors import InputError
from privrep.federated.wire.messages import Answer, Question
from privrep.federated.wire.rounds import Conversation
from privrep.privacy.bounds import Bound, BoundedSum, LossBound
from privrep.privacy.calibration import Query, calibrate
from privrep.privacy.events import Relation
from privrep.privacy.grid import MAX_INT64_USERS, Total
from privrep.privacy.groups import Group
from privrep.privacy.node_noise import Noisy, NoisyUsers
from privrep.privacy.protocol import EVERYONE, Audience, Everyone, Facts, Step, check_audience
from privrep.privacy.sampling import FixedSample, Sample
from privrep.typing import Array
from privrep.users.isolated import check_sums


def read_facts(fields: Mapping[str, Any]) -> Facts:
    """Return a node's facts from its answer to a hello: public numbers, the same for the whole run."""
    whole = all(type(fields.get(name)) is int for name in ("users", "features", "targets"))
    if set(fields) != {"users", "features", "targets", "sparse"} or not whole:
        raise InputError("a node's facts are its numbers of users, features and targets, and whether it is sparse.")
    if type(fields["sparse"]) is not bool:
        raise InputError("a node's rows are sparse or not: true or false.")
    facts = Facts(**fields)
    check_facts(facts)
    return facts


def check_facts(facts: Facts) -> None:
    """Raise InputError unless a node may have this number of users, and rows of this shape."""
    if not (1 <= facts.users <= MAX_INT64_USERS and facts.features >= 1 and facts.targets >= 1):
        raise InputError(f"a node has 1 to {MAX_INT64_USERS:,} users, and features and targets. Got {facts} instead.")


class FlowerUsers:
    """Users on the nodes of a roster, for a server that is trusted with the sums of each node."""

    def __init__(
        self, conversation: Conversation, run: str, roster: Mapping[str, Facts], shape: tuple[int, int, bool]
    ) -> None:
        """Take the nodes of a run; raise InputError if they do not go together.

        Their rows must have one shape, and their users must not be too many for one sum.

        Args:
            conversation: asks nodes, and waits for answers.
            run: the name of the run.
            roster: the facts of each node, by name.
            shape: features, targets and sparsity of rows as steps see them.
        """
        self.roster = dict(sorted(roster.items()))
        self._conversation, self._run, self._numbers = conversation, run, counter(1)
        if not self.roster:
            raise InputError("no node has joined, so there are no users.")
        shapes = {(facts.features, facts.targets, facts.sparse) for facts in self.roster.values()}
        if len(shapes) > 1:
            raise InputError(f"nodes hold rows of different shapes ({sorted(shapes)}); give all the same columns.")
        users = sum(facts.users for facts in self.roster.values())
        self.facts = Facts(users, *shape)

    def sums(
        self, step: Step, bounds: Mapping[str, Bound | LossBound], among: Audience = EVERYONE
    ) -> dict[str, BoundedSum]:
        """Return clipped sums over all users behind the answers, in one trip to every node, however many statistics.

        Args:
            step: what each user computes.
            bounds: the bound of each statistic.
            among: who is asked.
        """
        check_audience(among)
        if step.spec.batch_level or isinstance(among, FixedSample):
            raise InputError("batches of a fixed size, and functions of whole batches, need all rows in one place.")
        group, sample = _find_group(among), among if isinstance(among, Sample) else None
        question = Question(self._run, next(self._numbers), step, bounds, group)
        answers = self._ask(question, sample, partial(_check_exact, bounds))
        return {key: BoundedSum(self._add_up(answers, key, bound.size), bound) for key, bound in bounds.items()}

    def _ask(self, question: Question, sample: Sample | None, check: Any) -> dict[str, Answer]:
        """Return the answers that are what they should be, by node.

        Args:
            question: what every node is asked.
            sample: the users who are asked, of whom each node is told its own; None asks all.
            check: raises InputError if sums of this number of users cannot be what was asked for.
        """
        asked = dict.fromkeys(self.roster, question)
        if sample is not None:
            ends = np.cumsum([facts.users for facts in self.roster.values()])
            masks = np.split(sample.members(self.facts.users), ends[:-1])
            asked = {
                name: replace(question, chosen=mask, rate=sample.rate)
                for name, mask in zip(self.roster, masks, strict=True)
            }

        def accept(name: str, answer: Answer) -> Answer:
            """Return a node's answer; raise InputError if it is to another question, or about other users."""
            users = self.roster[name].users
            if answer.number != question.number:
                raise InputError("it answers another question")
            if answer.users != users:
                raise InputError(f"it says it has {answer.users:,} users, and joined with {users:,}")
            check(answer.sums, users)
            return answer

        sizes = {name: facts.users for name, facts in self.roster.items()}
        return self._conversation.ask_sums(f"question {question.number}", asked, sizes, accept)

    def _add_up(self, answers: Mapping[str, Answer], key: str, size: int) -> NDArray[Any]:
        """Return the sum of all exact answers to one statistic, in whole steps of the grid, (size,)."""
        total = Total(size)
        for name, answer in answers.items():
            total.add(answer.sums[key], self.roster[name].users)
        return total.integers


class NoisyFlowerUsers(FlowerUsers, NoisyUsers):
    """Users on nodes that add noise themselves, charged to each node's own ledger: the server sees noisy sums alone.

    Every node is asked for `noise_nodes` times the mu^2 of the query. So the noise of `noise_nodes` nodes makes up what
    the query asks for, and that many must answer. Where more answer there is more noise than needed; the release says
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
        """Take the nodes of a run; raise InputError if fewer joined than must add noise.

        Args:
            conversation: asks nodes, and waits for answers.
            run: the name of the run.
            roster: the facts of each node, by name.
            shape: features, targets and sparsity of rows as steps see them.
            noise_nodes: how many nodes' noise makes up what a query asks for.
        """
        super().__init__(conversation, run, roster, shape)
        self.noise_nodes = noise_nodes
        if noise_nodes > len(self.roster):
            raise InputError(f"noise_nodes is {noise_nodes}, and {len(self.roster)} nodes have joined.")

    def sums(
        self, step: Step, bounds: Mapping[str, Bound | LossBound], among: Audience = EVERYONE
    ) -> dict[str, BoundedSum]:
        """Raise InputError: nodes that add the noise give no exact sums."""
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
        """Return noisy sums and their noise; see `privacy.node_noise.NoisyUsers`.

        Args:
            page: the release's name, by which nodes keep their answers.
            step: what each user computes.
            queries: the bound and the mu^2 of each statistic.
            relation: which populations are neighbours.
            among: who is asked.
        """
        shares = {key: query.mu_squared * self.noise_nodes for key, query in queries.items()}
        sigmas = {key: calibrate(queries[key].bound, share, relation).sigma for key, share in shares.items()}
        bounds = {key: query.bound for key, query in queries.items()}
        check_audience(among)
        question = Question(
            self._run, next(self._numbers), step, bounds, _find_group(among), page=page, mu_squared=shares
        )
        answers = self._ask(question, None, partial(_check_noisy, bounds, sigmas))
        if len(answers) < self.noise_nodes:
            raise InputError(f"{len(answers)} nodes added noise, and {self.noise_nodes} must; nothing was released.")
        return {
            key: Noisy(self._add_up_noisy(answers, key, bounds[key].size), sigma * math.sqrt(len(answers)))
            for key, sigma in sigmas.items()
        }

    def _add_up_noisy(self, answers: Mapping[str, Answer], key: str, size: int) -> Array:
        """Return the sum of all noisy answers to one statistic, (size,), in the order of nodes' names."""
        total = np.zeros(size)
        for name in self.roster:  # in the order of names, whoever came first
            if name in answers:
                total += answers[name].sums[key]
        return total


def _check_exact(bounds: Mapping[str, Bound | LossBound], sums: Mapping[str, NDArray[Any]], users: int) -> None:
    """Raise InputError unless these can be exact sums of so many users, in whole steps of the grid."""
    if any(total.dtype != np.int64 for total in sums.values()):
        raise InputError("exact sums are whole numbers of grid steps, and these are not")
    steps = {key: bound.step for key, bound in bounds.items()}
    check_sums(bounds, {key: total * steps.get(key, 1.0) for key, total in sums.items()}, users)


def _check_noisy(
    bounds: Mapping[str, Bound], sigmas: Mapping[str, float], sums: Mapping[str, NDArray[Any]], users: int
) -> None:
    """Raise InputError unless these can be sums of so many users with noise of these standard deviations."""
    if any(total.dtype != np.float64 for total in sums.values()):
        raise InputError("noisy sums are numbers of float64, and these are not")
    check_sums(bounds, sums, users, sigmas)


def _find_group(among: Audience) -> Group | None:
    """Return the group that is asked, or None for everyone."""
    return among if isinstance(among, Group) else None
