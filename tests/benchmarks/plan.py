"""The measurements, and the floor under each ratio. Pure data: nothing heavy is imported here.

A metric is one number per loader and round. A floor bounds the ratio of two loaders in one metric.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

TORCH = "torch"
TORCH_FILE_SYSTEM = "torch file_system"
TORCH_UNORDERED = "torch out of order"
ASYNC = "AsyncDataLoader"
FACADE = "DataLoader"
OURS = (ASYNC, FACADE)
ASYNC_PLAIN = "AsyncDataLoader on asyncio"
"""Iterated in asyncio's own event loop; the others use uvloop."""
PEERS = (
    "torchdata StatefulDataLoader",
    "torchdata nodes",
    "grain",
    "spdl drop-in",
    "spdl threads",
    "spdl arena",
    "webdataset WebLoader",
)
PEER_PACKAGES = ("torchdata", "grain", "spdl", "webdataset")


@dataclass(frozen=True)
class Job:
    """One measurement, done in one fresh process.

    Args:
        probe: the name of a function in `child.PROBES`.
        workload: a key of `workloads.WORKLOADS`.
        loader: the loader measured; for the probe "inline" several, joined by commas.
        start: start method of the workers; empty for torch's default.
        seconds: least time measured for each way to consume.
        full: check the content of the whole warm-up epoch, not only the places of its samples.
        store: URL of the store that it reads from, for the probe "inputs".
        folder: the input's files, for the probe "inputs".
        step: seconds of a training step, for the probe "inputs"; 0 is as long as the loader takes for a batch.
        tree: the checkout whose `asyncloader` is measured, its path resolved; empty for this checkout.
    """

    probe: str
    workload: str = ""
    loader: str = ""
    start: str = ""
    seconds: float = 1.0
    full: bool = False
    store: str = ""
    folder: str = ""
    step: float = 0.0
    tree: str = ""

    def to_json(self) -> str:
        """The command-line argument that `child.py` reads."""
        return json.dumps(self.__dict__)


@dataclass(frozen=True)
class Metric:
    """One line of the table.

    Args:
        row: the name that `--rows` selects it by; several metrics may share one.
        key: unique name.
        title: its name in the table.
        unit: of the median shown.
        more_is_better: which way the floor points.
        scale: from the measured number to the unit.
    """

    row: str
    key: str
    title: str
    unit: str
    more_is_better: bool = True
    scale: float = 1.0


@dataclass(frozen=True)
class Floor:
    """`loader` against `baseline` in a metric: at least `bound` where more is better, else at most.

    Without a bound the ratio is shown for information.
    """

    metric: str
    loader: str
    bound: float | None
    baseline: str = TORCH


@dataclass(frozen=True)
class Limit:
    """The most that a metric of ours may be, in its unit, where there is nothing of torch's to compare with."""

    metric: str
    bound: float


METRICS = (
    Metric("large", "large/touch", "64 x float32 3x224x224 (38.5 MB), one element touched", "batches/s"),
    Metric("large", "large/sum", "the same, consumer sums the whole batch", "batches/s"),
    Metric("small", "small/touch", "32 samples, dict of 2 small arrays and an int", "batches/s"),
    Metric("ints", "ints/touch", "256 trivial ints", "batches/s"),
    Metric("photos", "photos/touch", "32 JPEGs of 3x224x224, decoded by Pillow", "batches/s"),
    Metric("inline", "inline/large/touch", "no workers: 64 x float32 3x224x224, touched", "batches/s"),
    Metric("inline", "inline/large/sum", "no workers: the same, summed", "batches/s"),
    Metric("inline", "inline/small/touch", "no workers: 32 samples, dict", "batches/s"),
    Metric("inline", "inline/ints/touch", "no workers: 256 ints", "batches/s"),
    Metric("first", "first/fork", "time to first batch, fork", "ms", False, 1e3),
    Metric("first", "first/spawn", "time to first batch, spawn", "ms", False, 1e3),
    Metric("first", "first/forkserver", "time to first batch, forkserver, its server warm", "ms", False, 1e3),
    Metric("second", "second", "second epoch's first batch, persistent workers", "ms", False, 1e3),
    Metric("memory", "memory/peak", "memory of the tree (PSS), large batches: peak", "MiB", False, 2**-20),
    Metric("memory", "memory/steady", "the same: median while batches flow", "MiB", False, 2**-20),
    Metric("memory", "memory/held", "the same, with batches on their way (not in PSS)", "MiB", False, 2**-20),
    Metric("cpu", "cpu/small", "main-process CPU seconds per 1000 small batches", "s", False, 1e3),
    Metric("shuffle", "shuffle/first", "first batch of 100 million shuffled samples", "ms", False, 1e3),
    Metric("shuffle", "shuffle/memory", "memory that it took", "MiB", False, 2**-20),
    Metric("line", "line", "one batch in 16 takes 20 times as long, 2 workers, in order", "batches/s"),
    Metric("seeded", "seeded/cost", "a sample in seeded mode, more than in torch mode", "µs", False, 1e6),
    Metric("seeded", "seeded/state", "`state_dict()` with 4 workers", "µs", False, 1e6),
    Metric("seeded", "seeded/resume", "first batch after resuming at step 1,000,000, 4 workers", "ms", False, 1e3),
)
ROWS = tuple(dict.fromkeys(metric.row for metric in METRICS))
THROUGHPUT = {"large": ("large",), "small": ("small", "cpu"), "ints": ("ints",), "photos": ("photos",)}
"""The rows that each throughput job feeds."""
INLINE = ("large", "small", "ints")
"""The workloads that are measured without workers, too."""


def _floors() -> tuple[Floor, ...]:
    pairs: dict[str, tuple[float | None, float | None]] = {
        "large/touch": (5.0, 4.5),
        "large/sum": (3.0, 3.0),
        "small/touch": (10.0, 8.0),
        "ints/touch": (8.0, 6.0),
        "photos/touch": (0.95, 0.95),
        "inline/large/touch": (0.95, 0.95),
        "inline/large/sum": (0.95, 0.95),
        "inline/small/touch": (1.3, 1.3),
        "inline/ints/touch": (1.1, 1.1),
        "first/fork": (1.1, 1.1),
        "first/spawn": (1.0, 1.0),
        "first/forkserver": (0.3, 0.3),
        "second": (0.5, 0.5),
        "memory/peak": (1.0, 1.0),
        "memory/steady": (1.0, 1.0),
        "memory/held": (None, None),
        "cpu/small": (0.3, 0.3),
        "shuffle/first": (0.01, 0.01),
        "shuffle/memory": (0.01, 0.01),
        "line": (1.4, 1.4),
    }
    floors = [
        Floor(metric, loader, bound)
        for metric, bounds in pairs.items()
        for loader, bound in zip(OURS, bounds, strict=True)
    ]
    more = (
        *(Floor("small/touch", loader, 4.0, TORCH_FILE_SYSTEM) for loader in OURS),
        *(Floor("line", loader, None, TORCH_UNORDERED) for loader in OURS),
        *(Floor(metric, ASYNC_PLAIN, 0.75, ASYNC) for metric in ("small/touch", "ints/touch")),
    )
    return (*floors, *more)


FLOORS = _floors()
LIMITS = (
    Limit("seeded/cost", 10.0),
    Limit("seeded/state", 50.0),
    Limit("seeded/resume", 1000.0),
)


def jobs(rows: tuple[str, ...], seconds: float, peers: bool, full: bool) -> list[Job]:
    """The jobs of one round, those of one comparison next to each other.

    Args:
        rows: the rows wanted.
        seconds: least time measured in each throughput job and way to consume.
        peers: measure the peers too, where they apply.
        full: check the whole content in the throughput jobs.
    """
    planned: list[Job] = []
    for workload, feeds in THROUGHPUT.items():
        if set(feeds) & set(rows):
            extra = {"small": (ASYNC_PLAIN, TORCH_FILE_SYSTEM), "ints": (ASYNC_PLAIN,)}.get(workload, ())
            loaders = (TORCH, *OURS, *extra, *(PEERS if peers and workload != "photos" else ()))
            planned += [Job("throughput", workload, loader, seconds=seconds, full=full) for loader in loaders]
    if "inline" in rows:
        planned += [Job("inline", workload, ",".join((TORCH, *OURS))) for workload in INLINE]
    if "first" in rows:
        starts = ("fork", "spawn", "forkserver")
        planned += [Job("first_batch", "small", each, start) for start in starts for each in (TORCH, *OURS)]
    if "second" in rows:
        planned += [Job("second_epoch", "small", loader) for loader in (TORCH, *OURS)]
    if "shuffle" in rows:
        planned += [Job("shuffle", loader=loader) for loader in (TORCH, *OURS)]
    if "line" in rows:
        planned += [Job("line", loader=loader) for loader in (TORCH, TORCH_UNORDERED, *OURS)]
    if "seeded" in rows:
        planned += [Job(probe, loader=loader) for probe in ("cost", "state") for loader in OURS]
    if "memory" in rows:
        planned += [Job("memory", "large", loader, seconds=seconds) for loader in (TORCH, *OURS)]
    return planned
