"""What reads a graph for DataLoader2: the interface, reading in this process, and several services in a row.

Data path: graph -> [interface] -> DataLoader2.
"""

from __future__ import annotations

import pickle
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.utils.data.graph import traverse_dps

from asyncloader.dataloader2.datapipes.forms import has_form
from asyncloader.dataloader2.graph.settings import set_graph_random_seed
from asyncloader.dataloader2.graph.utils import DataPipe, list_dps
from asyncloader.dataloader2.random.seed_generator import SeedGenerator
from asyncloader.dataloader2.utils.worker import WorkerInfo, worker_graph

Change: TypeAlias = Callable[[DataPipe], DataPipe]
InitFn: TypeAlias = Callable[[DataPipe, WorkerInfo], DataPipe]
ResetFn: TypeAlias = Callable[[DataPipe, WorkerInfo, SeedGenerator], DataPipe]
LimitFn: TypeAlias = Callable[[DataPipe, int | None], DataPipe]


def each_of_form(datapipe: DataPipe, *names: str) -> list[Any]:
    """The parts of a graph that functional forms of these names make."""
    return [each for each in list_dps(traverse_dps(datapipe)) if any(has_form(each, name) for name in names)]


def end_soon(end: Callable[..., object], *arguments: Any) -> None:
    """Have this called in a thread: for finalizers, which run anywhere and so must not wait."""
    threading.Thread(target=end, args=arguments, name="asyncloader-stop", daemon=True).start()


def read_by(service: Any) -> str:
    """What reads a graph, in words: a position means the same only for what is described alike."""
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
        """Let go of all that was acquired. Called by `DataLoader2.shutdown`, perhaps more than once."""

    def initialize_iteration(  # noqa: B027
        self, seed_generator: SeedGenerator, iter_reset_fn: Change | None = None
    ) -> Change | None:
        """Begin an epoch.

        Args:
            seed_generator: gives the epoch's seeds.
            iter_reset_fn: from another service: a function that changes the graph at the beginning of each epoch.

        Returns:
            Such a function, for `DataLoader2` or the next service; None: nothing is to be changed.
        """

    def finalize_iteration(self) -> None:  # noqa: B027
        """End an epoch."""

    if not TYPE_CHECKING:  # for type checkers a service of the user's may have one of its own, without arguments

        def __del__(self, *, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
            nothing = getattr(self, "_end_datapipe", self) is None  # to end: of a service of ours
            if not exiting() and not nothing:
                end_soon(self.finalize)


class CheckpointableReadingServiceInterface(ReadingServiceInterface):
    """A reading service with a state."""

    @abstractmethod
    def checkpoint(self) -> bytes:
        """The state."""

    @abstractmethod
    def restore(self, datapipe: DataPipe, serialized_state: bytes) -> DataPipe:
        """`initialize`, from a state."""


class PausableReadingService(ReadingServiceInterface):
    """A service whose part of the graph in this process can pause.

    Attributes:
        _end_datapipe: the end of that part; None before `initialize` and after `finalize`.
    """

    _end_datapipe: DataPipe | None = None
    _with_threads: Sequence[Any] = ()
    """What `finalize` ends. Found by `_reads`: a finalizer's thread must not look for it. torch's walk through a graph
    sets hooks that all threads share, and another thread's pickle would be made by them.
    """

    def _reads(self, end: DataPipe) -> None:
        self._end_datapipe, self._with_threads = end, with_threads(end)

    def _parts(self) -> list[Any]:
        return [] if self._end_datapipe is None else list_dps(traverse_dps(self._end_datapipe))

    # Functions are those of services before this one, for those after it.

    def _pause(self, pause_fn: Change | None = None) -> Change | None:
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
    """What changes a graph that is read in this process at the beginning of an epoch; None: nothing."""
    if reset_fn is None:
        return iter_reset_fn

    def begin(_: DataPipe) -> DataPipe:
        found = end if iter_reset_fn is None else iter_reset_fn(end)
        return reset_fn(found, WorkerInfo(1, 0), seed_generator)

    return begin


class InProcessReadingService(PausableReadingService):
    """Reads the graph in this process. Seeds the graph; global generators stay as they are.

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
        """See the interface."""
        datapipe = worker_graph(datapipe, WorkerInfo(1, 0), self.init_fn)
        if self.prefetch_cnt > 0:
            datapipe = datapipe.prefetch(self.prefetch_cnt)
        self._reads(datapipe)
        return datapipe

    def initialize_iteration(self, seed_generator: SeedGenerator, iter_reset_fn: Change | None = None) -> Change | None:
        """See the interface."""
        assert self._end_datapipe is not None
        set_graph_random_seed(self._end_datapipe, seed_generator)
        return reset_here(self._end_datapipe, self.reset_fn, seed_generator, iter_reset_fn)

    def finalize(self) -> None:
        """See the interface."""
        end = vars(self).pop("_end_datapipe", None)  # once, whichever finalizers' threads come here
        if end is not None:
            shutdown_parts(vars(self).pop("_with_threads", ()))


def with_threads(datapipe: DataPipe) -> list[Any]:
    """The parts of a graph that have threads."""
    parts = each_of_form(datapipe, "prefetch", "fullsync", "pin_memory")
    return [each for each in parts if hasattr(each, "shutdown")]


def shutdown_parts(parts: Iterable[Any]) -> None:
    """End their threads."""
    for each in parts:
        each.shutdown()


def shutdown_graph(datapipe: DataPipe) -> None:
    """End the threads of a graph."""
    shutdown_parts(with_threads(datapipe))


class SequentialReadingService(CheckpointableReadingServiceInterface):
    """Several services, each over what the one before makes of the graph.

    Args:
        reading_services: in the order in which they are initialized; they are finalized in the reverse order.
    """

    def __init__(self, *reading_services: ReadingServiceInterface) -> None:
        self.reading_services: tuple[Any, ...] = reading_services

    def initialize(self, datapipe: DataPipe) -> DataPipe:
        """See the interface."""
        for each in self.reading_services:
            datapipe = each.initialize(datapipe)
        return datapipe

    def finalize(self) -> None:
        """See the interface."""
        for each in reversed(getattr(self, "reading_services", ())):
            each.finalize()

    def initialize_iteration(self, seed_generator: SeedGenerator, iter_reset_fn: Change | None = None) -> Change | None:
        """See the interface; what one service returns is the next one's `iter_reset_fn`."""
        for each in self.reading_services:
            iter_reset_fn = each.initialize_iteration(seed_generator=seed_generator, iter_reset_fn=iter_reset_fn)
        return iter_reset_fn

    def finalize_iteration(self) -> None:
        """See the interface."""
        for each in reversed(self.reading_services):
            each.finalize_iteration()

    def checkpoint(self) -> bytes:
        """The states of all, in their order; that of a service without one is empty, with a warning."""
        states = []
        for each in self.reading_services:
            if isinstance(each, CheckpointableReadingServiceInterface):
                states.append(each.checkpoint())
            else:
                warnings.warn(f"{type(each).__name__} has no checkpoint: its state is left out", stacklevel=2)
                states.append(b"")
        return pickle.dumps(states)

    def restore(self, datapipe: DataPipe, serialized_state: bytes) -> DataPipe:
        """See the interface. Services without a state are initialized, with a warning."""
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
        return ", ".join(map(read_by, self.reading_services))

    # Each gets the function of the services before it, and returns that for those after it.

    def _pause(self, pause_fn: Change | None = None) -> Change | None:
        for each in self.reading_services:
            if hasattr(each, "_pause"):
                pause_fn = each._pause(pause_fn)
        return pause_fn

    def _resume(self, resume_fn: Change | None = None) -> Change | None:
        for each in self.reading_services:
            if hasattr(each, "_resume"):
                resume_fn = each._resume(resume_fn)
        return resume_fn

    def _limit(self, num_batches: int | None, limit_fn: LimitFn | None = None) -> LimitFn | None:
        for each in self.reading_services:
            if hasattr(each, "_limit"):
                limit_fn = each._limit(num_batches, limit_fn)
        return limit_fn
