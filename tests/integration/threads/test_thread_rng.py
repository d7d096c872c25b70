"""Worker threads: `get_worker_info` by thread, and random numbers beside those of the process."""

from __future__ import annotations

import random
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from asyncloader import DataLoader, sample_rng
from tests.helpers.comparing import assert_same
from tests.helpers.running import PATIENCE_S, run_loader
from tests.helpers.sealed import THREADED, Drawing, Sealed, epoch

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def test_each_thread_has_its_worker_info_and_all_others_none() -> None:
    """The function that this module imported answers by thread; the consumer's thread is in no worker."""
    seen: dict[int, Any] = {}

    def sample(index: int) -> int:
        info = get_worker_info()
        assert info is not None
        assert info is torch.utils.data.get_worker_info()
        assert (info.num_workers, info.dataset, info.worker_method) == (3, dataset, "thread")
        seen.setdefault(info.id, (threading.get_ident(), info.seed))
        return index

    dataset = Sealed(sample)
    torch.manual_seed(3)
    with DataLoader[Any](dataset, num_workers=3, workers="threads", worker_init_fn=sample) as loader:
        for _ in loader:
            assert get_worker_info() is None
    assert len({thread for thread, _ in seen.values()}) == 3
    assert [seen[number][1] - seen[0][1] for number in range(3)] == [0, 1, 2]
    assert get_worker_info() is None


def test_worker_generators_in_torch_mode_follow_the_seed() -> None:
    """Without `seed=`, ``rng`` and `sample_rng` belong to the worker: the same program draws the same numbers."""

    def sample(_: int) -> Any:
        info: Any = get_worker_info()
        drawn = info.rng.random_generator.random(), info.rng.numpy_generator.random(), sample_rng().random.random()
        return [*drawn, float(torch.rand((), generator=info.rng.torch_generator))]

    first, second = (run_loader("sync", Sealed(sample), **THREADED).epochs for _ in range(2))
    assert_same(first, second, "the same seed")
    assert len({float(each) for batch in first[0] for each in batch}) == 24 * 4


DRAWS: dict[str, Any] = {
    "random": random.random,
    "randrange": lambda: random.randrange(9),
    "torch": lambda: torch.rand(2),
    "in place": lambda: torch.empty(2).normal_(),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(3)),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_a_draw_from_a_global_generator_is_refused_in_seeded_mode(draw: str) -> None:
    """It would depend on the other threads. Without a seed there is one warning for all workers."""
    dataset = Sealed(lambda _: DRAWS[draw]())
    with pytest.raises(RuntimeError, match=r"(?s)process-global generators.*sample_rng"):
        epoch("sync", dataset, seed=1, **THREADED)
    with pytest.warns(RuntimeWarning, match="process-global generators") as caught:
        assert len(epoch("sync", dataset, **THREADED)) == 24
    assert len(caught) == 1


@pytest.mark.parametrize("generator", ["MT19937", "PCG64"])
def test_a_draw_by_numpy_is_warned_of(generator: str) -> None:
    """numpy does not tell whose draw it was. Its global generator may be another than the usual one."""
    numpys: Any = np.random
    before = numpys.get_bit_generator()
    numpys.set_bit_generator(getattr(np.random, generator)())
    try:
        with pytest.warns(RuntimeWarning, match="numpy"):
            epoch("sync", Sealed(lambda _: np.random.rand()), seed=1, **THREADED)
    finally:
        numpys.set_bit_generator(before)


def test_the_trainings_own_draws_are_not_the_datasets() -> None:
    """The consumer draws from the global generators all the time, and the dataset from generators of its own."""
    busy, stop = threading.Event(), threading.Event()

    def train() -> None:
        while not stop.is_set():
            torch.rand(3)
            random.random()
            busy.set()

    training = threading.Thread(target=train)
    training.start()
    try:
        assert busy.wait(PATIENCE_S)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            epoch("sync", Drawing(), seed=1, num_workers=1, workers="threads")
    finally:
        stop.set()
        training.join()
