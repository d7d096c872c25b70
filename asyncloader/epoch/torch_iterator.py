"""torch's iterator base under our iterators: random numbers, sampler order and the attributes that libraries use.

Data path: options -> [torch_iterator] -> consumer.

`_BaseDataLoaderIter` draws the base seed and asks the sampler for an iterator, in torch's order and from torch's
generators; that is what makes torch mode equal to torch. In seeded mode the same base draws from a generator that is
derived from the seed.

Libraries patch that base and use its attributes. It is therefore given the loader itself, and indices are read through
the attributes that it has: `_next_index` and `_sampler_iter`, which starts as the epoch's `IndexStream`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Self

import torch
from torch.utils.data import BatchSampler
from torch.utils.data import _DatasetKind as DatasetKind
from torch.utils.data.dataloader import _BaseDataLoaderIter

from asyncloader.base.events import PositionedIndex
from asyncloader.options.declaration import LoaderSpec
from asyncloader.samplers.async_sampler import AsyncIndexSource, PositionSource
from asyncloader.samplers.distributed import RankView
from asyncloader.samplers.generators import (
    DRAWING,
    Drawing,
    find_drawn,
    generator_states,
    iterates_plainly,
    own_generator,
)
from asyncloader.samplers.index_stream import IndexStream
from asyncloader.state.progress import Progress
from asyncloader.workers.fetch.seeding import derive, draw_device

_NO_CONTEXT = nullcontext()
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


class TorchIterator(_BaseDataLoaderIter):
    """torch's iterator base under our iterators.

    Args:
        loader: the loader that is iterated.
        progress: the iterator's position.
    """

    _other: tuple[int | None, Any] = None, None  # the last task whose index is not from the order, and that index
    order: IndexStream | None = None
    """The epoch's indices from the iterator's position on; None without a plain sampler."""
    _awaited: Progress | None = None  # set while torch's base makes the sampler's iterator
    _states: dict[str, torch.Tensor] | None = None  # the generators' states before that

    def __init__(self, loader: LoaderSpec[Any], progress: Progress) -> None:
        self._draw(loader, progress, partial(super().__init__, loader))
        if isinstance(progress.config.source, PositionSource):
            # The order is the dataset's, by its epoch: another iterator may begin another while this one goes on.
            self._dataset = progress.config.dataset.for_iterator()
            progress.config.source.sampler.begin(progress.epoch)

    def _begin_order(self, loader: LoaderSpec[Any], progress: Progress, *, first_iter: bool = False) -> None:
        """Call torch's `_reset` for an epoch that begins at this position."""
        if progress.config.seeded and not first_iter:
            # Rank and world size, and with them the share, may have changed.
            self._index_sampler = progress.config.index_sampler
        if isinstance(progress.config.source, PositionSource):
            progress.config.source.sampler.begin(progress.epoch)
        self._draw(loader, progress, partial(_BaseDataLoaderIter._reset, self, loader, first_iter))

    def _draw(self, loader: LoaderSpec[Any], progress: Progress, begin: Callable[[], None]) -> None:
        """Call `begin`, in which torch draws random numbers and asks the sampler for an iterator. The first iterator
        that is assigned to `_sampler_iter` becomes the epoch's order. In seeded mode the numbers are drawn from a
        generator of the seed and the epoch, and the global generators do not advance.
        """
        config = progress.config
        generator = loader.generator
        if config.seed is not None:
            generator = torch.Generator()
            generator.manual_seed(derive(config.seed, "iterator", progress.epoch))
        self._awaited = progress
        token = DRAWING.set(Drawing(loader, generator, config.index_sampler))
        try:
            self._note_states()
            with _on_device_of(generator):
                begin()
            if config.iterable:
                progress.drawn()
        finally:
            DRAWING.reset(token)
            self._awaited = self._states = None

    def _note_states(self) -> None:
        """Save the generators' states: a user's sampler may draw in `__iter__`, which is called next."""
        if self._awaited is None:
            return
        sampler = self.__dict__.get("_index_sampler")
        known = isinstance(sampler, (AsyncIndexSource, RankView)) or type(sampler) is BatchSampler
        if sampler is not None and not known and not iterates_plainly(sampler):
            self._states = generator_states(own_generator(sampler))

    @property
    def _index_sampler(self) -> Any:
        return self.__dict__.get("_index_sampler")

    @_index_sampler.setter
    def _index_sampler(self, sampler: Any) -> None:
        self.__dict__["_index_sampler"] = sampler
        self._note_states()

    @property
    def _sampler_iter(self) -> Any:
        return self.__dict__.get("_sampler_iter")

    # A property, so that the assignment in torch's base is noticed.
    @_sampler_iter.setter
    def _sampler_iter(self, iterator: Any) -> None:
        # Only the first assignment is that of torch's base.
        progress, self._awaited = self._awaited, None
        if progress is not None:  # else a library replaced the iterator
            sampler = self.__dict__["_index_sampler"]
            self.order = None
            if self._dataset_kind != DatasetKind.Iterable and not isinstance(sampler, AsyncIndexSource):
                before = self._states
                drawn = None if before is None else find_drawn(before, generator_states(own_generator(sampler)))
                iterator = self.order = progress.stream(sampler, iterator, drawn)
        self.__dict__["_sampler_iter"] = iterator

    def pull(self, task: int | None = None) -> tuple[int | None, Any]:
        """The next step's number and index. The number is None if a library replaced `_sampler_iter`, so that the index
        is not from the epoch's order. A second call for the same task returns the same again.

        Raises:
            StopIteration: at the end.
            TypeError: in seeded mode, if the replaced `_sampler_iter` gives indices without positions.
        """
        order = self.order
        if order is not None and self.__dict__["_sampler_iter"] is order:
            return order.pull(task)
        if task is not None and task == self._other[0]:
            return None, self._other[1]
        index: Any = self._next_index()  # type: ignore[no-untyped-call]
        if isinstance(self._index_sampler, RankView) and not isinstance(index, PositionedIndex):
            raise TypeError(
                f"in seeded mode random numbers follow from positions, which {type(self._sampler_iter).__name__}, put "
                "in the place of the iterator's _sampler_iter, does not give: advance that one, or leave out seed="
            )
        self._other = task, index
        return None, index

    def duplicate(self) -> Self:
        """A copy, with the same random numbers, for another iterator."""
        # Without `__init__`, which would draw random numbers.
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made


def _on_device_of(generator: torch.Generator | None) -> AbstractContextManager[Any]:
    """Context in which torch's base can draw from this generator whatever `torch.set_default_device` says: it names no
    device.
    """
    # Without a mode torch draws on the CPU. To ask for the default device takes longer than the draw.
    if not _function_modes() and (generator is None or generator.device.type == "cpu"):
        return _NO_CONTEXT
    device = draw_device(generator)
    return _NO_CONTEXT if device.type == torch.get_default_device().type else device


def shared_seed(torch_iter: _BaseDataLoaderIter) -> int | None:
    """The seed that all workers and ranks share, for torch's datapipes; None for other datasets."""
    return None if torch_iter._shared_seed is None else int(torch_iter._shared_seed)


def warn_over_length(torch_iter: _BaseDataLoaderIter) -> None:
    """Give torch's warning if an iterable dataset yields more than its length. Call after counting a batch."""
    reported = torch_iter._IterableDataset_len_called
    if torch_iter._dataset_kind != DatasetKind.Iterable or reported is None or torch_iter._num_yielded <= reported:
        return
    message = (
        f"Length of IterableDataset {torch_iter._dataset} was reported to be {reported}"
        f"(when accessing len(dataloader)), but {torch_iter._num_yielded} samples have been fetched. "
    )
    if torch_iter._num_workers > 0:
        message += (
            "For multiprocessing data-loading, this could be caused by not properly configuring the "
            "IterableDataset replica at each worker. Please see "
            "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
        )
    warnings.warn(message, stacklevel=3)
