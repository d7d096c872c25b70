"""`worker_resource` in real workers: whatever runs the dataset, what it opens is bounded, its own, and closed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset, IterableDataset

from asyncloader import AsyncDataLoader, DataLoader, get_worker_info, worker_resource
from tests.helpers.running import run_async

MAX, KEYS, LENGTH = 2, 5, 24


class Open:
    """An open object, which belongs to a process."""

    def __init__(self, key: int) -> None:
        self.key, self.pid, self.closed = key, os.getpid(), False

    def check(self, key: int) -> None:
        assert (self.key, self.pid, self.closed) == (key, os.getpid(), False)


class Counts:
    """The objects of this process: those that are open, and those who use one, or are about to."""

    lock = threading.Lock()
    open = users = pid = 0

    @classmethod
    def add(cls, *, open: int = 0, users: int = 0) -> None:
        with cls.lock:
            if cls.pid != os.getpid():  # forked
                cls.open, cls.users, cls.pid = 0, 0, os.getpid()
            cls.open += open
            cls.users += users


@contextmanager
def using() -> Generator[None]:
    Counts.add(users=1)
    try:
        yield
    finally:
        Counts.add(users=-1)


class Files:
    """The functions of the resource; each call adds a line to a file, in one write.

    Opening fails where more are open than `max` for each worker of this process, and in use.
    """

    workers = 1

    def __init__(self, log: Path) -> None:
        self.log = log

    def write(self, what: str, key: int) -> None:
        with self.log.open("a") as log:
            log.write(f"{what} {os.getpid()} {key}\n")

    def open(self, key: int) -> Open:
        if key < 0:
            raise FileNotFoundError(f"no video {key}")
        self.write("open", key)
        Counts.add(open=1)
        assert Counts.open <= MAX * self.workers + Counts.users
        return Open(key)

    def close(self, opened: Open) -> None:
        opened.check(opened.key)
        opened.closed = True
        Counts.add(open=-1)
        self.write("close", opened.key)

    def resource(self) -> Any:
        return worker_resource(self.open, self.close, max=MAX)


class Map(Dataset[int]):
    """Reads sample by sample. Index 13 kills its worker where a file says so; the keys of samples from 100 on fail."""

    def __init__(self, log: Path) -> None:
        self.files = Files(log).resource()
        self.kill = log.with_name("kill")

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        key = index % KEYS if index < 100 else -1
        with using(), self.files(key) as opened:
            opened.check(key)
            if index == 13 and self.kill.exists() and get_worker_info() is not None:
                self.kill.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            opened.check(key)
        return index


class AsyncMap(Dataset[int]):
    """Samples that are awaited while they use an object; the context keeps one object more."""

    def __init__(self, log: Path) -> None:
        self.files = Files(log).resource()

    def __len__(self) -> int:
        return LENGTH

    async def __aenter__(self) -> None:
        Counts.add(users=1)
        self.held = self.files(99)
        self.held.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.held.__exit__(None, None, None)
        Counts.add(users=-1)

    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        with using(), self.files(index % KEYS) as opened:
            await asyncio.sleep(0)
            opened.check(index % KEYS)
        return index


class Stream(IterableDataset[int]):
    """Stops in the middle of its objects."""

    def __init__(self, log: Path) -> None:
        self.files = Files(log).resource()

    def __iter__(self) -> Iterator[int]:
        for key in range(KEYS):
            with using(), self.files(key) as opened:
                for number in range(4):
                    opened.check(key)
                    yield number


class AsyncStream(IterableDataset[int]):
    """Ditto, awaited."""

    def __init__(self, log: Path) -> None:
        self.files = Files(log).resource()

    def __iter__(self) -> Iterator[int]:
        raise NotImplementedError

    async def __aiter__(self) -> AsyncIterator[int]:
        for key in range(KEYS):
            with using(), self.files(key) as opened:
                for number in range(4):
                    opened.check(key)
                    yield number


WAYS: dict[str, dict[str, Any]] = {
    "0": {"num_workers": 0},
    "0, concurrency": {"num_workers": 0, "concurrency": 3},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "forkserver": {"num_workers": 2, "multiprocessing_context": "forkserver"},
    "spawn": {"num_workers": 2, "multiprocessing_context": "spawn"},
    "persistent": {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
    "concurrency": {"num_workers": 2, "multiprocessing_context": "fork", "concurrency": 3},
    "threads": {"num_workers": 2, "workers": "threads"},
    "persistent threads": {"num_workers": 2, "workers": "threads", "persistent_workers": True},
}


def assert_closed(log: Path) -> Counter[str]:
    """Check that each process has closed what it opened. Returns how many objects each has opened."""
    opened: Counter[tuple[str, str]] = Counter()
    opens: Counter[str] = Counter()
    for line in log.read_text().splitlines():
        what, pid, key = line.split()
        opens[pid] += what == "open"
        opened[pid, key] += 1 if what == "open" else -1
    assert not +opened, "not closed"
    return opens


@pytest.mark.independent
@pytest.mark.parametrize("early", [False, True], ids=["to the end", "left early"])
@pytest.mark.parametrize("loader", ["for", "async for"])
@pytest.mark.parametrize("kind", [Map, AsyncMap, Stream, AsyncStream])
@pytest.mark.parametrize("way", WAYS)
def test_closed_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str, kind: type[Any], loader: str, early: bool
) -> None:
    """Two epochs, read to their end or left early: each worker, or iterator without workers, closes what it opened, in
    the process that opened it, and never has more open than `max` and in use.
    """
    options, log = WAYS[way], tmp_path / "log"
    # Workers that are threads are of one process.
    monkeypatch.setattr(Files, "workers", 2 if "workers" in options else 1)
    if "concurrency" in options and kind in (Stream, AsyncStream):
        pytest.skip("streams are read one sample after the other")
    if "concurrency" in options and early:
        pytest.skip("threads finish their samples after the end, or the process ends with them")

    def read() -> None:
        with DataLoader[Any](kind(log), batch_size=2, **options) as reading:
            for _ in range(2):
                for _ in reading:
                    if early:
                        break

    async def read_async() -> None:
        async with AsyncDataLoader[Any](kind(log), batch_size=2, **options) as reading:
            for _ in range(2):
                batches = aiter(reading)
                async for _ in batches:
                    if early:
                        break
                await batches.aclose()

    if loader == "for":
        read()
    else:
        run_async(read_async())
    opens = assert_closed(log)
    assert opens
    assert (str(os.getpid()) in opens) == (not options["num_workers"] or "workers" in options)
    assert early or min(opens.values()) >= KEYS or kind is AsyncMap


@pytest.mark.parametrize("kind", ["for", "async for"])
def test_a_killed_worker(tmp_path: Path, kind: str) -> None:
    """Its replacement opens its own objects; the others are not touched, and all samples come."""
    (tmp_path / "kill").touch()
    dataset = Map(tmp_path / "log")
    options: dict[str, Any] = {"num_workers": 2, "batch_size": 2, "multiprocessing_context": "fork", "seed": 1}
    options["max_worker_restarts"] = 1

    async def read() -> list[int]:
        async with AsyncDataLoader[Any](dataset, **options) as loader:
            return [int(each) async for batch in loader for each in batch]

    if kind == "for":
        with DataLoader[Any](dataset, **options) as loader:
            found = [int(each) for batch in loader for each in batch]
    else:
        found = run_async(read())
    assert found == list(range(LENGTH))
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    left = Counter(pid for what, pid, _ in lines if what == "open") - Counter(
        pid for what, pid, _ in lines if what == "close"
    )
    assert len({pid for _, pid, _ in lines}) == 3
    assert len(left) == 1  # the kernel has closed those of the worker that was killed


@pytest.mark.parametrize("way", ["0", "fork", "threads"])
def test_an_error_names_the_key(tmp_path: Path, way: str) -> None:
    """What `open` raises fails the sample, as any error of the dataset; the worker goes on, and closes the rest."""
    log = tmp_path / "log"
    with DataLoader[Any](Map(log), sampler=[0, 1, 100, 2], batch_size=1, **WAYS[way]) as loader:
        batches = iter(loader)
        assert [int(next(batches)) for _ in range(2)] == [0, 1]
        with pytest.raises(FileNotFoundError, match="no video -1") as caught:
            next(batches)
        assert "while opening -1 by Files.open" in "".join(caught.value.__notes__)
        assert int(next(batches)) == 2
        del batches
    assert_closed(log)


def test_objects_of_the_parent_are_not_the_workers(tmp_path: Path) -> None:
    """What the trainer opened before workers were forked stays open and its own."""
    dataset = Map(tmp_path / "log")
    with dataset.files(0) as mine:
        assert dataset[1] == 1
        with DataLoader[Any](dataset, batch_size=2, num_workers=1, multiprocessing_context="fork") as loader:
            assert sum(len(batch) for batch in loader) == LENGTH
        mine.check(0)
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert [what for what, pid, _ in lines if pid == str(os.getpid())] == ["open", "open"]
    assert len({pid for what, pid, _ in lines if what == "close"}) == 1
