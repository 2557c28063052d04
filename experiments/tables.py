"""Real panels: privrep against what one does without privacy, and against an analyst's noisy ridge at equal epsilon.

    python -m experiments.tables [--seeds 5] [--quick] [--only panels|sizes|synthetic|labels|ratings|summary]

Wages (nlswork), baseball (batting) and chemistry grades by school (chem97). Every private fit has defaults, finds its
rank and charges everything to (epsilon, 1e-6) under replace-one-user. A seed makes the split and the noise, which is
simulated. Seeds are 80 to 84, or others from `--first` on, which nobody used while defaults were chosen. A quick run
has 0 and 1, and a tenth of the users in synthetic populations, of which it asks nothing. Panels with fewer users and
synthetic populations follow: see `tables_synthetic`. Labels (see `label_data`) have an analyst's noisy logistic
regression beside them, ratings of films and jokes (see `rating_data`) an analyst's noisy item means.

Writes beside this file, in results/: tables.csv (every run on panels), tables_synthetic.csv (every run on synthetic
populations), tables_labels.csv, tables_ratings.csv, tables_targets.csv (what was asked for, and what was measured),
the pictures tables*.png (test rows, newcomers, labels, ratings). A quick run writes to the same names with "-quick".
What `--only` leaves out is read from there.
Files are looked for in the folders tables, ml-100k and jester of $PRIVREP_DATA, or of ../shared/data.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from experiments.label_runs import LabelScore, run_labels
from experiments.label_targets import LabelResults, judge_labels, print_labels
from experiments.rating_runs import RatingScore, run_ratings
from experiments.rating_targets import RatingResults, judge_ratings, print_ratings
from experiments.tables_data import PANELS
from experiments.tables_picture import draw, draw_labels, draw_ratings
from experiments.tables_results import print_verdicts
from experiments.tables_runs import Score, read_lines, run_panels, run_sizes, write_lines
from experiments.tables_synthetic import Ratio, run_synthetic
from experiments.tables_targets import Results, judge_panels, judge_synthetic, print_errors
from privrep.errors import InputError

RESULTS = Path(__file__).parent / "results"
FIRST_SEED, QUICK_SEEDS = 80, 2
PARTS = ("panels", "sizes", "synthetic", "labels", "ratings")
Line = TypeVar("Line", Score, Ratio, LabelScore, RatingScore)


@dataclass(frozen=True)
class Files:
    """Where results are, and their names."""

    folder: Path
    quick: bool

    def path(self, name: str, suffix: str = "csv") -> Path:
        return self.folder / f"{name}{'-quick' if self.quick else ''}.{suffix}"


def run_all(folder: Path, seeds: Sequence[int], parts: Sequence[str] = PARTS, *, quick: bool = False) -> None:
    """Run these parts, write what was measured, and sum up all that stands in the folder."""
    files = Files(folder, quick)
    on_panels = files.path("tables")
    scores = read_lines(on_panels, Score)
    if "panels" in parts:
        fewer = [score for score in scores if score.panel not in PANELS]
        scores = [*heard(run_panels(seeds)), *fewer]
        write_lines(on_panels, scores)
    if "sizes" in parts:
        whole = [score for score in scores if score.panel in PANELS]
        scores = [*whole, *heard(run_sizes(seeds))]
        write_lines(on_panels, scores)
    if "synthetic" in parts:
        ratios: list[Ratio] = []
        for seed in seeds:  # each takes minutes
            ratios += heard(run_synthetic(seed, quick=quick))
            write_lines(files.path("tables_synthetic"), ratios)
    if "labels" in parts:
        labels: list[LabelScore] = []
        for seed in seeds:
            labels += heard(run_labels([seed], quick=quick))
            write_lines(files.path("tables_labels"), labels)
    if "ratings" in parts:
        write_lines(files.path("tables_ratings"), heard(run_ratings(seeds)))
    sum_up(files)


def heard(lines: Iterable[Line]) -> list[Line]:
    """Return the lines, and print each as it comes."""
    kept, began = [], time.perf_counter()
    for line in lines:
        kept.append(line)
        if isinstance(line, Ratio):
            words = f"{line.population}, rank {line.rank}: {line.ratio:.4g} times {line.against}"
        else:
            words = f"{line.panel}: {line.method}, test {line.test:.4g}"
        epsilon = "" if line.epsilon is None else f" epsilon {line.epsilon:g}"
        print(f"{time.perf_counter() - began:6.0f} s  seed {line.seed}{epsilon}  {words}", flush=True)
    return kept


def sum_up(files: Files) -> None:
    """Print and write targets, and draw the pictures, from all that stands in the folder."""
    results = Results(read_lines(files.path("tables"), Score))
    ratios = read_lines(files.path("tables_synthetic"), Ratio)
    labels = LabelResults(read_lines(files.path("tables_labels"), LabelScore))
    ratings = RatingResults(read_lines(files.path("tables_ratings"), RatingScore))
    verdicts = [*judge_panels(results), *judge_synthetic(ratios)]
    verdicts += [*judge_labels(labels, files.quick), *judge_ratings(ratings)]
    if verdicts:
        print_errors(results)
        print_labels(labels)
        print_ratings(ratings)
        print_verdicts(verdicts)
        write_lines(files.path("tables_targets"), verdicts)
        asked = [verdict for verdict in verdicts if verdict.met]
        print(f"\n{sum(verdict.met == 'yes' for verdict in asked)} of {len(asked)} targets met")
    if any(panel in PANELS for panel in results.panels()):
        draw(results, partial(files.path, suffix="png"))
    if labels.panels():
        draw_labels(labels, partial(files.path, suffix="png"))
    if ratings.panels():
        draw_ratings(ratings, partial(files.path, suffix="png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, help="how many; 5, or 2 in a quick run")
    parser.add_argument("--first", type=int, default=FIRST_SEED, help="the first seed, but in a quick run; 80")
    parser.add_argument("--quick", action="store_true", help="seeds 0 and 1, smaller populations; own files")
    parser.add_argument("--only", choices=[*PARTS, "summary"], help="run one part, or none, and sum up")
    arguments = parser.parse_args()
    count = arguments.seeds or (QUICK_SEEDS if arguments.quick else 5)
    first = 0 if arguments.quick else arguments.first
    parts = PARTS if arguments.only is None else (arguments.only,)
    try:
        run_all(RESULTS, range(first, first + count), parts, quick=arguments.quick)
    except InputError as error:
        raise SystemExit(f"Error: {error}") from error


if __name__ == "__main__":
    main()
