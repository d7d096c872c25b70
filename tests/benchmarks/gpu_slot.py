"""Copies from a ring's slots through `DeviceStage`, against copies from pinned tensors; and the time of page-locking.

No worker takes part: this process fills a ring once, and gives the stage descriptors of its slots again and again, as
fast as a consumer that keeps nothing takes the batches.
"""

from __future__ import annotations

import os
import queue
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

import asyncloader
from asyncloader.delivery.accelerator import PlainAccelerator
from asyncloader.delivery.device_stage import DeviceStage
from asyncloader.delivery.opener import Opener
from asyncloader.delivery.stage import OnDevice
from asyncloader.delivery.transfer import DeviceTransfer
from asyncloader.events import Action, Deliver, Fail
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.ipc import wire
from asyncloader.workers.listener import Answer
from asyncloader.workers.memory.codec import Encoder, Template
from asyncloader.workers.memory.layout import PAGE, align
from asyncloader.workers.memory.ring import Ring, WorkerRing

from .gpu_card import Card
from .gpu_content import ReadyImages, WrongContent
from .gpu_plan import (
    BATCH,
    LOADER_LOCK,
    LOCK,
    PAGES,
    PINNED,
    SLOT_SIZES,
    STAGES,
    UNLOCK,
    GpuJob,
    Outcome,
    slot_metric,
)
from .plan import FACADE

SLOTS, CREDITS = 12, 6
TURNS = 4  # each way is measured so often, in turn
GB = 1e9


class FilledRing:
    """A ring whose slots hold batches of one uint8 tensor each, all different.

    Args:
        nbytes: of a batch, a multiple of 8.
    """

    def __init__(self, nbytes: int) -> None:
        generator = torch.Generator().manual_seed(nbytes)
        words = torch.randint(-(1 << 62), 1 << 62, (nbytes // 8 + SLOTS,), generator=generator)
        noise = words.view(torch.uint8)
        self.contents = [noise[8 * slot : 8 * slot + nbytes] for slot in range(SLOTS)]
        self.nbytes = nbytes
        self.ring = Ring(SLOTS, align(nbytes, PAGE), CREDITS)
        assert self.ring.fd is not None
        writer = WorkerRing(os.dup(self.ring.fd), SLOTS, self.ring.slot_bytes)
        self.ring.close_fd()
        for slot, content in enumerate(self.contents):
            start = writer.offset(slot, nbytes)
            torch.frombuffer(writer.memory, dtype=torch.uint8, count=nbytes, offset=start).copy_(content)
        self.template = Template(Encoder().encode(torch.empty(nbytes, dtype=torch.uint8)).template)
        self.sums = [int(word_sum(content)) for content in self.contents]

    def answer(self, seq: int) -> tuple[int, Action] | None:
        """A free slot and a worker's message about it; None if no slot is free."""
        slot = self.ring.take()
        if slot is None:
            return None
        result = wire.Result(0, seq, slot, self.nbytes, 0, 1, 0.0, same=True)
        return slot, Deliver(seq, 0, Answer(result, self.template, self.ring, None))


def word_sum(content: torch.Tensor) -> torch.Tensor:
    """The sum of uint8 content's words modulo 2**64: int64 of shape ()."""
    return content.view(torch.int64).sum()


class Feed:
    """A stage over a filled ring, with its feeder and consumer.

    Args:
        filled: the ring.
        card: where batches go.
        ahead: batches ahead of the consumer.
    """

    def __init__(self, filled: FilledRing, card: Card, ahead: int) -> None:
        self._filled = filled
        self._card = card
        accelerator = card.accelerator()
        # A plain copy from the CPU to the CPU is the slot itself: one is made, or nothing would be moved.
        transform = torch.Tensor.clone if isinstance(accelerator, PlainAccelerator) else None
        self.statistics = Statistics()
        self._ready: queue.SimpleQueue[Action] = queue.SimpleQueue()
        transfer = DeviceTransfer(accelerator, transform, static=False)
        self.locks = accelerator.lock is not None
        self._stage = DeviceStage(Opener(self.statistics), transfer, self.statistics, self._ready.put, ahead)
        self._slots: list[int] = []  # of the batches put and not taken
        self._seq = 0

    def close(self) -> None:
        """End the stage."""
        self._stage.close()

    def copies(self, seconds: float, checked: Callable[[int, torch.Tensor], None] | None = None) -> tuple[int, float]:
        """Let batches through for `seconds`; their number, and the time until the last batch had come.

        Args:
            seconds: how long.
            checked: called with each batch and the slot that it came from, while the clock runs.
        """
        self._card.synchronize()
        began = time.perf_counter()
        count = 0
        while len(self._slots) < CREDITS - 1:
            self._put()
        while time.perf_counter() - began < seconds or count < 2 * SLOTS:
            self._take(checked)
            self._put()
            count += 1
        while self._slots:
            self._take(checked)
            count += 1
        self._card.synchronize()
        return count, time.perf_counter() - began

    def _put(self) -> None:
        answer = self._filled.answer(self._seq)
        if answer is None:
            raise AssertionError(f"no slot is free: {self._filled.ring!r}")
        self._seq += 1
        self._slots.append(answer[0])
        self._stage.put(answer[1])

    def _take(self, checked: Callable[[int, torch.Tensor], None] | None) -> None:
        item = self._ready.get(timeout=60.0)
        if isinstance(item, Fail):
            raise item.error
        assert isinstance(item, Deliver)
        assert isinstance(item.outcome, OnDevice)
        batch = self._stage.take(item.outcome)
        slot = self._slots.pop(0)
        if checked is not None:
            checked(slot, batch)


@contextmanager
def feeding(filled: FilledRing, card: Card, ahead: int) -> Generator[Feed]:
    """A `Feed` that is closed at the end."""
    feed = Feed(filled, card, ahead)
    try:
        yield feed
    finally:
        feed.close()


def check(feed: Feed, filled: FilledRing) -> None:
    """Let some batches through and compare each with its slot's content.

    Raises:
        WrongContent: one differs.
    """
    seen: list[tuple[int, torch.Tensor]] = []
    feed.copies(0.0, lambda slot, batch: seen.append((slot, word_sum(batch))))
    wrong = [slot for slot, total in seen if int(total) != filled.sums[slot]]
    if wrong:
        raise WrongContent(f"{len(wrong)} of {len(seen)} batches differ from their slots, the first from {wrong[0]}")


class PinnedCopies:
    """The denominator of the ratio: a pinned tensor for each slot of the ring, copied to the device one by one."""

    def __init__(self, filled: FilledRing, card: Card) -> None:
        self._card = card
        self._sums = filled.sums
        pinned = torch.empty(SLOTS, filled.nbytes, dtype=torch.uint8, pin_memory=card.cuda)
        self._sources = list(pinned)
        for source, content in zip(self._sources, filled.contents, strict=True):
            source.copy_(content)
        self._targets = [torch.empty_like(content, device=card.device) for content in filled.contents[:4]]
        self._stream = card.side_stream()

    def copies(self, seconds: float) -> tuple[int, float]:
        """Give copies to the stream as fast as it takes them, a few ahead. See `Feed.copies`."""
        self._card.synchronize()
        began = time.perf_counter()
        count, marks = 0, list[Any]()
        with self._stream():
            while time.perf_counter() - began < seconds or count < 2 * SLOTS:
                target = self._targets[count % len(self._targets)]
                target.copy_(self._sources[count % SLOTS], non_blocking=True)
                marks.append(self._card.mark())
                count += 1
                if len(marks) > len(self._targets):
                    marks.pop(0).wait()
        self._card.synchronize()
        return count, time.perf_counter() - began

    def check(self) -> None:
        """Raises WrongContent: the last copies differ from their sources."""
        count, _ = self.copies(0.0)
        for number in range(count - len(self._targets), count):
            if int(word_sum(self._targets[number % len(self._targets)])) != self._sums[number % SLOTS]:
                raise WrongContent(f"pinned tensor {number % SLOTS} came with other content")


def slot(job: GpuJob) -> Outcome:
    """(a): bytes per second by metric and name, medians of turns of both ways."""
    card = Card(job.device)
    sizes = {str(job.size): job.size} if job.size else SLOT_SIZES
    rates = {slot_metric(name): _slot(nbytes // 8 * 8, job.seconds, card) for name, nbytes in sizes.items()}
    return Outcome(rates, [])


def _slot(nbytes: int, seconds: float, card: Card) -> dict[str, float]:
    filled = FilledRing(nbytes)
    pinned = PinnedCopies(filled, card)
    rates: dict[str, list[float]] = {name: [] for name in (PINNED, *STAGES)}

    def note(name: str, measured: tuple[int, float]) -> None:
        rates[name].append(measured[0] * nbytes / measured[1])

    for turn in range(TURNS):
        for name in rates if turn % 2 else reversed(rates):
            if name == PINNED:
                pinned.check()
                note(name, pinned.copies(seconds / TURNS))
                continue
            with feeding(filled, card, STAGES[name]) as feed:
                check(feed, filled)
                note(name, feed.copies(seconds / TURNS))
                check(feed, filled)
                if feed.locks and feed.statistics.staged_batches:
                    raise AssertionError(f"{feed.statistics.staged_batches} batches were not copied from the ring")
    return {name: statistics.median(each) for name, each in rates.items()}


def lock(job: GpuJob) -> Outcome:
    """(d): seconds per GB to allocate a ring's pages, to lock and to unlock them; for a loader's own rings, to allocate
    and lock them.

    Where the device cannot lock pages, nothing is measured.
    """
    card = Card(job.device)
    accelerator = card.accelerator()
    if accelerator.lock is None:
        return Outcome({}, [])
    figures: dict[str, float] = {}
    lock = accelerator.lock

    def timed(address: int, nbytes: int) -> Callable[[], None]:
        began = time.perf_counter()
        undo = lock(address, nbytes)
        figures[LOCK] = (time.perf_counter() - began) * GB / nbytes

        def unlock() -> None:
            again = time.perf_counter()
            undo()
            figures[UNLOCK] = (time.perf_counter() - again) * GB / nbytes

        return unlock

    ring = Ring(4, align(job.size or 1 << 28, PAGE), 2)
    began = time.perf_counter()
    ring.lock_pages(timed)
    figures[PAGES] = (time.perf_counter() - began) * GB / ring.nbytes - figures[LOCK]
    ring.close_fd()
    del ring
    figures[LOADER_LOCK] = _loader_lock(job, card)
    return Outcome({metric: {FACADE: value} for metric, value in figures.items()}, [])


def _loader_lock(job: GpuJob, card: Card) -> float:
    dataset = ReadyImages(getattr(torch, job.workload), BATCH * 16)
    options: dict[str, Any] = {"num_workers": job.workers[0], "multiprocessing_context": "fork"}
    with asyncloader.DataLoader(dataset, batch_size=BATCH, device=card.device, **options) as loader:
        for number, (_, labels) in enumerate(loader):
            if int(labels[0]) != number * BATCH:
                raise WrongContent(f"batch {number} begins with sample {int(labels[0])}")
        figures = loader.stats()
    return figures["device/page_lock_s"] * GB / figures["device/page_locked_bytes"]
