"""prefetch_factor="auto", with a tuner that decides as planned: whatever the number of batches ahead does while an
epoch runs, the batches are those of a fixed number, and what the sampler draws depends on no timing.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, Sampler

from asyncloader import AsyncDataLoader, DataLoader, Recovery, RemoteIterableDataset, definition
from asyncloader.telemetry.tuner import Decision, Measured, PrefetchTuner
from tests.helpers.comparing import assert_same
from tests.helpers.running import KINDS, run_async
from tests.helpers.seeded_datasets import AllDraws, Rows
from tests.helpers.shards_of_formats import write
from tests.service.definitions import fields_of

SAMPLES = 300


class Planned(PrefetchTuner):
    """Goes through these numbers, one with each batch that is delivered; keeps the figures of the windows."""

    def __init__(self, *numbers: int) -> None:
        super().__init__(numbers[0])
        self.numbers = list(numbers[1:])
        self.windows: list[Measured] = []

    @property
    def window(self) -> tuple[float, int]:
        return 0.0, 0

    def observe(self, window: Measured) -> Decision | None:
        self.windows.append(window)
        if not self.numbers:
            return None
        self.value = self.numbers.pop(0)
        return Decision(self.value, kept=True, reason="it is planned")


class Counting(IterableDataset[Any]):
    """A stream of which each worker gives a part of another length, with random numbers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        for number in range(150 + 60 * info.id):
            yield torch.tensor([info.id, number, float(torch.rand(())), random.random()], dtype=torch.float64)


class DrawingSampler(Sampler[int]):
    """Draws each index when it is asked for it, from the generator that the consumer draws from, too."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield int(torch.randint(SAMPLES, ()))

    def __len__(self) -> int:
        return SAMPLES


def read(kind: str, loader: Any, epochs: int = 2) -> list[Any]:
    """The batches of the epochs, each with a number that the consumer draws."""
    if kind == "sync":
        with loader:
            return [[(batch, float(torch.rand(()))) for batch in loader] for _ in range(epochs)]

    async def run() -> list[Any]:
        async with loader:
            return [[(batch, float(torch.rand(()))) async for batch in loader] for _ in range(epochs)]

    return run_async(run(), kind)


def made(kind: str, dataset: Any, numbers: tuple[int, ...], **options: Any) -> Any:
    """A loader that goes through these numbers; a single one is fixed."""
    of = DataLoader if kind == "sync" else AsyncDataLoader
    if len(numbers) == 1:
        return of(dataset, prefetch_factor=numbers[0], **options)
    loader: Any = of(dataset, prefetch_factor="auto", **options)
    loader.prefetch_factor.tuner = Planned(*numbers)
    return loader


WAYS: dict[str, dict[str, Any]] = {
    "seeded": {"dataset": AllDraws(SAMPLES), "seed": 3, "shuffle": True},
    "torch": {"dataset": AllDraws(SAMPLES), "shuffle": True},
    "stream": {"dataset": Counting()},
    "seeded stream": {"dataset": Counting(), "seed": 3},
}


@pytest.mark.loops
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_a_fixed_number(kind: str, way: str, persistent: bool) -> None:
    """Up and down in both epochs, with every random number of workers and consumer."""
    options = {**WAYS[way], "batch_size": 4, "num_workers": 2, "persistent_workers": persistent}
    dataset = options.pop("dataset")

    def run(*numbers: int) -> Any:
        torch.manual_seed(7)
        return read(kind, made(kind, dataset, numbers, multiprocessing_context="fork", **options))

    assert_same(run(2, 32, 1, 8, 3, 32, 2, 5, 17), run(2))


@pytest.mark.parametrize("way", ["seeded", "seeded stream"])
def test_a_state_is_resumed_with_any_number(way: str) -> None:
    """Saved while the number changes, by a loader with another one."""
    recovery = Recovery(allow_replay=True)
    options = {**WAYS[way], "batch_size": 4, "num_workers": 2, "multiprocessing_context": "fork", "recovery": recovery}
    dataset = options.pop("dataset")
    with made("sync", dataset, (2, 32, 1, 8, 3, 32, 5), **options) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state, following = loader.state_dict(), list(batches)
    with made("sync", dataset, (1,), **options) as other:
        other.load_state_dict(state)
        assert_same(list(other), following)


@pytest.mark.parametrize("streams", [2, None])
def test_shards(streams: int | None, tmp_path: Path) -> None:
    """Streams that the main process plans, and those of which each worker is assigned its shards."""
    write(tmp_path, "tar")

    def run(*numbers: int) -> list[Any]:
        dataset = RemoteIterableDataset(f"{tmp_path}/", shuffle_buffer=5, streams=streams)
        options = {"batch_size": 1, "seed": 3, "decode": fields_of, "multiprocessing_context": "fork"}
        with made("sync", dataset, numbers, num_workers=2, **options) as loader:
            return [list(loader) for _ in range(2)]

    assert_same(run(2, 32, 1, 8, 3, 32, 2), run(2))


def test_what_a_sampler_draws_depends_on_no_timing() -> None:
    """The sampler and the consumer draw from one generator in torch mode: the order of their draws is always the same,
    however the number changes. (A fixed number has another order of its own.)
    """

    def run(*numbers: int) -> Any:
        torch.manual_seed(7)
        loader = made("sync", Rows(SAMPLES), numbers, batch_size=4, sampler=DrawingSampler(), num_workers=2)
        return read("sync", loader)

    assert_same(run(2, 32, 1, 8, 3), run(2, 2, 2, 17, 2, 32))


def test_the_number_is_in_effect(caplog: pytest.LogCaptureFixture) -> None:
    """The statistics have it; the decisions are logged with their reasons; the windows say what bounds the number."""
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 1, "multiprocessing_context": "fork"}
    with caplog.at_level(logging.INFO, "asyncloader"):
        loader = made("sync", Rows(SAMPLES), (2, 2, 11), **options)
        with loader:
            list(loader)
            assert loader.stats()["data/prefetch_depth"] == 11.0
            assert "prefetch_factor: goes to 11 batches ahead instead of 2: it is planned" in loader.explain()
    assert 'prefetch_factor="auto" goes to 11 batches ahead instead of 2: it is planned' in caplog.text
    window = loader.prefetch_factor.tuner.windows[-1]
    assert (window.most, window.limit) == (32, "the indices taken ahead")


@pytest.mark.parametrize(("room", "most"), [(1 << 20, 2), (1 << 40, 32)])
def test_memory_bounds_it(room: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine and the control group have left is divided by the size of batches."""
    monkeypatch.setattr("asyncloader.epoch.tuning.memory_limit", lambda: (room, "here"))
    loader = made("sync", Large(40), (2, 2), batch_size=1, num_workers=1, multiprocessing_context="fork")
    with loader:
        list(loader)
    window = min(loader.prefetch_factor.tuner.windows, key=lambda each: each.most)
    assert window.most == most
    assert most == 32 or window.limit == "1 MiB of free memory"


class Large(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(1 << 18)


@definition
def rows(length: int) -> Any:
    return Rows(length)


def test_where_it_is_refused() -> None:
    """Where the number is told once; torch's errors come first."""
    auto: Any = "auto"
    with pytest.raises(ValueError, match="a service's nodes are told the number"):
        DataLoader[Any](rows(8), prefetch_factor=auto, num_workers=1, seed=1, workers="tcp://127.0.0.1:1")
    with pytest.raises(ValueError, match="page-locked at the first one"):
        DataLoader[Any](Rows(8), prefetch_factor=auto, num_workers=1, device="cpu")
    with pytest.raises(ValueError, match="prefetch_factor option could only be specified in multiprocessing"):
        DataLoader[Any](Rows(8), prefetch_factor=auto)


def test_a_number_that_is_left_to_the_loader_later() -> None:
    """It may be set until an iterator is made; each loader has a choice of its own."""
    for of in (DataLoader, AsyncDataLoader):
        loader: Any = of(Rows(8), num_workers=1)
        loader.prefetch_factor = "auto"
        chosen = loader.prefetch_factor
        assert chosen == "auto"
        assert int(chosen) == 2
        assert loader.clone().prefetch_factor is not chosen
        assert loader.clone(num_workers=0).prefetch_factor is None
        loader = of(Rows(8), num_workers=1, device="cpu")
        with pytest.raises(ValueError, match="page-locked"):
            loader.prefetch_factor = "auto"


def test_all_settings_at_once() -> None:
    """They take turns, and the batches stay the same."""
    with DataLoader[Any](
        AllDraws(SAMPLES), batch_size=4, num_workers="auto", prefetch_factor="auto", seed=3, shuffle=True
    ) as loader:
        found = [list(loader) for _ in range(2)]
    with DataLoader[Any](AllDraws(SAMPLES), batch_size=4, seed=3, shuffle=True) as loader:
        assert_same(found, [list(loader) for _ in range(2)])
