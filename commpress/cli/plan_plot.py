"""The picture of ``commpress plan``: what a step of each candidate takes, and the memory it needs on a rank."""

from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from commpress.plan.candidates import TIERS, Candidate

SHADES = {"device": "#1f77b4", "host": "#ff7f0e", "disk": "#8c564b"}


def draw(found: Sequence[Candidate], chosen: Candidate, path: str, title: str) -> None:
    figure, (times, memory) = pyplot.subplots(
        1, 2, figsize=(12, 0.32 * len(found) + 1.6), sharey=True, layout="constrained"
    )
    names = [c.name + ("" if c.fits else " (does not fit)") for c in found]
    colors = ["#2ca02c" if c is chosen else "#7f7f7f" if c.codec else "#c7c7c7" for c in found]
    bars = times.barh(names, [1e3 * c.seconds for c in found], color=colors)
    times.bar_label(bars, [f"{1e3 * c.seconds:.4g}" for c in found], padding=3)
    times.set_xlabel("ms a step (green: chosen; dark: what a plan can name)")
    times.invert_yaxis()
    times.margins(x=0.14)
    start = [0.0] * len(found)
    for tier in TIERS:
        size = [c.memory.get(tier, 0.0) / 1e9 for c in found]
        memory.barh(names, size, left=start, color=SHADES[tier], label=tier)
        start = [a + b for a, b in zip(start, size, strict=True)]
    memory.set_xlabel("GB on a rank, without activations")
    memory.legend(frameon=False)
    figure.suptitle(f"Predicted: {title}")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
