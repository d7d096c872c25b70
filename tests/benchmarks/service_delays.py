"""How long a service's loader waits: `python -m tests.benchmarks.service_delays`.

*One at a time*: a sampler names the next batch of 64 KiB when the last one has come, so nothing is prefetched; local
workers are the comparison. *Around a kill*: one of two nodes is killed while both have tasks. *First batch*:
of a new loader at a service that is warm, from the call that makes the loader on. Every batch is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import asyncloader
from tests.service.serving import NodeProcess, serving

from . import sections
from .harness import JobFailed
from .service import PAGE, content

TITLE = "## How long a service's loader waits"
NBYTES = 1 << 16
BATCHES = 1000
LOCAL, UNIX, TCP = "local workers", "unix:", "tcp://"
PLACES = (LOCAL, UNIX, TCP)
ADDED, AFTER_KILL, FIRST = "a batch, one at a time", "longest wait around a kill", "first batch of a new loader"
LIMITS_MS = {ADDED: 0.3, AFTER_KILL: 50.0, FIRST: 50.0}


class Slow(Dataset[torch.Tensor]):
    """`n` samples that take a millisecond each, whose first number is their index."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.001)
        return torch.tensor([index])


class Numbered(Dataset[torch.Tensor]):
    """`n` samples of 64 KiB."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.sample = torch.from_numpy(content(NBYTES))

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


@asyncloader.definition
def slow(n: int) -> Slow:
    """What takes its time."""
    return Slow(n)


@asyncloader.definition
def numbered(n: int) -> Numbered:
    """What takes none."""
    return Numbered(n)


class OneAtATime:
    """A sampler that gives the next index on request."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.came = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[int]:
        for index in range(self.n):
            await self.came.wait()
            self.came.clear()
            yield index


async def one_at_a_time(workers: Any) -> float:
    """Milliseconds from the request of a batch to its arrival: the median.

    Raises:
        JobFailed: a batch has other bytes.
    """
    expected = content(NBYTES)[[0, NBYTES // 2, -1]].tolist()
    waits = []
    sampler = OneAtATime(BATCHES)
    async with asyncloader.AsyncDataLoader[Any, Any](
        numbered(n=BATCHES), batch_size=None, sampler=sampler, num_workers=1, seed=1, workers=workers
    ) as loader:
        batches = aiter(loader)
        for _ in range(BATCHES):
            began = time.perf_counter()
            sampler.came.set()
            batch = await anext(batches)
            waits.append(time.perf_counter() - began)
            if batch[[0, NBYTES // 2, -1]].tolist() != expected:
                raise JobFailed("a batch has other bytes")
    return statistics.median(waits[BATCHES // 10 :]) * 1e3


def longest_wait(url: str, victim: NodeProcess) -> float:
    """Milliseconds of the longest wait for a batch from the moment at which this node is killed on. Errors likewise."""
    waits = []
    with asyncloader.DataLoader[Any, Any](
        slow(n=600), batch_size=None, num_workers=2, seed=1, workers=asyncloader.Service(url)
    ) as loader:
        began = time.perf_counter()
        for number, batch in enumerate(loader):
            now = time.perf_counter()
            if number >= 200:
                waits.append(now - began)
            if batch.tolist() != [number]:
                raise JobFailed(f"batch {number} is {batch.tolist()}")
            began = time.perf_counter()
            if number == 200:
                victim.process.kill()
    victim.process.wait()
    if len(waits) != 400:
        raise JobFailed(f"{len(waits)} batches came after the kill, and 399 were to come")
    return max(waits) * 1e3


def first_batch(workers: Any) -> float:
    """Milliseconds from the call that makes a loader to its first batch."""
    began = time.perf_counter()
    with asyncloader.DataLoader[Any, Any](
        numbered(n=BATCHES), batch_size=None, num_workers=1, seed=1, workers=workers
    ) as loader:
        next(iter(loader))
        return (time.perf_counter() - began) * 1e3


Results = dict[tuple[str, str], list[float]]


def measure(rounds: int) -> Iterator[tuple[str, str, float]]:
    """Measure all, in rounds: what, where, milliseconds. Raises JobFailed."""
    torch.set_num_threads(1)
    names = ["numbered", "slow"]
    flags = [part for name in names for part in ("--open", name)]
    for _ in range(rounds):
        with ExitStack() as stack:
            folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
            stay, killed = (
                stack.enter_context(serving(folder, names, *flags, workers=2, module="tests.benchmarks.service_delays"))
                for folder in folders
            )
            for place, workers in zip(PLACES, (None, stay.unix, stay.tcp), strict=True):
                yield ADDED, place, asyncio.run(one_at_a_time(workers))
                yield FIRST, place, first_batch(workers)
            yield AFTER_KILL, TCP, longest_wait(f"{stay.tcp},{killed.tcp}", killed)


def table(results: Results) -> str:
    """The results as a Markdown table, of medians."""
    lines = ["| what | where | ms | more than locally, ms | wanted |", "|---|---|--:|--:|--:|"]
    for (what, place), found in results.items():
        line = f"| {what} | {place} | {statistics.median(found):.2f} |"
        more = "" if place == LOCAL or what != ADDED else _more(results, what, place)
        wanted = "" if place == LOCAL else f"at most {LIMITS_MS[what]:g}"
        lines.append(f"{line} {more} | {wanted} |")
    return "\n".join(lines)


def _more(results: Results, what: str, place: str) -> str:
    pairs = zip(results[what, place], results[what, LOCAL], strict=True)
    return f"**{statistics.median(mine - theirs for mine, theirs in pairs):.2f}**"


def main(arguments: list[str]) -> int:
    """Measure and print the table; the exit code: 2 if it failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.service_delays", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds (%(default)s)")
    parser.add_argument("--save", action="store_true", help="write the section of the page")
    options = parser.parse_args(arguments)
    results: Results = {}
    try:
        for what, place, milliseconds in measure(options.rounds):
            results.setdefault((what, place), []).append(milliseconds)
            print(f"{what}, {place}: {milliseconds:.2f} ms", file=sys.stderr, flush=True)
    except JobFailed as failure:
        print(f"no table, because a measurement failed: {failure}", file=sys.stderr)
        return 2
    print(table(results))
    if options.save:
        command = " ".join(["python -m tests.benchmarks.service_delays", *arguments])
        about = f"`{command}`: medians of {options.rounds} rounds. {(__doc__ or '').split(chr(10), 2)[2].strip()}"
        text = "\n\n".join([TITLE, about, table(dict(sorted(results.items())))])
        PAGE.write_text(sections.insert(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
