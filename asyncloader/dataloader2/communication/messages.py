"""The requests to a datapipe in another process, and its responses.

Data path: none; they travel through the queues of `protocol`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._utils import ExceptionWrapper

from asyncloader.dataloader2.graph.utils import DataPipe
from asyncloader.dataloader2.random.seed_generator import SeedGenerator

__all__ = [
    "DataLoaderQueueMessage",
    "GetItemRequest",
    "GetItemResponse",
    "GetNextRequest",
    "GetNextResponse",
    "InvalidStateResponse",
    "LenRequest",
    "LenResponse",
    "LimitRequest",
    "LimitResponse",
    "PauseRequest",
    "PauseResponse",
    "Request",
    "ResetEpochRequest",
    "ResetEpochResponse",
    "Response",
    "ResumeRequest",
    "ResumeResponse",
    "StopIterationResponse",
    "TerminateRequest",
    "TerminateResponse",
    "WorkerExceptionResponse",
]


class DataLoaderQueueMessage:
    """What goes through a queue."""


class Request(DataLoaderQueueMessage):
    """To the datapipe."""


class Response(DataLoaderQueueMessage):
    """From the datapipe."""


@dataclass
class ResetEpochRequest(Request):
    """Begin an epoch, with these seeds; the function, if any, changes the graph before."""

    seed_generator: SeedGenerator
    iter_reset_fn: Callable[[DataPipe], DataPipe] | None


class ResetEpochResponse(Response):
    """The epoch has begun."""


@dataclass
class LimitRequest(Request):
    """Have the function, if any, limit the graph to so many batches, of which this worker gives so many."""

    num_batches: int | None
    limit_fn: Callable[[DataPipe, int | None], DataPipe] | None
    worker_num_batches: int | None = None


class LimitResponse(Response):
    """It is limited."""


@dataclass
class PauseRequest(Request):
    """Read no further; the function, if any, changes the graph."""

    pause_fn: Callable[[DataPipe], DataPipe] | None


class PauseResponse(Response):
    """It has paused."""


@dataclass
class ResumeRequest(Request):
    """Read on; the function, if any, changes the graph before."""

    resume_fn: Callable[[DataPipe], DataPipe] | None


class ResumeResponse(Response):
    """It reads on."""


class TerminateRequest(Request):
    """End the loop."""


class TerminateResponse(Response):
    """The loop ends: the last response."""


class LenRequest(Request):
    """Say the length of a map-style datapipe."""


@dataclass
class LenResponse(Response):
    """The length."""

    len: int


@dataclass
class GetItemRequest(Request):
    """Give an item of a map-style datapipe."""

    key: Any


@dataclass
class GetItemResponse(Response):
    """The item."""

    key: Any
    value: Any


class GetNextRequest(Request):
    """Give the next item."""


@dataclass
class GetNextResponse(Response):
    """The next item."""

    value: Any


class StopIterationResponse(Response):
    """There is no item any more, or none with this key."""


class InvalidStateResponse(Response):
    """The datapipe first needs a `ResetEpochRequest`, for example because other readers of it had theirs."""


@dataclass
class WorkerExceptionResponse(Response):
    """The request failed; ``exc.reraise()`` raises the error, with its traceback as text."""

    exc: ExceptionWrapper
