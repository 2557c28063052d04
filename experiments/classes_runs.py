"""The runs of `experiments.classes`: populations of classifiers, who is compared on them, and what is measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from experiments.class_references import LinearClassifiers, fedrep_classes, pooled_classes
from privrep.data.synthetic import ClassPopulation, make_class_population
from privrep.data.table import UserTable
from privrep.heads.classification import fit_class_constant, fit_class_own, fit_class_shared
from privrep.heads.fitting import Heads, fit_heads
from privrep.heads.regression import SHARED
from privrep.linear.methods.private_fedrep import private_fedrep
from privrep.linear.references import subspace_distance
from privrep.local.losses import Loss
from privrep.local.representation import Representation
from privrep.local.transform import FeatureTransform
from privrep.privacy.billboard import Billboard
from privrep.privacy.ledger import Budget, Ledger
from privrep.privacy.noise import secure_noise, simulated_noise
from privrep.privacy.run import Run
from privrep.typing import Array
from privrep.users.memory import InMemoryUsers

SEED = 20_261_118
DELTA = 1e-6
EPSILONS = (0.1, 0.3, 1.0, 3.0, 10.0)
AT = 1.0  # epsilon of the figures; the references' heads have what that run published of priors and votes
DRAWS, ROWS_A_DRAW = 5, 10  # fresh rows of every user to measure on
ALONE = 1_000  # users for whom a classifier of their own is fitted: it takes long
OWN_PRECISIONS = (64.0, 8.0, 1.0, 0.125)  # of the prior of a logistic regression on all features
OWN_KINDS = ("alone, logistic", "alone, mixture", "majority")


@dataclass(frozen=True)
class Setting:
    """A population."""

    name: str
    users: int
    features: int
    rank: int
    rows: int
    classes: int = 2
    skew: float = 0.0
    strength: float = 2.0

    @property
    def loss(self) -> Loss:
        return Loss("log", self.classes)


TWO = Setting("two classes", 20_000, 50, 2, 20)
FIVE = Setting("five classes", 10_000, 30, 3, 30, classes=5, skew=1.5)

# Too few users for the budget, in several shapes
HOPELESS: tuple[tuple[Setting, float], ...] = (
    (Setting("plain", 500, 50, 2, 20), 0.1),
    (Setting("skewed", 500, 50, 2, 20, skew=1.5), 0.1),
    (Setting("more rows", 300, 20, 2, 40), 0.1),
    (Setting("five skewed classes", 500, 30, 3, 30, classes=5, skew=1.5), 0.1),
    (Setting("ten rows", 500, 50, 2, 10), 0.5),
    (Setting("ten rows, skewed", 500, 50, 2, 10, skew=1.5), 0.5),
    (Setting("five classes, many rows", 500, 10, 2, 100, classes=5), 0.1),
    (Setting("weak heads", 500, 50, 2, 20, strength=0.5), 0.3),
    (Setting("strong heads", 500, 50, 2, 20, strength=6.0), 0.3),
    (Setting("five classes, ten rows", 500, 30, 2, 10, classes=5, skew=1.0), 0.3),
    (Setting("on the brink", 2_000, 50, 2, 20), 0.5),
    (Setting("on the brink, ten rows, skewed", 1_500, 20, 2, 10, skew=1.0), 0.5),
    (Setting("on the brink, five classes", 1_000, 30, 3, 30, classes=5, skew=1.5), 0.5),
)


@dataclass(frozen=True)
class Row:
    """One method on one draw of a population. Empty (None) where there is nothing to measure."""

    population: str
    method: str
    epsilon: float | None  # None: not private, or nothing is shared
    seed: int
    log_loss: float
    error: float
    excess: float | None = None  # of log-loss over that of the true U with the same heads
    excess_error: float | None = None  # standard error of that, over users
    bare_excess: float | None = None  # the same of heads without the safety net, all of them on U
    bare_excess_error: float | None = None
    distance: float | None = None  # squared sine of the largest angle to the true U
    shared: float | None = None  # part of the users who keep the head on the representation
    epsilon_spent: float | None = None
    seconds: float | None = None  # of learning the representation


Outputs = Callable[[Array, NDArray[np.int64]], Array]  # rows, and the positions of their users -> (rows, outputs)


@dataclass(frozen=True)
class Trial:
    """One draw of a population, with the users' rows."""

    setting: Setting
    seed: int
    truth: ClassPopulation
    table: UserTable

    def run(self, epsilon: float) -> Run:
        """A fresh budget; noise that differs between seeds and between epsilons."""
        entropy = [SEED, self.seed, round(1_000 * epsilon)]
        noise = simulated_noise(int(np.random.SeedSequence(entropy).generate_state(1)[0]))
        return Run(InMemoryUsers(self.table), Ledger(Budget(epsilon, DELTA), seeded=True), Billboard(None), noise)

    def heads(self, model: Representation, safety_net: bool = True) -> Outputs:
        heads = fit_heads(self.table.blocks(), model, safety_net=safety_net, loss=self.setting.loss)
        return outputs_of(heads, model)

    def distance(self, model: Representation) -> float:
        return min(subspace_distance(np.linalg.qr(model.matrix)[0], self.truth.U) ** 2, 1.0)

    def measure(self, methods: dict[str, Outputs], users: int | None = None) -> dict[str, tuple[Array, Array]]:
        """Log-loss and error expected of each user, the same fresh rows for all methods; of the first `users`."""
        n, loss = users or self.setting.users, self.setting.loss
        few = replace(self.truth, heads=self.truth.heads[:n], intercepts=self.truth.intercepts[:n])
        who = np.repeat(np.arange(n), ROWS_A_DRAW)
        sums = {name: (np.zeros(n), np.zeros(n)) for name in methods}
        rng = np.random.default_rng([SEED, self.seed, 1])
        for _ in range(DRAWS):
            X = few.sample(rng, rows=ROWS_A_DRAW).X
            truth = few.probabilities(X, who)
            for name, outputs in methods.items():
                predicted = loss.probabilities(np.ascontiguousarray(outputs(X, who).T)).T
                logs = (truth * np.log(np.maximum(predicted, 1e-300))).sum(axis=1)
                right = truth[np.arange(len(truth)), predicted.argmax(axis=1)]
                sums[name][0][:] -= logs.reshape(n, -1).mean(axis=1) / DRAWS
                sums[name][1][:] += (1 - right).reshape(n, -1).mean(axis=1) / DRAWS
        return sums


def outputs_of(heads: Heads, model: Representation) -> Outputs:
    def outputs(X: Array, users: NDArray[np.int64]) -> Array:
        values = heads.predict(model, X, users)
        return values[:, None] if values.ndim == 1 else values

    return outputs


def draw(setting: Setting, seed: int) -> Trial:
    rng, s = np.random.default_rng([SEED, seed]), setting
    truth = make_class_population(rng, s.users, s.features, s.rank, s.rows, s.classes, strength=s.strength, skew=s.skew)
    return Trial(setting, seed, truth, truth.sample(rng))


def in_place_of(private: Representation, U: Array) -> Representation:
    """What the private run published, but for its span: that of the columns of U. NOT PRIVATE.

    Lengths and turn of the columns, prior and votes stay, so that heads differ by the span alone. A prior whose slopes
    differ in all features knows of no span, and stays.
    """
    scale, prior = private.scale, private.prior
    if prior is not None and prior.factor.shape[1] == U.shape[1]:
        prior = replace(prior, factor=_turned(prior.factor, U))
    columns = _turned(private.matrix, U)
    transform = FeatureTransform(scale)
    return replace(private, basis=columns * scale[:, None], transform=transform, spread=np.ones(1), prior=prior)


def _turned(matrix: Array, U: Array) -> Array:
    """Return a matrix (d, k) turned into the span of the columns of U, as little as can be."""
    Q, R = np.linalg.qr(matrix)
    left, _, right = np.linalg.svd(np.linalg.qr(U)[0].T @ Q)
    return np.asarray(np.linalg.qr(U)[0] @ (left @ right) @ R)


def ratio_with_error(above: Array, below: Array) -> tuple[float, float]:
    """Ratio of the means over users, and its standard error."""
    ratio = float(above.mean() / below.mean())
    return ratio, float((above - ratio * below).std() / math.sqrt(len(above)) / abs(below.mean()))


Key = tuple[str, float | None]  # method and epsilon
ORACLE: Key = ("oracle", None)


def curve(setting: Setting, seed: int) -> Iterator[Row]:
    """Everybody on one draw of a population."""
    trial, loss = draw(setting, seed), setting.loss
    models: dict[Key, Representation] = {}
    facts: dict[Key, dict[str, float]] = {}
    for epsilon in EPSILONS:
        run, began = trial.run(epsilon), time.perf_counter()
        models["private", epsilon] = private_fedrep(run, setting.rank, loss=loss)
        facts["private", epsilon] = {
            "seconds": time.perf_counter() - began,
            "epsilon_spent": run.ledger.report().epsilon,
        }
    at, began = models["private", AT], time.perf_counter()
    fedrep = fedrep_classes(InMemoryUsers(trial.table), setting.rank, loss)
    facts["FedRep", None] = {"seconds": time.perf_counter() - began}
    models["FedRep", None] = in_place_of(at, fedrep.matrix)
    models[ORACLE] = in_place_of(at, trial.truth.U)
    yield from _rows_of(trial, models, facts)
    yield from others(trial)


def _rows_of(trial: Trial, models: dict[Key, Representation], facts: dict[Key, dict[str, float]]) -> Iterator[Row]:
    methods: dict[str, Outputs] = {}
    kept: dict[Key, float] = {}
    bare = [key for key in models if key[1] in (None, AT)]  # these without the safety net as well
    for key, model in models.items():
        heads = fit_heads(trial.table.blocks(), model, loss=trial.setting.loss)
        kept[key] = float((heads.kind == SHARED).mean())
        methods[f"{key}"] = outputs_of(heads, model)
        if key in bare:
            methods[f"bare {key}"] = trial.heads(model, safety_net=False)
    measured = trial.measure(methods)
    for key, model in models.items():
        losses, errors = measured[f"{key}"]
        excess = losses - measured[f"{ORACLE}"][0]
        alike = measured[f"bare {key}"][0] - measured[f"bare {ORACLE}"][0] if key in bare else None
        yield Row(
            trial.setting.name,
            *key,
            trial.seed,
            float(losses.mean()),
            float(errors.mean()),
            float(excess.mean()),
            float(excess.std() / math.sqrt(len(excess))),
            None if alike is None else float(alike.mean()),
            None if alike is None else float(alike.std() / math.sqrt(len(alike))),
            trial.distance(model),
            kept[key],
            **facts.get(key, {}),
        )


def others(trial: Trial) -> Iterator[Row]:
    """What users have alone, and one model for all (NOT PRIVATE)."""
    users, loss = min(ALONE, trial.setting.users), trial.setting.loss
    models = alones(trial.table.users(0, users), loss) | {"pooled": pooled_classes(trial.table, loss)}
    measured = trial.measure({name: model.outputs for name, model in models.items()}, users)
    for name, (losses, errors) in measured.items():
        yield Row(trial.setting.name, name, None, trial.seed, float(losses.mean()), float(errors.mean()))


def alones(table: UserTable, loss: Loss) -> dict[str, LinearClassifiers]:
    """What every user can have of its own rows, by OWN_KINDS; precision or ridge by leave-one-out."""
    n, d, q = table.n_users, table.n_features, loss.outputs
    models = {name: LinearClassifiers(np.zeros((n, q, d)), np.zeros((n, q))) for name in OWN_KINDS}
    for users, size in table.positions_by_size():
        for part in np.array_split(users, max(len(users) * max(size, d) // 4096, 1)):
            X, y = (values.astype(np.float64, copy=False) for values in table.group(part, size))
            signs = loss.signs(y)
            logistic, mixture, majority = (models[name] for name in OWN_KINDS)
            logistic.weights[part], logistic.intercepts[part] = logistic_alone(X, signs, loss)
            own = fit_class_own(X, signs, loss, np.ones(d), True)
            mixture.weights[part], mixture.intercepts[part] = own.weights, own.intercept
            majority.intercepts[part] = fit_class_constant(signs, loss, True).intercept
    return models


def logistic_alone(X: Array, signs: Array, loss: Loss) -> tuple[Array, Array]:
    """Weights and intercepts of a logistic or softmax regression of each user's own, in the span of its own rows."""
    mean = X.mean(axis=1)
    left, size, right = np.linalg.svd(X - mean[:, None, :], full_matrices=False)
    rows = left * size[:, None, :]
    fits = [fit_class_shared(rows, signs, loss, np.eye(rows.shape[2]), True, precision) for precision in OWN_PRECISIONS]
    best, every = np.stack([fit.loss for fit in fits]).argmin(axis=0), np.arange(len(X))
    weights = np.stack([fit.weights for fit in fits])[best, every] @ right
    base = np.stack([fit.intercept for fit in fits])[best, every]
    return weights, base - np.einsum("uod,ud->uo", weights, mean)


@dataclass(frozen=True)
class NetRow:
    """The private fit where there is nothing to learn, against the best of what users have alone."""

    population: str
    users: int
    features: int
    rank: int
    rows: int
    classes: int
    skew: float
    strength: float
    epsilon: float
    seed: int
    log_loss: float
    best_log_loss: float
    log_loss_ratio: float
    log_loss_ratio_error: float  # standard error, over users
    error: float
    best_error: float
    error_ratio: float
    error_ratio_error: float
    shared: float
    mean_error: float  # what the run itself says of its representation: 1 is nothing learned


def safety_net(setting: Setting, epsilon: float, seed: int) -> NetRow:
    """Log-loss and error each against the best of OWN_KINDS in that measure, chosen knowing the truth."""
    trial, loss = draw(setting, seed), setting.loss
    model = private_fedrep(trial.run(epsilon), setting.rank, loss=loss)
    heads = fit_heads(trial.table.blocks(), model, loss=loss)
    own = {name: one.outputs for name, one in alones(trial.table, loss).items()}
    measured = trial.measure({"private": outputs_of(heads, model)} | own)
    figures: list[float] = []
    for which in (0, 1):
        ours = measured["private"][which]
        best = min((measured[name][which] for name in OWN_KINDS), key=lambda values: float(values.mean()))
        figures += [float(ours.mean()), float(best.mean()), *ratio_with_error(ours, best)]
    shape = {name: value for name, value in asdict(setting).items() if name != "name"}
    return NetRow(
        setting.name,
        **shape,
        epsilon=epsilon,
        seed=seed,
        **dict(zip(NET_FIGURES, figures, strict=True)),
        shared=float((heads.kind == SHARED).mean()),
        mean_error=model.mean_error,
    )


NET_FIGURES = [field.name for field in fields(NetRow)][10:18]


def fit_seconds(setting: Setting, seed: int, epsilon: float = AT) -> float:
    """Representation and everybody's heads, with the safety net and cryptographic noise."""
    trial = draw(setting, seed)
    began = time.perf_counter()
    ledger = Ledger(Budget(epsilon, DELTA))
    model = private_fedrep(
        Run(InMemoryUsers(trial.table), ledger, Billboard(None), secure_noise), setting.rank, loss=setting.loss
    )
    fit_heads(trial.table.blocks(), model, loss=setting.loss)
    return time.perf_counter() - began
