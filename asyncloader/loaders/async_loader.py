"""AsyncDataLoader: the asynchronous loader, for ``async for``.

Data path: options -> [async_loader] -> epoch/async_iterator.py (read that next: it wires the stages), or
epoch/async_inline.py without workers.
"""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any, NoReturn, Self

from asyncloader.base.bridge import in_thread
from asyncloader.base.live_objects import LiveObjects
from asyncloader.base.shielding import shielded
from asyncloader.delivery.loader_device import kept_rings_of, transfer_of
from asyncloader.epoch.async_inline import AsyncInlineIterator
from asyncloader.epoch.async_iterator import AsyncLoaderIterator
from asyncloader.epoch.plan import check_workers
from asyncloader.epoch.thread_or_loop import BatchCosts
from asyncloader.epoch.torch_iterator import TorchIterator
from asyncloader.loaders.loader_methods import LoaderMethods, LoaderState
from asyncloader.loaders.single_steps import (
    begin_at,
    check_step,
    loader_without_workers,
    no_step,
)
from asyncloader.options.auto import AUTO
from asyncloader.options.declaration import (
    OPTION_NAMES,
    OUR_OPTION_NAMES,
    B_co,
    LoaderSpec,
    T_co,
    fixed_option,
    own_constructor,
)
from asyncloader.options.epoch_config import EpochConfig
from asyncloader.options.unknown_dataset import ask_dataset
from asyncloader.samplers.async_sampler import feedback_target
from asyncloader.state.checkpoint import StateKeeper
from asyncloader.state.progress import Progress
from asyncloader.workers.fetch.context import wait_until_left
from asyncloader.workers.ipc.ring_manager import KeptRings
from asyncloader.workers.pool import WorkerPool

if TYPE_CHECKING:
    from asyncloader.delivery.transfer import DeviceTransfer

_SPEC_NAMES = frozenset(OPTION_NAMES) - {"shuffle"}
_SETTABLE = _SPEC_NAMES - set(OUR_OPTION_NAMES)


class AsyncDataLoader(LoaderMethods[T_co, B_co]):
    """Loads batches in worker processes and gives them to ``async for``.

    Takes all arguments of `torch.utils.data.DataLoader`, with their meanings, defaults and errors; then, by keyword,
    asyncloader's own (see the constructor). All can be read as attributes under their own names. The dataset may have
    ``async def __getitem__``, ``async def __getitems__`` or `__aiter__`; `sampler` and `batch_sampler` may be async
    iterables. With ``num_workers=0`` an async dataset is read on the running loop; a blocking one in a thread, or on
    the loop while its batches take less than a millisecond. `concurrency=1` keeps it in one thread, for handles that
    belong to one.

    Several iterators may run at a time. With ``persistent_workers=True`` the workers outlive an iterator and serve the
    next iterator, also under another event loop; `aclose` (or ``async with``) ends them. Workers start with the first
    batch: an iterator that is dropped before that starts nothing, while torch's would have fetched a few batches.

    Raises:
        ValueError, TypeError: options out of range, in torch's words.
    """

    def _asyncloader_construct(self, arguments: dict[str, Any]) -> None:
        _check_auto(arguments["num_workers"])
        self._spec: LoaderSpec[Any] = LoaderSpec(**arguments)
        self._begin(StateKeeper())

    def _begin(self, keeper: StateKeeper) -> None:
        """Set up the loader's state besides its options; copies and pickles begin with one of their own."""
        given = {*vars(self)}
        self._loader_state = LoaderState(keeper)
        self._pools: LiveObjects[WorkerPool] = LiveObjects()
        self._outdated: weakref.WeakSet[WorkerPool] = weakref.WeakSet()  # pools that must not be used for another epoch
        self._kept: tuple[TorchIterator, EpochConfig] | None = None  # the persistent workers' beginning
        self._idle_pool: WorkerPool | None = None
        self._claim: weakref.ref[_LoaderPoolCache] | None = None
        self._batch_costs = BatchCosts()
        self._running = {"_running", *vars(self)} - given

    def __getstate__(self) -> dict[str, Any]:
        # Without what `_begin` makes; a subclass's attributes are included. The spec is copied: its options can be set.
        state = {name: value for name, value in self.__dict__.items() if name not in self._running}
        return state | {"_spec": copy.copy(self._spec), "_keeper": self._asyncloader_state.keeper.for_copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin(self.__dict__.pop("_keeper"))

    def __getattr__(self, name: str) -> Any:
        if name in _SPEC_NAMES:
            return getattr(self._spec, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _SETTABLE:
            if name in _SPEC_NAMES and type(self) is AsyncDataLoader:  # a subclass may have attributes of any name
                raise ValueError(fixed_option(name))
            super().__setattr__(name, value)
            return
        if name == "num_workers":
            _check_auto(value)
        try:
            setattr(self._spec, name, value)
        except ValueError as error:  # torch forbids setting this attribute
            raise ValueError(str(error).replace(type(self._spec).__name__, type(self).__name__)) from None

    @property
    def _asyncloader_state(self) -> LoaderState:
        return self._loader_state

    @property
    def _asyncloader_spec(self) -> LoaderSpec[Any]:
        return self._spec

    @property
    def _asyncloader_pool(self) -> WorkerPool | None:
        newest = self._asyncloader_state.iterator()
        return (newest.pool if isinstance(newest, AsyncLoaderIterator) else None) or self._idle_pool

    def __len__(self) -> int:
        """Batches in an epoch. TypeError when the sampler or dataset has no length."""
        return len(self._spec)

    def __aiter__(self) -> AsyncLoaderIterator[B_co] | AsyncInlineIterator[B_co]:
        """A new epoch. Random numbers are drawn now, as torch's loader does at ``iter()``; workers start at the first
        ``anext()``.

        Raises:
            LoaderClosed: after `aclose`.
            ServiceUnavailable: no node at `workers=` could be asked about the dataset. The first call does that, and
                the event loop waits for it; `len` in a thread beforehand spares it that.
        """
        state, spec = self._asyncloader_state, self._spec
        if state.closed:
            raise self._asyncloader_closed()
        ask_dataset(spec)
        iterator: AsyncLoaderIterator[B_co] | AsyncInlineIterator[B_co]
        with state.beginning():
            if spec.num_workers:
                spec.check_worker_number_rationality()
                iterator = AsyncLoaderIterator(state.statistics, _LoaderPoolCache(self))
            else:
                iterator = AsyncInlineIterator(spec, state.statistics, state.keeper, self._batch_costs)
        self._asyncloader_began(state, iterator, iterator.close)
        return iterator

    def _begin_torch_iter(self, progress: Progress, pool_cache: _LoaderPoolCache) -> tuple[TorchIterator, EpochConfig]:
        """Make torch's iterator base for an iterator: it draws the same numbers from the same generators as in torch.

        Persistent workers keep their base seed and their options, as in torch; only the sampler begins again.
        """
        # Each worker has the copies of some of the streams that there were.
        outdated = self._kept is not None and self._kept[1].loader_streams != progress.config.loader_streams
        if self._idle_pool is not None and (outdated or self._idle_pool.broken):
            # New workers get a new seed, or they would draw the same numbers as their predecessors.
            pool, self._idle_pool = self._idle_pool, None
            pool.stop_soon()
        if self._kept is not None and self._idle_pool is not None and self._claimant in (None, pool_cache):
            self._claim = weakref.ref(pool_cache)
            config = self._kept[1]
            self._kept = self._kept[0].duplicate(), config
            self._kept[0]._begin_order(self._spec, progress)
            return self._kept
        torch_iter = TorchIterator(self._spec, progress)
        shared_seed = torch_iter._shared_seed
        check_workers(progress.config)
        progress.base_seed_drawn()
        torch_iter._begin_order(self._spec, progress, first_iter=True)
        # torch, too, draws a second seed here, and its workers have the first.
        torch_iter._shared_seed = shared_seed
        return torch_iter, progress.config

    @property
    def _claimant(self) -> _LoaderPoolCache | None:
        """The pool cache of an iterator that begins an epoch of the idle workers and has not taken them yet."""
        return None if self._claim is None else self._claim()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def aclose(self) -> None:
        """End all iterators and idle workers; wait until their processes have ended. Idempotent."""
        state = self._asyncloader_state
        state.closed = True
        for iterator in state.iterators:
            await iterator.aclose()
        await wait_until_left()
        self._idle_pool = None
        # Also those of iterators that were just dropped, which are ending in threads of their own.
        for pool in self._pools:
            await shielded(in_thread(pool.stop))
        for end in state.endings(self._spec):
            await shielded(in_thread(end))

    def close(self) -> None:
        """`aclose` for code that is not async. Blocks until the processes have ended. Idempotent."""
        state = self._asyncloader_state
        state.closed = True
        for iterator in state.iterators:
            iterator.close()
        self._idle_pool = None
        for pool in self._pools:
            pool.stop()
        for end in state.endings(self._spec):
            end()

    def state_dict(self) -> dict[str, Any]:
        """The newest iterator's position; see `DataLoader.state_dict`."""
        return self._asyncloader_state.keeper.state(self._spec)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at this position with the next ``aiter()``; see `DataLoader.load_state_dict`."""
        self._asyncloader_state.keeper.load(self._spec, state_dict)
        # The workers' copies of the dataset have advanced: pools of running iterators must not be reused, either.
        self._outdated.update(self._pools)
        pool, self._idle_pool = self._idle_pool, None
        if pool is not None:
            pool.stop_soon()

    def feedback(self, *args: Any, **kwargs: Any) -> None:
        """Call the sampler's `feedback`, as `DataLoader.feedback`. Call it where the loader is iterated."""
        feedback_target(self._spec)(*args, **kwargs)

    async def batch_at(self, step: int, *, epoch: int | None = None, rank: int | None = None) -> B_co:
        """Make the batch of any step; see `DataLoader.batch_at`."""
        epoch = self.epoch if epoch is None else epoch
        other: AsyncDataLoader[T_co, B_co] = loader_without_workers(self._spec, AsyncDataLoader, rank)
        with self._asyncloader_state.keeper.lent_dataset(self._spec):
            async with other:
                begin_at(other, other._asyncloader_state.keeper, epoch, step)
                async for batch in other:
                    check_step(other.state_dict(), epoch, step)
                    return batch
        raise no_step(epoch, step)

    def __iter__(self) -> NoReturn:
        """Raises TypeError: batches are awaited."""
        raise TypeError(
            "AsyncDataLoader is read with 'async for'; for a plain 'for' make an asyncloader.DataLoader, which takes "
            "the same arguments"
        )


own_constructor(AsyncDataLoader, "AsyncDataLoader")


class _LoaderPoolCache:
    """Begins an iterator's epoch, and passes persistent workers from one iterator to the next; see `PoolCache`."""

    _epoch: tuple[TorchIterator, EpochConfig]

    def __init__(self, loader: AsyncDataLoader[Any]) -> None:
        self._loader = loader

    def begin_epoch(self) -> tuple[Progress, TorchIterator, EpochConfig]:
        progress = self._loader._asyncloader_state.keeper.begin(self._loader._spec)
        self._epoch = self._loader._begin_torch_iter(progress, self)
        return progress, *self._epoch

    def transfer(self) -> tuple[DeviceTransfer | None, KeptRings | None]:
        return transfer_of(self._loader._spec), kept_rings_of(self._loader._spec)

    @property
    def idle(self) -> bool:
        return self._loader._idle_pool is not None and self._epoch is self._loader._kept

    def take(self) -> WorkerPool | None:
        if self._epoch is not self._loader._kept:
            return None  # the idle workers have the seed of another iterator
        self._loader._claim = None
        pool, self._loader._idle_pool = self._loader._idle_pool, None
        if pool is not None and pool.broken:
            pool.stop_soon()
            return None
        return pool

    def register(self, pool: WorkerPool) -> None:
        self._loader._pools.add(pool)

    def put_back(self, pool: WorkerPool) -> bool:
        loader = self._loader
        if not self._epoch[1].persistent_workers or loader._asyncloader_state.closed or loader._idle_pool is not None:
            return False
        if pool.broken or pool in loader._outdated:
            return False
        loader._idle_pool, loader._kept = pool, self._epoch
        return True


def _check_auto(num_workers: Any) -> None:
    if num_workers == AUTO:
        raise ValueError(
            'num_workers="auto" is a trial of some seconds before the first epoch, for which the event loop of an '
            'AsyncDataLoader would have to wait. Give a number: that of a DataLoader with "auto", or the one that '
            "`asyncloader try` finds"
        )
