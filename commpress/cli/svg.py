"""Pictures as SVG, written here: curves and matrices of numbers, without matplotlib."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

FONT = 'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif"'
INK, PALE, GRID = "#222222", "#666666", "#e4e4e4"
LEFT, TOP, BOTTOM, RIGHT = 64, 64, 56, 176  # margins; the names of curves stand at the right
LINE = 18  # from one name to the next


@dataclass(frozen=True)
class Curve:
    """A line through points, its name and what is said behind the name."""

    xs: Sequence[float]
    ys: Sequence[float]
    colour: str
    note: str = ""
    dashed: bool = False


def curves(
    path: str | Path,
    title: str,
    lines: Mapping[str, Curve],
    *,
    x: str,
    y: str,
    size: tuple[int, int] = (860, 480),
    low: float | None = None,
    high: float | None = None,
) -> None:
    """One picture of all lines from 0 on, each named where it ends; ``low`` and ``high`` bound the
    y axis."""
    width, height = size[0] - LEFT - RIGHT, size[1] - TOP - BOTTOM
    every = [v for line in lines.values() for v in line.ys if math.isfinite(v)] or [0.0]
    low, high = min(every) if low is None else low, max(every) if high is None else high
    margin = 0.05 * (high - low) or 0.5
    low, high = low - margin, high + margin
    right = max([v for line in lines.values() for v in line.xs], default=0.0) or 1.0

    def at(px: float, py: float) -> tuple[float, float]:
        inside = min(max(py, low), high)
        return LEFT + width * px / right, TOP + height * (high - inside) / (high - low)

    parts = [_frame(title, size)]
    for tick in ticks(low, high):
        _, level = at(0, tick)
        parts.append(
            f'<line x1="{LEFT}" x2="{LEFT + width}" y1="{level:.1f}" y2="{level:.1f}" '
            f'stroke="{GRID}"/>'
        )
        parts.append(_text(LEFT - 8, level + 4, f"{tick:g}", anchor="end", colour=PALE))
    for tick in ticks(0, right):
        place, _ = at(tick, low)
        parts.append(
            f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{TOP + height}" '
            f'stroke="{GRID}"/>'
        )
        parts.append(_text(place, TOP + height + 20, f"{tick:g}", anchor="middle", colour=PALE))
    parts.append(_text(LEFT + width / 2, size[1] - 14, x, anchor="middle"))
    middle = TOP + height / 2
    parts.append(
        f'<g transform="rotate(-90 18 {middle:g})">{_text(18, middle, y, anchor="middle")}</g>'
    )
    ends = []
    for name, line in lines.items():
        points = [at(px, py) for px, py in zip(line.xs, line.ys, strict=True) if math.isfinite(py)]
        if not points:
            continue
        dashes = ' stroke-dasharray="6 4"' if line.dashed else ""
        where = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        look = f'stroke="{line.colour}" stroke-width="2.4" stroke-linejoin="round"{dashes}'
        parts.append(f'<polyline points="{where}" fill="none" {look}/>')
        parts.append(
            f'<circle cx="{points[-1][0]:.1f}" cy="{points[-1][1]:.1f}" r="3.5" '
            f'fill="{line.colour}"/>'
        )
        ends.append((points[-1][1], name, line))
    beside = LEFT + width + 12
    for level, (_, name, line) in zip(
        apart([end[0] for end in ends]), sorted(ends, key=lambda end: end[0]), strict=True
    ):
        parts.append(
            _text(beside, level + 4, f"{name} {line.note}".strip(), colour=line.colour, weight=600)
        )
    Path(path).write_text("\n".join([*parts, "</svg>\n"]), encoding="utf-8")


def matrix(
    path: str | Path,
    title: str,
    names: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    note: str = "",
    show: str = "{:.3g}",
    reverse: bool = False,
) -> None:
    """Numbers in coloured cells, rows and columns named; ``reverse``: small ones are dark. None: no
    such pair."""
    cell = max(min(560 // max(len(names), 1), 64), 18)
    side, left = cell * len(names), 30 + 7 * max(map(len, names), default=0)
    size = (max(left + side + 30, 420), TOP + side + 70)
    found = sorted(v for row in values for v in row if v is not None)
    low, high = (found[0], found[-1]) if found else (0.0, 1.0)
    parts = [_frame(title, size)]
    for i, row in enumerate(values):
        parts.append(_text(left - 8, TOP + 24 + cell * (i + 0.5) + 4, names[i], anchor="end"))
        parts.append(_text(left + cell * (i + 0.5), TOP + 16, names[i], anchor="middle"))
        for j, value in enumerate(row):
            where = (
                f'x="{left + cell * j}" y="{TOP + 24 + cell * i}" width="{cell - 2}" '
                f'height="{cell - 2}" rx="3"'
            )
            if value is None:
                parts.append(f'<rect {where} fill="#f4f4f4"/>')
                continue
            share = _share(value, low, high)
            parts.append(f'<rect {where} fill="{shade(1 - share if reverse else share)}"/>')
            if cell >= 36:
                dark = (1 - share if reverse else share) > 0.55
                parts.append(
                    _text(
                        left + cell * (j + 0.5) - 1,
                        TOP + 24 + cell * (i + 0.5) + 4,
                        show.format(value),
                        anchor="middle",
                        colour="white" if dark else INK,
                        size=min(13, cell // 4),
                    )
                )
    parts.append(_text(left, size[1] - 16, note, colour=PALE))
    Path(path).write_text("\n".join([*parts, "</svg>\n"]), encoding="utf-8")


def _share(value: float, low: float, high: float) -> float:
    """The place of a value between the extremes, by its logarithm where all are positive."""
    if high <= low:
        return 0.5
    if low > 0:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)


def shade(share: float) -> str:
    """From almost white to dark blue."""
    ends = ((237, 244, 251), (8, 69, 148))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(*ends, strict=True))


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers from ``low`` to ``high``."""
    raw = (high - low) / about or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((factor * power for factor in (1, 2, 5, 10)), key=lambda s: abs(math.log(s / raw)))
    return [
        round(i * step, 10)
        for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def apart(levels: Sequence[float]) -> list[float]:
    """The levels in their order, moved as little as it takes for names at them not to cover each
    other."""
    groups: list[list[float]] = []  # [sum of the wanted first levels, names]
    for level in sorted(levels):
        groups.append([level, 1])
        while len(groups) > 1 and _end(groups[-2]) > groups[-1][0] / groups[-1][1]:
            total, count = groups.pop()
            groups[-1] = [
                groups[-1][0] + total - LINE * count * groups[-1][1],
                groups[-1][1] + count,
            ]
    return [total / count + LINE * i for total, count in groups for i in range(int(count))]


def _end(group: list[float]) -> float:
    return group[0] / group[1] + LINE * group[1]


def _frame(title: str, size: tuple[int, int]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" '
        f'width="{size[0]}" height="{size[1]}" {FONT} role="img" '
        f'aria-label="{escape(title)}">\n<rect width="100%" height="100%" '
        'fill="white"/>\n' + _text(20, 32, title, size=16, weight=600)
    )


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    colour: str = INK,
    size: int = 13,
    weight: int = 400,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{colour}">'
        f"{escape(text)}</text>"
    )
