from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

import asyncloader
from asyncloader import Tuning
from tests.clients.frameworks.helping import Rows, RowStream, batches_given, draws, seed_all
from tests.helpers.comparing import assert_same

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning"),  # when it is imported
]

STOCK: Any = torch.utils.data.DataLoader
OURS: Any = asyncloader.DataLoader


@pytest.fixture(scope="module")
def ignite() -> Any:
    import_module("ignite.distributed")
    return import_module("ignite.engine")


def run(
    kind: Any, loader: Any, *, state: Any = None, stop_at: int | None = None, **options: Any
) -> tuple[Any, list[Any]]:
    """Run an engine of this class over a loader, from given seeds. Returns the engine, and the batches that it saw."""
    seen: list[Any] = []

    def step(engine: Any, batch: Any) -> None:
        seen.append(batch)
        if engine.state.iteration == stop_at:
            engine.terminate()

    engine = kind(step)
    if state is not None:
        engine.load_state_dict(state)
    seed_all()
    engine.run(loader, **options)
    return engine, seen


@pytest.mark.parametrize("kind", ["Engine", "DeterministicEngine"])
@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_engine_sees_torchs_batches(ignite: Any, kind: str, persistent: bool) -> None:
    """Three epochs give the batches and generator states of a run with torch's loader."""
    runs = []
    for make in (STOCK, OURS):
        loader = make(Rows(36), 8, shuffle=True, num_workers=2, persistent_workers=persistent)
        engine, seen = run(getattr(ignite, kind), loader, max_epochs=3)
        runs.append((seen, draws()))
        if persistent:
            engine.state.dataloader._iterator._shutdown_workers()  # collected with the engine, torch's take 10 s to end
    assert len(runs[1][0]) == 15
    assert_same(runs[1], runs[0])


def test_engine_on_a_stream(ignite: Any) -> None:
    """The stream has no length; the engine's epoch length is no multiple of the stream's number of batches."""
    runs = []
    for make in (STOCK, OURS):
        _, seen = run(ignite.Engine, make(RowStream(40), 8, num_workers=2), max_epochs=3, epoch_length=4)
        runs.append(seen)
    assert len(runs[1]) == 12
    assert_same(runs[1], runs[0])


def test_deterministic_engine_makes_the_loader_anew(ignite: Any) -> None:
    """It passes every public attribute to our constructor: our options survive, and nothing else is public."""
    dataset = Rows(36)
    loader = OURS(
        dataset, 8, num_workers=2, prefetch_factor=3, tuning=Tuning(ring_bytes=1 << 20), snapshot_every_n_steps=3
    )
    engine, seen = run(ignite.DeterministicEngine, loader, max_epochs=2)
    used = engine.state.dataloader
    assert used is not loader
    assert type(used) is OURS
    assert (used.dataset, used.tuning.ring_bytes, used.snapshot_every_n_steps, used.prefetch_factor) == (
        dataset,
        1 << 20,
        3,
        3,
    )
    assert type(used.batch_sampler).__name__ == "ReproducibleBatchSampler"
    assert batches_given(used) == len(seen) == 10


@pytest.mark.parametrize("iteration", [5, 7, 13])
def test_deterministic_engine_resumes(ignite: Any, iteration: int) -> None:
    """From a state within or at the end of an epoch it sees the batches that the uninterrupted run saw."""

    def loader() -> Any:
        return OURS(torch.arange(40), 8, shuffle=True, num_workers=2)

    _, whole = run(ignite.DeterministicEngine, loader(), max_epochs=3)
    engine, first = run(ignite.DeterministicEngine, loader(), max_epochs=3, stop_at=iteration)
    state = dict(engine.state_dict())
    assert state["iteration"] == iteration
    _, rest = run(ignite.DeterministicEngine, loader(), state=state, max_epochs=3)
    assert len(rest) == 15 - iteration
    assert_same(first + rest, whole)


def test_auto_dataloader_inside_install(ignite: Any) -> None:
    """`auto_dataloader` makes a loader by itself: inside `install` it makes ours."""
    auto = import_module("ignite.distributed").auto_dataloader
    with asyncloader.install() as installed:
        loader = auto(Rows(20), batch_size=8, num_workers=2)
    assert type(loader) is installed
    _, seen = run(ignite.Engine, loader, max_epochs=1)
    assert len(seen) == 3
    assert batches_given(loader) == 3
