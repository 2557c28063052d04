"""Training as a walk of noisy steps: charge, sample, clip, add noise, move.

Some steps make a page, so that a killed run goes on from the last page without drawing any noise twice.
`choose_settings` decides what is done if nobody says otherwise, from public numbers: users, budget, sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import nn

from privrep.errors import InputError
from privrep.multimodal.closed import (
    MOST_FEATURES,
    TOO_NOISY,
    ClosedProblem,
    compute_class_directions,
    compute_moment_noise,
    release_whitening,
)
from privrep.multimodal.mechanisms.bank import BankStep
from privrep.multimodal.mechanisms.batch import BatchStep
from privrep.multimodal.mechanisms.classes import ClosedRows
from privrep.multimodal.mechanisms.pairwise import InsideStep, check_inside
from privrep.multimodal.towers import Centred, Layout, Towers
from privrep.neural.rounds import TrainingSettings as Server
from privrep.nn.optimiser import Optimiser
from privrep.privacy.billboard import Release
from privrep.privacy.bounds import Bound
from privrep.privacy.calibration import Query
from privrep.privacy.protocol import EVERYONE, Everyone
from privrep.privacy.release import State
from privrep.privacy.run import Run
from privrep.privacy.sampling import Fixed, Poisson, Sampling, plan_noise_multiplier
from privrep.typing import Array, Singles

Mechanism = Literal["bank", "batch", "inside"]
Sampler = Literal["poisson", "fixed"]
Solver = Literal["descent", "classes"]
Step = BankStep | BatchStep | InsideStep

STEPS = 40
LOGIT_NOISE = 1.1  # standard deviation that noise may add to the logits of a row of length one, from a start of zeros
CAREFUL = 0.35  # the same, from a start that knows something
CLIP = 0.2  # far below most gradients: those of rows that are told apart well count, too
FASTEST = 200.0  # rate with that clip: beyond it steps overshoot
CLASS_STEPS, CLASS_CLIP = 10, 0.3  # for the problem of classes
CLASS_RATE = 120.0  # times the root of users mu; noise is shrunk, so that half or twice as much will do
MOMENT = 0.1  # the share of the budget for what whitens features
FEW_CLASSES = 32  # this many classes are a closed problem in any space of texts; twice its directions always are


@dataclass(frozen=True)
class ClipSettings:
    """Settings of the steps; every number is public."""

    mechanism: Mechanism = "bank"
    steps: int = 40
    batch: int | None = None  # users of a batch, on average where it is a Poisson sample; None: everyone, in every step
    sampling: Sampler = "poisson"
    clip: float = 1.0  # bounds a user's gradient ("bank"), the batch's ("batch"), what a user moves ("inside")
    rate: float = 1e-3
    optimiser: Literal["sgd", "momentum", "adam"] = "adam"
    betas: tuple[float, float] = (0.9, 0.98)
    floor: float = 1e-6  # the least divisor of Adam
    average: float = 0.0  # the share of the steps, the last ones, whose weights are averaged
    page: int = 50  # steps of a page
    solver: Solver = "descent"  # "classes": the convex problem of texts that are a few classes (`multimodal.closed`)
    moment: float = 0.0  # the share of the budget of "classes", beside a centre, that whitens features
    # ---- memory alone: what follows changes neither gradients, but for rounding, nor what they cost
    chunk: int = 256  # rows that are differentiated at a time ("batch"); here because files keep it with the others

    def __post_init__(self) -> None:
        if self.mechanism not in ("bank", "batch", "inside"):
            raise InputError(f"mechanism is bank, batch or inside. Got {self.mechanism!r} instead.")
        if self.sampling not in ("poisson", "fixed"):
            raise InputError(f"sampling is poisson or fixed. Got {self.sampling!r} instead.")
        counts = (self.steps, self.page, self.chunk, *(() if self.batch is None else (self.batch,)))
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in counts):
            raise InputError(
                "steps, steps of a page, rows of a chunk and users of a batch are whole numbers, 1 or more."
            )
        if not (0 < self.clip < math.inf and 0 < self.rate < math.inf and 0 <= self.average <= 1):
            raise InputError(
                "clip and rate are positive and finite, and the share of steps to average lies between 0 and 1."
            )
        if self.mechanism == "inside" and (self.batch is None or self.sampling != "fixed"):
            raise InputError("clipping inside the loss takes batches of a fixed size: say batch and sampling='fixed'.")
        if self.solver not in ("descent", "classes") or not 0 <= self.moment < 1:
            raise InputError("solver is descent or classes, and the share for a moment lies between 0 and 1, below 1.")
        if self.solver == "classes" and (self.mechanism != "bank" or self.batch is not None):
            raise InputError("classes are told apart by the mechanism bank, and everyone is asked: leave batch out.")
        self.make_server()

    def make_server(self) -> Server:
        """Return the settings of the server's optimiser."""
        first, second = self.betas
        return Server(
            rounds=self.steps,
            server=self.optimiser,
            server_rate=self.rate,
            momentum=first,
            second_momentum=second,
            floor=self.floor,
        )

    def choose_audience(self, users: int) -> Everyone | Sampling:
        """Return who is asked in a step, of this number of users."""
        if self.batch is None or self.batch >= users:
            return EVERYONE
        return Fixed(self.batch, users) if self.sampling == "fixed" else Poisson(self.batch / users)


@dataclass(frozen=True, eq=False)
class Question:
    """The question of a step, but for the weights: all of it public."""

    towers: Towers
    layout: Layout
    settings: ClipSettings
    temperature: float
    rows_per_user: int
    users: int

    def step(self, weights: Singles) -> Step:
        """Return what users are asked for at these weights, (size,)."""
        common = (self.towers, weights, self.layout, self.temperature, self.rows_per_user)
        if self.settings.mechanism == "bank":
            return BankStep(*common)
        if self.settings.mechanism == "batch":
            return BatchStep(*common, self.settings.chunk)
        return InsideStep(*common, min(self.settings.batch or self.users, self.users))

    def choose_bound(self, step: Step) -> Bound:
        """Return the clipping bound of a step.

        With "bank" every user is clipped. With "batch" the gradient is one term, and any user may change all of it.
        """
        clip = self.settings.clip
        if isinstance(step, InsideStep):
            return step.choose_bound(clip)
        return Bound(clip, step.size, terms_per_user=1 if isinstance(step, BatchStep) else None)

    @property
    def divisor(self) -> float:
        """Return the number that makes a mean of what is released.

        It is the number of users asked, on average; a gradient of a batch is a mean already.
        """
        asked = min(self.settings.batch or self.users, self.users)
        return 1.0 if self.settings.mechanism == "batch" else float(asked)

    def check(self) -> None:
        """Raise InputError if there is nothing to learn, or if the mechanism does not fit the encoders."""
        if not self.users:
            raise InputError("there are no users to learn from; give pairs.")
        if self.settings.mechanism == "inside":
            check_inside(self.towers)
        if self.settings.mechanism == "bank" and self.layout.free < 2:
            raise InputError("the bank has fewer than two public captions to tell apart; give more, or use 'batch'.")
        if self.settings.solver == "classes" and not is_closed(self.towers, self.layout):
            raise InputError(
                "solver 'classes' takes texts of which each names a class (`labelled`), frozen, and a linear map of "
                "images that starts from zeros, without bias, cosine=False: use `blank`."
            )


def plan_step_noise(run: Run, settings: ClipSettings, mu_squared_before: float = 0.0) -> float:
    """Return the noise of every step, relative to its sensitivity.

    Args:
        run: the run, for its users and its budget.
        settings: how many steps there are, and who is asked.
        mu_squared_before: what is spent before the steps, a centre for example. The share for a moment comes off the
            rest.
    """
    sampling, budget = settings.choose_audience(run.users.facts.users), run.ledger.budget
    if isinstance(sampling, Everyone):
        left = (run.ledger.capacity - mu_squared_before) * (1 - settings.moment)
        return math.sqrt(settings.steps / left)
    batch_level = settings.mechanism != "bank"
    return plan_noise_multiplier(budget, sampling, settings.steps, mu_squared_before, batch_level=batch_level)


@dataclass(frozen=True, eq=False)
class Descent:
    """Steps of an optimiser on all weights of the towers, from public ones."""

    question: Question
    begin: Singles

    @property
    def bound(self) -> Bound:
        return self.question.choose_bound(self.question.step(self.begin))

    def start(self) -> State:
        """Return the state before the first step."""
        return start_state(self.begin)

    def step(self, state: State) -> Step:
        """Return what users are asked for at a state."""
        return self.question.step(state["weights"].astype(np.float32))

    def move(self, state: State, released: Release) -> State:
        """Return the state after one step of the optimiser by a noisy gradient: public arithmetic."""
        gradient = self.step(state).to_gradient(released.value / self.question.divisor)
        return move_weights(state, gradient, self.question.settings)


def train(
    run: Run, question: Question, start: Singles, multiplier: float, on_step: Callable[[int], None] = lambda done: None
) -> Singles:
    """Take all steps, from public weights, and return the trained ones, (size,).

    Pages are `steps-1`, `steps-2` and so on, each with where its steps ended.

    Args:
        run: the run whose ledger is charged.
        question: what is asked in a step.
        start: the weights at the start, (size,).
        multiplier: the noise of every step, relative to its sensitivity.
        on_step: told how many steps are done.
    """
    settings = question.settings
    if run.ledger.budget.relation != "replace-one-user":
        raise InputError("steps go by the number of users, which is public under replace-one-user alone: use that.")
    question.check()
    by_classes = settings.solver == "classes"
    problem = _make_closed_problem(run, question, multiplier) if by_classes else Descent(question, start)
    query, state, done = {"gradient": Query(problem.bound, multiplier**-2)}, problem.start(), 0
    while done < settings.steps:
        steps, before = min(settings.page, settings.steps - done), done
        state = run.iterate(
            f"steps-{done // settings.page + 1}",
            steps,
            state,
            problem.step,
            query,
            lambda state, released: problem.move(state, released["gradient"]),
            settings.choose_audience(run.users.facts.users),
            lambda number, before=before: on_step(before + number),  # type: ignore[misc]
        )
        done += steps
        on_step(done)
    return (state["average"] if settings.average else state["weights"]).astype(np.float32)


def _make_closed_problem(run: Run, question: Question, multiplier: float) -> ClosedProblem:
    """Return the convex problem of classes, after a release of the moment that whitens features, if it has a share.

    Args:
        run: the run whose ledger is charged.
        question: what is asked in a step.
        multiplier: the noise of every step, which says what the steps spend.
    """
    settings, module, layout = question.settings, question.towers.image.module, question.layout
    rows = ClosedRows(layout, module[0] if isinstance(module, nn.Sequential) else None, question.rows_per_user)
    left = settings.steps / multiplier**2
    return ClosedProblem(
        rows,
        release_whitening(run, rows, left * settings.moment / (1 - settings.moment)),
        compute_class_directions(question.towers, layout),
        settings.steps,
        settings.clip,
        settings.rate,
        settings.average,
        question.temperature,
        question.users,
    )


def start_state(weights: Singles) -> State:
    """Return the state before the first step: these weights, (size,), and averages of zero."""
    zeros = np.zeros(len(weights))
    return {
        "weights": weights.astype(np.float64),
        "first": zeros,
        "second": zeros,
        "average": zeros,
        "taken": np.zeros(1),
    }


def move_weights(state: State, gradient: Array, settings: ClipSettings) -> State:
    """Return the next state: weights, the optimiser's averages, and the average of the last weights.

    Args:
        state: the state before.
        gradient: noisy, in all weights, (size,).
        settings: the optimiser, and the share of steps that are averaged.
    """
    steps = int(state["taken"][0])
    before = Optimiser(settings.make_server(), state["weights"], state["first"], state["second"], steps)
    after = before.move(-gradient)
    averaged = steps + 1 - settings.steps + max(round(settings.steps * settings.average), 1)
    mean = state["average"] + (after.weights - state["average"]) / averaged if averaged > 0 else state["average"]
    first, second = (
        state[key] if value is None else value for key, value in (("first", after.first), ("second", after.second))
    )
    return {
        "weights": after.weights,
        "first": first,
        "second": second,
        "average": mean,
        "taken": np.array([steps + 1.0]),
    }


def choose_settings(
    mechanism: Mechanism, model: Towers, users: int, mu: float, temperature: float, layout: Layout | None = None
) -> ClipSettings:
    """Return the settings of the steps that suit public numbers.

    Where texts are a few classes (`is_closed`), the convex problem of classes is solved.

    A linear projection of unit features with free lengths (`cosine=False`) has a convex loss under "bank". T steps of
    rate r on everyone, clipped to C, leave noise of standard deviation 2 C r T / (users mu) in every weight. The rate
    is such that the logits of a row have noise of LOGIT_NOISE, or FASTEST if that is less. So a small budget goes a
    short way, and stops early. Less noise is let into weights that are good for something as they are.

    Args:
        mechanism: what is clipped.
        model: both encoders.
        users: how many there are.
        mu: of the budget.
        temperature: by which similarities are divided.
        layout: what rows hold; None for rows whose texts are not known to be classes.
    """
    if mechanism == "bank" and layout is not None and is_closed(model, layout):
        return _choose_class_settings(layout.image_numbers, users, mu)
    convex = is_linear_map(model.image.module) and not model.cosine and not model.text.size
    if mechanism == "bank" and convex:
        noise = CAREFUL if model.image.weights().any() else LOGIT_NOISE
        rate = min(FASTEST, noise * temperature * users * mu / (2 * CLIP * STEPS))
        return ClipSettings("bank", STEPS, None, clip=CLIP, rate=rate, optimiser="sgd", average=0.5, page=10)
    batch = max(min(users // 4, 1024), min(users, 2))
    sampling: Sampler = "fixed" if mechanism == "inside" else "poisson"
    return ClipSettings(
        mechanism, 4 * STEPS, batch, sampling=sampling, clip=0.1 if mechanism == "batch" else 1.0, rate=1e-3
    )


def _choose_class_settings(features: int, users: int, mu: float) -> ClipSettings:
    """Return the settings for texts that are a few classes.

    Rows have length one, and shrinking finds how far a budget goes: the rate need not be exact. A moment is released
    where its noise leaves something to see.

    Args:
        features: how many numbers a row of features has.
        users: how many there are.
        mu: of the budget.
    """
    clear = features <= MOST_FEATURES and compute_moment_noise(features, users, MOMENT * mu**2) < TOO_NOISY
    return ClipSettings(
        "bank",
        CLASS_STEPS,
        None,
        clip=CLASS_CLIP,
        rate=CLASS_RATE * math.sqrt(users * mu),
        optimiser="sgd",
        average=0.5,
        page=CLASS_STEPS,
        solver="classes",
        moment=MOMENT if clear else 0.0,
    )


def is_closed(model: Towers, layout: Layout) -> bool:
    """Return whether the problem is a softmax regression over a few classes, from a start of zeros: public facts."""
    if layout.classes is None or model.cosine or model.learn_scale or model.text.size:
        return False
    module, classes = model.image.module, layout.class_count
    last = module[-1] if isinstance(module, nn.Sequential) else module
    blank = (
        is_linear_map(module) and last.bias is None and last.weight.requires_grad and not model.image.weights().any()
    )
    return bool(blank) and 2 <= classes <= max(2 * model.dim, FEW_CLASSES)


def is_linear_map(module: nn.Module) -> bool:
    """Return whether a module is a linear layer on features, centred or not."""
    if isinstance(module, nn.Sequential):
        return len(module) == 2 and isinstance(module[0], Centred) and isinstance(module[1], nn.Linear)
    return isinstance(module, nn.Linear)
