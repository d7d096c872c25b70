"""The memory of a large list of strings, with and without `share`: a section of the page.

Every string is read once, in a scattered order, by 4 workers. A forked worker that reads a plain list gets copies of
its pages (reference counts are written); a spawned one begins with a copy. Each configuration runs in a process of its
own; every batch is checked. Memory is the sum of the proportional set sizes of the main process and the workers.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset, Sampler

from .harness import JobFailed, run_program, tree_memory

STRINGS = 2_000_000
WORKERS = 4
BATCH = 1000
LIMIT_S = 600.0  # for one configuration

TORCH_PLAIN, OURS_PLAIN, OURS_SHARED = "torch, list", "DataLoader, list", "DataLoader, share(list)"
LOADERS = (TORCH_PLAIN, OURS_PLAIN, OURS_SHARED)
STARTS = ("fork", "spawn")


class Row(NamedTuple):
    """One configuration. Memory in bytes, times in seconds."""

    loader: str
    start: str
    strings: int
    prepare: float
    """Time of `share()`; 0 without."""
    first: float
    """From before the loader is made to its first batch."""
    pss_start: int
    """Memory when each worker has sent its first batch."""
    pss_end: int
    """Memory when the last batch has come; the workers still live."""
    rate: float
    """Strings per second, from then on."""


def name(index: int) -> str:
    """String number `index`: 39 bytes, as paths of files are."""
    return f"/data/train/{index % 1000:04d}/image_{index:012d}.jpg"


class Names(Dataset[int]):
    """Sample i is a checksum of string i."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = strings

    def __len__(self) -> int:
        return len(self.strings)

    def __getitem__(self, index: int) -> int:
        return zlib.crc32(self.strings[index].encode())


class Scattered(Sampler[int]):
    """Every index once, in steps of 0.618 of the size: a batch is spread over all of it, as a shuffled one is.

    It takes no memory, where a permutation would take more than is measured.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.step = next(step for step in range(int(size * 0.6180339887), 2 * size + 2) if math.gcd(step, size) == 1)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return (place * self.step % self.size for place in range(self.size))


def run(loader: str, start: str, strings: int) -> Row:
    """Measure one configuration, in this process.

    Raises:
        JobFailed: a batch has wrong contents.
    """
    import torch

    import asyncloader
    from asyncloader.shared.share import share

    # Every string of the list once made is read once, so its pages are all there when the measurement begins.
    data: Any = [name(index) for index in range(strings)]
    began = time.perf_counter()
    if loader == OURS_SHARED:
        data = share(data)
        gc.collect()
    prepared = time.perf_counter() - began if loader == OURS_SHARED else 0.0
    sampler = Scattered(strings)
    checksums = np.fromiter((zlib.crc32(text.encode()) for text in data), np.uint32, strings)
    make: Any = torch.utils.data.DataLoader if loader == TORCH_PLAIN else asyncloader.DataLoader
    began = time.perf_counter()
    batches = iter(
        make(
            Names(data),
            batch_size=BATCH,
            sampler=sampler,
            num_workers=WORKERS,
            persistent_workers=True,  # they must live when the memory is read at the end
            multiprocessing_context=start,
        )
    )
    step, came = sampler.step, 0

    def check(batch: Any) -> None:
        nonlocal came
        places = np.arange(came, came + len(batch), dtype=np.int64) * step % strings
        came += len(batch)
        if not np.array_equal(batch.numpy(), checksums[places]):
            raise JobFailed(f"{loader}, {start}: the batch up to string {came} differs")

    check(next(batches))
    first = time.perf_counter() - began
    for _ in range(WORKERS - 1):
        check(next(batches))  # one of each worker: all of them are up
    at_start = _memory()
    began, skipped = time.perf_counter(), came
    while came < strings:
        check(next(batches))
    rate = (strings - skipped) / (time.perf_counter() - began)
    at_end = _memory()
    if next(batches, None) is not None:
        raise JobFailed(f"{loader}, {start}: more batches than there are strings for")
    return Row(loader, start, strings, prepared, first, at_start, at_end, rate)


def _memory() -> int:
    """Bytes of this process and its descendants: proportional set sizes, and segments open but mapped nowhere."""
    memory = tree_memory(os.getpid())
    return memory.pss + memory.unmapped


def measure(strings: int = STRINGS, log: Callable[[str], None] | None = None) -> list[Row]:
    """Measure every configuration, each in a process of its own.

    Raises:
        JobFailed: one failed, or took more than ten minutes.
    """
    rows: list[Row] = []
    for start in STARTS:
        for loader in LOADERS:
            rows.append(run_apart(loader, start, strings))
            if log is not None:
                log(str(rows[-1]))
    return rows


def run_apart(loader: str, start: str, strings: int) -> Row:
    """Measure one configuration in a process of its own. Errors as `measure`."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        job = json.dumps([loader, start, strings])
        return Row(*run_program("tests.benchmarks.shared", job, f"{loader}, {start}", Path(folder), limit_s=LIMIT_S))


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| start | loader, data | memory at the epoch's start (MiB) | at its end (MiB) | first batch (s) | strings/s |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        prepare = f" + {row.prepare:.2f} for share()" if row.prepare else ""
        lines.append(
            f"| {row.start} | {row.loader} | {row.pss_start / 2**20:,.0f} | {row.pss_end / 2**20:,.0f} "
            f"| {row.first:.2f}{prepare} | {row.rate:,.0f} |"
        )
    return "\n".join(lines)


def section(rows: list[Row]) -> str:
    """The rows as a part of the page."""
    return "\n\n".join(
        [
            "## Memory of a large list",
            (
                f"{rows[0].strings:,} strings of {len(name(0))} bytes, each read once by {WORKERS} workers in batches "
                f"of {BATCH:,}. Memory is the sum of the proportional set sizes of the main process and the workers."
            ),
            table(rows),
        ]
    )


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)  # the consumer would fight the workers for the cores
    Path(sys.argv[2]).write_text(json.dumps(run(*json.loads(sys.argv[1]))), encoding="utf-8")
