"""Makes the user's loader, reads one run's batches, disturbed or not, and returns their tokens: short texts that change
when a batch changes, or a field of it.

Data path: job -> [runs: module:make_loader -> loader -> tokens] -> the process that compares. In a process of its own.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import random
import signal
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import active_children
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from asyncloader.base.bridge import run_in_thread
from asyncloader.loaders.async_loader import AsyncDataLoader
from asyncloader.loaders.loader import DataLoader
from asyncloader.options.declaration import LoaderSpec
from asyncloader.verification.disturbances import Kind, LoaderFacts
from asyncloader.verification.user_code import UserFailure
from asyncloader.workers.fetch.dataset_kinds import is_async_dataset

_MOST_FIELDS = 64
_DEEPEST = 5  # of containers whose parts are fields of their own
_PLAIN_ORDERS = [
    (sampler, batch_sampler)
    for sampler in (torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler)
    for batch_sampler in (torch.utils.data.BatchSampler, type(None))
]


class CannotVerify(ValueError):
    """The target makes no loader that can be verified. The text says why."""


def import_target(target: str) -> Callable[[], Any]:
    """Import the function that ``"module:name"``, or ``"file.py:name"``, names.

    Raises:
        CannotVerify: the function does not exist.
        Exception: whatever the module raises.
    """
    module_name, _, name = target.rpartition(":")
    if not module_name or not name:
        raise CannotVerify(f"{target!r} names no function: give module:make_loader, or file.py:make_loader")
    folder, file = Path.cwd(), None
    if module_name.endswith(".py"):
        file = Path(module_name).resolve()
        folder, module_name = file.parent, file.stem
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise CannotVerify(f"{target!r}: {folder} and Python's path have no module {error.name!r}") from error
    other = getattr(found, "__file__", None)
    if file is not None and (other is None or Path(other).resolve() != file):
        where = other or "a module of Python itself"
        raise CannotVerify(f"{target!r}: `import {module_name}` gives {where}, which hides it: rename the file")
    for part in name.split("."):
        if not hasattr(found, part):
            raise CannotVerify(f"{target!r}: {getattr(found, '__name__', found)} has no {part!r}")
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def make_loader(make: Callable[[], Any], ambient: int) -> torch.utils.data.DataLoader[Any]:
    """Call the user's function, and return the loader; an async loader's options.

    Args:
        make: the function; it may be async.
        ambient: seeds the process's generators before.

    Raises:
        CannotVerify: it returns something else.
    """
    random.seed(ambient)
    np.random.seed(ambient)
    torch.manual_seed(ambient)
    loader: Any = make()
    if inspect.iscoroutine(loader):
        loader = run_in_thread(loader)
    if isinstance(loader, AsyncDataLoader):
        loader = loader._spec
    if not isinstance(loader, torch.utils.data.DataLoader):
        raise CannotVerify(f"the function returned a {type(loader).__name__}: let it return a DataLoader")
    if isinstance(loader, LoaderSpec) and loader._asyncloader_options.workers not in (None, "threads"):
        raise CannotVerify("the loader's workers are a service: give a loader whose workers are processes")
    return loader


def facts(loader: torch.utils.data.DataLoader[Any]) -> LoaderFacts:
    """Describe a loader."""
    options = loader._asyncloader_options if isinstance(loader, LoaderSpec) else None
    kind = type(loader) if options is None or isinstance(loader, DataLoader) else AsyncDataLoader
    iterable = loader._dataset_kind == torch.utils.data._DatasetKind.Iterable
    return LoaderFacts(
        name=f"{kind.__module__.partition('.')[0]}.{kind.__name__}",
        ours=options is not None,
        seeded=options is not None and options.seed is not None,
        iterable=bool(iterable),
        workers=loader.num_workers,
        threads=options is not None and options.workers == "threads",
        method=getattr(loader.multiprocessing_context, "get_start_method", torch.multiprocessing.get_start_method)(),
        asynchronous=is_async_dataset(loader.dataset),
        stateful=hasattr(loader.dataset, "state_dict"),
        sampler=not iterable and (type(loader.sampler), type(loader.batch_sampler)) not in _PLAIN_ORDERS,
    )


def changed(loader: torch.utils.data.DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return the loader that a run reads: like the user's, on the CPU, and seeded.

    Args:
        loader: the user's.
        changes: arguments that replace the user's.
    """
    options = loader._asyncloader_options if isinstance(loader, LoaderSpec) else None
    always: dict[str, Any] = {"device": None, "pin_memory": False}
    if options is None or options.seed is None:
        # A seed excludes torch's generator, from which shuffle=True would draw: the seed's order is verified then.
        always |= {"seed": 0, "generator": None}
    if loader._dataset_kind == torch.utils.data._DatasetKind.Iterable and not hasattr(loader.dataset, "state_dict"):
        always["allow_replay"] = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these options are not the user's, whose module may make warnings errors
        return DataLoader.from_torch(loader, **(always | changes))


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """Asks for the batches of a run. The attributes that `Disturbance` has, too, mean the same.

    Attributes:
        batches: how many are read at most.
        seconds: after these, counted from the first batch, no further batch is begun.
        ambient: the seed of the process's generators, which no loader may depend on.
        state: where the run goes on, pickled; None: at the beginning.
    """

    batches: int
    seconds: float
    kind: Kind = "plain"
    workers: int = 0
    method: str | None = None
    at: int = 0
    ambient: int = 0
    state: bytes | None = None


Batch: TypeAlias = dict[str, str]
"""The tokens of a batch's fields, by their paths."""


@dataclass
class RunResult:
    """The result of a run.

    Attributes:
        batches: the batches.
        ended: whether the epoch ended behind them.
        state: that of a run which is resumed, behind its last batch; pickled.
        edited: the batch that changed after it was delivered.
        failure: why there are no more.
    """

    batches: list[Batch] = field(default_factory=list)
    ended: bool = False
    state: bytes | None = None
    edited: int | None = None
    failure: UserFailure | None = None


def look(make: Callable[[], Any], _: Callable[[str], None]) -> LoaderFacts:
    """Return the facts about the user's loader, of which a loader that the runs read can be made."""
    loader = make_loader(make, 0)
    found = facts(loader)
    changed(loader, num_workers=0, workers=None).close()
    return found


def opened(make: Callable[[], Any], job: RunJob) -> DataLoader[Any]:
    """Return the loader of a run."""
    loader = make_loader(make, job.ambient)
    # Of more workers than CPUs, which is the disturbance's doing; the module may make warnings errors.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    changes: dict[str, Any] = {"num_workers": job.workers, "workers": None}
    if job.workers and job.method == "threads":
        changes["workers"] = "threads"
    elif job.workers and job.method:
        changes["multiprocessing_context"] = job.method
    return changed(loader, **changes)


def run(job: RunJob, make: Callable[[], Any], note: Callable[[str], None]) -> RunResult:
    """Read the batches of a run.

    Args:
        job: which run.
        make: the user's function.
        note: gets in words how far the run is; it is read where the process is killed.
    """
    note("the loader was being made")
    result = RunResult()
    loader = opened(make, job)
    note("the first batch was being made")
    began: float | None = None
    try:
        if job.state is not None:
            loader.load_state_dict(pickle.loads(job.state))
        for number in _steps(loader, job, result):
            note(f"batch {number} was being made")
            now = time.monotonic()
            began = began or now  # with the first batch: a busy machine takes its time to start workers
            if now - began > job.seconds:
                break
    except Exception as error:
        result.failure = UserFailure.of(error)
    with suppress(Exception):
        loader.close()
    return result


def _steps(loader: DataLoader[Any], job: RunJob, result: RunResult) -> Iterator[int]:
    """Read the batches into the result. Yields the number of the next batch."""
    if job.kind in ("again", "break"):  # another epoch, or the beginning of the same, comes before
        loader.set_epoch(int(job.kind == "again"))
        for number, _ in enumerate(loader, 1):
            yield number
            if number >= (job.batches if job.kind == "again" else job.at):
                break
        loader.set_epoch(0)
    previous: tuple[Any, str] | None = None
    iterator = iter(loader)
    while len(result.batches) < job.batches:
        if job.kind == "resume" and len(result.batches) == job.at:
            result.state = pickle.dumps(loader.state_dict())
            return
        batch = next(iterator, _END)
        if batch is _END:
            result.ended = True
            return
        if previous is not None and result.edited is None and token(previous[0]) != previous[1]:
            result.edited = len(result.batches) - 1
        result.batches.append(fields(batch))
        if not loader.num_workers:
            previous = (batch, token(batch))
        if job.kind == "kill" and len(result.batches) == job.at:
            _kill_worker()
        yield len(result.batches)


_END = object()


def _kill_worker() -> None:
    for process in sorted(active_children(), key=lambda each: each.pid or 0):
        if process.pid is not None and process.name.startswith("asyncloader-worker-"):  # others are the user's
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            return


# ----------------------------------------------------------------------------------------------------- tokens


def token(value: Any) -> str:
    """Return a text that follows from a value alone, and from its type only where it cannot be pickled."""
    checksum = _Checksum()
    pickler = _Pickler(checksum, 5)
    pickler.fast = True  # equal values are equal, whether their parts are the same objects or not
    try:
        pickler.dump(value)
    except Exception:  # a lock, a file, a cycle
        return type(value).__qualname__
    return f"{checksum.value:08x}"


class _Checksum:
    """A file of which the checksum is kept."""

    def __init__(self) -> None:
        self.value = 0

    def write(self, data: Any) -> None:
        self.value = zlib.crc32(data, self.value)


class _Pickler(pickle.Pickler):
    """Has values of tensors and arrays in the place of their memory, which may be a part of a larger block."""

    def reducer_override(self, value: Any) -> Any:
        """Return the parts that stand for a value; `NotImplemented`: pickle's own."""
        if isinstance(value, torch.Tensor):
            return _same, (_parts_of_tensor(value.detach()),)
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            return _same, (str(value.dtype), value.shape, zlib.crc32(np.ascontiguousarray(value).tobytes()))
        if hasattr(type(value), "__array_interface__"):  # as of an image, whose pixels may be no attribute
            return _same, (type(value).__qualname__, np.asarray(value))
        return NotImplemented


def _same(*parts: Any) -> Any:
    raise NotImplementedError  # nothing is unpickled


def _parts_of_tensor(value: torch.Tensor) -> list[Any]:
    if value.is_nested:
        return [_parts_of_tensor(each) for each in value.unbind()]
    head: list[Any] = [str(value.dtype), tuple(value.shape)]
    if value.device.type == "meta":
        return head
    if value.layout != torch.strided:
        whole = (value if value.layout == torch.sparse_coo else value.to_sparse_coo()).coalesce()
        return [*head, _parts_of_tensor(whole.indices()), _parts_of_tensor(whole.values())]
    plain = value.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return [*head, zlib.crc32(plain.view(torch.uint8).numpy().data) if plain.numel() else 0]


def fields(batch: Any) -> dict[str, str]:
    """Return the token of each field of a batch by its path, as ``[0]`` or ``['image']``: 64 fields, and the rest."""
    found: dict[str, str] = {}
    for number, (path, part) in enumerate(_fields(batch, "", _DEEPEST)):
        name = (path or "the batch") if number < _MOST_FIELDS else "the rest"
        found[name] = token([found.get(name), token(part)])
    return found


def _fields(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth and isinstance(value, Mapping):
        for key, inner in value.items():
            # The text of another object may have its place in memory, which differs between processes.
            name = repr(key) if isinstance(key, str | bytes | int | float) else f"{type(key).__name__} {token(key)}"
            yield from _fields(inner, f"{path}[{name}]", depth - 1)
    elif depth and isinstance(value, list | tuple) and len(value) <= _MOST_FIELDS:
        for number, inner in enumerate(value):
            yield from _fields(inner, f"{path}[{number}]", depth - 1)
    else:
        yield path, sorted(map(token, value)) if isinstance(value, set | frozenset) else value
