"""The one style of all pictures of experiments: colours, panels, axes, and names of lines at the right of a panel.

    with style.picture(path, rows=1, columns=2) as panels:
        panel = panels[0, 0]
        panel.plot(epsilons, errors, "o-", color=style.PRIVREP, label="privrep")
        style.level(panel, 0.48, "true representation, not private")
        style.epsilon_axis(panel, epsilons)
        style.number_axis(panel, "log-loss on fresh rows")

A labelled line gets its label at the right end of its panel, in its colour, a line of text apart from the next. So no
name can lie on a line. `picture` raises Collision if two texts of the picture overlap.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from privrep.models.picture import FAINT, GROUP, INK, OTHER, PRIVREP
from privrep.typing import Array

RESULTS = Path(__file__).parent / "results"
PALE = GROUP  # of privrep: its other methods, or fewer rows
FAINTEST = "#c2dbe5"
PAPER = "#b5482a"  # configurations of papers
ANALYST = "#c58b16"  # another private way to the same end
ALONE = "#7b5ea7"  # users without other users
NOT_PRIVATE = "#5f6b73"
TARGET = {"color": ANALYST, "linewidth": 5, "alpha": 0.35, "solid_capstyle": "butt"}
OURS = {"color": PRIVREP, "linewidth": 2.4, "marker": "o", "markersize": 5, "zorder": 6}
SETTINGS = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": NOT_PRIVATE,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "figure.dpi": 120,
    "savefig.dpi": "figure",
}
NAMES = 8.5  # points, the size of names at the right
LINE = 1.3  # distance of two names, in their sizes
MOST_PANELS = 6
DARK = 0.52  # luminance of a colour that text may have

__all__ = [
    "ALONE",
    "ANALYST",
    "FAINT",
    "FAINTEST",
    "INK",
    "NOT_PRIVATE",
    "OTHER",
    "OURS",
    "PALE",
    "PAPER",
    "PRIVREP",
    "RESULTS",
    "TARGET",
    "Collision",
    "apart",
    "epsilon_axis",
    "level",
    "means",
    "number_axis",
    "picture",
    "read",
    "said",
]


class Collision(Exception):
    """Two texts of a picture overlap."""


@contextmanager
def picture(
    path: Path,
    rows: int = 1,
    columns: int = 1,
    *,
    panel: tuple[float, float] = (5.2, 3.6),
    title: str = "",
    note: str = "",
    share_y: bool = False,
) -> Iterator[Any]:
    """Yield an array (rows, columns) of panels, then name their lines and write the PNG.

    Args:
        path: of the file.
        rows, columns: of panels; six panels at most.
        panel: width and height of one panel with its names, in inches.
        title: above all panels.
        note: below all panels, smaller.
        share_y: whether the panels of a row share their vertical axis.

    Raises:
        Collision: if two texts overlap.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if rows * columns > MOST_PANELS:
        raise ValueError(f"{rows * columns} panels, where a picture has {MOST_PANELS} at most")
    with matplotlib.rc_context(SETTINGS):
        extra = 0.3 * bool(title) + 0.3 * bool(note)
        figure = Figure(figsize=(columns * panel[0], rows * panel[1] + extra), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(rows, columns, squeeze=False, sharey="row" if share_y else False)
        yield panels
        if title:
            figure.suptitle(title, x=0.01, ha="left", weight="bold", fontsize=11)
        if note:
            figure.supxlabel(note, x=0.01, ha="left", color=NOT_PRIVATE, fontsize=NAMES)
        for axes in panels.flat:
            _hide_or_name(axes)
        figure.draw_without_rendering()
        for axes in panels.flat:
            _spread_names(axes)
        figure.draw_without_rendering()
        figure.savefig(path)
        _check_apart(figure)


def _hide_or_name(axes: Any) -> None:
    """Write the labels of lines at the right of a panel. An empty panel disappears."""
    if not axes.has_data():
        axes.set_axis_off()
        return
    low, high = sorted(axes.get_ylim())
    for line in axes.get_lines():
        name = str(line.get_label())
        if name.startswith("_"):
            continue
        value = float(np.asarray(line.get_ydata(), dtype=float)[-1])
        off = "" if low <= value <= high else ", off the axis"
        ours = line.get_color() == PRIVREP
        text = axes.text(
            1.05, 0.5, name + off, color=_readable(line.get_color()), fontsize=NAMES, va="center", gid="name",
            weight="bold" if ours else "normal", transform=axes.transAxes,
        )  # fmt: skip
        text.value = value


def _readable(colour: Any) -> Any:
    """Return a colour that is dark enough for text: pale ones are mixed with ink."""
    from matplotlib.colors import to_rgb

    mixed = np.array(to_rgb(colour))
    while mixed @ (0.3, 0.6, 0.1) > DARK:
        mixed = 0.85 * mixed + 0.15 * np.array(to_rgb(INK))
    return tuple(mixed)


def _spread_names(axes: Any) -> None:
    """Move names near the ends of their lines, a line of text apart, and draw a stroke from each line to its name."""
    texts = [text for text in axes.texts if text.get_gid() == "name"]
    if not texts:
        return
    at = axes.transData + axes.transAxes.inverted()
    left = axes.get_xlim()[0]
    ends = [float(np.clip(at.transform((left, text.value))[1], -0.02, 1.02)) for text in texts]
    order = np.argsort(ends, kind="stable")
    points = axes.get_window_extent().height / axes.figure.dpi * 72
    heights = apart(np.array(ends)[order], NAMES * LINE / points)
    for i, height in zip(order, heights, strict=True):
        texts[i].set_y(height)
        axes.plot(
            [1.0, 1.04], [ends[i], height], color=texts[i].get_color(), linewidth=0.7, transform=axes.transAxes,
            clip_on=False, scalex=False, scaley=False, marker="",
        )  # fmt: skip


def apart(heights: Array, gap: float) -> Array:
    """Return sorted heights moved until neighbours are a gap apart, none above 1."""
    heights = heights.copy()
    for _ in range(1_000):
        missing = np.maximum(gap - np.diff(heights), 0.0)
        heights[:-1] -= missing / 2
        heights[1:] += missing / 2
        heights -= np.maximum(heights - 1.0, 0.0)
    return heights


def _check_apart(figure: Any) -> None:
    """Raise Collision if two visible texts overlap by more than two pixels, or a text inside a panel lies on a line."""
    found = [(text, text.get_window_extent()) for text in _texts(figure) if text.get_text().strip()]
    for (one, box), (other, beside) in combinations(found, 2):
        wide = min(box.x1, beside.x1) - max(box.x0, beside.x0)
        high = min(box.y1, beside.y1) - max(box.y0, beside.y0)
        if wide > 2 and high > 2:
            raise Collision(f"{one.get_text()!r} overlaps {other.get_text()!r}")
    for axes in figure.axes:
        inside = [pair for pair in found if pair[0] in axes.texts and pair[0].get_gid() != "name"]
        lines = [line for line in axes.get_lines() if len(line.get_xdata()) > 1]
        for text, box in inside:
            for line in lines:
                if line.get_path().transformed(line.get_transform()).intersects_bbox(box, filled=False):
                    raise Collision(f"{text.get_text()!r} lies on the line {line.get_label()!r}")


def _texts(figure: Any) -> Iterator[Any]:
    """Yield all texts that are seen: titles, names, legends, labels of axes and of ticks."""
    yield from figure.texts
    for axes in figure.axes:
        if not axes.axison:
            continue
        yield from (*axes.texts, axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label)
        if axes.get_legend():
            yield from axes.get_legend().get_texts()
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            for tick in axis.get_major_ticks():
                if min(limits) <= tick.get_loc() <= max(limits):
                    yield tick.label1


def epsilon_axis(axes: Any, epsilons: Sequence[float], words: str = "epsilon") -> None:
    """Make the horizontal axis logarithmic, with a tick at each of these values."""
    axes.set_xscale("log")
    axes.set_xticks(epsilons, [_plain(value) for value in epsilons])
    axes.minorticks_off()
    axes.set_xlim(min(epsilons) / 1.2, max(epsilons) * 1.2)
    axes.set_xlabel(words)


def number_axis(axes: Any, words: str, *, log: bool = False, ticks: Sequence[float] = ()) -> None:
    """Name the vertical axis. Where `log`, its ticks are powers of ten, or these ticks, as plain decimals."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    axes.set_ylabel(words)
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(FixedLocator(list(ticks)) if ticks else LogLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)


def level(axes: Any, value: float, name: str, *, colour: str = NOT_PRIVATE, style: str = "--", digits: int = 3) -> None:
    """Draw a horizontal line with its name and value at the right. NaN draws nothing."""
    if not math.isnan(value):
        axes.axhline(value, color=colour, linewidth=1, linestyle=style, zorder=1, label=f"{name} {value:.{digits}f}")


def said(value: float) -> str:
    """Return a measured number for a name: three decimals, or two digits of what is small."""
    return f"{value:.3f}" if abs(value) >= 0.01 else f"{value:.2g}"


def _plain(value: float) -> str:
    """Return a number as people write it: 0.0001, 1.5, 20,000."""
    return f"{value:,.0f}" if value >= 1_000 else np.format_float_positional(float(f"{value:.6g}"), trim="-")


def read(path: Path) -> list[Any]:
    """Return the rows of a CSV as namespaces. Cells that are numbers become numbers, empty ones None."""
    with open(path, newline="") as file:
        return [SimpleNamespace(**{name: _cell(cell) for name, cell in row.items()}) for row in csv.DictReader(file)]


def _cell(cell: str) -> float | str | None:
    if not cell:
        return None
    try:
        return int(cell) if cell.isdigit() else float(cell)
    except ValueError:
        return cell


def means(rows: Iterable[Any], number: str, **same: object) -> float:
    """Return the mean of a field over the rows whose other fields have these values; NaN if there are none."""
    chosen = [getattr(row, number) for row in rows if all(getattr(row, k) == v for k, v in same.items())]
    return float(np.mean(chosen)) if chosen else math.nan
