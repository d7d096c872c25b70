"""The measurements on a card, and the bound of each figure. Pure data: nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .plan import ASYNC, FACADE, Job

PARTS = {
    "a": "from a slot to the device",
    "b": "end to end",
    "c": "what a training step pays",
    "d": "page-locking",
    "e": "bit-exactness",
}

MB = 1_000_000
IMAGE = 3 * 224 * 224
BATCH = 256
DTYPES = {"uint8": 1, "float32": 4}
"""Of the images: bytes of an element."""

SLOT_SIZES = {"4 MB": 4 * MB, "38 MB": BATCH * IMAGE, "154 MB": BATCH * IMAGE * 4}
"""Bytes of the batches of (a): a small one, and the images of (b)."""

PINNED = "copies from pinned tensors, side stream"
STAGE = "DeviceStage"
STAGE_DEEP = "DeviceStage, device_prefetch=4"
STAGES = {STAGE: 1, STAGE_DEEP: 4}
"""And their batches ahead."""

TORCH_TO = "torch, pin_memory, .to(non_blocking=True)"
TORCH_PREFETCHER = "torch, pin_memory, side-stream prefetcher"
TORCHES = (TORCH_TO, TORCH_PREFETCHER)
SPDL_ARENA = "spdl arena, transfer_tensor"
SPDL_DROP_IN = "spdl drop-in, transfer_tensor"
SPDLS = (SPDL_ARENA, SPDL_DROP_IN)
OURS = (FACADE, ASYNC)
LOADERS = (*TORCHES, *SPDLS, *OURS)

WORKERS = (2, 4, 8, 16)
STEP_LOADERS = (FACADE, ASYNC, TORCH_TO)
STEP_WORKERS = 8
"""Of (c): some cores are left to the step."""

STEP_OVER_LOADER = 1.5
"""Length of the step of (c) in the loader's time for a batch."""

SOAK, SOAK_QUICK = 100_000, 2_000

SLOT_RATIO = 0.95
"""Least share of a pinned tensor's bytes per second."""

END_RATIO = 1.0
"""The ratio to each other loader is more than this."""

STEP_RATIO = 1.02
"""Most of a step's time on a cached batch."""

LOCK_S = 0.15
"""Most seconds to page-lock a GB whose pages exist."""

JOB_LIMIT_S = 240.0
QUICK_JOB_LIMIT_S = 75.0
SOAK_LIMIT_S = 1800.0
QUICK_LIMIT_S = 320.0
"""With --quick nothing is begun after this time, so that it ends within six minutes."""


@dataclass(frozen=True)
class GpuJob(Job):
    """One measurement on a card, done in one fresh process.

    Args:
        probe: "slot", "end", "step", "lock" or "soak".
        workload: for "end" and "step" the images' dtype.
        loader: for "end" and "soak"; for "step" several, joined by semicolons.
        workers: worker processes; "end" measures with each of these numbers, one after the other.
        count: batches, for "soak".
        size: bytes of a batch, for "slot" and "lock"; 0 for the sizes that belong to them.
        batch: images in a batch.
        device: as torch takes it.
    """

    workers: tuple[int, ...] = (2,)
    count: int = 0
    size: int = 0
    batch: int = BATCH
    device: str = "cuda"


class Outcome(NamedTuple):
    """The results of a job.

    Args:
        figures: numbers by metric and name.
        failures: parts of it that failed, in words.
    """

    figures: dict[str, dict[str, float]]
    failures: list[str]


@dataclass(frozen=True)
class Run:
    """The parts and sizes that the command measures.

    Args:
        parts: letters of `PARTS`.
        quick: fewer configurations, shorter measurements.
        cores: of the machine; no more workers are started.
        loaders: of (b) and (c), those that can be had.
        soak: batches of (e).
    """

    parts: Sequence[str] = tuple(PARTS)
    quick: bool = False
    cores: int = 16
    loaders: Sequence[str] = LOADERS
    soak: int = SOAK

    @property
    def seconds(self) -> float:
        """Least length of one figure's measurement."""
        return 1.0 if self.quick else 3.0

    @property
    def step_workers(self) -> int:
        """For (c)."""
        return max(1, min(STEP_WORKERS, self.cores - 1))

    def worker_counts(self, dtype: str) -> tuple[int, ...]:
        """For (b). A quick run has the ends for uint8 and one in the middle for float32."""
        counts = tuple(count for count in WORKERS if count <= self.cores) or (1,)
        if not self.quick:
            return counts
        middle = counts[len(counts) // 2]
        return tuple(dict.fromkeys((counts[min(1, len(counts) - 1)], counts[-1]))) if dtype == "uint8" else (middle,)

    def limit_s(self, job: GpuJob) -> float:
        """The longest that a job may take."""
        if self.quick:
            return QUICK_JOB_LIMIT_S
        return SOAK_LIMIT_S if job.probe == "soak" else JOB_LIMIT_S

    def jobs(self, number: int) -> list[GpuJob]:
        """The jobs of one round; the soak, and in a quick run all but (a) and (b), belong to the first round alone."""
        planned: list[GpuJob] = []
        first = number == 0
        every = first or not self.quick
        if "a" in self.parts:
            planned.append(GpuJob("slot", seconds=self.seconds))
        if "d" in self.parts and every:
            planned.append(GpuJob("lock", "float32", workers=(min(2, self.cores),), seconds=self.seconds))
        if "e" in self.parts and first:
            workers = (max(1, min(STEP_WORKERS, self.cores)),)
            planned.append(GpuJob("soak", loader=FACADE, workers=workers, count=self.soak))
        if "c" in self.parts and every:
            loaders = ";".join(loader for loader in STEP_LOADERS if loader in self.loaders)
            if loaders:
                planned.append(GpuJob("step", "uint8", loaders, workers=(self.step_workers,), seconds=self.seconds))
        if "b" in self.parts:
            ends = [job for dtype in DTYPES for loader in self.loaders for job in self._ends(dtype, loader)]
            planned += ends if number % 2 == 0 else ends[::-1]
        return planned

    def _ends(self, dtype: str, loader: str) -> list[GpuJob]:
        counts = self.worker_counts(dtype)
        # SPDL takes long to stop: its process ends with each figure instead.
        groups = [(count,) for count in counts] if loader in SPDLS else [counts]
        return [GpuJob("end", dtype, loader, seconds=self.seconds, workers=group) for group in groups]


def slot_metric(size: str) -> str:
    """Key of (a): bytes per second."""
    return f"slot/{size}"


def end_metric(dtype: str, workers: int) -> str:
    """Key of (b): samples per second."""
    return f"end/{dtype}/{workers}"


def cpu_metric(dtype: str, workers: int) -> str:
    """Key of (b): CPU seconds of the main process for a batch."""
    return f"cpu/{dtype}/{workers}"


def staged_metric(dtype: str, workers: int) -> str:
    """Key of (b): the share of our batches that could not be copied straight from a ring."""
    return f"staged/{dtype}/{workers}"


CACHED, FED, BATCH_TIME = "step/cached", "step/fed", "step/batch"
"""Keys of (c): seconds per step; seconds per batch of our loader alone."""

LOCK, PAGES, UNLOCK, LOADER_LOCK = "lock/lock", "lock/pages", "lock/unlock", "lock/loader"
"""Keys of (d): seconds per GB, all under the name `FACADE`."""

WRONG, COMPARED, SOAK_S = "soak/wrong", "soak/batches", "soak/seconds"
"""Keys of (e)."""
