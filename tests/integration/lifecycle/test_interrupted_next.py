"""Ctrl-C while a batch is being delivered: a caller that continues gets all batches, this too, once and in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, get_worker_info

from asyncloader import DataLoader, LoaderError, Recovery, Tuning
from asyncloader.base.bridge import Bridge, Call
from asyncloader.delivery.opener import Opener
from asyncloader.epoch.consumer import Consumer
from asyncloader.epoch.inline import InlineEpoch
from asyncloader.epoch.inline_reader import BatchPrefetcher, StreamsInTurn
from asyncloader.epoch.sampler_reading import pull_timed
from asyncloader.epoch.sync_inline import SyncInlineIterator
from asyncloader.epoch.sync_iterator import WorkerIterator
from asyncloader.epoch.torch_iterator import TorchIterator
from asyncloader.samplers.index_stream import IndexStream
from asyncloader.state.progress import Progress
from asyncloader.workers.fetch.map_fetcher import MapFetcher
from asyncloader.workers.fetch.reader import DatasetReader
from asyncloader.workers.fetch.stream_fetcher import StreamFetcher
from asyncloader.workers.ipc.ring import Ring, oneoff_anchor
from tests.helpers.interrupting import Interruption

BATCHES = 600
SEED = 7

WATCHED = [
    WorkerIterator._next_data,
    *(Consumer.deliver, Consumer._open, Consumer._advance, Consumer._pull, Consumer._count, Consumer._without_answer),
    *(Opener.build, Opener.release, Opener.forget),
    *(Ring.reclaim, Ring.may_lend, Ring.lend, Ring.look, Ring.take_back, oneoff_anchor),
    *(Progress.pulled, Progress.delivered, Progress._after, Progress._passed, Progress._pass_over, Progress.failed),
    *(TorchIterator.pull, IndexStream.pull),
    *(Bridge.call_soon, pull_timed),
]


class Samples(torch.utils.data.Dataset[Any]):
    """Samples of this size, full of their indices. Those with odd indices raise, if `raises` is set."""

    def __init__(self, size: int = 3, *, raises: bool = False) -> None:
        self.size = size
        self.raises = raises

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.raises and index % 2:
            raise ValueError(f"sample {index}")
        return torch.full((self.size,), index)


ONE_OFF = {"tuning": Tuning(ring_bytes=1 << 16)}
"""Slots are smaller than a batch of 64 KiB."""

CASES: dict[str, tuple[Samples, dict[str, Any], int]] = {
    "views": (Samples(), {}, 1),
    "copied out": (Samples(), {}, BATCHES),
    "segments of their own": (Samples(1 << 13), ONE_OFF, 1),
    "copied out of their segments": (Samples(1 << 13), ONE_OFF, 40),
    "errors": (Samples(raises=True), {}, 1),
    "seeded": (Samples(), {"seed": 1, "shuffle": True}, 1),
}


def _made(case: str) -> DataLoader[Any]:
    dataset, options, _ = CASES[case]
    return DataLoader[Any](dataset, num_workers=1, prefetch_factor=4, persistent_workers=True, **options)


def _next(batches: Iterator[Any], held: deque[Any]) -> int:
    """The value in the next batch; where an error is raised instead, the index of its sample, negated."""
    try:
        held.append(next(batches))
    except ValueError as error:
        return -int(str(error).split()[-1])
    return int(held[-1][0, -1])


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_ctrl_c_at_every_place(case: str) -> None:
    """Ctrl-C strikes at each place in turn, each time in another batch's delivery. Nothing stays leased, and the state
    is that of an epoch without Ctrl-C.
    """
    torch.manual_seed(SEED)
    with _made(case) as plain, _made(case) as loader:
        held: deque[Any] = deque(maxlen=CASES[case][2])
        undisturbed = iter(plain)
        torch.manual_seed(SEED)
        batches: Any = iter(loader)
        got = [_next(batches, held) for _ in range(4)]
        expected = [_next(undisturbed, deque(maxlen=1)) for _ in range(4)]
        struck = at = 0
        while struck == at:
            at += 1
            got.append(_next(batches, held))
            expected.append(_next(undisturbed, deque(maxlen=1)))
            try:
                with Interruption(at, WATCHED):
                    got.append(_next(batches, held))
            except KeyboardInterrupt:
                struck += 1
                if case != "errors":
                    assert loader.state_dict()["step"] == len(got)  # the user does not have the batch yet
                got.append(_next(batches, held))
            expected.append(_next(undisturbed, deque(maxlen=1)))
            assert got == expected
        assert struck > 40
        assert len(got) < BATCHES
        assert loader.state_dict() == plain.state_dict()
        assert bool(loader.stats()["data/ring_copies"]) == ("copied" in case)
        for rest in (batches, undisturbed):
            while len(got if rest is batches else expected) < BATCHES:
                (got if rest is batches else expected).append(_next(rest, deque(maxlen=1)))
        assert got == expected
        held.clear()
        (ring,) = (manager.ring for manager in batches._pool.rings)
        assert ring.idle


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["views", "copied out", "segments of their own", "copied out of their segments"])
def test_an_epoch_left_after_ctrl_c_at_every_place(case: str) -> None:
    """The batch whose delivery was interrupted is never taken: its slot is free again, and its descriptor closed."""
    with _made(case) as loader:
        held: deque[Any] = deque(maxlen=CASES[case][2])
        struck = at = 0
        while struck == at:
            at += 1
            batches: Any = iter(loader)
            held.append(next(batches))
            try:
                with Interruption(at, WATCHED):
                    held.append(next(batches))
            except KeyboardInterrupt:
                struck += 1
        assert struck > 40
        batches = iter(loader)
        assert [int(batch[0, -1]) for batch in batches] == list(range(BATCHES))
        held.clear()
        (ring,) = (manager.ring for manager in batches._pool.rings)
        assert ring.idle


# ------------------------------------------------------------------------------------------------ without workers


class Numbers(Iterator[int]):
    def __init__(self, first: int, step: int) -> None:
        self.next, self.step = first, step

    def __next__(self) -> int:
        self.next += self.step  # a place between the two would be the user's own
        return self.next - self.step


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return Numbers(0, 1) if info is None else Numbers(info.id, info.num_workers)


class Streams(Stream):
    loader_streams = 3


INLINE = [
    *(SyncInlineIterator._next_data, SyncInlineIterator._fetch_here, SyncInlineIterator._fetch_on_bridge),
    *(InlineEpoch.step, InlineEpoch._continued, InlineEpoch.next_index, InlineEpoch._pull, InlineEpoch.pull_ahead),
    BatchPrefetcher.pull_ahead,
    *(InlineEpoch.delivered, InlineEpoch._settle, InlineEpoch.cursor, InlineEpoch.failed),
    *(InlineEpoch.instead, pull_timed),
    *(DatasetReader.fetch, DatasetReader.cursor, DatasetReader.taken, MapFetcher.fetch, MapFetcher._torch_samples),
    *(StreamFetcher.fetch, StreamFetcher._torch_samples, StreamFetcher._batch, StreamFetcher._collated),
    *(StreamsInTurn.fetch, StreamsInTurn.taken, Bridge.wait, Call.join, Call.result),
    *(BatchSampler.__iter__, RandomSampler.__iter__, IndexStream._begin, TorchIterator.pull, IndexStream.pull),
    *(Progress.pulled, Progress.delivered, Progress._after),
]
WITHOUT_WORKERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "map": (range(BATCHES), {"shuffle": True}),
    "seeded": (range(BATCHES), {"seed": 1, "shuffle": True}),
    "on the loop": (range(BATCHES), {"concurrency": 2, "shuffle": True}),
    "stream": (Stream(), {}),
    "seeded stream": (Stream(), {"seed": 1}),
    "streams": (Streams(), {}),
}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # Ctrl-C came before it was begun
@pytest.mark.parametrize("case", WITHOUT_WORKERS)
def test_ctrl_c_at_every_place_without_workers(case: str) -> None:
    """As with workers: the next call gives the batch, and a state that is saved in between resumes with it."""
    dataset, options = WITHOUT_WORKERS[case]
    replays = Recovery(allow_replay=True)

    def epoch(state: dict[str, Any] | None = None) -> tuple[DataLoader[Any], Iterator[torch.Tensor]]:
        torch.manual_seed(SEED)
        loader = DataLoader[Any](dataset, 2, recovery=replays, **options)
        loader.load_state_dict(state or {})
        return loader, iter(loader)

    with DataLoader[Any](dataset, 2, recovery=replays, **options) as loader:
        states: list[tuple[int, dict[str, Any]]] = []
        torch.manual_seed(SEED)
        batches = iter(loader)
        got, at = [next(batches).tolist()], 0
        while len(states) == at:
            at += 1
            try:
                with Interruption(at, INLINE):
                    got.append(next(batches).tolist())
            except KeyboardInterrupt:
                states.append((len(got), loader.state_dict()))
                got.append(next(batches).tolist())
    assert len(states) > 40
    plain, undisturbed = epoch()
    with plain:
        assert got == [next(undisturbed).tolist() for _ in got]
    for before, state in states[:: 1 + len(states) // 12]:
        resumed, rest = epoch(state)
        with resumed:
            assert next(rest).tolist() == got[before]


def test_ctrl_c_in_the_code_of_generators() -> None:
    """A generator ends with it. A sampler is read anew up to its position; for a dataset the error says what to do."""
    strikes = iter([False] * 5 + [True])

    def numbers() -> Iterator[int]:
        for number in range(20):
            if next(strikes, False):
                raise KeyboardInterrupt
            yield number

    class Sampler(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return numbers()

    class Generated(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return numbers()

    batches = iter(DataLoader(range(20), 4, sampler=Sampler()))  # type: ignore[arg-type]
    assert next(batches).tolist() == [0, 1, 2, 3]
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert [batch.tolist()[0] for batch in batches] == [4, 8, 12, 16]

    strikes = iter([False] * 5 + [True])
    loader = DataLoader(Generated(), 4, recovery=Recovery(allow_replay=True))
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1, 2, 3]
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    for _ in range(2):
        with pytest.raises(LoaderError, match="over after KeyboardInterrupt"):
            next(batches)
    state = loader.state_dict()
    assert (state["step"], state["finished"]) == (1, False)
    loader.load_state_dict(state)
    assert [batch.tolist()[0] for batch in loader] == [4, 8, 12, 16]
