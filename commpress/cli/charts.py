"""Pictures of one look: curves, bars side by side, matrices."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter

COLOURS = ("#999999", "#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b")
ALONE = "#6b6f8a"  # of bars that no legend names
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


def bars(
    panel: Any,
    names: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    axis: str,
    *,
    stacked: bool = False,
    first: int = 0,
) -> None:
    """Lying bars with their values, first name on top: one of each series beside each other, where
    None leaves a gap; or one made of all. ``first``: of the colours."""
    height = 0.8 / (1 if stacked else len(series))
    ends, longest = [0.0] * len(names), 0.0
    for i, (label, values) in enumerate(series.items()):
        colour = COLOURS[(first + i) % len(COLOURS)] if len(series) > 1 else ALONE
        shift = 0.0 if stacked else (i - (len(series) - 1) / 2) * height
        places, lengths = [row + shift for row in range(len(names))], [v or 0.0 for v in values]
        look = {"height": 0.92 * height, "color": colour, "label": label}
        if any(lengths):
            panel.barh(places, lengths, left=ends, **look)
        longest = max(longest, *lengths)
        if stacked:
            ends = [a + b for a, b in zip(ends, lengths, strict=True)]
        else:
            _values(panel, places, values)
    if stacked:
        _values(panel, range(len(names)), ends)
        longest = max(ends)
    panel.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))
    panel.set(xlim=(0, 1.17 * longest or 1), xlabel=axis)


def _values(panel: Any, places: Sequence[float], values: Sequence[float | None]) -> None:
    for at, value in zip(places, values, strict=True):
        text = "–" if value is None else f"{value:.3g}"
        if value is not None and "e+" in text:  # 1235, not 1.24e+03
            text = f"{value:.0f}"
        panel.text(value or 0, at, f" {text}", va="center", fontsize=8, bbox=PAPER)


def of_table(
    path: str,
    title: str,
    rows: Sequence[Mapping[str, str]],
    panels: Mapping[str, Sequence[str]],
) -> None:
    """Columns of a table as bars, those of an axis beside each other. The columns before the first
    of them name a row."""
    first = list(rows[0]).index(next(iter(panels.values()))[0])
    names = [" ".join(list(row.values())[:first]) for row in rows]
    bars_of_a_row = max(map(len, panels.values()))
    height = 1.6 + 0.25 * len(names) * bars_of_a_row
    with chart(path, title, panels=len(panels), size=(6.4, height), share=True) as drawn:
        for (axis, columns), panel in zip(panels.items(), drawn, strict=True):
            series = {column: [_number(row[column]) for row in rows] for column in columns}
            bars(panel, names, series if len(columns) > 1 else {"": series[columns[0]]}, axis)


def _number(cell: str) -> float | None:
    """The number at the beginning of a cell; None where there is none."""
    found = re.match(r"[+-]?[\d.]+(e[+-]\d+)?", cell)
    return float(found[0]) if found else None


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
