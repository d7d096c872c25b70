"""Datapipes behind queues: requests and responses, in threads and processes, and what fails at the other end."""

from __future__ import annotations

import functools
import multiprocessing
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.map import SequenceWrapper

from asyncloader.dataloader2.communication import messages
from asyncloader.dataloader2.communication.eventloop import (
    CreateProcessForMultipleDataPipelines,
    DataPipeToQueuesLoop,
    MultipleDataPipesToQueuesLoop,
)
from asyncloader.dataloader2.communication.iter import (
    EnsureNonBlockingDataPipe,
    InvalidStateResetRequired,
    NonBlocking,
    NotAvailable,
    QueueWrapper,
    TerminateRequired,
)
from asyncloader.dataloader2.communication.map import NonBlockingMap, QueueWrapperForMap
from asyncloader.dataloader2.communication.protocol import (
    EmptyQueue,
    IterDataPipeQueueProtocolClient,
    IterDataPipeQueueProtocolServer,
    MapDataPipeQueueProtocolClient,
    ProtocolServer,
)
from asyncloader.dataloader2.communication.queue import LocalQueue, ThreadingQueue
from asyncloader.dataloader2.graph.utils import DataPipe
from asyncloader.dataloader2.random import SeedGenerator
from asyncloader.errors import WorkerDied
from tests.dataloader2.parts import dies_at_5, double, fails_at_5, numbers, process
from tests.dataloader2.queues import INFO, METHODS, begun, end, in_process


@contextmanager
def in_thread(*graphs: Any, kind: Any = IterDataPipeQueueProtocolClient) -> Generator[list[Any]]:
    """Clients of a loop in a thread, for each graph one."""
    pairs = [(ThreadingQueue(), ThreadingQueue()) for _ in graphs]
    clients = [kind(*pair) for pair in pairs]
    if len(graphs) == 1:
        arguments: Any = (graphs[0], *pairs[0])
        loop: Callable[..., None] = DataPipeToQueuesLoop
    else:
        arguments = (graphs, [pair[0] for pair in pairs], [pair[1] for pair in pairs])
        loop = MultipleDataPipesToQueuesLoop
    thread = threading.Thread(target=loop, args=(*arguments, "thread", INFO))
    thread.start()
    try:
        yield clients
    finally:
        for each in clients:
            each.request_terminate()
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("method", METHODS)
def test_epochs_of_a_process(method: str) -> None:
    """Items come from there, epochs begin anew, and seeds are those that were sent."""
    with in_process(numbers(20).shuffle().map(process), method) as (child, client):
        epochs = [list(begun(client, seed)) for seed in (1, 1, 2)]
    orders = [[x for x, _ in epoch] for epoch in epochs]
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert {pid for _, pid in epochs[0]}.isdisjoint({os.getpid()})
    del child


def test_one_request_at_a_time() -> None:
    """A second one is refused by name; so is a response to nothing, or to something else."""
    client = IterDataPipeQueueProtocolClient(LocalQueue(), LocalQueue())
    server = IterDataPipeQueueProtocolServer(client.request_queue, client.response_queue)
    with pytest.raises(Exception, match="Can not expect any response without submitted request"):
        client.get_response_next()
    with pytest.raises(EmptyQueue):
        server.get_new_request()
    with pytest.raises(Exception, match="Attempting to reply with pending request"):
        server.response_next(1)
    client.request_next()
    assert client.waiting_for_response()
    for call, what in (
        (client.request_next, "request next item"),
        (functools.partial(client.request_limit, 1), "`limit`"),
        (client.request_pause, "`pause`"),
        (client.request_resume, "`resume`"),
        (functools.partial(client.request_reset_epoch, SeedGenerator(1), None), "reset"),
    ):
        with pytest.raises(Exception, match=f"Can not {what} while we are still waiting"):
            call()
    with pytest.raises(Exception, match="Protocol only supports one request in the Queue"):
        client.request_sent()
    server.get_new_request()
    with pytest.raises(Exception, match="Trying to get next request, while having one un-served"):
        server.get_new_request()
    for respond, name in ((server.response_pause, "pause"), (server.response_reset_epoch, "reset_epoch")):
        with pytest.raises(Exception, match=f"Replaying with `{name}` status to other type of message"):
            respond()
    server.response_invalid_state()
    assert isinstance(client.get_response_next(), messages.InvalidStateResponse)
    with pytest.raises(Exception, match="Expected no pending requests, but something got served"):
        client.request_served()
    client.request_pause()
    ProtocolServer(client.request_queue, client.response_queue).get_new_request()
    client.response_queue.put(messages.LimitResponse())
    with pytest.raises(Exception, match="Invalid response received when expecting `PauseResponse`"):
        client.get_response_pause()


def test_errors_cross() -> None:
    """With type and traceback; the epoch is over then, and the next one begins. Also those of other requests."""
    with in_process(numbers(9).map(fails_at_5)) as (_, client):
        for _ in range(2):
            wrapper = begun(client)
            assert [next(wrapper) for _ in range(5)] == [0, 1, 2, 3, 4]
            with pytest.raises(ValueError, match=r"(?s)^Caught ValueError in worker process 0\..*in fails_at_5"):
                next(wrapper)
            with pytest.raises(Exception, match="called after receiving StopIteration"):
                next(wrapper)
        client.request_next()
        assert isinstance(client.get_response_next(block=True), messages.StopIterationResponse)
        client.request_limit(3, raises)
        with pytest.raises(ZeroDivisionError):
            client.get_response_limit(block=True)
        client.request_queue.put(messages.Request())
        client.request_sent()
        with pytest.raises(Exception, match="Unrecognized type of request received"):
            client.get_response_pause(block=True)


def raises(*_: Any) -> Any:
    return 1 / 0


def to_lambda(_: Any) -> Any:
    return lambda: None


def test_what_cannot_be_pickled() -> None:
    """An item is an error of the other end, and a request one of this: nobody waits for what was never sent."""
    with in_process(numbers(3).map(to_lambda)) as (_, client):
        wrapper = begun(client)
        with pytest.raises(Exception, match="in worker process 0"):
            next(wrapper)
        with pytest.raises(Exception, match="pickle"):
            client.request_limit(1, lambda datapipe, _: datapipe)
        assert client.can_take_request()


def test_pause_resume_and_limit() -> None:
    """They reach the graph; while it is paused no item comes, with a warning; a limit's function changes the graph."""
    graph = numbers(30).prefetch(2)
    with in_thread(graph) as (client,):
        wrapper = begun(client)
        assert next(wrapper) == 0
        wrapper.request_pause()
        wrapper.get_pause_response()
        client.request_next()
        with pytest.warns(UserWarning, match="Cannot `GetNext` after `Pause` has been called"):
            assert isinstance(client.get_response_next(block=True), messages.StopIterationResponse)
        wrapper.request_resume()
        wrapper.get_resume_response()
        assert next(wrapper) == 1
        wrapper.request_limit(4, limited, 2)
        wrapper.get_limit_response()
        assert list(begun(client)) == [0, 1]
        wrapper.request_pause(doubled)
        wrapper.get_pause_response()
        wrapper.request_resume(doubled)
        wrapper.get_resume_response()
        assert list(begun(client)) == [0, 4]


class Limited(IterDataPipe[Any]):
    def __init__(self, source: Any, count: int) -> None:
        self.source, self.count = source, count

    def __iter__(self) -> Iterator[Any]:
        yield from [x for x, _ in zip(self.source, range(self.count), strict=False)]


def limited(datapipe: Any, count: int | None) -> DataPipe:
    return Limited(datapipe, count or 0)


def doubled(datapipe: Any) -> DataPipe:
    changed: DataPipe = datapipe.map(double)
    return changed


@pytest.mark.parametrize("method", METHODS)
def test_several_loops_in_one_process(method: str) -> None:
    """Their graph is changed once, when all were asked; each has its items; they end when all were told."""
    graphs = numbers(7).shuffle().round_robin_demux(2)
    context = multiprocessing.get_context(method)
    child, requests, responses = CreateProcessForMultipleDataPipelines(context, graphs, "dispatching process", INFO)
    child.start()
    wrappers = [QueueWrapper(IterDataPipeQueueProtocolClient(*pair)) for pair in zip(requests, responses, strict=True)]
    seen = []
    for _ in range(2):
        for each in wrappers:
            assert each.protocol.can_take_request()
            each.request_reset_epoch(SeedGenerator(5), None)
            if each is wrappers[0]:
                with pytest.raises(queue.Empty):  # it waits for the other's
                    responses[0].get(timeout=0.2)
        for each in wrappers:
            each.get_reset_epoch_response()
        seen.append([list(each) for each in wrappers])
    assert seen[0] == seen[1]
    assert sorted(seen[0][0] + seen[0][1]) == list(range(7))
    wrappers[0].request_pause()
    wrappers[1].protocol.request_terminate()
    assert isinstance(responses[1].get(timeout=60), messages.TerminateResponse)
    with pytest.raises(TerminateRequired, match="another reader of this graph has ended"):
        wrappers[0].get_pause_response()
    wrappers[1].protocol = wrappers[0].protocol
    end(child, wrappers[0].protocol)
    for each in (requests[1], responses[1]):
        each.close()
        each.join_thread()


def test_a_change_that_fails_holds_nobody() -> None:
    """The loop that made it says so; the others go on."""
    first, second = numbers(4).round_robin_demux(2)
    with in_thread(first, second) as clients:
        for each in clients:
            each.request_limit(1, raises)
        with pytest.raises(ZeroDivisionError):
            clients[0].get_response_limit(block=True)
        clients[1].get_response_limit(block=True)
        for each in clients:
            each.request_reset_epoch(SeedGenerator(1), None)
        for each in clients:
            each.get_response_reset_epoch(block=True)
        assert [list(QueueWrapper(each)) for each in clients] == [[0, 2], [1, 3]]


def test_map_datapipes() -> None:
    """Items by keys, the length, a missing item, and an error."""
    with in_process(SequenceWrapper([5, 6, 7]).map(double)) as (_, client):
        client.request_reset_epoch(SeedGenerator(1), None)
        client.get_response_reset_epoch(block=True)
        wrapper = QueueWrapperForMap(client)
        assert (len(wrapper), wrapper[1], wrapper[0]) == (3, (1, 12), (0, 10))
        with pytest.raises(IndexError, match=r"Index 3 is out of bound\."):
            wrapper[3]
        with pytest.raises(Exception, match="called after receiving StopIteration"):
            wrapper[0]
    failing = SequenceWrapper([5]).map(fails_at_5)
    error = pytest.raises(ValueError, match="Caught ValueError in thread 0")
    with in_thread(failing, kind=MapDataPipeQueueProtocolClient) as (client,), error:
        QueueWrapperForMap(client)[0]


class Later(NonBlocking):
    """Has an item every other time that it is asked; first it wants an epoch."""

    def __init__(self) -> None:
        self.asked = -1

    def nonblocking_next(self) -> int:
        if self.asked < 0:
            raise InvalidStateResetRequired
        self.asked += 1
        if self.asked % 2:
            raise NotAvailable
        if self.asked > 6:
            raise StopIteration
        return self.asked

    def reset_iterator(self) -> None:
        self.asked = 0


def test_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A datapipe may say that it has nothing yet; a hook is called meanwhile; others are given the two methods."""
    waits: list[int] = []
    monkeypatch.setattr(NonBlocking, "not_available_hook", NonBlocking.not_available_hook)
    NonBlocking.register_not_available_hook(lambda: waits.append(1))
    assert list(Later()) == [2, 4, 6]
    assert len(waits) == 4
    with in_thread(Later()) as (client,):
        client.request_next()
        assert isinstance(client.get_response_next(block=True), messages.InvalidStateResponse)
        assert list(begun(client)) == [2, 4, 6]
    plain = EnsureNonBlockingDataPipe(numbers(2))
    assert EnsureNonBlockingDataPipe(plain) is plain
    assert [plain.nonblocking_next(), plain.nonblocking_next()] == [0, 1]
    plain.reset_iterator()
    assert plain.nonblocking_next() == 0
    for missing in (NonBlocking().nonblocking_next, NonBlocking().reset_iterator, NonBlockingMap().nonblocking_len):
        with pytest.raises(NotImplementedError):
            missing()


def test_a_process_that_dies() -> None:
    """Whoever waits for it is told."""
    with in_process(numbers(9).map(dies_at_5)) as (child, client):
        wrapper = begun(client)
        assert [next(wrapper) for _ in range(5)] == [0, 1, 2, 3, 4]
        with pytest.raises(WorkerDied) as caught:
            next(wrapper)
        child.join()
        assert (caught.value.pid, caught.value.worker_id) == (child.pid, 0)
        assert "worker process" in str(caught.value)


def test_a_process_ends_with_its_parent() -> None:
    """Though nobody tells it."""
    script = """
import multiprocessing, os
from asyncloader.dataloader2.communication.eventloop import CreateProcessForDataPipeline
from asyncloader.dataloader2.utils import WorkerInfo
from tests.dataloader2.parts import numbers
child, *queues = CreateProcessForDataPipeline(multiprocessing.get_context("fork"), numbers(3), "x", WorkerInfo(1, 0))
child.start()
print(child.pid, flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
    try:
        poll = select.poll()
        poll.register(pidfd)
        assert poll.poll(60_000)
    finally:
        os.close(pidfd)


def test_queues_in_one_process() -> None:
    """First in, first out; an empty local one is not waited for."""
    for kind in (LocalQueue, ThreadingQueue):
        here: Any = kind("name")
        here.put(1)
        here.put(2)
        assert (here.name, here.get(), here.get()) == ("name", 1, 2)
        with pytest.raises(queue.Empty):
            here.get(block=False)
    with pytest.raises(queue.Empty):
        LocalQueue().get()


class _Unreadable:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def _unreadable(x: int) -> Any:
    return _Unreadable() if x == 1 else x


def test_what_cannot_be_unpickled() -> None:
    """Its error is raised here; nothing waits for it after that, and errors of local classes come as text."""

    class LocalError(Exception):
        pass

    def fails(x: int) -> Any:
        raise LocalError("local")

    with in_process(numbers(3).map(_unreadable)) as (_, client):
        reader = begun(client)
        assert next(reader) == 0
        with pytest.raises(ValueError, match="no number"):
            next(reader)
        client.discard_existing_request()
        assert next(reader) == 2
    with pytest.warns(UserWarning, match="Local function"):
        graph = numbers(3).map(fails)
    with in_process(graph) as (_, client), pytest.raises(RuntimeError, match="Caught LocalError in worker process 0"):
        next(begun(client))


def test_a_pause_leaves_the_source_alone() -> None:
    """From when it returns on: an item that was being read has come."""
    reading, go_on = threading.Event(), threading.Event()

    class Slow(IterDataPipe[int]):
        def __iter__(self) -> Iterator[int]:
            for x in range(3):
                if x:
                    reading.set()
                    assert go_on.wait(60)
                yield x

    source: Any = Slow()
    ahead = source.prefetch(9)
    items = iter(ahead)
    assert next(items) == 0
    assert reading.wait(60)
    paused = threading.Thread(target=ahead.pause)
    paused.start()
    go_on.set()
    paused.join(60)
    assert not paused.is_alive()
    read = ahead._ahead._buffer
    assert (read.paused, read.reading) == (True, False)
    ahead.resume()
    assert list(items) == [1, 2]
