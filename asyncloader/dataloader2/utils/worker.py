"""Describes a worker, gives it its share of a graph, and seeds its process and graph.

Data path: none; at the beginning of a worker, and of each epoch in it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import apply_sharding

from asyncloader.dataloader2.graph.settings import set_datapipes_seed, set_graph_random_seed
from asyncloader.dataloader2.graph.utils import (
    DataPipe,
    _DummyIterDataPipe,
    end_of,
    find_dps,
    find_non_dispatching_branches,
    parts_of,
    replace_dp,
)
from asyncloader.dataloader2.random.seed_generator import SeedGenerator


@dataclass(frozen=True)
class WorkerInfo:
    """A worker among the workers of one reading service.

    Attributes:
        num_workers: number of workers.
        worker_id: this worker's number, from 0.
    """

    num_workers: int
    worker_id: int


Change: TypeAlias = Callable[[DataPipe], DataPipe]
InitFn: TypeAlias = Callable[[DataPipe, WorkerInfo], DataPipe]
ResetFn: TypeAlias = Callable[[DataPipe, WorkerInfo, SeedGenerator], DataPipe]


def worker_graph(
    datapipe: DataPipe,
    worker_info: WorkerInfo,
    custom_init_fn: InitFn | None,
    dispatched: DataPipe | None = None,
) -> DataPipe:
    """Turn a graph into that of one worker, with this worker's share of the items.

    Args:
        datapipe: the end of the graph, which is changed.
        worker_info: the worker.
        custom_init_fn: the user's function, called last; None: no function.
        dispatched: gives the items that the dispatching process deals to this worker. It replaces each stand-in for
            that process, and may be None if the graph has no stand-in.

    Returns:
        The end of the changed graph.
    """
    graph = traverse_dps(datapipe)
    dummies = find_dps(graph, _DummyIterDataPipe)
    # Items that the dispatching process deals are this worker's share already: a filter after it keeps them all.
    for part in find_non_dispatching_branches(graph) if dummies else [datapipe]:
        apply_sharding(part, worker_info.num_workers, worker_info.worker_id, SHARDING_PRIORITIES.MULTIPROCESSING)
    for dummy in dummies:
        assert dispatched is not None
        graph = replace_dp(graph, dummy, dispatched)
    datapipe = end_of(graph)
    if custom_init_fn is not None:
        datapipe = custom_init_fn(datapipe, worker_info)
        assert isinstance(datapipe, (IterDataPipe, MapDataPipe))
    return datapipe


def reset_graph(
    datapipe: DataPipe,
    worker_info: WorkerInfo,
    seed_generator: SeedGenerator,
    distributed_shared_seed: bool = False,
    iter_reset_fn: Change | None = None,
    custom_reset_fn: ResetFn | None = None,
) -> DataPipe:
    """Begin an epoch in a process: seed the global generators and the graph, then let the functions change the graph.

    The generators are those of `random`, torch and numpy.

    Args:
        datapipe: the end of the graph.
        worker_info: passed to `custom_reset_fn`.
        seed_generator: gives the seeds.
        distributed_shared_seed: take all seeds from its shared stream; default False.
        iter_reset_fn: another reading service's function, called first; default None.
        custom_reset_fn: the user's function, called last; default None.

    Returns:
        The end of the graph that the functions made.
    """
    generate = seed_generator.generate_shared_seed if distributed_shared_seed else seed_generator.generate_seed
    random.seed(generate())
    torch.manual_seed(generate())
    np.random.seed(generate() & 0xFFFFFFFF)  # numpy takes 32 bits
    if distributed_shared_seed:
        set_datapipes_seed(parts_of(datapipe), seed_generator, distributed_shared=True)
    else:
        set_graph_random_seed(datapipe, seed_generator)
    if iter_reset_fn is not None:
        datapipe = iter_reset_fn(datapipe)
    if custom_reset_fn is not None:
        datapipe = custom_reset_fn(datapipe, worker_info, seed_generator)
    assert isinstance(datapipe, (IterDataPipe, MapDataPipe))
    return datapipe
