"""How much to share: what so many users and so much budget can carry, from public facts alone.

The noise of one of T rounds over p shared numbers has norm 2 C sqrt(T p) / mu, and n users who agreed completely would
move the sum by n C: their ratio squared, (n mu / 2)^2 / (T p), is the signal. A network of 235,000 weights, 1,000 users
at epsilon 1 and 40 rounds have a signal of 0.002: what is released is noise. One linear layer on 60 public features and
ten classes, with 16 rounds, has 1.6. On development data rounds helped down to a signal of about one half.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from privrep.errors import InputError

Share = Literal["auto", "all", "adapters", "linear", "directions", "nothing"]
ROUNDS = 16
FEWEST_ROUNDS = 4  # by which directions are counted that users can carry
MORE_ROUNDS = (32, 64)
PLENTY = 4.0  # signal at which more rounds are taken
RANK = 20  # of directions
MOST_PAIRED = 512  # features whose pairs are affordable
LEAST_SIGNAL = 0.5
LOOKED = 4  # the part of rounds, one over this, after which users' updates tell whether classes mean the same
FEWEST_FEATURES = 8
ADAPTER_RANKS = (8, 4, 2, 1)


@dataclass(frozen=True)
class SharingPlan:
    """The part that is shared, in how many rounds, and why."""

    share: Share
    parameters: int
    rounds: int
    signal: float
    features: int = 0  # that a linear layer takes: of the public map, or of a public projection of it
    rank: int = 0  # of adapters, or of directions
    words: str = ""
    otherwise: SharingPlan | None = None  # where a class turns out not to mean the same for everybody


def signal(users: int, mu: float, rounds: int, parameters: int) -> float:
    """Squared ratio of what users who all agree would add up to, and of the norm of the noise; see above."""
    return (users * mu / 2) ** 2 / (rounds * max(parameters, 1))


def most_parameters(users: int, mu: float, rounds: int, least: float = LEAST_SIGNAL) -> int:
    """Return how many shared numbers have at least this signal.

    Args:
        users: how many there are.
        mu: of the budget.
        rounds: over which it is spread.
        least: the signal.
    """
    return int((users * mu / 2) ** 2 / (rounds * least))


@dataclass(frozen=True)
class Options:
    """The parts that could be shared: sizes, all of them public."""

    classes: int
    features: int  # of the public map, or of the rows, or of the frozen representation
    whole: int | None = None  # trainable parameters of a representation that was given
    adapters: tuple[tuple[int, int], ...] = ()  # (rank, parameters), where the representation is pretrained
    frozen: bool = False  # whether the features are outputs of a network that stays as it is
    untrained: str = ""  # why nothing of that network can be trained


def count_deciding_rounds(rounds: int, alternative: bool) -> int:
    """Return how many rounds, the first ones, also tell whether a class means the same to everybody; 0: none.

    Args:
        rounds: of the plan.
        alternative: whether the plan has something else for users to whom a class means different things.
    """
    return max(rounds // LOOKED, 1) if alternative and rounds > 1 else 0  # after the only round nothing is left to do


def plan_sharing(offer: Options, users: int, mu: float, share: Share, rounds: int | None = None) -> SharingPlan:
    """Return the largest part that the budget can carry: a whole representation, its adapters, or a linear layer.

    Args:
        offer: what could be shared.
        users: how many there are.
        mu: of the budget.
        share: what is asked for.
        rounds: how many are asked for; None leaves it to the plan.
    """
    wanted = rounds or ROUNDS
    if share == "all":
        if offer.whole is None:
            raise InputError("share='all' needs a representation. Pass one, or leave share='auto'.")
        return _planned("all", offer.whole, users, mu, wanted)
    if share == "auto" and offer.whole and signal(users, mu, wanted, offer.whole) >= LEAST_SIGNAL:
        return _planned("all", offer.whole, users, mu, wanted)
    if share in ("auto", "adapters"):
        for rank, size in offer.adapters:
            if signal(users, mu, wanted, size) >= LEAST_SIGNAL or (share, rank) == ("adapters", offer.adapters[-1][0]):
                return _planned("adapters", size, users, mu, wanted, rank=rank)
        if share == "adapters":
            raise InputError("share='adapters' needs a pretrained representation with nn.Linear or nn.Conv2d layers.")
    if share == "linear":
        return _linear_of(offer, offer.features, users, mu, wanted)
    if share == "directions":
        return _directions(offer, users, mu)
    if share == "nothing":
        words = "Shared: nothing, as asked. Everybody learns alone, and nothing is spent."
        return SharingPlan("nothing", 0, 0, 0.0, words=words)
    plan, other = _linear(offer, users, mu, rounds), _directions(offer, users, mu)
    if offer.whole:
        weak = signal(users, mu, wanted, offer.whole)
        too_large = f" The representation as a whole, {offer.whole:,} numbers with a signal of {weak:.2g}, is too much."
        plan = replace(plan, words=plan.words + too_large)
    if offer.untrained:
        plan = replace(plan, words=f"{plan.words} The network itself is not trained: {offer.untrained}.")
    worth = plan.share == "linear" and other.signal >= LEAST_SIGNAL and offer.features <= MOST_PAIRED
    return replace(plan, otherwise=other) if worth else plan


def _linear(offer: Options, users: int, mu: float, rounds: int | None) -> SharingPlan:
    """Return a linear layer on all features, or nothing where too few directions of them can be carried."""
    if _carried(offer, users, mu) < _enough(offer):
        return _nothing(offer, users, mu)
    return _linear_of(offer, offer.features, users, mu, rounds or _more_rounds(offer, users, mu))


def _more_rounds(offer: Options, users: int, mu: float) -> int:
    """Return how many rounds: more where noise hardly counts."""
    carried = [some for some in MORE_ROUNDS if signal(users, mu, some, offer.features * offer.classes) >= PLENTY]
    return max([ROUNDS, *carried])


def _carried(offer: Options, users: int, mu: float) -> int:
    """Return how many directions of the features a linear layer can carry.

    More rounds of a layer add no noise for as long as they go as far in all, so few rounds are the measure.
    """
    return most_parameters(users, mu, FEWEST_ROUNDS) // offer.classes


def _enough(offer: Options) -> int:
    return min(FEWEST_FEATURES, offer.features)


def _linear_of(offer: Options, kept: int, users: int, mu: float, rounds: int) -> SharingPlan:
    plan = _planned("linear", kept * offer.classes, users, mu, rounds, features=kept, frozen=offer.frozen)
    carried, enough = _carried(offer, users, mu), _enough(offer)
    head = plan.words.partition(". ")[0]
    verdict = "" if carried >= enough else " That is too little: what is released will be mostly noise."
    far = f"{users:,} users with this budget carry {min(carried, kept):,} directions of them for each class"
    return replace(plan, words=f"{head}. {far}, where {enough} are the least that is worth while.{verdict}")


def _directions(offer: Options, users: int, mu: float) -> SharingPlan:
    """Two moments of pairs of features; both are of a kind whose noise is half as large, in squares."""
    numbers = offer.features * (offer.features + 1)
    return replace(
        _planned("directions", numbers, users, math.sqrt(2) * mu, 1, features=offer.features, frozen=offer.frozen),
        rank=min(RANK, offer.features),
    )


def _planned(
    share: Share,
    parameters: int,
    users: int,
    mu: float,
    rounds: int,
    *,
    features: int = 0,
    rank: int = 0,
    frozen: bool = False,
) -> SharingPlan:
    ratio = signal(users, mu, rounds, parameters)
    public = f"{features} outputs of the frozen network" if frozen else f"{features} public features"
    what = {
        "all": "the whole representation",
        "adapters": f"adapters of rank {rank} on the frozen representation",
        "linear": f"a linear layer on {public}",
        "directions": f"the directions of {public} in which classes differ",
    }[share]
    often = "round" if rounds == 1 else "rounds"
    verdict = "" if ratio >= LEAST_SIGNAL else ". That is too little: what is released will be mostly noise"
    words = (
        f"Shared: {what}, {parameters:,} numbers in {rounds} {often}. {users:,} users with this budget have a signal "
        f"of {ratio:.2g}, where {LEAST_SIGNAL} is the least that is worth while{verdict}. They can carry "
        f"{most_parameters(users, mu, rounds):,} numbers."
    )
    return SharingPlan(share, parameters, rounds, ratio, features, rank, words)


def _nothing(offer: Options, users: int, mu: float) -> SharingPlan:
    most = most_parameters(users, mu, FEWEST_ROUNDS)
    words = (
        f"Shared: nothing. {users:,} users with this budget carry {most:,} numbers, fewer than a linear layer for "
        f"{offer.classes} classes needs. Everybody learns alone, and nothing is spent."
    )
    return SharingPlan("nothing", 0, 0, 0.0, words=words)


LEAST_PAIRED = 64.0  # signal that squares of features must have: on development data more features did harm below it
FEWEST_KEPT = 24  # features with which users can do something alone, whatever is shared


@dataclass(frozen=True)
class FeaturePlan:
    """How many of the public features a fit of numbers uses, and why."""

    keep: int
    size: int
    signal: float
    words: str


def plan_features(
    what: str, size: int, users: int, mu: float, keep: int | None = None, ordered: bool = False
) -> FeaturePlan:
    """Return how many features carry a regression: pairs of them are released, so noise grows with their square.

    Args:
        what: the features are called.
        size: how many there are.
        users: how many there are; public under replace-one-user alone.
        mu: of the budget.
        keep: how many are asked for; None: as many as have a signal of LEAST_PAIRED, and FEWEST_KEPT in any case.
        ordered: whether the first are kept, or else a public projection.
    """
    carried = int(users * mu / 2 / math.sqrt(LEAST_PAIRED))
    kept = keep or min(max(carried, FEWEST_KEPT), size)
    ratio = signal(users, mu, 1, kept * kept)
    how = f"all {size:,}" if kept >= size else f"{'the first' if ordered else 'a public projection to'} {kept:,}"
    verdict = "" if ratio >= LEAST_PAIRED else ". Below that users rely on their own rows for the most part"
    words = (
        f"Used: {how}{'' if kept >= size else f' of {size:,}'} features, {what}. {users:,} users with this budget give "
        f"their pairs a signal of {ratio:.2g}, where {LEAST_PAIRED:g} is the least that is worth while{verdict}."
    )
    return FeaturePlan(kept, size, ratio, words)
