"""The default: decide what to share, learn it in few rounds, and ask all users how heads should weigh it.

Pages of the billboard:
  centre     mean of the users' rows                 -> where a linear layer has its zero
  spread     squares of features, and                -> coordinates of a linear layer, in which few rounds go far
  moment     pairs of features (see `curvature`)
  round-t    clipped sum of users' updates           -> the shared weights; the first ones also tell whether a class
                                                        means the same for everybody:
  agreement  the verdict, posted at once             -> a run that goes on elsewhere decides alike. If they disagree,
  scatter    how rows vary within classes, and classes' means
                                                     -> directions, in place of further rounds (see `class_moments`)
  heads      how users fare by each kind of head     -> which kind, and how far to trust the shared part
  network    what was computed from these: all that a new user needs

Formal guarantee: everything in `SharedPart` is a function of the releases charged to the run's ledger and of public
facts: the numbers of users, features and classes, the budget, the modules at their start, and the declared rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from privrep.heads.gradient import HeadRule, labels_of, row_weights
from privrep.heads.neural import (
    CANDIDATES,
    MOST_DIFFERENT,
    NEVER,
    HeadLosses,
    View,
    believed_losses,
    losses_of_nobody,
)
from privrep.heads.softmax import HeadInputs, Sight, log_frequencies, one_hot
from privrep.heads.store import HeadSizes
from privrep.neural.class_moments import Scatter, classes_agree, directions
from privrep.neural.curvature import STEEPEST, Variation, coordinates
from privrep.neural.layers import Leading, Shape, directions_split, linear_split
from privrep.neural.plan import ROUNDS, SharingPlan, count_deciding_rounds, most_parameters
from privrep.neural.rounds import Abandon, Round, TrainedWeights, TrainingSettings, local_step, train
from privrep.neural.standard_step import Standards, StandardStep
from privrep.nn.flat_module import FlatModule, Split, split
from privrep.nn.threads import own_copy
from privrep.privacy.billboard import Release
from privrep.privacy.bounds import Bound, Contributions
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Vectors
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.privacy.sampling import plan_noise_multiplier
from privrep.typing import Array, Singles, Vector, Weights

CENTRE_SHARE = 0.06
HEADS_SHARE = 0.06
LEAST_APART = 0.05  # mean square of rows of length one about their mean
COMMON = 0.1  # part of the centre's noise that counts: an error that all users have in common harms less
USERS_APART = 0.03  # part of it by which the means of users' rows should differ
SCORE_NOISE = 0.65  # standard deviation that noise may add to a row's scores
WORTH = 1.5  # degrees of freedom over the root of what rounds carry: each further one tells less of classes
AGREEMENT = "agreement"  # the page with the verdict
LEAST_DEGREES = 4.0  # of freedom, of a linear layer that is asked for


@dataclass(frozen=True)
class PriorHeads:
    """Heads of the rounds of a linear layer: its scores as they are, plus how often the user has each class."""

    fills: ClassVar[type] = HeadRule  # what fields of steps that travel declare
    pseudo_count: float = 0.3

    def fit(self, start: Tensor, Z: Tensor, labels: Tensor, head: FlatModule) -> Tensor:
        classes = Z.shape[-1]
        counts = one_hot(labels, classes).sum(dim=1)
        scores = torch.eye(classes).reshape(1, -1).expand(len(Z), -1)
        return torch.cat([scores, log_frequencies(counts, self.pseudo_count)], dim=1)


LINEAR = TrainingSettings(
    rounds=16,
    clip=0.15,
    step_size=1.0,
    head_fit=PriorHeads(),
    server="momentum",
    server_rate=1.0,
    momentum=0.5,
    normalise=True,
)
"""Settings of a linear layer in coordinates of `curvature`; the clip is relative to the length of rows there.

Updates of one length need no bound that follows them. Such a bound was mostly noise where budgets are small.
"""

PLAIN = replace(LINEAR, clip=0.2, server_rate=50.0, normalise=False, quantile=0.5, quantile_rate=1.0, settle=0.5)
"""Settings of a linear layer in the features' own coordinates; those that are asked for start from them."""

WHOLE = TrainingSettings(rounds=16, clip=0.05, step_size=0.1, server="momentum", server_rate=1.0, quantile=0.5)
"""Settings of a representation, or of adapters on one."""


@dataclass(frozen=True, eq=False)
class MeanRow:
    """The mean of a user's public features, each row of them of length one."""

    rows_per_user: int
    classes: int
    raw: int

    @property
    def spec(self) -> StepSpec:
        return StepSpec(layout="padded", rows_per_user=self.rows_per_user)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        weights = row_weights(labels_of(batch.y, self.classes)).numpy()
        return {"mean": Vectors(np.matmul(weights[:, None, :], batch.X[:, :, self.raw :].astype(np.float32))[:, 0])}


@dataclass(frozen=True, eq=False)
class SharedPart:
    """The public part of a fit, and how heads see rows through it."""

    fills: ClassVar[type] = View  # what fields of steps that travel declare
    plan: SharingPlan
    split: Split
    weights: Weights
    centre: Vector  # of the public features, zero where none was released
    pull: float  # rows of a user that the centre counts as
    raw: int
    losses: Vector  # what a row loses by each kind of heads, over all users; NEVER where one may not be chosen
    rounds: tuple[Round, ...] = ()

    @property
    def classes(self) -> int:
        return self.split.classes

    @property
    def head_sizes(self) -> HeadSizes:
        """Return the sizes of heads on the shared part and alone."""
        own = len(self.centre)
        return HeadSizes(own if self.plan.share in ("linear", "nothing") else self.split.rank, own, self.classes)

    def __call__(self, rows: Tensor) -> HeadInputs:
        """Return rows (users, r, columns) as heads see them."""
        own = Sight(rows[..., self.raw :], self.centre, self.pull)
        nothing = torch.zeros(*rows.shape[:-1], self.classes), torch.zeros(self.classes)
        if self.plan.share == "nothing":
            return HeadInputs(*nothing, own, own)
        part, weights = own_copy(self.split.representation), torch.from_numpy(self.weights)
        out = part(weights, rows.flatten(0, -2)).detach().reshape(*rows.shape[:-1], -1)
        if self.plan.share == "linear":
            centre = part(weights, torch.from_numpy(self.centre.astype(np.float32))[None]).detach()[0]
            return HeadInputs(out, centre, own, own)
        return HeadInputs(*nothing, Sight(unit(out), np.zeros(out.shape[-1]), 0.0), own)


def unit(rows: Tensor) -> Tensor:
    """Rows of length one; zero rows stay."""
    return rows / rows.norm(dim=-1, keepdim=True).clamp(min=1e-12)


def learn(
    run: Run,
    plan: SharingPlan,
    given: tuple[nn.Module, nn.Module] | None,
    shape: Shape,
    settings: TrainingSettings | None = None,
) -> SharedPart:
    """Learn the shared part, page by page.

    Args:
        run: whose users are asked.
        plan: what is shared.
        given: the representation and head to share, where the plan is not a linear layer.
        shape: of the problem.
        settings: of the rounds, where they were asked for.
    """
    total, own = run.ledger.capacity, run.users.facts.features - shape.raw
    if plan.share == "nothing":
        empty = linear_split(np.zeros(own), shape)
        start, losses = empty.representation.weights(), losses_of_nobody()
        return published(run, SharedPart(plan, empty, start, np.zeros(own), 0.0, shape.raw, losses))
    _check_affordable(run, plan, settings, total)
    centre, pull = _centre(run, shape, CENTRE_SHARE * total)
    left = total * (1 - CENTRE_SHARE - HEADS_SHARE)
    trained: TrainedWeights | None = None
    if plan.share == "linear":
        both = linear_split(np.zeros(own), shape)
        standards = Standards(shape.classes, shape.raw, centre, pull)
        if settings is None:
            trained, spent = _linear(run, plan, shape, standards, left)
            plan, left = (plan if trained is not None else plan.otherwise or plan), left - spent
        else:
            trained = _rounds(run, both, plan, shape, settings, left, standards)
    elif plan.share != "directions":
        both = _whole(run, given, shape)
        trained = _rounds(run, both, plan, shape, settings or WHOLE, left)
    if trained is None:
        basis = directions(run, Scatter(shape.rows_per_user, shape.classes, shape.raw), plan.rank, left)
        both = directions_split(centre, basis, shape)
        trained = TrainedWeights(both.representation.weights(), ())
    learned = SharedPart(plan, both, trained.weights, centre, pull, shape.raw, losses_of_nobody(), trained.rounds)
    return published(run, _ask_heads(run, learned, shape.rows_per_user, HEADS_SHARE * total))


def _linear(
    run: Run, plan: SharingPlan, shape: Shape, standards: Standards, mu_squared: float
) -> tuple[TrainedWeights | None, float]:
    """Return the weights of a linear layer, and what was spent on them, of mu squared.

    It is trained on standardised rows, in coordinates in which few rounds go far. There are no weights where the plan
    has something else for users to whom a class means different things, and the first rounds speak for that.
    """
    users = run.users.facts.users
    carried = most_parameters(users, math.sqrt(mu_squared), ROUNDS) / shape.classes
    most = max(WORTH * math.sqrt(carried), LEAST_DEGREES)
    found, variation, spent = coordinates(run, shape.rows_per_user, standards, total=run.ledger.capacity, most=most)
    there = linear_split(np.zeros(len(standards.centre)), shape)
    chosen = careful(replace(LINEAR, rounds=plan.rounds), found.degrees, users, mu_squared - spent)
    turned = replace(standards, coordinates=found)
    looked = count_deciding_rounds(plan.rounds, plan.otherwise is not None)

    def disagree(updates: Sequence[Release]) -> bool:
        return len(updates) == looked and not decide_agreement(run, updates, variation)

    trained = _rounds(run, there, plan, shape, chosen, mu_squared - spent, turned, disagree)
    part = len(trained.rounds) / plan.rounds
    spent += part * (mu_squared - spent)
    if part < 1:
        return None, spent
    weights = found.on_rows(trained.weights.reshape(shape.classes, -1).astype(np.float64))
    return TrainedWeights(weights.astype(np.float32).ravel(), trained.rounds), spent


def decide_agreement(run: Run, updates: Sequence[Release], variation: Variation) -> bool:
    """Return whether a class means the same to everybody, as the billboard says; where it does not, decide and post it.

    The verdict compares released numbers. On another machine they round in another way, and could flip it.

    Args:
        run: with its billboard.
        updates: of the first rounds.
        variation: what `coordinates` released of how rows vary.
    """
    if AGREEMENT not in run.billboard:
        run.derive(AGREEMENT, {}, agree=bool(classes_agree(updates, run.users.facts.users, variation)))
    return bool(run.billboard[AGREEMENT].facts["derived"]["agree"])


def careful(settings: TrainingSettings, degrees: float, users: int, mu_squared: float) -> TrainingSettings:
    """Return settings of rounds in coordinates: a length of updates there, and a rate that lets in little noise.

    Rows are of length sqrt(degrees / STEEPEST) there. T rounds leave noise of standard deviation
    rate / (1 - momentum) * 2 clip T / (users mu) in every weight, and as much times that length in a score.

    Args:
        settings: of the rounds, the length of updates relative to the length of rows.
        degrees: of freedom, of the coordinates.
        users: how many there are.
        mu_squared: what all rounds spend.
    """
    length = math.sqrt(degrees / STEEPEST)
    clip = settings.clip * length
    weight = 2 * clip * settings.rounds / (users * math.sqrt(mu_squared)) / (1 - settings.momentum)
    return replace(settings, clip=clip, server_rate=min(settings.server_rate, SCORE_NOISE / (weight * length)))


def _check_affordable(run: Run, plan: SharingPlan, settings: TrainingSettings | None, total: float) -> None:
    """Refuse what cannot be released before anything is spent."""
    Bound(1.0, max(plan.parameters, 1))
    if settings is not None and plan.share != "directions":
        share_of_round(run, replace(settings, rounds=plan.rounds), total / 2, total / 2)


def _rounds(
    run: Run,
    both: Split,
    plan: SharingPlan,
    shape: Shape,
    settings: TrainingSettings,
    mu_squared: float,
    standards: Standards | None = None,
    abandon: Abandon | None = None,
) -> TrainedWeights:
    chosen = replace(settings, rounds=plan.rounds)
    make = partial(_step, both, both.head.weights(), chosen, shape.rows_per_user, standards)
    per_round = share_of_round(run, chosen, mu_squared, run.ledger.capacity - mu_squared)
    return train(run, both.representation.weights(), make, chosen, per_round, abandon=abandon)


def _whole(run: Run, given: tuple[nn.Module, nn.Module] | None, shape: Shape) -> Split:
    assert given is not None
    return split(Leading(given[0], shape.raw), given[1], run.users.facts.features)


def _step(
    both: Split,
    head_start: Singles,
    settings: TrainingSettings,
    rows_per_user: int,
    standards: Standards | None,
    weights: Singles,
) -> Any:
    step = local_step(both, weights, head_start, settings, rows_per_user)
    return step if standards is None else StandardStep(step, standards)


def share_of_round(run: Run, settings: TrainingSettings, mu_squared: float, others: float) -> float:
    """Return what each round may spend, of mu squared. Samples get more, since they cost less.

    Args:
        run: with its ledger.
        settings: of the rounds.
        mu_squared: what all rounds may spend.
        others: what the other pages spend.
    """
    if settings.rate == 1:
        return mu_squared / settings.rounds
    multiplier = plan_noise_multiplier(run.ledger.budget, settings.rate, settings.rounds, others)
    return multiplier**-2


def _centre(run: Run, shape: Shape, mu_squared: float) -> tuple[Array, float]:
    """Return the mean of users' mean rows, and how many rows of a user it is worth.

    Rows are of length one. What the mean leaves of that is how far they are from it; its noise, and a part of the
    former, in which users differ, is how far it is from where a user's rows should lie.
    """
    query = Query(Bound(1.0, run.users.facts.features - shape.raw), mu_squared)
    released = run.release("centre", MeanRow(shape.rows_per_user, shape.classes, shape.raw), {"mean": query})["mean"]
    mean = released.value / run.users.facts.users
    noise = len(mean) * (released.sigma / run.users.facts.users) ** 2
    length = float(mean @ mean) - noise
    apart = min(max(1 - length, LEAST_APART), 1.0)
    return mean, apart / (COMMON * noise + USERS_APART * apart)


def _ask_heads(run: Run, learned: SharedPart, rows_per_user: int, mu_squared: float) -> SharedPart:
    """Return the shared part with what users lose by each kind of heads."""
    query = Query(Bound(MOST_DIFFERENT, len(CANDIDATES)), mu_squared)
    released = run.release("heads", HeadLosses(learned, rows_per_user), {"losses": query})["losses"]
    users = run.users.facts.users
    losses = believed_losses(released.value / users, released.sigma / users)
    if learned.plan.share != "linear":  # a head without its user's rows would know nothing
        losses = np.where(
            [each.kind == "alone" or each.penalty > 0 for each in CANDIDATES], losses - losses.min(), NEVER
        )
    return replace(learned, losses=losses - losses.min())


def published(run: Run, learned: SharedPart) -> SharedPart:
    facts = {
        "share": learned.plan.share,
        "pull": learned.pull,
        "losses": learned.losses.tolist(),
        "signal_to_noise": [r.signal_to_noise for r in learned.rounds],
    }
    run.derive("network", {"weights": learned.weights.astype(np.float64), "centre": learned.centre}, **facts)
    return learned
