"""The parts of planted runs: datasets whose cost is drawn from a seed, samplers, consumers, programs beside a run."""

from __future__ import annotations

import asyncio
import gzip
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from aiohttp import web
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from asyncloader.base.cpus import usable_cpus
from tests.helpers.http_store import HttpStore, serving, status


class CannotPlant(Exception):
    """This machine does not allow the row's condition."""


def spin(seconds: float) -> None:
    """Compute for this number of seconds of the thread's CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Planted(Dataset[Any]):
    """A map dataset whose samples wait, and compute, for seconds that are drawn from a seed.

    Args:
        seed: of the random seconds.
        length: number of samples.
        waits: mean seconds that a sample waits.
        computes: mean seconds that a sample computes.
        nbytes: size of a sample.
        slow: one in this number of samples, in a random place, takes `times` as long; 0: none.
        times: how many times as long a slow sample takes as others do on average.
    """

    def __init__(
        self,
        seed: int,
        length: int,
        *,
        waits: float = 0.0,
        computes: float = 0.0,
        nbytes: int = 64,
        slow: int = 0,
        times: float = 20.0,
    ) -> None:
        draw = np.random.default_rng(seed)
        self.factors = draw.uniform(0.5, 1.5, length)
        self.waits, self.computes, self.nbytes = waits, computes, nbytes
        if slow:
            starts = np.arange(0, length - slow + 1, slow)
            self.factors[starts + draw.integers(0, slow, len(starts))] = times

    def __len__(self) -> int:
        return len(self.factors)

    def __getitem__(self, index: int) -> Any:
        if self.waits:
            time.sleep(self.waits * self.factors[index])
        if self.computes:
            spin(self.computes * self.factors[index])
        return torch.zeros(self.nbytes, dtype=torch.uint8)


class AsyncPlanted(Planted):
    """`Planted` with awaited samples."""

    async def __getitem__(self, index: int) -> Any:
        if self.waits:
            await asyncio.sleep(self.waits * self.factors[index])
        if self.computes:
            spin(self.computes * self.factors[index])
        return torch.zeros(self.nbytes, dtype=torch.uint8)


class Crowded(AsyncPlanted):
    """Awaited samples of a store that serves 32 requests at a time, and is slowed down by each further one."""

    now = 0

    async def __getitem__(self, index: int) -> Any:
        self.now += 1
        crowd = max(0, self.now - 32)
        await asyncio.sleep(self.waits * self.factors[index] * (1 + crowd / 32) * (1 + crowd / 100))
        self.now -= 1
        return torch.zeros(self.nbytes, dtype=torch.uint8)


class Locked(Planted):
    """Samples that wait one after the other, whichever process reads them, like those of one HDF5 file."""

    def __init__(self, seed: int, length: int, waits: float) -> None:
        super().__init__(seed, length, waits=waits)
        self.lock = multiprocessing.get_context("fork").Lock()

    def __getitem__(self, index: int) -> Any:
        with self.lock:
            return super().__getitem__(index)


class SlowSampler(Sampler[int]):
    """A sampler that computes for a while for each index."""

    def __init__(self, length: int, computes: float) -> None:
        self.length, self.computes = length, computes

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for index in range(self.length):
            spin(self.computes)
            yield index


class Unequal(IterableDataset[Any]):
    """A stream that some workers read more slowly than others.

    Args:
        seed: of the random seconds.
        length: number of samples of each worker.
        waits: mean seconds that a sample waits.
        times: of workers that differ, how many times as long a sample takes; 0: the worker has no part of the stream.
    """

    def __init__(self, seed: int, length: int, *, waits: float, times: dict[int, float]) -> None:
        self.seed, self.length, self.waits, self.times = seed, length, waits, times

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        number = 0 if info is None else info.id
        draw, times = random.Random(self.seed + number), self.times.get(number, 1)
        for _ in range(self.length if times else 0):
            time.sleep(self.waits * draw.uniform(0.5, 1.5) * times)
            yield torch.zeros(8)


class Remembering(IterableDataset[Any]):
    """A stream whose state takes long to make: a list of `size` numbers."""

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
    """A dataset that keeps memory for each sample."""

    kept: list[Any]

    def __getitem__(self, index: int) -> Any:
        self.kept = [*getattr(self, "kept", []), np.ones(1 << 19)]  # 4 MB
        return super().__getitem__(index)


class Oversize(Planted):
    """Samples of 64 KiB; those of 1 batch of 10, of 8 samples, have 1 MiB."""

    def __getitem__(self, index: int) -> Any:
        self.nbytes = 1 << 16 if index // 8 % 10 else 1 << 20
        return super().__getitem__(index)


@contextmanager
def holding() -> Generator[None]:
    """Have a thread hold the GIL most of the time, as a trainer's own Python code beside the loop does."""
    numbers, over = list(range(300_000)), threading.Event()

    def run() -> None:
        while not over.is_set():
            sum(numbers)  # one call into C, which does not release the GIL

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def neighbours() -> Generator[None]:
    """Run other programs that compute all the time, one for each CPU."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(usable_cpus())]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


@contextmanager
def throttled() -> Generator[None]:
    """Allow six tenths of a CPU to this process and its children, by a control group. Needs root."""
    group, before = Path("/sys/fs/cgroup/cpu/asyncloader-verdicts"), Path("/sys/fs/cgroup/cpu")
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text("60000")
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        raise CannotPlant(f"no control group can be made: {error}") from error
    try:
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (before / "cgroup.procs").write_text(pid)
        group.rmdir()


@contextmanager
def storing(fill: Callable[[HttpStore], None]) -> Generator[str]:
    """Run an HTTP store in a thread of its own. Gives its URL."""
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        store = asyncio.run_coroutine_threadsafe(stack.enter_async_context(serving()), loop).result()
        fill(store)
        yield store.url
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def failing(store: HttpStore) -> None:
    """Put 24 objects there, and refuse one to three requests before each that is answered."""
    draw = random.Random(21)

    async def answers(_: HttpStore, __: web.Request) -> None:
        return None

    for number in range(24):
        store.put(f"{number:02d}.jsonl", b'{"n": 1}\n' * 16)
        for _ in range(1000):
            store.faults[f"{number:02d}.jsonl"].extend([*[status(503)] * draw.randint(1, 3), answers])


def limited(store: HttpStore) -> None:
    """Put 48 objects of 1 MiB there, and let each connection carry 2 MB/s, after 100 ms."""

    async def slow(_: HttpStore, request: web.Request) -> web.StreamResponse | None:
        if request.method == "HEAD":
            return None
        whole = store.answer(request, request.path[1:])
        data = bytes(whole.body)  # type: ignore[arg-type]
        response = web.StreamResponse(status=whole.status, headers=whole.headers)
        await asyncio.sleep(0.1)
        with suppress(ConnectionError):  # the reader has left
            await response.prepare(request)
            for at in range(0, len(data), 1 << 15):
                await asyncio.sleep((1 << 15) / 2e6)
                await response.write(data[at : at + (1 << 15)])
            await response.write_eof()
        return response

    for number in range(48):
        store.put(f"{number:02d}.jsonl", b'{"n": "%s"}\n' % (b"x" * 1014) * 1024)
        store.faults[f"{number:02d}.jsonl"].extend([slow] * 1000)


@contextmanager
def shards(*samples: int) -> Generator[str]:
    """Write gzipped JSON lines, which cannot be cut: a shard for each number of samples. Gives their folder."""
    with TemporaryDirectory(prefix="asyncloader-verdicts-") as folder:
        for number, count in enumerate(samples):
            (Path(folder) / f"{number:02d}.jsonl.gz").write_bytes(gzip.compress(b'{"n": 1}\n' * count, 1))
        yield folder


FILES = 128


@contextmanager
def files() -> Generator[str]:
    """Write `FILES` files of 1 MiB. Gives their folder."""
    with TemporaryDirectory(prefix="asyncloader-verdicts-") as folder:
        for number in range(FILES):
            with (Path(folder) / str(number)).open("wb") as file:
                file.write(os.urandom(1 << 20))
                os.fsync(file.fileno())  # only clean pages leave the cache
        yield folder


class Reading(Dataset[Any]):
    """Reads the files of `files`.

    Args:
        folder: theirs.
        cold: take each file out of the page cache before it is read.

    Raises:
        CannotPlant: cold files are read no slower than others.
    """

    def __init__(self, folder: str, *, cold: bool) -> None:
        self.folder, self.cold = folder, False
        warm_s = self._seconds()
        self.cold = cold
        if cold and (cold_s := self._seconds()) < 2 * warm_s:
            raise CannotPlant(f"a file takes {cold_s:.2g} s without the page cache, and {warm_s:.2g} s with it")

    def _seconds(self) -> float:
        ends = [time.perf_counter()]
        for index in range(FILES):
            self[index]
            ends.append(time.perf_counter())
        return statistics.median(end - begin for begin, end in pairwise(ends))

    def __len__(self) -> int:
        return 800_000

    def __getitem__(self, index: int) -> Any:
        with (Path(self.folder) / str(index % FILES)).open("rb", buffering=0) as file:
            if self.cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return torch.zeros(64, dtype=torch.uint8) + file.read()[index % 1024]


def slow_collate(samples: list[Any]) -> Any:
    """Compute 20 ms for a batch."""
    spin(0.02)
    return torch.stack(samples)


def nothing(_: Any) -> None:
    """A consumer that takes no time."""


def sleeps(seconds: float) -> Callable[[Any], Any]:
    """Return a consumer that waits for this time with each batch, as for a GPU; or a `decode`, as for a service."""

    def waits(given: Any) -> Any:
        time.sleep(seconds)
        return given

    return waits


def transfers(batch: Any) -> None:
    """A consumer that copies each batch and waits for the copy, as for one to a device."""
    batch.clone()
    time.sleep(0.01)


class Pauses:
    """A consumer that takes 2 ms, and each 64th time 0.3 s, as where it saves or evaluates."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, _: Any) -> None:
        self.batches += 1
        time.sleep(0.002 if self.batches % 64 else 0.3)


def multiplies(_: Any) -> None:
    """A consumer that computes in torch's threads."""
    matrix = torch.ones(320, 320)
    for _ in range(6):
        matrix = matrix @ matrix
