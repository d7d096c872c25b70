from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from asyncloader.workers.fetch.seeding import global_generators_kept, restore_rng_state, save_rng_state
from asyncloader.workers.fetch.setup import seed_worker


@pytest.fixture(autouse=True)
def generators_kept() -> Iterator[None]:
    """These tests set the process's generators: restore them afterwards."""
    with global_generators_kept():
        yield


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
