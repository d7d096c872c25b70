"""Records the loaders of a program that `asyncloader try` runs, inside that program.

Data path: sitecustomize -> [recorder] -> the program's loaders; records -> folder -> faults, summary.

A file `sitecustomize.py` that `program_run` writes calls `begin` as each Python process of the program starts. Until
torch's DataLoader is imported, only the names of imports are looked at; then its class is wrapped. Runs are ended by
signals, so each process that iterates loaders writes its records while it runs: each half second, more often at first.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import os
import sys
import weakref
import zlib
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

from asyncloader.comparing.worker_reports import Report, attributes, digest, state_seconds, watch_states
from asyncloader.process_hooks import at_exit

PLAN = "ASYNCLOADER_TRY"
"""The environment variable that names the folder of the run: `plan.json` is read there, and the records are written."""

_DIGESTS = 20  # batches whose content is compared
_PERIOD_S, _SOON_S = 0.5, 0.05  # between two records: later, and while few batches came
_VERDICT_S = 2.0  # between two verdicts of our own loader
_ORDERED, _EPOCHS = 8, 4  # indices, and epochs, whose order is compared
_NOT_THE_PROGRAM = ("<", str(Path(__file__).parents[1]), str(Path(os.__file__).parent) + os.sep)
_NEED_WORKERS = {"prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"}


def begin() -> None:
    """Wrap the loaders of this process as soon as their modules are imported."""
    folder = Path(os.environ[PLAN])
    recorder = Recorder(folder, json.loads((folder / "plan.json").read_text()))
    sys.meta_path.insert(
        0, _AfterImport({"torch.utils.data.dataloader": recorder.wrap_torch, "asyncloader.loader": recorder.wrap_ours})
    )


class _AfterImport(dict[str, Any]):
    """A finder that calls functions with the modules of their names, once those were imported."""

    def find_spec(self, name: str, *_: object) -> Any:
        wrap = self.pop(name, None)
        spec: Any = None if wrap is None else importlib.util.find_spec(name)  # asks the other finders
        if spec is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), wrap(module))
        return spec


class LoaderRecord:
    """What is recorded of the loaders that a line makes in one process: plain values, as `vars` gives them to JSON."""

    def __init__(self, loader: Any) -> None:
        self.kind, self.workers, self.persistent = type(loader).__name__, loader.num_workers, loader.persistent_workers
        self.ours = any(each.__module__ == "asyncloader.options.declaration" for each in type(loader).__mro__)
        self.batches = self.begins = self.singles = 0  # singles: iterators that were left after their first batch
        self.waited = self.state_s = self.start_s = (
            0.0  # start_s: from `iter()` to the first batch, from the second iterator on
        )
        self.first_s: float | None = None  # the same of the first iterator
        self.points: list[tuple[float, int, float]] = []  # seconds, batches and seconds of waiting until then
        self.digests: list[int] = []
        self.orders: list[list[int]] = []  # of epochs whose sampler has `set_epoch`: number of indices, their digest
        self.stale: dict[str, str] = {}
        self.candidates: list[dict[str, Any]] = []


class _Reading:
    """An iterator's epoch; `begin_s`: seconds that `iter()` took."""

    def __init__(self, record: LoaderRecord, loader: Any, begin_s: float) -> None:
        self.record, self.loader, self.begin_s = record, weakref.ref(loader), begin_s
        self.taken, self.ended, self.inside = 0, False, False


class Recorder:
    """The records of this process.

    Args:
        folder: of the run.
        plan: `engine`: "asyncloader" if torch's class is to make ours; and `options` of ours by the loaders' places.
    """

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self._folder, self._pid, self._options = folder, os.getpid(), plan["options"]
        self._install = plan["engine"] == "asyncloader"
        self._records: dict[str, LoaderRecord] = {}
        self._paused = 0.0  # seconds that recording took, which its clock leaves out
        self._due = self._verdict_due = self._state_s = 0.0
        # By loader or iterator, and not as their attributes: both may be pickled.
        self._places, self._readings, self._orders, self._seen = (weakref.WeakKeyDictionary[Any, Any]() for _ in "1234")
        (folder / f"began-{self._pid}").touch()

    def wrap_torch(self, module: Any) -> None:
        """Wrap torch's DataLoader, and the method by which its iterators ask for indices."""
        kind, iterators = module.DataLoader, module._BaseDataLoaderIter
        construct, begin_epoch, next_index = kind.__init__, kind.__iter__, iterators._next_index

        @functools.wraps(construct)
        def make(loader: Any, *args: Any, **kwargs: Any) -> None:
            if self._install:
                self._install = False
                from asyncloader.integrations.install import install

                install().__enter__()  # never left: it is the engine of the whole run
                kind.__init__(loader, *args, **kwargs)  # which is `install`'s by now, and calls this function
            else:
                self._places[loader] = place_of_caller()
                construct(loader, *args, **kwargs)

        @functools.wraps(next_index)
        def ask(iterator: Any) -> Any:
            index = next_index(iterator)
            order = self._orders.setdefault(iterator, [0, 0])
            if order[0] < _ORDERED:
                order[:] = order[0] + 1, zlib.crc32(repr(index).encode(), order[1])
            return index

        kind.__init__, iterators._next_index = make, ask
        kind.__iter__ = functools.wraps(begin_epoch)(lambda loader: self._begin(loader, begin_epoch))

    def wrap_ours(self, module: Any) -> None:
        """Have the constructor of our DataLoader take the options of the plan."""
        construct = module.DataLoader.__init__

        @functools.wraps(construct)
        def make(loader: Any, *args: Any, **kwargs: Any) -> None:
            if options := self._options.get(place_of_caller()):
                given = inspect.signature(construct).bind(loader, *args, **kwargs).arguments | options
                unneeded = {"self"} if given.get("num_workers") else {"self", *_NEED_WORKERS}
                args, kwargs = (), {name: each for name, each in given.items() if name not in unneeded}
            construct(loader, *args, **kwargs)

        module.DataLoader.__init__ = make

    def _wrap_next(self, kind: type[Any]) -> None:
        """Wrap `__next__` of a class of iterators, where it is defined."""
        owner: Any = next(each for each in kind.__mro__ if "__next__" in vars(each))
        take = owner.__next__
        if hasattr(take, "_asyncloader_try"):
            return

        @functools.wraps(take)
        def take_next(iterator: Any) -> Any:
            reading = self._readings.get(iterator)
            if reading is None or reading.inside:  # inside: a subclass's method calls that of its base
                return take(iterator)
            reading.inside, began = True, perf_counter()
            try:
                batch = take(iterator)
            except StopIteration:
                reading.ended = True
                self._write()
                raise
            finally:
                reading.inside, seconds = False, perf_counter() - began
                reading.record.waited += seconds
            self._take(reading, batch, seconds)
            return batch

        vars(take_next)["_asyncloader_try"] = True
        owner.__next__ = take_next

    def _begin(self, loader: Any, begin_epoch: Any) -> Any:
        """Make an iterator, and record what can be seen of the loader between epochs."""
        if self._pid != os.getpid():  # forked by a process with records
            self._pid, self._records = os.getpid(), {}
        if not self._records:
            at_exit(self._write_now)
        place = self._places.get(loader) or place_of_caller()
        record = self._records.setdefault(place, LoaderRecord(loader))
        before = self._readings.get(loader)
        record.singles += before is not None and before.taken == 1 and not before.ended
        self._orders.pop(vars(loader)["_iterator"] or loader, None)  # persistent workers keep their iterator
        own = vars(loader)["worker_init_fn"]
        if not record.ours:
            watch_states(type(loader.dataset))
            watch_states(type(loader))
            self._compare_attributes(loader, record)
            # Torch's iterator reads the attribute while it starts the workers.
            vars(loader)["worker_init_fn"] = (
                Report(own, place, record.begins, str(self._folder)) if record.workers else own
            )
        began = perf_counter()
        try:
            iterator = begin_epoch(loader)
        finally:
            vars(loader)["worker_init_fn"] = own
        record.begins += 1
        samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None), loader.batch_sampler)
        if len(record.orders) < _EPOCHS and any(
            hasattr(each, "set_epoch") and getattr(each, "shuffle", True) for each in samplers
        ):
            record.orders.append(self._orders.setdefault(iterator, [0, 0]))
        self._readings[loader] = self._readings[iterator] = _Reading(record, loader, perf_counter() - began)
        self._wrap_next(type(iterator))
        return iterator

    def _compare_attributes(self, loader: Any, record: LoaderRecord) -> None:
        """Note attributes of the dataset that changed after persistent workers had begun with copies of it."""
        if record.persistent and record.workers:
            now = {path: each for path, each in attributes(loader.dataset) if each is not None}
            # Objects are compared by identity, and only those of the dataset itself: others may be caches.
            plain = {path: each if isinstance(each, int | float | str) else id(each) for path, each in now.items()}
            first = self._seen.setdefault(loader, plain)
            for path in first.keys() & plain.keys():
                if first[path] != plain[path] and (plain[path] is now[path] or path.count(".") == 1):
                    record.stale[path] = f"{now[path]!r:.40}"

    def _take(self, reading: _Reading, batch: Any, seconds: float) -> None:
        """Record a batch, which has just come."""
        record, now = reading.record, perf_counter()
        reading.taken += 1
        record.batches += 1
        record.state_s, self._state_s = record.state_s + state_seconds() - self._state_s, state_seconds()
        if reading.taken == 1 and record.first_s is None:
            record.first_s = reading.begin_s + seconds
        elif reading.taken == 1:
            record.start_s += reading.begin_s + seconds
        if len(record.digests) < _DIGESTS:
            record.digests.append(digest(batch))
        elif now < self._due:
            return
        loader = reading.loader()
        if record.ours and now > self._verdict_due and loader is not None:
            self._verdict_due = now + _VERDICT_S
            with suppress(Exception):  # a verdict that fails is no verdict
                record.candidates = [*map(dict, getattr(loader.diagnose(), "candidates", ()))]
        record.points.append((now - self._paused, record.batches, record.waited))
        self._paused += perf_counter() - now
        self._write()

    def _write(self) -> None:
        """Write the records, unless they were just written."""
        now = perf_counter()
        if now >= self._due - _PERIOD_S + _SOON_S:
            self._write_now()
            self._paused += perf_counter() - now

    def _write_now(self) -> None:
        if self._pid == os.getpid():
            self._due = perf_counter() + _PERIOD_S
            values = {"loaders": {place: vars(each) for place, each in self._records.items()}}
            part = self._folder / f"part-{self._pid}"
            with suppress(OSError):  # the folder is removed when the run has ended
                part.write_text(json.dumps(values, default=str))
                part.replace(self._folder / f"process-{self._pid}.json")  # at once: no reader sees a part


def place_of_caller() -> str:
    """Name the line of the program that makes a loader, and the line of the program that called it, if any."""
    found: list[str] = []
    last, frame = "an unknown line", inspect.currentframe()
    while frame is not None and len(found) < 2:
        name = frame.f_code.co_filename
        installed = "site-packages" in name
        if installed or not name.startswith(_NOT_THE_PROGRAM):
            relative = os.path.relpath(name)
            last = f"{Path(name).name if relative.startswith('..') else relative}:{frame.f_lineno}"
            found += [] if installed else [last]
        frame = frame.f_back
    return ", called at ".join(found) or last
