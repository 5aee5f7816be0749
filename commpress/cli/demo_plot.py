"""The picture of the demo: loss against steps, and the same losses against the bytes they cost."""

from statistics import mean
from typing import Any

from commpress.cli import charts
from commpress.cli.train import Result, by_run

STYLES = {  # the widest first, so that lines that lie on each other all show
    "plain": {"color": "#999999", "linewidth": 5.0},
    "bf16": {"color": "#1f77b4", "linewidth": 2.2, "linestyle": "--"},
    "commpress": {"color": "#d62728", "linewidth": 1.8},
}


def draw(results: list[Result], path: str) -> None:
    """One line per run, averaged over seeds and smoothed over a fiftieth of the steps."""
    with charts.chart(path, _title(results[0]), panels=2, share=True) as (by_step, by_bytes):
        _fill(by_step, by_bytes, results)


def _fill(by_step: Any, by_bytes: Any, results: list[Result]) -> None:
    lowest, start = [], []
    groups = by_run(results)
    for name in sorted(groups, key=list(STYLES).index):
        group = groups[name]
        losses = charts.smooth([mean(step) for step in zip(*(r.losses for r in group), strict=True)])
        sent = [mean(step) / 1e6 for step in zip(*(r.sent for r in group), strict=True)]
        lowest.append(min(losses))
        start.append(losses[len(losses) // 20])
        held_out = mean(r.held_out_loss for r in group)
        by_step.plot(range(1, len(losses) + 1), losses, label=f"{name}: held-out loss {held_out:.3f}", **STYLES[name])
        by_bytes.plot(sent, losses, label=f"{name}: {sent[-1]:.3g} MB", **STYLES[name])
        exact = group[0].settings.exact_steps
        if name == "commpress" and 0 < exact < len(losses):
            for panel, x in ((by_step, exact), (by_bytes, sent[exact - 1])):
                panel.plot(
                    x, losses[exact - 1], "o", color=STYLES[name]["color"], label=f"compressed from step {exact} on"
                )
    by_step.set(xlabel="step", title="The same steps", ylabel="training loss, nats per byte (smoothed)")
    by_bytes.set(xlabel="MB sent by each rank", title="The same bytes")
    margin = 0.05 * (max(start) - min(lowest))
    by_step.set_ylim(min(lowest) - margin - 1e-3, max(start) + margin + 1e-3)  # the first steps would flatten the rest


def _title(result: Result) -> str:
    settings = result.settings
    without = "" if settings.error_feedback else " without error feedback"
    feedback = " with EF21" if settings.error_feedback == "ef21" else without
    return (
        f"GPT of {result.parameters / 1e6:.2g} M parameters on Python source, {result.ranks} ranks, SGD; commpress: codec "
        f"{settings.codec}" + feedback
    )
