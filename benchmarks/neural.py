"""One round of CENTAUR for all users against a plain per-user PyTorch loop of the same work, in the same run.

1,000 users x 60 images of MNIST's size, the paper's MLP; heads are fitted in 15 full-batch steps, then come one step on
all rows, or one epoch of batches of 10. Updates are clipped and added up. The engine has two threads, with one of
PyTorch's each; the loop is run with PyTorch's own choice of threads and with one, and the faster of the two counts.

python -m benchmarks.neural
"""

from __future__ import annotations

import copy
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from privrep.data.table import UserTable
from privrep.heads.gradient import HeadFit
from privrep.neural.gradient_step import GradientStep
from privrep.neural.local_sgd import LocalSgdStep
from privrep.neural.models import mlp
from privrep.nn.flat_module import Split, split
from privrep.privacy.bounds import Bound
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance

USERS, ROWS, FEATURES, CLASSES = 1_000, 60, 784, 10
RATE, CLIP, FIT, TIMES = 0.01, 0.25, HeadFit(steps=15, rate=0.01), 2


def population() -> UserTable:
    rng = np.random.default_rng(1)
    X = rng.random((USERS * ROWS, FEATURES), dtype=np.float32)
    y = rng.integers(0, CLASSES, USERS * ROWS).astype(np.float32)
    return UserTable(X, y, np.arange(USERS + 1) * ROWS, np.arange(USERS))


def loop(parts: Split, table: UserTable, batch: int) -> Any:
    """Each user by itself: modules, optimisers and automatic differentiation as they come."""
    X = torch.from_numpy(table.X).reshape(USERS, ROWS, FEATURES)
    y = torch.from_numpy(table.y.astype(np.int64)).reshape(USERS, ROWS)
    start = torch.tensor(parts.representation.weights())
    total = torch.zeros(len(start), dtype=torch.float64)
    for rows, labels in zip(X, y, strict=True):
        body, head = copy.deepcopy(parts.representation.module), copy.deepcopy(parts.head.module)
        with torch.no_grad():
            Z = body(rows)
        descent = torch.optim.SGD(head.parameters(), FIT.rate)
        for _ in range(FIT.steps):
            descent.zero_grad()
            functional.cross_entropy(head(Z), labels).backward()
            descent.step()
        head.requires_grad_(False)
        descent = torch.optim.SGD(body.parameters(), RATE)
        for first in range(0, ROWS, batch):
            descent.zero_grad()
            some = slice(first, first + batch)
            functional.cross_entropy(head(body(rows[some])), labels[some]).backward()
            descent.step()
        update = torch.nn.utils.parameters_to_vector(body.parameters()).detach() - start
        total += update * min(1.0, CLIP / float(update.norm()))
    return total.numpy()


def fastest(work: Callable[[], Any]) -> tuple[float, Any]:
    times, result = [], None
    for _ in range(TIMES):
        began = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - began)
    return min(times), result


def main() -> None:
    parts, table = split(*mlp(FEATURES, classes=CLASSES), FEATURES), population()
    public = (parts, parts.representation.weights(), parts.head.weights(), FIT, RATE, ROWS)
    bound = {"update": Bound(CLIP, parts.representation.size)}
    users, own_choice = InMemoryUsers(table, Performance(2)), torch.get_num_threads()
    print(f"one round, {USERS:,} users x {ROWS} images x {FEATURES}, {parts.representation.size:,} shared weights")
    for name, step, batch in (
        ("one step on all rows", GradientStep(*public), ROWS),
        ("an epoch of batches of 10", LocalSgdStep(*public, batch=10), 10),
    ):
        ours, found = fastest(lambda step=step: users.sums(step, bound)["update"].total)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        plain = {}
        for threads in {own_choice, 1}:
            torch.set_num_threads(threads)
            plain[threads], expected = fastest(lambda batch=batch: loop(parts, table, batch))
        torch.set_num_threads(own_choice)
        apart = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
        words = ", ".join(f"loop with {threads} thread(s) {seconds:.2f} s" for threads, seconds in plain.items())
        print(
            f"  {name:26} {ours:.2f} s, {words}; ratio {ours / min(plain.values()):.2f}; sums differ by {apart:.0e}; "
            f"peak memory so far {peak:.2f} GB",
            flush=True,
        )


if __name__ == "__main__":
    main()
