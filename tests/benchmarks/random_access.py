"""Rates of samples in random order from remote shards, beside MosaicML streaming and webdataset's wids.

    python -m tests.benchmarks.random_access [--rounds 3] [--latency 20 50] [--folder /tmp/random-access]

Shards of 8 MiB with samples of 8 KiB, not compressed: MDS and tar. *few*: some of the samples, once; ours without a
cache, the peers, which must have one, with an empty one. *cold*: an epoch from an empty cache. *warm*: another epoch.
No number comes twice, and of 2,000 samples the CRC-32 of the bytes is checked.

All read by HTTP from one server, a process of its own with a latency, have two workers, and take turns; each row is the
median of its rounds, and the ratio that of the times in the same round. The times of *few* and *cold* include indexing,
and the start of the workers. A peer that is not installed is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import io
import json
import shutil
import statistics
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch
from torch.utils.data import Dataset

from asyncloader import DataLoader, RemoteMapDataset, write_shards_sync
from tests.helpers.http_store import serving

NBYTES = 8 << 10
SHARD_BYTES = 8 << 20
BATCH = 256
WORKERS = 2

POOL = b"".join(zlib.crc32(b"%d" % at).to_bytes(4, "little") for at in range(1 << 16))


def payload(number: int) -> bytes:
    start = number * 97 % (len(POOL) - NBYTES)
    return POOL[start : start + NBYTES]


def write(folder: Path, number: int) -> None:
    """Write the shards, as MDS and as tar."""
    for kind in ("mds", "tar"):
        samples = ({"__key__": f"{at:08d}", "bin": payload(at), "cls": b"%d" % at} for at in range(number))
        write_shards_sync(samples, f"{folder}/{kind}/train-{{shard:05d}}.{kind}", max_bytes=SHARD_BYTES)


def decode(sample: Any) -> tuple[int, int]:
    """Return a sample's number, and the checksum of its bytes."""
    return int(bytes(sample["cls"])), zlib.crc32(sample["bin"])


def of_wids(sample: Any) -> Any:
    """Return a sample of wids, which has files."""
    return {name: sample[f".{name}"].getbuffer() for name in ("cls", "bin")}


class Decoded(Dataset[Any]):
    """The samples of a peer's dataset."""

    def __init__(self, dataset: Any, number: int) -> None:
        self._dataset = dataset
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> tuple[int, int]:
        return decode(self._dataset[index])


def mosaicml(url: str, folder: Path, local: Path) -> Any:
    """MosaicML's dataset. It has no downloader for web servers: its own for files gets the bytes from one."""
    streaming = importlib.import_module("streaming")
    download = importlib.import_module("streaming.base.storage.download")

    def get(_: Any, remote: str, local: str, timeout: float) -> None:
        with urlopen(f"{url}/{Path(remote).relative_to(folder)}") as answer, Path(f"{local}.tmp").open("wb") as file:
            shutil.copyfileobj(answer, file)
        Path(f"{local}.tmp").rename(local)

    download.LocalDownloader._download_file_impl = get
    return streaming.StreamingDataset(remote=f"{folder}/mds", local=str(local), batch_size=BATCH)


def wids(url: str, folder: Path, local: Path) -> Any:
    """The dataset of wids, which downloads by curl."""
    written = json.loads((folder / "tar" / "_train-index.tar.json").read_bytes())["shards"].values()
    shards = [{"url": f"{url}/tar/{each['name']}", "nsamples": each["samples"]} for each in written]
    local.mkdir(parents=True)

    def place(remote: str) -> str:
        return str(local / remote.rpartition("/")[2])

    options: dict[str, Any] = {"lru_size": len(shards), "keep": True, "transformations": of_wids}
    with redirect_stderr(io.StringIO()):
        return importlib.import_module("wids").ShardListDataset(shards, localname=place, **options)


def read(loader: Any, most: int, expected: set[int]) -> float:
    """Return the seconds in which a loader reads `most` samples, which are checked."""
    begin = time.perf_counter()
    found: list[torch.Tensor] = []
    batches = iter(loader)
    while sum(map(len, found)) < most:
        numbers, sums = next(batches)
        found.append(torch.stack([numbers, sums], 1))
    took = time.perf_counter() - begin
    del batches
    rows = torch.cat(found).tolist()
    assert {number for number, _ in rows} <= expected
    assert len({number for number, _ in rows}) == len(rows)
    for number, crc in rows[:: max(1, len(rows) // 2000)]:
        assert crc == zlib.crc32(payload(number)), f"sample {number} has other bytes"
    return took


@contextmanager
def server(folder: Path, latency: float) -> Generator[str]:
    """Serve the files of a folder in another process. Yields the URL."""
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.random_access",
        "--serve",
        str(folder),
        "--latency",
        str(latency),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


async def serve(files: dict[str, bytes], latency: float) -> None:
    """Serve until killed."""
    async with serving() as store:
        for path, data in files.items():
            store.put(path, data)
        store.latency_s = latency / 1000
        print(store.url, flush=True)
        await asyncio.Event().wait()


def ours(urls: list[str], number: int, local: Path, *, cached: bool) -> Any:
    dataset = RemoteMapDataset(urls, cache_dir=local if cached else None)
    options: dict[str, Any] = {"batch_size": BATCH, "num_workers": WORKERS, "persistent_workers": True}
    assert len(dataset) == number
    return DataLoader[Any](dataset, shuffle=True, decode=decode, **options)


def theirs(make: Any, url: str, shards: Path, number: int, local: Path, *, cached: bool) -> Any:
    options: dict[str, Any] = {"batch_size": BATCH, "num_workers": WORKERS, "persistent_workers": True}
    return torch.utils.data.DataLoader(Decoded(make(url, shards, local), number), shuffle=True, **options)


def times_of(make: Callable[..., Any], folder: Path, number: int, first: int) -> dict[str, float]:
    """Return the seconds of each part, with the making of the dataset and the start of the workers."""
    expected = set(range(number))

    def timed(*, cached: bool, most: int) -> tuple[Any, float]:
        shutil.rmtree(folder, ignore_errors=True)
        begin = time.perf_counter()
        loader = make(folder, cached=cached)
        made = time.perf_counter() - begin
        return loader, made + read(loader, most, expected)

    few = timed(cached=False, most=first)[1]
    loader, cold = timed(cached=True, most=number)
    return {"few": few, "cold": cold, "warm": read(loader, number, expected)}


def measure(folder: Path, latency: float, number: int, first: int, rounds: int) -> None:
    """Print the rows for one latency in milliseconds."""
    shards, local = folder / "shards", folder / "local"
    with server(shards, latency) as url:
        tars = [f"{url}/tar/{path.name}" for path in sorted((shards / "tar").glob("train-*.tar"))]
        pairs = [
            ("MDS", [f"{url}/mds/index.json"], "MosaicML", "streaming", mosaicml),
            ("tar", tars, "wids", "wids", wids),
        ]
        for name, urls, peer, module, make in pairs:
            try:
                importlib.import_module(module)
            except ImportError:
                print(f"{latency:2.0f} ms {peer} is not installed")
                continue
            both: list[tuple[dict[str, float], dict[str, float]]] = []
            for _ in range(rounds):
                mine = times_of(partial(ours, urls, number), local, number, first)
                other = times_of(partial(theirs, make, url, shards, number), local, number, first)
                both.append((mine, other))
            for part in ("few", "cold", "warm"):
                samples = first if part == "few" else number
                rates = [samples / statistics.median(each[at][part] for each in both) for at in (0, 1)]
                ratios = [other[part] / mine[part] for mine, other in both]
                print(
                    f"{latency:2.0f} ms {part:4} RemoteMapDataset, {name} {rates[0]:8,.0f} samples/s   {peer:8} "
                    f"{rates[1]:8,.0f} samples/s   ratio {statistics.median(ratios):5.2f} ({min(ratios):.2f} to "
                    f"{max(ratios):.2f})",
                    flush=True,
                )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/asyncloader-random-access"))
    parser.add_argument("--number", type=int, default=16_384)
    parser.add_argument("--few", type=int, default=1024)
    parser.add_argument("--latency", type=float, nargs="+", default=[20, 50])
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve is not None:
        files = {str(path.relative_to(given.serve)): path.read_bytes() for path in given.serve.rglob("*.*")}
        asyncio.run(serve(files, given.latency[0]))
        return
    warnings.filterwarnings("ignore", "This DataLoader will create")
    shutil.rmtree(given.folder, ignore_errors=True)
    write(given.folder / "shards", given.number)
    for latency in given.latency:
        measure(given.folder, latency, given.number, given.few, given.rounds)
    shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
