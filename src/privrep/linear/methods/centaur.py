"""CENTAUR, linear case (Shen, Ye, Kang, Hassani, Shokri 2023, Algorithms 3 to 5), and its paper's configuration.

The method is a start by the private power method, boosted by agreement of several copies, and the rounds of Private
FedRep: head by least squares, gradient of the representation, QR. So `centaur_linear` takes those rounds as they are.

What the paper leaves open or gets wrong, and what `paper_centaur` does about it:
  - Universal constants (in T_0, L, the clipping norms and T_g) are not given; they are keywords here.
  - eta_g = 1/(4 s_1^2), with s_1 the largest singular value of users' heads over sqrt n, which nobody may look at for
    free: `s_1` is a keyword, a public guess. For heads drawn from N(0, I_k) it is 1.
  - The sensitivity is for replacing one user, 2 zeta, and every copy and round is charged to one budget.
  - M_i = 1/m sum y^2 x x^T has mean 2 G + tr(G) I with G = B V^T V B^T / n. All directions outside the representation
    have eigenvalue tr(G). Directions inside have at most three times as much, and the power method needs rounds to tell
    them apart. The pair moments of `centaur_linear` have mean G.
  - Boosting repeats the whole start, T_0 = O(k log n) times, to turn a chance of success of 0.99 into 1 - n^-k. Under a
    fixed budget every copy has 1/T_0 of mu^2, so its noise is sqrt(T_0) larger, and one good copy becomes several bad
    ones. MSE over the oracle's with 1, 3 and 5 copies (n 20,000, d 50, k 2, m 10, label noise 0.01, delta 1e-6, mean of
    four populations): 1.001, 1.001, 1.001 at epsilon 1; 1.016, 1.018, 1.020 at 0.2; 1.3, 3.3, thousands at 0.1. It
    bought nothing anywhere, so copies are one unless told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from privrep.errors import InputError
from privrep.linear.alternation import AlternationSettings
from privrep.linear.method import Method, Problem
from privrep.linear.methods.private_fedrep import find_public_count, fit_head_and_gradient, private_fedrep
from privrep.linear.starts import Initialiser, Start, random_basis, start_power_method
from privrep.linear.steps import PowerStep
from privrep.local.losses import Loss
from privrep.local.representation import Estimate, Representation, publish
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import Bound, Contributions
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Vectors
from privrep.privacy.groups import hash_ids
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.typing import Array, Floats, Matrix


def centaur_linear(
    run: Run,
    rank: int | None,
    *,
    intercept: bool = True,
    transform: FeatureTransform | None = None,
    initialiser: Initialiser | None = None,
    settings: AlternationSettings | None = None,
    copies: int = 1,
    accuracy: float = 0.2,
    loss: Loss | None = None,
) -> Representation:
    """Learn a shared representation.

    Formal guarantee, for the epsilon and delta of the run's budget:
      - Everything returned or posted is a function of the releases charged to `run.ledger`.
      - Hence it is (epsilon, delta)-DP at user level under the ledger's relation, for any data whatever.

    Args:
        run: asks the users; its whole budget is spent.
        rank: of the representation; None reads it off releases.
        intercept: whether users have levels.
        transform: declared public coordinates; None: found by charged releases.
        initialiser: another start, used once, whatever `copies` says; None: the power method on pair moments.
        settings: of the rounds; None: the default.
        copies: how many starts are tried, of which the one with most agreement is taken.
        accuracy: to which two copies agree, the paper's eps_i.
        loss: of labels; None: of numbers.
    """
    start = boost_start(copies, accuracy) if initialiser is None else initialiser
    return private_fedrep(
        run, rank, intercept=intercept, transform=transform, initialiser=start, settings=settings, loss=loss
    )


class CentaurMethod(Method):
    """CENTAUR in the linear case, as callers know it."""

    name = "centaur"
    title = "CENTAUR: a start by the private power method, then private gradient steps on the representation (centaur)."
    accepts = frozenset(
        {"numbers", "rank 0", "classes", "several targets", "sparse", "start", "paper", "add-or-remove-one-user"}
    )
    purposes: ClassVar[Mapping[str, str]] = {"centaur-power": "starting point", "gradient": "step"}
    own_start = "power-method"

    def default(self, run: Run, problem: Problem) -> Representation:
        """Learn the representation by `centaur_linear`."""
        p = problem
        return centaur_linear(
            run, p.rank, intercept=p.intercept, transform=p.transform, initialiser=p.start, loss=p.loss
        )

    def paper(self, run: Run, rank: int) -> Representation:
        """Learn the representation by `paper_centaur`."""
        return paper_centaur(run, rank)


METHOD = CentaurMethod()


def boost_start(copies: int, accuracy: float) -> Initialiser:
    """Return a start that runs the power method `copies` times, each from another random basis and for its part of the
    budget.

    Args:
        copies: how many starts are tried.
        accuracy: to which two copies agree.
    """
    if copies < 1:
        raise InputError(f"boosting takes one copy or more. Got {copies} instead.")

    def start(asked: Start) -> Estimate:
        one = replace(asked, mu_squared=asked.mu_squared / copies)
        found = [start_power_method(one, page=f"power-{c}") for c in range(1, copies + 1)]
        return found[choose_agreed(asked.run, [state.basis for state in found], accuracy)]

    return start_power_method if copies == 1 else start


def choose_agreed(run: Run, bases: list[Array], accuracy: float) -> int:
    """Return which of the copies to keep, posted as a derived fact: post-processing, it costs nothing.

    It is the copy with which most agree, itself included: all singular values of B_c^T B at least 1 - 2 accuracy^2. The
    paper asks for half of the copies to agree; `enough` on the page says whether they did.

    Args:
        run: whose billboard the fact is posted on.
        bases: orthonormal bases, (d, k) each.
        accuracy: to which two copies agree.
    """
    least = 1 - 2 * accuracy**2
    friends = [sum(_find_smallest_cosine(other, basis) >= least for other in bases) for basis in bases]
    chosen = int(np.argmax(friends))
    enough = 2 * friends[chosen] >= len(bases)
    run.derive("agreement", {"friends": np.array(friends, dtype=np.float64)}, chosen=chosen + 1, enough=enough)
    return chosen


def _find_smallest_cosine(one: Array, other: Array) -> float:
    """Return the cosine of the largest angle between the spans of two orthonormal bases.

    Spans of different dimension do not agree: return 0.

    Args:
        one: (d, k).
        other: (d, k).
    """
    return float(np.linalg.svd(one.T @ other)[1].min()) if one.shape == other.shape else 0.0


def paper_centaur(
    run: Run,
    rank: int,
    *,
    copies: int = 1,
    accuracy: float = 0.01,
    power_rounds: int = 5,
    clip_init: float = 10.0,
    rounds: int = 20,
    clip: float = 10.0,
    s_1: float = 1.0,
    batch: int | None = None,
    init_share: float = 0.5,
) -> Representation:
    """Learn a shared representation as the paper does, by its Algorithms 3 to 5, without an intercept.

    Formal guarantee, for the epsilon and delta of the run's budget:
      - Everything returned or posted is a function of the releases charged to `run.ledger`.
      - Hence it is (epsilon, delta)-DP at user level under replace-one-user, for any data whatever.

    Args:
        run: asks the users; its whole budget is spent.
        rank: of the representation.
        copies: T_0, how many starts are tried.
        accuracy: to which two copies agree, eps_i.
        power_rounds: L, rounds of the power method in each start.
        clip_init: zeta_0, the clipping norm of the start.
        rounds: gradient steps after the start.
        clip: zeta_g, the clipping norm of the gradients.
        s_1: a public guess of the heads' largest singular value over sqrt n.
        batch: rows of a user that fit the head, and as many that give the gradient; None: half of them each.
        init_share: part of mu^2 for the start, evenly to all copies and their rounds; the rest goes evenly to the
            rounds after it.
    """
    n, d, total = find_public_count(run), run.users.facts.features, run.ledger.capacity
    if copies < 1:
        raise InputError(f"boosting takes one copy or more. Got {copies} instead.")
    image = Query(Bound(clip_init, d * rank), init_share * total / (copies * power_rounds))
    bases = [_run_paper_power(run, rank, image, power_rounds, f"centaur-power-{c}") for c in range(1, copies + 1)]
    U = bases[choose_agreed(run, bases, accuracy)]
    query = Query(Bound(clip, d * rank), (1 - init_share) * total / rounds)
    step, error = 1 / (4 * s_1**2), float(rank)
    for t in range(1, rounds + 1):
        page = f"centaur-round-{t}"
        gradient = run.release(page, HalfLossGradient(U, page, batch), {"gradient": query})["gradient"]
        move = -step / n * gradient.value.reshape(d, rank)
        length = float(((move - U @ (U.T @ move)) ** 2).sum())
        noise = (step / n * gradient.sigma) ** 2 * (d - rank) * rank
        error = min(noise + 16 * max(length - noise, 0.0), float(rank))  # a step goes a quarter of the way at most
        U, _ = np.linalg.qr(U + move)
    return publish(run, Estimate(U, np.eye(rank) * error / rank), FeatureTransform.plain(d))


def _run_paper_power(run: Run, rank: int, image: Query, rounds: int, page: str) -> Array:
    """Return the basis (d, rank) of Algorithm 5: X <- QR of the released sum of M_i X from a public random X.

    Args:
        run: asks the users.
        rank: columns of X.
        image: the query of each round.
        rounds: how many there are.
        page: the name of the pages; it also seeds X.
    """
    d = run.users.facts.features
    X = random_basis(d, rank, page)
    for t in range(1, rounds + 1):
        step = PowerStep(X, FeatureTransform.plain(d), intercept=False, own_rows=True)
        X, _ = np.linalg.qr(run.release(f"{page}-{t}", step, {"image": image})["image"].value.reshape(rank, d).T)
    return X


@dataclass(frozen=True)
class HalfLossGradient:
    """The users' half of Algorithm 4 of Shen et al. 2023.

    The head is fitted by least squares on one batch of a user's rows. The gradient of 1/2b sum (.)^2 is taken on
    another.
    Rows are drawn without replacement in a public order that depends on the page and the number of rows alone.
    """

    U: Matrix
    page: str
    batch: int | None = None

    @property
    def spec(self) -> StepSpec:
        return StepSpec(floats_per_user=self.U.size)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `gradient` of each user, (users, d k)."""
        X: Floats = batch.X
        y: Floats = batch.y
        m = X.shape[1]
        size = m // 2 if self.batch is None else min(self.batch, m // 2)
        order = np.argsort(hash_ids(np.arange(m), self.page), kind="stable")
        gradient = fit_head_and_gradient(self.U, X, y, order[:size], order[size : 2 * size])[1]
        return {"gradient": Vectors(gradient / 2)}
