"""The runs of `experiments.table1`: methods, their settings, and what is measured of each."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from experiments.network_references import alone, fedrep
from experiments.table1_data import CLASSES, Clients, linear_map, mapped, public_maps
from privrep.data.table import UserTable
from privrep.errors import NothingLearned
from privrep.heads.gradient import HeadFit
from privrep.neural.models import initialise, lenet, mlp
from privrep.neural.registry import METHODS as NETWORK_METHODS
from privrep.neural.rounds import TrainedWeights, TrainingSettings
from privrep.neural.user_state import Personal, fine_tune, fit_last_heads
from privrep.nn.flat_module import Split, split
from privrep.privacy.billboard import Billboard
from privrep.privacy.bounds import BoundedSum
from privrep.privacy.ledger import Budget, Ledger
from privrep.privacy.noise import simulated_noise
from privrep.privacy.run import Run
from privrep.users.memory import InMemoryUsers

SEED = 20_261_117
DELTA = 1e-5
PRIVATE = tuple(NETWORK_METHODS)
METHODS = ("stand-alone", *PRIVATE, "FedRep")
HEADS = HeadFit(steps=15, rate=0.01, momentum=0.9)
MORE_HEADS = (
    HEADS,
    HeadFit(steps=100, rate=0.01, momentum=0.9),
    HeadFit(steps=100, rate=0.03, momentum=0.9, ridge=0.03),
)
ALONE_RATE, ALONE_BATCH, ALONE_EPOCHS = 0.1, 10, 30  # as far as 300 epochs at 0.01
ALONE_CLIENTS = {"LeNet": 100}  # who train a network alone, at most: it takes long
MOST_ALONE = 500  # of other networks
RIDGES = (1e-3, 1e-2)
LOGISTIC = HeadFit(steps=400, rate=1.0, momentum=0.9)


@dataclass(frozen=True)
class Result:
    """What one run of one method came to."""

    accuracy: float  # mean over clients of the part of their test images that are predicted right
    accuracy_error: float  # standard error of that, over clients
    clients: int  # who were tested
    rounds: int = 0
    parameters: int = 0  # that are shared
    signal_to_noise: float | None = None  # mean over rounds; not private, for the experiment
    first_ratio: float | None = None  # the same of the first round
    last_ratio: float | None = None
    epsilon_spent: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Configuration:
    """Settings of one method: the paper's, or one of a grid."""

    network: str  # MLP, LeNet, small MLP or linear
    settings: TrainingSettings
    fits: tuple[HeadFit, ...] = (HEADS,)  # of the heads at the end; the best by validation, if there are several

    @property
    def words(self) -> str:
        s = self.settings
        return (
            f"{self.network}; clip {s.clip:g}; local step {s.step_size:g}; server rate {s.server_rate:g}; "
            f"{s.rounds} rounds"
        )


def paper(dataset: str, local: str) -> Configuration:
    """Appendix B of the paper: EMNIST's settings for images of 28 x 28, those of CIFAR-10 for CIFAR-10."""
    batch = 10 if local == "epoch" else None
    if "cifar" not in dataset:
        return Configuration("MLP", TrainingSettings(rounds=40, clip=0.25, step_size=0.01, batch=batch, head_fit=HEADS))
    network = "small MLP" if "features" in dataset else "LeNet"
    return Configuration(network, TrainingSettings(rounds=200, clip=0.01, step_size=0.01, batch=batch, head_fit=HEADS))


def grid(dataset: str, networks: tuple[str, ...] | None = None) -> list[Configuration]:
    """Of every baseline: what it may choose from, by the clients' validation images and a seed that is not reported.

    One linear layer on the default's public features in eight ways, and the network in one.
    """
    large = "small MLP" if "cifar" in dataset else "MLP"
    ways = [("linear", 16, clip, step, rate) for clip in (0.05, 0.25) for step in (0.1, 1.0) for rate in (1.0, 4.0)]
    return [
        Configuration(
            network,
            TrainingSettings(rounds=rounds, clip=clip, step_size=step, server_rate=rate, head_fit=HEADS),
            MORE_HEADS,
        )
        for network, rounds, clip, step, rate in [*ways, (large, 40, 0.25, 0.1, 1.0)]
        if networks is None or network in networks
    ]


def network_of(name: str, clients: Clients, method: str) -> Split:
    """The network; "linear" shares one linear layer, to scores or, where heads are private, to 16 numbers."""
    features = clients.features
    if name == "LeNet":
        side, channels = clients.image[0], clients.image[2] if clients.image else 0
        return split(*lenet(channels, side, classes=CLASSES), features)
    if name != "linear":
        return split(*mlp(features, (32, 16) if name == "small MLP" else (256, 128, 16), CLASSES), features)
    keeps_heads = method in ("CENTAUR", "FedRep")
    body: nn.Module = nn.Linear(features, 16) if keeps_heads else nn.Identity()
    head = nn.Linear(16 if keeps_heads else features, CLASSES)
    initialise(body, "representation")
    initialise(head, "head")
    return split(body, head, features)


@dataclass(frozen=True, eq=False)
class Watched(InMemoryUsers):
    """An engine that remembers how long its exact sums are: NOT PRIVATE, for the experiment alone."""

    lengths: list[float] = field(default_factory=list)

    def sums(self, *arguments: Any, **named: Any) -> dict[str, BoundedSum]:
        sums = super().sums(*arguments, **named)
        self.lengths.append(float(np.linalg.norm(sums["update"].exact_numbers)))
        return sums


def new_run(table: UserTable, epsilon: float, seed: int, method: str) -> Run:
    """A fresh budget; simulated noise that differs between seeds, epsilons and methods."""
    entropy = [SEED, seed, round(1_000 * epsilon), *method.encode()]
    noise = simulated_noise(int(np.random.SeedSequence(entropy).generate_state(1)[0]))
    return Run(Watched(table), Ledger(Budget(epsilon, DELTA), seeded=True), Billboard(None), noise)


def run_method(
    method: str, chosen: Configuration, clients: Clients, epsilon: float, seed: int, tested: str = "test"
) -> Result:
    """One method on one draw of clients; `tested` says on which of their images."""
    start = time.perf_counter()
    if chosen.network == "linear":
        clients = mapped(clients, linear_map(clients.image))
    if method == "stand-alone":
        clients = clients.first(ALONE_CLIENTS.get(chosen.network, MOST_ALONE))
        network = network_of(chosen.network, clients, method)
        own = alone(network, clients.train, clients.slots, ALONE_RATE, ALONE_BATCH, ALONE_EPOCHS)
        return measured(own, clients, tested, seconds=time.perf_counter() - start)
    network, slots, settings = network_of(chosen.network, clients, method), clients.slots, chosen.settings
    if method == "FedRep":
        weights, kept = fedrep(InMemoryUsers(clients.train), network, settings, slots)
        own = _best(
            [fit_last_heads(network, weights, kept.own, fit, clients.train, slots) for fit in chosen.fits], clients
        )
        facts: dict[str, Any] = {"rounds": settings.rounds, "parameters": len(weights)}
        return measured(own, clients, tested, seconds=time.perf_counter() - start, **facts)
    run = new_run(clients.train, epsilon, seed, method)
    endings, trained = _endings(method, run, network, chosen, clients)
    own = _best(endings, clients)
    return measured(own, clients, tested, seconds=time.perf_counter() - start, **facts_of(run, trained))


def facts_of(run: Run, trained: TrainedWeights) -> dict[str, Any]:
    """Public facts of a run, and how long its exact clipped sums were against their noise."""
    lengths = run.users.lengths if isinstance(run.users, Watched) else []
    noise = [run.users.facts.users * one.noise for one in trained.rounds]  # of the sum, not of the average
    ratios = np.array(lengths) / np.array(noise)
    return {
        "rounds": len(noise),
        "parameters": len(trained.weights),
        "signal_to_noise": float(ratios.mean()),
        "first_ratio": float(ratios[0]),
        "last_ratio": float(ratios[-1]),
        "epsilon_spent": run.ledger.report().epsilon,
    }


def _endings(
    method: str, run: Run, network: Split, chosen: Configuration, clients: Clients
) -> tuple[list[Personal], TrainedWeights]:
    """Return what everyone may end with, and what was learned of all."""
    how, share = NETWORK_METHODS[method], run.ledger.capacity / chosen.settings.rounds
    trained, kept = how.train(run, network, chosen.settings, share, clients.slots)
    where = clients.train, clients.slots
    if method != "PPSGD":
        return [how.end(network, trained.weights, kept, fit, *where) for fit in chosen.fits], trained
    plain = how.end(network, trained.weights, kept, HEADS, *where)
    fits = chosen.fits if len(chosen.fits) > 1 else ()  # where a grid allows it: more than PPSGD itself does
    further = [fine_tune(plain.split, plain.representation, plain.heads, fit, *where) for fit in fits]
    return [plain, *further], trained


def _best(endings: list[Personal], clients: Clients) -> Personal:
    """By the clients' validation images, which they have of their own; the first where there are none."""
    validation = clients.validation
    if len(endings) == 1 or validation is None:
        return endings[0]
    return max(endings, key=lambda own: float(np.nanmean(own.accuracy(validation))))


def measured(own: Personal, clients: Clients, tested: str, **facts: Any) -> Result:
    table = clients.validation if tested == "validation" else clients.test
    assert table is not None
    return result_of(own.accuracy(table), **facts)


def result_of(each: np.ndarray, **facts: Any) -> Result:
    each = each[~np.isnan(each)]
    return Result(float(each.mean()), float(each.std() / np.sqrt(len(each))), len(each), **facts)


def best_of_grid(
    method: str, dataset: str, clients: Clients, epsilon: float, seed: int, say: Callable[[str], None] = print
) -> Configuration:
    """The configuration of the grid with the best accuracy on validation images, with a budget each."""
    found: list[tuple[float, Configuration]] = []
    for chosen in grid(dataset):
        accuracy = run_method(method, chosen, clients, epsilon, seed, "validation").accuracy
        found.append((accuracy, chosen))
        say(f"  {method}: {chosen.words}: {accuracy:.4f} on validation images")
    return max(found, key=lambda pair: pair[0])[1]


@dataclass(frozen=True)
class Alone:
    """A way to learn alone: the network, logistic regression on rows of a public map, or the default without others."""

    kind: str  # MLP, small MLP, logistic or default
    rows: str = ""
    ridge: float = 0.0

    @property
    def words(self) -> str:
        return f"{self.kind} on {self.rows}, ridge {self.ridge:g}" if self.rows else self.kind


def ways_alone(dataset: str, image: tuple[int, int, int] | None) -> list[Alone]:
    logistic = [Alone("logistic", rows, ridge) for rows in public_maps(image) for ridge in RIDGES]
    return [Alone("small MLP" if "cifar" in dataset else "MLP"), *logistic, Alone("default")]


def run_alone(way: Alone, clients: Clients, seed: int, tested: str = "test") -> Result:
    start = time.perf_counter()
    if way.kind == "default":
        return run_default(clients, 1.0, seed, tested, share="nothing")
    if way.kind != "logistic":
        chosen = Configuration(way.kind, TrainingSettings())
        return run_method("stand-alone", chosen, clients, 1.0, seed, tested)
    clients = mapped(clients, public_maps(clients.image)[way.rows], centred=True)
    network = network_of("linear", clients, "stand-alone")
    zero, fit = torch.zeros(network.head.size), replace(LOGISTIC, ridge=way.ridge)
    own = fine_tune(network, torch.zeros(1, 0), zero, fit, clients.train, clients.slots)
    return measured(own, clients, tested, seconds=time.perf_counter() - start)


def best_alone(dataset: str, clients: Clients, seed: int, say: Callable[[str], None] = print) -> Alone:
    """By accuracy on validation images."""
    found = {way: run_alone(way, clients, seed, "validation").accuracy for way in ways_alone(dataset, clients.image)}
    for way, accuracy in found.items():
        say(f"  alone, {way.words}: {accuracy:.4f} on validation images")
    return max(found, key=lambda way: found[way])


def run_default(clients: Clients, epsilon: float, seed: int, tested: str = "test", share: str = "auto") -> Result:
    """This project's defaults: `privrep.Centaur` told how many rows clients have, and nothing else."""
    from privrep.estimators.network import Centaur

    start = time.perf_counter()
    options: dict[str, Any] = {"classes": CLASSES, "image": clients.image, "share": share, "rows": clients.slots}
    model = Centaur(epsilon=epsilon, delta=DELTA, random_state=SEED + seed, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingLearned)
        model.fit(clients.train)
    table = clients.validation if tested == "validation" else clients.test
    assert table is not None
    right = model.predict(table.X, np.repeat(table.ids, table.sizes)) == table.y
    owner = np.repeat(np.arange(table.n_users), table.sizes)
    each = np.bincount(owner, right, table.n_users) / np.where(table.sizes > 0, table.sizes, np.nan)
    facts = {
        "rounds": model.plan_.rounds,
        "parameters": model.plan_.parameters,
        "epsilon_spent": model.privacy_.epsilon,
    }
    return result_of(each, seconds=time.perf_counter() - start, **facts)


def rounds_within(minutes: float, method: str, chosen: Configuration, clients: Clients) -> int:
    """How many of the configuration's rounds fit into this time, by the time of two: a number to plan a budget with."""
    if method == "stand-alone":
        return chosen.settings.rounds
    few = replace(chosen, settings=replace(chosen.settings, rounds=2), fits=(HEADS,))
    seconds = run_method(method, few, clients, 1.0, 0).seconds / 2
    return max(min(chosen.settings.rounds, int(60 * minutes / seconds)), 1)
