"""Async datasets that say by `loader_streams` that they are a number of streams: a worker awaits several at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar, Self

import pytest
import torch
from torch.utils.data import get_worker_info

from asyncloader import AsyncDataLoader
from tests.helpers.comparing import assert_same
from tests.helpers.declared_streams import AwaitedStreams, Growing, mark_awaited, runs_within, take_around_a_kill
from tests.helpers.running import PATIENCE_S, run_async
from tests.helpers.seeded_runs import Stepwise

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

FORKED: dict[str, Any] = {"multiprocessing_context": "fork"}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "asyncio, no workers": ("asyncio", {}),
    "uvloop, no workers": ("uvloop", {}),
    "one worker": ("sync", {"num_workers": 1, **FORKED}),
    "two workers": ("asyncio", {"num_workers": 2, **FORKED}),
    "a worker for each": ("sync", {"num_workers": 7, **FORKED}),
    "threads": ("uvloop", {"num_workers": 2, "workers": "threads"}),
}


def epoch_of(kind: str = "sync", **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(3)
    with Stepwise(kind, AwaitedStreams(), batch_size=2, worker_init_fn=mark_awaited, **options) as run:
        batches = run.epoch()
    assert AwaitedStreams.connections == 0
    return batches


@pytest.fixture(scope="module", params=[{}, {"seed": 5}], ids=["torch", "seeded"])
def expected(request: pytest.FixtureRequest) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The loader's options, and the batches of an epoch."""
    options: dict[str, Any] = request.param
    return options, epoch_of(**options)


@pytest.mark.parametrize(("kind", "way"), WAYS.values(), ids=WAYS)
def test_the_batches_are_the_same_in_every_way(
    expected: tuple[dict[str, Any], list[torch.Tensor]], kind: str, way: dict[str, Any]
) -> None:
    """The streams take turns, and each has numbers of its own, also in `worker_init_fn`, which is awaited."""
    options, batches = expected
    assert [int(batch[0, 0]) for batch in batches] == [0, 1, 2, 4, 0, 1, 2, 4, 0, 2, 4, 0, 2, 2, 2]
    assert all(int(batch[0, 3]) >= 0 for batch in batches)
    assert_same(epoch_of(kind, **options, **way), batches)


def test_a_state_goes_on_in_every_way(expected: tuple[dict[str, Any], list[torch.Tensor]]) -> None:
    """Saved and loaded again and again; in torch mode the numbers of the streams begin anew with each loader."""
    options, batches = expected
    torch.manual_seed(3)
    known = slice(None) if options else slice(4)
    got: list[torch.Tensor] = []
    state: dict[str, Any] = {}
    ways: list[tuple[str, dict[str, Any]]] = [("sync", {}), *WAYS.values()]
    for kind, way in ways:
        with Stepwise(kind, AwaitedStreams(), batch_size=2, worker_init_fn=mark_awaited, **options, **way) as run:
            run.loader.load_state_dict(state)
            run.begin()
            got += run.take(2)
            state = run.loader.state_dict()
    assert_same([batch[:, known] for batch in got], [batch[:, known] for batch in batches[: 2 * len(ways)]])
    assert AwaitedStreams.connections == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_is_killed_while_it_awaits_several_streams(workers: int) -> None:
    """Its replacement connects each stream again, and goes on where it was."""
    options: dict[str, Any] = {"batch_size": 2, "seed": 5, "worker_init_fn": mark_awaited}
    batches = epoch_of(seed=5)
    with Stepwise("sync", AwaitedStreams(), num_workers=workers, **FORKED, **options) as run:
        got = take_around_a_kill(run, 4)
        state = run.loader.state_dict()
        assert_same([*got, *run.rest()], batches)
        assert run.loader.stats()["data/worker_restarts"] == 1
    with Stepwise("asyncio", AwaitedStreams(), **options) as run:
        run.loader.load_state_dict(state)
        assert_same(run.epoch(), batches[7:])


class GrowingAwaited(Growing, AwaitedStreams):
    """Awaited streams of which one takes more memory than is allowed."""


def test_a_worker_that_leaves_hands_on_the_generators_of_each_stream() -> None:
    """Without `seed=` each stream's own generators go on in the worker's replacement."""
    here, with_workers = runs_within(GrowingAwaited(), batch_size=2)
    assert_same(with_workers, here)


class Meeting(AwaitedStreams):
    """Streams whose first samples wait for one another."""

    began: ClassVar[list[int]] = []
    met: asyncio.Event | None = None

    async def awaited(self, info: Any) -> torch.Tensor:
        if self.next == 1:
            Meeting.met = Meeting.met or asyncio.Event()
            Meeting.began.append(info.id)
            if len(Meeting.began) == len(self.lengths):
                Meeting.met.set()
            await Meeting.met.wait()
        return self.sample(info)


@pytest.mark.parametrize("workers", ["processes", "threads"])
def test_a_worker_awaits_its_streams_at_the_same_time(workers: str) -> None:
    """Read one after the other, the first sample would wait for ever."""
    Meeting.began, Meeting.met = [], None
    options: dict[str, Any] = {"workers": "threads"} if workers == "threads" else FORKED
    with Stepwise("sync", Meeting([2, 2, 2, 2]), num_workers=1, prefetch_factor=4, seed=1, **options) as run:
        assert [int(batch[0, 0]) for batch in run.epoch()] == [0, 1, 2, 3, 0, 1, 2, 3]


class Broken(AwaitedStreams):
    """Streams of which one cannot connect until `mended`, or fails between two samples."""

    where = ""
    mended = False

    async def __aenter__(self) -> Self:
        info = get_worker_info()
        assert info is not None
        if self.where == "connecting" and info.id == 2 and not Broken.mended:
            raise ConnectionRefusedError("no such host")
        return await super().__aenter__()

    async def awaited(self, info: Any) -> torch.Tensor:
        if self.where == "reading" and (info.id, self.next) == (2, 4):
            self.next += 1
            raise OSError("bad record")
        return self.sample(info)


@pytest.mark.parametrize("way", [{}, {"num_workers": 1, "workers": "threads", "persistent_workers": True}])
@pytest.mark.parametrize("fails", ["__aenter__", "worker_init_fn"])
def test_a_stream_that_cannot_begin(way: dict[str, Any], fails: str) -> None:
    """Its error comes, the other streams' connections are closed, and the next epoch connects all."""

    async def init(number: int) -> None:
        if fails == "worker_init_fn" and number == 2 and not Broken.mended:
            raise ConnectionRefusedError("no such host")

    Broken.mended = False
    where = "connecting" if fails == "__aenter__" else ""
    with Stepwise("sync", Broken(where=where), batch_size=2, seed=5, worker_init_fn=init, **way) as run:
        with pytest.raises(ConnectionRefusedError, match="no such host"):
            run.epoch()
        assert AwaitedStreams.connections == 0
        Broken.mended = True
        assert len(run.epoch()) == 15
    assert AwaitedStreams.connections == 0


class Stubborn(AwaitedStreams):
    """Streams of which the last waits, and ends once it is cancelled."""

    stopped = False

    async def __aiter__(self) -> AsyncIterator[Any]:
        info = get_worker_info()
        assert info is not None
        if info.id == 1 and not Stubborn.stopped:
            Stubborn.stopped = True
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return
        for number in range(self.lengths[info.id]):
            yield torch.tensor([info.id, number])


def test_a_stream_that_ends_after_its_epoch() -> None:
    """A task of an epoch that was left, which ends late, does not end the stream in the epoch that follows."""
    Stubborn.stopped = False
    options: dict[str, Any] = {"num_workers": 1, "workers": "threads", "persistent_workers": True, "prefetch_factor": 4}
    with Stepwise("sync", Stubborn([2, 2]), seed=5, **options) as run:
        run.begin()
        run.step()
        assert [int(batch[0, 0]) for batch in run.epoch()] == [0, 1, 0, 1]
    assert Stubborn.stopped


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_a_cancelled_step_loses_no_batch(kind: str) -> None:
    """Without workers: the batch of the stream whose turn it was comes next."""
    expected = epoch_of(seed=5)

    async def read() -> list[torch.Tensor]:
        got: list[torch.Tensor] = []
        options: dict[str, Any] = {"batch_size": 2, "seed": 5, "worker_init_fn": mark_awaited}
        async with AsyncDataLoader[Any](AwaitedStreams(), **options) as loader:
            batches = aiter(loader)
            for number in range(15):
                waiting = asyncio.ensure_future(anext(batches))
                if number % 2:
                    await asyncio.sleep(0)
                    waiting.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await waiting
                    waiting = asyncio.ensure_future(anext(batches))
                got.append(await asyncio.wait_for(waiting, PATIENCE_S))
        return got

    assert_same(run_async(read(), kind), expected)
    assert AwaitedStreams.connections == 0


class Drawing(AwaitedStreams):
    """Streams that draw from a generator of the process."""

    def sample(self, info: Any) -> torch.Tensor:
        made: torch.Tensor = torch.rand(()) + info.id
        return made


@pytest.mark.parametrize("options", [{}, {"seed": 5}], ids=["torch", "seeded"])
def test_draws_from_the_process_are_warned_of(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """They depend on the order in which the streams' samples come."""
    with Stepwise("sync", Drawing(), batch_size=2, num_workers=1, **FORKED, **options) as run:
        assert len(run.epoch()) == 15
    assert caplog.text.count("drew from the process-global generators (torch)") == 1
