"""Says which worker a function runs in, shares a graph out, and seeds a worker's process and graph.

Data path: none; at the beginning of a worker, and of each epoch in it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import apply_sharding

from asyncloader.dataloader2.graph.cut import _DummyIterDataPipe, find_non_dispatching_branches
from asyncloader.dataloader2.graph.settings import set_datapipes_seed, set_graph_random_seed
from asyncloader.dataloader2.graph.utils import DataPipe, end_of, find_dps, list_dps, replace_dp
from asyncloader.dataloader2.random.seed_generator import SeedGenerator


@dataclass(frozen=True)
class WorkerInfo:
    """A worker among the workers of one reading service.

    Attributes:
        num_workers: how many there are.
        worker_id: its number, from 0.
    """

    num_workers: int
    worker_id: int


def worker_graph(
    datapipe: DataPipe,
    worker_info: WorkerInfo,
    custom_init_fn: Callable[[DataPipe, WorkerInfo], DataPipe] | None,
    dispatched: DataPipe | None = None,
) -> DataPipe:
    """Make a graph this worker's: its share of what is sharded, and what the dispatching process deals to it.

    Args:
        datapipe: the end of the graph, which is changed.
        worker_info: whose share.
        custom_init_fn: the user's, which changes the graph then; None: there is none.
        dispatched: reads what is dealt to this worker, where the graph has a part that stands for that.

    Returns:
        The end of the changed graph.
    """
    graph = traverse_dps(datapipe)
    dummies = find_dps(graph, _DummyIterDataPipe)
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


def seed_process(seed_generator: SeedGenerator, *, shared: bool = False) -> None:
    """Seed the global generators of `random`, torch and numpy.

    Args:
        seed_generator: gives a seed for each.
        shared: whether they are those that all workers share; default False: this worker's own.
    """
    generate = seed_generator.generate_shared_seed if shared else seed_generator.generate_seed
    random.seed(generate())
    torch.manual_seed(generate())
    np.random.seed(generate() & 0xFFFFFFFF)


def reset_graph(
    datapipe: DataPipe,
    worker_info: WorkerInfo,
    seed_generator: SeedGenerator,
    distributed_shared_seed: bool = False,
    iter_reset_fn: Callable[[DataPipe], DataPipe] | None = None,
    custom_reset_fn: Callable[[DataPipe, WorkerInfo, SeedGenerator], DataPipe] | None = None,
) -> DataPipe:
    """Begin an epoch in a process: seed its global generators and the graph, then let the functions change the graph.

    Args:
        datapipe: the end of the graph.
        worker_info: for `custom_reset_fn`.
        seed_generator: gives the seeds.
        distributed_shared_seed: whether all of them are shared ones; default False.
        iter_reset_fn: of another reading service; default None.
        custom_reset_fn: the user's; default None.

    Returns:
        The end of the graph that the functions made.
    """
    seed_process(seed_generator, shared=distributed_shared_seed)
    if distributed_shared_seed:
        set_datapipes_seed(list_dps(traverse_dps(datapipe)), seed_generator, distributed_shared=True)
    else:
        set_graph_random_seed(datapipe, seed_generator)
    if iter_reset_fn is not None:
        datapipe = iter_reset_fn(datapipe)
    if custom_reset_fn is not None:
        datapipe = custom_reset_fn(datapipe, worker_info, seed_generator)
    assert isinstance(datapipe, (IterDataPipe, MapDataPipe))
    return datapipe
