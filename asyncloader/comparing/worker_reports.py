"""Reports what torch's worker processes draw, read and save, while `asyncloader try` runs a program.

Data path: torch's worker -> [worker_reports] -> folder -> faults. One small file for each worker, written after its 1st,
2nd, 4th ... 16th batch.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
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


_spent = [0.0]  # seconds in `state_dict` of watched classes, in this process and, before the fork, in its parent


def state_seconds() -> float:
    """Return the seconds that `state_dict` of the watched classes took so far."""
    return _spent[0]


def watch_states(kind: type[Any]) -> None:
    """Count the time of `state_dict` of a class from now on, also in workers that are forked later."""
    owner = next((each for each in kind.__mro__ if "state_dict" in vars(each)), None)
    if owner is None or hasattr(owner.state_dict, "_asyncloader_try"):
        return
    save = owner.state_dict

    @functools.wraps(save)
    def state_dict(*args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        try:
            return save(*args, **kwargs)
        finally:
            _spent[0] += perf_counter() - began

    state_dict._asyncloader_try = True  # type: ignore[attr-defined]
    with suppress(TypeError):  # a class in C
        owner.state_dict = state_dict


class Report:
    """Takes the place of `worker_init_fn` of torch's loader: calls that, and then watches the worker.

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
        values: dict[str, Any] = {"place": self._place, "begun": self._begun, "worker": worker, "batches": []}
        values |= {"streams": isinstance(dataset, torch.utils.data.IterableDataset), "state_s": 0.0}
        file = Path(self._folder) / f"worker-{os.getpid()}.json"

        def took(batch: Any) -> None:
            batches: list[int] = values["batches"]
            if len(batches) >= _REPORTED[-1]:
                return
            with suppress(Exception):  # a batch that cannot be pickled cannot be sent, either
                batches.append(zlib.crc32(pickle.dumps(batch)) if values["streams"] else 0)
            if len(batches) in _REPORTED:
                now = generators(dataset)
                values["drawn"] = {name: each for name, each in first.items() if now.get(name) != each}
                values["state_s"], values["seconds"] = state_seconds() - spent, perf_counter() - began
                with suppress(OSError):  # the folder is removed when the run has ended
                    file.write_text(json.dumps(values))

        for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            _watch_fetch(kind, took)


def _watch_fetch(kind: Any, took: Callable[[Any], None]) -> None:
    fetch_batch = kind.fetch

    @functools.wraps(fetch_batch)
    def fetch(self: Any, index: Any) -> Any:
        batch = fetch_batch(self, index)
        took(batch)
        return batch

    kind.fetch = fetch


def generators(dataset: Any) -> dict[str, int]:
    """Return digests of the states of the random generators that a worker may draw from, by their names: the global
    ones, those in the dataset's attributes, and those in the module of its class.
    """
    torch, numpy = sys.modules["torch"], sys.modules.get("numpy")
    found = {"random": zlib.crc32(pickle.dumps(random.getstate()))}
    found["torch"] = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    if numpy is not None:
        found["numpy.random"] = zlib.crc32(pickle.dumps(numpy.random.get_state()))
    module = sys.modules.get(type(dataset).__module__)
    others = [(f"{type(dataset).__module__}.{name}", each) for name, each in (vars(module) if module else {}).items()]
    for path, each in [*attributes(dataset), *others]:
        kind = type(each)
        with suppress(Exception):  # a generator of the user's own kind that has no state to be read
            if kind.__module__.startswith("torch") and kind.__name__ == "Generator":
                found[path] = zlib.crc32(each.get_state().numpy().tobytes())
            elif kind.__module__.startswith("numpy.random") or kind is random.Random:
                found[path] = zlib.crc32(pickle.dumps(each))
    return found


def attributes(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a dataset and of the objects in it, with their paths; those of the dataset first."""
    left = [("dataset", dataset)]
    for path, value in left:  # grows
        if isinstance(value, list | tuple):
            inner = {f"{path}[{number}]": each for number, each in enumerate(value[:8])}
        elif type(value).__module__.partition(".")[0] in ("builtins", "numpy", "random"):
            continue
        else:
            inner = {f"{path}.{name}": each for name, each in getattr(value, "__dict__", {}).items()}
        yield from inner.items()
        left += [each for each in inner.items() if len(left) < _MOST and path.count(".") < _DEPTH]
