"""Seeded mode: the same bytes for every way of loading, and the process's own random numbers are not touched."""

from __future__ import annotations

import multiprocessing
import os
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from asyncloader import Tuning
from tests.helpers.comparing import assert_same, same
from tests.helpers.running import BOTH, KINDS, PATIENCE_S
from tests.helpers.seeded_datasets import (
    AllDraws,
    AwaitedDraws,
    GlobalAwaited,
    Lists,
    Rows,
    Threaded,
    WholeDraws,
    draw_and_collate,
)
from tests.helpers.seeded_runs import Stepwise, epochs_of

N = 43
SEEDED: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 7}

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 1, 2, 5])
def test_the_same_bytes_for_every_number_of_workers(kind: str, workers: int) -> None:
    """Order, and every draw of every generator, depend on seed, epoch and position alone."""
    torch.manual_seed(3)
    expected = epochs_of("sync", AllDraws(N), 2, **SEEDED)
    torch.manual_seed(4)
    assert_same(epochs_of(kind, AllDraws(N), 2, num_workers=workers, **SEEDED), expected)
    assert not same(expected[0], expected[1])
    assert not same(expected[0], epochs_of(kind, AllDraws(N), **SEEDED | {"seed": 8})[0])
    indices = torch.cat(expected[0])[:, 0].tolist()
    assert sorted(indices) == list(range(N)) != indices


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_the_same_bytes_for_every_start_method(kind: str, method: str) -> None:
    """Every start method gives the same bytes: for samples, whole batches and collations that draw."""
    options: dict[str, Any] = {**SEEDED, "collate_fn": draw_and_collate}
    expected = epochs_of("sync", WholeDraws(N), 2, **options)
    more: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": method, "persistent_workers": True}
    assert_same(epochs_of(kind, WholeDraws(N), 2, **options, **more), expected)


# ------------------------------------------------------------------------------------------- whole batches


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_what_makes_a_whole_batch_is_seeded_by_the_batch(kind: str, workers: int) -> None:
    """A dataset's own `__getitems__`, and a collation that draws, repeat their numbers; batches differ in them."""
    options: dict[str, Any] = {**SEEDED, "collate_fn": draw_and_collate, "num_workers": workers}
    got = epochs_of(kind, WholeDraws(N), **options)[0]
    assert_same(got, epochs_of("sync", WholeDraws(N), **{**options, "num_workers": 0})[0])
    noise = [tuple(batch.reshape(-1).tolist()) for _, batch in got]
    assert len(set(noise)) == len(noise)
    # The collation's draws are not those of the samples before it.
    assert not set(noise[0]) & set(got[0][0].reshape(-1).tolist())


# ------------------------------------------------------------------------------------------- the user's samplers


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_users_order_is_kept(kind: str, workers: int) -> None:
    """A user's sampler and batch sampler keep their order; random numbers follow the position in it."""
    order = [7, 7, 1, 30, 2, 7, 0]
    got = epochs_of(kind, AllDraws(N), batch_size=3, sampler=order, seed=7, num_workers=workers)[0]
    rows = torch.cat(got)
    assert rows[:, 0].tolist() == order
    assert len(set(rows[:, 1].tolist())) == len(order), "a sample that comes again is another augmentation"
    lists = [[4, 4], [1], [9, 8, 7, 6], [4, 4]]
    got = epochs_of(kind, AllDraws(N), batch_sampler=Lists(lists), seed=7, num_workers=workers)[0]
    assert [batch[:, 0].tolist() for batch in got] == lists
    assert len({number for batch in got for number in batch[:, 1].tolist()}) == 9
    assert_same(got, epochs_of("sync", AllDraws(N), batch_sampler=Lists(lists), seed=7)[0])


# ------------------------------------------------------------------------------------------- the process's generators


def _states() -> list[Any]:
    return [torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)]


DRAWERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "samples": (AllDraws(N), {}),
    "whole batches": (WholeDraws(N), {}),
    "a collation": (AllDraws(N), {"collate_fn": draw_and_collate}),
    "coroutines": (AwaitedDraws(N), {"collate_fn": draw_and_collate}),
}


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", DRAWERS)
def test_the_processs_generators_are_left_as_they_were(kind: str, workers: int, name: str) -> None:
    """No generator of the caller is moved: not by making a loader, nor by ``iter()``, a batch or an abandoned epoch."""
    dataset, options = DRAWERS[name]
    torch.manual_seed(1)
    before = _states()
    with Stepwise(kind, dataset, num_workers=workers, **SEEDED, **options) as run:
        assert_same(_states(), before)
        run.begin()
        assert_same(_states(), before)
        for _ in range(3):
            run.step()
            assert_same(_states(), before)
        run.epoch()
        run.loader.state_dict()
    assert_same(_states(), before)


@pytest.mark.parametrize("kind", BOTH)
def test_a_consumer_that_draws_between_batches(kind: str) -> None:
    """The consumer's draws are independent of the batches, and the batches of the consumer's draws."""
    expected = epochs_of("sync", AllDraws(N), **SEEDED)[0]
    torch.manual_seed(9)
    alone = [float(torch.rand(())) for _ in range(5)]
    torch.manual_seed(9)
    with Stepwise(kind, AllDraws(N), **SEEDED) as run:
        run.begin()
        for batch, number in zip(expected, alone, strict=False):
            assert_same(run.step(), batch)
            assert float(torch.rand(())) == number


# ------------------------------------------------------------------------------------------- concurrent samples


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("make", [AwaitedDraws, Threaded])
def test_samples_made_concurrently(kind: str, workers: int, make: Any) -> None:
    """Coroutines that take turns, and threads, draw from their own sample's generators, as if they were made singly."""
    expected = epochs_of("sync", make(N), concurrency=1, **SEEDED)[0]
    assert_same(epochs_of(kind, make(N), num_workers=workers, **SEEDED)[0], expected)
    draws = torch.cat(expected)[:, 1:]
    assert len(set(draws[:, :3].reshape(-1).tolist())) == 3 * N


WARNING = "drew from the process-global generators"


def _write(message: object, *_: Any, **__: Any) -> None:
    os.write(2, f"{message}\n".encode())


def _to_stderr(worker: int) -> None:
    """In a worker: write warnings to stderr, as when no test runner collects them."""
    warnings.simplefilter("always")
    warnings.showwarning = _write


def _stderr(capfd: pytest.CaptureFixture[str], dataset: Any, **options: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        workers: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork", "worker_init_fn": _to_stderr}
        epochs_of("sync", dataset, 2, **workers, **SEEDED, **options)
    return capfd.readouterr().err


def test_one_warning_for_global_draws_in_coroutines(capfd: pytest.CaptureFixture[str]) -> None:
    """An async dataset that draws from a global generator causes one warning, with the generator and the remedy."""
    text = _stderr(capfd, GlobalAwaited(N), persistent_workers=True)
    assert text.count(WARNING) == 1
    assert "(random)" in text
    assert "sample_rng()" in text


def test_no_warning_for_draws_that_are_exact(capfd: pytest.CaptureFixture[str]) -> None:
    """`sample_rng` in coroutines, global generators in blocking samples, and collations that draw are exact."""
    for dataset in (AwaitedDraws(N), AllDraws(N)):
        assert WARNING not in _stderr(capfd, dataset, collate_fn=draw_and_collate)


# ------------------------------------------------------------------------------------------- the head of the line


class Gated(Rows):
    """Index 0 is made when `behind` other samples have been made."""

    def __init__(self, length: int, behind: int) -> None:
        super().__init__(length)
        self.behind = behind
        self.made = multiprocessing.get_context("fork").Semaphore(0)

    def __getitem__(self, index: int) -> torch.Tensor:
        waited = True
        if index:
            self.made.release()
        else:
            waited = all(self.made.acquire(timeout=PATIENCE_S) for _ in range(self.behind))
        return torch.tensor([index, waited], dtype=torch.float64)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("factor", "ahead"), [(1, 0), (1, 8), (2, 5)])
def test_a_slow_batch_does_not_stop_the_other_worker(kind: str, factor: int, ahead: int) -> None:
    """While one worker makes the first batch, the other makes `reorder_window` beyond the credits; order is kept."""
    # The slow worker holds its credits: the first task and the tasks given to it with the first.
    behind = 2 * factor + ahead - factor
    options: dict[str, Any] = {"batch_size": 1, "seed": 1, "num_workers": 2, "multiprocessing_context": "fork"}
    got = epochs_of(kind, Gated(40, behind), prefetch_factor=factor, tuning=Tuning(reorder_window=ahead), **options)[0]
    rows = torch.cat(got)
    assert rows[0, 1] == 1, "the other worker stood still"
    assert rows[:, 0].tolist() == list(range(40))
