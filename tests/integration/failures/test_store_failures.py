"""A store fails in mid-epoch, and the caller goes on: at the next call; with workers in another loop, from the state.
The same batch is tried again. None is lost, doubled or moved.

Each dataset of the user's own meets a transport's error at some samples, once in all processes together.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from asyncloader import AsyncDataLoader, DataLoader, LoaderError, Recovery
from asyncloader.transports import ReadFailed
from tests.helpers.seeded_runs import Stepwise

COUNT = 26
AWAY = (4, 9, 10, 25)
"""The samples at which the store fails, each once."""


class Store:
    """Fails at the samples of `AWAY` that no process has met yet; never without a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def read(self, index: int) -> int:
        if self.folder is not None and index in AWAY:
            try:
                (self.folder / str(index)).touch(exist_ok=False)
            except FileExistsError:
                return index
            raise ReadFailed(f"sample {index} is away")
        return index


class Map(Dataset[Any]):
    def __init__(self, store: Store) -> None:
        self.store = store

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self.store.read(index)


class Batched(Map):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self.store.read(index) for index in indices]


class Awaited(Map):
    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0)
        return self.store.read(index)


class Numbers(Iterator[int]):
    """Each worker's share of the samples. Goes on after an error, at the same sample."""

    def __init__(self, store: Store) -> None:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        self.store, self.left = store, list(range(first, COUNT, step))

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        number = self.store.read(self.left[0])
        del self.left[0]
        return number


class AwaitedNumbers(Numbers):
    def __aiter__(self) -> AsyncIterator[int]:
        return self

    async def __anext__(self) -> int:
        await asyncio.sleep(0)
        try:
            return next(self)
        except StopIteration:
            raise StopAsyncIteration from None


class Stream(IterableDataset[int]):
    def __init__(self, store: Store) -> None:
        self.store = store

    def __iter__(self) -> Iterator[int]:
        return Numbers(self.store)


class Streams(Stream):
    loader_streams = 3


class AwaitedStream(Stream):
    __iter__ = None  # type: ignore[assignment]

    def __aiter__(self) -> Any:
        return AwaitedNumbers(self.store)


class Generated(Stream):
    def __iter__(self) -> Iterator[int]:
        for number in range(COUNT):
            yield self.store.read(number)


class Decode:
    """A `decode` that reads from the store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __call__(self, sample: int) -> int:
        return self.store.read(sample)


KINDS: dict[str, Any] = {
    "map": Map,
    "batched": Batched,
    "awaited": Awaited,
    "stream": Stream,
    "streams": Streams,
    "awaited stream": AwaitedStream,
}
REPLAYS = Recovery(allow_replay=True)


def _made(loop: str, kind: str, store: Store, decodes: bool, **options: Any) -> Stepwise:
    never = Store(None)
    decode = Decode(store) if decodes else None
    return Stepwise(loop, KINDS[kind](never if decodes else store), decode=decode, batch_size=3, **options)


def _read(run: Stepwise) -> tuple[list[list[int]], list[tuple[int, dict[str, Any]]]]:
    """All batches; and for each error the number of batches before it, and the state there."""
    run.begin()
    got: list[list[int]] = []
    errors: list[tuple[int, dict[str, Any]]] = []
    while True:
        try:
            got.append(run.step().tolist())
        except ReadFailed:
            assert len(errors) < len(AWAY)  # each is raised once at most
            errors.append((len(got), run.loader.state_dict()))
            if run.loader.num_workers:
                with pytest.raises(ReadFailed):  # the epoch is not over: it is to be gone on with
                    run.step()
                run.loader.load_state_dict(run.loader.state_dict())
                run.begin()
        except StopIteration:
            return got, errors


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_batch_is_tried_again(kind: str, workers: int, tmp_path: Path) -> None:
    """The order is that of an undisturbed epoch, in either mode and kind of loop, whatever `on_error` is. No state
    counts the batch before: a run that resumes at the error reads the rest.
    """
    ways = [("sync", None, "raise", False), ("asyncio", 5, "skip", True)]
    if not workers:
        ways += [("asyncio", None, "skip", False), ("sync", 5, "raise", True)]
    for way, (loop, seed, on_error, decodes) in enumerate(ways):
        options = {"num_workers": workers, "seed": seed, "on_error": on_error, "recovery": REPLAYS}
        folder = tmp_path / str(way)
        folder.mkdir()
        with _made("sync", kind, Store(None), decodes, **options) as run:
            expected = [batch.tolist() for batch in run.epoch()]
        with _made(loop, kind, Store(folder), decodes, **options) as run:
            got, errors = _read(run)
            assert got == expected
            assert errors
            assert run.loader.state_dict()["finished"]
            assert not run.loader.skipped_samples
        at, state = errors[-1]
        assert not state["finished"]
        with _made("sync", kind, Store(None), decodes, **options) as run:
            run.loader.load_state_dict(state)
            assert got[:at] + [batch.tolist() for batch in run.epoch()] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_out_of_order_every_batch_comes(kind: str, tmp_path: Path) -> None:
    """With `in_order=False`, too, none is lost or doubled."""
    with _made("sync", kind, Store(tmp_path), False, num_workers=2, in_order=False, recovery=REPLAYS) as run:
        got, errors = _read(run)
    assert sorted(chain(*got)) == list(range(COUNT))
    assert errors


class Away(Map):
    def __getitem__(self, index: int) -> int:
        if index > 5:
            raise ReadFailed("away")
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_a_store_that_stays_away_fails_at_each_call(workers: int) -> None:
    """No call hangs, the epoch does not end, and its state does not move."""
    with DataLoader(Away(Store(None)), 3, num_workers=workers) as loader:
        batches = iter(loader)
        assert [next(batches).tolist() for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
        for _ in range(4):
            with pytest.raises(ReadFailed, match="away"):
                next(batches)
        state = loader.state_dict()
        assert (state["step"], state["finished"]) == (2, False)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_generator_that_cannot_go_on_says_so(workers: int, tmp_path: Path) -> None:
    """A generator ends with the error that leaves it. That is no end of the epoch: the state resumes with the batch."""
    with DataLoader[Any](Generated(Store(tmp_path)), 3, num_workers=workers, recovery=REPLAYS) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1, 2]
        with pytest.raises(ReadFailed, match="away"):
            next(batches)
        over = "away" if workers else r"over after ReadFailed: .* No batch was lost: call load_state_dict"
        for _ in range(2):
            with pytest.raises(LoaderError, match=over):
                next(batches)
        loader.load_state_dict(loader.state_dict())
        assert next(iter(loader)).tolist() == [3, 4, 5]


@pytest.mark.asyncio
async def test_another_task_that_waits_gets_the_error(tmp_path: Path) -> None:
    """Another task waits for a batch of the same iterator already."""
    loader = AsyncDataLoader(Map(Store(tmp_path)), 3, num_workers=1)
    async with asyncio.timeout(20), loader:
        batches = aiter(loader)
        assert (await anext(batches)).tolist() == [0, 1, 2]
        tasks = [asyncio.ensure_future(anext(batches)) for _ in range(2)]
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in errors] == [ReadFailed, ReadFailed]


@pytest.mark.parametrize("loop", ["sync", "asyncio"])
def test_an_iterator_dropped_after_the_error_is_freed(loop: str, tmp_path: Path) -> None:
    """The error that is kept for further calls has no traceback, which would refer to the iterator."""
    with _made(loop, "map", Store(tmp_path), False, num_workers=1) as run:
        run.begin()
        run.step()
        with pytest.raises(ReadFailed):
            run.step()
        dropped = weakref.ref(run.iterator)
        run.iterator = None
        gc.collect()
        assert dropped() is None
