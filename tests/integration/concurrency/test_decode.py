"""`decode`: a function applied to each sample between reading and collation, in threads where reading is concurrent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from asyncloader import DataLoader, Recovery, Tuning, sample_rng
from tests.helpers.comparing import assert_same
from tests.helpers.running import BOTH, outcomes
from tests.integration.concurrency.test_samples_in_flight import collect

WORKERS = [0, 1, 2]


class Map(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return index


class AsyncMap(Map):
    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0)
        return index


class Whole(Map):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return list(indices)


class AsyncWhole(Map):
    async def __getitems__(self, indices: list[int]) -> list[int]:
        await asyncio.sleep(0)
        return list(indices)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


class AsyncStream:
    async def __aiter__(self) -> AsyncIterator[int]:
        for number in range(24):
            await asyncio.sleep(0)
            yield number


MAPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "blocking": (Map(), {}),
    "blocking, whole batches": (Whole(), {}),
    "view of whole batches": (Subset(Whole(), list(range(24))), {}),
    "threads": (Map(), {"concurrency": 3}),
    "threads, whole batches": (Whole(), {"concurrency": 3}),
    "async": (AsyncMap(), {}),
    "async, whole batches": (AsyncWhole(), {}),
}
STREAMS: dict[str, tuple[Any, dict[str, Any]]] = {"stream": (Stream(), {}), "async stream": (AsyncStream(), {})}
EVERY = MAPS | STREAMS


def hundred(sample: int) -> torch.Tensor:
    return torch.tensor(100 + sample)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("threads", [0, 1, 4])
@pytest.mark.parametrize("name", MAPS)
def test_every_sample_is_decoded_once(kind: str, workers: int, threads: int, name: str) -> None:
    """Each sample is decoded before collation, in order, with batching and without."""
    dataset, more = MAPS[name]
    options: dict[str, Any] = {
        **more,
        "num_workers": workers,
        "decode": hundred,
        "tuning": Tuning(decode_threads=threads),
    }
    got = collect(kind, dataset, batch_size=5, **options)
    assert [batch.tolist() for batch in got] == [list(range(100 + i, min(105 + i, 124))) for i in range(0, 24, 5)]
    if "whole" not in name:
        got = collect(kind, dataset, batch_size=None, **options)
        assert [int(sample) for sample in got] == list(range(100, 124))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("threads", [0, 4])
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("options", [{"batch_size": 5}, {"batch_size": 5, "drop_last": True}, {"batch_size": None}])
def test_streams_are_decoded(kind: str, workers: int, threads: int, name: str, options: dict[str, Any]) -> None:
    """The batches are those of a stream that gives decoded samples."""
    dataset, _ = STREAMS[name]
    got = collect(kind, dataset, num_workers=workers, decode=hundred, tuning=Tuning(decode_threads=threads), **options)
    numbers = [number for batch in got for number in torch.as_tensor(batch).reshape(-1).tolist()]
    assert numbers == list(range(100, 120 if options.get("drop_last") else 124))


def where(sample: Any) -> Any:
    return torch.tensor([threading.current_thread().name.startswith("asyncloader-decode")])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("name", EVERY)
def test_where_it_runs(workers: int, threads: int, name: str) -> None:
    """`decode` runs in threads of its own where the loop can read on during it, elsewhere inline."""
    dataset, options = EVERY[name]
    concurrent = "async" in name or "threads" in name
    got = collect(
        "sync",
        dataset,
        batch_size=6,
        num_workers=workers,
        decode=where,
        tuning=Tuning(decode_threads=threads),
        **options,
    )
    assert torch.cat(got).tolist() == [[bool(threads) and concurrent]] * 24


class Meets:
    """No sample is decoded before three samples are being decoded."""

    def __init__(self) -> None:
        self.barrier: threading.Barrier | None = None

    def __call__(self, sample: Any) -> Any:
        with _lock:
            if self.barrier is None:
                self.barrier = threading.Barrier(3)
        self.barrier.wait(30)
        return sample


_lock = threading.Lock()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", ["async", "async, whole batches", "threads", "threads, whole batches", "async stream"])
def test_several_samples_are_decoded_at_a_time(workers: int, name: str) -> None:
    """Samples of a batch, and of a stream, are decoded in `decode_threads` threads."""
    dataset, options = EVERY[name]
    got = collect(
        "sync", dataset, batch_size=6, num_workers=workers, decode=Meets(), tuning=Tuning(decode_threads=3), **options
    )
    assert torch.cat(got).tolist() == list(range(24))


class Reads(Dataset[Any]):
    """`all_read` is set when all samples have been read; decoding the first sample waits for it."""

    def __init__(self) -> None:
        self.read = 0
        self.all_read = threading.Event()

    def __len__(self) -> int:
        return 12

    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0)
        self.read += 1
        if self.read == 12:
            self.all_read.set()
        return index


def test_reads_go_on_while_a_sample_is_decoded() -> None:
    """A long decoding does not hold up the loop."""
    dataset = Reads()

    def decode(sample: int) -> int:
        assert dataset.all_read.wait(30)
        return sample

    with DataLoader[Any](dataset, batch_size=4, decode=decode) as loader:
        assert torch.cat(list(loader)).tolist() == list(range(12))


def augment(sample: int) -> torch.Tensor:
    rng = sample_rng()
    return torch.tensor([float(sample), rng.random.random(), float(torch.rand((), generator=rng.torch))])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("name", MAPS)
def test_seeded_decoding_draws_its_samples_numbers(kind: str, name: str) -> None:
    """`sample_rng()` in `decode` depends on the sample's position only: not on the thread or the dataset's kind."""
    options: dict[str, Any] = {"batch_size": 5, "seed": 6, "shuffle": True, "decode": augment}
    expected = collect(kind, Map(), **options)
    dataset, more = MAPS[name]
    for workers in WORKERS:
        for threads in (0, 3):
            got = collect(kind, dataset, num_workers=workers, tuning=Tuning(decode_threads=threads), **more, **options)
            assert_same(got, expected)


@pytest.mark.parametrize("workers", [0, 1])
def test_seeded_streams_draw_the_same_numbers(workers: int) -> None:
    """A stream's sample draws the numbers of its position, blocking or async, in threads or not."""
    options: dict[str, Any] = {"batch_size": 5, "seed": 6, "decode": augment, "num_workers": workers}
    expected = collect("sync", Stream(), **options)
    for threads in (0, 3):
        assert_same(collect("sync", AsyncStream(), tuning=Tuning(decode_threads=threads), **options), expected)


def ends(sample: int) -> int:
    """Raise as ``asyncio.run(anext(iterator))`` does when the iterator is exhausted."""
    if sample == 5:
        raise StopAsyncIteration
    return sample


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("threads", [0, 2])
def test_an_end_inside_decode_is_no_end_of_the_stream(threads: int, workers: int) -> None:
    """A StopAsyncIteration raised in `decode` becomes an error of its sample."""
    options: dict[str, Any] = {
        "batch_size": 4,
        "num_workers": workers,
        "decode": ends,
        "tuning": Tuning(decode_threads=threads),
    }
    dataset: Any = AsyncStream()
    with DataLoader[Any](dataset, **options) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1, 2, 3]
        with pytest.raises(RuntimeError, match="raised StopAsyncIteration"):
            next(batches)


def picky(sample: int) -> int:
    if sample in (7, 12):
        raise ValueError(f"bad {sample}")
    return sample


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("name", MAPS)
def test_an_error_is_the_samples(kind: str, workers: int, threads: int, name: str) -> None:
    """The error is raised instead of its batch, with a note that names the sample."""
    dataset, more = MAPS[name]
    options: dict[str, Any] = {**more, "batch_size": 4, "num_workers": workers}
    options |= {"decode": picky, "tuning": Tuning(decode_threads=threads)}
    kinds = [each[0] if isinstance(each, tuple) else each.tolist() for each in outcomes(kind, dataset, **options)]
    assert kinds == [[0, 1, 2, 3], ValueError, [8, 9, 10, 11], ValueError, [16, 17, 18, 19], [20, 21, 22, 23]]
    with pytest.raises(ValueError, match="bad 7") as raised, DataLoader[Any](dataset, **options) as loader:
        list(loader)
    assert any("sample index 7 (item 3 of the batch)" in note for note in raised.value.__notes__)


def minus_one(index: Any, error: Exception) -> int:
    return -1


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("name", EVERY)
def test_samples_that_do_not_decode_are_left_out(workers: int, threads: int, name: str) -> None:
    """`on_error` treats samples that cannot be decoded like samples that cannot be read, and records them."""
    dataset, more = EVERY[name]
    options: dict[str, Any] = {**more, "batch_size": 4, "num_workers": workers}
    options |= {"decode": picky, "tuning": Tuning(decode_threads=threads)}
    with DataLoader[Any](dataset, on_error="skip", **options) as loader:
        got = [batch.tolist() for batch in loader]
        assert got == [[0, 1, 2, 3], [4, 5, 6], [8, 9, 10, 11], [13, 14, 15], [16, 17, 18, 19], [20, 21, 22, 23]]
        bad = [record.index if record.index is not None else record.position for record in loader.skipped_samples]
        assert bad == [7, 12]
    got = collect("sync", dataset, on_error=minus_one, **options)
    assert torch.cat(got).tolist() == [-1 if number in (7, 12) else number for number in range(24)]


@pytest.mark.parametrize("threads", [0, 2])
def test_a_streams_substitute_has_the_samples_numbers(threads: int) -> None:
    """The numbers that `on_error` draws for a sample that cannot be decoded depend on that sample's position only."""

    def substitute(index: Any, error: Exception) -> Any:
        return torch.tensor(sample_rng().random.random())

    def decode(sample: int) -> Any:
        return torch.tensor(float(picky(sample)))

    options: dict[str, Any] = {"batch_size": 4, "seed": 2, "decode": decode, "on_error": substitute}
    expected = collect("sync", Stream(), **options)
    assert_same(collect("sync", AsyncStream(), tuning=Tuning(decode_threads=threads), **options), expected)


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_resumes_behind_what_was_delivered(name: str) -> None:
    """Samples that were read and decoded, but not delivered, are read again after a resume."""
    dataset, _ = STREAMS[name]
    options: dict[str, Any] = {
        "batch_size": 4,
        "num_workers": 1,
        "decode": hundred,
        "recovery": Recovery(allow_replay=True),
    }
    with DataLoader[Any](dataset, **options) as loader:
        batches = iter(loader)
        for _ in range(2):
            next(batches)
        state = loader.state_dict()
    assert [batch.tolist()[0] for batch in collect("sync", dataset, state, **options)] == [108, 112, 116, 120]
