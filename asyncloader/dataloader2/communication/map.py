"""Map-style datapipes at both ends of a pair of queues: what answers for one, and what reads it.

Data path: datapipe -> [map: DataPipeBehindQueues] -> response queue -> [map: QueueWrapperForMap] -> graph.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, ClassVar

from torch.utils.data import MapDataPipe

import asyncloader.dataloader2.communication.messages as messages  # noqa: PLR0402 - the package imports this module
from asyncloader.dataloader2.communication.iter import NotAvailable, default_not_available_hook
from asyncloader.dataloader2.communication.protocol import (
    EmptyQueue,
    MapDataPipeQueueProtocolClient,
    MapDataPipeQueueProtocolServer,
    ProtocolError,
)
from asyncloader.dataloader2.services.interface import ResetFn
from asyncloader.dataloader2.utils.worker import WorkerInfo, process_reset_fn
from asyncloader.workers.error_pickle import caught

__all__ = [
    "DataPipeBehindQueues",
    "EnsureNonBlockingMapDataPipe",
    "NonBlockingMap",
    "NotAvailable",
    "QueueWrapperForMap",
    "default_not_available_hook",
]


class NonBlockingMap(MapDataPipe[Any]):
    """A map-style datapipe that can be asked for an item without waiting for it.

    Derive from it, and define `nonblocking_len` and `nonblocking_getitem`. Indexed, it asks until the item is there,
    and calls the hook between two questions.
    """

    not_available_hook: ClassVar[Any] = default_not_available_hook  # a function without arguments, or None

    def __getitem__(self, index: Any) -> Any:
        return self._asked(lambda: self.nonblocking_getitem(index))

    def __len__(self) -> int:
        return int(self._asked(self.nonblocking_len))

    @staticmethod
    def _asked(question: Callable[[], Any]) -> Any:
        while True:
            try:
                return question()
            except NotAvailable:
                if NonBlockingMap.not_available_hook is not None:
                    NonBlockingMap.not_available_hook()

    def nonblocking_len(self) -> int:
        """The length; raises `NotAvailable`."""
        raise NotImplementedError(f"nonblocking_len is not implemented for {self.__class__}")

    def nonblocking_getitem(self, index: Any) -> Any:
        """The item; raises `NotAvailable`."""
        raise NotImplementedError(f"nonblocking_getitem is not implemented for {self.__class__}")

    @staticmethod
    def register_not_available_hook(hook_function: Callable[[], object] | None) -> None:
        """Have a function called between two questions, for all datapipes of this process; None: ask again at once."""
        NonBlockingMap.not_available_hook = hook_function


def EnsureNonBlockingMapDataPipe(validated_datapipe: Any) -> Any:  # noqa: N802 - as in torchdata
    """The datapipe itself, with `nonblocking_len` and `nonblocking_getitem`, which wait if they must."""
    if not isinstance(validated_datapipe, MapDataPipe):
        raise TypeError(f"Not Map DataPipe - got {validated_datapipe.__class__}")
    found: Any = validated_datapipe
    if not hasattr(found, "nonblocking_len"):
        found.nonblocking_len = found.__len__
    if not hasattr(found, "nonblocking_getitem"):
        found.nonblocking_getitem = found.__getitem__
    return found


def DataPipeBehindQueues(  # noqa: N802 - as in torchdata
    source_datapipe: Any,
    protocol: MapDataPipeQueueProtocolServer,
    process_name: str,
    loop_id: int,
    worker_info: WorkerInfo,
    custom_reset_fn: ResetFn | None,
    blocking_request_get: bool = False,
    request_counter: Any = None,
) -> Generator[bool, None, None]:
    """Answer requests for a map-style datapipe until it is told to end. Each error of a request is its response.

    The arguments and what it yields are those of `iter.DataPipeBehindQueues`.
    """
    if not isinstance(protocol, MapDataPipeQueueProtocolServer):
        raise TypeError(f"Expecting MapDataPipeQueueProtocolServer, got {protocol}")
    source = EnsureNonBlockingMapDataPipe(source_datapipe)
    while True:
        try:
            request = protocol.get_new_request(block=blocking_request_get)
        except EmptyQueue:
            yield False
            continue
        try:
            if isinstance(request, messages.TerminateRequest):
                protocol.response_terminate()
                return
            if isinstance(request, messages.ResetEpochRequest):
                source = EnsureNonBlockingMapDataPipe(
                    process_reset_fn(
                        source,
                        worker_info,
                        request.seed_generator,
                        request_counter is not None,
                        request.iter_reset_fn,
                        custom_reset_fn,
                    )
                )
                protocol.response_reset_epoch()
            elif isinstance(request, messages.LenRequest):
                protocol.response_len(source.nonblocking_len())
            elif isinstance(request, messages.GetItemRequest):
                while True:
                    try:
                        value = source.nonblocking_getitem(request.key)
                    except NotAvailable:
                        yield True
                        continue
                    break
                protocol.response_item(request.key, value)
            else:
                raise ProtocolError("Unrecognized type of request received", request)
        except IndexError:
            protocol.response_index_out_of_bound()
        except Exception:
            protocol.response_worker_exception(caught(f"in {process_name} {loop_id}"))
        yield True


class QueueWrapperForMap(NonBlockingMap):
    """Reads a map-style datapipe in another process. An item is given as a pair of its key and itself.

    Args:
        protocol: the client's side.
        response_wait_time: seconds that one question waits; default 0.00001.

    Raises:
        WorkerDied: in any of its methods: the process of `eventloop` that it reads from has ended.
    """

    def __init__(self, protocol: MapDataPipeQueueProtocolClient, response_wait_time: float = 0.00001) -> None:
        if not isinstance(protocol, MapDataPipeQueueProtocolClient):
            raise TypeError(f"Expecting MapDataPipeQueueProtocolClient, got {protocol}")
        self.protocol = protocol
        self.counter = 0
        self._stop_iteration = False
        self._response_wait_time = response_wait_time

    def nonblocking_getitem(self, index: Any) -> Any:
        """See `NonBlockingMap`.

        Raises:
            IndexError: there is no such item. It cannot be read any more then, nor after an error.
        """
        if self._stop_iteration:
            raise ProtocolError("`getitem` or `nonblocking_getitem` called after receiving StopIteration")
        if self.protocol.can_take_request():
            self.protocol.request_item(index)
        try:
            response = self.protocol.get_response_item(block=True, timeout=self._response_wait_time)
        except EmptyQueue:
            raise NotAvailable from None
        self._stop_iteration = not isinstance(response, messages.GetItemResponse)
        if isinstance(response, messages.StopIterationResponse):
            raise IndexError(f"Index {index} is out of bound.")
        if isinstance(response, messages.WorkerExceptionResponse):
            response.exc.reraise()
        return response.key, response.value

    def nonblocking_len(self) -> int:
        """See `NonBlockingMap`."""
        if self._stop_iteration:
            raise ProtocolError("`len` or `nonblocking_len` called after receiving StopIteration")
        if self.protocol.can_take_request():
            self.protocol.request_len()
        try:
            return self.protocol.get_response_len(block=True, timeout=self._response_wait_time).len
        except EmptyQueue:
            raise NotAvailable from None
