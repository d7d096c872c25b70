"""Sets the seeds of a graph: shared ones before it is sharded, own ones after that.

Data path: DataLoader2 -> [settings] -> the `set_seed` of each random datapipe, at the beginning of an epoch.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch.utils.data.datapipes.iter import Shuffler
from torch.utils.data.datapipes.map import Shuffler as MapShuffler
from torch.utils.data.graph import traverse_dps

from asyncloader.dataloader2.datapipes.forms import has_form
from asyncloader.dataloader2.graph.utils import DataPipe, list_dps
from asyncloader.dataloader2.random.seed_generator import SeedGenerator
from asyncloader.workers.fetch.seeding import draw_seed

_SHUFFLES = (Shuffler, MapShuffler)


def set_datapipes_seed(datapipes: list[DataPipe], seed_generator: SeedGenerator, distributed_shared: bool) -> None:
    """Give each random part, which is one with a method ``set_seed``, a seed.

    Args:
        datapipes: the parts; others than random ones take no seed.
        seed_generator: gives one seed for each of them.
        distributed_shared: whether the seeds are those that all workers and ranks share, or this process's own.
    """
    for datapipe in datapipes:
        if inspect.ismethod(getattr(datapipe, "set_seed", None)):
            generate = seed_generator.generate_shared_seed if distributed_shared else seed_generator.generate_seed
            datapipe.set_seed(generate())


def fixed_shuffle_seeds(datapipe: DataPipe, seeds: list[int] | None) -> list[int]:
    """Fix the seeds of torch's shuffles for an epoch in which nothing else sets them.

    Args:
        datapipe: the end of the graph.
        seeds: those of an epoch that is to be repeated; None: those that the user has set, or else the ones that the
            shuffles would draw, from torch's global generator, which advances.

    Returns:
        The seeds.
    """
    shuffles: list[Any] = [
        each for each in list_dps(traverse_dps(datapipe)) if isinstance(each, _SHUFFLES) and each._enabled
    ]
    found: list[int] = []
    for number, each in enumerate(shuffles):
        drawn = each._seed if seeds is None else seeds[number]
        found.append(draw_seed() if drawn is None else drawn)
        each.set_seed(found[-1])
    return found


def set_graph_random_seed(datapipe: DataPipe, seed_generator: SeedGenerator) -> DataPipe:
    """Seed a graph: up to each `sharding_filter` all workers and ranks get the same seeds, after it others.

    Only so does a shuffle before the filter deal every sample exactly once. Returns the datapipe.
    """
    graph = traverse_dps(datapipe)
    filters = [each for each in list_dps(graph) if has_form(each, "sharding_filter")]
    before: dict[int, DataPipe] = {}
    for each in filters:
        before |= {id(part): part for part in list_dps(traverse_dps(each))}
    set_datapipes_seed(list(before.values()), seed_generator, distributed_shared=True)
    set_datapipes_seed(list_dps(graph, exclude_dps=filters), seed_generator, distributed_shared=False)
    return datapipe
