"""Pictures of one look: curves, bars, matrices."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter

COLOURS = ("#999999", "#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b")
MARKERS = "os^Dv<>P"
PANEL = (6.4, 4.6)  # inches
# behind a number that a line may cross
PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 0.0}


@contextmanager
def chart(
    path: str,
    title: str,
    *,
    panels: int = 1,
    size: tuple[float, float] = PANEL,
    share: bool = False,
) -> Iterator[list[Any]]:
    """Panels side by side, to be filled; what they show is saved when the context ends."""
    figure, grid = pyplot.subplots(
        1,
        panels,
        figsize=(size[0] * panels, size[1]),
        layout="constrained",
        squeeze=False,
        sharey=share,
    )
    try:
        yield list(grid[0])
        for panel in grid[0]:
            panel.grid(alpha=0.3)
            panel.set_axisbelow(True)
        _explain(figure, grid[0])
        figure.suptitle(title, wrap=True)
        figure.savefig(path, dpi=130)
    finally:
        pyplot.close(figure)


def _explain(figure: Any, panels: Sequence[Any]) -> None:
    """One legend below all panels that have none of their own, where there is more than one thing
    to name."""
    every: dict[str, Any] = {}
    for panel in (panel for panel in panels if panel.get_legend() is None):
        handles, labels = panel.get_legend_handles_labels()
        every |= zip(labels, handles, strict=True)
    if len(every) > 1:
        columns, place = min(len(every), 3 * len(panels)), "outside lower center"
        figure.legend(
            every.values(), every, loc=place, ncols=columns, frameon=False, fontsize="small"
        )


def curve(i: int) -> dict[str, Any]:
    """Looks of the i-th curve."""
    colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
    return {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.7}


def logarithmic(panel: Any) -> None:
    """The y axis, with labels that people read: 20, not 2 × 10¹."""
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(FuncFormatter(_between))


def _between(value: float, _: int) -> str:
    """Label 2 and 5 between powers of ten: a panel may hold less than one decade."""
    first = f"{value:e}"[0]
    return f"{value:g}" if first in "25" else ""


def stacked(
    panel: Any,
    names: Sequence[str],
    series: Mapping[str, Sequence[float]],
    axis: str,
    first: int = 0,
) -> None:
    """Lying bars with their values, first name on top, each made of one of each series; ``first``:
    of the colours."""
    ends = [0.0] * len(names)
    for i, (label, values) in enumerate(series.items()):
        look = {"height": 0.74, "color": COLOURS[first + i], "label": label}
        if any(values):
            panel.barh(range(len(names)), values, left=ends, **look)
        ends = [a + b for a, b in zip(ends, values, strict=True)]
    for at, end in enumerate(ends):
        text = f"{end:.0f}" if end >= 1000 else f"{end:.3g}"
        panel.text(end, at, f" {text}", va="center", fontsize=8, bbox=PAPER)
    panel.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))
    panel.set(xlim=(0, 1.17 * max(ends) or 1), xlabel=axis)


def matrix(panel: Any, values: Sequence[Sequence[float | None]]) -> None:
    """Numbers in coloured cells, the largest are dark; None: no such pair."""
    numbers = [[float("nan") if value is None else value for value in row] for row in values]
    panel.imshow(numbers, cmap="Blues")
    panel.set(xticks=range(len(values)), yticks=range(len(values)))
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if value is not None:
                panel.text(j, i, f"{value:.3g}", ha="center", va="center", fontsize=8, bbox=PAPER)


def smooth(values: Sequence[float], least: int = 1) -> list[float]:
    """The mean of the last fiftieth and of ``least`` values, or of as many as there are so far."""
    window = max(len(values) // 50, least)
    sums = [0.0, *accumulate(values)]
    return [(sums[i] - sums[max(i - window, 0)]) / min(i, window) for i in range(1, len(sums))]
