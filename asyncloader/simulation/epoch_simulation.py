"""Simulates an epoch: the loader's assigner, worker streams and scheduler, on simulated time.

Data path: contents -> [epoch_simulation: simulated_shards -> worker_stream -> scheduler -> consumer] -> forecast.

The decisions are the loader's own: which worker reads which shard, which ranges it opens and fetches ahead, how many
requests and batches are in flight. Only the bytes, the computations and the training step are simulated. After a
bounded number of batches, requests and bytes the simulation ends; the rest of the epoch is taken to go on at the same
rate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from asyncloader.epoch.scheduler import Scheduler
from asyncloader.events import Action, Assign, Completed, Deliver, Exhausted, Finish, Started
from asyncloader.remote.assignment import Assignment, AssignmentLog, Reply, ShardAssigner, StreamStart
from asyncloader.remote.reading import READ_AHEAD
from asyncloader.remote.worker_stream import WorkerStream
from asyncloader.simulation.contents import Contents
from asyncloader.simulation.machine import Processors, SharedLink, Traffic
from asyncloader.simulation.simulated_shards import SimulatedShards
from asyncloader.simulation.simulated_store import WorkerNetwork
from asyncloader.simulation.virtual_time import run_virtual
from asyncloader.telemetry.prediction import BATCH_COST_S, CROWDED
from asyncloader.workers.fetch.assignment_client import AssignmentReply

MOST_BATCHES = 600
"""Batches after which a simulation ends; with many workers, `MOST_OF_A_WORKER` of each."""

MOST_OF_A_WORKER = 40

STEADY = 20
"""Times the bytes that the workers fetch ahead, before which a simulation does not end. Each worker reads several
ranges at the same time: batches come slowly while these fill their buffers, then faster than the network carries them.
It ends after `MOST_TIMES` as many batches.
"""

MOST_TIMES = 4
MOST_REQUESTS = 20_000
MOST_PIECES = 20_000

_RECEIVING = 1 / 3
"""The share of `BATCH_COST_S` that the consumer's process has, as `telemetry.prediction` takes it."""


@dataclass(frozen=True)
class RunSetting:
    """The settings of a run.

    Attributes:
        workers: processes that read, at least 1.
        batch_size: samples of a batch.
        rtt_s: seconds from a request to the first byte of its answer.
        bandwidth: bytes per second between the store and all workers; None: unlimited.
        step_s: seconds of a training step.
        cpus: CPU seconds per second for all processes.
        prefetch_factor: batches that each worker may have ready or in work.
        read_ahead: bytes of a shard that each worker fetches ahead.
        requests: of a worker that may be in flight.
        range_requests: of one file, for Parquet.
    """

    workers: int
    batch_size: int
    rtt_s: float
    bandwidth: float | None = None
    step_s: float = 0.0
    cpus: float = 1.0
    prefetch_factor: int = 2
    read_ahead: int = READ_AHEAD
    requests: int = 256
    range_requests: int = 16


@dataclass(frozen=True)
class WorkerCosts:
    """CPU seconds in a worker.

    Attributes:
        requesting: for each request, until its answer begins.
        receiving: for each byte: from the network to the parser.
        parsing: for each byte: of a compressed shard in a thread, while the worker goes on.
        decoding: for each sample.
        collating: for each sample.
        packed: the shards are compressed.
    """

    requesting: float = 0.0
    receiving: float = 0.0
    parsing: float = 0.0
    decoding: float = 0.0
    collating: float = 0.0
    packed: bool = False


class Simulated(NamedTuple):
    """The result.

    Attributes:
        rate: samples per second, without the beginning of the epoch and, if that was reached, its end.
        first_s: seconds until the first batch; 0: no batch came.
        seconds: of the whole epoch.
        requests, nbytes: of the part that was simulated.
        whole: that part is the whole epoch.
    """

    rate: float
    first_s: float
    seconds: float
    requests: int
    nbytes: int
    whole: bool


def simulate(
    contents: Contents, assignments: Sequence[Assignment], setting: RunSetting, costs: WorkerCosts
) -> Simulated:
    """Simulate an epoch.

    Args:
        contents: of the shards.
        assignments: of ranges, in the order in which workers get them.
        setting: of the run.
        costs: of its computations.
    """
    return run_virtual(_SimulatedEpoch(contents, assignments, setting, costs).run())


class _SimulatedEpoch:
    def __init__(
        self, contents: Contents, assignments: Sequence[Assignment], setting: RunSetting, costs: WorkerCosts
    ) -> None:
        workers = setting.workers
        self._contents = contents
        self._setting = setting
        self._costs = costs
        self._most = max(MOST_BATCHES, MOST_OF_A_WORKER * workers)
        self._grain = contents.grain(setting.batch_size, self._most)
        self._units = setting.batch_size // self._grain
        units = int((-(-contents.samples // self._grain)).sum())
        self._samples = contents.total / max(1, units)  # of a unit, on average: the last unit of a shard has fewer
        self._assigner = ShardAssigner(AssignmentLog(assignments), [StreamStart()] * workers)
        self._sources = [_Assignments(self, worker) for worker in range(workers)]
        self._scheduler = Scheduler(workers=workers, credits=setting.prefetch_factor, iterable=True)
        self._tasks: list[asyncio.Queue[int]] = [asyncio.Queue() for _ in range(workers)]
        self._ready: asyncio.Queue[Deliver | None] = asyncio.Queue()
        self._finished = False
        self._link = SharedLink(setting.bandwidth)
        # The main process is one more than the workers.
        crowded = CROWDED if workers + 1 > setting.cpus else 1.0
        self._processors = Processors(setting.cpus, crowded)
        self._traffic = Traffic(MOST_REQUESTS, MOST_PIECES, self._stop)
        self._came: list[tuple[float, float]] = []  # of each batch: when it was taken, and its samples

    async def run(self) -> Simulated:
        working = [asyncio.create_task(self._work(worker)) for worker in range(self._setting.workers)]
        for each in working:
            each.add_done_callback(self._end)
        try:
            await self._consume()
        finally:
            for each in working:
                each.cancel()
            ended = await asyncio.gather(*working, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error
        return self._result(asyncio.get_running_loop().time())

    # ------------------------------------------------------------------------------------ the main process

    @property
    def _enough(self) -> bool:
        came, setting = len(self._came), self._setting
        steady = self._traffic.nbytes >= STEADY * setting.workers * setting.read_ahead
        return came > self._most and (steady or came > MOST_TIMES * self._most)

    def _stop(self) -> None:
        self._ready.put_nowait(None)

    def _end(self, working: asyncio.Task[None]) -> None:
        if not working.cancelled() and working.exception() is not None:
            self._stop()

    def _act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Assign):
                self._tasks[action.worker].put_nowait(action.task.seq)
            elif isinstance(action, Deliver):
                self._ready.put_nowait(action)
            elif isinstance(action, Finish):
                self._finished = True
                self._stop()

    async def _consume(self) -> None:
        setting, loop = self._setting, asyncio.get_running_loop()
        main = asyncio.Lock()
        self._act(self._scheduler.handle(Started()))
        while not self._enough and (batch := await self._ready.get()) is not None:
            self._came.append((loop.time(), batch.outcome * self._samples))
            self._act(self._scheduler.delivered(batch.seq))
            await self._processors.compute(BATCH_COST_S * _RECEIVING, main)
            if setting.step_s:
                await asyncio.sleep(setting.step_s)

    def ask(self, worker: int, number: int, batch: int, left: Sequence[Sequence[Any]] | None) -> None:
        """Send a worker's request to the assigner."""
        self._reply(self._assigner.ask(worker, number, batch, left))

    def _reply(self, replies: Iterable[Reply]) -> None:
        for reply in replies:
            answer = AssignmentReply(reply.assignment, reply.over, reply.last)
            self._sources[reply.worker].answered(reply.number, answer)

    # -------------------------------------------------------------------------------------------- a worker

    async def _work(self, worker: int) -> None:
        setting, costs = self._setting, self._costs
        process = asyncio.Lock()
        compute = partial(self._processors.compute, process=process)

        async def request() -> None:
            await compute(costs.requesting)

        async def receive(nbytes: int) -> None:
            await compute(nbytes * costs.receiving)
            await self._processors.compute(nbytes * costs.parsing, None if costs.packed else process)

        network = WorkerNetwork(setting.requests, setting.rtt_s, self._link, self._traffic, request, receive)
        shards = SimulatedShards(self._contents, self._grain, network, setting.read_ahead, setting.range_requests)
        stream = WorkerStream(self._contents.catalog, shards.open, self._sources[worker], 0)
        ended = False
        async with aclosing(stream):
            while True:
                seq = await self._tasks[worker].get()
                units = 0
                if not ended:
                    stream.next_batch()
                    with suppress(StopAsyncIteration):
                        units = len(await stream.take(self._units))
                    ended = units < self._units
                if not units:
                    break
                samples = units * self._samples
                await compute(samples * (costs.decoding + costs.collating) + BATCH_COST_S * (1 - _RECEIVING))
                self._reply(self._assigner.answered(worker))
                self._act(self._scheduler.handle(Completed(worker, seq, units)))
        self._reply(self._assigner.answered(worker))
        self._act(self._scheduler.handle(Exhausted(worker, seq)))

    # ------------------------------------------------------------------------------------------ the result

    def _result(self, now: float) -> Simulated:
        came, whole = self._came, self._finished
        traffic = self._traffic
        if not came:  # no sample exists, or the first batch has more bytes than are simulated
            seconds = now * max(1.0, float(self._contents.sizes.sum()) / max(1, traffic.nbytes))
            rate = self._contents.total / max(seconds, 1e-9)
            return Simulated(rate, 0.0, seconds, traffic.requests, traffic.nbytes, whole)
        done = sum(samples for _, samples in came)
        rate = _steady(came, self._setting.workers, whole=whole) or done / max(now, 1e-9)
        seconds = now if whole else came[-1][0] + max(0.0, self._contents.total - done) / max(rate, 1e-9)
        return Simulated(rate, came[0][0], seconds, traffic.requests, traffic.nbytes, whole)


def _steady(came: Sequence[tuple[float, float]], workers: int, *, whole: bool) -> float | None:
    """Return the samples per second in the middle, between whole rounds of the workers; None: there are too few."""
    first = -(-len(came) // 2 // workers) * workers
    last = (len(came) * (3 if whole else 4) // 4 - 1) // workers * workers
    if last - first < 2 * workers or came[last][0] <= came[first][0]:
        return None
    return sum(samples for _, samples in came[first + 1 : last + 1]) / (came[last][0] - came[first][0])


class _Assignments:
    """`AssignmentSource` of a simulated worker, whose messages take no time.

    Args:
        epoch: has the assigner.
        worker: which.
    """

    key = 0

    def __init__(self, epoch: _SimulatedEpoch, worker: int) -> None:
        self._epoch = epoch
        self._worker = worker
        self._waiting: dict[int, asyncio.Future[AssignmentReply]] = {}

    def prepare(self, number: int, batch: int) -> None:
        """Send the request. See `AssignmentSource.prepare`."""
        self._request(number, batch, None)

    async def ask(self, number: int, batch: int, left: Sequence[Sequence[Any]] | None) -> AssignmentReply:
        """Send the request, and wait for the reply. See `AssignmentSource.ask`."""
        answer = await self._request(number, batch, left)
        self._waiting.pop(number, None)
        return answer

    def _request(
        self, number: int, batch: int, left: Sequence[Sequence[Any]] | None
    ) -> asyncio.Future[AssignmentReply]:
        waiting = self._waiting.get(number)
        if waiting is None:
            waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
            self._epoch.ask(self._worker, number, batch, left)
        return waiting

    def answered(self, number: int, answer: AssignmentReply) -> None:
        """Take the reply."""
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)
