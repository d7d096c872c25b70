"""Holds the figures of a run that the diagnosis judges: counts, times of stages, options.

Data path: statistics -> [run_figures] -> candidates, diagnosis. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from asyncloader.telemetry.counters import Stage, StageTimes, stage_times, total
from asyncloader.telemetry.slow_samples import NO_SAMPLES, SlowFigures

MOST_WAITING_WORKERS = 64
"""Workers that may be tried, whatever the number of CPUs, where samples may wait. Memory may allow fewer processes."""

CONCURRENCY = 256
"""Samples that a copy of the dataset awaits at a time, unless the user says otherwise."""

BATCH_COST_S = 300e-6
"""Cost of a worker's batch in both processes, besides its samples."""

_COMPUTES = 0.6  # the share of computing from which samples cost that
_GIL_S = 1e-3  # a thread that holds the GIL is asked for it after 5 ms; a loop that need not wait is awake in 0.1 ms


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run's statistics, and the options that matter.

    Attributes:
        batches: delivered.
        epochs: begun.
        elapsed_s: seconds of iterating.
        wait_s: of those, waited by the consumer.
        startup_s: of those, before the first batch of epochs that started workers.
        main_cpu_s: CPU seconds of the consumer's process in that time, without those of worker threads.
        ring_copies: batches copied out of a ring.
        oversize: batches that did not fit into one.
        ring_needed: `ring_bytes` with which they would; 0: they do.
        retirements: workers that exceeded the memory limit.
        blocks: what each process timed, by the worker's number; -1: the main process.
        cpus: that may be used.
        cpu_limit: CPU seconds per second that are allowed, if it is less than `cpus`.
        others_cpu: CPUs that other programs used on average.
        workers: `num_workers`.
        persistent: `persistent_workers`.
        forks: whether workers are forked.
        in_threads: whether they are threads of the consumer's process, which share its GIL.
        prefetch_factor: None without workers.
        iterable: whether the dataset is a stream: then the number of workers is part of its order.
        one_by_one: whether each worker reads a stream's samples one after the other, whether or not they are awaited.
        streams: `loader_streams` of the dataset: then its order does not depend on the workers. None: not given.
        asynchronous: whether samples are awaited, `concurrency` of them at a time.
        threads: that fetch samples of a blocking dataset, in each worker; 0: its samples come one after the other.
        decode_threads: that decode beside an event loop, in each worker; 0: samples are decoded where they are read.
        concurrency: see there.
        automatic: options that are "auto", which the loader itself has tried.
        slow: the times of single samples.
        in_order: whether batches are delivered in order.
        memory_limit: `worker_memory_limit`.
        snapshot_every: `snapshot_every_n_steps`.
        keeps_states: whether the dataset has a state that must be saved after each batch, if at all.
    """

    batches: int
    epochs: int
    elapsed_s: float
    wait_s: float
    startup_s: float
    main_cpu_s: float
    ring_copies: int = 0
    oversize: int = 0
    ring_needed: int = 0
    retirements: int = 0
    blocks: Mapping[int, Sequence[float]]
    cpus: int
    cpu_limit: float | None = None
    others_cpu: float = 0.0
    workers: int
    persistent: bool = False
    forks: bool = True
    in_threads: bool = False
    prefetch_factor: int | None = None
    iterable: bool = False
    one_by_one: bool = False
    streams: int | None = None
    asynchronous: bool = False
    threads: int = 0
    decode_threads: int = 0
    concurrency: int = 1
    automatic: frozenset[str] = frozenset()
    slow: SlowFigures = NO_SAMPLES
    in_order: bool = True
    memory_limit: int | None = None
    snapshot_every: int = 1
    keeps_states: bool = False
    merged: Sequence[float] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "merged", [sum(each) for each in zip(*self.blocks.values(), strict=True)])

    def stage(self, stage: Stage) -> StageTimes:
        """The times of a stage in all processes."""
        return stage_times(self.merged, stage)

    def mean(self, *stages: Stage) -> float:
        """Seconds of these stages for a mean batch."""
        return sum(times.total / times.number for times in map(self.stage, stages) if times.number)

    def sum(self, key: str) -> float:
        """A sum of all processes."""
        return total(self.merged, key)

    @property
    def work_s(self) -> float:
        """Seconds that a worker, or this process without workers, takes for a batch if it never waits for a CPU."""
        stages: tuple[Stage, ...] = ("fetch", "collate", "write")
        work = self.mean(*stages) if self.asynchronous or self.threads else self.mean(*stages, "decode")
        delayed = self.sum("delayed_s")
        if not self.workers:
            return work * (1 - min(0.9, delayed / max(1e-9, self.sum("sampled_s"))))
        made = max(1, self.stage("write").number)
        return max(self.sum("cpu_s") / made, work - delayed / made)

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all processes for a batch."""
        of_workers = self.sum("cpu_s") / max(1, self.stage("write").number) if self.workers else 0.0
        return of_workers + self.main_cpu_s / max(1, self.batches)

    @property
    def saving(self) -> float:
        """The part of the time that went to saving states: of this process's time, or of the workers'."""
        of = {number: stage_times(block, "snapshot").total for number, block in self.blocks.items()}
        here = of.pop(-1, 0.0) / self.steady_s
        return min(1.0, max(here, sum(of.values()) / (max(1, self.workers) * self.steady_s)))

    @property
    def steady_s(self) -> float:
        """Seconds of iterating without starts."""
        return max(1e-9, self.elapsed_s - self.startup_s)

    @property
    def held_up(self) -> bool:
        """Whether this process's own code is in the way of the answers of workers."""
        transfer = self.mean("transfer")
        return transfer > 1e-3 and transfer > 0.3 * self.steady_s / max(1, self.batches)

    @property
    def gil_held(self) -> bool:
        """Whether the event loop had to wait for the GIL beside worker threads: their code, or the consumer's, held it.
        More threads would wait for it, too, and waiting for the GIL looks like waiting for a read.
        """
        return self.in_threads and self.mean("transfer") > _GIL_S

    @property
    def computing_share(self) -> float:
        """The part of the time of making batches that is computing."""
        delayed = self.sum("delayed_s")
        if not self.workers:
            sampled = self.sum("sampled_s")
            return min(1.0, self.sum("sampled_cpu_s") / (sampled - min(delayed, 0.9 * sampled))) if sampled else 1.0
        stages: tuple[Stage, ...] = ("fetch", "collate", "write", "decode", "first_read")
        work = sum(self.stage(stage).total for stage in stages)
        if self.asynchronous or self.threads:  # many at a time: compared with the time that the workers have
            work = self.workers * self.steady_s
        return min(1.0, self.sum("cpu_s") / max(1e-9, work - min(delayed, 0.9 * work)))

    @property
    def computes(self) -> bool:
        """Whether samples cost computing rather than waiting."""
        return self.computing_share > _COMPUTES

    @property
    def allowed_cpus(self) -> float:
        """CPU seconds per second that may be used."""
        return self.cpus if self.cpu_limit is None else min(self.cpus, self.cpu_limit)
