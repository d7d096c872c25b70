"""One measurement on a card, in a fresh process: `python -m tests.benchmarks.gpu_child JOB OUTPUT`, both JSON.

Batches are summed on the device, and the sums compared with those of the samples: a batch in the place of another, or
read before it was copied whole, is found.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import AsyncIterable, Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import asyncloader

FACADE, ASYNC, TORCH = "DataLoader", "AsyncDataLoader", "torch"
LOADERS = (TORCH, FACADE, ASYNC)
POOL = 32  # images that differ
WARM_UP = 4  # batches of each worker: rings have grown, and are page-locked then
STEPS_AHEAD = 2  # that the host may be ahead of the device
STEP_OVER_LOADER = 1.5


class Images(Dataset[Any]):
    """Ready images of 3 x 224 x 224, and their numbers.

    Args:
        dtype: of the elements.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pool = torch.randint(0, 256, (POOL, 3, 224, 224), generator=generator, dtype=torch.uint8).to(dtype)

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.pool[index % POOL], index


class Reading:
    """Reads a loader for some seconds, and checks each batch.

    Args:
        job: the measurement.
        dataset: what is read.
    """

    def __init__(self, job: dict[str, Any], dataset: Images) -> None:
        self.device = torch.device(job["device"])
        self._job, self._sums = job, dataset.pool.sum((1, 2, 3), dtype=torch.float64)
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._dataset = dataset

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def read(self, name: str, take: Callable[[Any], bool]) -> None:
        """Read a loader until `take` says so, and compare what came."""
        options = {"batch_size": self._job["batch"], "num_workers": self._job["workers"]}

        def checked(batch: Any) -> bool:
            images, numbers = batch
            self._seen.append((images.sum((1, 2, 3), dtype=torch.float64), numbers))
            return take(batch)

        if name == ASYNC:
            import uvloop

            uvloop.run(_read(asyncloader.AsyncDataLoader(self._dataset, device=self.device, **options), checked))
        elif name == FACADE:
            with asyncloader.DataLoader(self._dataset, device=self.device, **options) as loader:
                any(map(checked, loader))
        else:
            pinned = self.device.type == "cuda"
            theirs = torch.utils.data.DataLoader(self._dataset, pin_memory=pinned, **options)
            any(checked([each.to(self.device, non_blocking=True) for each in batch]) for batch in theirs)
        for position, (sums, numbers) in enumerate(self._seen):
            first = position * self._job["batch"]
            expected = torch.arange(first, first + self._job["batch"])
            if not numbers.cpu().equal(expected) or not sums.cpu().equal(self._sums[expected % POOL]):
                raise AssertionError(f"{name}: batch {position} has other content")
        self._seen.clear()


async def _read(loader: AsyncIterable[Any], take: Callable[[Any], bool]) -> None:
    async with loader as batches:  # type: ignore[attr-defined]
        async for batch in batches:
            if take(batch):
                break


def rate(job: dict[str, Any]) -> dict[str, float]:
    """Images a second, and CPU seconds of this process for a batch, between warm-up and end."""
    reading = Reading(job, Images(getattr(torch, job["dtype"])))
    return _rate(job, reading, job["loader"])


def _rate(job: dict[str, Any], reading: Reading, name: str) -> dict[str, float]:
    count, found = 0, dict[str, float]()
    began = cpu = 0.0
    warm = WARM_UP * job["workers"]

    def take(_: Any) -> bool:
        nonlocal count, began, cpu
        count += 1
        # Both ends lie at a multiple of the workers, which deliver in bursts of one each.
        if count % job["workers"] or count < warm:
            return False
        if count == warm or time.perf_counter() - began >= job["seconds"]:
            reading.synchronize()
            if count > warm:
                batches = count - warm
                found["rate"] = batches * job["batch"] / (time.perf_counter() - began)
                found["cpu"] = (time.process_time() - cpu) / batches
                return True
            began, cpu = time.perf_counter(), time.process_time()
        return False

    reading.read(name, take)
    return found


class Net(torch.nn.Module):
    """A small convolutional net over images, computed in 16 bits; `blocks` make its step long."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 64, 8, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.Conv2d(64, 64, 3, padding=1) for _ in range(blocks))
        self.head = torch.nn.Linear(64, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of shape (n, 1000)."""
        values = self.patches(images.to(torch.bfloat16) / 255)
        for block in self.blocks:
            values = values + torch.nn.functional.relu(block(values))
        return self.head(values.mean((2, 3)))  # type: ignore[no-any-return]


class Trainer:
    """One training step, repeated, with the host at most `STEPS_AHEAD` steps before the device."""

    def __init__(self, reading: Reading, blocks: int) -> None:
        self._reading = reading
        self._net = Net(blocks).to(reading.device, torch.bfloat16)
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=1e-6)
        self._events: list[torch.cuda.Event] = []

    def step(self, batch: Any) -> None:
        """Forward, backward, update."""
        images, numbers = batch
        torch.nn.functional.cross_entropy(self._net(images).float(), numbers % 1000).backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._reading.device.type == "cuda":
            self._events.append(torch.cuda.Event())
            self._events[-1].record()
            if len(self._events) > STEPS_AHEAD:
                self._events.pop(0).synchronize()

    def timed(self, seconds: float, batches: Callable[[Callable[[Any], bool]], None], warm: int) -> float:
        """Seconds a step over these batches, from the end of the warm-up on."""
        count, began, took = 0, 0.0, 0.0

        def take(batch: Any) -> bool:
            nonlocal count, began, took
            self.step(batch)
            count += 1
            if count == warm:
                self._reading.synchronize()
                began = time.perf_counter()
            if count > warm and time.perf_counter() - began >= seconds:
                self._reading.synchronize()
                took = (time.perf_counter() - began) / (count - warm)
                return True
            return False

        batches(take)
        return took


def step(job: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """By loader: seconds of a step that it feeds, and of the same step on a cached batch, before and after."""
    dataset = Images(getattr(torch, job["dtype"]))
    reading = Reading(job, dataset)
    numbers = torch.arange(job["batch"], device=reading.device)
    cached = [dataset.pool.to(reading.device)[numbers % POOL], numbers]

    def over_and_over(take: Callable[[Any], bool]) -> None:
        while not take(cached):
            pass

    wanted = STEP_OVER_LOADER * job["batch"] / _rate(job, reading, FACADE)["rate"]
    short, long = (Trainer(reading, blocks).timed(0.15, over_and_over, 3) for blocks in (1, 9))
    blocks = min(512, 1 + max(0, math.ceil(8 * (wanted - short) / max(long - short, 1e-9))))
    trainer, found = Trainer(reading, blocks), dict[str, tuple[float, float]]()
    warm = WARM_UP * job["workers"]
    for name in LOADERS:
        before = trainer.timed(job["seconds"] / 2, over_and_over, 3)
        fed = trainer.timed(job["seconds"], lambda take, name=name: reading.read(name, take), warm)  # type: ignore[misc]
        found[name] = fed, (before + trainer.timed(job["seconds"] / 2, over_and_over, 3)) / 2
    return found


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps({"rate": rate, "step": step}[given["what"]](given)))
