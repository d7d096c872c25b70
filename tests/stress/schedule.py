"""A case of the chaos runner: plain data, so that a failing case can be read and run again. Pure.

A case has the loader, the dataset, the consumer's behaviour, and the faults with their places. `draw.py` makes
it from a seed; `workloads.py` makes objects from it; `checks.py` computes the expected epochs.
"""

from __future__ import annotations

import signal
from dataclasses import asdict, dataclass, fields
from typing import Any

SLOT_BYTES = 64 * 1024
"""A slot's first size; batches are up to three times as large."""

STRIDE = 1_000_000
"""A stream's sample number `p` of worker `w` has the index ``w * STRIDE + p``."""

START = -1
"""In place of a sample: the start-up of a worker (its `worker_init_fn`)."""

KILLING = ("kill", "exit", "grandchild", "stop", "hang", "hang in C", "hang in a thread")
"""Faults by which a worker ends itself, or is ended because it has stopped."""


OUTSIDE = (int(signal.SIGKILL), int(signal.SIGTERM))
"""Signals that are not blamed on a task."""


@dataclass(frozen=True)
class Fault:
    """One misfortune.

    Args:
        kind: in a worker "kill" (by signal `number`), "exit" (with code `number`), "grandchild" (killed, but outlived
            by a process of its own that holds all that it had open), "stop", "hang", "hang in C", "hang in a thread"
            (for some seconds), "raise" (error number `number`), "starve" (segments of `number` bytes at most from here
            on; -1: no more address space); in the main process "kill worker", "kill all workers", "stop worker",
            "descriptors", "disk", "fork", "cancel" (in the way `number`).
        at: in a worker: the sample's place in the epoch's order, or in the worker's own stream; `START`: when it
            begins. In the main process: after so many batches of the epoch; -1: before it begins.
        epoch: 0 or 1.
        worker: of which worker's stream; in the main process: which of the workers.
        strikes: how often it strikes, for faults in a worker; 0 for every time.
        number: see `kind`.
    """

    kind: str
    at: int
    epoch: int = 0
    worker: int = 0
    strikes: int = 1
    number: int = 0

    @property
    def blamed(self) -> bool:
        """Whether the fault is blamed on the task that it strikes."""
        return self.kind != "grandchild" and (self.kind != "kill" or self.number not in OUTSIDE)

    def __str__(self) -> str:
        what = signal.Signals(self.number).name if self.kind == "kill" else self.kind
        often = "" if self.strikes == 1 else " always" if not self.strikes else f" x{self.strikes}"
        return f"{what}{often}@{self.epoch}:{self.at}"


@dataclass(frozen=True)
class Case:
    """One run of one loader. Fields named as the loaders' options are handed on as they are."""

    seed: int
    scenario: str
    workload: str  # "map", "async", "stream", "async stream", "stateful"
    loader: str  # "sync", "asyncio", "uvloop"
    method: str = "fork"  # "fork", "forkserver", "spawn", "threads"
    goes_on: str = ""  # the method of the loader that resumes; empty: the same
    goes_on_with: int = 0  # its number of workers; 0: the same
    workers: int = 2
    length: int = 40  # samples of a map dataset
    shares: tuple[int, ...] = ()  # samples of each worker's stream
    batch_size: int = 2
    prefetch: int = 2
    shuffle: bool = False
    collate: str = "default"  # "default", "cat", "objects"
    sizes: str = "even"  # "even", "mixed", "growing"
    sample_bytes: int = 100  # the largest sample
    ring_bytes: int | None = None
    seeded: bool = True
    own_draws: bool = False  # samples draw from generators of their own, not from the global ones
    in_order: bool = True
    persistent: bool = False
    epochs: int = 1
    consumer: str = "fast"  # "fast", "slow", "hoarding"
    lag: int = 0  # one sample in `lag` takes a few milliseconds; 0: none
    reorder_window: int = 4
    snapshot_every: int = 1
    allow_replay: bool = False
    on_error: str = "raise"  # "raise", "skip", "refill", "callable"
    max_skipped_samples: int | None = 1000
    worker_timeout: float | None = None
    timeout: float = 0.0
    max_worker_restarts: int | None = None
    worker_memory_limit: int | None = None
    ballast: int = 0  # bytes by which a worker grows with every sample
    leave: str = "exhaust"  # "exhaust", "die", "break", "close", "close elsewhere", "interrupt", "resume"
    leave_after: int = 0  # batches, in the last epoch
    faults: tuple[Fault, ...] = ()

    @property
    def streams(self) -> bool:
        """Whether the dataset is iterated."""
        return self.workload in ("stream", "async stream", "stateful")

    @property
    def stateless(self) -> bool:
        """Whether the dataset is a stream that can only be resumed by reading it again."""
        return self.workload in ("stream", "async stream")

    @property
    def in_flight(self) -> int:
        """Tasks that may be under way at a time, at most."""
        return self.workers * self.prefetch + (self.reorder_window if self.seeded and not self.streams else 0)

    def batches_of(self, samples: int) -> int:
        """The number of batches for a number of samples."""
        return -(-samples // self.batch_size)

    @property
    def batches(self) -> int:
        """Batches of an undisturbed epoch."""
        return sum(map(self.batches_of, self.shares)) if self.streams else self.batches_of(self.length)

    def having(self, *kinds: str) -> list[Fault]:
        """The faults of these kinds."""
        return [fault for fault in self.faults if fault.kind in kinds]

    def __str__(self) -> str:
        mode = "seeded" if self.seeded else "torch mode"
        faults = ", ".join(map(str, self.faults)) or "no fault"
        size = f"{self.workers}x{self.prefetch} {self.batches} batches"
        return f"{self.scenario}: {self.workload} {self.loader} {self.method} {mode} {size}, {self.leave}; {faults}"

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from the defaults, as JSON can hold them."""
        values = asdict(self)
        defaults = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in values.items() if value != defaults[name]}


def interleaved(case: Case) -> list[list[int]]:
    """The batches of a stream's epoch in the order of torch: the workers in turn, those left out that have ended."""
    left = [
        [
            list(range(worker * STRIDE + begin, worker * STRIDE + min(share, begin + case.batch_size)))
            for begin in range(0, share, case.batch_size)
        ]
        for worker, share in enumerate(case.shares)
    ]
    found: list[list[int]] = []
    while any(left):
        found += [batches.pop(0) for batches in left if batches]
    return found
