"""The cost of feeding a training step: the same steps on a batch that stays on the device, and on a loader's batches.

The step is made so long that the loader can keep up: 1.5 times the loader's time for a batch when nothing else is done.
Times are the device's, from the end of a step to the end of the next: they include every delay of the device, and its
waiting for batches.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch

from .gpu_card import Card, Mark
from .gpu_content import POOL, ImageCheck, ReadyImages
from .gpu_end import WARM_UP_EACH, Window, read
from .gpu_loaders import open_loader
from .gpu_plan import BATCH_TIME, CACHED, FED, STEP_OVER_LOADER, GpuJob, Outcome
from .plan import FACADE

CLASSES = 1000
WIDTH = 64
PATCH = 8
MOST_BLOCKS = 512
STEPS_AHEAD = 2  # that the host may be ahead of the device
WARM_UP_STEPS = 10
CALIBRATION_S = 0.15


class Net(torch.nn.Module):
    """A small convolutional net over uint8 or float images, computed in 16 bits.

    Args:
        blocks: residual convolutions at 28 x 28; they make the step long.
        dtype: of its computations.
    """

    def __init__(self, blocks: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.patches = torch.nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.blocks = torch.nn.ModuleList(torch.nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(blocks))
        self.head = torch.nn.Linear(WIDTH, CLASSES)
        self.to(dtype=dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits: images of shape (n, 3, 224, 224) to (n, `CLASSES`)."""
        values = images.to(self.dtype, memory_format=torch.channels_last)
        values = self.patches(values / 255 if images.dtype is torch.uint8 else values)
        for block in self.blocks:
            values = values + torch.nn.functional.relu(block(values))
        return self.head(values.mean((2, 3)))  # type: ignore[no-any-return]


class Trainer:
    """One training step, repeated.

    Args:
        card: the device.
        blocks: of the net.
    """

    def __init__(self, card: Card, blocks: int) -> None:
        torch.manual_seed(0)
        self._card = card
        self._net = Net(blocks, torch.bfloat16).to(card.device)
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=1e-6)
        self._marks: list[Mark] = []

    def begin(self) -> None:
        """Steps are counted from here on."""
        self._card.synchronize()
        self._marks.clear()

    @property
    def enough(self) -> bool:
        """Whether enough steps were made for a measurement."""
        return len(self._marks) >= WARM_UP_STEPS + 3

    def step(self, batch: Any, check: ImageCheck) -> None:
        """Note the batch, forward, backward, update; wait until the device is at most `STEPS_AHEAD` steps behind."""
        check.note(batch)
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self._net(images).float(), labels % CLASSES)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._marks.append(self._card.mark())
        if len(self._marks) > STEPS_AHEAD:
            self._marks[-1 - STEPS_AHEAD].wait()

    def seconds_a_step(self) -> float:
        """The mean of the counted steps, without the first steps."""
        self._card.synchronize()
        return self._marks[-1].since(self._marks[WARM_UP_STEPS]) / (len(self._marks) - 1 - WARM_UP_STEPS)


class Bench:
    """The steps of one job.

    Args:
        job: the job.
    """

    def __init__(self, job: GpuJob) -> None:
        self._job = job
        self._card = Card(job.device)
        self._dataset = ReadyImages(getattr(torch, job.workload))
        self._pool = self._dataset.pool.to(self._card.device)
        labels = torch.arange(job.batch, device=self._card.device)
        self._cached = [self._pool[labels % POOL], labels]

    def _open(self, name: str) -> Any:
        return open_loader(name, self._dataset, self._job.batch, self._job.workers[0], self._card.device)

    def loader_time(self) -> float:
        """Seconds that our loader takes for a batch when nothing else is done."""
        check = ImageCheck(self._pool, self._job.batch)
        window = Window(self._card, check, self._job.workers[0], self._job.seconds)
        read(self._open(FACADE), window.take)
        check.settle()
        return 1 / window.batches_a_second

    def on_cached(self, trainer: Trainer, seconds: float) -> float:
        """Seconds per step on a single batch, over and over."""
        check = ImageCheck(self._pool, self._job.batch)  # costs the same as with a loader
        trainer.begin()
        began = time.perf_counter()
        while time.perf_counter() - began < seconds or not trainer.enough:
            trainer.step(self._cached, check)
        return trainer.seconds_a_step()

    def on_loader(self, trainer: Trainer, name: str) -> float:
        """Seconds per step on the batches of a loader, from where its buffers are in their steady state."""
        check = ImageCheck(self._pool, self._job.batch)
        taken, began = 0, 0.0

        def take(batch: Any) -> bool:
            nonlocal taken, began
            if taken == 0:
                check.compare(batch)
                taken = 1
                return False
            trainer.step(batch, check)
            taken += 1
            if not began and taken > WARM_UP_EACH * self._job.workers[0]:
                trainer.begin()
                began = time.perf_counter()
            return bool(began) and time.perf_counter() - began >= self._job.seconds and trainer.enough

        read(self._open(name), take)
        figure = trainer.seconds_a_step()
        check.settle()
        return figure

    def fitting(self, wanted: float) -> Trainer:
        """A trainer whose step takes at least `wanted` seconds, and not much longer."""
        blocks, times = 1, list[tuple[int, float]]()
        while True:
            trainer = Trainer(self._card, blocks)
            times.append((blocks, self.on_cached(trainer, CALIBRATION_S)))
            if times[-1][1] >= wanted or blocks >= MOST_BLOCKS:
                break
            blocks *= 2
        if len(times) < 2:
            return trainer
        (few, short), (many, long) = times[-2:]
        between = few + (wanted - short) * (many - few) / max(long - short, 1e-9)
        return Trainer(self._card, min(MOST_BLOCKS, max(few, math.ceil(between))))


def step(job: GpuJob) -> Outcome:
    """(c): seconds per step on a cached batch, before and after the loader's, and on each loader's."""
    bench = Bench(job)
    loader_time = bench.loader_time()
    trainer = bench.fitting(STEP_OVER_LOADER * loader_time)
    figures: dict[str, dict[str, float]] = {CACHED: {}, FED: {}, BATCH_TIME: {FACADE: loader_time}}
    for name in job.loader.split(";"):
        before = bench.on_cached(trainer, job.seconds / 2)
        figures[FED][name] = bench.on_loader(trainer, name)
        figures[CACHED][name] = statistics.mean((before, bench.on_cached(trainer, job.seconds / 2)))
    return Outcome(figures, [])
