"""Ray: `RayWorkers`, Ray Data's blocks as a dataset, and `prepare_data_loader` for Ray Train."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch.utils.data import DistributedSampler, SequentialSampler

from asyncloader.integrations.ray.blocks import BlockSampler, RayBlocks
from asyncloader.integrations.ray.workers import RayWorkers
from asyncloader.loaders.loader import DataLoader
from asyncloader.options.declaration import is_iterable

__all__ = ["BlockSampler", "RayBlocks", "RayWorkers", "prepare_data_loader"]


def prepare_data_loader(data_loader: Any, add_dist_sampler: bool = True, **options: Any) -> Any:
    """Call `ray.train.torch.prepare_data_loader`, and keep our loader.

    Args:
        data_loader: a loader; Ray gets a loader that is not ours unchanged.
        add_dist_sampler: shard a map dataset among the ranks by a `DistributedSampler`, shuffled if the loader was
            (default True). It replaces the loader's own sampler, as Ray's does.
        options: Ray's own, for example ``move_to_device``.
    """
    ray: Any = import_module("ray.train.torch")
    if isinstance(data_loader, DataLoader) and add_dist_sampler:
        context = import_module("ray.train").get_context()
        data_loader = shard(data_loader, context.get_world_size(), context.get_world_rank())
        add_dist_sampler = False
    return ray.prepare_data_loader(data_loader, add_dist_sampler=add_dist_sampler, **options)


def shard(loader: DataLoader[Any], world_size: int, rank: int) -> DataLoader[Any]:
    """Return a loader of this rank's share; the loader itself if it needs no sharding, or is sharded already."""
    if world_size == 1 or is_iterable(loader) or isinstance(loader.sampler, DistributedSampler):
        return loader
    shuffle = not isinstance(loader.sampler, SequentialSampler)
    sampler: DistributedSampler[Any] = DistributedSampler(loader.dataset, world_size, rank, shuffle=shuffle)
    return loader.clone(sampler=sampler)
