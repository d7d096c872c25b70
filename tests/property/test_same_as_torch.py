"""Our loaders give the same batches as torch's, bit for bit, for random configurations.

100 configurations per run. For more, in about ten minutes:

    ASYNCLOADER_CONFIGURATIONS=2000 make test ARGS="--timeout=0 tests/property/test_same_as_torch.py"
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, example, given, settings

from asyncloader import AsyncDataLoader, DataLoader
from tests.drawn import scaled
from tests.helpers.comparing import assert_same
from tests.helpers.running import run_async
from tests.pairwise import quickly
from tests.property.configurations import COLLATES, DATASETS, LOOPS, ORDERS, Configuration, configurations

EXAMPLES = int(os.environ.get("ASYNCLOADER_CONFIGURATIONS") or scaled(100))

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@dataclass
class Outcome:
    """The outcome of a run."""

    refusal: str  # the constructor's error
    length: int | None
    epochs: list[list[Any]]
    states: dict[str, Any]  # the generators' states after the run


def run(kind: str, configuration: Configuration) -> Outcome:
    """Seed everything, make a loader ("torch" is torch's own) and run its epochs."""
    torch.manual_seed(configuration.seed)
    random.seed(configuration.seed)
    np.random.seed(configuration.seed % 2**32)
    generators = configuration.generators()
    arguments = configuration.arguments(generators)
    if kind == "torch" and configuration.method == "spawn":
        arguments["multiprocessing_context"] = "fork"  # the start method does not affect batches
    make: Any = {"torch": torch.utils.data.DataLoader, "sync": DataLoader}.get(kind, AsyncDataLoader)
    epochs: list[list[Any]] = []
    length: int | None = None
    refusal = ""
    try:
        loader = make(**arguments)
    except ValueError as error:
        refusal = str(error)
    else:
        length = _length(loader)
        if make is AsyncDataLoader:
            epochs = run_async(_async_epochs(loader, configuration), kind)
        else:
            epochs = _epochs(loader, configuration)
        if make is DataLoader:
            loader.close()
        del loader
    return Outcome(refusal, length, epochs, _states(generators))


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _epochs(loader: Any, configuration: Configuration) -> list[list[Any]]:
    epochs: list[list[Any]] = []
    for number, taken in enumerate(configuration.epochs):
        _set_epoch(loader, number)
        epochs.append([])
        batches = iter(loader)
        while taken is None or len(epochs[-1]) < taken:
            try:
                epochs[-1].append(next(batches))
            except StopIteration:
                break
            _train(configuration)
        del batches
    return epochs


async def _async_epochs(loader: Any, configuration: Configuration) -> list[list[Any]]:
    epochs: list[list[Any]] = []
    async with loader:
        for number, taken in enumerate(configuration.epochs):
            _set_epoch(loader, number)
            epochs.append([])
            batches = aiter(loader)
            while taken is None or len(epochs[-1]) < taken:
                try:
                    epochs[-1].append(await anext(batches))
                except StopAsyncIteration:
                    break
                _train(configuration)
            del batches
    return epochs


def _set_epoch(loader: Any, epoch: int) -> None:
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)


def _train(configuration: Configuration) -> None:
    if configuration.trains:
        torch.rand(3)
        random.random()
        np.random.rand()


def _states(generators: dict[str, torch.Generator]) -> dict[str, Any]:
    states: dict[str, Any] = {
        "global torch": torch.get_rng_state(),
        "global random": random.getstate(),
        "global numpy": np.random.get_state(legacy=False),
    }
    return states | {f"{name}'s": generator.get_state() for name, generator in generators.items()}


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for part in batch.values():
            yield from _tensors(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _tensors(part)


def compare(got: Outcome, expected: Outcome) -> None:
    """Fail at the first difference."""
    assert got.refusal == expected.refusal
    assert got.length == expected.length
    assert [len(e) for e in got.epochs] == [len(e) for e in expected.epochs], "number of batches"
    for number, (ours, theirs) in enumerate(zip(got.epochs, expected.epochs, strict=True)):
        assert_same(ours, theirs, f"epoch {number}")
        for a, b in zip(_tensors(ours), _tensors(theirs), strict=True):
            assert a.stride() == b.stride() or not b.is_contiguous()
    assert list(got.states) == list(expected.states)
    for name, state in expected.states.items():
        assert_same(got.states[name], state, f"the {name} generator's state")


@pytest.mark.timeout(max(600, 3 * EXAMPLES))
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(configurations())
@example(Configuration(order="lazy", count=30, num_workers=2, epochs=(2, None), trains=True))
@example(Configuration(num_workers=2, persistent=True, epochs=(1, None)))
@example(Configuration(dataset="shares", num_workers=3, persistent=True, epochs=(None, None), loop="uvloop"))
def test_batches_and_generators_are_torchs(configuration: Configuration) -> None:
    """With the same seeds both give the same number of batches, with the same content and order, and leave every
    generator in the same state.
    """
    event(f"start method {configuration.method}")  # for --hypothesis-show-statistics
    compare(run(configuration.loop, configuration), run("torch", configuration))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterator_that_was_never_asked(loop: str, persistent: bool) -> None:
    """In torch, an epoch that is left before its first batch counts: numbers were drawn, and tasks assigned. An
    async loader has not started its persistent workers by then, so that no task was assigned: it gives the batches
    of new workers.
    """
    configuration = Configuration(order="shuffle", num_workers=2, persistent=persistent, epochs=(0, None), loop=loop)
    expected = run("torch", replace(configuration, persistent=persistent and loop == "sync"))
    compare(run(loop, configuration), expected)


@pytest.mark.thorough
def test_a_spawned_worker_gives_torchs_batches() -> None:
    """The start method "spawn", which the property rarely draws, is tested here for each loader."""
    configuration = Configuration(
        order="shuffle", num_workers=1, persistent=True, epochs=(1, None), method="spawn", generator=True, init=True
    )
    expected = run("torch", configuration)
    for loop in LOOPS[:2]:
        compare(run(loop, replace(configuration, loop=loop)), expected)


DIFFERENCES: dict[str, dict[str, Any]] = {
    "another seed": {"seed": 1},
    "another number of workers": {"num_workers": 3},
    "another order": {"order": "replacement", "count": 10},
    "another batch size": {"batch_size": 3},
    "another collation": {"collate": "keep"},
    "an epoch more": {"epochs": (None, None)},
    "an epoch left earlier": {"epochs": (1, None)},
    "no generator": {"generator": False},
    "another consumer": {"trains": True},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", quickly(DIFFERENCES, "another order", "no generator"))
def test_the_comparison_bites(name: str) -> None:
    """The outcomes of two configurations that differ in any relevant value differ."""
    one = Configuration(order="shuffle", num_workers=2, generator=True, epochs=(2, None))
    other = replace(one, **DIFFERENCES[name])
    expected = run("torch", one)
    compare(run("torch", one), expected)
    with pytest.raises(AssertionError):
        compare(run("torch", other), expected)


DRAWN: list[Configuration] = []


@settings(max_examples=1500, deadline=None, derandomize=True, database=None)
@given(configurations())
def _draw(configuration: Configuration) -> None:
    DRAWN.append(configuration)


@pytest.mark.thorough
def test_every_dimension_is_drawn() -> None:
    """The property draws each dataset, order, collation, loop and number of workers, and epochs left early."""
    DRAWN.clear()
    _draw()
    assert {c.dataset for c in DRAWN} == set(DATASETS)
    assert {c.order for c in DRAWN} == set(ORDERS)
    assert {c.collate for c in DRAWN} == set(COLLATES)
    assert {c.loop for c in DRAWN} == set(LOOPS)
    assert {c.num_workers for c in DRAWN} == set(range(5))
    assert {c.prefetch_factor for c in DRAWN} == {None, 1, 2, 4}
    assert {c.batch_size for c in DRAWN} == {None, *range(1, 7)}
    assert {len(c.epochs) for c in DRAWN} == {1, 2, 3}
    assert {c.method for c in DRAWN} == {"fork", "spawn"}
    for flag in ("drop_last", "generator", "persistent", "in_order", "init", "trains"):
        assert {getattr(c, flag) for c in DRAWN} == {False, True}
    left_early = [c for c in DRAWN if c.persistent and set(c.epochs) != {None}]
    assert {c.dataset for c in left_early} >= {"rows", "batched"}
    assert len(left_early) > len(DRAWN) // 20
