"""Cases of `python -m tests.stress --interrupted`: what is read, what fails, and when. One seed is one case.

A fault waits until the consumer arms it, and strikes once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from aiohttp import web
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import asyncloader as al
from asyncloader.transports import ReadFailed, RetryPolicy
from tests.helpers.http_store import HttpStore, broken, serving, status
from tests.unit.remote.shards import MAKERS, mds_index, number_of

OWN = ("map", "async map", "stream", "declared streams")
REMOTE = ("plain", "fixed", "mixture", "random access", "packed")
TIED = ("plain", "stream")  # their batches, and states, depend on the number of workers
SHARDS, EACH = 5, 12
COUNT = SHARDS * EACH
TABLE = range(1000, 1020)
PATIENT = RetryPolicy(budget_s=0.4, first_contact_s=0.4, first_delay_s=0.02)


class Case(SimpleNamespace):
    """The values that `draw` gives, by name."""

    def having(self, *_: str) -> list[Any]:
        """No fault of the chaos runner's."""
        return []


def draw(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    what, workers = rng.choice(OWN + REMOTE), rng.choice([0, 0, 1, 3])
    loader = rng.choice(["sync", "sync", "asyncio", "uvloop"])
    seeded = what in ("fixed", "mixture", "packed") or rng.random() < 0.6
    shared = seeded and what not in (*TIED, "declared streams", "packed")  # by ranks
    failures = ["store", "store", "ctrl-c", "ctrl-c", "disk"] + ["kill"] * 2 * bool(workers)
    failures += ["cancel"] * 2 * (loader != "sync") + ["rank"] * shared
    failure, moment = rng.choice(failures), rng.choice(["planning", "first", "middle", "last", "between"])
    triggers = {
        "store": ["sample"] if what in OWN else ["take", "take", "request"],
        "ctrl-c": ["sample", "timer", "timer"] + ["request"] * (what in REMOTE),
        "kill": ["take", "sample"] + ["start"] * (moment in ("planning", "between")),
        "cancel": ["ticks", "timer"],
    }
    threads = ["threads"] * 3 * (failure not in ("kill", "rank"))
    more: list[dict[str, Any]] = [{}, {}]
    more += [{"prefetch_factor": 5}] if workers else []
    more += [{"concurrency": 3}] if what in ("map", "async map", "random access") else []
    return Case(
        seed=seed,
        what=what,
        loader=loader,
        workers=workers,
        seeded=seeded,
        method="fork" if not workers else rng.choice(["fork"] * 12 + ["spawn", "forkserver"] + threads),
        more=rng.choice(more),
        batch_size=8 if what == "packed" else 4 if failure == "rank" else rng.choice([1, 4, 7]),
        shuffle=rng.random() < 0.6,
        ending=rng.choice(["jsonl", "jsonl", "tar", "mds", "parquet", "tfrecord", "jsonl.gz"]),
        caches=rng.random() < (0.7 if failure == "disk" else 0.2),
        failure=failure,
        trigger=rng.choice(triggers.get(failure, ["take"])),
        moment=moment,
        epoch=1 if moment == "between" else rng.choice([0, 0, 1]),  # that fails
        place={"middle": rng.uniform(0.1, 0.9), "last": 1.0}.get(moment, 0.0),  # in that epoch
        resumed=rng.choice([None, None, rng.random()]),  # the place of a state from which that epoch goes on
        number=rng.choice([0, 1, 2, 3, 5, 10, 30, 100]),  # of ticks, requests, a worker
        delay=10 ** rng.uniform(-4.5, -1.2),
        lasting=rng.random() < 0.8,  # until the consumer gets the error
        breaks=rng.random() < 0.5,  # the store breaks connections, and does not answer 503
        then=rng.choice(["retry", "retry", "loop", "state"]),
        next_workers=workers if what in TIED else rng.choice([0, 1, 2, 3]),
        persistent=bool(workers) and rng.random() < 0.5,
        restarts=rng.choice([None, None, 2]),
        closes=rng.random() < 0.8,
    )


# ------------------------------------------------------------------------------------------- what fails


class Flags:
    """What all processes of a case know: "armed", "down", "struck". Files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, name: str) -> bool:
        return (self.folder / name).exists()

    def __setitem__(self, name: str, value: bool) -> None:
        (self.folder / name).touch() if value else (self.folder / name).unlink(missing_ok=True)

    def strikes(self) -> bool:
        """Whether the fault strikes now: armed, and the first of all processes to come here."""
        with contextlib.suppress(FileExistsError):
            if self["armed"]:
                (self.folder / "struck").touch(exist_ok=False)
                return True
        return False


class Hook:
    """Called with each sample's number, and when a worker starts; at the sample `target` a fault strikes."""

    def __init__(self, case: Case, flags: Flags, target: int = -1) -> None:
        self.case, self.flags, self.target, self.main = case, flags, target, os.getpid()

    def __call__(self, number: int) -> None:
        case = self.case
        if number != self.target or case.trigger != "sample" or (case.failure == "kill" and os.getpid() == self.main):
            return
        if self.flags.strikes():
            if case.failure == "ctrl-c":
                os.kill(self.main, signal.SIGINT)
            elif case.failure == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                self.flags["down"] = case.lasting
                raise ReadFailed("the store is away")
        elif self.flags["down"]:
            raise ReadFailed("the store is still away")

    def init(self, _: int) -> None:
        """A `worker_init_fn`."""
        if os.getpid() != self.main:  # streams have it in the main process, too
            self.flags[f"worker.{os.getpid()}"] = True
            if self.case.trigger == "start" and self.flags.strikes():
                os.kill(os.getpid(), signal.SIGKILL)

    def made(self, number: int) -> torch.Tensor:
        """The sample: its number, and in seeded mode a number that is drawn."""
        self(number)
        return torch.tensor([number, al.sample_rng().random.randrange(1 << 30) if self.case.seeded else 0])

    def decode(self, sample: Any) -> Any:
        """The loader's `decode`: of a dataset of shards, or of the mixture's table."""
        number = number_of(sample) if isinstance(sample, dict) else int(sample)
        if self.case.what == "packed":
            self(number)
            return np.full(1 + number % 9, number, np.int32)
        return self.made(number)


class Server(HttpStore):
    """The store. It fails while its flag is down, and where the fault is due at a request."""

    def __init__(self, case: Case, flags: Flags, main: int) -> None:
        super().__init__()
        self.case, self.flags, self.main, self.since = case, flags, main, 0
        made = [MAKERS[f"a.{case.ending}"](range(EACH * each, EACH * (each + 1))) for each in range(SHARDS)]
        for number, data in enumerate(made):
            self.put(f"shard.{number:05d}.{case.ending}", data)
        if case.ending == "mds":
            self.put("index.json", mds_index(*made, counts=[EACH] * SHARDS))

    async def handle(self, request: web.Request) -> web.StreamResponse:
        case, flags = self.case, self.flags
        if flags["armed"] and case.trigger == "request":
            self.since += 1
            if self.since > case.number % 12 and flags.strikes():
                if case.failure == "ctrl-c":
                    os.kill(self.main, signal.SIGINT)
                else:
                    flags["down"] = case.lasting
                    return web.Response(status=503)
        if flags["down"]:
            flags["struck"] = True
            fault = broken(case.number - 1) if case.breaks else status(503)
            return await fault(self, request) or web.Response(status=503)
        return await super().handle(request)


def start_server(case: Case, flags: Flags) -> tuple[int, str]:
    """Fork a process that serves the case's shards: its pid, and the URL."""
    (read, write), main = os.pipe(), os.getpid()
    pid = os.fork()
    if pid == 0:
        store = Server(case, flags, main)

        async def serve() -> None:
            async with serving(store=store):
                os.write(write, store.url.encode())
                os.close(write)
                await asyncio.Event().wait()

        try:
            asyncio.run(serve())
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read) as file:
        return pid, file.read()


# ------------------------------------------------------------------------------------------- what is read


class Map(Dataset[Any]):
    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self.hook.made(index)


class AsyncMap(Map):
    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0)
        return self.hook.made(index)


class Numbers(Iterator[Any]):
    """A worker's, or a stream's, share. Goes on after an error at the same sample, and has a state."""

    def __init__(self, hook: Hook) -> None:
        info = get_worker_info()
        self.first, self.step = (0, 1) if info is None else (info.id, info.num_workers)
        self.hook, self.at = hook, 0

    def __next__(self) -> Any:
        number = self.first + self.step * self.at
        if number >= COUNT:
            raise StopIteration
        made = self.hook.made(number)
        self.at += 1
        return made

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Stream(IterableDataset[Any]):
    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __iter__(self) -> Iterator[Any]:
        return Numbers(self.hook)


class DeclaredStreams(Stream):
    loader_streams = 3


DATASETS: dict[str, Any] = {"map": Map, "async map": AsyncMap, "stream": Stream, "declared streams": DeclaredStreams}


def make_loader(case: Case, hook: Hook, url: str, cache: Path, workers: int, kind: str, **options: Any) -> Any:
    """The case's loader, with this number of workers, and of this kind."""
    options = {"batch_size": case.batch_size, "recovery": al.Recovery(allow_replay=True), **options}
    options |= {"num_workers": workers, "worker_init_fn": hook.init, "seed": case.seed if case.seeded else None}
    urls: Any = f"{url}/" if case.ending == "mds" else [f"{url}/shard.{n:05d}.{case.ending}" for n in range(SHARDS)]
    reading: dict[str, Any] = {"storage_options": {"retry": PATIENT}, "cache_dir": cache if case.caches else None}
    if case.what in OWN:
        dataset = DATASETS[case.what](hook)
    elif case.what == "random access":
        dataset = al.RemoteMapDataset(urls, **reading)
    else:
        reading |= {} if case.what == "plain" else {"streams": 2}
        dataset = al.RemoteIterableDataset(urls, shuffle_buffer=8 if case.shuffle else 0, **reading)
    if case.what == "mixture":
        dataset = al.Mixture([dataset, TABLE], [2, 1])
    if case.what in REMOTE:
        options["decode"] = hook.decode
    if case.what in ("map", "async map", "random access"):
        options["shuffle"] = case.shuffle
    if case.what == "packed":
        options["collate_fn"] = al.JoinSequences(max_tokens=16)
    if workers:
        options |= {"persistent_workers": case.persistent, "max_worker_restarts": case.restarts}
        where = "workers" if case.method == "threads" else "multiprocessing_context"
        options[where] = case.method
    if workers or "prefetch_factor" not in case.more:
        options |= case.more
    loader: Any = (al.DataLoader if kind == "sync" else al.AsyncDataLoader)(dataset, **options)
    return al.PackedLoader(loader) if case.what == "packed" else loader


def plain(case: Case, batch: Any) -> list[Any]:
    """A batch as a list of its samples; a row, of its tokens."""
    return list(batch["tokens"].tolist()) if case.what == "packed" else [tuple(each) for each in batch.tolist()]


def is_whole(case: Case, batches: list[list[Any]]) -> bool:
    """Whether these are the samples of an epoch."""
    if case.what == "mixture":
        return sum(map(len, batches)) == COUNT + len(TABLE)
    if case.what == "packed":
        return sorted(chain(*batches)) == [number for number in range(COUNT) for _ in range(1 + number % 9)]
    return sorted(number for batch in batches for number, _ in batch) == [*range(COUNT)]
