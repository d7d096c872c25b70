"""concurrency="auto", with a tuner that decides as planned: the limit reaches every reader of the dataset, and whatever
it does while an epoch runs, the batches are those of a fixed number.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncloader import AsyncDataLoader, DataLoader, definition
from asyncloader.telemetry.tuner import ConcurrencyTuner, Decision, Measured
from tests.helpers.comparing import assert_same
from tests.helpers.running import KINDS, run_async
from tests.helpers.seeded_datasets import AwaitedDraws, Rows

SAMPLES = 1600


class Planned(ConcurrencyTuner):
    """Goes through these numbers, one with each batch that is delivered."""

    def __init__(self, *numbers: int) -> None:
        super().__init__(numbers[0])
        self.numbers = list(numbers[1:])

    @property
    def window(self) -> tuple[float, int]:
        return 0.0, 0

    def observe(self, window: Measured) -> Decision | None:
        del window
        if not self.numbers:
            return None
        self.value = self.numbers.pop(0)
        return Decision(self.value, kept=True, reason="it is planned")


class InFlight(Rows):
    """Each sample is the number of samples that this copy has in flight. One kills its process, once, if asked to."""

    now = 0

    def __init__(self, length: int, mark: Path | None = None) -> None:
        super().__init__(length)
        self.mark = mark

    async def __getitem__(self, index: int) -> torch.Tensor:
        if self.mark is not None and index == SAMPLES // 2 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.now += 1
        found = self.now
        for _ in range(5):
            await asyncio.sleep(0)
        self.now -= 1
        return torch.tensor(found)


class Drawing(Rows):
    """Draws from the worker's generator before it waits, as torch mode allows."""

    async def __getitem__(self, index: int) -> torch.Tensor:
        drawn = torch.rand(())
        for _ in range(index % 4):
            await asyncio.sleep(0)
        return drawn


def read(kind: str, epochs: int, loader: Any) -> list[list[Any]]:
    """The batches of these epochs."""
    if kind == "sync":
        with loader:
            return [list(loader) for _ in range(epochs)]

    async def run() -> list[list[Any]]:
        async with loader:
            return [[batch async for batch in loader] for _ in range(epochs)]

    return run_async(run(), kind)


def made(kind: str, dataset: Any, numbers: tuple[int, ...], **options: Any) -> Any:
    """A loader that goes through these numbers; a single one is fixed."""
    of = DataLoader if kind == "sync" else AsyncDataLoader
    if len(numbers) == 1:
        return of(dataset, concurrency=numbers[0], **options)
    loader: Any = of(dataset, concurrency="auto", **options)
    loader.concurrency.tuner = Planned(*numbers)
    return loader


PLACES: dict[str, dict[str, Any]] = {
    "here": {},
    "forked": {"num_workers": 2, "multiprocessing_context": "fork"},
    "threads": {"num_workers": 2, "workers": "threads"},
}


@pytest.mark.loops
@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_a_fixed_number(kind: str, place: str, seed: int | None) -> None:
    """Up and down in both epochs, with every random number."""
    dataset: Any = AwaitedDraws(240) if seed is not None else Drawing(240)
    if place == "threads" and seed is None:
        dataset = Yielding(240)

    def run(*numbers: int) -> Any:
        torch.manual_seed(7)
        return read(kind, 2, made(kind, dataset, numbers, batch_size=4, seed=seed, shuffle=True, **PLACES[place]))

    assert_same(run(64, 1, 256, 3, 17, 2, 5, 200), run(64))


class Yielding(Rows):
    """Without random numbers: threads of one process share its generators."""

    async def __getitem__(self, index: int) -> torch.Tensor:
        await asyncio.sleep(0)
        return torch.tensor(index)


@definition
def rows(length: int) -> Any:
    return Yielding(length)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_the_limit_is_kept(kind: str, place: str, persistent: bool, tmp_path: Path) -> None:
    """From soon after the change on, by a replaced worker, and from the first sample of the next epoch on."""
    if place == "here" and persistent:
        pytest.skip("there are no workers")
    dies = place == "forked"
    options = {**PLACES[place], "persistent_workers": persistent, "max_worker_restarts": 3 * dies}
    dataset = InFlight(SAMPLES, tmp_path / "mark" if dies else None)
    loader = made(kind, dataset, (256, 256, 256, 3), batch_size=8, seed=1, **options)
    first, second = read(kind, 2, loader)
    numbers = [int(batch.max()) for batch in first]
    assert max(numbers) > 8
    assert max(numbers[-60:]) == 3
    assert max(int(batch.max()) for batch in second) == 3
    if dies:
        assert loader.stats()["data/worker_restarts"] == 1.0
    assert "concurrency: goes to 3 samples in flight instead of 256: it is planned" in loader.explain()


def test_where_it_is_refused() -> None:
    """Where samples are not awaited, or not here."""
    for dataset, options, text in [
        (Rows(8), {}, "a thread for each sample in flight"),
        (rows(8), {"workers": "tcp://127.0.0.1:1", "num_workers": 1, "seed": 1}, "the service's"),
    ]:
        with pytest.raises(ValueError, match=text):
            DataLoader[Any](dataset, concurrency="auto", **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a positive integer, 'auto' or None, but got concurrency='often'"):
        DataLoader[Any](Yielding(8), concurrency="often")  # type: ignore[arg-type]
