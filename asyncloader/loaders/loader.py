"""DataLoader: the sync loader, a real `torch.utils.data.DataLoader` whose iterators are ours.

Data path: options -> [loader] -> epoch/sync_iterator.py (read that next), or epoch/sync_inline.py without workers.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self

from torch.utils.data.dataloader import _BaseDataLoaderIter

from asyncloader.base.bridge import Bridge
from asyncloader.epoch.sync_inline import SyncInlineIterator
from asyncloader.epoch.sync_iterator import WorkerIterator
from asyncloader.loaders.loader_methods import LoaderMethods, LoaderState
from asyncloader.loaders.single_steps import (
    begin_at,
    check_step,
    loader_without_workers,
    no_step,
)
from asyncloader.loaders.worker_trial import choose_workers
from asyncloader.options.auto import AUTO
from asyncloader.options.declaration import (
    OUR_OPTION_NAMES,
    B_co,
    LoaderSpec,
    T_co,
    async_index_source,
    fixed_option,
)
from asyncloader.options.unknown_dataset import ask_dataset
from asyncloader.samplers.async_sampler import feedback_target
from asyncloader.state.checkpoint import StateKeeper
from asyncloader.workers.fetch.error_pickle import hide_our_frames
from asyncloader.workers.pool import WorkerPool

if TYPE_CHECKING:

    class BatchIterator(_BaseDataLoaderIter, Generic[B_co]):
        """What `iter()` gives, to type checkers: torch's iterator, whose batches have a type."""

        def __next__(self) -> B_co: ...


class DataLoader(LoaderMethods[T_co, B_co], LoaderSpec[T_co, B_co]):
    """torch's DataLoader, with batches that arrive through shared-memory rings.

    Signature, checks, attributes and batches are torch's; asyncloader's own arguments come last, by keyword only (see
    the constructor). Datasets may have ``async`` methods, samplers may be async iterables.
    """

    @property
    def _asyncloader_state(self) -> _FacadeState:
        # Made on demand and kept under a private name: copies and pickles of a loader begin with a state of their own,
        # and so does a forked child, in which the loop's thread does not exist.
        state: _FacadeState | None = self.__dict__.get("_asyncloader_state")
        if state is None or state.owner != os.getpid():
            copied = self.__dict__.pop("_asyncloader_keeper", None) if state is None else state.keeper.for_copy()
            state = self.__dict__["_asyncloader_state"] = _FacadeState(copied or StateKeeper())
        return state

    @property
    def _asyncloader_spec(self) -> Self:
        return self

    @property
    def _asyncloader_pool(self) -> WorkerPool | None:
        newest = self._asyncloader_state.iterator()
        return newest._pool if isinstance(newest, WorkerIterator) else None

    def __iter__(self) -> BatchIterator[B_co]:
        """Begin an epoch, or the rest of a loaded state's epoch, and return the iterator of its batches. Workers start
        now, and fetch ahead. With `persistent_workers` all epochs have the same iterator, which begins again.

        Raises:
            LoaderClosed: the loader is closed.
            ServiceUnavailable: no node at `workers=` could be asked about the dataset, which the first call does.
        """
        if isinstance(self._iterator, WorkerIterator) and not self._iterator.owned:
            self._iterator = None  # it has the persistent workers of the parent process
        try:
            if not self._asyncloader_state.closed:
                # Before torch's code is on the stack, which warnings would name. A number is chosen for local datasets.
                choose_workers(self) if self._asyncloader_choice else ask_dataset(self)
            return super().__iter__()  # type: ignore[return-value]
        except Exception as error:
            hide_our_frames(error)
            raise

    def _get_iterator(self) -> _BaseDataLoaderIter:
        state = self._asyncloader_state
        if state.closed:
            raise self._asyncloader_closed()
        if self.num_workers:
            self.check_worker_number_rationality()
        kind = WorkerIterator if self.num_workers else SyncInlineIterator
        with state.beginning():
            iterator = kind(self, state.statistics, state.bridge, state.keeper)
        # Only now, when the workers exist: they are forked before there is a thread for the view.
        self._asyncloader_began(state, iterator, iterator._shutdown_workers)
        return iterator

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all iterators and their workers; wait until the processes have ended. Idempotent."""
        state = self._asyncloader_state
        state.closed = True
        self._iterator = None
        for iterator in state.iterators:
            iterator._shutdown_workers()
        state.bridge.wait_for_releases()  # waits for iterators that were just dropped
        for end in state.endings(self):
            end()

    def state_dict(self) -> dict[str, Any]:
        """The newest iterator's position: a new dictionary of plain values, O(1). Between epochs: the next epoch.

        Only batches that were delivered count. Safe for ``torch.load(weights_only=True)``; also for JSON, if the states
        of the user's own samplers and datasets are.

        Raises:
            StateError: in seeded mode, within an epoch, if a map dataset has a state of its own and several workers
                read it, or one worker reads several samples at a time.
        """
        return self._asyncloader_state.keeper.state(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at this position with the next ``iter()``, also of a copy. An empty dictionary resets the position.

        An iterator from before goes on where it was; once it gives another batch, `state_dict` describes its position.

        Raises:
            StateError: the state is damaged, of another version or another loader, or has no exact position. The text
                says what to do.
        """
        self._asyncloader_state.keeper.load(self, state_dict)
        # As in torchdata: persistent workers end, because their copies of the dataset have advanced.
        self._iterator = None

    def feedback(self, *args: Any, **kwargs: Any) -> None:
        """Call the sampler's method `feedback` with these arguments, to pass on the trainer's results.

        The sampler is ahead of the trainer by the batches in flight: with workers, at most
        ``num_workers * prefetch_factor + 1`` batches, and `reorder_window` more in seeded mode; more where samples
        are fetched concurrently, which keeps more batches in flight. An async sampler is called in the thread that
        reads it.

        Raises:
            TypeError: the sampler has no such method, or it is a coroutine function.
        """
        target = feedback_target(self)
        state = self._asyncloader_state
        if async_index_source(self) is None or not state.bridge.running:
            target(*args, **kwargs)
            return
        # As a user of the loop: the last iterator may end in another thread, and with it the loop.
        state.bridge.acquire()
        try:
            state.bridge.run(_call(target, args, kwargs))
        finally:
            state.bridge.release()

    def batch_at(self, step: int, *, epoch: int | None = None, rank: int | None = None) -> B_co:
        """Make the batch of a step, with all random numbers, without reading those before it. Seeded mode only.

        It is read in this process, without workers, and is not moved to a device. The loader's iterators and its
        position stay as they are.

        Args:
            step: the batch's number in the epoch, from 0.
            epoch: the epoch's number. Default: `epoch`.
            rank: the rank that gets the batch. Default: the loader's.

        Raises:
            IndexError: the epoch has fewer batches.
            LookupError: all samples of the batch were skipped.
            ValueError: there is no such rank; or the batches do not follow from epoch and step: torch mode, a dataset
                that is iterated or has a state, a sampler without ``iter_from(start)``.
        """
        epoch, state = self.epoch if epoch is None else epoch, self._asyncloader_state
        other: DataLoader[T_co, B_co] = loader_without_workers(self, DataLoader, rank)
        with state.keeper.lent_dataset(self), other:
            begin_at(other, other._asyncloader_state.keeper, epoch, step)
            for batch in other:
                check_step(other.state_dict(), epoch, step)
                return batch
        raise no_step(epoch, step)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        used: _FacadeState | None = state.pop("_asyncloader_state", None)
        keeper: StateKeeper | None = state.get("_asyncloader_keeper") if used is None else used.keeper
        state["_asyncloader_keeper"] = None if keeper is None else keeper.for_copy()
        return state | {"_iterator": None}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OUR_OPTION_NAMES and self._asyncloader_fixed:
            raise ValueError(fixed_option(name))
        if name == "num_workers" and "_asyncloader_options" in vars(self):
            if value == AUTO:
                raise ValueError('"auto" is fixed when a loader is made; clone(num_workers="auto") makes another one')
            vars(self).pop("_asyncloader_choice", None)
        super().__setattr__(name, value)

    @property
    def _asyncloader_fixed(self) -> bool:
        """Whether our options can no longer be set: not while it is made, and not in a subclass or inside `install`,
        where an attribute of an option's name may be the user's or a library's own.
        """
        known = vars(self)
        return type(self) is DataLoader and "_asyncloader_made" in known and "_asyncloader_installed" not in known

    async def __aiter__(self) -> AsyncIterator[NoReturn]:
        """Raises TypeError when a batch is awaited, as the loader would block the event loop. Not before: `tqdm.auto`
        asks for the iterator although it is read by a plain ``for``.
        """
        raise TypeError(
            "DataLoader is read with a plain 'for', which blocks; for 'async for' make an "
            "asyncloader.AsyncDataLoader, which takes the same arguments"
        )
        yield  # makes it a generator

    async def __aenter__(self) -> NoReturn:
        """Raises TypeError: closing the loader would block the event loop."""
        raise TypeError(
            "DataLoader is closed by a plain 'with', which blocks; for 'async with' make an "
            "asyncloader.AsyncDataLoader, which takes the same arguments"
        )

    async def __aexit__(self, *_: object) -> None:
        """Not reached; ``async with`` looks for it first."""

    @property
    def _asyncloader_place(self) -> str:
        state: _FacadeState | None = self.__dict__.get("_asyncloader_state")  # not made for this: it means "was used"
        if state is None:
            return "not iterated yet"
        return "closed" if state.closed else state.keeper.place


async def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    function(*args, **kwargs)


class _FacadeState(LoaderState):
    """A loader's state besides its options, with the loop's thread of its iterators."""

    def __init__(self, keeper: StateKeeper) -> None:
        super().__init__(keeper)
        self.bridge = Bridge()
