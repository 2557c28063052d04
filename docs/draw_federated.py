"""Draws federated.png, the picture of docs/federated.md: `python docs/draw_federated.py`."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from privrep.models.picture import INK, PRIVREP

QUIET, NODE, SERVER, PUBLIC = "#5f6b73", "#f2f4f5", "#e3f0f5", "#ffffff"  # the last three fill boxes


def box(axes: Axes, x: float, y: float, width: float, height: float, colour: str, title: str, lines: list[str]) -> None:
    round_corners = "round,pad=0.02,rounding_size=0.12"
    shape = FancyBboxPatch((x, y), width, height, boxstyle=round_corners, fc=colour, ec=PRIVREP, lw=1.2)
    axes.add_patch(shape)
    axes.text(x + width / 2, y + height - 0.3, title, ha="center", va="center", fontsize=11, weight="bold", color=INK)
    for number, line in enumerate(lines):
        axes.text(
            x + width / 2, y + height - 0.7 - 0.34 * number, line, ha="center", va="center", fontsize=9, color=INK
        )


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = INK) -> None:
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.4})


def main() -> None:
    figure = Figure(figsize=(9.6, 5.4))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set(xlim=(-0.1, 12.1), ylim=(0, 6.8))
    axes.axis("off")
    box(axes, 3.2, 4.75, 5.6, 1.75, SERVER, "server", [
        "checks each sum: number, count, shape, length",
        "adds them up, charges the ledger, adds noise",
        "never sees a row, an id or a head",
    ])  # fmt: skip
    box(axes, 9.6, 4.75, 2.2, 1.75, PUBLIC, "billboard", ["releases", "representation", "anyone may see it"])
    arrow(axes, (8.85, 5.6), (9.55, 5.6))
    for name, users, x in (
        ("node north", "300 users", 0.0),
        ("node south", "200 users", 4.25),
        ("a phone", "1 user", 8.5),
    ):
        box(
            axes,
            x,
            0.2,
            3.5,
            1.75,
            NODE,
            name,
            [f"rows and ids of {users}: stay", "clips each user by itself", "heads: stay"],
        )
        middle = x + 1.75
        top = min(max(middle, 3.8), 8.2)
        arrow(axes, (middle - 0.18, 2.02), (top - 0.18, 4.68))
        arrow(axes, (top + 0.18, 4.68), (middle + 0.18, 2.02), QUIET)
    said = {"fontsize": 9.5, "va": "center"}
    axes.text(0.0, 3.55, "up, once a round:\none clipped sum\nof all its users,\nor a noisy one", color=INK, **said)
    axes.text(10.0, 3.45, "down: what to compute,\npublic numbers alone;\nat the end the model", color=QUIET, **said)
    figure.savefig(Path(__file__).with_name("federated.png"), dpi=130, bbox_inches="tight")


if __name__ == "__main__":
    main()
