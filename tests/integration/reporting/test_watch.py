"""Ranks that starve are named, with their reason, in the log and in `explain()` of rank 0; no rank waits for that."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from asyncloader import DataLoader
from asyncloader.ranks.topology import Topology
from asyncloader.ranks.watch import RankWatch
from asyncloader.telemetry.statistics import Statistics
from tests.helpers.datasets import Numbers
from tests.helpers.rank_group import RankGroup
from tests.helpers.running import PATIENCE_S


class Nested(Numbers):
    """Reads another loader in its worker; a sample says whether that is not compared with other ranks."""

    def __getitem__(self, index: int) -> Any:
        with DataLoader(Numbers(4)) as loader:
            list(loader)
            return loader._asyncloader_state.statistics.watch is None


WORDS = {"fetch": "worker fetches", "decode": "decoding", "collate": "collation", "sampler": "the sampler"}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    with RankGroup(3, tmp_path_factory.mktemp("three")) as group:
        yield group


@pytest.mark.parametrize(
    ("straggler", "stage", "kind"),
    [
        (2, "fetch", "sync"),
        pytest.param(0, "collate", "asyncio", marks=pytest.mark.thorough),
        pytest.param(1, "sampler", "sync", marks=pytest.mark.thorough),
        pytest.param(1, "decode", "uvloop", marks=pytest.mark.thorough),
    ],
)
def test_a_straggler_is_named(ranks: RankGroup, straggler: int, stage: str, kind: str) -> None:
    """Of three ranks that train in step, the rank with the slow stage is named once, with that stage; the other ranks
    say nothing.
    """
    found = ranks("train", straggler, stage, kind=kind)
    (line,) = found[0][0]
    assert line.startswith(f"rank {straggler} waits ")
    # On a busy machine a rank may be named before the third rank's figures have come.
    assert re.search(rf"% of the time for {WORDS[stage]}; the other(s [^()]*|.* \(2 of 3 ranks are known\))$", line)
    shown = [each for each in found[0][1].splitlines() if each.startswith("rank")]
    assert shown[0].startswith(f"ranks: rank {straggler} waits ")
    for lines, explained in found[1:]:
        assert lines == []
        assert "\nrank" not in explained
    assert all(not left["threads"] and not left["children"] for left in ranks("left"))


@pytest.mark.parametrize("store", [pytest.param("file", marks=pytest.mark.thorough), "tcp"])
def test_ranks_that_end_or_die_delay_no_other(tmp_path: Path, store: str) -> None:
    """A rank that is killed, and ranks that take fewer steps, are no trouble for the rest: they read all their batches,
    close, and exit with code 0.
    """
    with RankGroup(3, tmp_path, store) as group:
        group.ask("read_apart", [60, 120, None])
        (first,) = group.answers(0)
        group.end(0)  # the process that serves the store
        (second,) = group.answers(1)
        assert first[-1].startswith("Input-bound")
        assert second[-1].startswith("Input-bound")
        assert not any(line.startswith("rank") for line in second)


def test_nothing_exists_without_a_group() -> None:
    """In a program that has not initialized torch.distributed no rank is watched."""
    with DataLoader(Numbers(100), batch_size=2) as loader:
        assert sum(1 for _ in loader) == 50
        assert loader._asyncloader_state.statistics.watch is None


def test_a_forked_child_exchanges_nothing() -> None:
    """It has a copy of its parent's connection to the store: requests of both would mix. Nor does a worker."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        with DataLoader(Nested(1), num_workers=1, multiprocessing_context="fork") as loader:
            assert next(iter(loader)).item()
        watched = RankWatch(Topology(1, 2), None, "mine")
        child = os.fork()
        if not child:
            code = 1
            try:
                watched.look(1.0, Statistics())
                for thread in threading.enumerate():
                    if thread is not threading.current_thread():
                        thread.join(PATIENCE_S)
                with DataLoader(Numbers(4)) as loader:
                    list(loader)
                    code = 10 if watched._next else 20 if loader._asyncloader_state.statistics.watch else 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        with DataLoader(Numbers(4)) as loader:
            list(loader)
            assert loader._asyncloader_state.statistics.watch is not None
    finally:
        torch.distributed.destroy_process_group()
