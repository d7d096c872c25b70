"""Several trainers at one node, some of which are slow, stopped, or leave: the others get exactly their batches."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader, Service
from tests.helpers.comparing import assert_same
from tests.helpers.running import PATIENCE_S, ROOT
from tests.service import definitions
from tests.service.serving import NodeProcess, serving

LENGTH = 240
OPTIONS: dict[str, Any] = {"batch_size": 4, "seed": 5, "num_workers": 2, "shuffle": True}
SMALL_CACHE = """
import sys
if "serve" in sys.orig_argv:
    import asyncloader.service.node.server as node
    from asyncloader.service.node.epoch_cache import EpochCache
    node.EpochCache = lambda _: EpochCache(8192)
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    """Start a node with one process for all loaders, and a cache of some eight batches."""
    (tmp_path / "sitecustomize.py").write_text(SMALL_CACHE)
    within = ["env", f"PYTHONPATH={tmp_path}{os.pathsep}{ROOT}"]
    opened = [part for name in ("counted", "numbers") for part in ("--open", name)]
    with serving(tmp_path, ["counted", "numbers"], *opened, workers=1, within=within) as made:
        yield made


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["tcp", "unix"])
def test_a_slow_trainer_among_those_that_share(place: str, node: NodeProcess, tmp_path: Path) -> None:
    """One trainer is far behind, one has stopped, one leaves in mid-epoch, and one is an epoch ahead: the fast
    trainers do not wait for them, and batches that the node has forgotten are made again.
    """
    log = tmp_path / "log"
    defined = definitions.counted(LENGTH, str(log))
    service = Service(getattr(node, place), share="epoch")
    with DataLoader[Any](definitions.numbers(LENGTH), **OPTIONS) as local:
        first, second = list(local), list(local)
    fast_are_done = threading.Event()

    def behind(still: bool) -> list[Any]:
        with DataLoader[Any](defined, **OPTIONS, workers=service) as loader:
            got = []
            for batch in loader:
                got.append(batch)
                if len(got) == 3 or (not still and not fast_are_done.is_set() and len(got) % 10 == 0):
                    # the fast loaders end only if they do not wait for this loader
                    assert fast_are_done.wait(PATIENCE_S)
            return got

    def leaving() -> None:
        with DataLoader[Any](defined, **OPTIONS, workers=service) as loader:
            assert_same(list(islice(loader, 5)), first[:5])

    def fast() -> list[Any]:
        with DataLoader[Any](defined, **OPTIONS, workers=service) as loader:
            return list(loader)

    def ahead() -> list[Any]:
        with DataLoader[Any](defined, **OPTIONS, workers=service) as loader:
            loader.set_epoch(1)
            return list(loader)

    with ThreadPoolExecutor(8) as threads:
        slow = [threads.submit(behind, still) for still in (False, True)]
        quick = [threads.submit(fast) for _ in range(2)]
        other, gone = threads.submit(ahead), threads.submit(leaving)
        try:
            for each in quick:
                assert_same(each.result(PATIENCE_S), first)
            assert not any(each.done() for each in slow)
            assert_same(other.result(PATIENCE_S), second)
            gone.result(PATIENCE_S)
        finally:
            fast_are_done.set()
        for each in slow:
            assert_same(each.result(PATIENCE_S), first)
    made = Counter(log.read_text().split())
    assert len(made) == LENGTH
    assert sum(made.values()) > 2 * LENGTH  # both epochs, and the samples of forgotten batches again


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
