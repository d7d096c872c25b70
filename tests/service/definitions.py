"""The definitions that the tests' nodes serve."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import asyncloader


class Pair(NamedTuple):
    """A registered batch type."""

    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Box:
    """A batch type that is not registered."""

    x: torch.Tensor


asyncloader.register_batch_type(Pair)


class Numbers(Dataset[Any]):
    """Samples that depend on the index and on the sample's random numbers."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return {
            "index": index,
            "noise": torch.full((50,), float(index)) + torch.rand(50),
            "array": np.random.rand(3),
            "name": f"sample {index}",
        }


@asyncloader.definition
def numbers(n: int = 40) -> Any:
    """A blocking map dataset."""
    return Numbers(n)


@asyncloader.definition
def with_functions(n: int = 40) -> Any:
    """A blocking map dataset with functions of its own."""
    return Numbers(n), {"collate_fn": as_pair, "worker_init_fn": note_worker, "decode": doubled}


def as_pair(samples: list[Any]) -> Pair:
    """Put samples together."""
    return Pair(torch.tensor([each["index"] for each in samples]), torch.stack([each["noise"] for each in samples]))


def doubled(sample: Any) -> Any:
    """The user's `decode`."""
    return {**sample, "noise": 2 * sample["noise"]}


_begun: list[int] = []


def note_worker(worker: int) -> None:
    """The user's `worker_init_fn`."""
    _begun.append(worker)


class Drawn(Numbers):
    """Samples that depend on the sample's own generators only, so that threads may read them."""

    def __getitem__(self, index: int) -> Any:
        return {"index": index, "noise": torch.rand(50, generator=asyncloader.sample_rng().torch)}


@asyncloader.definition
def drawn(n: int = 40) -> Any:
    """A blocking map dataset that can be read in threads."""
    return Drawn(n)


class Awaited(Numbers):
    """Samples that are awaited, and depend on the sample's own generators only."""

    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0)
        return {"index": index, "noise": torch.rand(50, generator=asyncloader.sample_rng().torch)}


@asyncloader.definition
def awaited(n: int = 40) -> Any:
    """An asynchronous map dataset."""
    return Awaited(n)


@asyncloader.definition
def awaited_with_functions(n: int = 40) -> Any:
    """An asynchronous map dataset, collated by a function that draws random numbers."""
    return Awaited(n), {"collate_fn": with_noise}


def with_noise(samples: list[Any]) -> torch.Tensor:
    """Put samples together, and add random numbers from the process's generator."""
    return torch.stack([each["noise"] for each in samples]) + torch.rand(50)


class Stream(IterableDataset[Any]):
    """A stateful stream, of which each worker reads its part."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        while self.at * step + first < self.n:
            self.at += 1
            yield (self.at - 1) * step + first + float(torch.rand(()))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@asyncloader.definition
def stream(n: int = 41) -> Any:
    """A stateful stream."""
    return Stream(n)


class AsyncStream:
    """An asynchronous stream: its part depends on the worker's number, which it asks for late."""

    def __init__(self, n: int) -> None:
        self.n = n

    async def __aiter__(self) -> AsyncIterator[int]:
        await asyncio.sleep(0)
        info = get_worker_info()
        assert info is not None
        for index in range(info.id, self.n, info.num_workers):
            await asyncio.sleep(0)
            yield index


@asyncloader.definition
def async_stream(n: int = 41) -> Any:
    """An asynchronous stream."""
    return AsyncStream(n)


class Broken(Numbers):
    """A dataset of which some samples raise."""

    def __getitem__(self, index: int) -> Any:
        if index % 10 == 7:
            raise OddError(f"sample {index}")
        if index % 10 == 8:
            raise KeyError(index)
        return super().__getitem__(index)


class OddError(Exception):
    """An error type that the loader's process must not make."""


@asyncloader.definition
def broken(n: int = 40) -> Any:
    """A dataset whose samples raise."""
    return Broken(n)


class Deadly(Numbers):
    """A dataset with a sample that kills its process: once if there is a folder for a mark, else always."""

    def __init__(self, n: int, marks: str) -> None:
        super().__init__(n)
        self.marks = marks

    def __getitem__(self, index: int) -> Any:
        if index == 13:
            mark = Path(self.marks) / "struck"
            if not self.marks or not mark.exists():
                if self.marks:
                    mark.touch()
                os.kill(os.getpid(), signal.SIGKILL if self.marks else signal.SIGSEGV)
        return super().__getitem__(index)


@asyncloader.definition
def flushing(marks: str = "") -> Any:
    """A dataset that its process writes out at its end, which takes a while."""
    if marks:
        Finalize(None, _flush, (marks,), exitpriority=0)
    return Numbers(4)


def _flush(marks: str) -> None:
    (Path(marks) / f"{os.getpid()}.begun").touch()
    time.sleep(0.3)
    (Path(marks) / f"{os.getpid()}.ended").touch()


@asyncloader.definition
def deadly(n: int = 40, marks: str = "") -> Any:
    """A dataset with a sample that kills its process."""
    return Deadly(n, marks)


class Hanging(Numbers):
    """A dataset with a sample that never returns, once. If a FIFO called "gate" exists, it returns when that is
    written.
    """

    def __init__(self, n: int, marks: str) -> None:
        super().__init__(n)
        self.marks = marks

    def __getitem__(self, index: int) -> Any:
        mark = Path(self.marks) / "hung"
        if index == 13 and not mark.exists():
            mark.touch()
            gate = mark.with_name("gate")
            if gate.exists():
                gate.read_bytes()
            else:
                threading.Event().wait()
        return super().__getitem__(index)


@asyncloader.definition
def hanging(n: int = 40, marks: str = "") -> Any:
    """A dataset with a sample that hangs once."""
    return Hanging(n, marks)


@asyncloader.definition
def impossible() -> Any:
    """A definition that raises."""
    raise OSError("no disk")


class OnDisk(Numbers):
    """Samples that contain the id of the process that made them."""

    def __getitem__(self, index: int) -> Any:
        return index, os.getpid()


@asyncloader.definition
def on_disk(root: str = "", n: int = 40) -> Any:
    """A dataset that can be made while the folder exists."""
    if not Path(root).is_dir():
        raise OSError(f"no disk\n\x1b[2J{root}")
    return OnDisk(n)


@asyncloader.definition
def slow_for_one(mark: str) -> Any:
    """A dataset that the first process never finishes making."""
    with suppress(FileExistsError):
        Path(mark).touch(exist_ok=False)
        threading.Event().wait()
    return OnDisk(40)


@asyncloader.definition
def fatal() -> Any:
    """A definition that kills its process."""
    os.kill(os.getpid(), signal.SIGKILL)


@asyncloader.definition
def leaving() -> Any:
    """A definition that ends its program."""
    raise SystemExit("wrong flags")


class Endless(Dataset[Any]):
    """A map dataset without a length."""

    def __getitem__(self, index: int) -> Any:
        return index


@asyncloader.definition
def endless() -> Any:
    """A dataset of which no order can be made."""
    return Endless()


class Odd(Numbers):
    """A dataset with samples of a type that no service sends, and of a type that is not registered."""

    def __getitem__(self, index: int) -> Any:
        return {"box": Box(torch.zeros(2))} if index % 2 else {"deep": [object()]}


@asyncloader.definition
def odd() -> Any:
    """A dataset whose batches cannot be sent."""
    return Odd(4), {"collate_fn": first}


def first(samples: list[Any]) -> Any:
    """A batch of one sample."""
    return samples[0]


@asyncloader.definition
def shards(folder: str, shuffle: int = 0) -> Any:
    """Shards whose ranges the loader assigns."""
    return asyncloader.RemoteIterableDataset(f"{folder}/", shuffle_buffer=shuffle), {"decode": number_of}


@asyncloader.definition
def fixed_streams(folder: str, shuffle: int = 0) -> Any:
    """Fixed streams of shards of any format."""
    dataset = asyncloader.RemoteIterableDataset(f"{folder}/", shuffle_buffer=shuffle, streams=2)
    return dataset, {"decode": number_of_any}


def number_of_any(sample: Any) -> int:
    """Return a sample's number."""
    return fields_of(sample)[0]


@asyncloader.definition
def files(folder: str) -> Any:
    """Shards of any format, which are decoded to the numbers that their samples were made of."""
    return asyncloader.RemoteIterableDataset(f"{folder}/"), {"decode": fields_of}


@asyncloader.definition
def table(kind: str, folder: str) -> Any:
    """A folder of LitData or Lance, whose samples become text."""
    from tests.helpers.package_tables import open_table, texts_of  # not in each process of each node

    return open_table(kind, folder), {"collate_fn": texts_of}


@asyncloader.definition
def listed_files(urls: list[str], cache_dir: str) -> Any:
    """Shards of any format, read through a cache."""
    return asyncloader.RemoteIterableDataset(urls, cache_dir=cache_dir), {"decode": fields_of}


def fields_of(sample: Any) -> tuple[int, str]:
    """Return a sample's number, and its fields as text."""
    number = int(sample["n"] if "n" in sample else sample["record"])
    return number, repr({name: value for name, value in sample.items() if name != "__url__"})


@asyncloader.definition
def unlucky_files(folder: str) -> Any:
    """Shards of any format with a sample that cannot be decoded."""
    return asyncloader.RemoteIterableDataset(f"{folder}/"), {"decode": unlucky_fields_of}


def unlucky_fields_of(sample: Any) -> tuple[int, str]:
    """Return a sample's number and its fields; number 13 raises."""
    number, fields = fields_of(sample)
    if number == 13:
        raise ValueError("unlucky")
    return number, fields


@asyncloader.definition
def mapped_files(folder: str) -> Any:
    """The samples of shards of any format, each by its number."""
    return asyncloader.RemoteMapDataset(f"{folder}/"), {"decode": fields_of}


def number_of(sample: Any) -> float:
    """Return the sample's number plus a random part."""
    return int(sample["n"]) + float(torch.rand((), generator=asyncloader.sample_rng().torch))


class Large(Dataset[Any]):
    """A dataset whose batches outgrow their slots."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return torch.full((1 << min(8 + index, 22),), index, dtype=torch.uint8)


@asyncloader.definition
def large() -> Any:
    """Batches of very different sizes."""
    return Large()


class Wide(Numbers):
    """Samples of 16 MB, more than a connection's buffers hold."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((16 << 20,), index, dtype=torch.uint8)


@asyncloader.definition
def wide(n: int = 9) -> Any:
    """Large batches."""
    return Wide(n)


def hog(marks: str, worker: int) -> None:
    """Leave no descriptors to this process, once: not even its ring can be received."""
    del worker
    with suppress(FileExistsError):
        (Path(marks) / "hogged").touch(exist_ok=False)  # in one process, though two may come here at a time
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))


@asyncloader.definition
def hogging(marks: str = "") -> Any:
    """A blocking dataset with `hog` as its worker_init_fn."""
    return Numbers(20), {"worker_init_fn": partial(hog, marks)}


@asyncloader.definition
def awaited_hogging(marks: str = "") -> Any:
    """An asynchronous dataset with `hog` as its worker_init_fn."""
    return Awaited(20), {"worker_init_fn": partial(hog, marks)}
