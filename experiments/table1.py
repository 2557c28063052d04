"""Table 1 and Figure 1 of the CENTAUR paper on what two cores can do, and this project's defaults beside them.

    python -m experiments.table1 [--targets | --figure1 | --writers] [--seeds 3] [--datasets mnist] [--only PPSGD]

Clients hold images of at most 5 classes, equally many each, a tenth held out for validation; test images are of their
own classes in their own proportions. Accuracy is the mean over clients, in percent in what is printed. All private
methods spend (1, 1e-5) under replace-one-user, every round charged. Noise is SIMULATED from seeds.

  (nothing)   the paper's configurations, then the defaults: MNIST and Fashion-MNIST with EMNIST's settings (MLP
              256-128-16, clip 0.25, 40 rounds) for 500, 1,000 and 2,000 clients; CIFAR-10 with LeNet (clip 0.01, 200
              rounds, or as many as --minutes allow for each method) and on frozen EfficientNet-Lite0 features with a
              shared MLP 32-16, 500 clients
  --targets   the defaults against the best way of learning alone and against each baseline with the best of a small
              grid: one linear layer on the default's public features (16 rounds) with clip 0.05 or 0.25, local step
              0.1 or 1 and server rate 1 or 4, or the MLP (40 rounds, clip 0.25, step 0.1, rate 1). Chosen for MNIST
              with 2,000 clients, on validation images with a seed that is not reported, and used elsewhere, too; which
              of three ways to fit heads in the end, on the run's own validation images. No ledger pays for either. What
              is in the grid was settled by looking at that seed
  --figure1   MNIST, 2,000 clients, epsilon from 0.25 to 4
  --writers   MNIST by writer: natural users, a tenth of each one's digits to test on, at most 100 of the others

Local work in a round (column `local`): "step" is one step on all rows, which is what batches of 100, as in the authors'
scripts for CIFAR-10, come to for clients of fewer rows; --local epoch takes batches of 10. Heads: 15 steps on all rows
at 0.01 with momentum 0.9 in every round, kept between rounds. PPSGD: own step 0.1, shared step a tenth of it. PMTL:
pull 1. FedRep is NOT PRIVATE. A network alone is trained at 0.1 in 30 epochs of batches of 10, by
500 clients at most (LeNet: 100).
The ratio of signal to noise is that of the exact clipped sum's length, which is NOT PRIVATE, to the noise's.
`paper` is what the paper reports of the nearest setting, on EMNIST digits and CIFAR-10.

Rows that stand in results/table1.csv are not run again. Writes that file and results/table1.png beside this one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

from experiments.classes import read, write
from experiments.table1_data import DATASETS, Clients, Sources, dealt, writers
from experiments.table1_picture import draw, means
from experiments.table1_runs import (
    METHODS,
    PRIVATE,
    Alone,
    Configuration,
    Result,
    best_alone,
    best_of_grid,
    grid,
    paper,
    rounds_within,
    run_alone,
    run_default,
    run_method,
)

RESULTS = Path(__file__).parent / "results"
CLASSES_PER_CLIENT = 5
GRID_AT = ("mnist", 2_000)
CHOOSING = 0  # the seed by which settings are chosen; never reported
EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0)
TABLE = (
    *((dataset, clients) for dataset in ("mnist", "fashion-mnist") for clients in (500, 1_000, 2_000)),
    ("cifar10", 500),
    ("cifar10 features", 500),
)
TARGETS = (
    ("mnist", 2_000, 1.0),
    ("mnist", 5_000, 1.0),
    ("fashion-mnist", 5_000, 1.0),
    ("cifar10 features", 2_000, 1.0),
    ("mnist", 200, 0.1),
)
PAPER = {  # dataset and clients of the nearest setting -> stand-alone, DP-FedAvg, PMTL, PPSGD, CENTAUR
    ("emnist", 1_000): (93.47, 91.32, 92.32, 93.44, 94.17),
    ("emnist", 2_000): (90.67, 86.85, 88.81, 88.96, 92.79),
    ("cifar10", 500): (50.03, 46.17, 49.35, 48.69, 53.23),
}
ORDER = ("stand-alone", "DP-FedAvg-ft", "PMTL-ft", "PPSGD", "CENTAUR")


@dataclass(frozen=True)
class Job:
    """One method on one draw of clients."""

    dataset: str
    clients: int
    method: str
    configuration: str  # paper, default or grid
    local: str  # what users do in a round: step, epoch, or "own" where the method decides
    epsilon: float
    seed: int


@dataclass(frozen=True)
class Row:
    """A job and what it came to. Empty (None) where there is nothing to measure."""

    dataset: str
    clients: int
    method: str
    configuration: str
    local: str
    epsilon: float
    seed: int
    classes_per_client: int
    rows: int  # to train on, of a client at most
    settings: str
    noise: str  # simulated, or none
    accuracy: float
    accuracy_error: float
    tested: int
    rounds: int
    parameters: int
    signal_to_noise: float | None
    first_ratio: float | None
    last_ratio: float | None
    epsilon_spent: float | None
    seconds: float
    paper: float | None

    @property
    def job(self) -> Job:
        return Job(*(getattr(self, name) for name in Job.__dataclass_fields__))


def papers_number(dataset: str, clients: int, method: str) -> float | None:
    """Of the setting of Table 1 that is nearest; none on writers and other data."""
    kind = {"mnist": "emnist", "fashion-mnist": "emnist", "cifar10": "cifar10", "cifar10 features": "cifar10"}
    settings = [(there, number) for there, number in PAPER if there == kind.get(dataset)]
    if method not in ORDER or not settings:
        return None
    nearest = min(settings, key=lambda setting: abs(np.log(setting[1] / clients)))
    return PAPER[nearest][ORDER.index(method)]


def jobs_of_table(seeds: int, local: str) -> Iterator[Job]:
    for dataset, clients in TABLE:
        for seed in range(1, seeds + 1):
            for method in METHODS:
                yield Job(dataset, clients, method, "paper", "own" if method == "stand-alone" else local, 1.0, seed)
            if dataset != "cifar10":
                yield Job(dataset, clients, "CENTAUR", "default", "own", 1.0, seed)


def jobs_of_targets(seeds: int) -> Iterator[Job]:
    for dataset, clients, epsilon in TARGETS:
        for seed in range(1, seeds + 1):
            yield Job(dataset, clients, "CENTAUR", "default", "own", epsilon, seed)
            for method in ("stand-alone", *PRIVATE):
                yield Job(dataset, clients, method, "grid", "own" if method == "stand-alone" else "step", epsilon, seed)


def jobs_of_figure(seeds: int, local: str) -> Iterator[Job]:
    for seed in range(1, seeds + 1):
        for epsilon in EPSILONS:
            yield Job("mnist", 2_000, "CENTAUR", "default", "own", epsilon, seed)
            for method in PRIVATE:
                yield Job("mnist", 2_000, method, "paper", local, epsilon, seed)
        yield Job("mnist", 2_000, "stand-alone", "paper", "own", 1.0, seed)


def jobs_of_writers(seeds: int, local: str) -> Iterator[Job]:
    for seed in range(1, seeds + 1):
        yield Job("mnist by writer", 539, "CENTAUR", "default", "own", 1.0, seed)
        for method in METHODS:
            yield Job("mnist by writer", 539, method, "paper", "own" if method == "stand-alone" else local, 1.0, seed)


@dataclass(frozen=True)
class Runner:
    """Runs jobs; the clients of the last ones, and settings that were chosen, are remembered."""

    sources: Sources
    minutes: float = 30.0
    results: Path = RESULTS / "table1.csv"

    def __call__(self, job: Job) -> Row:
        clients = _clients(job.dataset, job.clients, job.seed, self.sources)
        result, words = self._run(job, clients)
        return Row(
            **asdict(job),
            classes_per_client=CLASSES_PER_CLIENT if job.dataset in DATASETS else 10,
            rows=clients.slots,
            settings=words,
            noise="none" if job.method in ("stand-alone", "FedRep") else "simulated",
            paper=papers_number(job.dataset, job.clients, job.method) if job.epsilon == 1 else None,
            **_columns(result),
        )

    def _run(self, job: Job, clients: Clients) -> tuple[Result, str]:
        if job.configuration == "default":
            return run_default(clients, job.epsilon, job.seed), "defaults"
        if job.configuration == "grid":
            chosen = self._settled(job) or _chosen(job.dataset, job.clients, job.method, self.sources)
            if isinstance(chosen, Alone):
                return run_alone(chosen, clients, job.seed), chosen.words
            return run_method(job.method, chosen, clients, job.epsilon, job.seed), chosen.words
        chosen = paper(job.dataset, job.local)
        if job.dataset == "cifar10":
            rounds = rounds_within(self.minutes, job.method, chosen, clients)
            chosen = replace(chosen, settings=replace(chosen.settings, rounds=rounds))
        words = chosen.network if job.method == "stand-alone" else chosen.words
        return run_method(job.method, chosen, clients, job.epsilon, job.seed), words

    def _settled(self, job: Job) -> Configuration | None:
        """What was chosen for this method before, by the row that stands."""
        found = {
            row.settings for row in read(self.results, Row)
            if (row.dataset, row.clients, row.method, row.configuration) == (*GRID_AT, job.method, "grid")
        }  # fmt: skip
        chosen = next((one for one in grid(GRID_AT[0]) if one.words in found), None)
        return None if chosen is None else suited(chosen, job.dataset)


def suited(chosen: Configuration, dataset: str) -> Configuration:
    """The same settings with the network that the data have."""
    return replace(chosen, network="small MLP") if chosen.network == "MLP" and "cifar" in dataset else chosen


@lru_cache(maxsize=1)
def _clients(dataset: str, clients: int, seed: int, sources: Sources) -> Clients:
    if dataset == "mnist by writer":
        return writers(seed, sources)
    return dealt(dataset, clients, CLASSES_PER_CLIENT, seed, sources)


@cache
def _chosen(dataset: str, clients: int, method: str, sources: Sources) -> Configuration | Alone:
    """Ways of learning alone are chosen where they are used; baselines' settings once, where GRID_AT says."""
    at = (dataset, clients) if method == "stand-alone" else GRID_AT
    there = dealt(*at, CLASSES_PER_CLIENT, CHOOSING, sources)
    print(f"{at[0]}, {at[1]:,} clients: choosing for {method}", flush=True)
    if method == "stand-alone":
        return best_alone(dataset, there, CHOOSING)
    return suited(best_of_grid(method, at[0], there, 1.0, CHOOSING), dataset)


def _columns(result: Result) -> dict[str, object]:
    columns = asdict(result)
    return columns | {"tested": columns.pop("clients")}


def say(row: Row) -> None:
    ratio = "" if row.signal_to_noise is None else f"  signal/noise {row.signal_to_noise:.4f}"
    told = "" if row.paper is None else f"  (paper {row.paper:.2f})"
    name = f"{row.dataset:16} n {row.clients:5,} eps {row.epsilon:<4g} {row.method:12} {row.configuration:7}"
    found = f"{100 * row.accuracy:.2f} +- {100 * row.accuracy_error:.2f}{told}{ratio}"
    print(f"{name} seed {row.seed}: {found}  {row.settings}  {row.seconds:.0f} s", flush=True)


def arguments_of(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    part = parser.add_mutually_exclusive_group()
    for name in ("targets", "figure1", "writers"):
        part.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--datasets", nargs="+", choices=(*DATASETS, "mnist by writer"))
    parser.add_argument("--only", nargs="+", choices=(*METHODS, "default"), help="these methods alone")
    parser.add_argument("--most-clients", type=int, help="settings with more clients are left out")
    parser.add_argument("--local", choices=("step", "epoch"), default="step")
    parser.add_argument("--minutes", type=float, default=30.0, help="of each method on CIFAR-10 with LeNet")
    parser.add_argument("--data", type=Path, default=Sources().data)
    parser.add_argument("--fashion", type=Path, default=Sources().fashion)
    parser.add_argument("--cache", type=Path, default=Sources().cache, help="for features of the frozen encoder")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--list", action="store_true", help="say what would be run")
    parser.add_argument("--draw-only", action="store_true", help="the picture of what has been run")
    return parser.parse_args(given)


def jobs_of(arguments: argparse.Namespace) -> list[Job]:
    seeds, local = arguments.seeds, arguments.local
    if arguments.targets:
        jobs = list(jobs_of_targets(seeds))
    elif arguments.figure1:
        jobs = list(jobs_of_figure(seeds, local))
    else:
        jobs = list(jobs_of_writers(seeds, local) if arguments.writers else jobs_of_table(seeds, local))
    return [
        job
        for job in jobs
        if (not arguments.datasets or job.dataset in arguments.datasets)
        and (not arguments.only or ("default" if job.configuration == "default" else job.method) in arguments.only)
        and (not arguments.most_clients or job.clients <= arguments.most_clients)
    ]


def main(given: list[str] | None = None) -> None:
    arguments = arguments_of(given)
    path = arguments.results / "table1.csv"
    rows: list[Row] = read(path, Row)
    standing = {row.job for row in rows}
    left = [] if arguments.draw_only else [job for job in jobs_of(arguments) if job not in standing]
    if arguments.list:
        for job in left:
            print(job)
        return
    runner = Runner(Sources(arguments.data, arguments.fashion, arguments.cache), arguments.minutes, path)
    for job in left:
        row = runner(job)
        rows = [*read(path, Row), row]  # read again: another process may have added rows
        write(path, rows)
        say(row)
    for key, (accuracy, error, seeds) in means(rows).items():
        dataset, clients, epsilon, method, configuration = key
        name = f"{dataset:16} n {clients:5,} eps {epsilon:<4g} {method:12} {configuration:7}"
        print(f"{name} {100 * accuracy:.2f} +- {100 * error:.2f} ({seeds} seeds)")
    if rows:
        draw(means(rows), arguments.results / "table1.png")


if __name__ == "__main__":
    main()
