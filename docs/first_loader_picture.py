"""The picture at the end of the first tutorial: of a run of the page's own blocks.

python docs/first_loader_picture.py     runs them, and writes docs/_static/first-loader.svg
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

__all__ = ["draw", "main"]

DOCS = Path(__file__).parent
PAGE, PICTURE = DOCS / "tutorials" / "first-loader.md", DOCS / "_static" / "first-loader.svg"
STAGES = ("queue", "fetch", "collate", "write", "transfer", "order", "wait", "consumer")

WIDTH, HEIGHT = 860, 260  # pixels
LEFT, MIDDLE, BARS, RIGHT = 50, 390, 500, 780  # of the curve; of the names and of the bars
TOP, BOTTOM = 40, 230

STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600; font-size: 13px }
.mark { fill: #0a7d5a } .curve { stroke: #0a7d5a; stroke-width: 2; fill: none } .axis { stroke: #8c959f }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .mark { fill: #3fb98f } .curve { stroke: #3fb98f } .axis { stroke: #6e7681 }
}"""


def draw(reached: list[float], stats: dict[str, float]) -> str:
    """An SVG of the accuracy after each epoch, and of each stage's median time per batch."""
    body = [f'<text class="title" x="{LEFT}" y="20">Test digits that are right, after each epoch</text>']
    places = []
    for epoch, share in enumerate(reached):
        x = LEFT + 15 + epoch * (MIDDLE - LEFT - 70) / max(1, len(reached) - 1)
        y = BOTTOM - (BOTTOM - TOP - 10) * share
        places.append(f"{x:.0f},{y:.0f}")
        body.append(f'<circle class="mark" cx="{x:.0f}" cy="{y:.0f}" r="3"/>')
        body.append(f'<text x="{x:.0f}" y="{BOTTOM + 16}" text-anchor="middle">{epoch + 1}</text>')
    body.append(f'<polyline class="curve" points="{" ".join(places)}"/>')
    x, _, y = places[-1].partition(",")
    body.append(f'<text x="{int(x) + 8}" y="{int(y) + 4}">{reached[-1]:.1%}</text>')
    body.append(f'<line class="axis" x1="{LEFT}" y1="{BOTTOM}" x2="{MIDDLE - 40}" y2="{BOTTOM}"/>')
    body.append(f'<text x="{LEFT - 8}" y="{BOTTOM + 4}" text-anchor="end">0</text>')
    body.append(f'<text x="{LEFT - 8}" y="{TOP + 14}" text-anchor="end">100%</text>')
    body += _bars({stage: stats[f"stage/{stage}/p50_s"] for stage in STAGES})
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">'
    title = "<title>A run of the first tutorial: accuracy by epoch, and time by stage</title>"
    return "\n".join([head, title, f"<style>{STYLE}</style>", *body, "</svg>"]) + "\n"


def _bars(seconds: dict[str, float]) -> list[str]:
    body = [f'<text class="title" x="{BARS - 70}" y="20">Median time of a batch, by stage</text>']
    longest = max(seconds.values())
    for row, (stage, spent) in enumerate(seconds.items()):
        y, length = TOP + row * 24, max(1.0, (RIGHT - BARS) * spent / longest)
        body.append(f'<text x="{BARS - 8}" y="{y + 12}" text-anchor="end">{escape(stage)}</text>')
        body.append(f'<rect class="mark" x="{BARS}" y="{y}" width="{length:.0f}" height="15" rx="2"/>')
        body.append(f'<text x="{BARS + length + 6:.0f}" y="{y + 12}">{spent * 1e3:.2f} ms</text>')
    return body


def main() -> None:
    """Run the page's blocks, one after the other, and draw what they found."""
    found: dict[str, Any] = {"__name__": "first_loader"}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), found)  # noqa: S102 - the page is ours
    PICTURE.write_text(draw(found["reached"], found["stats"]))


if __name__ == "__main__":
    main()
