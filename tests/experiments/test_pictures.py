"""Pictures of experiments: names beside their lines, collisions that are seen, files drawn from CSVs alone."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from experiments import pictures, style


def test_labels_are_a_line_of_text_apart() -> None:
    heights = style.apart(np.array([0.1, 0.1, 0.12, 0.99, 1.0]), 0.1)
    assert (np.diff(heights) > 0.099).all()
    assert heights.max() <= 1.0


def test_lines_are_named_at_the_right_and_apart(tmp_path: Path) -> None:
    with style.picture(tmp_path / "two.png", columns=2, title="title", note="note") as panels:
        for axes in panels.flat:
            axes.plot([1, 2, 3], [1.0, 2.0, 3.0], label="one", **style.OURS)
            axes.plot([1, 2, 3], [3.0, 2.0, 3.0], label="another")
            style.level(axes, 30.0, "far away")
            style.level(axes, math.nan, "nowhere")
            style.number_axis(axes, "number")
            style.epsilon_axis(axes, [1, 2, 3])
            axes.set_ylim(0, 4)
    texts = panels[0, 0].texts
    assert [text.get_text() for text in texts] == ["one", "another", "far away 30.000, off the axis"]
    assert [text.get_weight() for text in texts] == ["bold", "normal", "normal"]
    assert all(text.get_position()[0] > 1 for text in texts)
    assert (tmp_path / "two.png").stat().st_size > 10_000


def draw_texts(path: Path, *texts: tuple[float, float, str]) -> None:
    with style.picture(path) as panels:
        panels[0, 0].plot([1, 2], [1, 2])
        for text in texts:
            panels[0, 0].text(*text)


def test_texts_that_overlap_are_seen(tmp_path: Path) -> None:
    draw_texts(tmp_path / "apart.png", (1.1, 1.9, "first"), (1.1, 1.7, "second"))
    with pytest.raises(style.Collision, match="'first' overlaps 'second'"):
        draw_texts(tmp_path / "one.png", (1.2, 1.8, "first"), (1.22, 1.8, "second"))


def test_a_text_on_a_line_is_seen(tmp_path: Path) -> None:
    with pytest.raises(style.Collision, match="lies on the line"):
        draw_texts(tmp_path / "one.png", (1.5, 1.5, "here"))


def test_seven_panels_are_too_many(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="7 panels"):
        style.picture(tmp_path / "one.png", rows=7).__enter__()


def test_cells_become_numbers_texts_or_none(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('name,count,error,epsilon\n"a, b",20,1e-3,\n')
    (row,) = style.read(tmp_path / "rows.csv")
    assert vars(row) == {"name": "a, b", "count": 20, "error": 0.001, "epsilon": None}
    assert style.means([row], "error", count=20) == 0.001
    assert math.isnan(style.means([row], "error", count=21))


@pytest.mark.parametrize("name", ["classes", "dp_clip", "jester", "margin", "table1", "writers"])
def test_a_picture_is_drawn_from_its_csv(name: str, tmp_path: Path) -> None:
    pictures.draw_all([name], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.png"]


def test_every_picture_that_stands_can_be_drawn_again() -> None:
    """Their names begin with the name of what draws them."""
    standing = {path.stem for path in style.RESULTS.glob("*.png")}
    assert standing
    assert all(any(name.startswith(drawn) for drawn in pictures.PICTURES) for name in standing)
