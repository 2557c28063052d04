"""The default: decide what to share, learn it in few rounds, and ask all users how heads should weigh it.

Pages of the billboard:
  centre     mean of the users' rows                 -> coordinates of a linear layer
  look       users' class moments                    -> whether a class means the same for everybody; if not,
  scatter    how rows vary within classes, and classes' means  -> directions, in place of rounds (see `moments`)
  round-t    clipped sum of users' updates, and how many were short
                                                     -> the shared weights, and the next bound
  heads      how users fare by each kind of head     -> which kind, and how far to trust the shared part
  network    what was computed from these: all that a new user needs

Formal guarantee: everything in `SharedPart` is a function of the releases charged to the run's ledger and of public
facts: the numbers of users, features and classes, the budget, the modules at their start, and the declared rows.
"""

from __future__ import annotations

import math
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
    USUAL,
    USUAL_ALONE,
    USUAL_ON_DIRECTIONS,
    Candidate,
    HeadInputs,
    HeadLosses,
    View,
    log_frequencies,
    one_hot,
)
from privrep.heads.store import HeadSizes
from privrep.neural.class_moments import ClassMoments, Scatter, classes_agree, directions
from privrep.neural.models import initialise
from privrep.neural.plan import SharingPlan
from privrep.neural.rounds import Round, TrainedWeights, TrainingSettings, local_step, train
from privrep.nn.flat_module import FlatModule, Split, split
from privrep.nn.threads import own_copy
from privrep.privacy.bounds import Bound, Contributions
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Vectors
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.privacy.sampling import noise_multiplier_for
from privrep.typing import Array, Singles, Vector, Weights

CENTRE_SHARE = 0.05
LOOK_SHARE = 0.05
HEADS_SHARE = 0.05
CLEAR = 3.0  # standard deviations that a released difference must have to count


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
    clip=0.2,
    step_size=1.0,
    head_fit=PriorHeads(),
    server="momentum",
    server_rate=50.0,
    momentum=0.5,
    quantile=0.5,
    quantile_rate=1.0,
    settle=0.5,
)
"""Of a linear layer on rows of about unit length."""

WHOLE = TrainingSettings(rounds=16, clip=0.05, step_size=0.1, server="momentum", server_rate=1.0, quantile=0.5)
"""Of a representation, or of adapters on one."""


class Centred(nn.Module):
    """Rows less a public centre, over a public size; both are constants."""

    def __init__(self, centre: Array, size: float) -> None:
        super().__init__()
        self.register_buffer("centre", torch.from_numpy(centre.astype(np.float32)))
        self.size = size

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = (rows - self.get_buffer("centre")) / self.size
        return result


class Leading(nn.Module):
    """A module on the first columns of rows; the public features of the same rows follow them."""

    def __init__(self, module: nn.Module, columns: int) -> None:
        super().__init__()
        self.module, self.columns = module, columns

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.module(rows[:, : self.columns])
        return result


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


@dataclass(frozen=True)
class Shape:
    """Sizes of a problem, all public: rows are `raw` numbers for a representation, then the public features."""

    classes: int
    rows_per_user: int
    raw: int = 0
    ordered: bool = False  # whether the first public features matter most


@dataclass(frozen=True, eq=False)
class SharedPart:
    """What a fit makes public, and how heads see rows through it."""

    fills: ClassVar[type] = View  # what fields of steps that travel declare
    plan: SharingPlan
    split: Split
    weights: Weights
    centre: Vector  # of the public features, zero where none was released
    size: float
    raw: int
    shared: Candidate
    alone: Candidate
    advantage: float  # nats a row by which the shared part did better than alone, over all users; 0 where that is noise
    rounds: tuple[Round, ...] = ()

    @property
    def classes(self) -> int:
        return self.split.classes

    @property
    def shares_nothing(self) -> bool:
        return self.plan.share == "nothing"

    @property
    def head_sizes(self) -> HeadSizes:
        """Return the sizes of heads on the shared part and alone."""
        own = len(self.centre)
        return HeadSizes(own if self.plan.share in ("linear", "nothing") else self.split.rank, own, self.classes)

    def __call__(self, rows: Tensor) -> HeadInputs:
        """Rows (users, r, columns) as heads see them."""
        own = (rows[..., self.raw :] - torch.from_numpy(self.centre.astype(np.float32))) / self.size
        nothing = torch.zeros(*rows.shape[:-1], self.classes)
        if self.plan.share == "nothing":
            return HeadInputs(nothing, own, own)
        out = own_copy(self.split.representation)(torch.from_numpy(self.weights), rows.flatten(0, -2))
        out = out.detach().reshape(*rows.shape[:-1], -1)
        return HeadInputs(out, own, own) if self.plan.share == "linear" else HeadInputs(nothing, unit(out), own)


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
    """All pages, in order. `given` is the representation and head to share, where the plan is not a linear layer."""
    total, own = run.ledger.capacity, run.users.facts.features - shape.raw
    if plan.share == "nothing":
        empty = linear_split(np.zeros(own), 1.0, shape)
        start, usual = empty.representation.weights(), CANDIDATES[USUAL_ALONE]
        return published(run, SharedPart(plan, empty, start, np.zeros(own), 1.0, shape.raw, usual, usual, 0.0))
    _check_affordable(run, plan, settings, total)
    centre, size = _centre(run, shape, CENTRE_SHARE * total)
    left = total * (1 - CENTRE_SHARE - HEADS_SHARE)
    if plan.otherwise is not None:
        left -= LOOK_SHARE * total
        look = ClassMoments(shape.rows_per_user, shape.classes, shape.raw, centre)
        plan = plan if classes_agree(run, look, LOOK_SHARE * total) else plan.otherwise
    if plan.share == "directions":
        basis = directions(run, Scatter(shape.rows_per_user, shape.classes, shape.raw), plan.rank, left)
        both = directions_split(centre, basis, shape)
        trained = TrainedWeights(both.representation.weights(), ())
    else:
        both = linear_split(centre, size, shape, plan.features) if plan.share == "linear" else _whole(run, given, shape)
        trained = _rounds(run, both, plan, shape, settings, left)
    kinds = (USUAL if plan.share == "linear" else USUAL_ON_DIRECTIONS), USUAL_ALONE
    heads = CANDIDATES[kinds[0]], CANDIDATES[kinds[1]]
    learned = SharedPart(plan, both, trained.weights, centre, size, shape.raw, *heads, 0.0, trained.rounds)
    return published(run, _choose_heads(run, learned, kinds, shape.rows_per_user, HEADS_SHARE * total))


def _check_affordable(run: Run, plan: SharingPlan, settings: TrainingSettings | None, total: float) -> None:
    """Refuse what cannot be released before anything is spent."""
    Bound(1.0, max(plan.parameters, 1))
    if settings is not None and plan.share != "directions":
        share_of_round(run, replace(settings, rounds=plan.rounds), total / 2, total / 2)


def _rounds(
    run: Run, both: Split, plan: SharingPlan, shape: Shape, settings: TrainingSettings | None, mu_squared: float
) -> TrainedWeights:
    chosen = settings or (LINEAR if plan.share == "linear" else WHOLE)
    chosen = replace(chosen, rounds=plan.rounds)
    make = partial(_step, both, both.head.weights(), chosen, shape.rows_per_user)
    per_round = share_of_round(run, chosen, mu_squared, run.ledger.capacity - mu_squared)
    return train(run, both.representation.weights(), make, chosen, per_round)


def _whole(run: Run, given: tuple[nn.Module, nn.Module] | None, shape: Shape) -> Split:
    assert given is not None
    return split(Leading(given[0], shape.raw), given[1], run.users.facts.features)


def _step(both: Split, head_start: Singles, settings: TrainingSettings, rows_per_user: int, weights: Singles) -> Any:
    return local_step(both, weights, head_start, settings, rows_per_user)


def share_of_round(run: Run, settings: TrainingSettings, mu_squared: float, others: float) -> float:
    """What each round may spend; of samples more, since they cost less."""
    if settings.rate == 1:
        return mu_squared / settings.rounds
    multiplier = noise_multiplier_for(run.ledger.budget, settings.rate, settings.rounds, others)
    return multiplier**-2


def linear_split(centre: Array, size: float, shape: Shape, kept: int = 0) -> Split:
    """One linear layer on centred rows, from zero, and heads that add a number for each class.

    Of more features than are kept it sees the first, or a public projection where they are in no order.
    """
    features = len(centre)
    layers: list[nn.Module] = [Centred(centre, size)]
    if 0 < kept < features:
        layers.append(Leading(nn.Identity(), kept) if shape.ordered else public_projection(features, kept))
    layer = nn.Linear(kept or features, shape.classes, bias=False)
    nn.init.zeros_(layer.weight)
    return split(nn.Sequential(*layers, layer), nn.Linear(shape.classes, shape.classes), features)


def public_projection(features: int, kept: int) -> nn.Linear:
    """Frozen, drawn from its sizes: rows keep their lengths on average."""
    layer = nn.Linear(features, kept, bias=False)
    initialise(layer, "projection")
    with torch.no_grad():
        layer.weight.mul_(math.sqrt(features / (2 * kept)))
    return layer.requires_grad_(False)


def directions_split(centre: Array, basis: Array, shape: Shape) -> Split:
    """A linear layer of released directions, and linear heads."""
    layer = nn.Linear(basis.shape[0], basis.shape[1], bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(basis.T.astype(np.float32)))
    representation = nn.Sequential(Centred(centre, 1.0), layer)
    return split(representation, nn.Linear(basis.shape[1], shape.classes), len(centre))


def _centre(run: Run, shape: Shape, mu_squared: float) -> tuple[Array, float]:
    """The mean of users' mean rows, shrunk by how much of it is noise, and how far rows of length one are from it."""
    query = Query(Bound(1.0, run.users.facts.features - shape.raw), mu_squared)
    released = run.release("centre", MeanRow(shape.rows_per_user, shape.classes, shape.raw), {"mean": query})["mean"]
    mean = released.value / run.users.facts.users
    noise = len(mean) * (released.sigma / run.users.facts.users) ** 2
    length = float(mean @ mean)
    centre = mean * max(1 - noise / max(length, 1e-300), 0.0)
    return centre, math.sqrt(max(1 - min(float(centre @ centre), 1.0), 0.05))


def _choose_heads(
    run: Run, learned: SharedPart, usual: tuple[int, int], rows_per_user: int, mu_squared: float
) -> SharedPart:
    """The kinds of heads that did best, with the shared part and without, and by how much they differ."""
    query = Query(Bound(MOST_DIFFERENT, len(CANDIDATES)), mu_squared)
    released = run.release("heads", HeadLosses(learned, rows_per_user), {"losses": query})["losses"]
    losses = released.value / run.users.facts.users
    noise = math.sqrt(2) * released.sigma / run.users.facts.users  # of a difference
    handicap = np.full(len(CANDIDATES), noise)  # one that is hardly better is so by luck
    handicap[list(usual)] = 0.0
    scored = learned.plan.share == "linear"  # elsewhere a head without its user's rows would know nothing
    shared, alone = (
        min(
            (i for i, c in enumerate(CANDIDATES) if c.kind == kind and (scored or c.slope)),
            key=lambda i: float(losses[i] + handicap[i]),
        )
        for kind in ("shared", "alone")
    )
    advantage = float(losses[alone] - losses[shared])
    trusted = advantage if abs(advantage) > CLEAR * noise else 0.0
    return replace(learned, shared=CANDIDATES[shared], alone=CANDIDATES[alone], advantage=trusted)


def published(run: Run, learned: SharedPart) -> SharedPart:
    facts = {
        "share": learned.plan.share,
        "size": learned.size,
        "shared": CANDIDATES.index(learned.shared),
        "alone": CANDIDATES.index(learned.alone),
        "advantage": learned.advantage,
        "signal_to_noise": [r.signal_to_noise for r in learned.rounds],
    }
    run.derive("network", {"weights": learned.weights.astype(np.float64), "centre": learned.centre}, **facts)
    return learned
