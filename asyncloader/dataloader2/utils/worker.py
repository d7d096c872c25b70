"""Says which worker a function runs in, and seeds a worker's process and graph.

Data path: none; at the beginning of a worker, and of each epoch in it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.graph import traverse_dps

from asyncloader.dataloader2.graph.settings import set_datapipes_seed, set_graph_random_seed
from asyncloader.dataloader2.graph.utils import DataPipe, list_dps
from asyncloader.dataloader2.random.seed_generator import SeedGenerator

__all__ = ["WorkerInfo", "process_reset_fn", "seed_process"]


@dataclass(frozen=True)
class WorkerInfo:
    """A worker among the workers of one reading service.

    Attributes:
        num_workers: how many there are.
        worker_id: its number, from 0.
    """

    num_workers: int
    worker_id: int


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


def process_reset_fn(
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
