"""The picture of `growth.py`: a panel for each curve and figure, both axes logarithmic, drawn as SVG by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape
from typing import Any

from .growth_plan import CURVES, OURS, TORCH

FIGURES = (
    ("rate", "batches/s", 1.0),
    ("cpu", "CPU, µs", 1e6),
    ("memory", "memory, MiB", 1 / 2**20),
    ("constructor", "constructor, ms", 1e3),
    ("first", "first batch, ms", 1e3),
)
"""Each figure: its name in a result, its title with the unit, and that unit's factor."""

# Pixels: a panel with its margins, and its inner edges.
WIDTH, HEIGHT = 212, 170
LEFT, RIGHT, TOP, BOTTOM = 44, 8, 26, 30
LEGEND = 26

STYLE = """\
text { font: 11px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600 }
.axis { stroke: #8c959f; stroke-width: 1 } .grid { stroke: #8c959f; stroke-width: 0.5; opacity: 0.35 }
.ours { stroke: #0a7d5a; fill: #0a7d5a } .torch { stroke: #8a5a00; fill: #8a5a00 }
polyline { fill: none !important; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .ours { stroke: #3fb98f; fill: #3fb98f } .torch { stroke: #d9a441; fill: #d9a441 }
}"""


def draw(kept: Any, median: Callable[[Any, str, str, int, str], float | None]) -> str:
    """The chart: a row of panels for each curve that was measured."""
    body = [
        f'<rect class="{kind}" x="{4 + 90 * place}" y="8" width="12" height="4"/>'
        f'<text x="{22 + 90 * place}" y="15">{escape(loader)}</text>'
        for place, (kind, loader) in enumerate((("ours", OURS), ("torch", TORCH)))
    ]
    shown = [figure for figure in FIGURES if figure[0] != "constructor"]
    rows = [curve for curve in CURVES if kept.get(curve)]
    for row, curve in enumerate(rows):
        title, values = CURVES[curve]
        for column, (figure, name, scale) in enumerate(shown):
            lines = {
                loader: [
                    (value, number * scale)
                    for value in values
                    if (number := median(kept, curve, loader, value, figure)) is not None
                ]
                for loader in (TORCH, OURS)
            }
            body += panel(column * WIDTH, LEGEND + row * HEIGHT, f"{name}", title, lines)
    width, height = WIDTH * len(shown), LEGEND + HEIGHT * len(rows)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    name = "<title>How rate, CPU time, memory and the time to the first batch grow</title>"
    return "\n".join([head, name, f"<style>{STYLE}</style>", *body, "</svg>"]) + "\n"


def panel(x: int, y: int, name: str, title: str, lines: dict[str, list[tuple[int, float]]]) -> list[str]:
    """One panel with its upper left corner at (x, y)."""
    points = [each for line in lines.values() for each in line]
    if not points:
        return []
    across = (math.log10(min(at for at, _ in points)), math.log10(max(at for at, _ in points)))
    low = math.floor(math.log10(min(number for _, number in points)))
    high = max(low + 1, math.ceil(math.log10(max(number for _, number in points))))
    left, right, top, bottom = x + LEFT, x + WIDTH - RIGHT, y + TOP, y + HEIGHT - BOTTOM

    def place(at: float, number: float) -> tuple[float, float]:
        part = (math.log10(at) - across[0]) / max(1e-9, across[1] - across[0])
        return left + part * (right - left), bottom - (math.log10(number) - low) / (high - low) * (bottom - top)

    body = [f'<text class="title" x="{left}" y="{y + 18}">{escape(name)}</text>']
    for decade in range(low, high + 1):
        level = place(10 ** across[0], 10.0**decade)[1]
        body.append(f'<line class="grid" x1="{left}" y1="{level:.1f}" x2="{right}" y2="{level:.1f}"/>')
        body.append(f'<text x="{left - 4}" y="{level + 4:.1f}" text-anchor="end">{short(10.0**decade)}</text>')
    body.append(f'<line class="axis" x1="{left}" y1="{bottom}" x2="{right}" y2="{bottom}"/>')
    ends = (min(at for at, _ in points), max(at for at, _ in points))
    for anchor, at in zip(("start", "end"), ends, strict=True):
        edge = left if anchor == "start" else right
        body.append(f'<text x="{edge}" y="{bottom + 13}" text-anchor="{anchor}">{short(at)}</text>')
    middle = (left + right) / 2
    body.append(f'<text x="{middle:.0f}" y="{bottom + 25}" text-anchor="middle">{escape(title)}</text>')
    for loader, line in lines.items():
        kind = "ours" if loader == OURS else "torch"
        spots = [place(at, number) for at, number in line]
        body.append(f'<polyline class="{kind}" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in spots)}"/>')
        body += [f'<circle class="{kind}" cx="{a:.1f}" cy="{b:.1f}" r="2.5"/>' for a, b in spots]
    return body


def short(number: float) -> str:
    """The number as an axis names it: 0.1, 10, 1k, 512M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
