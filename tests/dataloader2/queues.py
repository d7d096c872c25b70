"""A datapipe in a process behind queues, for tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import IterDataPipe

from asyncloader.dataloader2.communication import messages
from asyncloader.dataloader2.communication.eventloop import (
    CreateProcessForDataPipeline,
)
from asyncloader.dataloader2.communication.iter import (
    QueueWrapper,
)
from asyncloader.dataloader2.communication.protocol import (
    IterDataPipeQueueProtocolClient,
    MapDataPipeQueueProtocolClient,
)
from asyncloader.dataloader2.random import SeedGenerator
from asyncloader.dataloader2.utils import WorkerInfo
from asyncloader.errors import WorkerDied

INFO = WorkerInfo(1, 0)
METHODS = ["fork", "spawn"]


@contextmanager
def in_process(graph: Any, method: str = "fork", **options: Any) -> Generator[Any]:
    """The process and its client; it must end by itself."""
    context = multiprocessing.get_context(method)
    child, requests, responses = CreateProcessForDataPipeline(context, graph, "worker process", INFO, **options)
    kind = IterDataPipeQueueProtocolClient if isinstance(graph, IterDataPipe) else MapDataPipeQueueProtocolClient
    child.start()
    client = kind(requests, responses)
    try:
        yield child, client
    finally:
        end(child, client)


def end(child: Any, client: Any) -> None:
    client.request_terminate()
    try:
        while not isinstance(client.response_queue.get(timeout=60), messages.TerminateResponse):
            pass
    except WorkerDied:
        pass
    child.join(60)
    assert child.exitcode is not None
    for each in (client.request_queue, client.response_queue):
        each.close()
        each.join_thread()
    child.close()


def begun(client: Any, seed: int = 1) -> QueueWrapper:
    wrapper = QueueWrapper(client)
    wrapper.request_reset_epoch(SeedGenerator(seed), None)
    wrapper.get_reset_epoch_response()
    return wrapper
