"""Draw the pictures of the pages: figures.json, which holds what the pages say, becomes an SVG for
each figure.

python docs/figures/draw.py            writes them beside this file; it needs nothing but Python
"""

import json
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
OURS, THEIRS = "#3f51b5", "#9e9e9e"
# drawn in grey
PEERS = ("plain", "bf16 hook", "PowerSGD", "torch", "FSDP2", "AdamW", "DeepSpeed", "fio", "without")
PEERS += ("bfloat16", "index + value", "XOR + zstd")
# pixels: a bar's height, the longest bar, room for its value, a letter
LINE, BAR, VALUE, LETTER = 20, 120, 78, 6.8
STYLE = (
    "text{font:12px sans-serif;fill:#222}.t{font-weight:bold}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}}"
)


def svg(figure: dict) -> str:
    """One panel of bars for each condition, two side by side; a bar's length is its value, which
    stands at its end."""
    panels, parts, bottom, tops = figure["panels"], [], 34, [34, 34]
    room = LETTER * max(len(label) for bars in panels.values() for label in bars) + 10
    longest = BAR if len(panels) > 1 else 3 * BAR
    panel = room + longest + VALUE
    units = figure["unit"]  # or one of each panel
    for i, (name, bars) in enumerate(panels.items()):
        unit = units if isinstance(units, str) else units[name]
        column = i % 2
        x, y = 10 + column * panel, tops[column]
        parts.append(f'<text class="t" x="{x:.1f}" y="{y + 13}">{escape(name)}</text>')
        most = max(bars.values())
        for j, (label, value) in enumerate(bars.items()):
            top = y + 20 + j * LINE
            length = max(longest * value / most, 1)
            colour = THEIRS if label.startswith(PEERS) else OURS
            parts.append(
                f'<text x="{x + room - 6:.1f}" y="{top + 12}" '
                f'text-anchor="end">{escape(label)}</text>'
            )
            parts.append(
                f'<rect x="{x + room:.1f}" y="{top}" width="{length:.1f}" height="{LINE - 4}" '
                f'fill="{colour}"/>'
            )
            parts.append(
                f'<text x="{x + room + length + 5:.1f}" y="{top + 12}">{value:g} {unit}</text>'
            )
        tops[column] = y + 20 + len(bars) * LINE + 12
        bottom = max(bottom, tops[column])
    width = max(round(panel * min(len(panels), 2)) + 10, round(8 * len(figure["title"])))
    title = f'<text class="t" x="10" y="20" style="font-size:14px">{escape(figure["title"])}</text>'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom}" width="{width}" '
        'role="img">'
    )
    return "\n".join([head, f"<style>{STYLE}</style>", title, *parts, "</svg>"]) + "\n"


def figures() -> list[dict]:
    return json.loads((HERE / "figures.json").read_text())


if __name__ == "__main__":
    for figure in figures():
        (HERE / f"{figure['name']}.svg").write_text(svg(figure))
