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
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

from asyncloader.comparing.worker_reports import Report, attributes, state_seconds, watch_states
from asyncloader.process_hooks import at_exit

PLAN = "ASYNCLOADER_TRY"
"""The environment variable that names the folder of the run: `plan.json` is read there, and the records are written."""

_DIGESTS = 20  # batches whose content is compared
_DIGEST_BYTES = 1 << 20  # of each tensor, at its begin and at its end
_PERIOD_S, _SOON_S = 0.5, 0.05  # between two records: later, and while few batches came
_VERDICT_S = 2.0  # between two verdicts of our own loader
_ORDERED, _EPOCHS = 8, 4  # indices, and epochs, whose order is compared
_STDLIB = os.path.dirname(os.__file__)
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NEED_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")


def begin() -> None:
    """Wrap the loaders of this process as soon as their modules are imported."""
    folder = Path(os.environ[PLAN])
    recorder = Recorder(folder, json.loads((folder / "plan.json").read_text()))
    wraps: dict[str, Callable[[ModuleType], None]] = {
        "torch.utils.data.dataloader": recorder.wrap_torch,
        "asyncloader.loader": recorder.wrap_ours,
    }
    sys.meta_path.insert(0, _AfterImport(wraps))


class _AfterImport:
    """A finder that calls a function with a module once that was imported.

    Args:
        wraps: the functions by the names of the modules.
    """

    def __init__(self, wraps: dict[str, Callable[[ModuleType], None]]) -> None:
        self._wraps = wraps

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        wrap = self._wraps.pop(name, None)
        spec = None if wrap is None else importlib.util.find_spec(name)  # asks the other finders
        if wrap is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            wrap(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class LoaderRecord:
    """What is recorded of the loaders that a line makes in one process: plain values, as `vars` gives them to JSON."""

    def __init__(self, loader: Any, ours: bool) -> None:
        self.ours, self.kind = ours, type(loader).__name__
        self.workers = loader.num_workers if isinstance(loader.num_workers, int) else -1
        self.persistent = bool(loader.persistent_workers)
        self.batches = self.begins = self.singles = 0  # singles: iterators that were left after one of several batches
        self.waited = self.start_s = 0.0  # start_s: from `iter()` to the first batch, from the second iterator on
        self.first_s: float | None = None
        self.points: list[tuple[float, int, float]] = []  # seconds, batches and seconds of waiting until then
        self.digests: list[int] = []
        self.orders: list[list[int]] = []  # of each epoch whose sampler has `set_epoch`: number, digest of its indices
        self.stale: dict[str, str] = {}
        self.bound, self.candidates = "", list[dict[str, Any]]()


class _Reading:
    """An iterator's epoch."""

    def __init__(self, record: LoaderRecord, loader: Any, seconds: float) -> None:
        self.record, self.loader = record, weakref.ref(loader)
        self.begin_s = seconds  # that `iter()` took
        self.taken, self.ended, self.inside = 0, False, False


class Recorder:
    """The records of this process.

    Args:
        folder: of the run.
        plan: `engine`, "torch" or "asyncloader", and `options` of our loaders by their places.
    """

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self._folder, self._pid = folder, os.getpid()
        self._install: bool = plan["engine"] == "asyncloader"
        self._options: dict[str, dict[str, Any]] = plan["options"]
        self._records: dict[str, LoaderRecord] = {}
        self._paused = 0.0  # seconds that recording took, which its clock leaves out
        self._due = self._verdict_due = 0.0
        # By loader or iterator, and not on it: both may be pickled.
        self._places: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._readings: weakref.WeakKeyDictionary[Any, _Reading] = weakref.WeakKeyDictionary()
        self._orders: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._seen: weakref.WeakKeyDictionary[Any, dict[str, object]] = weakref.WeakKeyDictionary()
        (folder / f"began-{self._pid}").touch()

    # ---------------------------------------------------------------------------------------------- wrapped classes

    def wrap_torch(self, module: ModuleType) -> None:
        """Wrap torch's DataLoader, and the method by which its iterators ask for indices."""
        kind, iterators = module.DataLoader, module._BaseDataLoaderIter
        construct, begin_epoch, next_index = kind.__init__, kind.__iter__, iterators._next_index

        @functools.wraps(construct)
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:
            if self._install:
                self._install = False
                from asyncloader.integrations.install import install

                install().__enter__()  # never left: it is the engine of the whole run
                return kind.__init__(loader, *args, **kwargs)  # which is `install`'s by now, and calls this function
            self._places[loader] = place_of_caller()
            return construct(loader, *args, **kwargs)

        @functools.wraps(begin_epoch)
        def __iter__(loader: Any) -> Any:
            return self._begin(loader, begin_epoch)

        @functools.wraps(next_index)
        def _next_index(iterator: Any) -> Any:
            index = next_index(iterator)
            order = self._orders.setdefault(iterator, [0, 0])
            if order[0] < _ORDERED:
                order[:] = order[0] + 1, zlib.crc32(repr(index).encode(), order[1])
            return index

        kind.__init__, kind.__iter__, iterators._next_index = __init__, __iter__, _next_index

    def wrap_ours(self, module: ModuleType) -> None:
        """Have the constructor of our DataLoader take the options of the plan."""
        construct = module.DataLoader.__init__

        @functools.wraps(construct)
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:
            options = self._options.get(place_of_caller())
            if options:
                given = inspect.signature(construct).bind(loader, *args, **kwargs)
                kwargs, args = given.arguments | options, ()
                kwargs.pop("self")
                if not kwargs.get("num_workers"):
                    kwargs = {name: each for name, each in kwargs.items() if name not in _NEED_WORKERS}
            construct(loader, *args, **kwargs)

        module.DataLoader.__init__ = __init__

    def _wrap_next(self, kind: type[Any]) -> None:
        """Wrap `__next__` of a class of iterators, where it is defined."""
        owner = next(each for each in kind.__mro__ if "__next__" in vars(each))
        take = owner.__next__
        if hasattr(take, "_asyncloader_try"):
            return

        @functools.wraps(take)
        def __next__(iterator: Any) -> Any:
            reading = self._readings.get(iterator)
            if reading is None or reading.inside:  # inside: a subclass's method calls that of its base
                return take(iterator)
            reading.inside, began = True, perf_counter()
            try:
                batch = take(iterator)
            except StopIteration:
                reading.ended = True
                self._write(_SOON_S)
                raise
            finally:
                reading.inside = False
                reading.record.waited += perf_counter() - began
            self._take(reading, batch, perf_counter() - began)
            return batch

        __next__._asyncloader_try = True  # type: ignore[attr-defined]
        owner.__next__ = __next__

    # --------------------------------------------------------------------------------------------------- recording

    def _begin(self, loader: Any, begin_epoch: Callable[[Any], Any]) -> Any:
        place, record = self._record(loader)
        before, kept = self._readings.get(loader), vars(loader).get("_iterator")
        if before is not None and before.taken == 1 and not before.ended:
            record.singles += 1
        self._orders.pop(kept, None) if kept is not None else None
        initial, reports = vars(loader).get("worker_init_fn"), not record.ours and record.workers > 0
        if reports:
            # Torch's iterator reads the attribute while it starts the workers.
            vars(loader)["worker_init_fn"] = Report(initial, place, record.begins, str(self._folder))
        if not record.ours:
            watch_states(type(loader.dataset))
            watch_states(type(loader))
            self._compare_attributes(loader, record)
        began = perf_counter()
        try:
            iterator = begin_epoch(loader)
        finally:
            if reports:
                vars(loader)["worker_init_fn"] = initial
        record.begins += 1
        samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None), loader.batch_sampler)
        epochs = any(hasattr(each, "set_epoch") and getattr(each, "shuffle", True) for each in samplers)
        if epochs and len(record.orders) < _EPOCHS:
            record.orders.append(self._orders.setdefault(iterator, [0, 0]))
        reading = _Reading(record, loader, perf_counter() - began)
        self._readings[loader] = self._readings[iterator] = reading
        self._wrap_next(type(iterator))
        return iterator

    def _record(self, loader: Any) -> tuple[str, LoaderRecord]:
        if self._pid != os.getpid():  # forked by a process with records
            self._pid, self._records = os.getpid(), {}
        if not self._records:
            at_exit(self._write_now)
        place = self._places.get(loader) or place_of_caller()
        if place not in self._records:
            ours = any(each.__module__ == "asyncloader.options.declaration" for each in type(loader).__mro__)
            self._records[place] = LoaderRecord(loader, ours)
        return place, self._records[place]

    def _compare_attributes(self, loader: Any, record: LoaderRecord) -> None:
        """Note attributes of the dataset that changed after persistent workers had begun with copies of it."""
        if not (record.persistent and record.workers):
            return
        now = {path: each for path, each in attributes(loader.dataset) if each is not None}
        plain = {path: each if isinstance(each, int | float | str) else id(each) for path, each in now.items()}
        first = self._seen.setdefault(loader, dict(plain))
        for path in first.keys() & plain.keys():
            if first[path] != plain[path] and (isinstance(now[path], int | float | str) or path.count(".") == 1):
                record.stale[path] = f"{now[path]!r:.40}"

    def _take(self, reading: _Reading, batch: Any, seconds: float) -> None:
        record, now = reading.record, perf_counter()
        reading.taken += 1
        record.batches += 1
        if reading.taken == 1:
            record.first_s = record.first_s or reading.begin_s + seconds
            record.start_s += reading.begin_s + seconds if record.begins > 1 else 0.0
        if len(record.digests) < _DIGESTS:
            record.digests.append(_digest(batch))
        elif now < self._due:
            return
        loader = reading.loader()
        if record.ours and now > self._verdict_due and loader is not None:
            self._verdict_due = now + _VERDICT_S
            with suppress(Exception):  # a verdict that fails is no verdict
                found = loader.diagnose()
                record.bound, record.candidates = found.bound, [*map(dict, getattr(found, "candidates", ()))]
        if not record.points or now >= self._due - _PERIOD_S + _SOON_S:
            record.points.append((now - self._paused, record.batches, record.waited))
        self._paused += perf_counter() - now
        self._write(_SOON_S)

    def _write(self, period: float) -> None:
        """Write the records, unless they were written less than a period ago."""
        now = perf_counter()
        if now >= self._due - _PERIOD_S + period:
            self._write_now()
            self._paused += perf_counter() - now

    def _write_now(self) -> None:
        if self._pid == os.getpid():  # else a worker that was forked with records calls it at its exit
            self._due = perf_counter() + _PERIOD_S
            loaders = {place: vars(each) for place, each in self._records.items()}
            write(self._folder / f"process-{self._pid}.json", {"state_s": state_seconds(), "loaders": loaders})


def place_of_caller() -> str:
    """Name the line of the program that makes a loader, and the line of the program that called it, if any."""
    found: list[str] = []
    last, frame = "an unknown line", inspect.currentframe()
    while frame is not None and len(found) < 2:
        name = frame.f_code.co_filename
        if not name.startswith(("<", _OURS, _STDLIB + os.sep)) or "site-packages" in name:
            relative = os.path.relpath(name)
            last = f"{os.path.basename(name) if relative.startswith('..') else relative}:{frame.f_lineno}"
            if "site-packages" not in name:
                found.append(last)
        frame = frame.f_back
    return ", called at ".join(found) or last


def write(file: Path, values: dict[str, Any]) -> None:
    """Write a file at once, so that no reader sees a part."""
    part = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):  # the folder is removed when the run has ended
        part.write_text(json.dumps(values, default=str))
        part.replace(file)


def _digest(value: Any, depth: int = 0) -> int:
    """Return a checksum of a batch: of the bytes of tensors and arrays, and of plain values."""
    if isinstance(value, dict) and depth < 8:
        return zlib.crc32(repr([(str(key), _digest(each, depth + 1)) for key, each in value.items()]).encode())
    if isinstance(value, list | tuple) and depth < 8:
        return zlib.crc32(repr([_digest(each, depth + 1) for each in value[:256]]).encode())
    with suppress(Exception):  # sparse and other tensors, and arrays of objects, have no bytes
        if hasattr(value, "detach"):
            value = value.detach().cpu().contiguous().flatten().view(sys.modules["torch"].uint8).numpy()
        if hasattr(value, "tobytes"):
            flat = value.reshape(-1)
            most = max(1, _DIGEST_BYTES // value.itemsize)
            return zlib.crc32(flat[-most:].tobytes(), zlib.crc32(flat[:most].tobytes(), flat.size))
    plain = isinstance(value, int | float | complex | str | bytes | None)
    return zlib.crc32((repr(value) if plain else type(value).__name__).encode())
