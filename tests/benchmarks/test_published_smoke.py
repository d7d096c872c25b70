"""The published cases: what the scripts print is understood, ours does the same work, and the table names the best."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from . import published

SAID = {
    "images": """\
raw                workers=2 elapsed=0.500s items/s=4000.5 items=2000 batches=32  (torch Dataset+DataLoader)
litdata-process    workers=2 elapsed=1.000s items/s=2000.0 items=2000 batches=32  (StreamingDataLoader)
""",
    "handoff": """\
  default asyncio, 3ms foreground work        mean=    1.0us  p50=    9.9us  p95=  1.0us  p99=  1.0us  (240 meas)
SUMMARY
  default asyncio, 3ms foreground work        mean=    1.0us  p50=  246.5us  p95=  1.0us  p99=  1.0us  (240 meas)
  thread output queue, 3ms foreground work    mean=    1.0us  p50=   12.0us  p95=  1.0us  p99=  1.0us  (240 meas)
""",
    "transport": """\
kind      size  no-arena            ring            pool
bytes       2M       719    2684 (3.73x)    3760 (5.23x)
torch      32M      2899    3106 (1.07x)    3116 (1.08x)
""",
}
UNDERSTOOD: dict[str, published.Figures] = {
    "images": {"images/s": {"torch": 4000.5, "LitData": 2000.0}},
    "handoff": {"us, 3 ms of work": {"spdl, default asyncio": 246.5, "spdl, thread output queue": 12.0}},
    "transport": {
        "MB/s, bytes, 2 MiB": {"spdl, no arena": 719, "spdl, ring": 2684, "spdl, pool": 3760},
        "MB/s, torch, 32 MiB": {"spdl, no arena": 2899, "spdl, ring": 3106, "spdl, pool": 3116},
    },
}


@pytest.mark.parametrize("case", SAID)
def test_output_of_a_script_is_understood(case: str, tmp_path: Path) -> None:
    """Its figures come by row and loader; a script that fails, or prints something else, ends the measurement."""
    script = tmp_path / "script.py"
    script.write_text(f"print({SAID[case]!r})")
    read = published.CASES[case][1]
    assert {row: found for row, found in read(script).items() if found} == UNDERSTOOD[case]
    for text in ("import sys; sys.exit(3)", "print('nothing')"):
        script.write_text(text)
        with pytest.raises((published.NoFigures, subprocess.CalledProcessError)):
            read(script)


def test_ours_does_the_same_work() -> None:
    """Each case gives a figure for each row."""
    assert all(rate > 0 for rate in published.images_of_ours(64)["images/s"].values())
    assert all(wait > 0 for wait in published.handoff_of_ours(40, works=(0,))["us, 0 ms of work"].values())
    sent = published.transport_of_ours(sizes=(1,), items=3)
    assert sorted(sent) == ["MB/s, bytes, 1 MiB", "MB/s, numpy, 1 MiB", "MB/s, torch, 1 MiB"]


def test_rounds_take_turns_and_the_best_is_bold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script goes first in every second round; times are better when they are short, rates when they are high."""
    turns: list[str] = []
    values = iter([4.0, 1.0, 5.0, 3.0])

    def turn(name: str) -> published.Figures:
        turns.append(name)
        return {"us, 3 ms of work": {name: next(values)}}

    case = "script.py", lambda script: turn(script.name), lambda: turn("ours")
    monkeypatch.setitem(published.CASES, "handoff", case)
    figures = published.measure("handoff", Path("folder"), 2)
    assert turns == ["script.py", "ours", "ours", "script.py"]
    assert figures == {"us, 3 ms of work": {"script.py": 3.5, "ours": 3.0}}
    assert published.table(figures).splitlines()[-1] == "| us, 3 ms of work | 4 | **3** |"
    assert "| images/s | **20** | 10 |" in published.table({"images/s": {"ours": 20.0, "torch": 10.0}})
    section = published.section("handoff", figures, 2, "2026-11-26")
    assert section.startswith(f"{published.TITLE}: handoff\n")
    assert sys.executable not in section
