"""Folders of small shards, and helpers of tests with loaders over them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncloader.remote.dataset import RemoteIterableDataset
from tests.helpers.faulty import Faults
from tests.helpers.seeded_runs import Stepwise
from tests.unit.remote.shards import MAKERS, mds, mds_index, number_of

__all__ = [
    "ALL",
    "SIZES",
    "Killing",
    "dataset_of",
    "epochs_of",
    "flat",
    "make_shards",
    "number_of",
    "plain",
    "resumed",
    "with_method",
]


SIZES = (7, 11, 5)
"""The number of samples of each shard of a small data set, which `tars` makes: see the conftest."""

ALL = list(range(sum(SIZES)))
"""The samples of that data set."""


def make_shards(folder: Path, sizes: Sequence[int], *, ending: str = "tar") -> str:
    """Make shards of this ending whose samples count from 0 on. Returns the URL of all of them."""
    first = 0
    made: list[bytes] = []
    make: Callable[[Sequence[int]], bytes] = mds if ending == "mds" else MAKERS[f"a.{ending}"]
    for number, size in enumerate(sizes):
        data = make(range(first, first + size))
        made.append(data)
        name = f"shard.{number:05d}.mds" if ending == "mds" else f"s-{number:03d}.{ending}"
        (folder / name).write_bytes(data)
        first += size
    if ending == "mds":
        (folder / "index.json").write_bytes(mds_index(*made, counts=sizes))
    return f"{folder}/"


class Killing:
    """`number_of` for `decode`, with faults that strike at some numbers."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def __call__(self, sample: dict[str, Any]) -> int:
        number = number_of(sample)
        self._faults.strike(number)
        return number


def dataset_of(url: Any, **options: Any) -> RemoteIterableDataset:
    """Return a dataset whose samples are numbers once decoded; `Stepwise` gives its `decode` to the loader."""
    decode = options.pop("decode", number_of)
    dataset: Any = RemoteIterableDataset(url, **options)
    dataset.decode = decode
    return dataset  # type: ignore[no-any-return]


def epochs_of(kind: str, dataset: Any, epochs: int = 1, **options: Any) -> list[list[list[int]]]:
    """Return the batches of each epoch, by default from forked workers."""
    with Stepwise(kind, dataset, **with_method(options)) as run:
        return [[plain(batch) for batch in run.epoch()] for _ in range(epochs)]


def plain(batch: Any) -> list[int]:
    """Return the numbers of a batch, or of a sample."""
    return [batch] if isinstance(batch, int) else batch.tolist()


def with_method(options: dict[str, Any]) -> dict[str, Any]:
    """Use forked workers, which start ten times as fast, and can read local files."""
    return {"multiprocessing_context": "fork", **options} if options.get("num_workers") else options


def resumed(kind: str, dataset: Any, steps: int, **options: Any) -> list[list[int]]:
    """Return an epoch that another loader continues after a number of batches; the state goes through JSON."""
    with Stepwise(kind, dataset, **with_method(options)) as run:
        run.begin()
        head = [plain(batch) for batch in run.take(steps)]
        state = json.loads(json.dumps(run.loader.state_dict()))
    with Stepwise(kind, dataset, **with_method(options)) as run:
        run.loader.load_state_dict(state)
        assert run.loader.state_dict() == state
        return head + [plain(batch) for batch in run.epoch()]


def flat(batches: Sequence[Sequence[int]]) -> list[int]:
    """Return all numbers, in order."""
    return [number for batch in batches for number in batch]
