"""The whole fit at the Figure 1 setting against a straight NumPy script of the same passes; cost per user as n grows.

    python -m benchmarks.fit [--users 20000] [--full]

Ratios of CPU seconds within one run are what counts; `benchmarks.figures` has the profile of the passes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import numpy as np

from benchmarks.measure import Profile, measure_cpu, print_ratios
from privrep.data.table import UserTable
from privrep.heads.fitting import fit_heads
from privrep.models.description import Config
from privrep.models.learning import learn
from privrep.users.memory import InMemoryUsers

ROUNDS, RIDGE, FEATURES, RANK, ROWS = 8, 0.02, 50, 2, 10


def population(users: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the Figure 1 setting, float32, (users, rows, features) and (users, rows)."""
    rng = np.random.default_rng(seed)
    U = np.linalg.qr(rng.standard_normal((FEATURES, RANK)))[0].astype(np.float32)
    V = rng.standard_normal((users, RANK), dtype=np.float32)
    V /= np.linalg.norm(V, axis=1, keepdims=True)
    X = rng.standard_normal((users, ROWS, FEATURES), dtype=np.float32)
    y = np.matmul(X, (V @ U.T)[:, :, None])[:, :, 0]
    return X, y + np.float32(0.01) * rng.standard_normal(y.shape, dtype=np.float32)


def to_table(X: np.ndarray, y: np.ndarray) -> UserTable:
    """Return users (users, rows, features) and (users, rows) as a table."""
    users, rows, features = X.shape
    return UserTable(X.reshape(-1, features), y.ravel(), np.arange(users + 1) * rows, np.arange(users))


def fit_product(table: UserTable, profile: Profile | None = None) -> None:
    """Do what `PrivateFedRep(rank=2).fit` does, with cryptographic noise, without scikit-learn's checks of the input.

    Heads are noted as a pass of the profile.
    """
    model = learn(InMemoryUsers(table), Config(rank=RANK, epsilon=1.0, delta=1e-6))
    with (profile or Profile()).part("heads", "fit_heads"):
        fit_heads(table.blocks(), model.representation)


def straight(X: np.ndarray, y: np.ndarray, rounds: int = ROUNDS) -> None:
    """The same passes as one would write them in a script: whole arrays, NumPy's own threads, Gaussian noise."""
    rng = np.random.default_rng(0)
    users, m, d = X.shape
    k = RANK
    rows, targets = X - X.mean(axis=1, keepdims=True), y - y.mean(axis=1, keepdims=True)
    octaves = np.rint(np.log2(np.sqrt((rows**2).sum(axis=1) / (m - 1)))).astype(int)
    scale = np.array([2.0 ** np.bincount(octaves[:, j] + 60, minlength=121).argmax() for j in range(d)]) / 2.0**60
    rows = rows / scale.astype(X.dtype)
    A = rows * targets[:, :, None]
    s = A.sum(axis=1)
    gram = A @ A.transpose(0, 2, 1)
    cross = np.einsum("umd,ud->um", A, s)
    squares = (s**2).sum(axis=1) ** 2 - 2 * (cross**2).sum(axis=1) + (gram**2).sum(axis=(1, 2))
    norms = np.sqrt(np.maximum(squares, 1e-30))
    flat = (A / np.sqrt(norms)[:, None, None]).reshape(-1, d)
    Z = (s / norms[:, None]).T @ s - flat.T @ flat + rng.normal(size=(d, d))
    U = np.linalg.eigh(Z + Z.T)[1][:, -k:].astype(X.dtype)
    for t in range(rounds + 1):
        P = (rows.reshape(-1, d) @ U).reshape(users, m, k)
        inverse = np.linalg.inv(P.transpose(0, 2, 1) @ P + RIDGE * m * np.eye(k, dtype=X.dtype))
        directions = P @ inverse
        v = np.einsum("umk,um->uk", directions, targets)
        residuals = targets - np.einsum("umk,uk->um", P, v)
        loo = residuals / (1 - 1 / m - np.einsum("umk,umk->um", P, directions))
        heads = v[:, None, :] - directions * loo[:, :, None]
        gradients = (loo[:, :, None] * heads / m).transpose(0, 2, 1) @ rows
        gradients -= (gradients @ U) @ U.T
        moments = heads.transpose(0, 2, 1) @ heads / m
        gradient_norms = np.sqrt((gradients**2).sum(axis=(1, 2)))
        np.bincount(np.rint(np.log2(gradient_norms)).astype(int) + 60)
        if t == 0:
            continue
        weights = 1 / np.sqrt(gradient_norms**2 + (moments**2).sum(axis=(1, 2)))
        G = np.tensordot(weights, gradients, 1) + rng.normal(size=(k, d))
        U = np.linalg.qr(U + (np.linalg.inv(np.tensordot(weights, moments, 1)) @ G).T)[0].astype(X.dtype)
    straight_heads(X.astype(np.float64), y.astype(np.float64), U.astype(np.float64))


def straight_heads(X: np.ndarray, y: np.ndarray, U: np.ndarray) -> None:
    """Shared heads, own regressions and constants by leave-one-out, on whole arrays."""
    m = X.shape[1]
    losses = []
    for centre in (True, False):
        P, t = X @ U, y
        if centre:
            P, t = P - P.mean(axis=1, keepdims=True), t - t.mean(axis=1, keepdims=True)
        for ridge in (1e-5, 1e-3, 1e-2, 1e-1, 1.0):
            inverse = np.linalg.inv(P.transpose(0, 2, 1) @ P + ridge * m * np.eye(U.shape[1]))
            directions = P @ inverse
            v = np.einsum("umk,um->uk", directions, t)
            residuals = t - np.einsum("umk,uk->um", P, v)
            losses.append(((residuals / (1 - centre / m - (P * directions).sum(axis=2))) ** 2).mean(axis=1))
    rows, t = X - X.mean(axis=1, keepdims=True), y - y.mean(axis=1, keepdims=True)
    values, Q = np.linalg.eigh(rows @ rows.transpose(0, 2, 1))
    turned = np.einsum("ujc,uj->uc", Q, t)
    for ridge in (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0):
        inverse = 1 / (values + ridge * values.mean(axis=1, keepdims=True))
        inverse[:, 0] = 0
        alpha = np.einsum("ujc,uc->uj", Q, inverse * turned)
        losses.append(((alpha / np.einsum("ujc,uc->uj", Q**2, inverse)) ** 2).mean(axis=1))
        np.matmul(alpha[:, None, :], rows)
    np.stack(losses).argmin(axis=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=20_000)
    parser.add_argument("--full", action="store_true", help="a million users as well")
    arguments = parser.parse_args()
    X, y = population(arguments.users, seed=1)
    fit_product(to_table(X[:100], y[:100]))  # warms the noise and the BLAS
    ours, theirs = measure_cpu(lambda: fit_product(to_table(X, y)), 5), measure_cpu(lambda: straight(X, y), 5)
    print(f"whole fit, {arguments.users:,} users x {ROWS} rows x {FEATURES} features, rank {RANK}, float32, best of 5")
    print_ratios({"straight NumPy script": theirs, "privrep": ours}, "straight NumPy script")
    print("cost per user as n grows (whole fit)")
    for users in (arguments.users, 100_000, 1_000_000) if arguments.full else (arguments.users, 100_000):
        table = to_table(*population(users, seed=2))
        seconds = measure_cpu(lambda table=table: fit_product(table), 1 if users > 200_000 else 2)
        each = 1e6 * seconds / users
        ratio = each / (1e6 * ours / arguments.users)
        print(f"  {users:>9,} users  {seconds:8.2f} CPU s  {each:6.1f} us/user  ratio {ratio:.2f}", flush=True)
    code = "import time; t = time.perf_counter(); import privrep; print(time.perf_counter() - t)"
    wall = min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3))
    print(f"import privrep  {wall:.3f} s")


if __name__ == "__main__":
    main()
