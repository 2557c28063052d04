"""The runs of `experiments.tables` on ratings: references, the analyst and privrep, one line of the CSV for each.

Errors are RMSE, and mean absolute errors over the range of ratings (NMAE): of test ratings, of newcomers who bring
three ratings at most, and of the same newcomers by who knows nothing of them (strangers). The last two come from a
second fit, in which a tenth of the users do not take part. Films are declared, jokes are selected privately.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.jester import Ratings
from experiments.label_runs import split_by_user
from experiments.rating_data import SOURCES, RatingTask, read_ratings
from experiments.rating_references import Learn, no_ratings, noisy_means, references
from experiments.tables_runs import ANALYST_SEED, DELTA, EPSILONS
from privrep import PrivateFactorization
from privrep.errors import InputError
from privrep.typing import Array, Integers

ANALYST, FACTORIZATION = "analyst's noisy means", "private-factorization"


@dataclass(frozen=True)
class RatingScore:
    """One method on one split. Empty (None) where a method has no such number."""

    panel: str  # one of `SOURCES`
    users: int
    seed: int
    method: str
    epsilon: float | None  # None: not private
    test: float  # RMSE
    nmae_test: float
    newcomers: float
    nmae_newcomers: float
    strangers: float | None = None
    nmae_strangers: float | None = None
    prior: float | None = None  # RMSE of test ratings by released level and offsets, as if their users were strangers
    rank: int | None = None
    epsilon_spent: float | None = None
    seconds: float = 0.0  # of the first fit, its predictions included


def run_rating_task(
    name: str, task: RatingTask, seed: int, epsilons: Sequence[float] = EPSILONS
) -> Iterator[RatingScore]:
    """Run everything on one split: what is not private once, the rest at every epsilon."""
    for reference, learn in references(task).items():
        yield run_reference(name, task, seed, reference, None, learn)
    for epsilon in epsilons:
        rng = np.random.default_rng([ANALYST_SEED, seed])
        learn = _learn_noisy(task, epsilon, rng)
        yield run_reference(name, task, seed, ANALYST, epsilon, learn)
        yield run_factorization(name, task, seed, epsilon)


def _learn_noisy(task: RatingTask, epsilon: float, rng: np.random.Generator) -> Learn:
    return lambda train: noisy_means(train, task, epsilon, rng, DELTA)


def run_reference(
    name: str, task: RatingTask, seed: int, method: str, epsilon: float | None, learn: Learn
) -> RatingScore:
    """Learn twice, from everybody and without newcomers, and predict."""
    began = time.perf_counter()
    test = task.errors(learn(task.train).predict(task.train, task.test), task.test)
    seconds = time.perf_counter() - began
    without = learn(task.others)
    new, strangers = (
        task.errors(without.predict(own, task.newcomers), task.newcomers) for own in (task.support, no_ratings())
    )
    return RatingScore(name, task.n_users, seed, method, epsilon, *test, *new, *strangers, seconds=seconds)


def run_factorization(name: str, task: RatingTask, seed: int, epsilon: float) -> RatingScore:
    """Fit the default factorisation twice, with simulated noise, and predict. The rank is found."""
    began = time.perf_counter()
    model = fit_factorization(task, task.train, epsilon, seed)
    test = task.errors(model.predict(task.test.user, task.test.item), task.test)
    seconds = time.perf_counter() - began
    spent = float(model.privacy_.epsilon)
    if spent > epsilon:
        raise RuntimeError(f"the factorisation spent an epsilon of {spent:g}, with {epsilon:g} to spend")
    prior = ask_of_strangers(task, model, task.test.item)
    without = fit_factorization(task, task.others, epsilon, seed)
    new = task.errors(meet_newcomers(task, without), task.newcomers)
    said = ask_of_strangers(task, without, task.newcomers.item)
    strangers = () if said is None else task.errors(said, task.newcomers)
    return RatingScore(
        name, task.n_users, seed, FACTORIZATION, epsilon, *test, *new, *strangers,
        prior=None if prior is None else task.errors(prior, task.test)[0],
        rank=int(model.rank_), epsilon_spent=spent, seconds=seconds,
    )  # fmt: skip


def fit_factorization(task: RatingTask, train: Ratings, epsilon: float, seed: int) -> PrivateFactorization:
    """Fit with defaults."""
    items = list(range(task.items)) if task.declared else None
    model = PrivateFactorization(epsilon=epsilon, delta=DELTA, items=items, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are few users: the numbers say it
        return model.fit(train.user, train.item, train.value)


def meet_newcomers(task: RatingTask, model: PrivateFactorization) -> Array:
    """Return predictions of newcomers' ratings, by a taste of each on the ratings it brings."""
    said, brought = np.empty(len(task.newcomers.user)), split_by_user(task.support.user)
    for user, places in split_by_user(task.newcomers.user).items():
        own = task.support.take(brought[user])
        said[places] = model.personalize(own.item, own.value).predict(task.newcomers.item[places])
    return said


def ask_of_strangers(task: RatingTask, model: PrivateFactorization, items: Integers) -> Array | None:
    """Return predictions of users who were not in fit; None where the model refuses them."""
    try:
        return np.asarray(model.predict(np.full(len(items), task.n_users), items))
    except InputError:
        return None


def run_ratings(seeds: Iterable[int]) -> Iterator[RatingScore]:
    """Run films and jokes."""
    for seed in seeds:
        for name in SOURCES:
            yield from run_rating_task(name, read_ratings(name, seed), seed)
