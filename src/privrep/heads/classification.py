"""Candidates for a user's classifier, tried by leave-one-out on the user's rows, for many users of equal size at once.

They are the candidates of `regression`, for labels: a head on the representation, or a linear classifier of its own on
all features mixed with the frequencies of its own classes. Frequencies stand alone where there is nothing else. Each
user's numbers are a function of its own rows to the last bit, because a release may compare them.
Labels are signs (outputs, m, users): 1 where the label is the output's class, -1 where it is another, 0 for none.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from privrep.data.sparse import SparseRows
from privrep.heads.regression import CONSTANT, OWN, SHARED, Fit, normalise_grams, project_rows
from privrep.local.elementary import log, sigmoid
from privrep.local.least_squares import centre_rows, move_users_last, subtract_mean, sum_rows
from privrep.local.losses import FARTHEST, INTERCEPT_PRECISION, ClassFit, Loss, fit_classes
from privrep.typing import Array, Floats

PRECISIONS = (8.0, 1.0, 0.125)  # of the prior of a head on the representation, whose coordinates are of one size
MANY_ROWS = 4  # times as many as features: enough for Newton's method
_RIDGES = (1.0, 4.0, 0.25, 1.0, 0.25)  # the usual one first
_SLOPES = (2.0, 2.0, 2.0, 6.0, 6.0)
_HANDICAPS = (0.0, 3.0, 3.0, 6.0, 6.0)  # nats, over all rows, by which another must be better
_OWN_PRECISIONS = (0.25, 2.0, 0.03)  # for each feature; the usual one first
_PSEUDO_COUNT = 1.0


def fit_class_constant(signs: Floats, loss: Loss, intercept: bool) -> Fit:
    """Return outputs that stand for the frequencies of the user's own classes; zeros without an intercept.

    Args:
        signs: of the labels, (outputs, m, users).
        loss: of the outputs.
        intercept: whether users have intercepts.
    """
    base, loo = _find_frequencies(signs, loss, intercept)
    users = signs.shape[2]
    value = sum_rows(loss.values(loo, signs)) / signs.shape[1]
    return Fit(CONSTANT, value, base.T, np.zeros((users, loss.outputs, 0)))


def _find_frequencies(signs: Floats, loss: Loss, intercept: bool) -> tuple[Floats, Floats]:
    """Return outputs of users' frequencies, (outputs, users), and with each row left out, (outputs, m, users).

    Args:
        signs: of the labels, (outputs, m, users).
        loss: of the outputs.
        intercept: whether users have intercepts; without, return zeros.
    """
    if not intercept:
        return np.zeros((len(signs), signs.shape[2])), np.zeros_like(signs)
    there = np.where(signs > 0, 1.0, 0.0)
    counts = sum_rows(there)
    left = counts[:, None, :] - there
    known = np.abs(signs)
    total = sum_rows(known)
    return _find_outputs(counts, total, loss), _find_outputs(left, total[:, None, :] - known, loss)


def _find_outputs(counts: Floats, total: Floats, loss: Loss) -> Floats:
    """Return outputs that stand for smoothed frequencies, in the shape of `counts`.

    Args:
        counts: rows of each class, (outputs, ...).
        total: rows with a known label, of the same shape.
        loss: of the outputs.
    """
    others = total if loss.softmax else total - counts
    return log((counts + _PSEUDO_COUNT) / (others + _PSEUDO_COUNT))


def fit_class_shared(
    X: Array | SparseRows,
    signs: Floats,
    loss: Loss,
    matrix: Array,
    intercept: bool,
    precision: float | None = None,
    centre: Array | None = None,
) -> Fit:
    """Return a head on the representation for each user.

    Without a `precision` it is the middle one of PRECISIONS, or another that is clearly better by leave-one-out. That
    is a poor guess on few rows, so a run asks all users together.

    Args:
        X: rows (users, m, d).
        signs: of the labels, (outputs, m, users).
        loss: what heads minimise.
        matrix: of the representation, (d, k).
        intercept: whether users have intercepts.
        precision: of the heads' prior; None: chosen by each user.
        centre: mean of the heads' prior; None: zero.
    """
    precisions = (PRECISIONS[1], *PRECISIONS[::2]) if precision is None else (precision,)
    fits, losses, mean = _fit_shared_heads(X, signs, loss, matrix, intercept, precisions, centre)
    best, users = _choose_clearly_best(losses, signs.shape[1]), np.arange(losses.shape[1])
    heads = np.stack([fit.heads for fit in fits])[best, :, :, users]  # (users, outputs, k)
    intercepts = np.stack([fit.intercepts for fit in fits])[best, :, users]
    if intercept:
        intercepts = intercepts - (heads * np.ascontiguousarray(mean.T)[:, None, :]).sum(axis=2)
    return Fit(SHARED, losses[best, users], intercepts, heads)


def _fit_shared_heads(
    X: Array | SparseRows,
    signs: Floats,
    loss: Loss,
    matrix: Array,
    intercept: bool,
    precisions: tuple[float, ...],
    centre: Array | None,
) -> tuple[list[ClassFit], Floats, Floats]:
    """Return fits with each precision, their leave-one-out losses (precisions, users), and the rows' means (k, users).

    Args:
        X: rows (users, m, d).
        signs: of the labels, (outputs, m, users).
        loss: what heads minimise.
        matrix: of the representation, (d, k).
        intercept: whether users have intercepts.
        precisions: of the heads' prior, to try.
        centre: mean of the heads' prior; None: zero.
    """
    P = move_users_last(project_rows(X, matrix))
    m = P.shape[1]
    rows = subtract_mean(P) if intercept else P
    fits: list[ClassFit] = []
    for precision in precisions:
        fits.append(fit_classes(rows, signs, loss, precision, intercept, fits[-1] if fits else None, centre))
    losses = np.stack([sum_rows(loss.values(fit.loo_outputs, signs)) / m for fit in fits])
    return fits, losses, sum_rows(P) / m


def fit_class_own(X: Array, signs: Floats, loss: Loss, scale: Array, intercept: bool) -> Fit:
    """Return a linear classifier of each user's own on all features in public scales, mixed with its classes'
    frequencies.

    It is least squares of the labels, or Newton's method where there are rows enough for that. Its share in the outputs
    is the larger, the more it gains over the frequencies by leave-one-out. A choice between the two would be as noisy,
    and is no better on average than a mixture.

    Args:
        X: rows (users, m, d).
        signs: of the labels, (outputs, m, users).
        loss: what classifiers minimise.
        scale: public scales of the features, (d,).
        intercept: whether users have intercepts.
    """
    m, d = X.shape[1:]
    rows = X / scale
    mean = rows.mean(axis=1)
    rows = centre_rows(rows) if intercept else rows
    base, base_left = _find_frequencies(signs, loss, intercept)
    outputs, weights, offset, lost = (_fit_newton if m >= MANY_ROWS * d else _fit_least_squares)(
        rows, signs, loss, intercept
    )
    gain = sum_rows(loss.values(base_left, signs)) - sum_rows(loss.values(base_left + outputs, signs))
    share = sigmoid(0.25 + 0.5 * gain)
    value = sum_rows(loss.values(base_left + share * outputs, signs)) / m
    weights = weights * share[:, None, None]
    intercepts = base.T + share[:, None] * offset
    if intercept:
        intercepts = intercepts - (weights * mean[:, None, :]).sum(axis=2)
    return Fit(OWN, np.where(lost, np.inf, value), intercepts, weights / scale)


_Own = tuple[Floats, Array, Array, NDArray[np.bool_]]
"""Users' classifiers beside the frequencies.

What each adds to the outputs of left-out rows, (outputs, m, users). Its weights, (users, outputs, d), and its offset,
(users, outputs). And which users' numbers overflowed.
"""


def _fit_least_squares(rows: Array, signs: Floats, loss: Loss, intercept: bool) -> _Own:
    """Return users' own classifiers by least squares. The mean of a label, 1 or -1, is tanh of half its output.

    So outputs are twice what least squares says. The ridge is right if features explain two fifths of the labels'
    variance, all of them as much. With more rows than features, or several outputs, another ridge, or a steeper slope,
    is taken where that is clearly better.

    Args:
        rows: in public scales, centred with an intercept, (users, m, d).
        signs: of the labels, (outputs, m, users).
        loss: what is minimised.
        intercept: whether users have intercepts.
    """
    users, m, d = rows.shape
    targets = np.ascontiguousarray(signs.transpose(2, 1, 0))  # (users, m, outputs)
    moved = centre_rows(targets) if intercept else targets
    others = (targets.sum(axis=1, keepdims=True) - targets) / max(m - 1, 1) if intercept else 0.0
    base_left = _find_frequencies(signs, loss, intercept)[1]
    ridges = 1.5 * d / max(m, d) * np.array(_RIDGES[: 5 if loss.outputs > 1 else 3 if m > d else 1])
    duals, leverages, size, lost = _solve_ridge_duals(rows, moved, ridges)
    outputs, losses = np.empty((len(ridges), *signs.shape)), np.empty((len(ridges), users))
    for i, ridge in enumerate(ridges):
        left = ridge * duals[i] / np.maximum(1 - leverages[i] - (1 / m if intercept else 0.0), 1e-6)
        outputs[i] = _SLOPES[i] * (targets - left - others).transpose(2, 1, 0)
        losses[i] = sum_rows(loss.values(base_left + outputs[i], signs)) / m
    best = _choose_clearly_best(losses, m)
    slopes, dual = np.array(_SLOPES)[best], duals[best, np.arange(users)] / size[:, None, None]
    weights = slopes[:, None, None] * np.matmul(dual.transpose(0, 2, 1), rows)
    return _pick_each(outputs, best), weights, np.zeros((users, loss.outputs)), lost


def _solve_ridge_duals(rows: Array, targets: Array, ridges: Array) -> tuple[Array, Array, Array, NDArray[np.bool_]]:
    """Return the solutions of ridge regressions in the space of rows, for each ridge and user.

    The residuals are the ridge times the solutions. One ridge takes an inverse. Several take the eigendecomposition of
    the smaller of rows by rows and features by features.

    Args:
        rows: (users, m, d).
        targets: (users, m, outputs).
        ridges: relative to the mean eigenvalue of a user's Gram matrix, (ridges,).

    Returns:
        (G + ridge)^-1 targets, (ridges, users, m, outputs), G the Gram matrix over its mean eigenvalue; the rows'
        leverages (ridges, users, m, 1); that mean eigenvalue (users,); and which users' numbers overflowed, (users,).
    """
    users, m, d = rows.shape
    if m <= d:
        gram, size, lost = normalise_grams(rows @ rows.transpose(0, 2, 1))
        if len(ridges) == 1:
            inverted = np.linalg.inv(gram + ridges[0] * np.eye(m))
            diagonal = np.ascontiguousarray(inverted[:, np.arange(m), np.arange(m)])[:, :, None]
            return np.matmul(inverted, targets)[None], 1 - ridges[0] * diagonal[None], size, lost
        values, Q = np.linalg.eigh(gram)
        values = np.maximum(values, 0.0)
    else:
        gram, size, lost = normalise_grams(rows.transpose(0, 2, 1) @ rows)
        values, V = np.linalg.eigh(gram)
        values = np.maximum(values, 0.0)
        Q = (
            np.where(lost[:, None, None], 0.0, rows @ V)
            / np.sqrt(np.maximum(values, 1e-12) * size[:, None])[:, None, :]
        )
    inside = np.matmul(Q.transpose(0, 2, 1), targets)
    duals, leverages = np.empty((len(ridges), *targets.shape)), np.empty((len(ridges), users, m, 1))
    for i, ridge in enumerate(ridges):
        shrink = (values / (values + ridge))[:, :, None]
        duals[i] = (targets - np.matmul(Q, shrink * inside)) / ridge
        leverages[i] = np.matmul(Q**2, shrink)
    return duals, leverages, size, lost


def _fit_newton(rows: Array, signs: Floats, loss: Loss, intercept: bool) -> _Own:
    """Return users' own classifiers by `fit_classes`, with a matrix product per user in place of a loop over features.

    Args:
        rows: in public scales, centred with an intercept, (users, m, d).
        signs: of the labels, (outputs, m, users).
        loss: what is minimised.
        intercept: whether users have intercepts.
    """
    users, m, d = rows.shape
    size = (rows * rows).sum(axis=(1, 2)) / (m * d)
    lost = ~np.isfinite(size)
    Z = np.where(lost[:, None, None], 0.0, rows) / np.sqrt(np.where(lost | (size <= 0), 1.0, size))[:, None, None]
    Z = np.concatenate([Z, np.ones((users, m, 1))], axis=2) if intercept else Z
    base, base_left = _find_frequencies(signs, loss, intercept)
    fits = [_fit_newton_once(Z, signs, loss, d * precision, intercept, base) for precision in _OWN_PRECISIONS]
    outputs = np.stack([fit[0] for fit in fits]) - base_left
    losses = np.stack([sum_rows(loss.values(base_left + each, signs)) / m for each in outputs])
    best = _choose_clearly_best(losses, m)
    heads = np.stack([fit[1] for fit in fits])[best, np.arange(users)]  # (users, outputs, d or d + 1)
    weights = heads[:, :, :d] / np.sqrt(np.where(lost | (size <= 0), 1.0, size))[:, None, None]
    return _pick_each(outputs, best), weights, heads[:, :, d:].sum(axis=2), lost


def _fit_newton_once(
    Z: Array, signs: Floats, loss: Loss, precision: float, intercept: bool, base: Floats
) -> tuple[Floats, Array]:
    """Return outputs with each row left out, (outputs, m, users), and heads, (users, outputs, columns of Z).

    Args:
        Z: rows of unit size, with a last column of ones for an intercept, (users, m, columns).
        signs: of the labels, (outputs, m, users).
        loss: what is minimised.
        precision: of the weights' prior.
        intercept: whether the last column is an intercept.
        base: outputs of the frequencies, (outputs, users).
    """
    penalty = np.full(Z.shape[2], precision)
    if intercept:
        penalty[-1] = INTERCEPT_PRECISION
    across, heads = np.ascontiguousarray(Z.transpose(0, 2, 1)), np.zeros((len(Z), loss.outputs, Z.shape[2]))
    outputs, leverage = np.repeat(base[:, None, :], Z.shape[1], axis=1), np.zeros_like(signs)
    for step in range(loss.steps + 1):
        pull, curve = loss.differentiate(outputs, signs)
        last = step == loss.steps
        bend = curve if last else loss.bound_curvature(outputs, signs, curve)
        for o in range(loss.outputs):
            bent, pulled = np.ascontiguousarray(bend[o].T), np.ascontiguousarray(pull[o].T)
            hessian = np.matmul(across * bent[:, None, :], Z) + np.diag(penalty)
            if last:
                leverage[o] = (np.linalg.solve(hessian, across) * across).sum(axis=1).T
                continue
            slope = np.matmul(across, pulled[:, :, None])[:, :, 0] - penalty * heads[:, o]
            move = np.linalg.solve(hessian, slope[:, :, None])
            moved = np.matmul(Z, move)[:, :, 0].T
            shorter = np.minimum(1.0, FARTHEST / np.maximum(np.abs(moved * signs[o]).max(axis=0), 1e-300))
            heads[:, o] += shorter[:, None] * move[:, :, 0]
            outputs[o] += shorter * moved
    return outputs - leverage * pull / np.maximum(1 - curve * leverage, 1e-2), heads


def _pick_each(values: Floats, best: NDArray[np.int64]) -> Floats:
    """Return values (outputs, m, users) at each user's own setting.

    Args:
        values: (settings, outputs, m, users).
        best: the setting of each user, (users,).
    """
    return np.ascontiguousarray(values[best, :, :, np.arange(len(best))].transpose(1, 2, 0))


def _choose_clearly_best(losses: Floats, rows: int) -> NDArray[np.int64]:
    """Return the setting of each user, (users,): the usual one, unless another is better by its handicap in nats.

    On few rows the best of several is often so by luck, which costs that user twice: a worse setting, and a
    leave-one-out loss that promises too much when kinds of heads are compared.

    Args:
        losses: mean losses of a row, (settings, users), the usual setting first.
        rows: of each user.
    """
    handicap = np.array(_HANDICAPS[: len(losses)])[:, None] / rows
    return (losses + handicap).argmin(axis=0)
