"""Sets the seeds of a graph: shared seeds up to its sharding, and seeds of each process's own after that.

Data path: DataLoader2 -> [settings] -> the `set_seed` of each random datapipe, at the beginning of an epoch.
"""

from __future__ import annotations

import inspect

from torch.utils.data.datapipes.iter import Shuffler
from torch.utils.data.datapipes.map import Shuffler as MapShuffler
from torch.utils.data.graph import traverse_dps

from asyncloader.dataloader2.graph.utils import DataPipe, list_dps, parts_of, parts_of_form
from asyncloader.dataloader2.random.seed_generator import SeedGenerator
from asyncloader.errors import StateError
from asyncloader.workers.fetch.seeding import draw_seed

_SHUFFLES = (Shuffler, MapShuffler)


def set_datapipes_seed(datapipes: list[DataPipe], seed_generator: SeedGenerator, distributed_shared: bool) -> None:
    """Give a seed to each part that has a method ``set_seed``.

    Args:
        datapipes: the parts; those without the method take no seed from the generator.
        seed_generator: gives a seed for each of the others.
        distributed_shared: whether the seeds are those that all workers and ranks share, or this process's own.
    """
    for datapipe in datapipes:
        if inspect.ismethod(getattr(datapipe, "set_seed", None)):
            generate = seed_generator.generate_shared_seed if distributed_shared else seed_generator.generate_seed
            datapipe.set_seed(generate())


def fix_shuffle_seeds(datapipe: DataPipe, seeds: list[int] | None, *, within: bool = False) -> list[int]:
    """Fix the seeds of torch's shuffles for an epoch in which nothing else sets them.

    Args:
        datapipe: the end of the graph.
        seeds: the seeds of an epoch that is to be repeated. None, or if their number is not that of the shuffles: those
            that the user has set, and for the other shuffles seeds as these would draw them, from torch's global
            generator, which advances.
        within: that epoch goes on from a position within it; default False.

    Returns:
        The seeds.

    Raises:
        StateError: `within` an epoch of another number of shuffles.
    """
    shuffles = [each for each in parts_of(datapipe) if isinstance(each, _SHUFFLES) and each._enabled]
    if seeds is not None and len(seeds) != len(shuffles):
        if within:
            raise StateError(
                f"the position is in an epoch with {len(seeds)} shuffles, and the graph has {len(shuffles)}, which "
                "would give another rest of the epoch: give the same adapters, or begin that epoch anew by "
                "_restore_checkpoint_beginning_of_epoch()"
            )
        seeds = None
    fixed: list[int] = []
    for number, each in enumerate(shuffles):
        seed = each._seed if seeds is None else seeds[number]
        fixed.append(draw_seed() if seed is None else seed)
        each.set_seed(fixed[-1])
    return fixed


def set_graph_random_seed(datapipe: DataPipe, seed_generator: SeedGenerator) -> DataPipe:
    """Seed a graph: up to each `sharding_filter` all workers and ranks get the same seeds, after it each its own.

    Returns the datapipe.
    """
    filters = parts_of_form(datapipe, "sharding_filter")
    # A filter keeps every n-th item. Only if the shuffles before it are alike everywhere do the shares of all workers
    # and ranks make up the whole, with no item twice.
    before = {id(part): part for each in filters for part in parts_of(each)}
    set_datapipes_seed(list(before.values()), seed_generator, distributed_shared=True)
    set_datapipes_seed(list_dps(traverse_dps(datapipe), exclude_dps=filters), seed_generator, distributed_shared=False)
    return datapipe
