"""The picture of ``python benchmarks convergence``: one panel per task, one line per optimizer, seeds averaged."""

from statistics import mean
from typing import TYPE_CHECKING, Any

from commpress.cli import charts

if TYPE_CHECKING:
    from convergence import Groups

STYLES = {
    "adam": {"color": "#999999", "linewidth": 4.5},
    "onebit": {"color": "#d62728", "linewidth": 1.6},
    "onebit, no feedback": {"color": "#d62728", "linewidth": 1.0, "linestyle": ":"},
    "zero-one": {"color": "#1f77b4", "linewidth": 1.6},
    "sharded-onebit": {"color": "#ff9896", "linewidth": 1.4, "linestyle": "--"},
    "sharded-zero-one": {"color": "#9ecae1", "linewidth": 1.4, "linestyle": "--"},
    "lamb": {"color": "#cccc88", "linewidth": 4.5},
    "onebit-lamb": {"color": "#2ca02c", "linewidth": 1.6, "linestyle": "--"},
}
OTHERWISE = {"linewidth": 1.2, "linestyle": "-."}  # with another codec or schedule


def draw(groups: "Groups", path: str) -> None:
    tasks = list(dict.fromkeys(task for task, _ in groups))
    with charts.chart(path, "Losses, mean over seeds; final losses in the legends", panels=len(tasks), size=(5, 4.4)) as panels:
        _fill(dict(zip(tasks, panels, strict=True)), groups)


def _fill(panels: "dict[str, Any]", groups: "Groups") -> None:
    for task, panel in panels.items():
        lowest, start = [], []
        names = [name for of, name in groups if of == task]
        for name in sorted(names, key=lambda name: list(STYLES).index(name) if name in STYLES else len(STYLES)):
            runs = groups[task, name]
            losses = charts.smooth([mean(step) for step in zip(*(r.losses for r in runs), strict=True)])
            style = STYLES.get(name) or STYLES[runs[0].run.optimizer] | OTHERWISE
            panel.plot(range(1, len(losses) + 1), losses, label=f"{name}: {mean(r.final for r in runs):.3f}", **style)
            lowest.append(min(losses))
            start.append(losses[len(losses) // 20])
        margin = 0.05 * (max(start) - min(lowest))
        panel.set_ylim(min(lowest) - margin - 1e-3, max(start) + margin + 1e-3)  # the first steps would flatten the rest
        panel.set(title=task, xlabel="step", ylabel="training loss, nats (smoothed)")
