"""Rates of writing shards beside webdataset's ShardWriter and MosaicML's MDSWriter.

    python -m tests.benchmarks.shard_writers [--rounds 5] [--folder /tmp/shards] [--save]

*even*: samples of 4 KiB. *skewed*: samples of 1 KiB, and ten of 100 MiB among them. The samples are made before. The
writers take turns; each row is the median of its rounds, and the ratio that of the times in the same round. What was
written is read again, and compared with the samples by a digest. A peer that is not installed is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import hashlib
import importlib
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncloader import RemoteIterableDataset, write_shards_sync

from . import sections
from .harness import ROOT

PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
SHARD_BYTES = 128 << 20

Write = Callable[[Sequence[dict[str, Any]], Path], None]


def samples(number: int, nbytes: int, large: int = 0) -> list[dict[str, Any]]:
    """Samples of `nbytes` bytes; if `large`, ten of them of `large` bytes."""
    every = max(number // 10, 1)
    pool = [os.urandom(nbytes) for _ in range(256)]
    big = os.urandom(large)
    return [
        {
            "__key__": f"{at:08d}",
            "jpg": big if large and at % every == every // 2 else pool[at % 256],
            "cls": b"%d" % (at % 10),
        }
        for at in range(number)
    ]


def write_tar(data: Sequence[dict[str, Any]], folder: Path) -> None:
    write_shards_sync(iter(data), f"{folder}/train-{{shard:06d}}.tar", max_bytes=SHARD_BYTES)


def write_mds(data: Sequence[dict[str, Any]], folder: Path) -> None:
    write_shards_sync(iter(data), f"{folder}/train-{{shard:06d}}.mds", max_bytes=SHARD_BYTES)


def write_webdataset(data: Sequence[dict[str, Any]], folder: Path) -> None:
    writer = importlib.import_module("webdataset").writer.ShardWriter
    folder.mkdir()
    with writer(f"{folder}/train-%06d.tar", maxsize=SHARD_BYTES, maxcount=1e9, verbose=0, encoder=False) as shards:
        for sample in data:
            shards.write(sample)


def write_mosaicml(data: Sequence[dict[str, Any]], folder: Path) -> None:
    writer = importlib.import_module("streaming").MDSWriter
    with writer(out=str(folder), columns={"jpg": "bytes", "cls": "bytes"}, size_limit=SHARD_BYTES) as shards:
        for sample in data:
            shards.write({"jpg": sample["jpg"], "cls": sample["cls"]})


PAIRS: list[tuple[str, Write, str, str, Write]] = [
    ("write_shards, tar", write_tar, "webdataset ShardWriter", "webdataset", write_webdataset),
    ("write_shards, MDS", write_mds, "MosaicML MDSWriter", "streaming", write_mosaicml),
]


def digest_of(data: Iterator[Any]) -> str:
    found = hashlib.sha256()
    for sample in data:
        for name in ("jpg", "cls"):
            found.update(len(sample[name]).to_bytes(8, "little") + sample[name])
    return found.hexdigest()


def check(folder: Path, expected: str) -> None:
    """Fail unless the shards have these samples, in this order."""

    async def read() -> str:
        return digest_of(iter([sample async for sample in RemoteIterableDataset(f"{folder}/")]))

    assert asyncio.run(read()) == expected, f"{folder} has other samples"


def seconds(write: Write, data: Sequence[dict[str, Any]], folder: Path, expected: str) -> float:
    shutil.rmtree(folder, ignore_errors=True)
    begin = time.perf_counter()
    write(data, folder)
    took = time.perf_counter() - begin
    check(folder, expected)
    shutil.rmtree(folder)
    return took


def measure(name: str, data: Sequence[dict[str, Any]], folder: Path, rounds: int) -> list[str]:
    """Print the rows for one input; gives them as lines of a Markdown table."""
    lines: list[str] = []
    expected = digest_of(iter(data))
    total = sum(len(sample["jpg"]) for sample in data)
    for ours, write, theirs, module, peer in PAIRS:
        try:
            importlib.import_module(module)
        except ImportError:
            print(f"{name:8} {theirs} is not installed")
            continue
        times = [(seconds(write, data, folder, expected), seconds(peer, data, folder, expected)) for _ in range(rounds)]
        for label, at in ((ours, 0), (theirs, 1)):
            median = statistics.median(each[at] for each in times)
            rate, speed = f"{len(data) / median:,.0f}", f"{total / median / (1 << 20):,.0f}"
            print(f"{name:8} {label:24} {rate:>9} samples/s {speed:>7} MiB/s")
            lines.append(f"| {name} | {label} | {rate} | {speed} | |")
        ratios = [one[1] / one[0] for one in times]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{name:8} {'ratio':24} {ratio}")
        lines[-2] = lines[-2].removesuffix(" |") + f"**{ratio}** |"
    return lines


def section(lines: Sequence[str], rounds: int, day: str) -> str:
    """The section of the page."""
    about = f"""\
Written by `python -m tests.benchmarks.shard_writers --save`: {rounds} rounds in which the writers take turns, {day}. \
*Even* are samples of 4 KiB, *skewed* samples of 1 KiB with ten of 100 MiB among them; shards of \
{SHARD_BYTES >> 20} MiB on the local disk. What was written is read again and compared. The ratio is ours to the peer \
below, in the same round."""
    head = ["| input | writer | samples/s | MiB/s | the peer's x |", "|---|---|--:|--:|--:|"]
    return "\n\n".join(["## Writers of shards", about, "\n".join([*head, *lines])])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/asyncloader-shards"))
    parser.add_argument("--number", type=int, default=60_000)
    parser.add_argument("--large", type=int, default=100 << 20)
    parser.add_argument("--save", action="store_true", help=f"write the section of {PAGE.relative_to(ROOT)}")
    given = parser.parse_args(arguments)
    lines = measure("even", samples(given.number, 4096), given.folder, given.rounds)
    lines += measure("skewed", samples(given.number, 1024, given.large), given.folder, given.rounds)
    if given.save:
        text = section(lines, given.rounds, dt.datetime.now(dt.UTC).date().isoformat())
        PAGE.write_text(sections.insert(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")


if __name__ == "__main__":
    main()
