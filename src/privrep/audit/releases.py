"""One release of canaries through each door of a run, with a ledger of its own: sums, samples, batches, walks, keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from privrep.audit.canaries import Sing, draw_coins, make_choir
from privrep.audit.lower import bound_chance_below
from privrep.audit.seen import Seen
from privrep.audit.tradeoffs import ALL_ASKED, Tradeoff
from privrep.audit.worlds import TwoWorlds
from privrep.errors import InputError
from privrep.privacy.billboard import Billboard
from privrep.privacy.bounds import Bound
from privrep.privacy.calibration import Query, calibrate
from privrep.privacy.events import Relation
from privrep.privacy.ledger import Budget, Ledger
from privrep.privacy.noise import NoiseSource
from privrep.privacy.run import Run
from privrep.privacy.sampling import Fixed, Poisson, plan_noise_multiplier
from privrep.privacy.selection import COUNTED, compute_log_chance, compute_threshold, make_counts_bound
from privrep.typing import Array
from privrep.users.holders import KeyHolders

PAGE = "canaries"
ASIDE = 0.05  # of delta, for a selection
MOST_HOLDERS = 1 << 21  # of a selection: users who only see to it that keys are named


@dataclass(frozen=True)
class Settings:
    """The promise that is audited, and the effort.

    epsilon, delta, relation   the budget of a ledger.
    canaries                   how many there are: powers of two of 16 or more divide evenly.
    rate                       the chance to be asked, of samples and batches.
    multiplier                 noise multiplier of the event; None spends the whole budget on it.
    nodes                      nodes that add noise.
    steps                      of a walk.
    aside                      part of delta that a selection sets aside; None for a twentieth.
    """

    epsilon: float
    delta: float
    relation: Relation = "replace-one-user"
    canaries: int = 1 << 16
    rate: float = 0.25
    multiplier: float | None = None
    nodes: int = 4
    steps: int = 16
    aside: float | None = None

    def __post_init__(self) -> None:
        Budget(self.epsilon, self.delta, self.relation)
        if not 16 <= self.canaries <= 1 << 22:
            raise InputError(f"an audit takes 16 to {1 << 22:,} canaries. Got {self.canaries:,} instead.")

    def open_run(self, users: TwoWorlds, noise: NoiseSource) -> Run:
        """Return a run in memory, with a ledger of its own, on made-up users."""
        return Run(users, Ledger(Budget(self.epsilon, self.delta, self.relation)), Billboard(), noise)

    def spend(self, run: Run) -> float:
        """Return the mu^2 of one event about everyone."""
        return run.ledger.capacity if self.multiplier is None else self.multiplier**-2


@dataclass(frozen=True)
class Told:
    """A release, the ledger's claim about it, and what else is wrong: in words, or empty."""

    claimed: float
    seen: Seen
    fault: str = ""


def _finish(run: Run, released: Array, coins: NDArray[np.bool_], settings: Settings, tradeoff: Tradeoff) -> Told:
    """Return what was released of a choir, beside the totals of all passes, added up."""
    assert isinstance(run.users, TwoWorlds)
    answered, other = (np.sum([totals["sum"][world] for totals in run.users.totals], axis=0) for world in (0, 1))
    passes = len(run.users.totals)
    middle = 0.0 if settings.relation == "replace-one-user" else passes / 2  # of 1 or -1, or of 1 or nothing
    return Told(run.ledger.epsilon, Seen(coins, released, answered, other, middle, tradeoff))


def release_sums(settings: Settings, noise: NoiseSource) -> Told:
    """Release a sum over everyone."""
    coins = draw_coins(settings.canaries)
    run = settings.open_run(make_choir(coins, settings.relation), noise)
    query = Query(Bound(1.0, len(coins)), settings.spend(run))
    value = run.release(PAGE, Sing(len(coins)), {"sum": query})["sum"].value
    return _finish(run, value, coins, settings, ALL_ASKED)


def _release_about(settings: Settings, noise: NoiseSource, among: Poisson | Fixed, tradeoff: Tradeoff) -> Told:
    """Release a sum over some users, drawn in secret."""
    if settings.relation != "replace-one-user":
        raise InputError("sums over samples have slots, which go with replace-one-user alone.")
    coins = draw_coins(settings.canaries)
    run = settings.open_run(make_choir(coins, settings.relation), noise)
    multiplier = settings.multiplier or _plan_noise(run.ledger.budget, among)
    query = Query(Bound(1.0, len(coins)), multiplier**-2)
    value = run.release(PAGE, Sing(len(coins), padded=True), {"sum": query}, among)["sum"].value
    return _finish(run, value, coins, settings, tradeoff)


@lru_cache(maxsize=8)
def _plan_noise(budget: Budget, among: Poisson | Fixed) -> float:
    """Return the noise multiplier that spends a budget on one page, which takes a second to find."""
    return plan_noise_multiplier(budget, among, 1)


def release_sample(settings: Settings, noise: NoiseSource) -> Told:
    """Release a sum over a Poisson sample."""
    return _release_about(settings, noise, Poisson(settings.rate), Tradeoff("sample", settings.rate))


def release_batch(settings: Settings, noise: NoiseSource) -> Told:
    """Release a sum over a batch of fixed size."""
    among = Fixed(max(round(settings.rate * settings.canaries), 1), settings.canaries)
    return _release_about(settings, noise, among, Tradeoff("batch", among.rate))


def release_walk(settings: Settings, noise: NoiseSource) -> Told:
    """Take a walk of some steps, each about everyone, whose state is the sum of all releases."""
    coins = draw_coins(settings.canaries)
    run = settings.open_run(make_choir(coins, settings.relation), noise)
    share = run.ledger.capacity / settings.steps if settings.multiplier is None else settings.multiplier**-2
    query, start = Query(Bound(1.0, len(coins)), share), {"sum": np.zeros(len(coins))}
    state = run.iterate(
        PAGE,
        settings.steps,
        start,
        lambda state: Sing(len(coins)),
        {"sum": query},
        lambda state, released: {"sum": state["sum"] + released["sum"].value},
    )
    return _finish(run, state["sum"], coins, settings, ALL_ASKED)


def select_keys(settings: Settings, noise: NoiseSource, error: float) -> Told:
    """Select keys. Every canary adds to one of two keys of its own, which enough others hold for them to be named.

    As many users hold a key that nobody else holds. More of these keys than delta' allows must not be named.

    Args:
        settings: the promise.
        noise: of the run.
        error: chance that a sound selection is said to name too many.
    """
    replaced, delta = settings.relation == "replace-one-user", settings.aside or ASIDE * settings.delta
    left = Budget(settings.epsilon, settings.delta - delta, settings.relation)
    mu_squared = left.mu**2 * (1 - 1e-9) if settings.multiplier is None else settings.multiplier**-2
    sigma, log_chance = calibrate(COUNTED, mu_squared, settings.relation).sigma, compute_log_chance(delta, left.epsilon)
    others = math.ceil(compute_threshold(sigma, log_chance) + 9 * sigma)
    keys = 2 * max(min(settings.canaries, MOST_HOLDERS // others) // 2, 1)
    coins = draw_coins(keys // 2 if replaced else keys)
    worlds = [_make_holders(each, keys, others, replaced) for each in (coins, ~coins)]
    run = settings.open_run(make_choir(coins[:1], settings.relation), noise)
    named = run.select(PAGE, worlds[0], mu_squared, delta)
    counts = dict(zip(named, run.billboard.read_selection(PAGE).counts.value, strict=True))
    if any(key not in counts for key in range(keys)):
        raise InputError("keys that many users hold were not named: this selection cannot be audited.")
    released, answered, other = (
        np.asarray(each, dtype=np.float64)[:keys]
        for each in (
            [counts[key] for key in range(keys)],
            *(one.count_keys(make_counts_bound(one)).exact_numbers for one in worlds),
        )
    )
    alone, chance = len(named) - keys, math.exp(log_chance)
    fault = ""
    if bound_chance_below(alone, keys, error) > chance:
        fault = f"{alone} of {keys:,} keys that one user holds were named, each with a chance of {chance:.2g} at most"
    if replaced:
        released, answered, other = ((each[0::2] - each[1::2]) / math.sqrt(2) for each in (released, answered, other))
    return Told(run.ledger.epsilon, Seen(coins, released, answered, other, 0.0 if replaced else others + 0.5), fault)


def _make_holders(coins: NDArray[np.bool_], keys: int, others: int, replaced: bool) -> KeyHolders:
    """Return who holds which key: canaries by their coins, `others` users for each key, and one for each key alone.

    Args:
        coins: of the canaries.
        keys: that many users hold.
        others: users for each of them.
        replaced: whether a canary holds one key of two, or else one key or none.
    """
    canaries = 2 * np.arange(len(coins)) + ~coins if replaced else np.flatnonzero(coins)
    places = np.concatenate([canaries, np.repeat(np.arange(keys), others), np.arange(keys, 2 * keys)])
    return KeyHolders(tuple(range(2 * keys)), places.astype(np.int64), np.arange(len(places) + 1))
