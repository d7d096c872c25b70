"""The costs of ranks, samples, shards and workers: measured on the real modules, one rank in one process."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections import deque
from collections.abc import Sequence
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from asyncloader import RemoteIterableDataset
from asyncloader.epoch.scheduler import Scheduler
from asyncloader.events import Assign, Completed, Deliver, Delivered, Offered, Pull, Started
from asyncloader.ranks.topology import Topology
from asyncloader.remote.assignment import AssignmentLog, ShardAssigner, StreamStart
from asyncloader.remote.shard_splitting import CatalogRange
from asyncloader.samplers.distributed import RankView, Share
from asyncloader.samplers.seeded import SeededSampler


class Samples:
    """An object with a length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n


class Order(NamedTuple):
    """The result of `check_order`.

    Attributes:
        windows: names of the compared places in the epoch.
        samples: samples that all ranks read there.
        missing: samples of the windows that no rank read, or several ranks read.
        us_a_sample: microseconds that one rank takes for one of its indices.
        seek_us: microseconds until a rank that begins in the middle has its first batch.
    """

    windows: Sequence[str]
    samples: int
    missing: int
    us_a_sample: float
    seek_us: float


def _view(sampler: SeededSampler, batch_size: int, rank: int, ranks: int) -> RankView:
    return RankView(sampler, Share(batch_size, drop_last=False, topology=Topology(rank, ranks), on_uneven="repeat"))


def check_order(samples: int, ranks: int, batch_size: int, steps: int = 2) -> Order:
    """Read some steps of all ranks at the head, in the middle and at the tail of an epoch, and compare their parts
    with the order of a single process: they must be disjoint and complete.
    """
    sampler = SeededSampler(Samples(samples), seed=7)
    order, stride = sampler.order(), ranks * batch_size
    full = samples // stride
    places = {"head": 0, "middle": full // 2, "tail": max(0, full - steps)}
    read = missing = 0
    for place, first in places.items():
        # The last window extends to the end of the epoch, with the remaining samples in a last, shorter step.
        last = samples if place == "tail" else (first + steps) * stride
        expected = np.sort(order(np.arange(first * stride, last, dtype=np.int64)))
        found: list[int] = []
        for rank in range(ranks):
            view = _view(sampler, batch_size, rank, ranks)
            for item in islice(view.iter_from(first), None if place == "tail" else steps):
                found += item.index
        got, times = np.unique(np.asarray(found), return_counts=True)
        read += len(found)
        missing += len(np.setdiff1d(expected, got)) + len(np.setdiff1d(got, expected))
        if place != "tail":  # at the tail some samples are repeated, so that all ranks have the same number
            missing += int((times > 1).sum())
    began = perf_counter()
    one = _view(sampler, batch_size, ranks // 3, ranks).iter_from(full // 2)
    next(one)
    seek = perf_counter() - began
    began = perf_counter()
    number = sum(len(item.index) for item in islice(one, 10_000))
    return Order(list(places), read, missing, (perf_counter() - began) / number * 1e6, seek * 1e6)


class Planning(NamedTuple):
    """The cost of one rank's plan of an epoch.

    Attributes:
        seconds: time to make the plan.
        megabytes: memory that stays in use.
        assignments: number of assignments of this rank.
    """

    seconds: float
    megabytes: float
    assignments: int


def plan_shards(shards: int, ranks: int, workers: int) -> Planning:
    """Plan an epoch of this number of shards for one rank, in a store that receives no request."""
    dataset = RemoteIterableDataset(f"http://127.0.0.1:9/part-{{0000000..{shards - 1:07d}}}.tar")
    began = perf_counter()
    plan = asyncio.run(dataset.plan(workers, ranks // 2, ranks, 7)).assignments
    seconds = perf_counter() - began
    dataset = RemoteIterableDataset(f"http://127.0.0.1:9/part-{{0000000..{shards - 1:07d}}}.tar")
    tracemalloc.start()
    try:
        kept = asyncio.run(dataset.plan(workers, ranks // 2, ranks, 7)).assignments
        megabytes = tracemalloc.get_traced_memory()[0] / 1e6
    finally:
        tracemalloc.stop()
    assert list(kept) == list(plan)
    return Planning(seconds, megabytes, len(plan))


def scheduler_us(workers: int, batches: int = 20_000) -> float:
    """Return the scheduler's microseconds per batch, where any worker may make any batch."""
    scheduler = Scheduler(workers=workers, credits=2, assignment="least_loaded", reorder_window=16)
    assigned: deque[Assign] = deque()
    offered = 0

    def carry_out(actions: Sequence[Any]) -> None:
        nonlocal offered
        todo = deque(actions)
        while todo:
            action = todo.popleft()
            if isinstance(action, Assign):
                assigned.append(action)
            elif isinstance(action, Deliver):
                todo.extend(scheduler.handle(Delivered(action.seq)))
            else:
                assert isinstance(action, Pull)
                for _ in range(action.number):
                    todo.extend(scheduler.handle(Offered(offered)))
                    offered += 1

    carry_out(scheduler.handle(Started()))
    began = perf_counter()
    for _ in range(batches):
        action = assigned.popleft()
        carry_out(scheduler.handle(Completed(action.worker, action.task.seq, None)))
    return (perf_counter() - began) / batches * 1e6


def assignment_us(streams: int, requests: int = 20_000) -> float:
    """Return the microseconds per request for a shard, where each of the streams sends a request per batch."""
    turns = max(2, requests // streams)
    plan = [(CatalogRange(shard),) for shard in range(streams * turns)]
    assigner = ShardAssigner(AssignmentLog(plan), [StreamStart()] * streams)
    had = [0] * streams
    replies = 0
    began = perf_counter()
    for turn in range(turns):
        for stream in range(streams):
            for reply in assigner.ask(stream, had[stream], turn):
                had[reply.worker] += 1
                replies += 1
        for stream in range(streams):
            for reply in assigner.answered(stream):
                had[reply.worker] += 1
                replies += 1
    seconds = perf_counter() - began
    assert replies == streams * turns, "a request was not answered"
    return seconds / replies * 1e6
