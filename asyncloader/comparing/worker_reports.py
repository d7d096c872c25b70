"""Reports what torch's worker processes draw, read and save, while `asyncloader try` runs a program.

Data path: torch's worker -> [worker_reports] -> folder -> faults. One small file for each worker.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

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
    """Write a file at once: its process may be killed meanwhile, and its readers see no part."""
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
