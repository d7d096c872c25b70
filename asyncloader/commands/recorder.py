"""Records the loaders of a program that `asyncloader try` runs, inside that program.

Data path: sitecustomize -> [recorder] -> the program's loaders; records -> folder -> faults, summary.

A file `sitecustomize.py` that `program_run` writes calls `begin` as each Python process of the program starts. Until
torch's DataLoader is imported, only the names of imports are looked at; then its class is wrapped. Each worker of
torch's writes a small file of its own, about its draws, reads and saves. Runs are ended by signals, so each process
that iterates loaders writes its records while it runs: each half second, more often at first.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import os
import random
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from asyncloader.base.process_hooks import at_exit

_REPORTED = (1, 2, 4, 8, 16)  # numbers of batches after which a report is written
_DEPTH, _MOST = 3, 200  # of attributes that are looked at
_DIGEST_BYTES = 1 << 20  # of each tensor, at its begin and at its end

STATE_SECONDS = [0.0]
"""What `state_dict` of watched classes took in this process, and in its parent before it was forked."""


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Have a method call a function with the method itself as the first argument; a second call does nothing."""
    method = getattr(owner, name)
    if not hasattr(method, "_asyncloader_try"):
        wrapper = functools.wraps(method)(lambda *args, **kwargs: around(method, *args, **kwargs))
        vars(wrapper)["_asyncloader_try"] = True
        setattr(owner, name, wrapper)


def write(file: Path, values: dict[str, Any]) -> None:
    """Write a file at once: its process may be killed at any time, and its readers see no part."""
    part = file.with_suffix(".part")
    with suppress(OSError):  # the folder is removed when the run has ended
        part.write_text(json.dumps(values, default=str))
        part.replace(file)


def watch_states(kind: type[Any]) -> None:
    """Count the time of `state_dict` of a class from now on, also in workers that are forked later."""
    if (owner := next((each for each in kind.__mro__ if "state_dict" in vars(each)), None)) is not None:
        wrap(owner, "state_dict", _timed)


def _timed(save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    began = perf_counter()
    try:
        return save(*args, **kwargs)
    finally:
        STATE_SECONDS[0] += perf_counter() - began


class WorkerReport:
    """Takes the place of `worker_init_fn` of torch's loader: calls that, watches the worker from then on, and writes a
    report into the folder, which begins with these values.
    """

    def __init__(self, initial: Callable[[int], Any] | None, folder: str, **values: Any) -> None:
        self._initial, self._folder, self._values = initial, folder, values

    def __call__(self, worker: int) -> None:
        """Begin to watch this worker."""
        if self._initial is not None:
            self._initial(worker)
        with suppress(Exception):  # of the user's attributes
            self._watch(worker)

    def _watch(self, worker: int) -> None:
        from torch.utils.data import IterableDataset, get_worker_info
        from torch.utils.data._utils import fetch

        self._dataset: Any = getattr(get_worker_info(), "dataset", None)
        watch_states(type(self._dataset))
        self._first, self._began, self._spent = generators(self._dataset), perf_counter(), STATE_SECONDS[0]
        self._values |= {"worker": worker, "batches": [], "streams": isinstance(self._dataset, IterableDataset)}
        wrap(fetch._MapDatasetFetcher, "fetch", self._fetch)
        wrap(fetch._IterableDatasetFetcher, "fetch", self._fetch)

    def _fetch(self, fetch: Callable[..., Any], fetcher: Any, index: Any) -> Any:
        batch = fetch(fetcher, index)
        with suppress(Exception):  # of the user's attributes
            self._report(batch, self._values)
        return batch

    def _report(self, batch: Any, values: dict[str, Any]) -> None:
        if len(values["batches"]) < _REPORTED[-1]:
            values["batches"].append(digest(batch) if values["streams"] else 0)
            if len(values["batches"]) in _REPORTED:
                now, first = generators(self._dataset), self._first
                # A generator that has taken the place of another was seeded here.
                same = [name for name in first if name in now and now[name][0] is first[name][0]]
                values["drawn"] = {name: first[name][1] for name in same if now[name][1] != first[name][1]}
                values["seconds"], values["state_s"] = perf_counter() - self._began, STATE_SECONDS[0] - self._spent
                write(Path(self._folder, f"worker-{os.getpid()}.json"), values)


def generators(dataset: Any) -> dict[str, tuple[Any, int]]:
    """Return the random generators that a worker may draw from, with digests of their states, by their names: the
    global ones, those in the dataset's attributes, and those in the module of its class.
    """
    torch, numpy, name = sys.modules["torch"], sys.modules.get("numpy"), type(dataset).__module__
    found: dict[str, tuple[Any, Any]] = {
        "random": (None, repr(random.getstate())),
        "torch": (None, torch.get_rng_state()),
    }
    if numpy is not None:
        found["numpy.random"] = None, numpy.random.get_state()
    others = [(f"{name}.{each}", value) for each, value in vars(sys.modules.get(name, sys)).items()]
    for path, each in [*attributes(dataset), *others]:
        if issubclass(type(each), torch.Generator):  # `isinstance` would ask proxies, which may import or raise
            found[path] = each, each.get_state()
        elif type(each) is random.Random:
            found[path] = each, repr(each.getstate())
        elif numpy is not None and issubclass(type(each), numpy.random.Generator | numpy.random.RandomState):
            found[path] = each, each.bit_generator.state if hasattr(each, "bit_generator") else each.get_state()
    return {path: (each, digest(state)) for path, (each, state) in found.items()}


def attributes(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a dataset and of the objects in it, with their paths; those of the dataset first."""
    left = [("dataset", dataset)]
    for path, value in left:  # grows
        inner: dict[str, Any] = {}
        if isinstance(value, list | tuple):
            inner = {f"{path}[{number}]": each for number, each in enumerate(value[:8])}
        elif type(value).__module__.partition(".")[0] not in ("builtins", "numpy", "random"):
            inner = {f"{path}.{name}": each for name, each in getattr(value, "__dict__", {}).items()}
        yield from inner.items()
        left += [each for each in inner.items() if len(left) < _MOST and path.count(".") < _DEPTH]


def digest(value: Any, depth: int = 0) -> int:
    """Return a checksum of a batch: of the bytes of tensors and arrays, and of plain values."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple) and depth < 8:
        return zlib.crc32(repr([digest(each, depth + 1) for each in value[:256]]).encode())
    array: Any = value
    with suppress(Exception):  # sparse and other tensors, and arrays of objects, have no bytes
        if hasattr(array, "detach"):
            array = array.detach().cpu().contiguous().flatten().view(sys.modules["torch"].uint8).numpy()
        if hasattr(array, "tobytes"):
            flat, most = array.reshape(-1), max(1, _DIGEST_BYTES // array.itemsize)
            return zlib.crc32(flat[-most:].tobytes(), zlib.crc32(flat[:most].tobytes(), flat.size))
    plain = isinstance(value, int | float | complex | str | bytes | None)
    return zlib.crc32((repr(value) if plain else type(value).__name__).encode())


PLAN = "ASYNCLOADER_TRY"
"""The environment variable that names the folder of the run: `plan.json` is read there, and the records are written."""

_DIGESTS, _ORDERED, _EPOCHS = 20, 8, 4  # batches whose content is compared; indices, and epochs, whose order is
_PERIOD_S, _SOON_S, _VERDICT_S = 0.5, 0.05, 2.0  # between two records; while few batches came; between two verdicts
_NOT_THE_PROGRAM = ("<", str(Path(__file__).parents[1]), str(Path(os.__file__).parent) + os.sep)
_COPY = "a loader that was copied or unpickled"
_NEED_WORKERS = {"prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"}


def begin() -> None:
    """Wrap the loaders of this process as soon as their modules are imported."""
    folder = Path(os.environ[PLAN])
    (folder / f"began-{os.getpid()}").touch()
    recorder = ProgramRecorder(folder, **json.loads((folder / "plan.json").read_text()))
    wraps = {
        "torch.utils.data.dataloader": recorder.wrap_torch,
        "torchdata.stateful_dataloader.stateful_dataloader": recorder.wrap_stateful,
        "asyncloader.loaders.loader": recorder.wrap_ours,
    }
    sys.meta_path.insert(0, _AfterImport(wraps))


class _AfterImport(dict[str, Any]):
    """A finder that calls functions with the modules of their names, once those were imported."""

    def find_spec(self, name: str, *_: object) -> Any:
        wraps = self.pop(name, None)
        spec: Any = wraps and importlib.util.find_spec(name)  # asks the other finders
        if spec is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), wraps(module))
        return spec


class LoaderRecord:
    """The record of the loaders that a line makes in one process: plain values, as `vars` gives them to JSON."""

    def __init__(self, loader: Any) -> None:
        self.kind, self.workers, self.persistent = type(loader).__name__, loader.num_workers, loader.persistent_workers
        self.ours = any(each.__module__ == "asyncloader.options.declaration" for each in type(loader).__mro__)
        self.process = os.getpid()  # by which the reports of its workers are found
        self.batches = self.begins = self.singles = 0  # singles: iterators that were left after their first batch
        self.first_s: float | None = None  # from `iter()` to the first batch; start_s: of all later iterators
        self.start_s = self.waited = self.state_s = 0.0
        self.points: list[tuple[float, int, float]] = []  # seconds, batches and seconds of waiting until then
        self.digests: list[int] = []
        self.orders: list[list[int]] = []  # of epochs whose sampler has `set_epoch`: number of indices, their digest
        self.stale: dict[str, str] = {}
        self.candidates: list[dict[str, Any]] = []


class ProgramRecorder:
    """The records of this process. `install`: torch's class is to make our loaders. `options`: of ours, by the places
    where they are made.
    """

    def __init__(self, folder: Path, install: bool, options: dict[str, dict[str, Any]]) -> None:
        self._folder, self._install, self._options, self._pid = folder, install, options, os.getpid()
        self._records: dict[str, LoaderRecord] = {}
        self._paused = self._state_s = self._due = self._verdict_due = 0.0  # paused: the seconds that recording took
        # By loader or iterator, and not as their attributes: both may be pickled.
        self._places, self._readings, self._orders, self._seen = (weakref.WeakKeyDictionary[Any, Any]() for _ in "1234")

    def wrap_torch(self, module: Any) -> None:
        """Wrap torch's DataLoader, and the method by which its iterators ask for indices."""
        self._kind, self._iterators = module.DataLoader, module._BaseDataLoaderIter
        wrap(self._kind, "__init__", self._make)
        wrap(self._kind, "__iter__", self._begin)
        wrap(self._iterators, "_next_index", self._ask)

    def wrap_stateful(self, module: Any) -> None:
        """Wrap torchdata's StatefulDataLoader, which has methods of its own, and is not replaced."""
        wrap(module.StatefulDataLoader, "__init__", self._make_stateful)
        wrap(module.StatefulDataLoader, "__iter__", self._begin)

    def wrap_ours(self, module: Any) -> None:
        """Have the constructor of our DataLoader take the options of the plan."""
        wrap(module.DataLoader, "__init__", self._make_ours)

    def _make(self, construct: Callable[..., None], loader: Any, *args: Any, **kwargs: Any) -> None:
        if not self._install:
            self._places[loader] = _place_of_caller()
            return construct(loader, *args, **kwargs)
        self._install = False
        from asyncloader.loaders.install import install

        install().__enter__()  # never left: it is the engine of the whole run
        return self._kind.__init__(loader, *args, **kwargs)  # type: ignore[no-any-return] # now `install`'s, which calls this

    def _make_stateful(self, construct: Callable[..., None], loader: Any, *args: Any, **kwargs: Any) -> None:
        self._places[loader] = _place_of_caller()
        construct(loader, *args, **kwargs)

    def _make_ours(self, construct: Callable[..., None], loader: Any, *args: Any, **kwargs: Any) -> None:
        if options := self._options.get(_place_of_caller()):
            kwargs, args = inspect.signature(construct).bind(loader, *args, **kwargs).arguments | options, ()
            unneeded = {"self"} if kwargs.get("num_workers") else {"self", *_NEED_WORKERS}
            kwargs = {name: each for name, each in kwargs.items() if name not in unneeded}
        construct(loader, *args, **kwargs)

    def _ask(self, next_index: Callable[[Any], Any], iterator: Any) -> Any:
        index, order = next_index(iterator), self._orders.setdefault(iterator, [0, 0])
        if order[0] < _ORDERED:
            order[:] = order[0] + 1, zlib.crc32(repr(index).encode(), order[1])
        return index

    def _begin(self, begin_epoch: Callable[[Any], Any], loader: Any) -> Any:
        """Make an iterator, and record what can be seen of the loader between epochs."""
        if self._pid != os.getpid():  # forked by a process with records
            self._pid, self._records = os.getpid(), {}
        if not self._records:
            at_exit(self._write)
        place, own, before = self._places.get(loader, _COPY), loader.worker_init_fn, self._readings.get(loader)
        record = self._records.setdefault(place, LoaderRecord(loader))
        record.singles += before is not None and before.taken == 1 and not before.ended
        self._orders.pop(loader._iterator or loader, None)  # persistent workers keep their iterator
        if not record.ours:
            watch_states(type(loader.dataset))
            watch_states(type(loader))
            with suppress(Exception):  # of the user's attributes
                self._compare_attributes(loader, record)
            if record.workers:  # torch's iterator reads the attribute while it starts them
                loader.worker_init_fn = WorkerReport(
                    own, str(self._folder), place=place, begun=record.begins, process=self._pid
                )
        began = perf_counter()
        try:
            iterator = begin_epoch(loader)
        finally:
            if not record.ours:
                loader.worker_init_fn = own
        if not isinstance(iterator, self._iterators):  # that of a subclass's own engine
            return iterator
        record.begins += 1
        samplers = loader.sampler, getattr(loader.batch_sampler, "sampler", None), loader.batch_sampler
        if any(hasattr(each, "set_epoch") and getattr(each, "shuffle", True) for each in samplers):
            record.orders = [*record.orders, self._orders.setdefault(iterator, [0, 0])][:_EPOCHS]
        reading = SimpleNamespace(record=record, loader=weakref.ref(loader), begin_s=perf_counter() - began)
        self._readings[loader] = self._readings[iterator] = reading
        reading.taken, reading.ended, reading.inside = 0, False, False
        wrap(next(each for each in type(iterator).__mro__ if "__next__" in vars(each)), "__next__", self._next)
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

    def _next(self, take: Callable[[Any], Any], iterator: Any) -> Any:
        reading = self._readings.get(iterator)
        if reading is None or reading.inside:  # inside: a subclass's method calls that of its base
            return take(iterator)
        reading.inside, began = True, perf_counter()
        try:
            batch = take(iterator)
        except StopIteration:
            reading.ended = True
            self._record(reading.record)
            raise
        finally:
            reading.inside, seconds = False, perf_counter() - began
            reading.record.waited += seconds
        record, reading.taken = reading.record, reading.taken + 1
        record.batches += 1
        record.state_s, self._state_s = record.state_s + STATE_SECONDS[0] - self._state_s, STATE_SECONDS[0]
        if reading.taken == 1 and record.first_s is None:
            record.first_s = reading.begin_s + seconds
        elif reading.taken == 1:
            record.start_s += reading.begin_s + seconds
        if len(record.digests) < _DIGESTS:
            record.digests.append(digest(batch))
            self._paused += perf_counter() - began - seconds
            self._record(record, reading.loader())
        elif began + seconds > self._due:
            self._record(record, reading.loader())
        return batch

    def _record(self, record: LoaderRecord, loader: Any = None) -> None:
        """Add a point to a record, and write all, unless that was just done."""
        now = perf_counter()
        if record.points and now < self._due - _PERIOD_S + _SOON_S:
            return
        if record.ours and loader is not None and now > self._verdict_due:
            self._verdict_due = now + (_VERDICT_S if record.candidates else _PERIOD_S)
            with suppress(Exception):  # a verdict that fails is no verdict
                record.candidates = [*map(dict, getattr(loader.diagnose(), "candidates", ()))]
        record.points.append((now - self._paused, record.batches, record.waited))
        self._write()
        self._due = perf_counter() + _PERIOD_S
        self._paused += perf_counter() - now

    def _write(self) -> None:
        if self._pid == os.getpid():  # else this is the exit of a process that was forked
            write(self._folder / f"process-{self._pid}.json", {place: vars(r) for place, r in self._records.items()})


def _place_of_caller() -> str:
    """Name the line of the program that makes a loader, and the line of the program that called it, if any."""
    found: list[str] = []
    last, frame = "an unknown line", inspect.currentframe()
    while frame is not None and len(found) < 2:
        name = frame.f_code.co_filename
        installed, relative = "site-packages" in name, os.path.relpath(name)
        if installed or not name.startswith(_NOT_THE_PROGRAM):
            last = f"{Path(name).name if relative.startswith('..') else relative}:{frame.f_lineno}"
            found += [] if installed else [last]
        frame = frame.f_back
    return ", called at ".join(found) or last
