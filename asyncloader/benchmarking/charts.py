"""Draws charts as SVG text: rows of points on a common scale, and a line.

Data path: figures -> [charts] -> html_report. The CSS variables of the page give the colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import median
from typing import NamedTuple

_WIDTH, _ROW, _LEFT, _RIGHT = 900, 26, 330, 90
_LABEL_LETTERS = 46
_FOOT = 22.0


class Row(NamedTuple):
    """A row of a chart.

    Attributes:
        label: text at the left of the row.
        values: values drawn as points.
        span: ends of a line that is drawn; if None, a bar reaches from 0 to the values' median.
        text: text at the right of the row.
        marked: whether the row is highlighted.
    """

    label: str
    values: Sequence[float]
    span: tuple[float, float] | None = None
    text: str = ""
    marked: bool = False


def rows(given: Sequence[Row], title: str, unit: str, line: float | None = None) -> str:
    """Draw rows on a common scale, which begins at 0, or, if all rows have spans, at the least value.

    Args:
        given: rows from top to bottom; each has at least one value.
        title: description of the chart for screen readers.
        unit: unit that is written below the scale.
        line: value at which a vertical line is drawn.
    """
    numbers: list[float] = [value for each in given for value in (*each.values, *(each.span or ()))]
    numbers += [line] if line is not None else []
    spans = all(each.span is not None for each in given)
    low, high = (min(numbers), max(numbers)) if spans else (0.0, max(numbers))
    low, high = (max(0.0, low - 0.05 * (high - low)), high + 0.05 * (high - low)) if spans else (low, high)

    scale = (_WIDTH - _LEFT - _RIGHT) / max(1e-12, high - low)

    def x(value: float) -> float:
        return _LEFT + (value - low) * scale

    height = len(given) * _ROW + _FOOT
    parts = []
    if line is not None:
        parts.append(f'<line x1="{x(line):.1f}" y1="0" x2="{x(line):.1f}" y2="{height - _FOOT:.1f}"/>')
    for number, each in enumerate(given):
        middle = (number + 0.5) * _ROW
        kind = "row marked" if each.marked else "row"
        label = each.label if len(each.label) <= _LABEL_LETTERS else each.label[: _LABEL_LETTERS - 1] + "…"
        parts.append(f'<g class="{kind}"><title>{escape(each.label)}</title>')
        parts.append(f'<text x="{_LEFT - 8:.1f}" y="{middle + 4:.1f}" class="label">{escape(label)}</text>')
        if each.span is None:
            end = x(median(each.values))
            parts.append(f'<rect x="{_LEFT}" y="{middle - 8:.1f}" width="{max(0.5, end - _LEFT):.1f}" height="16"/>')
        else:
            start, end = map(x, each.span)
            parts.append(f'<path d="M{start:.1f} {middle - 5:.1f}v10m0-5H{end:.1f}m0-5v10"/>')
        parts += [f'<circle cx="{x(value):.1f}" cy="{middle:.1f}" r="3"/>' for value in each.values]
        parts.append(f'<text x="{_WIDTH - _RIGHT + 8:.1f}" y="{middle + 4:.1f}">{escape(each.text)}</text></g>')
    foot = height - 6
    parts.append(f'<text x="{_LEFT}" y="{foot:.1f}" class="scale">{low:.3g}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{foot:.1f}" class="scale label">{high:.3g} {escape(unit)}</text>')
    return _svg(height, title, "".join(parts))


def line(values: Sequence[float], title: str, unit: str) -> str:
    """Draw at least two values as a line, in their order."""
    height, high = 120.0, max(*values, 1e-12)
    step = (_WIDTH - 2) / (len(values) - 1)
    points = " ".join(
        f"{1 + number * step:.1f},{18 + (1 - value / high) * (height - 20):.1f}" for number, value in enumerate(values)
    )
    text = f'<text x="0" y="12" class="scale">{high:.3g} {escape(unit)}</text>'
    return _svg(height, title, f'{text}<polyline points="{points}"/>')


def _svg(height: float, title: str, parts: str) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH:.0f} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"{parts}</svg>"
    )
