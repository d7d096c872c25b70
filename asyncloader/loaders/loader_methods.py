"""The methods that both loaders have: positions, epochs, figures, and pages about a run.

Data path: none. A loader says where its options are, and which workers it has; `LoaderState` is all else that it has.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch

from asyncloader.base.events import SkippedSample
from asyncloader.base.live_objects import LiveObjects
from asyncloader.delivery.loader_device import kept_rings_of
from asyncloader.errors import LoaderClosed
from asyncloader.loaders.explain import as_html, as_text, diagnose_run, explain
from asyncloader.loaders.single_steps import without_steps
from asyncloader.options.clone import made_from
from asyncloader.options.declaration import B_co, LoaderOptions, LoaderSpec, OverridableProperty, T_co
from asyncloader.state.checkpoint import StateKeeper
from asyncloader.telemetry.counters import recording
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.pool import WorkerPool

if TYPE_CHECKING:
    from asyncloader.live.dashboard import Dashboard
    from asyncloader.live.snapshot import Reading
    from asyncloader.telemetry.diagnosis import Diagnosis
    from asyncloader.telemetry.metrics import Metric
    from asyncloader.telemetry.trace import Trace


class LoaderState:
    """A loader's state besides its options."""

    def __init__(self, keeper: StateKeeper) -> None:
        self.owner = os.getpid()
        self.statistics = Statistics()
        self.keeper = keeper
        self.closed = False
        # Weak: an iterator that is dropped must be freed at once, and its workers with it.
        self.iterators: LiveObjects[Any] = LiveObjects()
        self.newest: weakref.ref[Any] | None = None
        self.watched = os.environ.get("ASYNCLOADER_TOP") == "1"
        """Whether iterators open the loader's view."""
        self._view: Dashboard | None = None
        self._view_lock = self.owner, threading.Lock()

    @contextmanager
    def beginning(self) -> Generator[None]:
        """Within this an iterator is made. If that fails, the position is the one from before."""
        undo = self.keeper.mark()
        try:
            with recording(self.statistics.recorder):
                yield
        except BaseException:
            undo()
            raise

    def open_view(self, loader: Any, read: Callable[[Any], Reading], port: int) -> Dashboard | None:
        """Return the loader's view, with its page at this port; None: the loader has been closed."""
        from asyncloader.live.dashboard import Dashboard

        with self._one_view():
            view = self._view
            if view is None or not view.open:
                self._view = view = Dashboard(loader, read, self.statistics)
            # Behind the assignment: `close` sets this before it looks at the view.
            if self.closed:
                view.close()
                return None
            view.serve_page(port)
        return view

    def watch(self, loader: Any, read: Callable[[Any], Reading]) -> None:
        """Open the view without a page, unless it is open or the loader was closed. For ``ASYNCLOADER_TOP=1``."""
        if self._view is not None or self.closed:
            return
        from asyncloader.live.dashboard import watch

        with self._one_view():
            if self._view is None:
                self._view = watch(loader, read, self.statistics)
            if self.closed and self._view is not None:
                self._view.close()

    def _one_view(self) -> threading.Lock:
        # A forked child may inherit a lock that a thread held: it has one of its own.
        if self._view_lock[0] != os.getpid():
            self._view_lock = os.getpid(), threading.Lock()
        return self._view_lock[1]

    def endings(self, spec: LoaderSpec[Any]) -> list[Callable[[], object]]:
        """What ends, once the iterators have, of a loader that is closed. Each may block for some seconds."""
        rings, found = kept_rings_of(spec), list[Callable[[], object]]()
        if self._view is not None:
            found.append(self._view.close)
        if rings:
            found.append(rings.close)
        if self.keeper.grouped:
            found.append(self.keeper.retire_group)
        if self.statistics.trace is not None:
            found.append(self.statistics.finish_trace)
        return found

    def iterator(self) -> Any:
        """The newest iterator, if it lives."""
        return None if self.newest is None else self.newest()


class LoaderMethods(LoaderOptions[T_co, B_co]):
    """The base of both loaders."""

    @property
    def _asyncloader_state(self) -> LoaderState:
        raise NotImplementedError

    @property
    def _asyncloader_spec(self) -> LoaderSpec[Any]:
        """The loader's options."""
        raise NotImplementedError

    @property
    def _asyncloader_pool(self) -> WorkerPool | None:
        """The workers of the newest iterator, or those that wait for the next."""
        raise NotImplementedError

    @property
    def _asyncloader_place(self) -> str:
        """Where the newest iterator stands, in words."""
        state = self._asyncloader_state
        return "closed" if state.closed else state.keeper.place

    def _asyncloader_began(self, state: LoaderState, iterator: Any, end: Callable[[], object]) -> None:
        """Take note of a new iterator, which `end` ends.

        Raises:
            LoaderClosed: another thread has closed the loader.
        """
        state.newest = weakref.ref(iterator)
        state.iterators.add(iterator)
        # `close`, in another thread, may have looked at the iterators before this iterator was among them.
        if state.closed:
            end()
            raise self._asyncloader_closed()
        if state.watched:
            state.watch(self, LoaderMethods._asyncloader_watched)

    def _asyncloader_closed(self) -> LoaderClosed:
        return LoaderClosed(f"{self!r} is closed; make a new loader to iterate again")

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next ``iter()``, also on samplers and datasets that have `set_epoch`.

        In seeded mode the order depends on the epoch, which advances by itself when one was delivered completely. In
        torch mode only the sampler uses it.
        """
        self._asyncloader_state.keeper.set_epoch(self._asyncloader_spec, epoch)

    def where(self, *_: Any, **__: Any) -> NoReturn:
        """Raises AttributeError: the method was removed."""
        raise AttributeError(
            "where() is gone: the batches of loader.clone(dataset=range(len(dataset)), collate_fn=list) are lists of "
            "indices"
        )

    def skip(self, steps: Iterable[int]) -> None:
        """Leave out steps of the epoch that the next ``iter()`` begins or resumes, without reading them. States that
        are saved then leave them out, too. Seeded mode only; to be called on every rank.

        Args:
            steps: numbers of batches in the epoch, from 0.

        Raises:
            IndexError: the epoch has fewer batches; raised by the iterator where the samples of streams are counted
                first.
            ValueError: a step is not a number from 0 on, or the batches do not follow from epoch and step (see
                `batch_at`).
        """
        self.load_state_dict(without_steps(self._asyncloader_spec, self.state_dict(), steps))

    @OverridableProperty
    def epoch(self) -> int:
        """The number of the newest iterator's epoch, from 0; once that was delivered, and before the first, the next
        one's. An epoch that is left early does not count. In seeded mode the number determines the order.
        """
        return self._asyncloader_state.keeper.epoch(self._asyncloader_spec)

    @OverridableProperty
    def skipped_samples(self) -> list[SkippedSample]:
        """The newest iterator's samples that raised and were left out or replaced (`on_error`), with their tracebacks,
        in the order of their batches. A copy. Errors that were raised to the user are not included.
        """
        return list(self._asyncloader_state.statistics.newest_skipped)

    @OverridableProperty
    def padding(self) -> int:
        """Samples at the end of the newest iterator's last batch that only keep the ranks even; usually 0."""
        return self._asyncloader_state.keeper.padding

    def clone(self, **changes: Any) -> Self:
        """A new loader of the same class and options, `changes` applied.

        Args:
            changes: constructor arguments by name, and fields of those that are objects: ``worker_timeout=30`` changes
                that of `recovery` alone. ``batch_sampler`` replaces all arguments about batches, ``sampler``
                replaces ``shuffle``, ``num_workers=0`` drops the arguments that need workers. A default sampler is made
                again, for the clone's dataset.
        """
        return made_from(self._asyncloader_spec, type(self), changes, self)

    @classmethod
    def from_torch(cls, loader: torch.utils.data.DataLoader[Any], **changes: Any) -> Self:
        """A loader of this class with the options of any torch loader, `changes` applied as in `clone`."""
        return made_from(loader, cls, changes)

    def stats(self, prefix: str = "", *, interval: bool = False) -> dict[str, float]:
        """Counts and times of all iterators so far, as a new flat dictionary of floats. O(1), from any thread.

        Args:
            prefix: put before every key, as ``"train/"``.
            interval: count only from the last call with ``interval=True`` on.
        """
        state = self._asyncloader_state
        newest = state.iterator()
        depth = 0 if newest is None else newest.queue_depth
        return state.statistics.snapshot(depth, state.keeper.tally.snapshot(), prefix=prefix, interval=interval)

    def metrics(self) -> list[Metric]:
        """`stats()` with types, units, help and labels, for an exporter; times of stages apart for each worker."""
        from asyncloader.telemetry.metrics import metrics

        return metrics(self.stats(), self._asyncloader_state.statistics.blocks())

    def diagnose(self) -> Diagnosis:
        """What bounds the run so far, the figures that show it, what "auto" has measured, and settings worth trying.

        ``loader.clone(**candidate)`` applies one of `Diagnosis.candidates`. None alters the order or the samples.
        """
        return diagnose_run(self._asyncloader_spec, self._asyncloader_state.statistics)

    def progress(self) -> NoReturn:
        """Raises AttributeError: the method was removed."""
        raise AttributeError(
            "progress() is gone: draw a bar by tqdm(loader), and ask loader.diagnose() what bounds the run"
        )

    def trace(self, file: str | os.PathLike[str], *, last: float | None = None) -> Trace:
        """Record what each worker and this process does from now on, until the returned trace is closed, as a ``with``
        block does, or the loader's `close`. The file has Chrome's trace events, which ui.perfetto.dev shows. Memory is
        bounded: the newest 50,000 batches or so are kept.

        Args:
            file: ends with ``.json`` or ``.json.gz``. It is written when the trace ends, by `Trace.dump`, and if `last`
                is given also beside it, under a number, when the consumer gets a `LoaderTimeout`; at most 10 times.
            last: seconds that a file covers, for a trace that stays on. Default: all.

        Raises:
            OSError: the file cannot be written.
            RuntimeError, ValueError: the loader is being traced already; the file's name, or `last`.
        """
        from asyncloader.telemetry.trace import Trace  # late: few loaders are traced

        return Trace(self._asyncloader_state.statistics, file, type(self).__name__, last)

    def explain(self) -> str:
        """The effective configuration, and what bounds the run and what to change: `diagnose` in words."""
        statistics = self._asyncloader_state.statistics
        return explain(type(self).__name__, self._asyncloader_spec, statistics, self._asyncloader_pool)

    def dashboard(self, port: int = 0) -> Dashboard:
        """Serve a page that shows the loader while it runs: ``print(loader.dashboard())`` prints its address.

        It is served to this machine alone, at an address with a secret, by a thread of its own, until `close`; and
        `asyncloader top` shows the same in a terminal. Further calls return the same object.

        Args:
            port: the page's; 0: any that is free.

        Raises:
            LoaderClosed: the loader is closed.
            OSError: the port is in use, or the folder for the socket of `asyncloader top` cannot be used.
        """
        state, opened = self._asyncloader_state, None
        if not state.closed:
            opened = state.open_view(self, LoaderMethods._asyncloader_watched, port)
        if opened is None:
            raise self._asyncloader_closed()
        return opened

    def _asyncloader_watched(self) -> Reading:
        from asyncloader.loaders.reading import read

        state = self._asyncloader_state
        newest = state.iterator()
        return read(
            self._asyncloader_spec,
            state.statistics,
            kind=type(self).__name__,
            place=self._asyncloader_place,
            left_out=state.keeper.tally.snapshot(),
            queue_depth=0 if newest is None else newest.queue_depth,
            pool=self._asyncloader_pool,
            closed=state.closed,
        )

    def state_dict(self) -> dict[str, Any]:
        """The newest iterator's position."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at this position with the next iterator."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        used = self._asyncloader_place != "not iterated yet" and self._asyncloader_state.statistics.epochs
        run = self._asyncloader_watched() if used else None
        return as_html(type(self).__name__, self._asyncloader_spec, self._asyncloader_place, run)

    def __repr__(self) -> str:
        try:
            return as_text(type(self).__name__, self._asyncloader_spec, self._asyncloader_place)
        except AttributeError:  # its constructor has not ended: a debugger or a traceback shows it
            return object.__repr__(self)
