"""Several trainers at one node, some of which are slow, stopped, or leave: the others get exactly their batches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader
from tests.helpers.comparing import assert_same
from tests.helpers.running import PATIENCE_S
from tests.service import definitions
from tests.service.serving import NodeProcess, serving

LENGTH = 240
OPTIONS: dict[str, Any] = {"batch_size": 4, "seed": 5, "num_workers": 2, "shuffle": True}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    """Start a node with one process for all loaders."""
    with serving(tmp_path, ["numbers"], "--open", "numbers", workers=1) as made:
        yield made


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["tcp", "unix"])
def test_time_is_shared_by_trainers_and_not_by_workers(place: str, node: NodeProcess) -> None:
    """A trainer with eight workers gets no more than its share beside a trainer with one; a third that has stopped
    uses none.
    """
    address = getattr(node, place)
    defined = definitions.numbers(4000)
    options: dict[str, Any] = {**OPTIONS, "batch_size": 16}
    counts = [0, 0]
    half = threading.Event()

    def train(number: int, workers: int) -> None:
        mine: dict[str, Any] = {**options, "num_workers": workers}
        with DataLoader[Any](defined, **mine, workers=address) as loader:
            both.wait(PATIENCE_S)
            for _ in loader:
                counts[number] += 1
                if counts[number] == 125:
                    half.set()
                if half.is_set():
                    return

    both = threading.Barrier(2)
    with DataLoader[Any](defined, **options, workers=address) as still:
        batches = iter(still)
        next(batches)
        with ThreadPoolExecutor(2) as threads:
            for each in [threads.submit(train, 0, 8), threads.submit(train, 1, 1)]:
                each.result(PATIENCE_S)
        assert max(counts) == 125
        assert min(counts) > 40, counts
        with DataLoader[Any](defined, **options) as local:
            assert_same(list(islice(batches, 20)), list(islice(local, 1, 21)))
