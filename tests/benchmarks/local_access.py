"""CPU time of a sample of shards on a local disk that memory has, in random order, beside Lance and Lhotse.

    python -m tests.benchmarks.local_access [--rounds 5] [--folder /tmp/local-access] [--batch 256 32 1]

16,384 samples of 8 KiB in shards of 8 MiB, not compressed. Each batch is a call of `__getitems__`, a batch of one
`dataset[i]`; no workers. Ours, pylance's ``take`` with ``to_pylist``, and Lhotse's `IndexedJsonlReader` with Python's
json take turns; each figure is the median of the rounds after the first, in microseconds of CPU time of the process,
all threads together. In the first round all bytes are checked, later the numbers of the first and the last sample of
each batch. A peer that is not installed is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import random
import shutil
import statistics
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncloader import RemoteMapDataset, write_shards_sync

from .random_access import SHARD_BYTES, payload

FORMATS = ("mds", "tar", "jsonl", "tfrecord", "parquet")
Verify = Callable[[Sequence[Any], Sequence[int]], None]
Epoch = Callable[[Sequence[Sequence[int]], Verify], None]
Read = Callable[[Sequence[int]], Sequence[Any]]


def fields(number: int, kind: str) -> dict[str, Any]:
    """A sample: its number, and bytes that only it has."""
    key = b"%08d" % number
    data = payload(number)
    if kind == "jsonl":
        return {"n": number, "data": data.hex()[: len(data)]}
    return {"record": key + data[8:]} if kind == "tfrecord" else {"cls": key, "bin": data}


def write(folder: Path, number: int, kinds: Sequence[str] = FORMATS) -> None:
    for kind in kinds:
        samples = ({"__key__": f"{at:08d}", **fields(at, kind)} for at in range(number))
        write_shards_sync(samples, f"{folder}/{kind}/train-{{shard:05d}}.{kind}", max_bytes=SHARD_BYTES)


def check(samples: Sequence[Any], numbers: Sequence[int]) -> None:
    """Fail unless these are the samples with these numbers."""
    assert len(samples) == len(numbers)
    for sample, number in zip(samples, numbers, strict=True):
        kind = "jsonl" if "n" in sample else "tfrecord" if "record" in sample else "mds"
        for name, value in fields(number, kind).items():
            assert sample[name] == value, f"sample {number} has another {name!r}"


def check_ends(samples: Sequence[Any], numbers: Sequence[int]) -> None:
    """Do so for the first and the last sample, by their numbers."""
    assert len(samples) == len(numbers)
    for at in (0, -1):
        sample = samples[at]
        assert (sample["n"] if "n" in sample else int((sample.get("cls") or sample["record"])[:8])) == numbers[at]


def ours(folder: Path, kind: str, loop: asyncio.AbstractEventLoop) -> Epoch:
    dataset = RemoteMapDataset(f"{folder}/{kind}/")
    loop.run_until_complete(dataset.prepare())

    async def epoch(batches: Sequence[Sequence[int]], verify: Verify) -> None:
        async with dataset:
            for batch in batches:
                samples = [await dataset[batch[0]]] if len(batch) == 1 else await dataset.__getitems__(batch)
                verify(samples, batch)

    return lambda batches, verify: loop.run_until_complete(epoch(batches, verify))


def lance(folder: Path, number: int) -> Read:
    module, arrow = importlib.import_module("lance"), importlib.import_module("pyarrow")
    path = folder / "lance"
    if not path.exists():
        rows = [fields(at, "mds") for at in range(number)]
        module.write_dataset(arrow.Table.from_pylist(rows), str(path))
    dataset = module.dataset(str(path))
    return lambda batch: dataset.take(list(batch)).to_pylist()


def lhotse(folder: Path) -> Read:
    modules: dict[str, Any] = sys.modules
    modules.setdefault("orjson", None)  # Python's json, as ours
    reader = importlib.import_module("lhotse.indexing").IndexedJsonlReader
    readers = [reader(path) for path in sorted((folder / "jsonl").glob("train-*.jsonl"))]
    starts = [0]
    for each in readers:
        starts.append(starts[-1] + len(each))

    def read(batch: Sequence[int]) -> list[Any]:
        at = [bisect_right(starts, number) - 1 for number in batch]
        return [readers[shard][number - starts[shard]] for shard, number in zip(at, batch, strict=True)]

    return read


def epochs(folder: Path, number: int, loop: asyncio.AbstractEventLoop) -> dict[str, Epoch]:
    """What reads batches, by name."""

    def of_peer(read: Read) -> Epoch:
        def epoch(batches: Sequence[Sequence[int]], verify: Verify) -> None:
            for batch in batches:
                verify(read(batch), batch)

        return epoch

    found = {f"RemoteMapDataset, {kind}": ours(folder, kind, loop) for kind in FORMATS}
    peers: dict[str, Callable[[], Read]] = {
        "Lance": lambda: lance(folder, number),
        "Lhotse, jsonl": lambda: lhotse(folder),
    }
    for name, make in peers.items():
        try:
            found[name] = of_peer(make())
        except ImportError:
            print(f"{name} is not installed")
    return found


def measure(folder: Path, number: int, size: int, rounds: int, loop: asyncio.AbstractEventLoop) -> dict[str, float]:
    """Return the microseconds of CPU time that a sample takes in batches of this size, by reader."""
    order = random.Random(1).sample(range(number), number)[: number if size > 1 else number // 8]
    batches = [order[at : at + size] for at in range(0, len(order), size)]
    readers = epochs(folder, number, loop)
    times: dict[str, list[float]] = {name: [] for name in readers}
    for turn in range(rounds + 1):
        for name, read in readers.items():
            begin = time.process_time()
            read(batches, check_ends if turn else check)
            times[name].append((time.process_time() - begin) / len(order) * 1e6)
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/asyncloader-local-access"))
    parser.add_argument("--number", type=int, default=16_384)
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 32, 1])
    given = parser.parse_args(arguments)
    shutil.rmtree(given.folder, ignore_errors=True)
    write(given.folder, given.number)
    loop = asyncio.new_event_loop()
    try:
        for size in given.batch:
            for name, cost in measure(given.folder, given.number, size, given.rounds, loop).items():
                print(f"batches of {size:3}  {name:28} {cost:7.2f} us of CPU a sample", flush=True)
    finally:
        loop.close()
        shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
