"""Draw all pictures again from the CSVs in results/; nothing is run.

python -m experiments.pictures [name ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

from experiments import (
    classes_picture,
    dp_clip_linear,
    dp_clip_picture,
    dp_clip_retrieval_picture,
    figure1,
    figure1_picture,
    frontier_picture,
    jester_picture,
    margin_picture,
    style,
    table1_picture,
    tables_picture,
    writers_picture,
)
from experiments.frontier_runs import read_rows
from experiments.label_runs import LabelScore
from experiments.label_targets import LabelResults
from experiments.rating_runs import RatingScore
from experiments.rating_targets import RatingResults
from experiments.style import RESULTS
from experiments.tables_runs import Score, read_lines
from experiments.tables_targets import Results


def draw_figure1(folder: Path) -> None:
    figure1_picture.draw(style.read(RESULTS / "figure1.csv"), figure1.Setting(), folder / "figure1.png")


def draw_tables(folder: Path) -> None:
    def named(name: str) -> Path:
        return folder / f"{name}.png"

    tables_picture.draw(Results(read_lines(RESULTS / "tables.csv", Score)), named)
    tables_picture.draw_labels(LabelResults(read_lines(RESULTS / "tables_labels.csv", LabelScore)), named)
    tables_picture.draw_ratings(RatingResults(read_lines(RESULTS / "tables_ratings.csv", RatingScore)), named)


def draw_frontier(folder: Path) -> None:
    frontier_picture.draw_all(read_rows(RESULTS / "frontier.csv"), folder)


def draw_table1(folder: Path) -> None:
    table1_picture.draw(table1_picture.means(style.read(RESULTS / "table1.csv")), folder / "table1.png")


def draw_dp_clip_linear(folder: Path) -> None:
    dp_clip_linear.plot(
        dp_clip_linear.Results(dp_clip_linear.read_rows(RESULTS / "dp_clip_linear.csv")), folder / "dp_clip_linear.png"
    )


def draw_image_users(folder: Path) -> None:
    """Draw users' images against epsilon, if they have been run. Needs the extra torch."""
    path = RESULTS / "image_users.csv"
    if not path.exists():
        print("image_users: results/image_users.csv is not there yet: nothing to draw")
        return
    experiment = import_module("experiments.image_users")
    experiment.draw(experiment.read(path, experiment.Row), folder / "image_users.png")


def from_rows(name: str, draw: Callable[[list[object], Path], None]) -> Callable[[Path], None]:
    """Return what draws a picture from the rows of the CSV of the same name."""
    return lambda folder: draw(style.read(RESULTS / f"{name}.csv"), folder / f"{name}.png")


PICTURES: dict[str, Callable[[Path], None]] = {
    "classes": from_rows("classes", classes_picture.draw),
    "dp_clip": from_rows("dp_clip", dp_clip_picture.draw),
    "dp_clip_linear": draw_dp_clip_linear,
    "dp_clip_retrieval": from_rows("dp_clip_retrieval", dp_clip_retrieval_picture.draw),
    "figure1": draw_figure1,
    "frontier": draw_frontier,
    "image_users": draw_image_users,
    "jester": from_rows("jester", jester_picture.draw),
    "margin": from_rows("margin", margin_picture.draw),
    "table1": draw_table1,
    "tables": draw_tables,
    "writers": from_rows("writers", writers_picture.draw),
}


def draw_all(names: Iterable[str] = PICTURES, folder: Path = RESULTS) -> None:
    """Draw these pictures into a folder."""
    for name in names:
        PICTURES[name](folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help="these alone")
    draw_all(parser.parse_args().names or PICTURES)


if __name__ == "__main__":
    main()
