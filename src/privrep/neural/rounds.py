"""Server rounds: ask users for a clipped sum of updates, average by public numbers, and move the shared weights.

Formal guarantee: every round is one page of `Run.release`, which clips, charges and adds noise; all else is computed
from what the pages say and from public facts: the server's optimiser, the next bound, the ratio of signal to noise. So
a run that is continued reads the pages that stand, repeats the arithmetic, and ends with the same weights.

`report_loss` estimates the training loss for the operator's screen. The estimate is NOT PRIVATE, and written nowhere.
It is computed beside the run, from rows that the operator has anyway, and nothing of it goes back: a watched run
releases and spends what one that is not watched does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.heads.gradient import HeadFit, HeadRule, cross_entropy, head_scores, labels_of
from privrep.neural.gradient_step import GradientStep
from privrep.neural.local_sgd import LocalSgdStep
from privrep.neural.standard_step import Standards, StandardStep
from privrep.nn.flat_module import Split
from privrep.nn.ghost_clipping import find_obstacle
from privrep.nn.optimiser import Optimiser
from privrep.nn.threads import one_thread, own_copy, rows_of
from privrep.privacy.billboard import Release
from privrep.privacy.bounds import DIRECTION_ONLY, Bound, Contributions, Losses
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import NormAtMost
from privrep.privacy.protocol import Step, StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.privacy.sampling import Poisson
from privrep.typing import Singles
from privrep.users.batching import clear_non_finite, pad_batches

OnLoss = Callable[[str, float], None]
GoOn = Callable[[Sequence[Release], Singles], float]
"""From all released updates and the weights after a round to what the next round spends, of mu squared; 0 ends."""

WATCHED = 64  # users, the first of the table
GREW = 1.6  # times the least bound so far
HALF = Bound(0.5, 1)  # of what a user says of its update's length: one half if it is short, minus one half if not


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of the rounds, public and fixed beforehand. The defaults are for EMNIST, by Shen et al. (2023)."""

    rounds: int = 40
    clip: float = 0.25
    step_size: float = 0.01  # of users' local steps
    batch: int | None = None  # rows of a local step; None: all of them
    epochs: int = 1
    head_fit: HeadRule = field(default_factory=HeadFit)
    rate: float = 1.0  # with which each user is asked in a round
    server: Literal["sgd", "momentum", "adam"] = "sgd"
    server_rate: float = 1.0
    momentum: float = 0.9
    second_momentum: float = 0.99
    floor: float = 1e-3  # of Adam's divisor
    quantile: float | None = None  # of users' updates: the bound follows it; None: the bound stays
    quantile_rate: float = 0.2  # how fast, on a logarithmic scale
    quantile_share: float = 0.05  # of a round's mu^2
    settle: float = 1.0  # by what the server's rate is multiplied where updates grow again: it went too far
    normalise: bool = False  # whether every update is brought to the length `clip`, shorter ones too

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.epochs < 1 or (self.batch is not None and self.batch < 1):
            raise InputError("rounds, epochs and rows of a batch are whole numbers of at least 1.")
        if not (self.step_size > 0 and self.server_rate > 0 and self.quantile_rate > 0):
            raise InputError("the sizes of steps, the users' and the server's, are positive.")
        if not (0 <= self.momentum < 1 and 0 <= self.second_momentum < 1 and self.floor > 0):
            raise InputError("the server's momentum lies in [0, 1), and the floor of its divisor is positive.")
        if self.server not in ("sgd", "momentum", "adam"):
            raise InputError(f"the server's optimiser is sgd, momentum or adam. Got {self.server!r} instead.")
        if self.quantile is not None and not 0 < self.quantile < 1:
            raise InputError(f"the bound can follow a quantile between 0 and 1. Got {self.quantile} instead.")
        if not 0 < self.settle <= 1:
            raise InputError(f"settle multiplies the server's rate: more than 0, at most 1. Got {self.settle} instead.")
        if not 0 < self.quantile_share < 1:
            raise InputError(f"the quantile's share lies between 0 and 1. Got {self.quantile_share} instead.")
        if self.normalise and self.quantile is not None:
            raise InputError("updates that are all brought to one length have no quantile to follow: leave one out.")

    @property
    def unit(self) -> float:
        """Return what released sums are multiplied by: updates that are normalised are released by direction alone."""
        return self.clip / DIRECTION_ONLY if self.normalise else 1.0


@dataclass(frozen=True)
class Round:
    """Public facts of a round that is over."""

    clip: float
    noise: float  # norm of the noise of the average, expected
    signal: float  # norm of the average without its noise, estimated from the release

    @property
    def signal_to_noise(self) -> float:
        return self.signal / self.noise


@dataclass(frozen=True, eq=False)
class TrainedWeights:
    """Shared weights after the last round, and what the rounds were like."""

    weights: Singles
    rounds: tuple[Round, ...]


def local_step(
    split: Split, weights: Singles, head_start: Singles, settings: TrainingSettings, rows_per_user: int
) -> GradientStep | LocalSgdStep:
    """Return what users do in a round: one pass for all, where they take one step on all rows and the layers allow it.

    Args:
        split: representation and head.
        weights: shared ones, (size,).
        head_start: weights at which heads start, (head size,).
        settings: of the rounds.
        rows_per_user: rows of a user that count.
    """
    common = (split, weights, head_start, settings.head_fit, settings.step_size, rows_per_user)
    once = settings.epochs == 1 and (settings.batch is None or settings.batch >= rows_per_user)
    if once and find_obstacle(split) is None:
        return GradientStep(*common)
    return LocalSgdStep(*common, settings.batch, settings.epochs)


def train(
    run: Run,
    start: Singles,
    make_step: Callable[[Singles], Step],
    settings: TrainingSettings,
    mu_squared: float,
    name: str = "round",
    go_on: GoOn | None = None,
) -> TrainedWeights:
    """Run all rounds from public weights `start`, (size,). Users do `make_step(weights)`, whose "update" they send.

    Each round is a page `{name}-{t}` that spends `mu_squared`: 1/z^2 with z the noise relative to the sensitivity. Of a
    sample that is what it would spend if all were asked: `sampling.plan_noise_multiplier` plans it. `go_on` says after
    each round what the next one spends, and whether there is one.
    """
    if run.ledger.budget.relation != "replace-one-user":
        raise InputError("the average divides by the number of users, which is public under replace-one-user alone.")
    asked = run.users.facts.users * settings.rate
    optimiser, clip, facts = Optimiser(settings, start.astype(np.float64)), settings.clip, []
    least, updates = math.inf, list[Release]()
    for t in range(1, settings.rounds + 1):
        step = make_step(optimiser.weights.astype(np.float32))
        released = _ask(run, f"{name}-{t}", step, len(start), clip, settings, mu_squared)
        update = released["update"]
        updates.append(update)
        facts.append(_facts(update, clip, asked / settings.unit))
        optimiser = optimiser.move(update.value * (settings.unit / asked))
        if settings.quantile is not None:
            short = 0.5 + float(released["short"].value[0]) / asked
            clip *= math.exp(-settings.quantile_rate * (min(max(short, 0.0), 1.0) - settings.quantile))
            if clip > GREW * least:
                optimiser, least = optimiser.settle(), clip
            least = min(least, clip)
        if go_on is not None and t < settings.rounds:
            mu_squared = go_on(updates, optimiser.weights.astype(np.float32))
            if not mu_squared:
                break
    return TrainedWeights(optimiser.weights.astype(np.float32), tuple(facts))


def _ask(
    run: Run, page: str, step: Step, size: int, clip: float, settings: TrainingSettings, mu_squared: float
) -> dict[str, Release]:
    sampling = Poisson(settings.rate)
    bound = Bound(DIRECTION_ONLY if settings.normalise else clip, size)
    if settings.quantile is None:
        return run.release(page, step, {"update": Query(bound, mu_squared)}, sampling)
    share = settings.quantile_share * mu_squared
    queries = {"update": Query(bound, mu_squared - share), "short": Query(HALF, share)}
    return run.release(page, MeasuredStep(step, clip), queries, sampling)


@dataclass(frozen=True, eq=False)
class MeasuredStep:
    """A step that also says of each user whether its update is no longer than this."""

    step: Step
    length: float

    @property
    def spec(self) -> StepSpec:
        return self.step.spec

    def __call__(self, batch: UserBatch) -> dict[str, Contributions | Losses]:
        update = self.step(batch)["update"]
        if isinstance(update, Losses):
            raise InputError("Losses are for choices; a round adds up updates.")
        return {"update": update, "short": NormAtMost(update, self.length)}


def _facts(update: Release, clip: float, asked: float) -> Round:
    expected = len(update.value) * update.sigma**2
    signal = max(float(update.value @ update.value) - expected, 0.0)
    return Round(clip, math.sqrt(expected) / asked, math.sqrt(signal) / asked)


def report_loss(on_loss: OnLoss, rows: UserTable, page: str, step: Step | None) -> None:
    """Tell `on_loss`, of a round that is over, the mean loss of a few users as the round began.

    Args:
        on_loss: hears the page and the loss.
        rows: of the users, as steps get them.
        page: of the round. Pages that are not of rounds are passed over.
        step: what users were asked in it.
    """
    inner = step.step if isinstance(step, MeasuredStep) else step
    standards = inner.standards if isinstance(inner, StandardStep) else None
    inner = inner.step if isinstance(inner, StandardStep) else inner
    if isinstance(inner, GradientStep | LocalSgdStep):
        on_loss(page, training_loss(inner, rows, standards))


def training_loss(step: GradientStep | LocalSgdStep, table: UserTable, standards: Standards | None = None) -> float:
    """Return the mean cross-entropy of the first users' rows by heads fitted to those very rows, at the step's weights.

    Args:
        step: of a round.
        table: the users' rows.
        standards: by which the step's rows are standardised, if they are.
    """
    some = min(WATCHED, table.n_users)
    batch = clear_non_finite(next(pad_batches([table.users(0, some)], step.rows_per_user, some)))
    batch = batch if standards is None else replace(batch, X=standards(batch))
    split, labels = step.split, labels_of(batch.y, step.split.classes)
    with one_thread(), torch.no_grad():
        Z = own_copy(split.representation)(torch.tensor(step.weights), rows_of(batch.X).flatten(0, 1))
        Z = Z.reshape(*labels.shape, -1)
        heads = step.head_fit.fit(torch.tensor(step.head_start), Z, labels, split.head)
        return float(cross_entropy(head_scores(heads, Z, split.head), labels).mean())
