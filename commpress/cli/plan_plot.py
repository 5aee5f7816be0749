"""The picture of ``commpress plan``: what a step of each candidate takes, and the memory it needs on a rank."""

from collections.abc import Sequence

from commpress.cli import charts
from commpress.plan.candidates import TIERS, Candidate


def draw(found: Sequence[Candidate], chosen: Candidate, path: str, title: str) -> None:
    names = [c.name + ("" if c.fits else " (does not fit)") for c in found]
    kinds = {
        "chosen": [c is chosen for c in found],
        "a plan can name it": [c is not chosen and bool(c.codec) for c in found],
        "done otherwise": [not c.codec for c in found],
    }
    seconds = {kind: [1e3 * c.seconds if is_it else 0.0 for c, is_it in zip(found, which, strict=True)]
               for kind, which in kinds.items()}  # fmt: skip
    memory = {tier: [c.memory.get(tier, 0.0) / 1e9 for c in found] for tier in TIERS}
    memory = {tier: sizes for tier, sizes in memory.items() if any(sizes)}
    with charts.chart(path, f"Predicted: {title}", panels=2, size=(6.6, 0.3 * len(found) + 1.8), share=True) as (times, room):
        charts.stacked(times, names, seconds, "ms a step", show="{:.4g}", colours=("#2ca02c", "#1f77b4", "#c7c7c7"))
        charts.stacked(room, names, memory, "GB on a rank, without activations", show="{:.3g}",
                       colours=("#9467bd", "#ff7f0e", "#8c564b"))  # fmt: skip
