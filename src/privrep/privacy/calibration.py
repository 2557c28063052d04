"""The plan of a release before anything is charged or drawn: sensitivity, noise, price, and whether it can be asked."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from privrep.errors import InputError, ResumeError
from privrep.privacy.billboard import Release
from privrep.privacy.bounds import Bound, LossBound
from privrep.privacy.events import Batched, Gaussian, Relation, Sampled, Selection
from privrep.privacy.groups import Group
from privrep.privacy.ledger import noise_multiplier
from privrep.privacy.noise import WIDEST
from privrep.privacy.protocol import EVERYONE, Everyone, PlannedAudience, Step
from privrep.privacy.sampling import Fixed, Poisson, Sampling


@dataclass(frozen=True)
class Query:
    """One statistic of a pass: clip every user to `bound.norm`, spend `mu_squared` of the budget on it."""

    bound: Bound
    mu_squared: float

    def __post_init__(self) -> None:
        check_share(self.mu_squared)


@dataclass(frozen=True)
class Calibration:
    """Noise of one release: the grid's step, the sensitivity, and the noise multiplier."""

    step: float
    sensitivity: float
    multiplier: float

    @property
    def sigma(self) -> float:
        """Return the standard deviation of the noise in each coordinate."""
        return self.multiplier * self.sensitivity


def calibrate(bound: Bound, mu_squared: float, relation: Relation, among: PlannedAudience = EVERYONE) -> Calibration:
    """Return the noise of a release.

    Args:
        bound: the statistic is clipped to it.
        mu_squared: the release spends this much.
        relation: neighbours of the guarantee.
        among: who is asked.
    """
    step = bound.step
    plan = Calibration(step, compute_sensitivity(bound, relation, among), noise_multiplier(mu_squared))
    if not 2.0**20 <= plan.sigma / step <= WIDEST:
        raise InputError(f"a noise multiplier of {plan.multiplier:g} is out of range; change the share of the budget.")
    return plan


def compute_sensitivity(bound: Bound, relation: Relation, among: PlannedAudience = EVERYONE) -> float:
    """Return how far the totals of neighbours may be apart, on the grid, as an L2 norm.

    About a sum over a Poisson sample under replace-one-user it is twice the move that a user makes by being in it. The
    proof of `privacy.loss_distributions` asks for that. Acute bounds gain nothing there. Anything else has the
    sensitivity of its bound, whole samples and batches of a fixed size included (`privacy.batches`).

    Args:
        bound: the statistic is clipped to it.
        relation: neighbours of the guarantee.
        among: who is asked.
    """
    if not isinstance(among, Poisson) or bound.terms_per_user is not None:
        return bound.sensitivity(relation)
    return 2 * bound.reach if relation == "replace-one-user" else bound.reach


def price_release(page: str, queries: Mapping[str, Query], among: Everyone | Group = EVERYONE) -> dict[str, Gaussian]:
    """Return the price of a page about everyone or a group, whose users alone pay: an event for each statistic.

    Args:
        page: its name.
        queries: what each statistic spends.
        among: who is asked.
    """
    group = among if isinstance(among, Group) else None
    return {f"{page}/{key}": Gaussian(noise_multiplier(query.mu_squared), group) for key, query in queries.items()}


def price_sample(
    page: str, queries: Mapping[str, Query], sampling: Sampling, relation: Relation, steps: int = 1
) -> dict[str, Gaussian | Sampled | Batched]:
    """Return the price of a page about a sample: one event for all its statistics, see `privacy.sampling`.

    Args:
        page: its name.
        queries: what each statistic spends.
        sampling: how the sample is drawn.
        relation: neighbours of the guarantee.
        steps: number of such pages in a row, each about a sample of its own.
    """
    together = math.fsum(query.mu_squared for query in queries.values())
    batch_level = any(query.bound.terms_per_user is not None for query in queries.values())
    return {f"{page}/{'+'.join(queries)}": sampling.make_event(together, relation, batch_level, steps)}


def price_iteration(
    page: str, queries: Mapping[str, Query], among: Everyone | Sampling, relation: Relation, steps: int
) -> dict[str, Gaussian | Sampled | Batched]:
    """Return the price of a page of `steps` steps, one event; arguments as in `price_sample`.

    Each step is about everyone or about a sample of its own.
    """
    return price_sample(page, queries, Poisson(1) if isinstance(among, Everyone) else among, relation, steps)


def price_page(
    page: str, queries: Mapping[str, Query], among: PlannedAudience, relation: Relation
) -> Mapping[str, Gaussian | Sampled | Batched]:
    """Return the price of a page, whoever it is about.

    Args:
        page: its name.
        queries: what each statistic spends.
        among: who is asked.
        relation: neighbours of the guarantee.
    """
    if isinstance(among, Poisson | Fixed):
        return price_sample(page, queries, among, relation)
    return price_release(page, queries, among)


def price_selection(page: str, mu_squared: float, delta: float) -> dict[str, Selection]:
    """Return the price of a selection of keys.

    Args:
        page: its name.
        mu_squared: what the noisy counts spend.
        delta: what is set aside for keys that one user alone holds.
    """
    return {f"{page}/keys": Selection(noise_multiplier(mu_squared), delta)}


def check_page(page: str, released: Release | None, sensitivity: float, size: int) -> None:
    """Raise ResumeError unless a page that stands answers this very question.

    Args:
        page: its name.
        released: its release of the statistic; None if it has none.
        sensitivity: of the question.
        size: coordinates of the question.
    """
    if (
        released is None
        or released.value.shape != (size,)
        or not math.isclose(released.sensitivity, sensitivity, rel_tol=1e-6)
    ):
        raise make_question_error(page)


def make_question_error(page: str) -> ResumeError:
    """Return the error to raise where a page that stands answers another question."""
    return ResumeError(
        f"page {page!r} answers another question, or is of another version of privrep. Use another folder, or the "
        "version that began this run."
    )


def check_step(
    step: Step, bounds: Iterable[Bound | LossBound], relation: Relation, among: PlannedAudience = EVERYONE
) -> None:
    """Raise InputError unless the conditions of prices hold for this step: see `users.batching` and `privacy.batches`.

    Args:
        step: what users compute.
        bounds: of each statistic.
        relation: neighbours of the guarantee.
        among: who is asked.
    """
    spec = step.spec
    terms = [bound.terms_per_user for bound in bounds]
    if any(spec.batch_level != (each is not None) for each in terms):
        raise InputError("functions of a whole batch are asked for by bounds that say how much one user touched.")
    any_function = spec.batch_level and all(each == 1 for each in terms)
    if spec.layout != "by_size" and relation != "replace-one-user" and not any_function:
        raise InputError("a step with slots goes by users' places, which shift when one comes: use replace-one-user.")
    if isinstance(among, Poisson | Fixed) and spec.layout == "by_size":
        raise InputError("a sample is asked by a step with slots. Give the step a public number of rows a user.")
    if spec.batch_level and isinstance(among, Group):
        raise InputError("a function of a whole batch is asked of everyone or of a sample, not of a group.")
    if spec.batch_level and isinstance(among, Poisson) and not any_function:
        raise InputError("how many terms one user touches depends on the size of the batch: use a fixed one (Fixed).")


def check_batches(among: PlannedAudience, relation: Relation, users: int) -> None:
    """Raise InputError unless batches of a fixed size fit the users and the relation.

    Args:
        among: who is asked; audiences other than `Fixed` pass.
        relation: neighbours of the guarantee.
        users: how many there are.
    """
    if not isinstance(among, Fixed):
        return
    among.check_relation(relation)
    if among.count != users:
        raise InputError(f"these batches are of {among.count:,} users, and there are {users:,}. Say how many.")


def check_share(mu_squared: float) -> None:
    """Raise InputError unless a release spends a positive, finite part of mu^2."""
    if not (mu_squared > 0 and math.isfinite(mu_squared)):
        raise InputError(
            f"a release must spend a positive part of the budget. Got {mu_squared} of mu^2 instead. (A budget of delta "
            "0 has none: it pays for choices alone.)"
        )


def check_name(page: str) -> None:
    """Raise InputError unless a page's name has nothing but letters, digits, - and _."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", page):
        raise InputError(f"a page is named with letters, digits, - and _. Got {page!r} instead.")
