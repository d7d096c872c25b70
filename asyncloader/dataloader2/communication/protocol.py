"""Who may say what: a client has one request under way, and a server answers the one that it has.

Data path: QueueWrapper -> [protocol: request queue] -> DataPipeBehindQueues -> [protocol: response queue].

A response that is waited for and is an error of the other process is raised, except an item's, which is given as it is.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable
from typing import Any

from torch._utils import ExceptionWrapper

import asyncloader.dataloader2.communication.messages as messages  # noqa: PLR0402 - the package imports this module
from asyncloader.dataloader2.graph.utils import DataPipe
from asyncloader.dataloader2.random.seed_generator import SeedGenerator

__all__ = [
    "EmptyQueue",
    "IterDataPipeQueueProtocolClient",
    "IterDataPipeQueueProtocolServer",
    "MapDataPipeQueueProtocolClient",
    "MapDataPipeQueueProtocolServer",
    "Protocol",
    "ProtocolClient",
    "ProtocolError",
    "ProtocolServer",
]

Change = Callable[[DataPipe], DataPipe]


class EmptyQueue(Exception):
    """There is no message, or none came in time."""


class ProtocolError(Exception):
    """A message that may not come now."""


class Protocol:
    """A pair of queues.

    Args:
        request_queue: from the client to the server; has ``put(item)`` and ``get(block, timeout)``, as those of
            `multiprocessing` and of `queue`.
        response_queue: back.
    """

    def __init__(self, request_queue: Any, response_queue: Any) -> None:
        self.request_queue = request_queue
        self.response_queue = response_queue


def _received(source: Any, block: bool, timeout: float | None = None) -> Any:
    try:
        return source.get(block=block, timeout=timeout)
    except queue.Empty:
        raise EmptyQueue("queue is empty") from None


class ProtocolClient(Protocol):
    """Sends requests, and takes their responses. See `Protocol`."""

    def __init__(self, request_queue: Any, response_queue: Any) -> None:
        super().__init__(request_queue, response_queue)
        self._req_sent: Any = None

    def can_take_request(self) -> bool:
        """Whether no request is under way."""
        return self._req_sent is None

    def waiting_for_response(self) -> bool:
        """Whether a request is under way."""
        return self._req_sent is not None

    def request_sent(self, request: Any = True) -> None:
        """Note that a request is under way."""
        if not self.can_take_request():
            raise ProtocolError("Protocol only supports one request in the Queue")
        self._req_sent = request

    def request_served(self, result: Any = None) -> None:
        """Note that its response came."""
        if not self.waiting_for_response():
            raise ProtocolError("Expected no pending requests, but something got served", result)
        self._req_sent = None

    def discard_existing_request(self) -> None:
        """Wait for the response of the request under way, if there is one, and drop it, whatever it is."""
        if self.waiting_for_response():
            with contextlib.suppress(Exception):
                self._response(block=True)

    def request_reset_epoch(self, seed_generator: SeedGenerator, iter_reset_fn: Change | None) -> None:
        """Begin an epoch."""
        self._request("reset", messages.ResetEpochRequest(seed_generator, iter_reset_fn))

    def request_limit(
        self,
        num_batches: int | None,
        limit_fn: Callable[[DataPipe, int | None], DataPipe] | None = None,
        worker_num_batches: int | None = None,
    ) -> None:
        """Limit the graph."""
        self._request("`limit`", messages.LimitRequest(num_batches, limit_fn, worker_num_batches))

    def request_pause(self, pause_fn: Change | None = None) -> None:
        """Pause the graph."""
        self._request("`pause`", messages.PauseRequest(pause_fn))

    def request_resume(self, resume_fn: Change | None = None) -> None:
        """Have the graph read on."""
        self._request("`resume`", messages.ResumeRequest(resume_fn))

    def request_terminate(self) -> None:
        """End the loop, also while another request is under way, of which the response still comes before."""
        self._req_sent = None
        self._request("terminate", messages.TerminateRequest())

    def _request(self, what: str, request: messages.Request) -> None:
        if not self.can_take_request():
            raise ProtocolError(f"Can not {what} while we are still waiting response for previous request")
        self.request_queue.put(request)
        self.request_sent(request)

    def _response(self, block: bool, timeout: float | None = None) -> Any:
        if not self.waiting_for_response():
            raise ProtocolError("Can not expect any response without submitted request")
        try:
            response = _received(self.response_queue, block, timeout)
        except EmptyQueue:
            raise
        except Exception:  # it came, and cannot be unpickled; or its sender has ended
            self.request_served()
            raise
        self.request_served(response)
        return response

    def _expect(self, kind: type[messages.Response], block: bool, timeout: float | None = None) -> Any:
        response = self._response(block, timeout)
        if isinstance(response, messages.WorkerExceptionResponse):
            response.exc.reraise()
        if not isinstance(response, kind):
            raise ProtocolError(f"Invalid response received when expecting `{kind.__name__}`: {response!r}")
        return response


class IterDataPipeQueueProtocolClient(ProtocolClient):
    """Of an iterable datapipe. See `Protocol`. All ``get_`` methods raise `EmptyQueue` if no response is there."""

    def request_next(self) -> None:
        """Ask for the next item."""
        self._request("request next item", messages.GetNextRequest())

    def get_response_reset_epoch(self, block: bool = False) -> None:
        """Take the response to `request_reset_epoch`; `block`: wait for it."""
        self._expect(messages.ResetEpochResponse, block)

    def get_response_limit(self, block: bool = False) -> None:
        """Take the response to `request_limit`; `block`: wait for it."""
        self._expect(messages.LimitResponse, block)

    def get_response_pause(self, block: bool = False) -> None:
        """Take the response to `request_pause`; `block`: wait for it."""
        self._expect(messages.PauseResponse, block)

    def get_response_resume(self, block: bool = False) -> None:
        """Take the response to `request_resume`; `block`: wait for it."""
        self._expect(messages.ResumeResponse, block)

    def get_response_next(self, block: bool = False, timeout: float | None = None) -> Any:
        """The response to `request_next`: an item, or that there is none, or an error; `timeout`: seconds to wait."""
        return self._response(block, timeout)


class MapDataPipeQueueProtocolClient(ProtocolClient):
    """Of a map-style datapipe. See `Protocol`. All ``get_`` methods raise `EmptyQueue` if no response is there."""

    def request_len(self) -> None:
        """Ask for the length."""
        self._request("request len", messages.LenRequest())

    def request_item(self, index: Any) -> None:
        """Ask for an item."""
        self._request("request item", messages.GetItemRequest(index))

    def get_response_reset_epoch(self, block: bool = False) -> None:
        """Take the response to `request_reset_epoch`; `block`: wait for it."""
        self._expect(messages.ResetEpochResponse, block)

    def get_response_len(self, block: bool = False, timeout: float | None = None) -> messages.LenResponse:
        """The response to `request_len`; `timeout`: seconds to wait."""
        response: messages.LenResponse = self._expect(messages.LenResponse, block, timeout)
        return response

    def get_response_item(self, block: bool = False, timeout: float | None = None) -> Any:
        """The response to `request_item`: the item, or that there is none, or an error; `timeout`: seconds to wait."""
        return self._response(block, timeout)


class ProtocolServer(Protocol):
    """Takes requests, and answers them. See `Protocol`."""

    def __init__(self, request_queue: Any, response_queue: Any) -> None:
        super().__init__(request_queue, response_queue)
        self._req_received: Any = None
        self._paused = False

    def is_paused(self) -> bool:
        """Whether the last pause was not followed by a resumption: no item may be given."""
        return self._paused

    def have_pending_request(self) -> bool:
        """Whether a request is unanswered."""
        return self._req_received is not None

    def get_new_request(self, block: bool = False) -> Any:
        """The next request; `block`: wait for it.

        Raises:
            EmptyQueue: there is none.
        """
        if self.have_pending_request():
            raise ProtocolError("Trying to get next request, while having one un-served")
        self._req_received = _received(self.request_queue, block)
        return self._req_received

    def response_terminate(self) -> None:
        """Say that the loop ends."""
        self._respond(messages.TerminateResponse(), "terminate", messages.TerminateRequest)

    def response_reset_epoch(self) -> None:
        """Say that the epoch has begun."""
        self._respond(messages.ResetEpochResponse(), "reset_epoch", messages.ResetEpochRequest)

    def response_limit(self) -> None:
        """Say that the graph is limited."""
        self._respond(messages.LimitResponse(), "limit", messages.LimitRequest)

    def response_pause(self) -> None:
        """Say that the graph has paused."""
        self._respond(messages.PauseResponse(), "pause", messages.PauseRequest)
        self._paused = True

    def response_resume(self) -> None:
        """Say that the graph reads on."""
        self._respond(messages.ResumeResponse(), "resume", messages.ResumeRequest)
        self._paused = False

    def response_worker_exception(self, exception: ExceptionWrapper) -> None:
        """Say that the request failed."""
        self._respond(messages.WorkerExceptionResponse(exception))

    def _respond(
        self, response: messages.Response, what: str = "", to: type[messages.Request] = messages.Request
    ) -> None:
        if not self.have_pending_request():
            raise ProtocolError("Attempting to reply with pending request")
        if not isinstance(self._req_received, to):
            raise ProtocolError(f"Replaying with `{what}` status to other type of message")
        self.response_queue.put(response)
        self._req_received = None


class IterDataPipeQueueProtocolServer(ProtocolServer):
    """Of an iterable datapipe. See `Protocol`."""

    def response_next(self, value: Any) -> None:
        """Give the next item."""
        self._respond(messages.GetNextResponse(value))

    def response_stop_iteration(self) -> None:
        """Say that there is none."""
        self._respond(messages.StopIterationResponse())

    def response_invalid_state(self) -> None:
        """Say that an epoch must begin first."""
        self._respond(messages.InvalidStateResponse())


class MapDataPipeQueueProtocolServer(ProtocolServer):
    """Of a map-style datapipe. See `Protocol`."""

    def response_item(self, key: Any, value: Any) -> None:
        """Give an item."""
        self._respond(messages.GetItemResponse(key, value))

    def response_len(self, size: int) -> None:
        """Give the length."""
        self._respond(messages.LenResponse(size))

    def response_index_out_of_bound(self) -> None:
        """Say that there is no such item."""
        self._respond(messages.StopIterationResponse())
