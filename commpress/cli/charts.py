"""Pictures of one look: curves."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = ("#999999", "#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b")
PANEL = (6.4, 4.6)  # inches


@contextmanager
def chart(
    path: str,
    title: str,
    *,
    panels: int = 1,
    size: tuple[float, float] = PANEL,
) -> Iterator[list[Any]]:
    """Panels side by side, to be filled; what they show is saved when the context ends."""
    figure, grid = pyplot.subplots(
        1,
        panels,
        figsize=(size[0] * panels, size[1]),
        layout="constrained",
        squeeze=False,
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


def smooth(values: Sequence[float], least: int = 1) -> list[float]:
    """The mean of the last fiftieth and of ``least`` values, or of as many as there are so far."""
    window = max(len(values) // 50, least)
    sums = [0.0, *accumulate(values)]
    return [(sums[i] - sums[max(i - window, 0)]) / min(i, window) for i in range(1, len(sums))]
