"""Personal heads: functions of the public representation and one user's own rows. They never leave their user.

Where the representation has a prior of heads, a head is the posterior mean given the user's rows. A user without rows
has the prior mean. Everything below is for representations without a prior.

A user has three candidates: a head on the shared representation, a ridge regression of its own on all features, and a
constant. It tries each by leave-one-out on its own rows and keeps the candidate that predicted best. The choice costs
no privacy because nothing of it is released, and it is the safety net. Where the representation does not help a user,
or holds nothing but noise, that user is about as well off as alone. About: a choice made on few rows is a noisy one. So
users also weigh what the others found, a charged release of how many did better by the representation than alone
(`Representation.credit`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from privrep.data.sparse import SparseRows
from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.heads.classification import fit_class_constant, fit_class_own, fit_class_shared
from privrep.heads.filling import average_users
from privrep.heads.heads import Heads as Heads
from privrep.heads.label_posterior import fit_label_heads
from privrep.heads.posterior import count_doubt, fit_posterior
from privrep.heads.ratings import fit_ratings, make_newcomer
from privrep.heads.regression import (
    CONSTANT,
    OWN,
    POSTERIOR,
    PRIOR,
    SHARED,
    Fit,
    fit_constant_candidate,
    fit_own_candidate,
    fit_rating_candidate,
    fit_shared_candidate,
    project_rows,
)
from privrep.heads.regression import HEAD_KINDS as HEAD_KINDS
from privrep.local.losses import Loss
from privrep.local.prior import HeadPrior, LabelPrior
from privrep.local.representation import Ratings, Representation
from privrep.local.transform import FeatureTransform
from privrep.typing import Array
from privrep.users.performance import Performance
from privrep.users.summing import clean_rows, map_blocks


def fit_heads(
    blocks: Iterable[UserTable],
    representation: Representation,
    *,
    intercept: bool = True,
    safety_net: bool = True,
    loss: Loss | None = None,
    performance: Performance | None = None,
    keep_means: int = 0,
) -> Heads:
    """Return a head for every user of the blocks. Users without rows have the prior mean, and none without a prior.

    Args:
        blocks: of users (`table.blocks()`).
        representation: that heads are fitted on.
        intercept: whether users have levels.
        safety_net: whether a user may keep a model of its own; without, every head is a shared one.
        loss: of labels; None: of numbers. `Heads` then has a target for each output, and a user's are all of one kind.
        performance: threads; None: the default.
        keep_means: of how many columns users' means are kept: where values were missing, of all that hold numbers.
    """

    def fit(block: UserTable) -> Heads:
        heads = fit_block(block, representation, intercept, safety_net, loss)
        heads = heads if not keep_means else replace(heads, means=average_users(block, keep_means))
        everyone = representation.prior is not None or bool(block.sizes.all())
        return heads if everyone else heads.of_users(block.sizes > 0)

    return Heads.join(map_blocks(fit, blocks, performance or Performance()))


def fit_block(
    block: UserTable,
    representation: Representation,
    intercept: bool,
    safety_net: bool,
    loss: Loss | None = None,
) -> Heads:
    """Return the heads of one block of users, as `fit_heads` does.

    Args:
        block: the users' rows.
        representation: that heads are fitted on.
        intercept: whether users have levels.
        safety_net: whether a user may keep a model of its own.
        loss: of labels; None: of numbers.
    """
    if isinstance(representation.prior, HeadPrior):
        return _fit_posterior_block(block, representation.prior, representation.scale, safety_net)
    if isinstance(representation.prior, LabelPrior):
        assert loss is not None
        return _fit_label_block(block, representation.prior, representation.scale, safety_net, loss)
    if representation.ratings is not None and representation.ratings.has_prior:
        return _fit_rating_block(block, representation, representation.ratings)
    n, (d, k) = block.n_users, representation.matrix.shape
    q = loss.outputs if loss is not None else block.n_targets
    kind = np.full(n * q, CONSTANT, dtype=np.int8)
    constant, shared = np.zeros(n * q), np.zeros((n * q, k))
    own = np.zeros((n * q, 0 if isinstance(block.X, sparse.sparray) else d))
    for users, size in block.positions_by_size():
        X, Y = clean_rows(*block.group(users, size))
        X = X if isinstance(X, SparseRows) else X.astype(np.float64, copy=False)
        every = [(users[:, None] * q + np.arange(q), Y)]
        if loss is None:  # each target by itself
            columns = FeatureTransform.plain(d).targets(Y.astype(np.float64, copy=False))
            every = [(users * q + c, y) for c, y in enumerate(columns)]
        for heads, y in every:
            with np.errstate(all="ignore"):  # a user whose numbers overflow gets a constant, and nobody hears of it
                fits = _fit_candidates(X, y, representation, intercept, safety_net, loss)
            best = np.stack([np.where(np.isfinite(fit.loss), fit.loss, np.inf) for fit in fits]).argmin(axis=0)
            kinds = np.array([fit.kind for fit in fits], dtype=np.int8)[best]
            kind[heads] = kinds if heads.ndim == 1 else kinds[:, None]
            constant[heads] = np.nan_to_num(np.stack([fit.intercept for fit in fits])[best, np.arange(len(users))])
            for i, fit in enumerate(fits):
                if fit.kind != CONSTANT:
                    target = shared if fit.kind == SHARED else own
                    target[heads[best == i]] = np.nan_to_num(fit.weights[best == i])
    has_own = kind == OWN
    place = np.where(has_own, np.cumsum(has_own) - 1, -1)
    return Heads(block.ids, kind, constant, shared, place, own[has_own].reshape(-1, d), q)


def make_prior_heads(ids: NDArray[Any], prior: HeadPrior | LabelPrior) -> Heads:
    """Return heads of users without rows: the prior mean, for each of its targets.

    Args:
        ids: of the users, (users,).
        prior: of heads.
    """
    n, (d, p), q = len(ids), prior.factor.shape, prior.targets
    mean = prior.mean
    level = mean.level - (mean.centre * mean.located) @ mean.row_weights
    kind, nothing = np.full(n * q, PRIOR, dtype=np.int8), np.zeros((n * q, p))
    doubt = np.zeros((n * q, count_doubt(p)))
    own = np.full(n * q, -1), np.zeros((0, d))
    return Heads(ids, kind, np.tile(level, n), nothing, *own, q, nothing.copy(), doubt)


def make_newcomer_heads(ids: NDArray[Any], representation: Representation) -> Heads:
    """Return heads of users without rows, of a representation that serves newcomers: the prior mean.

    Args:
        ids: of the users, (users,).
        representation: with a prior, or ratings with one.
    """
    if representation.prior is not None:
        return make_prior_heads(ids, representation.prior)
    assert representation.ratings is not None
    n, (d, k) = len(ids), representation.matrix.shape
    intercept, weights = make_newcomer(representation.ratings, k - 1)
    kind, own = np.full(n, PRIOR, dtype=np.int8), (np.full(n, -1), np.zeros((0, d)))
    return Heads(ids, kind, np.full(n, intercept), np.tile(weights, (n, 1)), *own)


def make_nobody(representation: Representation) -> Heads:
    """Return one head that is nobody's: users without heads are predicted by it, at position -1.

    Args:
        representation: with a prior, or ratings with one.
    """
    return make_newcomer_heads(np.zeros(1, dtype=np.int64), representation)


def _fit_rating_block(block: UserTable, representation: Representation, ratings: Ratings) -> Heads:
    """Return heads of ratings as posterior means; users without rows, or whose numbers overflow, have the prior's."""
    found = make_newcomer_heads(block.ids, representation)
    for users, size in block.positions_by_size():
        X, y = clean_rows(*block.group(users, size))
        with np.errstate(all="ignore"):
            fits = fit_ratings(project_rows(X, representation.matrix), y.astype(np.float64, copy=False), ratings)
            fine = np.isfinite(fits.intercept) & np.isfinite(fits.weights).all(axis=1)
        heads = users[fine]
        found.kind[heads], found.intercept[heads] = POSTERIOR, fits.intercept[fine]
        found.shared[heads] = fits.weights[fine]
    return found


def _fit_posterior_block(block: UserTable, prior: HeadPrior, scale: Array, safety_net: bool) -> Heads:
    """Return heads as posterior means, in closed form; users without rows, or whose numbers overflow, have the prior's.

    What overflows is nobody else's business, so nobody hears of it. With the safety net a user with MANY rows for each
    feature keeps a regression of its own where that is clearly better by leave-one-out. So do users with few rows where
    nothing could be learned of which prior is good: they are as well off as alone.

    Args:
        block: the users' rows.
        prior: of heads.
        scale: public scales of the features, (d,).
        safety_net: whether a user may keep a regression of its own.
    """
    d, q, wanted = prior.factor.shape[0], block.n_targets, prior.targets
    if q != wanted:
        raise InputError(f"the model has {wanted} {'target' if wanted == 1 else 'targets'}. Got {q} instead.")
    found = make_prior_heads(block.ids, prior)
    origin, doubt = cast(Array, found.origin), cast(Array, found.doubt)
    own: list[Array] = []
    for users, size in block.positions_by_size():
        X, Y = clean_rows(*block.group(users, size), prior.mean.fill)
        X = X if isinstance(X, SparseRows) else X.astype(np.float64, copy=False)
        for c, y in enumerate(FeatureTransform.plain(d).targets(Y.astype(np.float64, copy=False))):
            with np.errstate(all="ignore"):
                fits = fit_posterior(X, y, prior, c)
                numbers = fits.intercept[:, None], fits.coordinates, fits.origin, fits.doubt
                fine = np.logical_and.reduce([np.isfinite(part).all(axis=1) for part in numbers])
            heads = users[fine] * q + c
            found.kind[heads], found.intercept[heads] = POSTERIOR, fits.intercept[fine]
            found.shared[heads], origin[heads], doubt[heads] = (part[fine] for part in numbers[1:])
            least = max(MANY * d, LEAST_OWN) if prior.decided else FEWEST_OWN
            if not safety_net or isinstance(X, SparseRows) or size < least:
                continue
            with np.errstate(all="ignore"):
                alone = fit_own_candidate(X, y, scale, prior.mean.intercept)
                below = (CLEARLY if prior.decided else 1.0) * fits.loss
                better = np.flatnonzero(fine & (alone.loss < below) & np.isfinite(alone.intercept))
            heads = users[better] * q + c
            found.kind[heads], found.intercept[heads], found.shared[heads] = OWN, alone.intercept[better], 0.0
            found.own_position[heads] = len(own) + np.arange(len(better))
            own += list(alone.weights[better] - prior.mean.slopes[:, c])  # common slopes are added to every head
    return replace(found, own=np.array(own).reshape(-1, d)) if own else found


def _fit_label_block(block: UserTable, prior: LabelPrior, scale: Array, safety_net: bool, loss: Loss) -> Heads:
    """Return heads of classifiers as posterior means; users without rows, or whose numbers overflow, have the prior's.

    The safety net is as in `_fit_posterior_block`, with losses of labels.

    Args:
        block: the users' rows.
        prior: of heads.
        scale: public scales of the features, (d,).
        safety_net: whether a user may keep a classifier of its own.
        loss: what heads minimise.
    """
    d, q = prior.factor.shape[0], prior.targets
    found = make_prior_heads(block.ids, prior)
    origin, doubt = cast(Array, found.origin), cast(Array, found.doubt)
    own: list[Array] = []
    for users, size in block.positions_by_size():
        X, y = clean_rows(*block.group(users, size), prior.mean.fill)
        X = X if isinstance(X, SparseRows) else X.astype(np.float64, copy=False)
        with np.errstate(all="ignore"):
            fits = fit_label_heads(X, y, prior, loss)
            numbers = fits.intercept, fits.coordinates, fits.doubt
            fine = np.logical_and.reduce([np.isfinite(part).reshape(len(y), -1).all(axis=1) for part in numbers])
        heads = users[fine, None] * q + np.arange(q)
        found.kind[heads], found.intercept[heads], found.shared[heads] = (
            POSTERIOR,
            *(part[fine] for part in numbers[:2]),
        )
        doubt[heads], origin[heads] = fits.doubt[fine], fits.origin[fine, None]
        least = max(MANY * d, LEAST_OWN) if prior.decided else FEWEST_OWN
        if not safety_net or isinstance(X, SparseRows) or size < least:
            continue
        with np.errstate(all="ignore"):
            alone = fit_class_own(X, loss.signs(y), loss, scale, prior.mean.intercept)
            below = fits.loss - (CLEARLY_LABELS if prior.decided else LUCK_LABELS) / size
            better = np.flatnonzero(fine & (alone.loss < below) & np.isfinite(alone.intercept).all(axis=1))
        heads = (users[better, None] * q + np.arange(q)).ravel()
        found.kind[heads], found.intercept[heads], found.shared[heads] = OWN, alone.intercept[better].ravel(), 0.0
        found.own_position[heads] = len(own) + np.arange(len(heads))
        own += list((alone.weights[better] - prior.mean.slopes.T).reshape(-1, d))
    return replace(found, own=np.array(own).reshape(-1, d)) if own else found


CLEARLY_LABELS = 3.0  # nats, over all rows, by which a classifier of one's own must be better
LUCK_LABELS = 0.5
MANY = 3  # rows for each feature from which on a user may have a regression of its own
LEAST_OWN = 30  # fewest rows in all for that
FEWEST_OWN = 4  # fewest rows for that, where users' losses could not tell which prior is good
CLEARLY = 0.8  # part of the posterior's leave-one-out loss that its own must stay below
LUCK = 1.1  # rows' worth of luck: the ridge of a user's own regression was chosen by the losses that are compared


def find_fair_share(rows: int) -> float:
    """Return the part of a head's loss that a user's own regression must stay below to be the better one."""
    return 1 - LUCK / rows


def _fit_candidates(
    X: Array | SparseRows, y: Array, rep: Representation, intercept: bool, safety_net: bool, loss: Loss | None
) -> list[Fit]:
    """Return the candidates of users with equally many rows, with losses as they count in the choice.

    Args:
        X: rows (users, m, d).
        y: one target, (users, m), or codes of labels.
        rep: the representation, without a prior.
        intercept: whether users have levels.
        safety_net: whether a user may keep a model of its own.
        loss: of labels; None: of numbers.
    """
    if loss is not None:
        return _fit_class_candidates(X, y, rep, intercept, safety_net, loss)
    if rep.ratings is not None:
        return [fit_rating_candidate(project_rows(X, rep.matrix), y, rep.ratings)]
    shared = fit_shared_candidate(X, y, rep.matrix, intercept)
    if not safety_net:
        return [shared]
    shared = replace(shared, loss=shared.loss / rep.credit(y.shape[1]))
    candidates = [fit_constant_candidate(y, intercept), shared]
    if not isinstance(X, SparseRows):  # a weight for each of very many features, from few rows, is no alternative
        candidates.append(fit_own_candidate(X, y, rep.scale, intercept))
    return candidates


def _fit_class_candidates(
    X: Array | SparseRows, y: Array, rep: Representation, intercept: bool, safety_net: bool, loss: Loss
) -> list[Fit]:
    """Return the candidates of `_fit_candidates` for labels.

    A likelihood ratio of (error / error)^(rows / 2) is here e^(rows times the difference of losses). So a user may take
    half the logarithm of the credit off the shared head's loss.

    Args:
        X: rows (users, m, d).
        y: codes of labels, (users, m).
        rep: the representation, without a prior.
        intercept: whether users have levels.
        safety_net: whether a user may keep a classifier of its own.
        loss: what heads minimise.
    """
    signs = loss.signs(y)
    shared = fit_class_shared(X, signs, loss, rep.matrix, intercept, rep.precision, rep.centre)
    if not safety_net:
        return [shared]
    shared = replace(shared, loss=shared.loss - 0.5 * math.log(rep.credit(y.shape[1])))
    constant = fit_class_constant(signs, loss, intercept)
    if isinstance(X, SparseRows):
        return [constant, shared]
    last_resort = replace(constant, loss=np.full(len(y), 1e300))  # it is part of one's own
    return [last_resort, shared, fit_class_own(X, signs, loss, rep.scale, intercept)]
