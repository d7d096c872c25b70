"""The interface of reading services, the service that reads in this process, and several services in a row.

Data path: graph -> [interface] -> DataLoader2.
"""

from __future__ import annotations

import pickle
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from asyncloader.dataloader2.graph.settings import set_graph_random_seed
from asyncloader.dataloader2.graph.utils import DataPipe, parts_of, parts_of_form
from asyncloader.dataloader2.random.seed_generator import SeedGenerator
from asyncloader.dataloader2.utils.worker import Change, InitFn, ResetFn, WorkerInfo, worker_graph

LimitFn: TypeAlias = Callable[[DataPipe, int | None], DataPipe]
F = TypeVar("F")


def end_soon(end: Callable[..., object], *arguments: Any) -> None:
    """Call a function in a thread, and do not wait for it. For finalizers."""
    # The collector runs a finalizer in any thread, at any line. If it waited there, it could wait for its own thread,
    # or for a thread that needs a lock of the interrupted code.
    threading.Thread(target=end, args=arguments, name="asyncloader-stop", daemon=True).start()


def describe_reader(service: Any) -> str:
    """Describe the reader of a graph in words. A position is valid only for a reader with the same description."""
    describe = getattr(service, "_read_by", None)
    if describe is not None:
        return str(describe())
    return "no reading service" if service is None else type(service).__name__


class ReadingServiceInterface(ABC):
    """How a graph is read. It must pickle until it is initialized: `DataLoader2` keeps a copy of it."""

    @abstractmethod
    def initialize(self, datapipe: DataPipe) -> DataPipe:
        """Adapt the graph, once, before the first epoch. Returns the datapipe to read."""

    def finalize(self) -> None:  # noqa: B027 - optional, as the next two
        """Release everything that was acquired. `DataLoader2.shutdown` calls it, perhaps more than once."""

    def initialize_iteration(  # noqa: B027
        self, seed_generator: SeedGenerator, iter_reset_fn: Change | None = None
    ) -> Change | None:
        """Begin an epoch.

        Args:
            seed_generator: gives the epoch's seeds.
            iter_reset_fn: another service's function, which changes the graph at the beginning of each epoch.

        Returns:
            Such a function, for `DataLoader2` or the next service; None: the graph stays as it is.
        """

    def finalize_iteration(self) -> None:  # noqa: B027
        """End an epoch."""

    if not TYPE_CHECKING:  # a user's service may have a `__del__` without arguments, which type checkers would refuse

        def __del__(self, *, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
            # A service of ours that reads no graph has nothing to end. The attribute is missing in a user's service.
            idle = getattr(self, "_end_datapipe", self) is None
            if not exiting() and not idle:
                end_soon(self.finalize)


class CheckpointableReadingServiceInterface(ReadingServiceInterface):
    """A reading service with a state."""

    @abstractmethod
    def checkpoint(self) -> bytes:
        """Return the state."""

    @abstractmethod
    def restore(self, datapipe: DataPipe, serialized_state: bytes) -> DataPipe:
        """Adapt the graph like `initialize`, and go on from a state."""


class PausableReadingService(ReadingServiceInterface):
    """A service whose part of the graph in this process can pause.

    Attributes:
        _end_datapipe: the end of that part; None before `initialize` and after `finalize`.
    """

    _end_datapipe: DataPipe | None = None
    _with_threads: Sequence[Any] = ()
    """The parts whose threads `finalize` ends."""

    def _set_end(self, end: DataPipe) -> None:
        # The parts are listed here, and not by `finalize`, which a finalizer's thread may run: torch's walk through a
        # graph sets hooks that all threads share, so a graph that another thread pickles then would go through them.
        self._end_datapipe, self._with_threads = end, with_threads(end)

    def _parts(self) -> list[Any]:
        return [] if self._end_datapipe is None else parts_of(self._end_datapipe)

    # Each method gets a function from the services before this, and returns a function for the services after it.

    def _pause(self, pause_fn: Change | None = None) -> Change | None:
        # From the end of the graph to its sources: `pause` waits for the item that a part is reading, which comes only
        # as long as the part's sources go on.
        for each in self._parts():
            if callable(getattr(each, "pause", None)):
                each.pause()
        return pause_fn

    def _resume(self, resume_fn: Change | None = None) -> Change | None:
        for each in reversed(self._parts()):
            if callable(getattr(each, "resume", None)):
                each.resume()
        return resume_fn

    def _limit(self, num_batches: int | None, limit_fn: LimitFn | None = None) -> LimitFn | None:  # noqa: ARG002
        return limit_fn  # the iterator counts


def reset_here(
    end: DataPipe, reset_fn: ResetFn | None, seed_generator: SeedGenerator, iter_reset_fn: Change | None
) -> Change | None:
    """Return the function that changes a graph in this process at the beginning of an epoch; None: no change."""
    if reset_fn is None:
        return iter_reset_fn

    def begin(_: DataPipe) -> DataPipe:
        changed = end if iter_reset_fn is None else iter_reset_fn(end)
        return reset_fn(changed, WorkerInfo(1, 0), seed_generator)

    return begin


class InProcessReadingService(PausableReadingService):
    """Reads the graph in this process. Seeds the graph, but no global generators.

    Args:
        prefetch_cnt: items that a thread reads ahead; default 0: no thread.
        init_fn: changes the graph once; default None.
        reset_fn: changes the graph at the beginning of each epoch; default None.

    Both functions get ``WorkerInfo(1, 0)``.
    """

    def __init__(self, prefetch_cnt: int = 0, init_fn: InitFn | None = None, reset_fn: ResetFn | None = None) -> None:
        self.prefetch_cnt = prefetch_cnt
        self.init_fn = init_fn
        self.reset_fn = reset_fn

    def initialize(self, datapipe: DataPipe) -> DataPipe:
        """Apply `init_fn`, and add the thread that reads ahead."""
        datapipe = worker_graph(datapipe, WorkerInfo(1, 0), self.init_fn)
        if self.prefetch_cnt > 0:
            datapipe = datapipe.prefetch(self.prefetch_cnt)
        self._set_end(datapipe)
        return datapipe

    def initialize_iteration(self, seed_generator: SeedGenerator, iter_reset_fn: Change | None = None) -> Change | None:
        """Seed the graph. Returns a function that applies `reset_fn`, if there is such a function."""
        assert self._end_datapipe is not None
        set_graph_random_seed(self._end_datapipe, seed_generator)
        return reset_here(self._end_datapipe, self.reset_fn, seed_generator, iter_reset_fn)

    def finalize(self) -> None:
        """End the graph's threads. Idempotent."""
        # The finalizers of the loader and of the service may call this at the same time, each in a thread. `pop` is
        # atomic, so only one of them gets the graph.
        end = vars(self).pop("_end_datapipe", None)
        if end is not None:
            shutdown_parts(vars(self).pop("_with_threads", ()))


def with_threads(datapipe: DataPipe) -> list[Any]:
    """Return the parts of a graph that have threads."""
    parts = parts_of_form(datapipe, "prefetch", "fullsync", "pin_memory")
    return [each for each in parts if hasattr(each, "shutdown")]


def shutdown_parts(parts: Iterable[Any]) -> None:
    """End the parts' threads."""
    for each in parts:
        each.shutdown()


class SequentialReadingService(CheckpointableReadingServiceInterface):
    """Several services in a row: each adapts the graph that the service before it returns.

    Args:
        reading_services: in the order of their initialization; they are finalized in the reverse order.
    """

    def __init__(self, *reading_services: ReadingServiceInterface) -> None:
        self.reading_services: tuple[Any, ...] = reading_services

    def initialize(self, datapipe: DataPipe) -> DataPipe:
        """Initialize the services in their order."""
        for each in self.reading_services:
            datapipe = each.initialize(datapipe)
        return datapipe

    def finalize(self) -> None:
        """Finalize the services in the reverse order."""
        with ExitStack() as ends:  # an error of one leaves no process of another
            # The attribute may be missing: a finalizer also calls this if the constructor has failed.
            for each in getattr(self, "reading_services", ()):
                ends.callback(each.finalize)

    def initialize_iteration(self, seed_generator: SeedGenerator, iter_reset_fn: Change | None = None) -> Change | None:
        """Begin an epoch in each service. A service's returned function is the `iter_reset_fn` of the next service."""
        for each in self.reading_services:
            iter_reset_fn = each.initialize_iteration(seed_generator=seed_generator, iter_reset_fn=iter_reset_fn)
        return iter_reset_fn

    def finalize_iteration(self) -> None:
        """End the epoch in the reverse order."""
        for each in reversed(self.reading_services):
            each.finalize_iteration()

    def checkpoint(self) -> bytes:
        """Return the states of all services, in their order; a service without a state gives b"", with a warning."""
        states = []
        for each in self.reading_services:
            if isinstance(each, CheckpointableReadingServiceInterface):
                states.append(each.checkpoint())
            else:
                warnings.warn(f"{type(each).__name__} has no checkpoint: its state is left out", stacklevel=2)
                states.append(b"")
        return pickle.dumps(states)

    def restore(self, datapipe: DataPipe, serialized_state: bytes) -> DataPipe:
        """Restore the services in their order; those without a state are initialized, with a warning."""
        states: list[bytes] = pickle.loads(serialized_state)
        assert len(states) == len(self.reading_services)
        for each, state in zip(self.reading_services, states, strict=True):
            if isinstance(each, CheckpointableReadingServiceInterface):
                datapipe = each.restore(datapipe, state)
            else:
                warnings.warn(f"{type(each).__name__} has no restore: it begins anew", stacklevel=2)
                datapipe = each.initialize(datapipe)
        return datapipe

    def _read_by(self) -> str:
        return ", ".join(map(describe_reader, self.reading_services))

    def _pause(self, pause_fn: Change | None = None) -> Change | None:
        return self._call_each("_pause", pause_fn)

    def _resume(self, resume_fn: Change | None = None) -> Change | None:
        return self._call_each("_resume", resume_fn)

    def _limit(self, num_batches: int | None, limit_fn: LimitFn | None = None) -> LimitFn | None:
        return self._call_each("_limit", limit_fn, num_batches)

    def _call_each(self, method: str, function: F, *arguments: Any) -> F:
        """Call a method of each service that has it, with the function that the service before returned."""
        for each in self.reading_services:
            if hasattr(each, method):
                function = getattr(each, method)(*arguments, function)
        return function
