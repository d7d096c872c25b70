"""Random numbers of a sample: they depend on its seed, epoch and position, and on nothing else."""

from __future__ import annotations

import asyncio
import random
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.workers.fetch.seeding import (
    GlobalDrawCheck,
    SampleSeeder,
    derive,
    global_generators_kept,
    restore_rng_state,
    sample_rng,
    save_rng_state,
)
from asyncloader.workers.fetch.setup import seed_worker

seeds = st.integers(0, (1 << 64) - 1)
positions = st.integers(-1, 1 << 62)


def globals_drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def own_drawn() -> tuple[float, float, float]:
    rng = sample_rng()
    return rng.random.random(), float(rng.numpy.random()), float(torch.rand((), generator=rng.torch))


def global_states() -> tuple[Any, str, bytes]:
    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().numpy().tobytes()


def of_sample(seed: int, epoch: int, position: int, *words: int | str) -> tuple[Any, Any]:
    """The numbers that a sample draws, from the global generators and from its own."""
    SampleSeeder(seed, epoch, *words).sample(position)
    return globals_drawn(), own_drawn()


def of_batch(seed: int, epoch: int, position: int, *words: int | str) -> tuple[Any, Any]:
    SampleSeeder(seed, epoch, *words).batch(position)
    return globals_drawn(), own_drawn()


def of_collation(seed: int, epoch: int, position: int, *words: int | str) -> tuple[Any, Any]:
    SampleSeeder(seed, epoch, *words).collation(position)
    return globals_drawn(), own_drawn()


def test_keys_are_the_same_for_ever() -> None:
    """Numbers of this version, which every later version must give: resumed runs rely on them."""
    assert derive(0) == 17315541012529928264
    assert derive((1 << 64) - 1, "batch", 0, 5) == 3566095747140476029
    drawn = of_sample(7, 3, 11)
    assert drawn[0] == (0.7289661999803122, 0.04756743428245713, 0.06199544668197632)
    assert drawn[1] == (0.16709027621920192, 0.8098628199519082, 0.007571816444396973)


@settings(deadline=None)
@given(seeds, st.integers(0, 1 << 40), positions)
def test_a_samples_numbers_are_its_own(seed: int, epoch: int, position: int) -> None:
    """A position repeats its numbers; neighbouring seeds, epochs, positions and streams have others.

    So have batches and their collation.
    """
    here = of_sample(seed, epoch, position)
    assert of_sample(seed, epoch, position) == here
    others = [
        of_sample((seed + 1) % (1 << 64), epoch, position),
        of_sample(seed, epoch + 1, position),
        of_sample(seed, epoch, position + 1),
        of_sample(seed, epoch, position, 0),
        of_sample(seed, epoch, position, 1),
        of_batch(seed, epoch, position),
        of_batch(seed, epoch, position, 1),
        of_collation(seed, epoch, position),
        of_collation(seed, epoch, position, 1),
    ]
    drawn = [number for values in (here, *others) for three in values for number in three]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("first", [-1, 0, 1 << 62])
@pytest.mark.parametrize("step", [1, 7])
def test_samples_one_after_another(first: int, step: int) -> None:
    """Samples of a batch have the numbers that each of them has alone, and the context's generators."""
    expected = [of_sample(7, 3, first + item * step) for item in range(4)]
    seeder = SampleSeeder(7, 3)
    found = [
        (position, globals_drawn(), own_drawn())
        for position, _ in zip(seeder.each(first, step), range(4), strict=False)
    ]
    assert found == [(first + item * step, *expected[item]) for item in range(4)]


def test_no_number_is_left_from_before() -> None:
    """Normal numbers are made in pairs: a sample does not get the second of a pair that was drawn before it."""
    seeder = SampleSeeder(1, 0)
    seeder.sample(4)
    expected = random.gauss(0, 1), float(np.random.standard_normal())
    seeder.sample(4)
    assert (random.gauss(0, 1), float(np.random.standard_normal())) == expected


@pytest.mark.thorough
def test_neighbours_are_independent() -> None:
    """Over ten thousand positions the first numbers of each generator are uniform and not correlated."""
    count = 10_000
    seeder = SampleSeeder(1, 0, concurrent=True)
    table = np.empty((count, 3))
    for position in range(count):
        seeder.sample(position)
        table[position] = own_drawn()
    assert np.all(np.abs(table.mean(axis=0) - 0.5) < 5 / np.sqrt(12 * count))
    lagged = np.concatenate([table[1:], table[:-1]], axis=1)
    correlations = np.asarray(np.corrcoef(lagged.T))[np.triu_indices(6, 1)]
    assert np.all(np.abs(correlations) < 5 / np.sqrt(count))


def test_global_generators_differ_from_one_another() -> None:
    """torch's and numpy's engines are the same, but they get different seeds."""
    SampleSeeder(1, 0).sample(0)
    assert int(np.random.randint(1 << 32, dtype=np.uint32)) != int(torch.randint(1 << 32, ()).item())


# ------------------------------------------------------------------------------------------ sample_rng


def test_generators_go_on_within_a_sample() -> None:
    """Every call within one sample gives the same object; the sample's second begin starts from its first numbers."""
    seeder = SampleSeeder(1, 0)
    seeder.sample(4)
    rng = sample_rng()
    assert sample_rng() is rng
    first, second = own_drawn(), own_drawn()
    assert first != second
    seeder.sample(4)
    assert sample_rng() is not rng
    assert (own_drawn(), own_drawn()) == (first, second)


def test_generators_do_not_depend_on_one_another() -> None:
    """Draws from one of the three, and the order in which they are asked for, do not change the others."""
    seeder = SampleSeeder(1, 0)
    seeder.sample(4)
    expected = own_drawn()
    seeder.sample(4)
    rng = sample_rng()
    torch.rand(9, generator=rng.torch)
    rng.numpy.random(9)
    assert rng.random.random() == expected[0]
    seeder.sample(4)
    globals_drawn()
    assert float(sample_rng().numpy.random()) == expected[1]


def test_own_generators_leave_the_global_ones_alone() -> None:
    """Making and using them draws nothing from the process; nor does a seeder for concurrent samples."""
    before = global_states()
    seeder = SampleSeeder(1, 0, concurrent=True)
    seeder.sample(0)
    seeder.batch(0)
    own_drawn()
    assert global_states() == before


def test_outside_of_samples_generators_follow_torchs() -> None:
    """Elsewhere each call gives new generators, seeded by one draw from torch's global generator."""
    torch.manual_seed(1)
    first, second = own_drawn(), own_drawn()
    assert first != second
    after = float(torch.rand(()))
    torch.manual_seed(1)
    assert (own_drawn(), own_drawn()) == (first, second)
    assert float(torch.rand(())) == after


async def test_threads_with_the_context() -> None:
    """A thread that was given the context draws the sample's numbers; a thread without it has no sample."""
    seeder = SampleSeeder(1, 0, concurrent=True)
    seeder.sample(3)
    expected = own_drawn()
    seeder.sample(3)
    assert await asyncio.to_thread(own_drawn) == expected
    seeder.sample(3)
    rng = sample_rng()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(copy_context().run, sample_rng).result() is rng
        assert pool.submit(sample_rng).result() is not rng


# ------------------------------------------------------------------------------- the process's generators


@pytest.mark.parametrize("fails", [False, True])
def test_global_generators_are_kept(fails: bool) -> None:
    """After loading in the caller's process its generators continue unaffected, also after an error."""
    before = global_states()
    try:
        with global_generators_kept():
            SampleSeeder(1, 0).sample(0)
            globals_drawn()
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert global_states() == before


def test_a_loader_within_a_sample() -> None:
    """A dataset that itself loads in its process has its own sample and the generators back afterwards."""
    SampleSeeder(1, 0).sample(5)
    globals_drawn()
    rng, before = sample_rng(), global_states()
    with global_generators_kept():
        SampleSeeder(2, 0).sample(0)
        assert sample_rng() is not rng
    assert global_states() == before
    assert sample_rng() is rng


def draw_many(count: int) -> Callable[[], Any]:
    return lambda: np.random.random(count)


DRAWS: dict[str, tuple[Callable[[], Any], str]] = {
    "random": (random.random, "random"),
    "numpy": (np.random.random, "numpy"),
    "numpy, a whole block of its engine": (draw_many(312), "numpy"),
    "numpy, a kept gaussian": (np.random.standard_normal, "numpy"),
    "torch": (lambda: torch.rand(()), "torch"),
    "all": (globals_drawn, "random, numpy, torch"),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_the_watch_warns_once_and_names_the_generator(kind: str) -> None:
    """A draw from a global generator is noticed at the next check; there is one warning, whatever follows."""
    draw, names = DRAWS[kind]
    np.random.standard_normal()
    watch = GlobalDrawCheck()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.check()
    draw()
    with pytest.warns(UserWarning, match=rf"generators \({names}\), but .*sample_rng\(\)"):
        watch.check()
    globals_drawn()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.check()
        watch.rebase()
        globals_drawn()
        watch.check()


def test_the_watch_may_be_told_to_forget() -> None:
    """Draws that were allowed are not warned of; draws from own generators never are."""
    watch = GlobalDrawCheck()
    globals_drawn()
    watch.rebase()
    SampleSeeder(1, 0, concurrent=True).sample(0)
    own_drawn()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.check()


@pytest.mark.parametrize("collates", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 3, 70, 128])
def test_draws_are_found_at_one_of_the_next_batches(batch: int, collates: bool) -> None:
    """The states are looked at ever less often, and what was drawn in between is seen then; a collation may draw."""
    watch = GlobalDrawCheck()
    warned = 0
    for number in range(1, 200):
        if number == batch or (collates and number > batch):
            random.random()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watch.check()
        if caught:
            warned = number
            break
        if collates:
            np.random.default_rng()
            random.random()
            watch.rebase_after_batch()
    assert batch <= warned <= 2 * batch
    assert warned - batch < 64


# ------------------------------------------------------------------------------------------ states that are handed over


def drawn() -> list[Any]:
    """Numbers of each kind; normal numbers are made in pairs, of which the second is kept for later."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.random()),
        float(np.random.standard_normal()),
        torch.rand(3).tolist(),
        torch.randn(1).tolist(),
    ]


@pytest.mark.parametrize("before", [0, 1, 700])
def test_the_numbers_go_on(before: int) -> None:
    """Restored, all three generators continue from the position where they were saved."""
    seed_worker(1234, 1)
    for _ in range(before):
        drawn()
    saved = save_rng_state()
    expected = [drawn() for _ in range(5)]
    seed_worker(99, 0)
    restore_rng_state(saved)
    assert [drawn() for _ in range(5)] == expected
