"""Whether each bit arrives: batches of random bits in random shapes, summed on the device and by their workers.

The consumer drops each batch at once, before the device has looked at it, so that slots and device memory are used
again as soon as anything allows it; now and then it holds its stream up by a long computation, and in every second
epoch it works in a stream of its own. A batch carries its number with its checksum: an intact batch in the place of
another batch is found as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

import asyncloader

from .gpu_card import Card
from .gpu_content import SoakBatches, WrongContent, checksum, flat_bytes, soak_shapes, weights
from .gpu_plan import COMPARED, SOAK_S, WRONG, GpuJob, Outcome
from .plan import FACADE

EPOCHS = 4
LOOK_EACH = 1000  # batches between two looks at the device's count
HOLD_UP_EACH = 64
HOLD_UP_SIDE = 2048


class Comparison:
    """Counts on the device the batches whose bits differ from what their worker saw.

    Args:
        card: the device.
    """

    def __init__(self, card: Card) -> None:
        self._card = card
        self._factors = weights(card.device)
        side = HOLD_UP_SIDE if card.cuda else 8
        self._matrix = torch.ones(side, side, device=card.device)
        self._wrong = torch.zeros((), dtype=torch.int64, device=card.device)
        self.batches = 0

    def add(self, number: int, batch: dict[str, Any]) -> None:
        """Compare batch `number`; the device does it when its stream gets there.

        Raises:
            WrongContent: it has other shapes, dtypes or another device than it should.
        """
        tensors, what = batch["tensors"], batch["what"]
        came = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
        wanted = [(each.dtype, each.shape) for each in soak_shapes(number)]
        if came != wanted or any(tensor.device != self._card.device for tensor in (*tensors, what)):
            raise WrongContent(f"batch {number}: {came} on {what.device}, and {wanted} was to come")
        if number % HOLD_UP_EACH == 0:
            torch.mm(self._matrix, self._matrix)
        total = checksum(flat_bytes(tensors), self._factors)
        self._wrong += (what[0] != number) | (what[1] != total)
        self.batches += 1

    def wrong(self) -> int:
        """How many differ so far; waits for the device."""
        return int(self._wrong)


def soak(job: GpuJob) -> Outcome:
    """(e): the number of batches that differ, of those compared, and the seconds that it took."""
    card = Card(job.device)
    comparison = Comparison(card)
    dataset = SoakBatches(job.count // EPOCHS)
    began = time.perf_counter()
    with asyncloader.DataLoader(
        dataset,
        batch_size=None,
        num_workers=job.workers[0],
        persistent_workers=True,
        device=card.device,
        multiprocessing_context="fork",
    ) as loader:
        for epoch in range(EPOCHS):
            with card.side_stream()() if epoch % 2 else nullcontext():
                _compare(iter(loader), comparison, len(dataset))
    seconds = time.perf_counter() - began
    figures = {WRONG: comparison.wrong(), COMPARED: comparison.batches, SOAK_S: seconds}
    return Outcome({metric: {FACADE: float(value)} for metric, value in figures.items()}, [])


def _compare(batches: Iterator[Any], comparison: Comparison, count: int) -> None:
    for number in range(count):
        comparison.add(number, next(batches))
        if number % LOOK_EACH == LOOK_EACH - 1:
            comparison.wrong()  # limits how far the host is ahead of the device
    if next(batches, None) is not None:
        raise WrongContent(f"more than {count} batches came")
    comparison.wrong()
