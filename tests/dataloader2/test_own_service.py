"""A reading service as users wrote it over the communication modules, and what it has to survive."""

from __future__ import annotations

import functools
import multiprocessing
from typing import Any

import pytest

from asyncloader.dataloader2 import DataLoader2, ReadingServiceInterface, communication
from asyncloader.dataloader2.communication.eventloop import (
    CreateProcessForDataPipeline,
)
from asyncloader.dataloader2.communication.iter import (
    _IterateQueueDataPipes,
)
from asyncloader.dataloader2.graph.cut import _DummyIterDataPipe, find_lca_round_robin_sharding_dp
from asyncloader.dataloader2.graph.utils import DataPipe, replace_dp, traverse_dps
from asyncloader.dataloader2.random import SeedGenerator
from asyncloader.dataloader2.utils import WorkerInfo, process_init_fn
from asyncloader.errors import WorkerDied
from tests.dataloader2.parts import MP, numbers
from tests.dataloader2.queues import INFO, METHODS, begun, end, in_process


class OfTheUsers(ReadingServiceInterface):
    """A reading service as it was written over these modules: two processes, read in turn, and one that deals to them
    what comes up to a `sharding_round_robin_dispatch`. Threads read ahead, in the workers and here.
    """

    def __init__(self) -> None:
        self.children: list[Any] = []
        self.dispatcher: Any = None
        self.datapipe: Any = None
        self.ahead: Any = None

    def initialize(self, datapipe: DataPipe) -> Any:
        context = multiprocessing.get_context("fork")
        dispatching: Any = find_lca_round_robin_sharding_dp(traverse_dps(datapipe))
        dealt: list[Any] = [(None, None)] * 2
        if dispatching is not None:
            dummy: Any = _DummyIterDataPipe()
            datapipe = next(iter(replace_dp(traverse_dps(datapipe), dispatching, dummy).values()))[0]
            self.dispatcher = communication.eventloop.CreateProcessForMultipleDataPipelines(
                context, dispatching.round_robin_demux(2), "dispatching process", WorkerInfo(2, 0)
            )
            self.dispatcher[0].start()
            dealt = list(zip(*self.dispatcher[1:], strict=True))
        wrappers = []
        for number, queues in enumerate(dealt):
            info = WorkerInfo(2, number)
            init = functools.partial(
                process_init_fn,
                worker_info=info,
                worker_prefetch_cnt=2,
                dispatching_req_queue=queues[0],
                dispatching_res_queue=queues[1],
            )
            child, requests, responses = communication.eventloop.CreateProcessForDataPipeline(
                context, datapipe, "worker process", info, init
            )
            child.daemon = True
            child.start()
            client = communication.protocol.IterDataPipeQueueProtocolClient(requests, responses)
            self.children.append((child, client))
            wrappers.append(communication.iter.QueueWrapper(client))
        self.datapipe = _IterateQueueDataPipes(wrappers)
        self.ahead = self.datapipe.prefetch(3)
        return self.ahead

    def initialize_iteration(self, seed_generator: SeedGenerator, iter_reset_fn: Any = None) -> None:
        self.ahead.reset()
        self.datapipe.reset_epoch(seed_generator, iter_reset_fn)

    def _pause(self) -> None:
        self.ahead.pause()
        self.datapipe.request_pause()

    def _resume(self) -> None:
        self.datapipe.request_resume()
        self.ahead.resume()

    def _limit(self, num_batches: int | None) -> None:
        pass

    def finalize(self) -> None:
        children, self.children = self.children, []
        if children:
            self.ahead.shutdown()
        for child, client in children:
            client.discard_existing_request()
            end(child, client)
        if self.dispatcher is not None:  # the workers have told it to end
            child, requests, responses = self.dispatcher
            child.join(60)
            assert child.exitcode == 0
            for each in (*requests, *responses):
                each.close()
                each.join_thread()
            self.dispatcher = None


@pytest.mark.filterwarnings("ignore:Some child DataPipes are not exhausted:UserWarning")
@pytest.mark.parametrize("dispatched", [False, True])
def test_a_reading_service_of_the_users(dispatched: bool) -> None:
    """Written against `communication`: the order without workers, epochs, limits and an early end."""
    graph = numbers(7).sharding_round_robin_dispatch(MP) if dispatched else numbers(7).sharding_filter()
    with DataLoader2[int](graph, None, OfTheUsers()) as loader:
        assert [list(loader), list(loader)] == [list(range(7))] * 2
        iterator = iter(loader)
        iterator.limit(1)
        found = []
        while item := list(iterator):
            found += item
            iterator.resume()
        assert found == list(range(7))
        for _ in range(3):
            assert next(iter(loader)) == 0
        assert list(loader) == list(range(7))


@pytest.mark.parametrize("method", METHODS)
def test_what_a_worker_reads_from_dies(method: str) -> None:
    """The worker, which did not start that process, says so, also in a request that follows; and it still ends."""
    context = multiprocessing.get_context(method)
    dealing, requests, responses = CreateProcessForDataPipeline(context, numbers(9), "dispatching process", INFO)
    dealing.start()
    dummy: Any = _DummyIterDataPipe()
    init = functools.partial(
        process_init_fn,
        worker_info=INFO,
        worker_prefetch_cnt=2,
        dispatching_req_queue=requests,
        dispatching_res_queue=responses,
    )
    with in_process(dummy, method, call_on_process_init=init) as (_, client):
        reader = begun(client)
        assert next(reader) == 0
        dealing.kill()
        dealing.join(60)
        with pytest.raises(WorkerDied, match="it was dispatching process"):
            list(reader)
        with pytest.raises(WorkerDied, match="it was dispatching process"):
            begun(client)
    for each in (requests, responses):
        each.close()
        each.join_thread()
    dealing.close()
