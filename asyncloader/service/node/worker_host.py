"""The main function of a service's worker process: carries out the tasks of several logical workers.

Data path: node -> lane -> [worker_host: fetch -> collate -> slot] -> lane -> node or loader.

A *lane* is one logical worker of one loader: a socket, with a `TaskRunner` behind it. A process has any number of
them. Those of a blocking dataset take turns, task by task: next is a lane of the session that has had the least time.
Those of an asynchronous dataset, or of one that is read in threads, run on one event loop.

A blocking map dataset, whose samples depend on nothing but their index, is made once and shared by all lanes. Any
other is made for each lane, because it may keep a position, or open connections.

The node opens lanes, over the process's own channel. A lane ends with its socket, or on STOP. One that ends for any
other reason, of the dataset's or of this process's, is reported to the node, so that its loader goes on elsewhere.

*What a lane holds is bounded.* A loader that sends more than its process carries out, or does not read what was made,
holds up itself: nothing is read from its lane, or none of its tasks is carried out, until its queues are shorter. Both
get shorter without a frame that was not read: by carrying frames out, or by the loader that reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import select
import socket
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.utils.data._utils import worker as torch_worker

from asyncloader.errors import StateError
from asyncloader.service.definition import Defined, Made, load_definition
from asyncloader.service.node.dataset_info import dataset_info_of
from asyncloader.service.pickled import PickledDefinition
from asyncloader.service.protocol.msgpack_codec import PLAIN
from asyncloader.service.protocol.records import DatasetInfo
from asyncloader.service.protocol.shard_plan import Catalog, PlanRequest, finding, planned
from asyncloader.telemetry.counters import LANE_KEY, Recorder
from asyncloader.workers.fetch.seeding import GlobalDrawCheck
from asyncloader.workers.fetch.setup import WorkerSetup
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import Channel
from asyncloader.workers.ipc.peer_text import line_of
from asyncloader.workers.task_runner import TaskRunner
from asyncloader.workers.worker import AsyncTaskLoop, serve_async, tune

FACTS, OPEN, PLAN, PLANNED, NOT_MADE, ENDED = 40, 41, 42, 43, 44, 45
"""Frames between the node and its process, all pickled, as both are the node's own: what the dataset is; a new lane,
whose socket comes with the frame; a number and a `PlanRequest`; this number with the `Plan`, or an error as bytes; why
there is no dataset, as text; a `LaneEnding`."""
MOST_PROBLEM = 1500
"""Characters of the text that says why there is no dataset, at most."""

_COUNTS_S = 0.25
_MOST_FRAME = (64 << 20) + 256  # a message's largest body, and the head of a frame
_MOST_QUEUED = 16 << 20  # bytes of a lane's frames, in either direction; one frame more, if it is that large
_FRAME_BYTES = 200  # that a frame takes in a queue besides its own
_MOST_TASKS = 1 << 13  # of a lane on the event loop: twice the credits that a loader may have
_MOST_TASK_BYTES = 256 << 20  # of their frames
_MOST_REASON = 2000  # characters


class LaneOpening(NamedTuple):
    """A new lane.

    Attributes:
        number: the node's number for it, from 1.
        session: the loader that it belongs to.
        worker: its number among the loader's workers.
        setup: the loader's options, without dataset and functions.
        catalog: the shards that the loader assigns; None: of no such dataset.
        start: where it begins: an `EpochStart`, packed by the loader and not read by the node.
        facts: what the loader's node says of the dataset, with which it has planned.
    """

    number: int
    session: str
    worker: int
    setup: WorkerSetup
    catalog: Catalog | None
    start: bytes
    facts: DatasetInfo


class LaneEnding(NamedTuple):
    """The end of a lane, at one of its tasks or not, whose loader did not ask for it. The process lives on."""

    number: int
    reason: str
    at_task: bool


class HostSetup(NamedTuple):
    """What a process of the service is started with.

    Attributes:
        target: names the definition.
        arguments: the definition's.
        threads: whether its lanes read a blocking dataset in threads (`concurrency`).
        data: the definition itself, where an engine sent it; None: it is imported.
        fingerprint: of the definition that the node has imported; empty: it was sent.
    """

    target: str
    arguments: dict[str, Any]
    threads: bool = False
    data: bytes | None = None
    fingerprint: str = ""

    def run(self, channel: Channel, recorder: Recorder, entered: float) -> None:
        """Serve lanes until the node ends this process. Raises what its channel raises."""
        recorder.time("start_import", perf_counter() - entered)
        began = perf_counter()
        torch.multiprocessing._set_thread_name("asyncloader_lane")
        torch.set_num_threads(1)
        try:
            definition = load_definition(self.target) if self.data is None else PickledDefinition(self.data)
            if self.fingerprint:  # the files may have been changed since the node was started
                definition.check(self.fingerprint, "in the node")
            defined = Defined(definition, self.arguments)
            made = defined.make()
            facts = dataset_info_of(made.dataset)
            host = _Host(channel, recorder, defined, made, facts)
        except (Exception, SystemExit) as error:
            text = line_of(f"{self.target} raised {type(error).__name__}: {error}", MOST_PROBLEM)
            channel.send_all(wire.pack(NOT_MADE, pickle.dumps(text)))
            return  # the node starts another process in a while
        recorder.time("start_dataset", perf_counter() - began)
        channel.send_all(wire.pack(FACTS, pickle.dumps(facts)))
        if facts.problem:
            channel.receive(wait=True)  # until the node ends this process
            return
        concurrent = facts.asynchronous or self.threads
        tune(concurrent=concurrent)
        if concurrent:
            serve_async(host.run_async)
        else:
            host.run()


class _LaneChannel(Channel):
    """A channel whose `send_all` does not wait: one lane's reader must not hold up the others."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop | None) -> None:
        super().__init__(sock, _MOST_FRAME)
        self.recorder = Recorder()
        """What this lane's worker counts. The loader gets it now and then, before an answer."""
        self.sent: Callable[[], None] | None = None
        """Called when all is sent that had to wait, or the loader is gone; only with an event loop."""
        self._loop = loop  # sends the rest; None: the host does
        self._counts_due = 0.0

    def send_all(self, frame: bytes, fds: Any = ()) -> None:
        """Send what the socket takes; the rest follows when it takes more."""
        now = perf_counter()
        if now >= self._counts_due:
            self._counts_due = now + _COUNTS_S
            self.send(wire.pack(wire.COUNTS, self.recorder.packed()))
        if not self.send(frame, fds) and self._loop is not None:
            self._loop.add_writer(self.fileno(), self._writable)

    def _writable(self) -> None:
        try:
            done = self.flush()
        except ConnectionError:  # the loader is gone
            self.ended = done = True
        if done and self._loop is not None:
            self._loop.remove_writer(self.fileno())
            if self.sent is not None:
                self.sent()

    @property
    def full(self) -> bool:
        """Whether so much waits to be sent that nothing may be added. A segment counts as much, whatever its size."""
        return self.unsent_fds > 0 or self.unsent_memory > _MOST_QUEUED

    def close(self) -> None:
        """As `Channel.close`."""
        if self._loop is not None and self.fileno() >= 0:
            self._loop.remove_writer(self.fileno())  # or the loop would keep it for another socket of that number
        self.sent = None
        super().close()


class _Lane:
    def __init__(self, opening: LaneOpening, channel: _LaneChannel, runner: TaskRunner) -> None:
        self.number = opening.number
        self.session = opening.session
        self.channel = channel
        self.runner = runner
        self.frames: deque[tuple[int, bytes]] = deque()
        self.queued = 0  # bytes of them
        self.info = torch_worker._worker_info

    @property
    def ready(self) -> bool:
        """Whether it has something to do, and its loader reads what it is sent."""
        return bool(self.frames) and not self.channel.full

    @property
    def events(self) -> int:
        """What the host waits for. That the loader hangs up is reported in any case."""
        reading = select.POLLIN if self.queued <= _MOST_QUEUED else 0
        return reading | (select.POLLOUT if self.channel.unsent_bytes else 0)


class _LaneLoop(AsyncTaskLoop):
    """Carries out a lane's tasks on the loop of all lanes. `failed` is called before its tasks have ended."""

    def __init__(self, lane: _Lane, failed: Callable[[BaseException, bool], None]) -> None:
        super().__init__(lane.runner)
        self._channel = lane.channel
        self._channel.sent = self._sent
        self._failed = failed

    def _readable(self) -> None:
        super()._readable()
        if self._channel.full:
            self._loop.remove_reader(self._channel.fileno())

    def _sent(self) -> None:
        if self._channel.ended:
            self._end(None)
        elif not self._done.done():
            self._loop.add_reader(self._channel.fileno(), self._readable)

    def _take(self, kind: int, body: bytes) -> None:
        large = len(body) > 1 << 15 and sum(self._tasks.values()) > _MOST_TASK_BYTES
        if kind == wire.TASK and (large or len(self._tasks) >= _MOST_TASKS):
            raise ValueError(f"broken stream: a loader has {len(self._tasks)} tasks or their bytes at one worker")
        super()._take(kind, body)

    def _end(self, error: BaseException | None, *, at_task: bool = False) -> None:
        if error is not None and not self._done.done():
            self._failed(error, at_task)
        super()._end(error)


class _LaneSetup(NamedTuple):
    """A lane's set-up, with the process's dataset or one of its own."""

    opening: LaneOpening
    defined: Defined
    made: Made | None

    def load(self) -> WorkerSetup:
        # Another lane's may be set, and a dataset's length may depend on it: the node's facts were taken without any.
        torch_worker._worker_info = None
        dataset, functions = self.made or self.defined.make()
        # What is stored may have changed since the node's first process was started.
        difference = dataset_info_of(dataset).difference(self.opening.facts)
        if difference:
            raise StateError(
                f"process {os.getpid()} of the node: {difference}. What is stored has changed since the node was "
                "started: start it again, and make a new loader"
            )
        collate_fn, seeded = functions.get("collate_fn"), self.opening.setup.seeded
        init = functions.get("worker_init_fn")
        assert seeded is not None  # a service serves seeded loaders only
        return self.opening.setup._replace(
            dataset=dataset,
            starts=[PLAIN.load_start(self.opening.start)] * (self.opening.worker + 1),
            worker_init_fn=init if self.opening.catalog is None else finding(dataset, self.opening.catalog, init),
            decode=functions.get("decode"),
            collate_fn=collate_fn or self.opening.setup.collate_fn,
            seeded=seeded._replace(seed_collate=collate_fn is not None),
        )


class _Host:
    def __init__(self, channel: Channel, recorder: Recorder, defined: Defined, made: Made, facts: DatasetInfo) -> None:
        self._channel = channel
        self._recorder = recorder
        self._defined = defined
        self._made = made
        self._fresh = True  # `made` was given to no lane yet
        self._shared = not (facts.iterable or facts.asynchronous or facts.stateful)
        self._lanes: dict[int, _Lane] = {}  # by descriptor
        self._used: dict[str, float] = {}  # seconds of each session that has lanes here
        self._draw_check = GlobalDrawCheck()  # one for all lanes: they share the generators
        self._planning: Any = None  # a dataset that no lane has: it makes plans of any number of workers
        self._plans: list[tuple[int, PlanRequest]] = []  # that the node has asked for
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = False

    # ------------------------------------------------------------------------------------------- lanes

    def _control(self) -> list[_Lane]:
        """Read the process's own channel. Returns the lanes that are new."""
        opened = []
        for kind, body in self._channel.receive():
            if kind == wire.STOP:
                self._ended = True
            elif kind == OPEN:
                lane = self._open(pickle.loads(body))
                if lane is not None:
                    opened.append(lane)
            elif kind == PLAN:
                self._plans.append(pickle.loads(body))
        self._ended = self._ended or self._channel.ended
        return opened

    def _open(self, opening: LaneOpening) -> _Lane | None:
        channel: _LaneChannel | None = None
        try:
            sock = socket.socket(fileno=self._channel.take_fd())
            sock.setblocking(False)
            channel = _LaneChannel(sock, self._loop)
            made = self._made if self._shared or self._fresh else None
            self._fresh = False
            setup = _LaneSetup(opening, self._defined, made)
            runner = TaskRunner(
                opening.worker, channel, setup, channel.recorder, perf_counter(), PLAIN, self._draw_check
            )
        except Exception as error:  # the other lanes go on
            self._report(opening.number, error, at_task=False)
            if channel is not None:
                channel.close()
            return None
        lane = _Lane(opening, channel, runner)
        self._add(lane)
        return lane

    def _report(self, number: int, error: BaseException, *, at_task: bool) -> None:
        """Tell the node what ended a lane, unless its loader did: the process lives, so nothing else would."""
        if isinstance(error, ConnectionError):
            return
        kind = type(error).__name__
        try:
            reason = f"{kind}: {error}"
        except Exception:
            reason = kind
        ending = LaneEnding(number, f"Its worker failed, and its process lives on. {reason[:_MOST_REASON]}", at_task)
        with contextlib.suppress(ConnectionError):  # the node is gone, which ends this process
            self._channel.send_all(wire.pack(ENDED, pickle.dumps(ending)))

    def _add(self, lane: _Lane) -> None:
        # A session that comes late does not get the time that it was not there for.
        self._used.setdefault(lane.session, min(self._used.values(), default=0.0))
        self._lanes[lane.channel.fileno()] = lane

    def _close(self, lane: _Lane) -> None:
        self._lanes.pop(lane.channel.fileno(), None)
        lane.channel.close()
        lane.runner.release()
        if torch_worker._worker_info is lane.info:
            torch_worker._worker_info = None  # it has the lane's dataset
        if all(other.session != lane.session for other in self._lanes.values()):
            self._used.pop(lane.session, None)

    # ------------------------------------------------------------------------------------------- blocking

    def run(self) -> None:
        """Carry out the lanes' tasks, one after the other."""
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        while not self._ended:
            busy = any(lane.ready for lane in self._lanes.values())
            for fd, events in poll.poll(0 if busy else None):
                if fd == self._channel.fileno():
                    for lane in self._control():
                        poll.register(lane.channel.fileno(), lane.events)
                    continue
                self._exchange(self._lanes[fd], events)
            following = self._next()
            if following is not None:
                self._carry_out(following)
            for lane in [lane for lane in self._lanes.values() if lane.channel.ended or lane.runner.stopped]:
                poll.unregister(lane.channel.fileno())
                self._close(lane)
            for lane in self._lanes.values():
                poll.modify(lane.channel.fileno(), lane.events)

    def _next(self) -> _Lane | None:
        """The lane whose turn it is: of those with something to do, one of the session that has had the least time."""
        ready = [lane for lane in self._lanes.values() if lane.ready]
        return min(ready, key=lambda lane: self._used[lane.session], default=None)

    def _exchange(self, lane: _Lane, events: int) -> None:
        """Send and receive what the lane's socket takes and has."""
        try:
            lane.channel.flush()
            if not events & select.POLLIN:
                # Perhaps the loader has hung up while nothing was read: nobody wants the answers to what is queued.
                lane.channel.ended = lane.channel.ended or bool(events & ~select.POLLOUT)
                return
            for frame in lane.channel.receive():
                lane.frames.append(frame)
                lane.queued += len(frame[1]) + _FRAME_BYTES
        except ConnectionError:
            lane.channel.ended = True
        except Exception as error:
            self._fail(lane, error, at_task=False)

    def _fail(self, lane: _Lane, error: BaseException, *, at_task: bool) -> None:
        """This lane cannot go on: the others do."""
        if not lane.channel.ended:
            self._report(lane.number, error, at_task=at_task)
        lane.channel.ended = True

    def _carry_out(self, lane: _Lane) -> None:
        kind, body = lane.frames.popleft()
        lane.queued -= len(body) + _FRAME_BYTES
        torch_worker._worker_info = lane.info
        began = perf_counter()
        self._recorder.put(LANE_KEY, lane.number)
        try:
            if kind == wire.TASK:
                lane.runner.task(body)
            else:
                lane.runner.control(kind, body)
        except Exception as error:  # the loader is gone, or sent what is no frame of ours, or the dataset is at fault
            self._fail(lane, error, at_task=kind == wire.TASK)
        self._recorder.put(LANE_KEY, 0)
        seconds = perf_counter() - began
        self._used[lane.session] += seconds
        if kind == wire.TASK:
            self._recorder.time("fetch", seconds)

    # ------------------------------------------------------------------------------------------- asynchronous

    async def run_async(self) -> None:
        """Carry out the lanes' tasks, all at a time."""
        loop = self._loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        current: Any = _CurrentInfo()

        def readable() -> None:
            opened = self._control()
            torch_worker._worker_info = current  # each new lane has put its own there
            for lane in opened:
                context = copy_context()
                context.run(_info.set, lane.info)
                group.create_task(self._run_lane(lane), context=context)
            while self._plans:
                group.create_task(self._plan(*self._plans.pop()))
            if self._ended and not done.done():
                done.set_result(None)

        async with asyncio.TaskGroup() as group:
            loop.add_reader(self._channel.fileno(), readable)
            try:
                await done
            finally:
                loop.remove_reader(self._channel.fileno())
                for lane in self._lanes.values():
                    lane.runner.stopped = True
                    lane.channel.sock.shutdown(socket.SHUT_RDWR)

    async def _plan(self, number: int, request: PlanRequest) -> None:
        answer: Any
        try:
            if self._planning is None:
                self._planning = self._defined.make().dataset
            answer = await planned(self._planning, request)
        except Exception as error:
            answer = PLAIN.dump_error(error, 0)
        self._channel.send_all(wire.pack(PLANNED, pickle.dumps((number, answer))))

    async def _run_lane(self, lane: _Lane) -> None:
        try:
            await _LaneLoop(lane, lambda error, at_task: self._fail(lane, error, at_task=at_task)).run()
        except Exception:  # as in `_carry_out`
            lane.channel.ended = True
        finally:
            self._close(lane)


_info: ContextVar[Any] = ContextVar("asyncloader_worker_info", default=None)


class _CurrentInfo:
    """What `torch.utils.data.get_worker_info` returns where several lanes run on one loop: the current lane's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_info.get(), name)
