"""The planted runs: datasets whose cost is drawn from a seed, consumers, and options.

A `Row` says what bounds it. `Row.grid` are the settings among which the best is searched for: those of the options
that can act there and alter neither order nor samples.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from aiohttp import web
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from asyncloader import RemoteIterableDataset
from asyncloader.cpus import usable_cpus
from tests.integration.http_store import HttpStore, serving, status

__all__ = ["ROWS", "CannotPlant", "Row"]


class CannotPlant(Exception):
    """This machine does not let us."""


def spin(seconds: float) -> None:
    """Compute for so many seconds of this thread's CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Planted(Dataset[Any]):
    """A map dataset whose samples wait, and compute, for seconds that are drawn from a seed.

    Args:
        seed: of the drawn seconds.
        length: samples.
        waits: mean seconds that a sample waits.
        computes: mean seconds that it computes.
        nbytes: of a sample.
        slow: every so many samples one takes twenty times as long; 0: none.
    """

    def __init__(
        self, seed: int, length: int, *, waits: float = 0.0, computes: float = 0.0, nbytes: int = 64, slow: int = 0
    ) -> None:
        draw = random.Random(seed)
        self.factors = [draw.uniform(0.5, 1.5) for _ in range(length)]
        self.waits, self.computes, self.nbytes, self.slow = waits, computes, nbytes, slow
        self.offset = draw.randrange(slow) if slow else 0

    def __len__(self) -> int:
        return len(self.factors)

    def __getitem__(self, index: int) -> Any:
        factor = self.factors[index] * (20 if self.slow and index % self.slow == self.offset else 1)
        if self.waits:
            time.sleep(self.waits * factor)
        if self.computes:
            spin(self.computes * factor)
        return torch.zeros(self.nbytes, dtype=torch.uint8)


class AsyncPlanted(Planted):
    """The same, awaited."""

    async def __getitem__(self, index: int) -> Any:
        if self.waits:
            await asyncio.sleep(self.waits * self.factors[index])
        if self.computes:
            spin(self.computes * self.factors[index])
        return torch.zeros(self.nbytes, dtype=torch.uint8)


class Locked(Planted):
    """Samples that wait one after the other, whoever reads them, as those of one HDF5 file do."""

    def __init__(self, seed: int, length: int, waits: float) -> None:
        super().__init__(seed, length, waits=waits)
        self.lock = multiprocessing.get_context("fork").Lock()

    def __getitem__(self, index: int) -> Any:
        with self.lock:
            return super().__getitem__(index)


class SlowSampler(Sampler[int]):
    """Indices that each take a while to choose."""

    def __init__(self, length: int, computes: float) -> None:
        self.length, self.computes = length, computes

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for index in range(self.length):
            spin(self.computes)
            yield index


class OneShard(IterableDataset[Any]):
    """A stream of which the first worker alone has a part."""

    def __init__(self, seed: int, length: int, waits: float) -> None:
        self.seed, self.length, self.waits = seed, length, waits

    def __iter__(self) -> Iterator[Any]:
        draw, info = random.Random(self.seed), get_worker_info()
        if info is None or info.id == 0:
            for _ in range(self.length):
                time.sleep(self.waits * draw.uniform(0.5, 1.5))
                yield torch.zeros(8)


class SlowWorker(IterableDataset[Any]):
    """A stream that one of the workers reads eight times as slowly as the others."""

    def __init__(self, seed: int, length: int, waits: float) -> None:
        self.seed, self.length, self.waits = seed, length, waits

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        number = 0 if info is None else info.id
        draw = random.Random(self.seed + number)
        for _ in range(self.length):
            time.sleep(self.waits * draw.uniform(0.5, 1.5) * (8 if number == 1 else 1))
            yield torch.zeros(8)


class Remembering(IterableDataset[Any]):
    """A stream whose state takes long to make: a list of what it has read, of so many numbers."""

    def __init__(self, seed: int, length: int, size: int) -> None:
        draw = random.Random(seed)
        self.length, self.seen, self.at = length, [draw.random() for _ in range(size)], 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.length:
            self.at += 1
            yield torch.zeros(8)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": [str(each) for each in self.seen]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


class Leaking(Planted):
    """Keeps memory for each sample."""

    kept: list[Any]

    def __getitem__(self, index: int) -> Any:
        self.kept = [*getattr(self, "kept", []), np.ones(1 << 19)]  # 4 MB
        return super().__getitem__(index)


class Holding(AbstractContextManager[None]):
    """A thread that holds the GIL most of the time, as a trainer's own Python code beside the loop does."""

    def __init__(self) -> None:
        self.over = False
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        numbers = list(range(300_000))
        while not self.over:
            sum(numbers)  # one call into C, during which the GIL is not given away

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.over = True
        self.thread.join()


class Neighbours(AbstractContextManager[None]):
    """Other programs that compute all the time, one for each CPU."""

    def __enter__(self) -> None:
        self.running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(usable_cpus())]

    def __exit__(self, *_: object) -> None:
        for each in self.running:
            each.kill()
            each.wait()


class Throttled(AbstractContextManager[None]):
    """A control group that allows six tenths of a CPU to this process and those that it starts. Needs root."""

    group, before = Path("/sys/fs/cgroup/cpu/asyncloader-verdicts"), Path("/sys/fs/cgroup/cpu")

    def __enter__(self) -> None:
        try:
            self.group.mkdir()
            (self.group / "cpu.cfs_quota_us").write_text("60000")
            (self.group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            raise CannotPlant(f"no control group can be made here: {error}") from error

    def __exit__(self, *_: object) -> None:
        for pid in (self.group / "cgroup.procs").read_text().split():
            (self.before / "cgroup.procs").write_text(pid)
        self.group.rmdir()


class Store(AbstractContextManager[None]):
    """A store over HTTP, in a thread of its own."""

    url: ClassVar[str] = ""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.stack = AsyncExitStack()

    async def _open(self) -> None:
        store = await self.stack.enter_async_context(serving())
        self.fill(store)
        type(self).url = store.url

    def fill(self, store: HttpStore) -> None:
        raise NotImplementedError

    def __enter__(self) -> None:
        self.thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self.loop).result()

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self.stack.aclose(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class Failing(Store):
    """Each object's first requests are refused, so many as are drawn."""

    def fill(self, store: HttpStore) -> None:
        draw = random.Random(21)
        for number in range(24):
            store.put(f"{number:02d}.jsonl", b'{"n": 1}\n' * 16)
            store.faults[f"{number:02d}.jsonl"].extend([status(503)] * draw.randint(1, 3))


class Limited(Store):
    """A connection carries 2 MB/s, after 100 ms. The objects are 48 of 256 KiB."""

    def fill(self, store: HttpStore) -> None:
        data = b'{"n": "%s"}\n' % (b"x" * 1014) * 256

        async def slow(_: HttpStore, request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Length": str(len(data)), "ETag": '"1"'})
            await asyncio.sleep(0.1)
            await response.prepare(request)
            for at in range(0, len(data), 1 << 15):
                await asyncio.sleep((1 << 15) / 2e6)
                await response.write(data[at : at + (1 << 15)])
            await response.write_eof()
            return response

        for number in range(48):
            store.put(f"{number:02d}.jsonl", data)
            store.faults[f"{number:02d}.jsonl"].extend([slow] * 64)


def nothing(_: Any) -> None:
    """A consumer that takes no time."""


def sleeps(seconds: float) -> Callable[[Any], None]:
    """A consumer that is busy elsewhere, as with a GPU, for so long with each batch."""
    return lambda _: time.sleep(seconds)


def multiplies(_: Any) -> None:
    """A consumer that computes in torch's threads."""
    matrix = torch.ones(320, 320)
    for _ in range(6):
        matrix = matrix @ matrix


@dataclass(frozen=True)
class Row:
    """One planted run.

    Attributes:
        name: what is planted.
        bounds: the right verdicts.
        dataset: made of a seed.
        options: of the loader.
        grid: other options to try.
        consume: called with each batch.
        epochs: read.
        beside: a context around the run.
    """

    name: str
    bounds: tuple[str, ...]
    dataset: Callable[[int], Any]
    options: dict[str, Any]
    grid: tuple[dict[str, Any], ...] = ()
    consume: Callable[[Any], None] = nothing
    epochs: int = 1
    beside: Callable[[], AbstractContextManager[None]] = nullcontext[None]


def workers(*numbers: int) -> tuple[dict[str, Any], ...]:
    """A grid of numbers of workers."""
    return tuple({"num_workers": number} for number in numbers)


PERSISTENT = tuple({"num_workers": number, "persistent_workers": True} for number in (1, 2, 4))
PREFETCH = tuple({"prefetch_factor": number} for number in (1, 4))

ROWS = [
    Row(
        "slow storage",
        ("fetch",),
        lambda seed: Planted(seed, 320, waits=0.004),
        {"batch_size": 8, "num_workers": 2},
        (*workers(0, 1, 4, 8, 16), *PREFETCH),
    ),
    Row(
        "slow storage, async dataset",
        ("fetch",),
        lambda seed: AsyncPlanted(seed, 1600, waits=0.02),
        {"batch_size": 16, "num_workers": 1, "concurrency": 16},
        ({"concurrency": 4}, {"concurrency": 64}, {"concurrency": 256}, *workers(0, 2)),
    ),
    Row(
        "slow decode, no workers",
        ("compute",),
        lambda seed: Planted(seed, 320, computes=0.003),
        {"batch_size": 8, "num_workers": 0},
        workers(1, 2, 4, 8),
        sleeps(0.02),
    ),
    Row(
        "tiny batches",
        ("overhead",),
        lambda seed: Planted(seed, 6000),
        {"batch_size": 2, "num_workers": 2},
        (*workers(0, 1, 4), *PREFETCH),
    ),
    Row(
        "slow consumer",
        ("consumer",),
        lambda seed: Planted(seed, 320, waits=0.0005),
        {"batch_size": 8, "num_workers": 2},
        workers(0, 1, 4),
        sleeps(0.02),
    ),
    Row(
        "start-up alone",
        ("startup",),
        lambda seed: Planted(seed, 128, waits=0.0002),
        {"batch_size": 8, "num_workers": 2},
        (*workers(0, 1, 4), *PERSISTENT),
        epochs=8,
    ),
    Row(
        "one slow worker",
        ("slow worker",),
        lambda seed: SlowWorker(seed, 80, 0.002),
        {"batch_size": 4, "num_workers": 3},
        PREFETCH,
    ),
    Row(
        "slow head of line",
        ("order",),
        lambda seed: Planted(seed, 480, waits=0.0015, slow=64),
        {"batch_size": 4, "num_workers": 4, "prefetch_factor": 1},
        ({"prefetch_factor": 2}, {"prefetch_factor": 4}),
    ),
    Row(
        "ring too small",
        ("ring",),
        lambda seed: Planted(seed, 200, nbytes=4 << 20),
        {"batch_size": 2, "num_workers": 1, "ring_bytes": 4 << 20},
        ({"ring_bytes": 32 << 20}, {"ring_bytes": 64 << 20}),
    ),
    Row(
        "slow storage, no workers",
        ("fetch",),
        lambda seed: Planted(seed, 160, waits=0.004),
        {"batch_size": 8, "num_workers": 0},
        workers(1, 2, 4, 8, 16),
    ),
    Row(
        "a sampler that is slow",
        ("sampler",),
        lambda seed: Planted(seed, 320, waits=0.0005),
        {"batch_size": 8, "num_workers": 2, "sampler": SlowSampler(320, 0.004)},
        workers(0, 1, 4),
    ),
    Row(
        "one lock that all workers wait for",
        ("fetch",),
        lambda seed: Locked(seed, 320, 0.004),
        {"batch_size": 8, "num_workers": 2, "multiprocessing_context": "fork"},
        workers(0, 1, 4, 8),
    ),
    Row(
        "one lock, one worker",
        ("fetch",),
        lambda seed: Locked(seed, 320, 0.004),
        {"batch_size": 8, "num_workers": 1, "multiprocessing_context": "fork"},
        workers(0, 2, 4, 8),
    ),
    Row(
        "neighbours that compute, no workers",
        ("compute", "cpus"),
        lambda seed: Planted(seed, 320, computes=0.004),
        {"batch_size": 8, "num_workers": 0},
        workers(1, 2, 4, 8),
        beside=Neighbours,
    ),
    Row(
        "neighbours that compute, one worker",
        ("compute", "cpus"),
        lambda seed: Planted(seed, 320, computes=0.004),
        {"batch_size": 8, "num_workers": 1},
        workers(0, 2, 4, 8),
        beside=Neighbours,
    ),
    Row(
        "a control group's quota",
        ("compute", "cpus"),
        lambda seed: Planted(seed, 320, computes=0.004),
        {"batch_size": 8, "num_workers": 1},
        workers(0, 2, 4),
        beside=Throttled,
    ),
    Row(
        "a store that limits each connection",
        ("fetch",),
        lambda seed: RemoteIterableDataset(Limited.url + "/{00..47}.jsonl", shuffle_shards=bool(seed % 2)),
        {"batch_size": 64, "num_workers": 1, "multiprocessing_context": "fork"},
        workers(2, 4),
        beside=Limited,
    ),
    Row(
        "a store that fails now and then",
        ("store",),
        lambda seed: RemoteIterableDataset(Failing.url + "/{00..23}.jsonl", shuffle_shards=bool(seed % 2)),
        {"batch_size": 16, "num_workers": 2, "multiprocessing_context": "fork"},
        PREFETCH,
        beside=Failing,
    ),
    Row(
        "a trainer that holds the GIL",
        ("consumer process",),
        lambda seed: Planted(seed, 960, waits=0.0002),
        {"batch_size": 8, "num_workers": 2},
        (*workers(0, 1, 4), *PREFETCH),
        beside=Holding,
    ),
    Row(
        "too few workers",
        ("fetch", "compute"),
        lambda seed: Planted(seed, 320, waits=0.002, computes=0.001),
        {"batch_size": 8, "num_workers": 1},
        workers(0, 2, 4, 8),
        sleeps(0.01),
    ),
    Row(
        "too many workers for the cores",
        ("cpus",),
        lambda seed: Planted(seed, 480, computes=0.002),
        {"batch_size": 8, "num_workers": 8},
        workers(0, 1, 2, 4),
    ),
    Row(
        "a main process that computes in many threads",
        ("cpus",),
        lambda seed: Planted(seed, 320, computes=0.008),
        {"batch_size": 8, "num_workers": 2},
        workers(0, 1, 4),
        multiplies,
    ),
    Row(
        "oversize batches now and then",
        ("consumer", "fetch", "compute", "ring", "overhead"),
        lambda seed: Planted(seed, 200, waits=0.001, nbytes=1 << 16),
        {"batch_size": 8, "num_workers": 2, "ring_bytes": 1 << 20},
        ({"ring_bytes": 16 << 20}, *workers(0, 1, 4)),
    ),
    Row(
        "a stream with too few shards",
        ("shards",),
        lambda seed: OneShard(seed, 320, 0.002),
        {"batch_size": 4, "num_workers": 4},
        PREFETCH,
    ),
    Row(
        "states that take long to save",
        ("snapshots",),
        lambda seed: Remembering(seed, 640, 20_000),
        {"batch_size": 8, "num_workers": 2},
        tuple({"snapshot_every_n_steps": number} for number in (10, 100, 1000)),
        sleeps(0.001),
    ),
    Row(
        "workers near their memory limit",
        ("memory",),
        lambda seed: Leaking(seed, 240, waits=0.001),
        {"batch_size": 4, "num_workers": 2, "worker_memory_limit": 64 << 20, "max_worker_restarts": 1000, "seed": 1},
        ({"worker_memory_limit": 256 << 20}, {"worker_memory_limit": 1024 << 20}),
    ),
]
