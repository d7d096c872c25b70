"""Rings and leases on real batches: keeping them, dropping them in any order, growing, bounded, never overwritten."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncloader import AsyncDataLoader, DataLoader, Tuning
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import Sized
from tests.helpers.running import BOTH, collect, run_async


def growing(n: int) -> list[int]:
    """Sizes that rise in steps and fall back, with a giant in the middle."""
    sizes = [1 << (4 + i % 18) for i in range(n)]
    sizes[n // 2] = 9 << 20
    return sizes


class Killed(Sized):
    """Sized, whose worker is killed once, at a sample in the middle."""

    def __init__(self, sizes: list[int], mark: Path) -> None:
        super().__init__(sizes)
        self.mark = mark

    def __getitem__(self, index: int) -> Any:
        if index == 37 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize("kept", [1, 9])
@pytest.mark.parametrize("kind", BOTH)
def test_a_consumer_that_keeps_batches_over_a_kill(kind: str, kept: int, tmp_path: Path) -> None:
    """Epochs that are abandoned or read to their end, and a worker that is killed amid them, give every batch, also to
    a consumer that keeps more of them than there are slots.
    """
    dataset = Killed([30_000] * 80, tmp_path / "killed")
    options: Any = {"num_workers": 2, "persistent_workers": True, "max_worker_restarts": 1, "seed": 3}
    ends, seen = (3, 80, 80), deque[Any](maxlen=kept)

    def check(position: int, batch: Any) -> None:
        seen.append((position, batch))
        for index, each in seen:
            assert bool((each == index % 251).all()), f"batch {index} was overwritten"

    counts: list[int] = []
    if kind == "sync":
        with DataLoader[Any](dataset, **options) as loader:
            for end in ends:
                position = 0
                for batch in itertools.islice(loader, end):
                    check(position, batch)
                    position += 1
                counts.append(position)
    else:

        async def run() -> None:
            async with AsyncDataLoader[Any](dataset, **options) as loader:
                for end in ends:
                    position = 0
                    async with contextlib.aclosing(aiter(loader)) as batches:
                        async for batch in batches:
                            check(position, batch)
                            position += 1
                            if position == end:
                                break
                    counts.append(position)

        run_async(run())
    assert counts == list(ends)
    assert dataset.mark.exists()


def test_any_kind_of_view_holds_the_slot() -> None:
    """A slice, a numpy view, a detached tensor, a storage or a memoryview keeps a batch's memory from being reused."""
    makers: list[Any] = [
        lambda t: t[0, 5:],
        lambda t: t.numpy(),
        lambda t: t.numpy()[0, ::3],
        lambda t: t.detach().view(-1),
        lambda t: t.untyped_storage(),
        lambda t: memoryview(t.numpy()),
        lambda t: t.unbind(0)[0],
        lambda t: np.asarray(t).T,
    ]
    kept: list[tuple[int, Any]] = []
    for position, batch in enumerate(DataLoader[Any](Sized([5000] * 200), num_workers=1)):
        if position < 16:
            kept.append((position, makers[position % len(makers)](batch)))
    for position, view in kept:
        values = torch.tensor(list(view)[:50] if isinstance(view, torch.UntypedStorage) else np.asarray(view).ravel())
        assert bool((values == position).all()), position


def test_hoarding_is_copied_and_counted() -> None:
    """A consumer that keeps all batches gets views while the ring can spare slots, then copies, which are counted."""
    loader = DataLoader[Any](Sized([40_000] * 100), num_workers=2)
    kept = list(loader)
    copies = loader.stats()["data/ring_copies"]
    assert 50 < copies < 100
    assert "copies: " in loader.explain()
    del kept


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("ring_bytes", [1, 4096 * 20, 3 << 20])
def test_a_bounded_ring_holds_up_no_batch(kind: str, ring_bytes: int) -> None:
    """With a bounded ring all batches are delivered, however much larger than a slot they are."""
    dataset = Sized(growing(40))
    got = collect(kind, dataset, num_workers=1, batch_size=1, tuning=Tuning(ring_bytes=ring_bytes))
    assert_same(got, collect("torch", dataset, batch_size=1))


def test_memory_goes_with_the_last_view() -> None:
    """While a batch lives its segment is mapped; afterwards no segment is (the leak check looks too)."""

    def segments() -> int:
        return sum("memfd:asyncloader" in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = segments()
    (batch, *_) = collect("sync", Sized([50_000] * 10), num_workers=1)
    gc.collect()
    assert segments() == before + 1
    assert int(batch.sum()) == 0
    del batch, _
    gc.collect()
    assert segments() == before
