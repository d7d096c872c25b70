"""torch's iterator base and its random numbers: where they come from, and what is read off it.

Data path: options -> [draws] -> the iterators. `_BaseDataLoaderIter` draws an iterator's base seed, and asks the
sampler for an iterator, in torch's order and from torch's generators: that keeps torch mode torch's. In seeded mode the
same base draws from the seed instead.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils.data import BatchSampler
from torch.utils.data import _DatasetKind as DatasetKind
from torch.utils.data.dataloader import _BaseDataLoaderIter

from asyncloader.generators import iterates_plainly
from asyncloader.index_stream import WatchedSampler
from asyncloader.options import LoaderSpec
from asyncloader.sampler import AsyncIndexSource
from asyncloader.workers.seeding import derive

__all__ = ["draw_source", "shared_seed", "warn_over_length"]


def draw_source(spec: LoaderSpec[Any], epoch: int) -> Any:
    """What torch's iterator base draws its random numbers from: the loader; in seeded mode a view of it, with numbers
    of the seed and the epoch, so that the process's generators stay where they are. A user's sampler that may draw
    when it is asked for an iterator is watched.
    """
    if spec._asyncloader_options.seed is not None:
        return _SeededDraws(spec, spec._asyncloader_options.seed, epoch)
    sampler = spec._index_sampler
    if isinstance(sampler, AsyncIndexSource) or type(sampler) is BatchSampler or iterates_plainly(sampler):
        return spec
    return _WatchedDraws(spec, WatchedSampler(sampler))


class _WatchedDraws:
    """The loader, but for its sampler, whose own draws are noted."""

    def __init__(self, spec: LoaderSpec[Any], sampler: WatchedSampler) -> None:
        self._spec = spec
        self._index_sampler = sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec, name)


class _SeededDraws:
    """The loader, but for its generator."""

    def __init__(self, spec: LoaderSpec[Any], seed: int, epoch: int) -> None:
        self._spec = spec
        self.generator = torch.Generator()
        self.generator.manual_seed(derive(seed, "iterator", epoch))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec, name)


def shared_seed(draws: _BaseDataLoaderIter) -> int | None:
    """The seed that all workers and ranks share, for torch's datapipes; None for other datasets."""
    return None if draws._shared_seed is None else int(draws._shared_seed)


def warn_over_length(draws: _BaseDataLoaderIter) -> None:
    """torch's warning when an iterable dataset gives more than its length said. Call after counting a batch."""
    reported = draws._IterableDataset_len_called
    if draws._dataset_kind != DatasetKind.Iterable or reported is None or draws._num_yielded <= reported:
        return
    message = (
        f"Length of IterableDataset {draws._dataset} was reported to be {reported}"
        f"(when accessing len(dataloader)), but {draws._num_yielded} samples have been fetched. "
    )
    if draws._num_workers > 0:
        message += (
            "For multiprocessing data-loading, this could be caused by not properly configuring the "
            "IterableDataset replica at each worker. Please see "
            "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
        )
    warnings.warn(message, stacklevel=3)
