"""An epoch of assigned shards without processes: real worker streams, readers, assigner and scheduler; simulated
sockets.

Simulated are the workers' sockets (each keeps its order and is as slow as `random` says), their deaths, the consumer's
pace, and the shards. Everything else is the real code. `run` ends with the epoch or with a state, and fails if no part
can make progress.
"""

from __future__ import annotations

import asyncio
import json
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from asyncloader.base.events import (
    Action,
    Assign,
    Deliver,
    Died,
    Fail,
    Finish,
    Replace,
    SkippedSample,
)
from asyncloader.epoch.resume_points import ResumePoints
from asyncloader.epoch.scheduler import Scheduler
from asyncloader.errors import WorkerDied
from asyncloader.formats import ShardError
from asyncloader.remote.assignment import Reply
from asyncloader.remote.assignment_state import EpochAssignment, stream_key
from asyncloader.remote.shard_splitting import EpochPlan, EpochShares
from asyncloader.state.epoch_counter import EpochClock, Tally
from asyncloader.state.progress import Progress
from asyncloader.state.schema import check_state
from asyncloader.workers.fetch.assignment_client import WorkerAssignments
from asyncloader.workers.fetch.data_end import EndOfData
from asyncloader.workers.fetch.reader import DatasetReader
from asyncloader.workers.fetch.sample_errors import ErrorPolicy, NoSamples
from asyncloader.workers.fetch.setup import EpochStart, WorkerSetup
from asyncloader.workers.ipc import wire
from asyncloader.workers.message_codec import PICKLE
from tests.property.assignment_cases import Case, Shards, plan_of

HEAD = 5  # bytes of a frame before its body


class Worker:
    """A worker process: frames sent to it, frames that it sends, and its tasks."""

    def __init__(self, case: Case, number: int, start: EpochStart) -> None:
        self.outbox: deque[tuple[Any, ...]] = deque()
        self.inbox: deque[tuple[int, bytes]] = deque()
        self.alive = True
        self._ended = False
        self._tasks: list[asyncio.Task[None]] = []
        self._assignments = WorkerAssignments(self._ask, PICKLE)
        self._assignments.epoch = 1
        setup = WorkerSetup(
            dataset=Shards(case),
            iterable=True,
            auto_collation=case.batch_size is not None,
            batch_size=case.batch_size,
            collate_fn=None,
            drop_last=case.drop_last,
            base_seed=0,
            worker_init_fn=None,
            num_workers=case.workers,
            concurrency=8,
            starts=[],
            snapshot_every=case.every,
            policy=ErrorPolicy(case.replace if case.replaces else "skip") if case.skips else None,
        )
        self._reader = DatasetReader(
            setup, setup.dataset, _collate, worker_id=number, in_worker=False, assignments=self._assignments
        )
        self._reader.begin(start)

    def _ask(self, frame: bytes) -> None:
        self.outbox.append(("ask", *wire.unpack_ask(frame[HEAD:])))

    def receive(self) -> None:
        """Receive a frame."""
        kind, body = self.inbox.popleft()
        if kind == wire.ASSIGNMENT:
            self._assignments.answered(body)
        else:
            self._tasks.append(asyncio.ensure_future(self._task(int.from_bytes(body, "little"))))

    async def _task(self, seq: int) -> None:
        if self._ended:
            return
        bad: list[SkippedSample] = []
        try:
            batch = await self._reader.fetch_async(None, bad)
            self.outbox.append(("batch", seq, batch, self._reader.cursor()))
        except NoSamples:
            self.outbox.append(("nothing", seq, None, self._reader.cursor()))
        except EndOfData:
            if not self._ended:
                self._ended = True
                self.outbox.append(("end", seq, self._reader.last_cursor()))
        except Exception as error:
            self.outbox.append(("error", seq, error, None))

    async def kill(self, sent: int) -> None:
        """Kill the worker; only the first `sent` of its frames have left the process."""
        self.alive = False
        while len(self.outbox) > sent:
            self.outbox.pop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._reader.aclose()


def _collate(samples: Any) -> list[int]:
    return [sample["n"] for sample in samples] if isinstance(samples, list) else [samples["n"]]


def passed(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state as another process receives it."""
    again: dict[str, Any] = json.loads(json.dumps(state))
    return again


class World:
    """Workers and a consumer; `random` chooses which of them acts next.

    Args:
        case: the options.
        random: chooses the next step. None: always the first possible step, in the order of the workers.
        state: where to resume; None: at the beginning.
        deaths: the number of workers that die.
    """

    def __init__(
        self, case: Case, random: Random | None = None, state: dict[str, Any] | None = None, deaths: int = 0
    ) -> None:
        self.case = case
        self.batches: list[list[int]] = []
        """The batches that the consumer got."""
        self.errors = 0
        self._random = random
        self._deaths = deaths
        self._ready: deque[Deliver] = deque()
        self._finished = False
        streams = {"num_workers": case.workers, "rank": 0, "world_size": 1}
        expects = {
            "mode": "seeded", "kind": "iterable", "seed": 0, "length": None, "batch_size": case.batch_size,
            "drop_last": case.drop_last, "order": "stream",
        }  # fmt: skip
        resumed = None if state is None else check_state(state)
        clock = EpochClock([], None, seeded=True)
        self.progress = Progress(clock, expects, streams, resumed, None, case.every, Tally())
        self.progress.config = cast(
            "Any", SimpleNamespace(assigns_shards=True, loader_streams=None, iterable=True, generator=None)
        )
        _, starts = self.progress.starts(case.workers, 7, None)
        names = [str(number) for number in range(len(case.shards))]
        assignments = EpochAssignment(
            names,
            EpochPlan(plan_of(case), EpochShares(1, None, 0.0)),
            starts,
            self.progress.saved_assignment,
            key=7,
            ordered=case.in_order,
        )
        self.progress.assignment = assignments
        self.assigner = assignments.assigner
        keyed = [
            start._replace(stream_key=stream_key(7, 0, case.workers, worker)) for worker, start in enumerate(starts)
        ]
        self._resume_points = ResumePoints(keyed, iterable=True, replays=True, assigns=True)
        self._workers = [Worker(case, number, start) for number, start in enumerate(keyed)]
        self._scheduler = Scheduler(
            workers=case.workers,
            credits=case.credits,
            in_order=case.in_order,
            iterable=True,
            first_worker=self.progress.next_worker,
            max_restarts=1 << 30,
            concurrent=True,
        )
        # Some workers act rarely, so that others get far ahead of them.
        self._weights = [10 ** (-3 * random.random()) if random else 1.0 for _ in range(2 * case.workers + 1)]

    async def run(self, stop_after: int | None = None) -> dict[str, Any] | None:
        """Run until the consumer has `stop_after` batches, or the epoch ends. Returns the state; None at the end."""
        try:
            await self._handle(self._scheduler.started)
            while not self._finished:
                if stop_after is not None and len(self.batches) >= stop_after:
                    return self.progress.state()
                await self._move()
            return None
        finally:
            for worker in self._workers:
                await worker.kill(0)

    async def _move(self) -> None:
        moves: list[tuple[float, Any, int]] = []
        for number, worker in enumerate(self._workers):
            if worker.inbox and worker.alive:
                moves.append((self._weights[2 * number], self._receive, number))
            if worker.outbox:
                moves.append((self._weights[2 * number + 1], self._answer, number))
            elif not worker.alive:
                moves.append((self._weights[2 * number], self._bury, number))
        if self._ready:
            moves.append((self._weights[-1], self._take, 0))
        assert moves, f"nothing can move: {self.assigner!r}, {self._scheduler!r}, {self.batches}"
        if self._random is None:
            _, move, number = moves[0]
        else:
            if self._deaths and self._random.random() < 0.05:
                self._deaths -= 1
                victim = self._workers[self._random.randrange(len(self._workers))]
                await victim.kill(self._random.randint(0, len(victim.outbox)))
                return
            ((_, move, number),) = self._random.choices(moves, [weight for weight, _, _ in moves])
        await move(number)

    # ------------------------------------------------------------------------------------------------ moves

    async def _receive(self, number: int) -> None:
        self._workers[number].receive()
        await _settled()

    async def _answer(self, number: int) -> None:
        kind, *values = self._workers[number].outbox.popleft()
        if kind == "ask":
            epoch, assignment, batch, left = values
            assert epoch == 1
            self._assignment(self.assigner.ask(number, assignment, batch, pickle.loads(left)))
            return
        if kind == "end":
            self.progress.ends[number] = values[1]
            await self._handle(self._scheduler.exhausted, number, values[0])
            return
        seq, outcome, cursor = values
        if kind == "error":
            self._resume_points.failed(number)
        else:
            self._resume_points.answered(number, cursor)
        await self._handle(self._scheduler.completed, number, seq, (kind, outcome, cursor))
        self._assignment(self.assigner.answered(number))

    async def _bury(self, number: int) -> None:
        self.assigner.died(number)
        obstacle = self._resume_points.obstacle(number)
        await self._handle(
            self._scheduler.died, Died(number, WorkerDied(number, 1, -9), at_work=False, obstacle=obstacle)
        )

    async def _take(self, _: int) -> None:
        item = self._ready.popleft()
        kind, outcome, cursor = item.outcome
        if kind == "error":
            assert isinstance(outcome, ShardError)
            self.errors += 1
            self.progress.failed(item.seq)
        else:
            self.progress.delivered(item.seq, item.worker, cursor)
            if kind == "batch":
                self.batches.append(outcome)
        await self._handle(self._scheduler.delivered, item.seq)

    # ------------------------------------------------------------------------------------------- consequences

    def _assignment(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            worker = self._workers[reply.worker]
            if worker.alive:
                answer = pickle.dumps((reply.assignment, reply.over, reply.last))
                worker.inbox.append((wire.ASSIGNMENT, wire.pack_assignment(1, reply.number, answer)[HEAD:]))

    async def _handle(self, decide: Callable[..., list[Action]], *arguments: Any) -> None:
        actions: deque[Action] = deque(decide(*arguments))
        while actions:
            action = actions.popleft()
            if isinstance(action, Deliver):
                self._ready.append(action)
            elif isinstance(action, Assign):
                worker = self._workers[action.worker]
                if worker.alive:
                    worker.inbox.append((wire.TASK, action.task.seq.to_bytes(8, "little")))
            elif isinstance(action, Finish):
                self._finished = True
                self.progress.finish()
            elif isinstance(action, Fail):
                raise action.error
            else:
                assert isinstance(action, Replace)
                self._workers[action.worker] = Worker(
                    self.case, action.worker, self._resume_points.start(action.worker)
                )
                actions += self._scheduler.replaced(action.worker)


async def _settled() -> None:
    """Wait until no task can continue by itself."""
    loop: Any = asyncio.get_running_loop()
    while loop._ready:  # noqa: ASYNC110
        await asyncio.sleep(0)
