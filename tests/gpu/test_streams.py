"""Copies run beside all other work, in the streams of the process, on the requested device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from asyncloader import DataLoader
from asyncloader.delivery.cuda import CudaAccelerator
from asyncloader.delivery.opener import Opener
from asyncloader.delivery.transfer import DeviceTransfer
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.ipc.ring import Ring
from tests.delivery.answers import deliver
from tests.gpu.card import NEEDS_CARD, settled
from tests.helpers.datasets import Numbers
from tests.helpers.running import ROOT

pytestmark = NEEDS_CARD

LARGE = 1 << 24  # bytes; CUDA buffers small copies from ordinary memory, and returns at once
A_WHILE = 2_000_000_000  # cycles: about a second


def wide(ring: Ring) -> torch.Tensor:
    """Return a batch in a locked slot."""
    batch: torch.Tensor = Opener(Statistics()).open(deliver(0, ring, torch.arange(LARGE // 8)).outcome)
    assert batch.is_pinned()
    return batch


@pytest.mark.parametrize(
    ("view", "waits"),
    [(lambda batch: batch, False), (lambda batch: batch[::2], False), (torch.clone, True)],
    ids=["dense", "with gaps", "pageable"],
)
def test_a_copy_returns_while_the_stream_still_works(view: Callable[[torch.Tensor], torch.Tensor], waits: bool) -> None:
    """Starting a copy waits for no earlier work of the stream. From ordinary memory it would."""
    accelerator = CudaAccelerator(torch.device("cuda"))
    assert accelerator.lock is not None
    ring = Ring(slots=4, slot_bytes=LARGE, credits=2)
    ring.close_fd()
    ring.lock_pages(accelerator.lock)
    source = view(wide(ring))
    transfer = DeviceTransfer(accelerator, None, static=False)
    transfer.take(transfer.start(source, locked=True))
    torch.cuda.synchronize()
    with accelerator.work():
        torch.cuda._sleep(A_WHILE)
        slept = accelerator.event()
    ready = transfer.start(source, locked=True)
    assert slept.raw.query() is waits
    assert torch.equal(transfer.take(ready).cpu(), source)


def test_loaders_leave_their_memory_to_the_next() -> None:
    """Eight loaders after the first reserve no more of the device's memory than the first."""

    def epoch() -> int:
        with DataLoader[torch.Tensor](Numbers(40, 1 << 18), num_workers=1, device="cuda") as loader:
            for batch in loader:
                batch.mul_(2)
        return torch.cuda.memory_reserved()

    settled()
    reserved = [epoch() for _ in range(9)]
    assert max(reserved[1:]) <= reserved[0] + (1 << 21)  # one more of the allocator's blocks, by chance


SCRIPT = """
import torch
from asyncloader import DataLoader
from torch.utils.data import TensorDataset

if __name__ == "__main__":
    torch.cuda.set_device(1)
    for options in ({"device": "cuda"}, {"device": "cuda", "device_transform": list}, {"pin_memory": True}):
        for workers in (0, 2):
            for batch in DataLoader(TensorDataset(torch.ones(8, 4)), num_workers=workers, **options):
                batch[0].sum().item()
    print([torch._C._cuda_hasPrimaryContext(index) for index in range(2)])
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_a_rank_opens_no_context_on_another_ranks_card() -> None:
    """Two cards in a process of its own: loaders open a context on the rank's card only."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[False, True]", done.stderr
