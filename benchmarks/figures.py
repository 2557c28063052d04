"""The figures that docs/performance.md has targets for, and where the time of a fit goes, pass by pass.

    python -m benchmarks.figures [--full] [--only fit]

Without --full the largest population has 200,000 users, and all of it takes a few minutes. CPU seconds are those of all
threads, the best of several. Reads are CPU seconds over those of one read of the same rows, `X.sum()`, in the same
process. The floor of a fit is one read for every pass it makes, heads included; the floor of DP-CLIP is PyTorch's step.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from benchmarks.fit import FEATURES, ROWS, fit_product, population, to_table
from benchmarks.measure import Figure, Profile, measure_cpu, measure_read, profile_passes
from benchmarks.methods import make_labels
from benchmarks.ratings import draw
from benchmarks.streaming import BOUNDS, STEP
from privrep import FittedAgain, NothingLearned, PrivAltMin, PrivateFactorization, PrivateFedRepClassifier
from privrep.data.table import UserTable
from privrep.users.isolated import IsolatedUsers
from privrep.users.memory import InMemoryUsers

SMALL, MIDDLE, LARGE = 20_000, 200_000, 1_000_000
APART = 300  # users who are asked one by one


def measure_fit(work: Callable[[], object], times: int) -> tuple[float, Profile, float]:
    """Return the fewest CPU seconds of a fit, the profile of its first run, and what that run took."""
    with profile_passes() as profile:
        total = measure_cpu(work, 1)
    return min(total, measure_cpu(work, times)), profile, total


def print_profile(name: str, profile: Profile, read: float, total: float) -> None:
    """Print where the time of a fit goes, pass by pass."""
    print(f"\n{name}: where {total:.2f} CPU s go; a read takes {read:.4f}")
    print("\n".join(profile.lines(read, total)), end="\n\n", flush=True)


def whole_fits(full: bool) -> Iterator[Figure]:
    """Yield the figures of whole fits with heads, and of a round; print the profile of the last."""
    fit_product(to_table(*population(1000, seed=1)))  # warms the noise and the BLAS
    targets = {SMALL: "0.4 s", MIDDLE: "120 reads", LARGE: "15 s"}
    for users in (SMALL, MIDDLE, LARGE) if full else (SMALL, MIDDLE):
        table = to_table(*population(users, seed=2))
        read, times = measure_read(table.X), 5 if users == SMALL else 0
        with profile_passes() as profile:
            total = measure_cpu(partial(fit_product, table, profile), 1)
        cpu = min(total, measure_cpu(partial(fit_product, table), times)) if times else total
        name, passes = f"whole fit with heads, {users:,} x {ROWS} x {FEATURES}", len(profile.passes)
        value = f"{cpu / read:.0f} reads" if users == MIDDLE else ""
        print_profile(name, profile, read, total)
        yield Figure(name, cpu, read, passes * read, targets[users], value)
        if users == MIDDLE:
            once = measure_cpu(lambda table=table: InMemoryUsers(table).sums(STEP, BOUNDS))
            yield Figure(f"a round, {users:,} users", once, read, read, "4 reads", f"{once / read:.1f} reads")


def classifiers(full: bool) -> Iterator[Figure]:
    """Yield the figures of fits of labels."""
    for classes, target in ((2, "1.0 s"), (5, "3 s")):
        table = make_labels(classes, SMALL)
        groups = np.repeat(table.ids, table.sizes)
        model = PrivateFedRepClassifier(epsilon=1.0, delta=1e-6, classes=list(range(classes)))
        work = partial(model.fit, table.X, table.y, groups=groups)
        cpu, profile, total = measure_fit(work, 1)
        read, name = measure_read(table.X), f"classifier, {SMALL:,} x 20 x 50, {classes} classes"
        print_profile(name, profile, read, total)
        yield Figure(name, cpu, read, (len(profile.passes) + 1) * read, target)


def factorisation(full: bool) -> Iterator[Figure]:
    """Yield the figures of factorisation, at budgets at which one factor and two are found."""
    user, item, rating = draw(10_000, 1_700)
    listed, read = list(range(1_700)), measure_read(np.column_stack([user, item, rating]))
    for epsilon in (4.0, 8.0):
        model = PrivateFactorization(epsilon=epsilon, delta=1e-6, items=listed, random_state=0)
        cpu, profile, total = measure_fit(partial(model.fit, user, item, rating), 3)
        name = f"factorisation, 10,000 x 1,700 items, rank {model.rank_}"
        print_profile(name, profile, read, total)
        yield Figure(name, cpu, read, (len(profile.passes) + 1) * read, "1.5 s")


def altmin(full: bool) -> Iterator[Figure]:
    """Yield the figure of Priv-AltMin; print its profile."""
    table = to_table(*population(SMALL, seed=1))
    groups, read = np.repeat(table.ids, table.sizes), measure_read(table.X)
    work = partial(PrivAltMin(2).fit, table.X, table.y, groups=groups)
    cpu, profile, total = measure_fit(work, 3)
    name = f"Priv-AltMin, {SMALL:,} x {ROWS} x {FEATURES}"
    print_profile(name, profile, read, total)
    yield Figure(name, cpu, read, (len(profile.passes) + 1) * read, "1.5 s")


def nodes(full: bool) -> Iterator[Figure]:
    """Yield the figure of users who are asked one by one, as a node that trusts no server does: of one user."""
    table = to_table(*population(SMALL, seed=1))
    apart = UserTable(table.X[: APART * ROWS], table.y[: APART * ROWS], table.offsets[: APART + 1], table.ids[:APART])
    read = measure_read(table.X) / SMALL
    each = measure_cpu(lambda: IsolatedUsers(InMemoryUsers(apart), strictly=True).sums(STEP, BOUNDS)) / APART
    together = measure_cpu(lambda: InMemoryUsers(table).sums(STEP, BOUNDS)) / SMALL
    name = 'noise = "nodes", a user and page; floor: asked together'
    yield Figure(name, each, read, together, "0.05 ms", f"{1e3 * each:.3f} ms")


def clip(full: bool) -> Iterator[Figure]:
    """Yield the figures of a step of DP-CLIP over PyTorch's own, where PyTorch is installed."""
    try:
        from benchmarks import multimodal
    except ImportError:
        print("DP-CLIP is not measured: PyTorch is not installed.")
        return
    pairs = multimodal.made()
    read = measure_read(pairs.table.X[:1024])
    best = multimodal.measure(pairs, 1024, 100 if full else 40, 3)
    for name, seconds in best.items():
        plain = best.get(f"{name}, open")
        if plain is not None:
            yield Figure(f"DPClip step, {name}", seconds, read, plain, "1.3", f"{seconds / plain:.2f}")


PARTS: dict[str, Callable[[bool], Iterator[Figure]]] = {
    "fit": whole_fits,
    "classifier": classifiers,
    "factorisation": factorisation,
    "altmin": altmin,
    "nodes": nodes,
    "clip": clip,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="a million users as well")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    arguments = parser.parse_args()
    for kind in (NothingLearned, FittedAgain):
        warnings.simplefilter("ignore", kind)
    found = []
    for part in arguments.only:
        for figure in PARTS[part](arguments.full):
            found.append(figure)
            print(figure, flush=True)
    print(f"\n{Figure.HEAD}")
    print("\n".join(map(str, found)))


if __name__ == "__main__":
    main()
