"""The released matrix of normal equations, rid of what is only noise in it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privrep.linear.transform import CLEAR
from privrep.privacy.moments import packed_size
from privrep.typing import Array

LEAST = 0.1  # eigenvalues of A, relative to what its larger parts make them, count no less than this


@dataclass(frozen=True)
class Normal:
    """The released A, made positive definite and rid of what is only noise in it."""

    inverse: Array  # (k e, k e)
    turn: Array  # (k, k): the directions in which users' heads are uncorrelated
    heads: Array  # (k,): second moments of the heads in them, no smaller than can be told from noise
    reach: Array  # (k,): how much of it is theirs rather than the floor's
    heard: NDArray[np.bool_]  # (k,)
    relative_error: float  # what is left of the noise, against all of A


def denoise_normal(A: Array, sigma: float, k: int, floor: float) -> Normal:
    """Return A as the sum of three orthogonal parts, each shrunk by how far it exceeds the noise, its eigenvalues
    floored.

    Where features are uncorrelated and heads have nothing to do with features, A is M kron I, M the heads' second
    moment. Where only the latter holds, it is M kron S. The noise of a part of p coordinates has mean square p sigma^2:
    M has few and is always heard. The rest of A has many and is heard as far as it rises above that. A part of square
    length q is multiplied by 1 - p sigma^2 / q, or by zero where that could be chance.

    Args:
        A: released, (k e, k e).
        sigma: standard deviation of the noise on its diagonal.
        k: directions of the heads.
        floor: least second moment of heads, relative to the largest.
    """
    e = len(A) // k
    blocks = A.reshape(k, e, k, e)
    M = np.einsum("acbc->ab", blocks) / e
    measured, turn = np.linalg.eigh(M)
    noise = sigma / math.sqrt(e)
    heads = np.maximum(measured, max(floor * measured[-1], 3 * noise))
    size = max(float(np.linalg.norm(M)), np.finfo(np.float64).tiny)
    unit = M / size
    S = np.einsum("acbd,ab->cd", blocks, unit)
    S -= np.trace(S) / e * np.eye(e)
    rest = A - np.kron(M, np.eye(e)) - np.kron(unit, S)
    p_S, p_rest = packed_size(e) - 1, packed_size(k * e) - packed_size(e) - packed_size(k) + 1
    g_S, g_rest = _find_kept(S, p_S, sigma), _find_kept(rest, p_rest, sigma)
    values, axes = np.linalg.eigh(np.eye(e) + g_S * S / size)
    values = np.maximum(values, LEAST)
    inverse: Array = np.kron((turn / heads) @ turn.T, (axes / values) @ axes.T)
    if g_rest > 0:
        roots = (turn / np.sqrt(heads)) @ turn.T, (axes / np.sqrt(values)) @ axes.T
        relative = _multiply_kronecker(*roots, _multiply_kronecker(*roots, g_rest * rest).T)
        values, axes = np.linalg.eigh(np.eye(k * e) + relative)
        half = _multiply_kronecker(*roots, axes)
        inverse = (half / np.maximum(values, LEAST)) @ half.T
    left = packed_size(k) + g_S * p_S + g_rest * p_rest
    error = min(sigma * math.sqrt(left / (e * float((heads**2).sum()))), 1.0)
    return Normal(inverse, turn, heads, np.minimum(measured / heads, 1.0), measured > noise, error)


def _multiply_kronecker(left: Array, right: Array, matrix: Array) -> Array:
    """Return (left kron right) @ matrix, without the Kronecker product.

    Args:
        left: (k, k).
        right: (e, e).
        matrix: (k e, k e).
    """
    parts = right @ matrix.reshape(len(left), len(right), -1)
    return np.tensordot(left, parts, 1).reshape(matrix.shape)


def _find_kept(part: Array, coordinates: int, sigma: float) -> float:
    """Return the factor that shrinks a part: zero unless its square length exceeds the noise's by far more than by
    chance.

    Args:
        part: of any shape.
        coordinates: how many free numbers it has.
        sigma: standard deviation of the noise in each.
    """
    square, noise = float((part**2).sum()), coordinates * sigma**2
    return 1 - noise / square if square > noise * (1 + CLEAR * math.sqrt(2 / max(coordinates, 1))) else 0.0
