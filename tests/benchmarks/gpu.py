"""The benchmarks on a card: `python -m tests.benchmarks.gpu`; 1 if a figure is short, 2 if a measurement failed.

`gpu_child` carries out each measurement in a process of its own: rates of a loader's batches on the device, with the
CPU time of the main process, and what a training step takes beside the same step on a batch that stays there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import sections
from .gpu_child import FACADE, LOADERS, TORCH
from .harness import ROOT, JobFailed, run_program

PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
TITLE = "## GPU"
DTYPES = ("uint8", "float32")
STEP_RATIO = 1.02
"""Most of a step's time on a cached batch."""

METHOD = """\
- Each measurement is a process of its own; the order of the loaders turns around from round to round.
- Samples are images of 3 x 224 x 224 that exist already, so that loading is measured and not decoding. The clock runs
  amid an epoch, when rings are page-locked, and the device is waited for at both ends. Each batch is summed on the
  device, for all loaders alike, and the sums are compared with those of its samples afterwards.
- The step is a small convolutional net in bfloat16, made 1.5 times as long as our loader takes for a batch; the cached
  batch is measured before and after the loader's. torch has `pin_memory=True` and `.to(non_blocking=True)`."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; an error in them ends the program with 2."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--rounds", type=int, help="rounds in which the loaders take turns (3; 1 with --quick)")
    parser.add_argument("--device", default="cuda", help="as torch takes it (%(default)s)")
    parser.add_argument("--workers", default="2,4,8", help="numbers of worker processes (%(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="images in a batch (%(default)s)")
    parser.add_argument("--save", action="store_true", help=f"write the section of {PAGE.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.workers = [int(each) for each in options.workers.split(",")]
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --device cpu tries the program itself")
    return options


class Figures:
    """Numbers of all rounds by measurement and loader."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], list[float]] = {}

    def add(self, name: str, loader: str, value: float) -> None:
        """Append a round's number."""
        self._values.setdefault((name, loader), []).append(value)

    def median(self, name: str, loader: str) -> float:
        """The median over the rounds."""
        return statistics.median(self._values[name, loader])

    def ratio(self, name: str, loader: str, other: str) -> float:
        """The median of the rounds' ratios."""
        pairs = zip(self._values[name, loader], self._values[name, other], strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


def measure(options: argparse.Namespace) -> Figures:
    """Measure all rounds.

    Raises:
        JobFailed: a measurement failed.
    """
    figures = Figures()
    common: dict[str, Any] = {
        "device": options.device,
        "batch": options.batch,
        "seconds": 0.5 if options.quick else 3.0,
    }
    for number in range(options.rounds):
        loaders = LOADERS if number % 2 == 0 else LOADERS[::-1]
        for dtype in DTYPES:
            for workers in options.workers:
                for loader in loaders:
                    job = {**common, "what": "rate", "dtype": dtype, "workers": workers, "loader": loader}
                    found = _run(job)
                    figures.add(f"{dtype}, {workers} workers", loader, found["rate"])
                    figures.add(f"CPU, {dtype}, {workers} workers", loader, found["cpu"])
        found = _run({**common, "what": "step", "dtype": "uint8", "workers": options.workers[-1]})
        for loader, (fed, cached) in found.items():
            figures.add("step", loader, fed / cached)
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    return figures


def _run(job: dict[str, Any]) -> Any:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        return run_program("tests.benchmarks.gpu_child", json.dumps(job), str(job), Path(folder), limit_s=600)


def section(figures: Figures, options: argparse.Namespace) -> tuple[str, list[str]]:
    """The section of the page, and the figures that are short."""
    ours = [loader for loader in LOADERS if loader != TORCH]
    card = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    torched = f"torch {torch.__version__}, batches of {options.batch} images"
    lines = [
        TITLE,
        "",
        f"Written by `python -m tests.benchmarks.gpu --save`: medians of {options.rounds} rounds on {card}, {torched}.",
        "",
        "| images a second | torch | " + " | ".join(ours) + " | main process, CPU ms a batch: torch | " + FACADE + " |",
        "|---|--:|" + "--:|" * len(ours) + "--:|--:|",
    ]
    short = []
    for name in (f"{dtype}, {workers} workers" for dtype in DTYPES for workers in options.workers):
        cells = [f"{figures.median(name, TORCH):,.0f}"]
        for loader in ours:
            ratio = figures.ratio(name, loader, TORCH)
            cells.append(f"{figures.median(name, loader):,.0f} ({ratio:.2f} x)")
            if ratio <= 1:
                short.append(f"{loader}, {name}: {ratio:.2f} of torch's rate")
        cells += [f"{figures.median(f'CPU, {name}', loader) * 1e3:.2f}" for loader in (TORCH, FACADE)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    steps = {loader: figures.median("step", loader) for loader in LOADERS}
    short += [f"a step fed by {each}: {steps[each]:.3f} of its time" for each in ours if steps[each] > STEP_RATIO]
    told = ", ".join(f"{loader} {ratio:.3f}" for loader, ratio in steps.items())
    lines += ["", f"A training step's time, as a multiple of its time on a cached batch: {told}.", "", METHOD]
    return "\n".join(lines), short


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns the exit code."""
    options = parse(arguments)
    try:
        figures = measure(options)
    except JobFailed as failure:
        print(f"no table, because a measurement failed: {failure}", file=sys.stderr)
        return 2
    text, short = section(figures, options)
    print(text)
    if options.save:
        PAGE.write_text(sections.insert(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
    print("\n".join(short) or "no figure is short", file=sys.stderr)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
