"""The pictures of ``commpress simulate``: time and speed-up against ranks, or bars where there is one cluster."""

from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

if TYPE_CHECKING:
    from commpress.cli.simulate import Row

COLORS = ("#7f7f7f", "#1f77b4", "#2ca02c", "#9467bd", "#d62728", "#ff7f0e", "#17becf", "#8c564b")


def draw(rows: "list[Row]", path: str, title: str) -> None:
    ranks = sorted({row.ranks for row in rows})
    figure, (times, other) = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    ways = list(dict.fromkeys(row.way for row in rows))
    if len(ranks) > 1:
        for i, way in enumerate(ways):
            mine = [row for row in rows if row.way == way]
            style = {"color": COLORS[i % len(COLORS)], "marker": "o", "markersize": 4}
            if way.endswith("/2"):
                style |= {"linestyle": "--"}
            at = [row.ranks for row in mine]
            times.plot(at, [1e3 * row.seconds for row in mine], label=way, **style)
            other.plot(at, [row.plain_seconds / row.seconds for row in mine], label=way, **style)
        for panel in (times, other):
            panel.set_xscale("log", base=2)
            panel.set_xticks(ranks, [str(n) for n in ranks])
            panel.set_xlabel("ranks")
            panel.grid(alpha=0.3)
        times.set_yscale("log")
        times.set_ylabel("ms")
        other.set_ylabel("times faster than plain")
        other.set_ylim(bottom=0)
        other.legend(frameon=False, ncols=2)
    else:
        alone = [1e3 * (row.seconds - row.exposed_seconds) for row in rows]
        _bars(times, ways, [1e3 * row.seconds for row in rows], "ms", alone)
        outside = [row.between_bytes / 1e6 for row in rows]
        _bars(other, ways, [row.sent_bytes / 1e6 for row in rows], "MB sent by one rank", outside)
        if any(row.exposed_seconds < row.seconds for row in rows):
            times.legend(["with communication", "computing alone"], frameon=False)
        if any(row.between_bytes < row.sent_bytes for row in rows):
            other.legend(["all", "out of the node"], frameon=False)
    figure.suptitle(title + (f", {ranks[0]} ranks" if len(ranks) == 1 else ""))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _bars(panel: Axes, names: list[str], values: list[float], unit: str, parts: list[float]) -> None:
    bars = panel.barh(names, values, color=[COLORS[i % len(COLORS)] for i in range(len(names))], alpha=0.55)
    panel.barh(names, parts, color=[COLORS[i % len(COLORS)] for i in range(len(names))])
    panel.bar_label(bars, [f"{value:.3g}" for value in values], padding=3)
    panel.invert_yaxis()
    panel.margins(x=0.12)
    panel.set_xlabel(unit)
