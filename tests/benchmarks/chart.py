"""The picture of the peer table: horizontal bars, drawn as SVG by hand; readable on light and dark pages."""

from __future__ import annotations

from html import escape

from .harness import Results
from .plan import METRICS, OURS, PEERS, TORCH, TORCH_FILE_SYSTEM
from .report import COMPARED

# Pixels: the whole, the names on the left, room for the numbers on the right.
WIDTH, LABEL, RIGHT = 860, 210, 60
# Pixels: a bar, the space under it, the title of a group.
BAR, GAP, HEAD = 15, 4, 34

STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600; font-size: 13px }
.ours { fill: #0a7d5a } .torch { fill: #8a5a00 } .peer { fill: #8c959f }
.line { stroke: #8a5a00; stroke-width: 1; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .ours { fill: #3fb98f } .torch { fill: #d9a441 } .peer { fill: #6e7681 }
  .line { stroke: #d9a441 }
}"""


def draw(results: Results) -> str:
    """The chart: a group of bars for each workload, each bar a loader's multiple of torch's rate."""
    titles = {metric.key: metric.title for metric in METRICS}
    body: list[str] = []
    top = 8
    for key in (key for key in COMPARED if results.has(key, TORCH)):
        bars = {
            loader: results.ratio(key, loader, TORCH)[0]
            for loader in (*OURS, TORCH, TORCH_FILE_SYSTEM, *PEERS)
            if results.has(key, loader)
        }
        top = _group(body, top, titles[key], bars)
    size = f'viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    title = "<title>Batches per second as a multiple of torch's DataLoader</title>"
    return "\n".join([head, title, f"<style>{STYLE}</style>", *body, "</svg>"]) + "\n"


def _group(body: list[str], top: int, title: str, bars: dict[str, float]) -> int:
    """Draw one group from `top` down; gives the top of the next."""
    scale = (WIDTH - LABEL - RIGHT) / max(bars.values())
    body.append(f'<text class="title" x="4" y="{top + 18}">{escape(title)}</text>')
    first = top + HEAD - 6
    for row, (loader, ratio) in enumerate(bars.items()):
        y = first + row * (BAR + GAP)
        kind = "ours" if loader in OURS else "torch" if loader == TORCH else "peer"
        length = ratio * scale
        body.append(f'<text x="{LABEL - 8}" y="{y + 12}" text-anchor="end">{escape(loader)}</text>')
        body.append(f'<rect class="{kind}" x="{LABEL}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2"/>')
        body.append(f'<text x="{LABEL + length + 6:.1f}" y="{y + 12}">{ratio:.2f} x</text>')
    bottom = first + len(bars) * (BAR + GAP)
    one = LABEL + scale
    body.append(f'<line class="line" x1="{one:.1f}" y1="{first - 2}" x2="{one:.1f}" y2="{bottom - 2}"/>')
    return bottom + 10
