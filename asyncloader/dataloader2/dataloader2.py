"""DataLoader2: reads a graph of datapipes through a reading service, one epoch after the other, and saves where it is.

Data path: graph -> adapters -> reading service -> [dataloader2: iterator] -> the user.

A snapshot within an epoch holds the number of items that were delivered, and the seeds with which the epoch began. To
resume, the graph begins the epoch again with the same seeds, and the delivered items are read and dropped. The items
after them are exactly the rest of the epoch.
"""

from __future__ import annotations

import pickle
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import torch
from torch.utils.data import MapDataPipe

from asyncloader.base.bridge import in_thread
from asyncloader.base.process_hooks import in_forked_child
from asyncloader.base.shielding import shielded
from asyncloader.dataloader2.adapter import Adapter
from asyncloader.dataloader2.async_iterator import LoaderAsyncIterator
from asyncloader.dataloader2.datapipes.async_map import await_parts
from asyncloader.dataloader2.datapipes.convert import MapToIterConverter
from asyncloader.dataloader2.error import PauseIteration
from asyncloader.dataloader2.graph._serialization import clone, deserialize_datapipe, serialize_datapipe
from asyncloader.dataloader2.graph.settings import fix_shuffle_seeds
from asyncloader.dataloader2.graph.utils import DataPipe
from asyncloader.dataloader2.iterator import DataLoader2Iterator
from asyncloader.dataloader2.random.seed_generator import SeedGenerator, check_seed
from asyncloader.dataloader2.services.interface import (
    CheckpointableReadingServiceInterface,
    ReadingServiceInterface,
    describe_reader,
    end_soon,
    shutdown_parts,
    with_threads,
)
from asyncloader.errors import StateError

__all__ = [
    "POSITION_KEY_NAME",
    "RANDOMNESS_STATE_KEY_NAME",
    "READING_SERVICE_STATE_KEY_NAME",
    "SERIALIZED_DATAPIPE_KEY_NAME",
    "DataLoader2",
    "DataLoader2Iterator",
]

T_co = TypeVar("T_co", covariant=True)

SERIALIZED_DATAPIPE_KEY_NAME = "serialized_datapipe"
READING_SERVICE_STATE_KEY_NAME = "reading_service_state"
RANDOMNESS_STATE_KEY_NAME = "randomness_state"
POSITION_KEY_NAME = "position"
"""Items of the epoch that were delivered; None between epochs. torchdata's states have no such key."""

_REMOVED = frozenset(("stats", "metrics", "progress", "trace", "dashboard", "explain"))


class DataLoader2(Generic[T_co]):
    """Reads a graph of datapipes.

    The graph and the reading service are cloned by pickle, so that the caller's stay as they are; with lambdas only if
    cloudpickle or dill is installed. One iterator is valid at a time. `with` ends it by `shutdown`; ``async for`` reads
    it too, in a thread, and `aclose` ends it then.

    Args:
        datapipe: the end of the graph; None if `load_state_dict` follows. A `MapDataPipe` is read in the order of its
            indices.
        datapipe_adapter_fn: an `Adapter`, or several, which are applied now, in their order; default None.
        reading_service: reads the graph; default None: the graph is read in this process, as it is.

    Raises:
        Exception: any error of pickling the graph or the service.
    """

    def __init__(
        self,
        datapipe: DataPipe | None,
        datapipe_adapter_fn: Iterable[Adapter] | Adapter | None = None,
        reading_service: ReadingServiceInterface | None = None,
    ) -> None:
        self._terminated = True  # until the constructor succeeds: the finalizer of a half-made loader ends nothing
        self._make_locks()
        if isinstance(datapipe, MapDataPipe):
            datapipe = MapToIterConverter(datapipe)
        self.datapipe: DataPipe | None = None if datapipe is None else clone(datapipe)
        self.reading_service = None if reading_service is None else clone(reading_service)
        self.reading_service_state: bytes | None = None
        if datapipe_adapter_fn is None:
            self.datapipe_adapter_fns: list[Callable[[DataPipe], DataPipe]] = []
        else:
            several = isinstance(datapipe_adapter_fn, Iterable)
            self.datapipe_adapter_fns = list(datapipe_adapter_fn) if several else [datapipe_adapter_fn]  # type: ignore[arg-type,list-item]
        self._datapipe_iter: Iterator[Any] | None = None
        self.valid_iterator_id: int | None = None
        self._adapted = False
        self._reset_iter = True
        self._is_paused = False
        self._seed: int | None = None
        self._reset_seed = False
        with torch.random.fork_rng(devices=()):
            self._seed_generator = SeedGenerator()
        self._initial_seed_generator = clone(self._seed_generator)
        self._delivered: int | None = None  # items of this epoch up to the position; None between epochs
        # If set, the next `iter()` begins the last epoch again, and drops this number of items.
        self._resume_at: int | None = None
        self._to_drop = 0
        self._interrupted = False  # by Ctrl-C in `next()`, which ends the generators of the graph
        self._read_by = ""  # describes the reader of the epoch that the position is in
        self._shuffle_seeds: list[int] | None = None  # of that epoch, if no service has set them
        self._with_threads: list[Any] = []  # the parts that `shutdown` ends: not every service does
        self._adapt()
        self._terminated = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), **dict.fromkeys(("_beginning_or_ending", "_reading"))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make_locks()

    if not TYPE_CHECKING:  # which would take any attribute for one of these

        def __getattr__(self, name: str) -> Any:
            if name in _REMOVED:
                raise AttributeError(
                    f"DataLoader2.{name} was removed: DataLoader(graph, batch_size=None, num_workers=...) reads a "
                    f"graph of datapipes, too, and has {name}()"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def _position(self) -> int | None:
        """That of `state_dict`: also a position that the next ``iter()`` will resume at."""
        return self._delivered if self._resume_at is None else self._resume_at

    def _make_locks(self) -> None:
        # `aclose` runs `shutdown` in another thread, perhaps while the thread of an ``async for`` begins an epoch. With
        # this lock `shutdown` either ends all that the epoch has started, or comes first, and no epoch begins.
        self._beginning_or_ending = threading.RLock()
        # A read whose ``async for`` was cancelled goes on in its thread. An epoch that began beside it would share its
        # graph: a buffer would get the old item, too. Taken before the other lock, and not by `shutdown`, which ends
        # reads.
        self._reading = threading.RLock()
        _loaders.add(self)
        in_forked_child(_renew_locks)

    def _adapt(self) -> None:
        if self.datapipe is not None:
            for adapt in self.datapipe_adapter_fns:
                self.datapipe = adapt(self.datapipe)
        self._datapipe_before_reading_service_adapt = clone(self.datapipe)

    def __iter__(self) -> DataLoader2Iterator[T_co]:
        """Begin an epoch. If no item was read from the iterator before, the new iterator continues that epoch.

        Raises:
            RuntimeError: the loader has no datapipe, or was shut down.
            TypeError: a loaded state is one of a reading service, and this service cannot restore a state.
        """
        with self._beginning_or_ending:
            self._check_readable()
            # Before `_begin_epoch`: it drops the epoch that the older iterator reads, even if it then fails. And before
            # the wait for a read that goes on, whose error is then nobody's, and does not end the loader.
            made = self.valid_iterator_id = 0 if self.valid_iterator_id is None else self.valid_iterator_id + 1
        with self._reading, self._beginning_or_ending:
            datapipe = self._check_readable()
            if self._reset_iter:
                self._begin_epoch(datapipe, self._resume_at)
        return DataLoader2Iterator(self, made)

    def _check_readable(self) -> DataPipe:
        if self.datapipe is None:
            raise RuntimeError("Please provide datapipe or use load_state_dict to load datapipe from state")
        if self._terminated:
            raise RuntimeError("Cannot iterate over the DataLoader as it has already been shut down")
        return self.datapipe

    def _begin_epoch(self, datapipe: DataPipe, resume_at: int | None) -> None:
        """Begin the next epoch, or with a position the last epoch again. If that fails, it can be tried again."""
        self._datapipe_iter = None  # the last reference: its finalizers end the epoch before
        self._delivered, self._resume_at = None, resume_at
        if self._is_paused:
            self._resume()
        if resume_at is not None:
            self._seed_generator = clone(self._initial_seed_generator)
        elif self._seed is None:
            with torch.random.fork_rng(devices=()):
                self._seed_generator.seed()
        elif self._reset_seed:
            self._seed_generator.seed(self._seed)
            self._reset_seed = False
        self._initial_seed_generator = clone(self._seed_generator)
        try:
            self._datapipe_iter = iter(self._prepare(datapipe, resume_at))
        except BaseException:
            # A second attempt gets the same seeds.
            self._seed_generator = clone(self._initial_seed_generator)
            raise
        self._reset_iter = self._interrupted = False
        self._resume_at = None
        self._delivered = self._to_drop = resume_at or 0

    def _prepare(self, datapipe: DataPipe, resume_at: int | None) -> DataPipe:
        """Prepare the graph for an epoch."""
        service = self.reading_service
        seeds: list[int] | None = None
        if not self._adapted:
            datapipe = await_parts(datapipe)
            self.datapipe = datapipe = datapipe if service is None else self._initialize(service, datapipe)
            self._with_threads = with_threads(datapipe)
            self._adapted = True
        if service is None:
            seeds = fix_shuffle_seeds(
                datapipe, self._shuffle_seeds if resume_at is not None else None, within=bool(resume_at)
            )
        elif (change := service.initialize_iteration(self._seed_generator)) is not None:
            self.datapipe = datapipe = change(datapipe)
        reader = describe_reader(service)
        if resume_at and self._read_by not in ("", reader):
            raise StateError(
                f"the position is one of {self._read_by}, and this is {reader}, which would read another rest of the "
                "epoch: use the same, or begin that epoch anew by _restore_checkpoint_beginning_of_epoch()"
            )
        self._read_by, self._shuffle_seeds = reader, seeds
        return datapipe

    def _initialize(self, service: ReadingServiceInterface, datapipe: DataPipe) -> DataPipe:
        if self.reading_service_state is None:
            return service.initialize(datapipe)
        if not isinstance(service, CheckpointableReadingServiceInterface):
            raise TypeError("Cannot restore from non-checkpointable reading service")
        return service.restore(datapipe, self.reading_service_state)

    def _before_read(self) -> None:
        """Do what comes before the next item is read: after Ctrl-C begin the epoch again, and drop the items before the
        position.

        Raises:
            PauseIteration: the loader is paused.
        """
        if self._is_paused:
            raise PauseIteration("DataLoader2 has been paused. `resume` must be called before continuing.")
        if self._interrupted and not self._terminated and self.datapipe is not None:
            delivered = self._delivered
            # None: Ctrl-C has come again while the epoch began again.
            self._begin_epoch(self.datapipe, self._resume_at if delivered is None else delivered)
            self._reset_iter = True
        while self._to_drop and self._datapipe_iter is not None:
            self._drop_one(self._datapipe_iter)

    def _end_epoch(self) -> None:
        """Note that the graph has no more items."""
        # After `shutdown` it is not the end of the epoch: the position stays that of the last item.
        if not self._terminated:
            self._delivered = None
            if self.reading_service is not None:
                self.reading_service.finalize_iteration()

    def _drop_one(self, source: Iterator[Any]) -> None:
        try:
            next(source)
        except StopIteration:
            raise StateError(
                f"the graph ended {self._to_drop} items before the position to resume from: it is not the same graph, "
                "or its items do not follow from its seeds"
            ) from None
        self._to_drop -= 1

    def seed(self, seed: int) -> None:
        """Seed the next epoch; those after it continue the stream of this seed. The position of a loaded state is
        dropped.

        Raises:
            TypeError: the seed is no integer.
            ValueError: the seed is not between 0 and 2**64 - 1.
        """
        self._seed = check_seed(seed)
        self._reset_seed = True
        self._resume_at = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __del__(self, *, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not exiting() and not getattr(self, "_terminated", True) and self._adapted:
            self._terminated = True
            # In a list, so that `_end` holds the last reference: the iterator's own end may wait for threads.
            source, self._datapipe_iter = [self._datapipe_iter], None
            end_soon(_end, source, self.reading_service, self._with_threads)

    def shutdown(self) -> None:
        """End the epoch, and the processes and threads that read for it; wait for them. Idempotent."""
        with self._beginning_or_ending:
            if self._terminated:
                return
            self._terminated = True
            source, self._datapipe_iter = [self._datapipe_iter], None
        # Without the lock: no epoch begins any more, and this may wait for processes.
        _end(source, self.reading_service, self._with_threads)

    async def aclose(self) -> None:
        """Run `shutdown` in a thread. Idempotent."""
        await shielded(in_thread(self.shutdown))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> LoaderAsyncIterator[T_co]:
        """Return an iterator of the next epoch. It begins the epoch with the first item, and reads in a thread, so that
        the event loop is not blocked. Raises the same errors as `iter`.
        """
        self._check_readable()
        return LoaderAsyncIterator(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, from which another loader goes on exactly; between epochs: the next epoch's beginning.

        Returns:
            ``serialized_datapipe``: the graph before the reading service, pickled. ``reading_service_state``: bytes, or
            None. ``randomness_state``: ``(seed, reset_seed, seeds now, seeds at the epoch's beginning)``. ``position``:
            items of the epoch that were delivered; None between epochs. ``read_by``: a description of their reader.
            ``shuffle_seeds``: those of the epoch's shuffles; None if they follow from ``randomness_state``, as with
            every reading service.

        Raises:
            RuntimeError: the loader has no datapipe.
        """
        if self._datapipe_before_reading_service_adapt is None:
            raise RuntimeError("Please provide datapipe or use load_state_dict to load datapipe from state")
        state = self.reading_service_state
        if self._adapted or state is None:
            service = self.reading_service
            state = service.checkpoint() if isinstance(service, CheckpointableReadingServiceInterface) else None
        generators = pickle.dumps(self._seed_generator), pickle.dumps(self._initial_seed_generator)
        return {
            SERIALIZED_DATAPIPE_KEY_NAME: serialize_datapipe(self._datapipe_before_reading_service_adapt),
            READING_SERVICE_STATE_KEY_NAME: state,
            RANDOMNESS_STATE_KEY_NAME: (self._seed, self._reset_seed, *generators),
            POSITION_KEY_NAME: self._position,
            "read_by": self._read_by,
            "shuffle_seeds": self._shuffle_seeds,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], reading_service: ReadingServiceInterface) -> DataLoader2[Any]:
        """Make a loader that goes on from a state, as by `load_state_dict`."""
        loader: DataLoader2[Any] = cls(None, None, reading_service)
        loader.load_state_dict(state)
        return loader

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state with the next ``iter()``: in the middle of an epoch with the rest of it.

        The graph is that of the state, with its adapters applied; the adapters given to this constructor are applied to
        it, too. The state is unpickled, which can run any code: load only states that you saved yourself.

        Raises:
            RuntimeError: an iterator was made already.
            StateError: by the next ``iter()``: the position is in an epoch that was read by other reading services, or
                by another number of workers or ranks.
        """
        if self._datapipe_iter is not None or self._adapted:
            raise RuntimeError(
                "DataLoaderV2 iterator has already been created, `load_state_dict()` can’t be called. "  # noqa: RUF001
                "Please create a new dataloader in order to use load state dict."
            )
        datapipe, state = state_dict[SERIALIZED_DATAPIPE_KEY_NAME], state_dict[READING_SERVICE_STATE_KEY_NAME]
        seed, reset_seed, now, initial = state_dict[RANDOMNESS_STATE_KEY_NAME]
        generators, datapipe = (pickle.loads(now), pickle.loads(initial)), deserialize_datapipe(datapipe)
        # Up to here a damaged state raises, and leaves the loader as it was.
        self.datapipe, self.reading_service_state = datapipe, state
        self._seed, self._reset_seed = seed, reset_seed
        self._seed_generator, self._initial_seed_generator = generators
        self._resume_at = state_dict.get(POSITION_KEY_NAME)
        self._read_by, self._shuffle_seeds = state_dict.get("read_by", ""), state_dict.get("shuffle_seeds")
        self._adapt()

    def _restore_checkpoint_beginning_of_epoch(self) -> None:
        """After `load_state_dict`: begin the state's epoch again, from its first item."""
        self._seed_generator = clone(self._initial_seed_generator)
        self._resume_at = 0

    def _pause(self) -> None:
        self._ask_service("pause")

    def _resume(self) -> None:
        self._ask_service("resume")

    def _limit(self, num_batches: int | None) -> None:
        service: Any = self.reading_service
        if not hasattr(service, "_limit"):
            warnings.warn("ReadingService doesn't support `limit`.", stacklevel=3)
            return
        limit = service._limit(num_batches)
        if limit is not None and self.datapipe is not None:
            self.datapipe = limit(self.datapipe, num_batches)

    def _ask_service(self, what: str) -> None:
        ask = getattr(self.reading_service, f"_{what}", None)
        if ask is None:
            warnings.warn(f"ReadingService doesn't support `{what}`.", stacklevel=4)
            return
        if what == "resume" and not self._is_paused:
            warnings.warn("Resume is called when `DataLoader2` is not paused. No operation is performed.", stacklevel=4)
            return
        self._is_paused = what == "pause"
        change = ask()
        if change is not None and self.datapipe is not None:
            self.datapipe = change(self.datapipe)


_loaders: weakref.WeakSet[DataLoader2[Any]] = weakref.WeakSet()


def _renew_locks() -> None:
    # Those that a thread of the parent held at the fork would never be free.
    for each in list(_loaders):
        each._make_locks()


def _end(source: list[Any], service: ReadingServiceInterface | None, parts: list[Any]) -> None:
    """End the service and the parts with threads, then the epoch's iterator, whose last reference is in this list."""
    try:
        if service is not None:
            try:
                service.finalize_iteration()
            finally:
                service.finalize()
        shutdown_parts(parts)
    finally:
        # Last: the iterator's own end waits for its threads, which may be waiting for items of the service's processes.
        source.clear()
