"""The picture of the demo: loss against steps, and the same losses against the bytes they cost."""

from itertools import accumulate
from statistics import mean

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from commpress.cli.train import Result, by_run

COLORS = {"plain": "#444444", "bf16": "#1f77b4", "commpress": "#d62728"}


def draw(results: list[Result], path: str) -> None:
    """One line per run, smoothed and averaged over seeds, the single steps faint behind it."""
    figure, panels = pyplot.subplots(1, 2, figsize=(12, 4.8), sharey=True, layout="constrained")
    for name, group in by_run(results).items():
        losses = [mean(step) for step in zip(*(r.losses for r in group), strict=True)]
        sent = [mean(step) / 1e6 for step in zip(*(r.sent for r in group), strict=True)]
        smoothed, steps, color = smooth(losses), range(1, len(losses) + 1), COLORS[name]
        for panel, x, label in (
            (panels[0], steps, f"{name}: held-out loss {mean(r.held_out_loss for r in group):.3f}"),
            (panels[1], sent, f"{name}: {sent[-1]:.0f} MB" if sent[-1] >= 10 else f"{name}: {sent[-1]:.2g} MB"),
        ):
            panel.plot(x, losses, color=color, alpha=0.2, linewidth=0.8)
            panel.plot(x, smoothed, color=color, linewidth=2, label=label)
    for panel, label, title in (
        (panels[0], "step", "The same steps"),
        (panels[1], "MB sent by each rank (log scale)", "The same bytes"),
    ):
        panel.set(xlabel=label, title=title)
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)
    panels[0].set_ylabel("training loss, nats per byte")
    panels[1].set_xscale("log")
    settings, parameters, ranks = results[0].settings, results[0].parameters, results[0].ranks
    figure.suptitle(
        f"GPT of {parameters / 1e6:.2g} M parameters on Python source, {ranks} ranks, SGD, "
        f"commpress with codec {settings.codec}" + ("" if settings.error_feedback else " without error feedback")
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def smooth(values: list[float]) -> list[float]:
    """The mean of the last twentieth, or of what there is so far."""
    window = max(len(values) // 20, 1)
    sums = [0.0, *accumulate(values)]
    return [(sums[i] - sums[max(i - window, 0)]) / min(i, window) for i in range(1, len(sums))]
