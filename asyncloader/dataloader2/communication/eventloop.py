"""Loops that answer for datapipes, and the processes that they run in.

Data path: request queue -> [eventloop: process] -> response queue.

A process ends when it is told so, and when the process that made it has ended. Who waits for a response of a process
that has ended gets `WorkerDied`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe

import asyncloader.dataloader2.communication.iter as iter_loop
import asyncloader.dataloader2.communication.map as map_loop
from asyncloader.dataloader2.communication.protocol import (
    IterDataPipeQueueProtocolServer,
    MapDataPipeQueueProtocolServer,
)
from asyncloader.dataloader2.communication.queue import WatchedQueue
from asyncloader.dataloader2.communication.together import Together
from asyncloader.dataloader2.graph._serialization import extract_wrapper
from asyncloader.dataloader2.graph.utils import DataPipe
from asyncloader.dataloader2.services.interface import ResetFn
from asyncloader.dataloader2.utils.worker import WorkerInfo
from asyncloader.errors import WorkerDied
from asyncloader.workers.default_signals import set_worker_signals

__all__ = [
    "CreateProcessForDataPipeline",
    "CreateProcessForMultipleDataPipelines",
    "DataPipeToQueuesLoop",
    "MultipleDataPipesToQueuesLoop",
]


def DataPipeToQueuesLoop(  # noqa: N802 - as in torchdata, and all that follow
    source_datapipe: DataPipe,
    req_queue: Any,
    res_queue: Any,
    process_name: str,
    worker_info: WorkerInfo,
    call_on_process_init: Callable[[DataPipe], DataPipe] | None = None,
    custom_reset_fn: ResetFn | None = None,
) -> None:
    """Answer for a datapipe until a `TerminateRequest` comes.

    Args:
        source_datapipe: the end of the graph, perhaps in torch's serialization wrapper.
        req_queue: of requests.
        res_queue: of responses.
        process_name: for the text of errors.
        worker_info: which worker this is.
        call_on_process_init: changes the graph first; default None.
        custom_reset_fn: changes the graph at the beginning of each epoch; default None.

    Raises:
        TypeError: it is no datapipe.
    """
    source = extract_wrapper(source_datapipe)
    if call_on_process_init is not None:
        source = call_on_process_init(source)
    for _ in _loop(source, req_queue, res_queue, process_name, worker_info.worker_id, worker_info, custom_reset_fn):
        pass


def MultipleDataPipesToQueuesLoop(  # noqa: N802
    source_datapipes: Sequence[DataPipe],
    req_queues: Sequence[Any],
    res_queues: Sequence[Any],
    process_name: str,
    worker_info: WorkerInfo,
    call_on_process_init: None = None,
    custom_reset_fn: ResetFn | None = None,
) -> None:
    """Answer for several datapipes until a `TerminateRequest` came for each of them.

    They read one graph: what changes it happens once, when it was requested for all of them. The arguments are those of
    `DataPipeToQueuesLoop`, but `call_on_process_init` must be None.
    """
    assert call_on_process_init is None, "``MultipleDataPipesToQueuesLoop`` does not support call_on_process_init"
    count = len(source_datapipes)
    assert count == len(req_queues) == len(res_queues), (
        "``MultipleDataPipesToQueuesLoop`` requires the same number of datapipes, request queues and response queues"
    )
    together = Together(count)
    loops = {
        number: _loop(source, req_queue, res_queue, process_name, number, worker_info, custom_reset_fn, together)
        for number, (source, req_queue, res_queue) in enumerate(
            zip(source_datapipes, req_queues, res_queues, strict=True)
        )
    }
    while loops:
        going_on = {number: next(loop, None) for number, loop in loops.items()}
        loops = {number: loop for number, loop in loops.items() if going_on[number] is not None}
        if loops and not any(going_on.values()) and None not in going_on.values():
            _wait_for_requests([req_queues[number] for number in loops])


def _loop(
    source: Any,
    req_queue: Any,
    res_queue: Any,
    process_name: str,
    loop_id: int,
    worker_info: WorkerInfo,
    custom_reset_fn: ResetFn | None,
    together: Together | None = None,
) -> Generator[bool, None, None]:
    rest = (process_name, loop_id, worker_info, custom_reset_fn, together is None, together)
    if isinstance(source, IterDataPipe):
        return iter_loop.DataPipeBehindQueues(source, IterDataPipeQueueProtocolServer(req_queue, res_queue), *rest)
    if isinstance(source, MapDataPipe):
        return map_loop.DataPipeBehindQueues(source, MapDataPipeQueueProtocolServer(req_queue, res_queue), *rest)
    raise TypeError(f"Only supports IterDataPipe or MapDataPipe, got {source}")


def _wait_for_requests(queues: list[Any]) -> None:
    readers = [each._reader for each in queues if hasattr(each, "_reader")]
    if len(readers) < len(queues):  # queues of threads cannot be waited for together
        time.sleep(iter_loop.DEFAULT_NON_BLOCKING_SLEEP)
        return
    sentinels = queues[0].sentinels() if isinstance(queues[0], WatchedQueue) else []
    if not set(wait([*readers, *sentinels])) & set(readers):
        raise _ParentEndedError


def CreateProcessForDataPipeline(  # noqa: N802
    multiprocessing_ctx: Any,
    datapipe: DataPipe,
    process_name: str,
    worker_info: WorkerInfo,
    call_on_process_init: Callable[[DataPipe], DataPipe] | None = None,
    custom_reset_fn: ResetFn | None = None,
) -> tuple[Any, Any, Any]:
    """Make a process for `DataPipeToQueuesLoop`, whose arguments it takes, and one more.

    Args:
        multiprocessing_ctx: of `multiprocessing`; says how the process is started.
        datapipe: see `DataPipeToQueuesLoop`, as of the following.
        process_name: see there.
        worker_info: see there.
        call_on_process_init: see there.
        custom_reset_fn: see there.

    Returns:
        ``(process, request queue, response queue)``. The caller starts the process, has it end by a `TerminateRequest`,
        takes the last response, and joins it.
    """
    functions = (call_on_process_init, custom_reset_fn)
    process, requests, responses = _process(
        multiprocessing_ctx, _answer_one, [datapipe], process_name, worker_info, *functions
    )
    return process, requests[0], responses[0]


def CreateProcessForMultipleDataPipelines(  # noqa: N802
    multiprocessing_ctx: Any,
    datapipes: Sequence[DataPipe],
    process_name: str,
    worker_info: WorkerInfo,
    custom_reset_fn: ResetFn | None = None,
) -> tuple[Any, list[Any], list[Any]]:
    """Make a process for `MultipleDataPipesToQueuesLoop`.

    Args:
        multiprocessing_ctx: of `multiprocessing`; says how the process is started.
        datapipes: the ends of the graph.
        process_name: see `DataPipeToQueuesLoop`, as of the following.
        worker_info: see there.
        custom_reset_fn: see there.

    Returns:
        ``(process, request queues, response queues)``, as by `CreateProcessForDataPipeline`.
    """
    functions = (None, custom_reset_fn)
    return _process(
        multiprocessing_ctx, MultipleDataPipesToQueuesLoop, list(datapipes), process_name, worker_info, *functions
    )


def _process(
    multiprocessing_ctx: Any,
    loop: Callable[..., None],
    datapipes: list[DataPipe],
    process_name: str,
    worker_info: WorkerInfo,
    *functions: Any,
) -> tuple[Any, list[Any], list[Any]]:
    requests, responses = ([multiprocessing_ctx.Queue() for _ in datapipes] for _ in range(2))
    process = multiprocessing_ctx.Process(
        target=_in_process, args=(loop, datapipes, requests, responses, process_name, worker_info, *functions)
    )

    def died() -> WorkerDied:
        return WorkerDied(worker_info.worker_id, process.pid or 0, process.exitcode, f"it was {process_name}")

    watched = [[WatchedQueue(each, process, died) for each in queues] for queues in (requests, responses)]
    return process, watched[0], watched[1]


class _ParentEndedError(Exception):
    """Nobody is left to answer."""


def _answer_one(
    source_datapipes: Sequence[DataPipe], req_queues: Sequence[Any], res_queues: Sequence[Any], *rest: Any
) -> None:
    """`DataPipeToQueuesLoop`, with the arguments of `MultipleDataPipesToQueuesLoop`."""
    DataPipeToQueuesLoop(source_datapipes[0], req_queues[0], res_queues[0], *rest)


def _in_process(
    loop: Callable[..., None],
    datapipes: list[DataPipe],
    requests: list[Any],
    responses: list[Any],
    process_name: str,
    worker_info: WorkerInfo,
    *functions: Any,
) -> None:
    """The process's main function."""
    set_worker_signals()
    torch.set_num_threads(1)
    asked, given = (
        [WatchedQueue(each, None, _ParentEndedError) for each in each_of] for each_of in (requests, responses)
    )
    try:
        loop(datapipes, asked, given, process_name, worker_info, *functions)
    except _ParentEndedError:
        for each in responses:
            each.cancel_join_thread()  # nobody reads what is not written yet
