"""Iterable datapipes at both ends of a pair of queues: what answers for one, and what reads it.

Data path: datapipe -> [iter: DataPipeBehindQueues] -> response queue -> [iter: QueueWrapper] -> graph.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from types import MethodType
from typing import Any, ClassVar

from torch.utils.data import IterDataPipe
from torch.utils.data.graph import traverse_dps

import asyncloader.dataloader2.communication.messages as messages  # noqa: PLR0402 - the package imports this module
from asyncloader.dataloader2.communication.protocol import (
    Change,
    EmptyQueue,
    IterDataPipeQueueProtocolClient,
    IterDataPipeQueueProtocolServer,
    ProtocolError,
)
from asyncloader.dataloader2.communication.together import Together
from asyncloader.dataloader2.graph.utils import DataPipe, list_dps
from asyncloader.dataloader2.random.seed_generator import SeedGenerator
from asyncloader.dataloader2.services.interface import ResetFn, shutdown_graph
from asyncloader.dataloader2.utils.worker import WorkerInfo, process_reset_fn
from asyncloader.workers.error_pickle import caught

__all__ = [
    "DEFAULT_NON_BLOCKING_SLEEP",
    "DataPipeBehindQueues",
    "EnsureNonBlockingDataPipe",
    "InvalidStateResetRequired",
    "NonBlocking",
    "NotAvailable",
    "QueueWrapper",
    "TerminateRequired",
    "default_not_available_hook",
]

DEFAULT_NON_BLOCKING_SLEEP = 0.001
"""Seconds between two questions to a `NonBlocking` datapipe."""


def default_not_available_hook() -> None:
    """Wait a moment."""
    time.sleep(DEFAULT_NON_BLOCKING_SLEEP)


class NotAvailable(Exception):
    """The next item is not there yet."""


class InvalidStateResetRequired(Exception):
    """The datapipe first needs to begin an epoch, for example because other readers of it began one."""


class TerminateRequired(Exception):
    """What the datapipe reads from ends."""


class NonBlocking(IterDataPipe[Any]):
    """A datapipe that can be asked for an item without waiting for it.

    Derive from it, and define `nonblocking_next` and `reset_iterator`. Iterated, it asks until the item is there, and
    calls the hook between two questions.
    """

    not_available_hook: ClassVar[Any] = default_not_available_hook  # a function without arguments, or None

    def __iter__(self) -> Iterator[Any]:
        self.reset_iterator()
        return self

    def __next__(self) -> Any:
        while True:
            try:
                return self.nonblocking_next()
            except NotAvailable:
                if NonBlocking.not_available_hook is not None:
                    NonBlocking.not_available_hook()

    def nonblocking_next(self) -> Any:
        """The next item.

        Raises:
            NotAvailable: it is not there yet.
            StopIteration: there is none.
        """
        raise NotImplementedError(f"nonblocking_next is not implemented for {self.__class__}")

    def reset_iterator(self) -> None:
        """Begin again."""
        raise NotImplementedError(f"reset_iterator is not implemented for {self.__class__}")

    @staticmethod
    def register_not_available_hook(hook_function: Callable[[], object] | None) -> None:
        """Have a function called between two questions, for all datapipes of this process; None: ask again at once."""
        NonBlocking.not_available_hook = hook_function


def EnsureNonBlockingDataPipe(validated_datapipe: Any) -> Any:  # noqa: N802 - as in torchdata
    """The datapipe itself, with `nonblocking_next` and `reset_iterator`, which wait if they must."""
    if not isinstance(validated_datapipe, IterDataPipe):
        raise TypeError(f"Not Iterable DataPipe {validated_datapipe.__class__}")
    found: Any = validated_datapipe
    if isinstance(found, NonBlocking):
        return found
    if not hasattr(found, "_as_iterator"):
        found._as_iterator = None
    for method in (nonblocking_next, reset_iterator):
        if not hasattr(found, method.__name__):
            setattr(found, method.__name__, MethodType(method, found))
    return found


def nonblocking_next(datapipe: Any) -> Any:
    """The next item of any datapipe."""
    if datapipe._as_iterator is None:
        datapipe._as_iterator = iter(datapipe)
    return next(datapipe._as_iterator)


def reset_iterator(datapipe: Any) -> None:
    """Have `nonblocking_next` begin again."""
    datapipe._as_iterator = None


def DataPipeBehindQueues(  # noqa: N802 - as in torchdata
    source_datapipe: Any,
    protocol: IterDataPipeQueueProtocolServer,
    process_name: str,
    loop_id: int,
    worker_info: WorkerInfo,
    custom_reset_fn: ResetFn | None,
    blocking_request_get: bool = False,
    request_counter: Together | None = None,
) -> Generator[bool, None, None]:
    """Answer requests for a datapipe until it is told to end.

    Each error of a request is its response. After one in an item the epoch is over; the next may begin.

    Args:
        source_datapipe: the end of the graph.
        protocol: the server's side.
        process_name: for errors.
        loop_id: its number among the loops of this process, or of the worker.
        worker_info: for `custom_reset_fn`.
        custom_reset_fn: changes the graph at the beginning of each epoch.
        blocking_request_get: whether to wait for requests, rather than yield.
        request_counter: of several loops that share one graph: changes of it happen once, when all of them were asked.

    Yields:
        Whether it goes on by itself; False: it waits for a request.
    """
    if not isinstance(protocol, IterDataPipeQueueProtocolServer):
        raise TypeError(f"Expecting IterDataPipeQueueProtocolServer, got {protocol}")
    source = EnsureNonBlockingDataPipe(source_datapipe)
    respond = {
        messages.ResetEpochRequest: protocol.response_reset_epoch,
        messages.LimitRequest: protocol.response_limit,
        messages.PauseRequest: protocol.response_pause,
        messages.ResumeRequest: protocol.response_resume,
    }
    over = False
    while True:
        try:
            request = protocol.get_new_request(block=blocking_request_get)
        except EmptyQueue:
            yield False
            continue
        kind = type(request)
        try:
            if kind is messages.TerminateRequest:
                if request_counter is not None:
                    request_counter.ended = True
                with contextlib.suppress(Exception):  # of what this reads, which has ended before
                    shutdown_graph(source)
                    for reader in _readers(source):
                        reader.request_terminate()
                protocol.response_terminate()
                return
            if kind in respond:
                if request_counter is not None and not (yield from request_counter.meet(f"{kind.__name__} came")):
                    raise TerminateRequired("another reader of this graph has ended")
                try:
                    if request_counter is None or loop_id == 0:
                        shared = request_counter is not None
                        source = _changed(source, request, worker_info, custom_reset_fn, shared)
                    if kind is messages.ResetEpochRequest:
                        source.reset_iterator()
                        over = False
                finally:  # the others are not left waiting for one that failed
                    if request_counter is not None:
                        yield from request_counter.meet(f"{kind.__name__} done")
                respond[kind]()
            elif kind is not messages.GetNextRequest:
                raise ProtocolError("Unrecognized type of request received", request)
            elif over or protocol.is_paused():
                protocol.response_stop_iteration()
                if protocol.is_paused():
                    warnings.warn(_PAUSED, stacklevel=2)
            else:
                while True:
                    try:
                        value = source.nonblocking_next()
                    except NotAvailable:
                        yield True
                        continue
                    break
                protocol.response_next(value)
        except StopIteration:
            over = True
            protocol.response_stop_iteration()
        except InvalidStateResetRequired:
            protocol.response_invalid_state()
        except Exception:
            over = True
            protocol.response_worker_exception(caught(f"in {process_name} {loop_id}"))
        yield True


_PAUSED = (
    "Cannot `GetNext` after `Pause` has been called. "
    "`Resume` must be called first before additional elements can be yielded."
)


def _changed(source: Any, request: Any, worker: WorkerInfo, custom_reset_fn: ResetFn | None, shared: bool) -> Any:
    """The graph after a request that changes it; what it reads from other processes is asked for the same."""
    readers = _readers(source)
    parts: list[Any] = list_dps(traverse_dps(source))
    if isinstance(request, messages.ResetEpochRequest):
        shutdown_graph(source)  # a thread that reads ahead would take the readers' responses
        for each in readers:
            each.reset_epoch(request.seed_generator, request.iter_reset_fn)
        source = process_reset_fn(
            source, worker, request.seed_generator, shared, request.iter_reset_fn, custom_reset_fn
        )
    elif isinstance(request, messages.LimitRequest):
        worker_num_batches = request.num_batches if request.worker_num_batches is None else request.worker_num_batches
        for each in readers:
            each.request_limit(request.num_batches, request.limit_fn, worker_num_batches)
        if request.limit_fn is not None:
            source = request.limit_fn(source, worker_num_batches)
    elif isinstance(request, messages.PauseRequest):
        for each in parts:
            if callable(getattr(each, "pause", None)):
                each.pause()
        for each in readers:
            each.request_pause(request.pause_fn)
        if request.pause_fn is not None:
            source = request.pause_fn(source)
    else:
        if request.resume_fn is not None:
            source = request.resume_fn(source)
        for each in readers:
            each.request_resume(request.resume_fn)
        for each in reversed(parts):
            if callable(getattr(each, "resume", None)):
                each.resume()
    return EnsureNonBlockingDataPipe(source)


class QueueWrapper(NonBlocking):
    """Reads a datapipe in another process. An epoch must be requested before it is read.

    Args:
        protocol: the client's side.
        response_wait_time: seconds that `nonblocking_next` waits for an item; default 0.00001.

    Raises:
        WorkerDied: in any of its methods: the process of `eventloop` that it reads from has ended.
    """

    def __init__(self, protocol: IterDataPipeQueueProtocolClient, response_wait_time: float = 0.00001) -> None:
        if not isinstance(protocol, IterDataPipeQueueProtocolClient):
            raise TypeError(f"Expecting IterDataPipeQueueProtocolClient, got {protocol}")
        self.protocol = protocol
        self.counter = 0
        self._stop_iteration = False
        self._response_wait_time = response_wait_time

    def request_reset_epoch(self, seed_generator: SeedGenerator, iter_reset_fn: Change | None) -> None:
        """Begin an epoch."""
        self._stop_iteration = False
        self.counter = 0
        self.protocol.request_reset_epoch(seed_generator, iter_reset_fn)

    def get_reset_epoch_response(self) -> None:
        """Wait until it has begun; raises what failed there."""
        self.protocol.get_response_reset_epoch(block=True)

    def request_limit(
        self,
        num_batches: int | None,
        limit_fn: Callable[[DataPipe, int | None], DataPipe] | None = None,
        worker_num_batches: int | None = None,
    ) -> None:
        """Limit the graph."""
        self.protocol.request_limit(num_batches, limit_fn, worker_num_batches)

    def get_limit_response(self) -> None:
        """Wait until it is limited; raises what failed there."""
        self.protocol.get_response_limit(block=True)

    def request_pause(self, pause_fn: Change | None = None) -> None:
        """Pause the graph."""
        self.protocol.request_pause(pause_fn)

    def get_pause_response(self) -> None:
        """Wait until it has paused; raises what failed there."""
        self.protocol.get_response_pause(block=True)

    def request_resume(self, resume_fn: Change | None = None) -> None:
        """Have the graph read on."""
        self.protocol.request_resume(resume_fn)

    def get_resume_response(self) -> None:
        """Wait until it reads on; raises what failed there."""
        self.protocol.get_response_resume(block=True)

    def reset_iterator(self) -> None:
        """Nothing: `request_reset_epoch` begins again."""

    def nonblocking_next(self) -> Any:
        """See `NonBlocking`; raises the error of the other process, too."""
        return self._item(self._response_wait_time)

    def __next__(self) -> Any:
        if NonBlocking.not_available_hook is not default_not_available_hook:
            return super().__next__()
        while True:  # without polling
            try:
                return self._item(None)
            except NotAvailable:  # another reader of the same graph has not begun the epoch
                default_not_available_hook()

    def _item(self, timeout: float | None) -> Any:
        if self._stop_iteration:
            raise ProtocolError("`next` or `nonblocking_next` called after receiving StopIteration")
        if self.protocol.can_take_request():
            self.protocol.request_next()
        try:
            response = self.protocol.get_response_next(block=True, timeout=timeout)
        except EmptyQueue:
            raise NotAvailable from None
        if isinstance(response, messages.InvalidStateResponse):
            raise NotAvailable
        self._stop_iteration = not isinstance(response, messages.GetNextResponse)
        return _value(response)


def _value(response: Any) -> Any:
    """Of a response to a request for an item: the item; raises what came instead of it."""
    if isinstance(response, messages.StopIterationResponse):
        raise StopIteration
    if isinstance(response, messages.InvalidStateResponse):
        raise InvalidStateResetRequired
    if isinstance(response, messages.TerminateResponse):
        raise TerminateRequired
    if isinstance(response, messages.WorkerExceptionResponse):
        response.exc.reraise()
    return response.value


class _IterateQueueDataPipes(IterDataPipe[Any]):
    """Reads several `QueueWrapper`, an item of each in turn; those without more are passed over.

    Each of them has one request under way, as far as the limit allows.

    Args:
        datapipes: the wrappers.
    """

    def __init__(self, datapipes: list[QueueWrapper]) -> None:
        for each in datapipes:
            if not isinstance(each, QueueWrapper):
                raise TypeError("Source datapipes should be an instance of iter.QueueWrapper")
        self.datapipes = datapipes
        self.res_buffers: list[deque[Any]] = [deque() for _ in datapipes]
        self._terminated = False
        self._limit: int | None = None
        self._request_cnt = 0

    def __iter__(self) -> Iterator[Any]:
        living = set(range(len(self.datapipes)))
        turn = -1
        while living and not self._terminated:
            turn = (turn + 1) % len(self.datapipes)
            if turn not in living:
                continue
            for number in sorted(living, key=lambda number: (number - turn) % len(self.datapipes)):
                if self._limit is None or self._request_cnt < self._limit or number == turn:
                    self._request(number)
            try:
                value = _value(self._response(turn))
            except StopIteration:
                living.discard(turn)
                continue
            yield value

    def _request(self, number: int) -> None:
        if not self.res_buffers[number] and self.datapipes[number].protocol.can_take_request():
            self.datapipes[number].protocol.request_next()
            self._request_cnt += 1

    def _response(self, number: int) -> Any:
        waiting = self.res_buffers[number]
        return waiting.popleft() if waiting else self.datapipes[number].protocol.get_response_next(block=True)

    def reset_epoch(self, seed_generator: SeedGenerator, iter_reset_fn: Change | None) -> None:
        """Begin an epoch in all of them, each with seeds of its own; wait until it has begun."""
        self._request_cnt = 0
        for each in self.datapipes:
            each.protocol.discard_existing_request()
        for waiting in self.res_buffers:
            waiting.clear()
        for number, each in enumerate(self.datapipes):
            each.request_reset_epoch(seed_generator.spawn(number), iter_reset_fn)
        for each in self.datapipes:
            each.get_reset_epoch_response()

    def request_pause(self, pause_fn: Change | None = None) -> None:
        """Pause all of them, and wait for that. Items under way are kept."""
        for number, each in enumerate(self.datapipes):
            if each.protocol.waiting_for_response():
                self.res_buffers[number].append(each.protocol.get_response_next(block=True))
        for each in self.datapipes:
            each.request_pause(pause_fn)
        for each in self.datapipes:
            each.get_pause_response()

    def request_resume(self, resume_fn: Change | None = None) -> None:
        """Have all of them read on, and wait for that. A limit counts anew."""
        for each in self.datapipes:
            each.request_resume(resume_fn)
        for each in self.datapipes:
            each.get_resume_response()
        self._request_cnt = 0

    def request_limit(
        self,
        num_batches: int | None,
        limit_fn: Callable[[DataPipe, int | None], DataPipe] | None = None,
        worker_num_batches: int | None = None,
    ) -> None:
        """Limit all of them together to so many batches, or each to its own number; wait for that."""
        self._limit = num_batches if worker_num_batches is None else worker_num_batches
        shares: list[int | None] = [None] * len(self.datapipes)
        if num_batches is not None and worker_num_batches is None:
            each_of_them, more = divmod(num_batches, len(self.datapipes))
            shares = [each_of_them + (number < more) for number in range(len(self.datapipes))]
        for each, share in zip(self.datapipes, shares, strict=True):
            each.request_limit(num_batches, limit_fn, share)
        for each in self.datapipes:
            each.get_limit_response()

    def request_terminate(self) -> None:
        """Have all of them end."""
        self._terminated = True
        for each in self.datapipes:
            each.protocol.discard_existing_request()
        for each in self.datapipes:
            each.protocol.request_terminate()


def _readers(datapipe: Any) -> list[Any]:
    return [each for each in list_dps(traverse_dps(datapipe)) if isinstance(each, _IterateQueueDataPipes)]
