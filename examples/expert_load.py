"""Draw the load of experts over time, from the samples of ``Metrics`` on every rank: put this file
beside your script and ``from expert_load import draw``, as ``moe_gpt.py`` does."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from commpress.errors import InvalidArgument
from commpress.integrations.observe.metrics import StepMetrics

LINE = 0.16  # inches of one expert


def draw(path: str, ranks: Sequence[Sequence[StepMetrics]], title: str = "Load of experts") -> None:
    """Draw the tokens of every expert and of every rank, and dropped choices; ``ranks`` has the
    samples of each rank, for the same steps."""
    from commpress.cli import charts  # needs matplotlib

    steps = load_steps(ranks)
    experts, tokens = expert_table(ranks)
    came = np.array([[sum(s.expert_tokens.values()) for s in samples] for samples in ranks])
    names = ("expert_choices", "expert_dropped")
    choices, dropped = (
        np.array([[getattr(s, name) for s in samples] for samples in ranks]).sum(0)
        for name in names
    )
    height = max(charts.PANEL[1], LINE * len(experts) + 1.5)
    with charts.chart(path, title, panels=3, size=(5.6, height)) as (by_expert, by_rank, lost):
        groups = [name.rpartition("/")[0] for name in experts]
        mean = np.array([tokens[[g == group for g in groups]].mean(0) for group in groups])
        relative = tokens / np.maximum(mean, 1e-9)
        extent = (0, steps[-1], len(experts), 0)
        image = by_expert.imshow(
            relative, aspect="auto", interpolation="nearest", vmin=0, extent=extent
        )
        image.set_zorder(3)  # the grid behind it
        by_expert.figure.colorbar(image, ax=by_expert, label="tokens, relative to the layer's mean")
        by_expert.set_yticks(np.arange(len(experts)) + 0.5, experts, fontsize=7)
        by_expert.set(xlabel="step", title="experts")
        even = np.maximum(came.mean(0), 1e-9)
        for rank, line in enumerate(came):
            by_rank.plot(
                steps,
                line / even,
                color=charts.COLOURS[1 + rank % 7],
                linewidth=1.3,
                label=f"rank {rank}",
            )
        by_rank.plot(
            steps, came.max(0) / even, color="#222222", linewidth=2.6, label="fullest", zorder=1
        )
        by_rank.set(xlabel="step", ylabel="tokens, relative to the mean of ranks", title="ranks")
        by_rank.set(xlim=(0, None), ylim=(0, None))
        lost.plot(
            steps,
            100 * dropped / np.maximum(choices + dropped, 1),
            color=charts.COLOURS[1],
            linewidth=1.7,
        )
        lost.set(
            xlabel="step",
            ylabel="of all choices, %",
            title="dropped beyond the capacity",
            ylim=(0, None),
            xlim=(0, None),
        )


def load_steps(ranks: Sequence[Sequence[StepMetrics]]) -> list[int]:
    """Return the steps of the samples, which must be the same on all ranks."""
    found = [[s.step for s in samples] for samples in ranks]
    if not found or not found[0] or any(steps != found[0] for steps in found):
        raise InvalidArgument(
            f"ranks have samples of {[len(steps) for steps in found]} steps, expected the same "
            "steps of each, at least one: make Metrics(experts=) with the same every= on all "
            "ranks, and gather its samples"
        )
    return found[0]


def expert_table(ranks: Sequence[Sequence[StepMetrics]]) -> tuple[list[str], np.ndarray[Any, Any]]:
    """Return names of experts, by layer and number, and a table [experts, samples] of their tokens,
    including copies."""
    names = {name for samples in ranks for s in samples for name in s.expert_tokens}
    order = sorted(names, key=lambda name: (name.rpartition("/")[0], int(name.rpartition("/")[2])))
    table = np.zeros((len(order), len(ranks[0])))
    for samples in ranks:
        for at, sample in enumerate(samples):
            for name, tokens in sample.expert_tokens.items():
                table[order.index(name), at] += tokens
    return order, table
