"""The program of the fresh process of a measurement: `python -m tests.benchmarks.child JOB OUTPUT`.

JOB is the JSON of a `Job`; the result goes to the file OUTPUT as JSON. The module imports little at the
top: a worker started by spawn or by a fork server imports it again.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .plan import ASYNC_PLAIN, OURS, Job

if TYPE_CHECKING:
    from .loaders import Pass
    from .workloads import Workload

SHORT_EPOCH = 8  # batches; for rows about the start of an epoch
INLINE_TURNS = 4  # epochs of each loader in one process without workers


def throughput(job: Job) -> dict[str, Any]:
    """Batches per second and main-process CPU seconds per batch, after a warm-up epoch that is checked."""
    from .workloads import WORKLOADS, Checksum

    workload = WORKLOADS[job.workload]
    checksum = Checksum()
    measured: dict[str, list[Pass]] = {}

    def check(batch: Any) -> list[int]:
        if job.full:
            checksum.add(batch)
        return workload.positions(batch)

    _run(job, workload.batches, _timed_epochs(job, workload, check, measured))
    return {
        "checksum": str(checksum) if job.full else "",
        "rate": {name: _median(epoch.rate for epoch in epochs) for name, epochs in measured.items()},
        "cpu": {
            name: sum(epoch.cpu for epoch in epochs) / sum(len(epoch.results) for epoch in epochs)
            for name, epochs in measured.items()
        },
    }


def _timed_epochs(
    job: Job, workload: Workload, check: Callable[[Any], list[int]], measured: dict[str, list[Pass]]
) -> Iterator[Pass]:
    """A checked warm-up epoch, then for each way to consume at least two epochs, until the time is over."""
    from .loaders import Pass

    warm_up = Pass(check)
    yield warm_up
    positions = check_positions(workload, warm_up.results, workload.batches, job.loader)
    for name, consumer in workload.consumers.items():
        epochs = measured.setdefault(name, [])
        while len(epochs) < 2 or sum(epoch.ended - epoch.started for epoch in epochs) < job.seconds:
            epoch = Pass(consumer.consume)
            yield epoch
            consumer.check(epoch.results, positions)
            epochs.append(epoch)


def check_positions(workload: Workload, arrived: list[list[int]], batches: int, loader: str) -> list[list[int]]:
    """The positions of the samples of each batch, if every sample came once and in its place.

    Raises:
        ContentError: one is missing, came twice or is elsewhere.
    """
    from .workloads import ContentError

    wanted = list(range(workload.samples(batches)))
    flat = [position for batch in arrived for position in batch]
    if flat != wanted:
        came = f"{len(set(flat))} of {len(wanted)} samples came, {len(flat)} in all"
        raise ContentError(f"{loader}: {came}, {'in' if flat == sorted(flat) else 'out of'} order")
    if any(len(batch) != workload.batch_size for batch in arrived):
        raise ContentError(f"{loader}: a batch of another size than {workload.batch_size}")
    return arrived


def inline(job: Job) -> dict[str, Any]:
    """Batches per second without workers, of several loaders in turn in this process."""
    from .loaders import Pass, build, drive
    from .workloads import WORKLOADS

    workload = WORKLOADS[job.workload]
    batches = workload.inline_batches
    names = job.loader.split(",")
    rates = {name: {way: list[float]() for way in workload.consumers} for name in names}

    def schedule(name: str, warm: bool) -> Iterator[Pass]:
        first = Pass(workload.positions)
        yield first
        positions = check_positions(workload, first.results, batches, name)
        for way, consumer in workload.consumers.items():
            epoch = Pass(consumer.consume)
            yield epoch
            consumer.check(epoch.results, positions)
            if warm:
                rates[name][way].append(epoch.rate)

    for turn in range(INLINE_TURNS + 1):
        for name in names if turn % 2 else reversed(names):
            make = functools.partial(build, name, workload, batches, workers=0)
            drive(name, make, schedule(name, turn > 0))
    medians = {name: {way: _median(each) for way, each in ways.items()} for name, ways in rates.items()}
    return {"rate": medians}


def first_batch(job: Job) -> dict[str, Any]:
    """Seconds from before the loader is made until its first batch; a fork server runs already."""
    if job.start == "forkserver":
        _run(job, SHORT_EPOCH, _positions_only(job))
    epochs: list[Pass] = []
    built = _run(job, SHORT_EPOCH, _positions_only(job, epochs))
    return {"seconds": epochs[0].first - built}


def _positions_only(job: Job, epochs: list[Pass] | None = None) -> Iterator[Pass]:
    from .loaders import Pass
    from .workloads import WORKLOADS

    workload = WORKLOADS[job.workload]
    epoch = Pass(workload.positions)
    yield epoch
    check_positions(workload, epoch.results, SHORT_EPOCH, job.loader)
    if epochs is not None:
        epochs.append(epoch)


def second_epoch(job: Job) -> dict[str, Any]:
    """Seconds from `iter()` until the first batch, in the epochs after the first, workers persisting."""
    from .loaders import Pass
    from .workloads import WORKLOADS

    workload = WORKLOADS[job.workload]
    epochs: list[Pass] = []

    def schedule() -> Iterator[Pass]:
        for _ in range(41):
            epoch = Pass(workload.positions)
            yield epoch
            check_positions(workload, epoch.results, SHORT_EPOCH, job.loader)
            epochs.append(epoch)

    _run(job, SHORT_EPOCH, schedule())
    return {"seconds": _median(epoch.first - epoch.started for epoch in epochs[1:])}


def memory(job: Job) -> dict[str, Any]:
    """Run epochs for the sampler outside; gives the steady part, in seconds of the monotonic clock."""
    from .workloads import WORKLOADS

    workload = WORKLOADS[job.workload]
    measured: dict[str, list[Pass]] = {}
    _run(job, workload.batches, _timed_epochs(job, workload, workload.positions, measured))
    epochs = [epoch for each in measured.values() for epoch in each]
    shift = time.monotonic() - time.perf_counter()  # zero on Linux, where both read CLOCK_MONOTONIC
    return {"steady": [epochs[0].started + shift, epochs[-1].ended + shift]}


def reference(job: Job) -> dict[str, Any]:
    """The checksum that every loader must reach."""
    from .workloads import WORKLOADS, reference_checksum

    return {"checksum": reference_checksum(job.workload, WORKLOADS[job.workload].batches)}


def memcpy(job: Job) -> dict[str, Any]:
    """Bytes per second of `Tensor.copy_` between warm buffers of a large batch's size, in one thread."""
    import torch

    from .workloads import BATCH_BYTES

    torch.set_num_threads(1)
    source = torch.arange(BATCH_BYTES // 4, dtype=torch.float32)
    target = torch.zeros_like(source)
    times: list[float] = []
    while sum(times) < job.seconds:
        started = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - started)
    if not torch.equal(source, target):
        raise AssertionError("the copy differs from its source")
    return {"rate": BATCH_BYTES / _median(times)}


def peers(job: Job) -> dict[str, Any]:
    """Import every peer; an ImportError ends the run."""
    import importlib

    from .peers import PEER_MODULES

    return {"imported": [importlib.import_module(name).__name__ for name in PEER_MODULES]}


def _run(job: Job, batches: int, schedule: Iterator[Pass]) -> float:
    from .loaders import build, drive
    from .workloads import WORKLOADS

    workload = WORKLOADS[job.workload]
    return drive(job.loader, lambda: build(job.loader, workload, batches, start=job.start or None), schedule)


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _seeded(name: str) -> Callable[[Job], dict[str, Any]]:
    def probe(job: Job) -> dict[str, Any]:
        from . import seeded

        result: dict[str, Any] = getattr(seeded, name)(job)
        return result

    return probe


def inputs(job: Job) -> dict[str, Any]:
    """Samples per second of an input, without a training step and with one."""
    from .inputs_child import measure

    return measure(job)


PROBES: dict[str, Callable[[Job], dict[str, Any]]] = {
    probe.__name__: probe
    for probe in (
        throughput,
        inline,
        first_batch,
        second_epoch,
        memory,
        reference,
        memcpy,
        peers,
        inputs,
    )
} | {name: _seeded(name) for name in ("shuffle", "cost", "state", "line")}


def check_tree(found: str | None, tree: str) -> None:
    """Check that `import asyncloader` found the file of the checkout that the job names, or else of this checkout.

    Raises:
        ImportError: it lies in another tree.
    """
    wanted = Path(tree) if tree else Path(__file__).resolve().parents[2]
    if found is None or Path(found).resolve() != wanted / "asyncloader" / "__init__.py":
        raise ImportError(f"asyncloader was to come from {wanted}, and came from {found}")


def main() -> None:
    """Run the job named on the command line and write its result."""
    job = Job(**json.loads(sys.argv[1]))
    if job.loader:
        import torch

        # The consumer computes in one thread: with more, its pool would fight the workers for the cores.
        torch.set_num_threads(1)
    if job.loader in (*OURS, ASYNC_PLAIN):
        import asyncloader

        check_tree(asyncloader.__file__, job.tree)
        getattr(asyncloader, job.loader.partition(" ")[0])  # imported where torch is, before any clock starts
    result = PROBES[job.probe](job)
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
    if job.probe == "inputs":
        os._exit(0)  # in the middle of an epoch: hundreds of threads of a peer may wait for the store


if __name__ == "__main__":
    main()
