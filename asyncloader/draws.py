"""torch's iterator base under our iterators: its random numbers, and the order that is read from it.

Data path: options -> [draws] -> the iterators. `_BaseDataLoaderIter` draws an iterator's base seed, and asks the
sampler for an iterator, in torch's order and from torch's generators: that keeps torch mode torch's. In seeded mode the
same base draws from the seed instead.

Libraries patch that base, and reach into what it holds. So it is given the loader itself, and what it holds is what is
read: `_sampler_iter`, which begins as the epoch's `IndexStream`, through `_next_index`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator
from typing import Any, Self

import torch
from torch.utils.data import BatchSampler
from torch.utils.data import _DatasetKind as DatasetKind
from torch.utils.data.dataloader import _BaseDataLoaderIter

from asyncloader.events import Placed
from asyncloader.generators import drawing_from, drawn_from, generator_states, iterates_plainly, own_generator
from asyncloader.index_stream import IndexStream
from asyncloader.options import LoaderSpec
from asyncloader.progress import Progress
from asyncloader.rank_view import RankView
from asyncloader.sampler import AsyncIndexSource
from asyncloader.workers.seeding import derive

__all__ = ["Draws", "shared_seed", "warn_over_length"]


class Draws(_BaseDataLoaderIter):
    """torch's iterator base for an iterator of ours.

    Args:
        loader: whose iterator it is.
        progress: the iterator's position.
    """

    order: IndexStream | None = None
    """The epoch's order from the iterator's position on; None where no plain sampler makes one."""
    _awaited: Progress | None = None  # the position of the order that torch's base is about to make
    _states: dict[str, torch.Tensor] | None = None  # of the generators, before that

    def __init__(self, loader: LoaderSpec[Any], progress: Progress) -> None:
        with self._drawing(loader, progress):
            super().__init__(loader)

    def _begin_order(self, loader: LoaderSpec[Any], progress: Progress, *, first_iter: bool = False) -> None:
        """torch's `_reset`, for an iterator at this position."""
        with self._drawing(loader, progress):
            if loader._asyncloader_options.seed is not None and not first_iter:
                self._index_sampler = loader._index_sampler  # the ranks may be others, and the share with them
            _BaseDataLoaderIter._reset(self, loader, first_iter)

    @contextlib.contextmanager
    def _drawing(self, loader: LoaderSpec[Any], progress: Progress) -> Generator[None]:
        """Inside, the first iterator that becomes `_sampler_iter` is the epoch's; in seeded mode, random numbers are of
        the seed and the epoch, and the process's generators stay where they are.
        """
        seed = loader._asyncloader_options.seed
        self._awaited = progress
        self._note_states()
        try:
            if seed is None:
                yield
            else:
                generator = torch.Generator()
                generator.manual_seed(derive(seed, "iterator", progress.epoch))
                with drawing_from(generator, loader):
                    yield
        finally:
            self._awaited = self._states = None

    def _note_states(self) -> None:
        """A user's sampler may draw when it is asked for an iterator, which comes next."""
        sampler = self._index_sampler
        known = isinstance(sampler, (AsyncIndexSource, RankView)) or type(sampler) is BatchSampler
        if self._awaited is not None and sampler is not None and not known and not iterates_plainly(sampler):
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

    @_sampler_iter.setter
    def _sampler_iter(self, iterator: Any) -> None:
        progress, self._awaited = self._awaited, None
        if progress is not None:  # else somebody has put an iterator of his own in its place
            sampler = self._index_sampler
            self.order = None
            if self._dataset_kind != DatasetKind.Iterable and not isinstance(sampler, AsyncIndexSource):
                before = self._states
                drawn = None if before is None else drawn_from(before, generator_states(own_generator(sampler)))
                iterator = self.order = progress.stream(sampler, iterator, drawn)
        self.__dict__["_sampler_iter"] = iterator

    def pull(self, task: int | None = None) -> tuple[int | None, Any]:
        """The next step's number and index. The number is None if the index is not of the epoch's order. One that is,
        is given again if it is asked for again for the same task.

        Raises:
            StopIteration: at the end.
            TypeError: in seeded mode, what was put in the order's place gives indices without positions.
        """
        if self.order is not None and self._sampler_iter is self.order:
            return self.order.pull(task)
        index: Any = self._next_index()  # type: ignore[no-untyped-call]
        if isinstance(self._index_sampler, RankView) and not isinstance(index, Placed):
            raise TypeError(
                f"in seeded mode random numbers follow from positions, which {type(self._sampler_iter).__name__}, put "
                "in the place of the iterator's _sampler_iter, does not give: advance that one, or leave out seed="
            )
        return None, index

    def twin(self) -> Self:
        """The same draws, for another iterator."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made


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
