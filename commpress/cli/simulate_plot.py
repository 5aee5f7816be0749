"""The pictures of ``commpress simulate``: time and speed-up against ranks, or bars where there is one cluster."""

from typing import TYPE_CHECKING, Any

from commpress.cli import charts

if TYPE_CHECKING:
    from commpress.cli.simulate import Row


def draw(rows: "list[Row]", path: str, title: str) -> None:
    sizes = sorted({row.ranks for row in rows})
    if len(sizes) == 1:
        title += f", {sizes[0]} ranks"
    height = 4.6 if len(sizes) > 1 else 0.35 * len(rows) + 1.8
    with charts.chart(path, title, panels=2, size=(6.4, height)) as (times, other):
        if len(sizes) > 1:
            _scaling(times, other, rows, sizes)
        else:
            _bars(times, other, rows)


def named(way: str) -> str:
    return way.removesuffix("/2") + (", two levels" if way.endswith("/2") else "")


def _scaling(times: Any, other: Any, rows: "list[Row]", sizes: list[int]) -> None:
    ways = list(dict.fromkeys(row.way for row in rows))
    flat = [way for way in ways if "/" not in way]
    for way in ways:
        mine = [row for row in rows if row.way == way]
        style = charts.curve(flat.index(way.partition("/")[0])) | ({"linestyle": "--"} if "/" in way else {})
        at = [row.ranks for row in mine]
        times.plot(at, [1e3 * row.seconds for row in mine], label=named(way), **style)
        other.plot(at, [row.plain_seconds / row.seconds for row in mine], label=named(way), **style)
    for panel in (times, other):
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [str(n) for n in sizes])
        panel.minorticks_off()
        panel.set_xlabel("ranks")
    charts.logarithmic(times)
    times.set_ylabel("time, ms")
    other.set_ylabel("times faster than plain")
    other.set_ylim(0, 1.1 * max(row.plain_seconds / row.seconds for row in rows))


def _bars(times: Any, other: Any, rows: "list[Row]") -> None:
    names = [named(row.way) for row in rows]
    alone = [1e3 * (row.seconds - row.exposed_seconds) for row in rows]
    exposed = [1e3 * row.exposed_seconds for row in rows]
    parts = {"computing alone": alone, "exposed communication": exposed} if any(alone) else {"": exposed}
    charts.stacked(times, names, parts, "time, ms", show="{:.3g}")
    out = [row.between_bytes / 1e6 for row in rows]
    inside = [(row.sent_bytes - row.between_bytes) / 1e6 for row in rows]
    if any(inside):
        charts.stacked(other, names, {"out of the node": out, "inside the node": inside}, "MB sent by one rank", show="{:.3g}",
                       first=2)  # fmt: skip
    else:
        charts.stacked(other, names, {"": out}, "MB sent by one rank", show="{:.3g}", first=2)
