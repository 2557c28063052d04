"""The runs of `experiments.tables` on labels: references, the analyst and privrep, one line of the CSV for each.

Log-loss, accuracy and expected calibration error are those of rows of three kinds: test rows of users who took part,
rows of newcomers who bring three rows at most, and the same rows by who knows nothing of their users (strangers).
Classes are declared, as yes and no are.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from experiments.label_data import LABELS, LabelTask
from experiments.label_references import REFERENCES, Quality, noisy_logistic, oracle
from experiments.tables_runs import ANALYST_SEED, DEFAULT, DELTA, EPSILONS
from privrep import PrivateFedRepClassifier
from privrep.errors import InputError
from privrep.typing import Array, Integers

ANALYST, ORACLE = "analyst's noisy logistic", "heads on the true U"


@dataclass(frozen=True)
class LabelScore:
    """One method on one split of one panel. Empty (None) where a method has no such number."""

    panel: str  # one of `LABELS`
    users: int
    seed: int
    method: str
    epsilon: float | None  # None: not private
    test: float  # log-loss
    accuracy_test: float
    ece_test: float  # expected calibration error
    newcomers: float
    accuracy_newcomers: float
    ece_newcomers: float
    strangers: float | None = None
    accuracy_strangers: float | None = None
    ece_strangers: float | None = None
    prior: float | None = None  # log-loss of test rows by the released prior mean, as if their users were strangers
    rank: int | None = None
    epsilon_spent: float | None = None
    seconds: float = 0.0


def run_label_panel(
    name: str, task: LabelTask, seed: int, epsilons: Sequence[float] = EPSILONS
) -> Iterator[LabelScore]:
    """Run everything on one split: what is not private once, the rest at every epsilon."""
    references = REFERENCES if task.basis is None else {**REFERENCES, ORACLE: oracle}
    for reference, fit in references.items():
        began = time.perf_counter()
        numbers = _flat(fit(task).qualities(task))
        yield LabelScore(name, task.n_users, seed, reference, None, *numbers, seconds=time.perf_counter() - began)
    for epsilon in epsilons:
        began = time.perf_counter()
        numbers = _flat(
            noisy_logistic(task, epsilon, np.random.default_rng([ANALYST_SEED, seed]), DELTA).qualities(task)
        )
        yield LabelScore(name, task.n_users, seed, ANALYST, epsilon, *numbers, seconds=time.perf_counter() - began)
        yield run_classifier(name, task, seed, epsilon)


def _flat(qualities: Iterable[Quality]) -> list[float]:
    return [number for quality in qualities for number in astuple(quality)]


def run_classifier(name: str, task: LabelTask, seed: int, epsilon: float) -> LabelScore:
    """Fit the default classifier to the training rows with simulated noise, and predict. The rank is found."""
    began = time.perf_counter()
    model = PrivateFedRepClassifier(
        epsilon=epsilon, delta=DELTA, classes=list(range(task.classes)), random_state=seed
    )  # fmt: skip
    labels = task.y.astype(np.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are few users: the numbers say it
        model.fit(task.X[task.train], labels[task.train], groups=task.codes[task.train])
    spent = float(model.privacy_.epsilon)
    if spent > epsilon:
        raise RuntimeError(f"the classifier spent an epsilon of {spent:g}, with {epsilon:g} to spend")
    test = model.predict_proba(task.X[task.test], groups=task.codes[task.test])
    known, new = task.y[task.test], task.y[task.newcomers]
    numbers = _flat([Quality.of(test, known), Quality.of(meet_newcomers(task, model), new)])
    strangers, prior = (ask_of_strangers(task, model, task.X[rows]) for rows in (task.newcomers, task.test))
    none = [] if strangers is None else astuple(Quality.of(strangers, new))
    return LabelScore(
        name, task.n_users, seed, DEFAULT, epsilon, *numbers, *none,
        prior=None if prior is None else Quality.of(prior, known).log_loss,
        rank=int(model.rank_), epsilon_spent=spent, seconds=time.perf_counter() - began,
    )  # fmt: skip


def meet_newcomers(task: LabelTask, model: PrivateFedRepClassifier) -> Array:
    """Return probabilities of newcomers' rows, by a head of each on the rows it brings."""
    said = np.empty((int(task.newcomers.sum()), task.classes))
    asked, given = np.flatnonzero(task.newcomers), np.flatnonzero(task.support)
    brought = split_by_user(task.codes[given])
    for user, places in split_by_user(task.codes[asked]).items():
        own = given[brought[user]]
        head = model.personalize(task.X[own], task.y[own].astype(np.int64))
        said[places] = head.predict_proba(task.X[asked[places]])
    return said


def split_by_user(users: Integers) -> dict[int, Integers]:
    """Return where each user's rows are."""
    order = np.argsort(users, kind="stable")
    who, starts = np.unique(users[order], return_index=True)
    return dict(zip(who.tolist(), np.split(order, starts[1:]), strict=True))


def ask_of_strangers(task: LabelTask, model: PrivateFedRepClassifier, rows: Array) -> Array | None:
    """Return probabilities of rows of users who were not in fit; None where the model refuses them."""
    nobody = np.full(len(rows), task.n_users)
    try:
        return np.asarray(model.predict_proba(rows, groups=nobody))
    except InputError:
        return None


def run_labels(seeds: Iterable[int], quick: bool = False) -> Iterator[LabelScore]:
    """Run all panels of labels; a quick run has a tenth of the users in made-up populations."""
    for seed in seeds:
        for name, make in LABELS.items():
            yield from run_label_panel(name, make(seed, quick), seed)
