"""Other loaders' own published cases, run as published and beside ours: `python -m tests.benchmarks.published`.

    python -m tests.benchmarks.published --scripts FOLDER [--cases images,handoff,transport] [--rounds 3] [--save]

FOLDER has the published scripts, which are not part of this repository (the commits are those of the figures):

    bench_cifar10.py                    https://github.com/Lightning-AI/litData, scripts/bench, 8805bae
    benchmark_thread_output_queue.py    https://github.com/facebookresearch/spdl, examples, ff33a9f
    benchmark_arena_transport.py        the same

Data path: rounds of [the script | the same work through ours] -> a section of the page.

*images*: 2,000 images of 32 x 32 in memory, batches of 64, 2 workers that start with each epoch; the second epoch.
*handoff*: the time of `next()` for one int after 0 to 30 ms of work in the consumer's thread, at the median.
*transport*: payloads of 2 to 32 MiB made in one process and received in another, which does nothing with them.
Script and ours take turns; a figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import datetime as dt
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

from asyncloader import DataLoader

from . import sections
from .harness import ROOT

PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
TITLE = "## A case that others publish"
LIMIT_S = 900

VARIANTS: dict[str, dict[str, Any]] = {"ours": {}, "ours, workers='threads'": {"workers": "threads"}}

Figures = dict[str, dict[str, float]]
"""By row, then by loader."""


class NoFigures(Exception):
    """A published script printed other lines than those that were expected."""


# ---------------------------------------------------------------------------------------------------------- images


class Images(Dataset[tuple[torch.Tensor, int]]):
    """The script's images: random, of PIL, in memory."""

    def __init__(self, number: int) -> None:
        shape = (32, 32, 3)
        drawn = (np.random.RandomState(each).randint(0, 256, shape, dtype=np.uint8) for each in range(number))
        self.images = [Image.fromarray(each) for each in drawn]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(np.asarray(self.images[index]).transpose(2, 0, 1).copy()), index % 10


def images_as_published(script: Path) -> Figures:
    with tempfile.TemporaryDirectory(prefix="published-") as place:
        said = run(script, "--limit", "2000", "--workers", "2", "--data-root", place)
    rates = dict(matches(r"^(raw|litdata-process) .*items/s=([\d.]+)", said))
    return {"images/s": {"torch": float(rates["raw"]), "LitData": float(rates["litdata-process"])}}


def images_of_ours(number: int = 2000) -> Figures:
    torchs = torch.utils.data.DataLoader[Any](Images(number), batch_size=64, num_workers=2)
    found = {"torch, without LitData in its process": _second_epoch(torchs, number)}
    for name, options in VARIANTS.items():
        with DataLoader[Any](Images(number), batch_size=64, num_workers=2, **options) as loader:
            found[name] = _second_epoch(loader, number)
    return {"images/s": found}


def _second_epoch(loader: Any, number: int) -> float:
    assert sum(len(images) for images, _ in loader) == number
    began = time.perf_counter()
    assert sum(len(images) for images, _ in loader) == number
    return number / (time.perf_counter() - began)


# --------------------------------------------------------------------------------------------------------- handoff

WORK_MS = range(0, 31, 3)


class Ints(Dataset[int]):
    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> int:
        return index


def handoff_as_published(script: Path) -> Figures:
    said = run(script).partition("SUMMARY")[2]
    lines = matches(r"^\s*(default asyncio|thread output queue), (\d+)ms .* p50= *([\d.]+)us", said)
    found: Figures = {f"us, {work} ms of work": {} for work in WORK_MS}
    for name, work, median in lines:
        found[f"us, {work} ms of work"][f"spdl, {name}"] = float(median)
    return found


def handoff_of_ours(number: int = 500, works: Sequence[int] = WORK_MS) -> Figures:
    found: Figures = {}
    for work in works:
        row = found[f"us, {work} ms of work"] = {}
        for name, options in VARIANTS.items():
            # Two workers with four items each on their way: the script's two threads and buffer of eight.
            with DataLoader[Any](Ints(number), batch_size=None, num_workers=2, prefetch_factor=4, **options) as loader:
                row[name] = _median_wait(iter(loader), work / 1000)
    return found


def _median_wait(items: Iterator[int], work: float) -> float:
    """As the script: after 20 items, each second `next` is timed; work before and after it."""
    waits: list[float] = []
    for taken, _ in enumerate(items):
        _work(work)
        if taken < 20:
            continue
        began = time.perf_counter()
        if next(items, None) is None:
            break
        waits.append(time.perf_counter() - began)
        _work(work)
    return statistics.median(waits) * 1e6


def _work(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


# ------------------------------------------------------------------------------------------------------- transport

KINDS, SIZES, ITEMS = ("bytes", "numpy", "torch"), (2, 8, 32), 32
"""Kinds of payloads, their sizes in MiB, and their number in a pass."""


class Payloads(IterableDataset[Any]):
    """The script's: one object again and again, but for torch, where each is another tensor."""

    def __init__(self, kind: str, nbytes: int, number: int) -> None:
        self.kind, self.nbytes, self.number = kind, nbytes, number

    def __iter__(self) -> Iterator[Any]:
        kept = None if self.kind == "torch" else self._make()
        for _ in range(self.number):
            yield {"data": self._make() if kept is None else kept}

    def _make(self) -> Any:
        if self.kind == "bytes":
            return bytes(self.nbytes)
        return np.zeros(self.nbytes // 4, np.float32) if self.kind == "numpy" else torch.zeros(self.nbytes // 4)


def transport_as_published(script: Path) -> Figures:
    given = ["--num-items", str(ITEMS), "--sizes", *map(str, SIZES), "--kinds", *KINDS, "--runs", "3"]
    said = run(script, *given)
    found: Figures = {}
    for kind, size, plain, ring, pool in matches(r"^(\w+) +(\d+)M +(\d+) +(\d+) \([\d.]+x\) +(\d+) \([\d.]+x\)", said):
        row = {"spdl, no arena": float(plain), "spdl, ring": float(ring), "spdl, pool": float(pool)}
        found[f"MB/s, {kind}, {size} MiB"] = row
    return found


def transport_of_ours(sizes: Sequence[int] = SIZES, items: int = ITEMS) -> Figures:
    # "A batch carries ... bytes of Python objects": that is what the payloads of bytes are here for.
    warnings.filterwarnings("ignore", "A batch carries")
    found: Figures = {}
    for size in sizes:
        for kind in KINDS:
            dataset = Payloads(kind, size << 20, items)
            options: dict[str, Any] = {"batch_size": None, "num_workers": 1, "persistent_workers": True}
            # `numpy` and `bytes` stay what they are: no conversion to tensors, as in the script.
            with DataLoader[Any](dataset, prefetch_factor=3, collate_fn=_same, **options) as loader:
                assert sum(1 for _ in loader) == items
                rates = []
                for _ in range(3):
                    began = time.perf_counter()
                    for item in loader:
                        del item
                    rates.append(items / (time.perf_counter() - began))
            found[f"MB/s, {kind}, {size} MiB"] = {"ours": statistics.mean(rates) * (size << 20) / 1e6}
    return found


def _same(sample: Any) -> Any:
    return sample


# ------------------------------------------------------------------------------------------------------------ rounds


def run(script: Path, *arguments: str) -> str:
    """The output of a published script.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S).stdout


def matches(pattern: str, said: str) -> list[Any]:
    """What the pattern finds at the beginnings of lines.

    Raises:
        NoFigures: nothing.
    """
    found = re.findall(pattern, said, re.MULTILINE)
    if not found:
        raise NoFigures(f"no line like {pattern} in what the script printed:\n{said[-1000:]}")
    return found


CASES: dict[str, tuple[str, Callable[[Path], Figures], Callable[[], Figures]]] = {
    "images": ("bench_cifar10.py", images_as_published, images_of_ours),
    "handoff": ("benchmark_thread_output_queue.py", handoff_as_published, handoff_of_ours),
    "transport": ("benchmark_arena_transport.py", transport_as_published, transport_of_ours),
}


def measure(case: str, scripts: Path, rounds: int) -> Figures:
    """The medians of the rounds, in which script and ours take turns."""
    script, published, ours = CASES[case]
    rounded: list[Figures] = []
    for number in range(rounds):
        turns: list[Callable[[], Figures]] = [lambda: published(scripts / script), ours]
        rounded += [turn() for turn in (turns if number % 2 == 0 else reversed(turns))]
    values: dict[str, dict[str, list[float]]] = {}
    for figures in rounded:
        for row, by_loader in figures.items():
            for loader, value in by_loader.items():
                values.setdefault(row, {}).setdefault(loader, []).append(value)
    return {row: {name: statistics.median(each) for name, each in found.items()} for row, found in values.items()}


def table(figures: Figures) -> str:
    """A Markdown table: a row of each figure; the best of a row is bold."""
    loaders = list(dict.fromkeys(loader for row in figures.values() for loader in row))
    lines = [f"| | {' | '.join(loaders)} |", f"|---|{'--:|' * len(loaders)}"]
    for row, found in figures.items():
        best = (min if row.startswith("us,") else max)(found.values())
        cells = [f"**{found[each]:,.0f}**" if found[each] == best else f"{found[each]:,.0f}" for each in loaders]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


ABOUT = {
    "images": "LitData's `scripts/bench/bench_cifar10.py --limit 2000 --workers 2`: the second epoch, in which all but "
    "LitData's chunks are in memory. An epoch takes so little that the start of its workers is most of it. "
    "(dataloader-rs publishes `bench/compare_async.py`; it was not run, as its wheels begin at Python 3.13.)",
    "handoff": "SPDL's `examples/benchmark_thread_output_queue.py`: microseconds that `next()` takes at the median, "
    "after work that holds the GIL. SPDL hands over ints of its own thread; ours are made by two workers.",
    "transport": "SPDL's `examples/benchmark_arena_transport.py --num-items 32 --kinds bytes numpy torch`: one process "
    "makes the payloads and one receives them. SPDL's arenas have a place for every item of a pass, ours is a ring.",
}


def section(case: str, figures: Figures, rounds: int, day: str) -> str:
    """The section of the page for one case."""
    said = f"Written by `python -m tests.benchmarks.published --save`: the script as published and ours take turns, \
medians of {rounds} rounds, {day}."
    return "\n\n".join([f"{TITLE}: {case}", said, ABOUT[case], table(figures)])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", type=Path, required=True, help="the folder of the published scripts")
    parser.add_argument("--cases", default=",".join(CASES), help="joined by commas (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help=f"write their sections of {PAGE.relative_to(ROOT)}")
    given = parser.parse_args(arguments)
    for case in given.cases.split(","):
        figures = measure(case, given.scripts, given.rounds)
        print(f"{case}\n\n{table(figures)}\n", flush=True)
        if given.save:
            text = section(case, figures, given.rounds, dt.datetime.now(dt.UTC).date().isoformat())
            PAGE.write_text(sections.insert(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")


if __name__ == "__main__":
    main()
