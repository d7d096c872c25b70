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

_spent = [0.0]  # in this process, and in its parent before it was forked


def state_seconds() -> float:
    """Return the seconds that `state_dict` of the watched classes took so far."""
    return _spent[0]


def watch_states(kind: type[Any]) -> None:
    """Count the time of `state_dict` of a class from now on, also in workers that are forked later."""
    owner: Any = next((each for each in kind.__mro__ if "state_dict" in vars(each)), None)
    if owner is None or hasattr(owner.state_dict, "_asyncloader_try"):
        return
    save = owner.state_dict

    @functools.wraps(save)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        try:
            return save(*args, **kwargs)
        finally:
            _spent[0] += perf_counter() - began

    vars(timed)["_asyncloader_try"] = True
    owner.state_dict = timed


class Report:
    """Takes the place of `worker_init_fn` of torch's loader: calls that, and watches the worker from then on.

    Args:
        initial: the user's `worker_init_fn`.
        place: where the loader was made.
        begun: number of the loader's iterators before this one.
        folder: for the report.
    """

    def __init__(self, initial: Callable[[int], Any] | None, place: str, begun: int, folder: str) -> None:
        self._initial, self._place, self._begun, self._folder = initial, place, begun, folder

    def __call__(self, worker: int) -> None:
        """Begin to watch this worker."""
        if self._initial is not None:
            self._initial(worker)
        import torch.utils.data
        from torch.utils.data._utils import fetch

        info = torch.utils.data.get_worker_info()
        dataset: Any = None if info is None else info.dataset
        watch_states(type(dataset))
        first, began, spent = generators(dataset), perf_counter(), state_seconds()
        batches: list[int] = []
        streams = isinstance(dataset, torch.utils.data.IterableDataset)
        values = {"place": self._place, "begun": self._begun, "worker": worker, "batches": batches, "streams": streams}
        file = Path(self._folder) / f"worker-{os.getpid()}.json"

        def took(batch: Any) -> None:
            if len(batches) >= _REPORTED[-1]:
                return
            batches.append(digest(batch) if streams else 0)
            if len(batches) in _REPORTED:
                now = generators(dataset)
                values["drawn"] = {
                    name: state
                    for name, (each, state) in first.items()
                    if name in now and now[name][0] is each and now[name][1] != state
                }
                values["state_s"], values["seconds"] = state_seconds() - spent, perf_counter() - began
                with suppress(OSError):  # the folder is removed when the run has ended
                    file.write_text(json.dumps(values))

        for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            _watch_fetch(kind, took)


def _watch_fetch(kind: Any, took: Callable[[Any], None]) -> None:
    fetch = kind.fetch

    def watched(self: Any, index: Any) -> Any:
        batch = fetch(self, index)
        took(batch)
        return batch

    kind.fetch = watched


def generators(dataset: Any) -> dict[str, tuple[Any, int]]:
    """Return the random generators that a worker may draw from, with digests of their states, by their names: the
    global ones, those in the dataset's attributes, and those in the module of its class.
    """
    torch, numpy, name = sys.modules["torch"], sys.modules.get("numpy"), type(dataset).__module__
    states: dict[str, tuple[Any, Any]] = {
        "random": (None, repr(random.getstate())),
        "torch": (None, torch.get_rng_state()),
    }
    if numpy is not None:
        states["numpy.random"] = None, numpy.random.get_state()
    others = [(f"{name}.{each}", value) for each, value in vars(sys.modules.get(name, sys)).items()]
    for path, each in [*attributes(dataset), *others]:
        if isinstance(each, torch.Generator):
            states[path] = each, each.get_state()
        elif type(each) is random.Random:
            states[path] = each, repr(each.getstate())
        elif numpy is not None and isinstance(each, numpy.random.Generator):
            states[path] = each, each.bit_generator.state
        elif numpy is not None and isinstance(each, numpy.random.RandomState):
            states[path] = each, each.get_state()
    return {path: (each, digest(state)) for path, (each, state) in states.items()}


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
    with suppress(Exception):  # sparse and other tensors, and arrays of objects, have no bytes
        if hasattr(value, "detach"):
            value = value.detach().cpu().contiguous().flatten().view(sys.modules["torch"].uint8).numpy()
        if hasattr(value, "tobytes"):
            flat, most = value.reshape(-1), max(1, _DIGEST_BYTES // value.itemsize)
            return zlib.crc32(flat[-most:].tobytes(), zlib.crc32(flat[:most].tobytes(), flat.size))
    plain = isinstance(value, int | float | complex | str | bytes | None)
    return zlib.crc32((repr(value) if plain else type(value).__name__).encode())
