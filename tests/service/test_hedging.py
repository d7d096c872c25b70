"""A task that is late at one node is made by another node, and delivered once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader, Tuning
from tests.helpers.comparing import assert_same
from tests.helpers.running import PATIENCE_S
from tests.service import definitions
from tests.service.serving import serving

OPTIONS: dict[str, Any] = {"batch_size": 2, "seed": 1, "num_workers": 2, "shuffle": True}
LENGTH = 1200


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start two nodes, and return their addresses."""
    folder = tmp_path_factory.mktemp("nodes")
    flags: dict[str, Any] = {"listen": ["127.0.0.1:0"], "workers": 1}
    with (
        serving(folder, ["hanging"], "--open", "hanging", **flags) as one,
        serving(folder, ["hanging"], "--open", "hanging", **flags) as two,
    ):
        yield f"{one.tcp},{two.tcp}"


@pytest.mark.parametrize(("seed", "in_order"), [(1, True), (13, True), (13, False)])
def test_what_is_late_comes_from_another_node(seed: int, in_order: bool, nodes: str, tmp_path: Path) -> None:
    """One node hangs at a task, and answers in the end: the batches are those of an undisturbed run, and the
    consumer does not wait for that node.
    """
    gate = tmp_path / "gate"
    options: dict[str, Any] = {**OPTIONS, "seed": seed}
    with DataLoader[Any](definitions.numbers(n=LENGTH), **options) as loader:
        expected = list(loader)
    late = next(number for number, batch in enumerate(expected) if 13 in batch["index"])
    assert 250 < late < 500 if seed == 1 else 50 < late < 100
    os.mkfifo(gate)
    hanging = definitions.hanging(n=LENGTH, marks=str(tmp_path))
    with DataLoader[Any](hanging, **options, in_order=in_order, workers=nodes) as loader:
        batches = iter(loader)
        got = list(islice(batches, late + 50))
        # out of order, all batches but one are delivered without a hedge
        while not loader.stats()["data/hedged_batches"]:
            got.append(next(batches))
        gate.write_bytes(b"go on")
        got += batches
    if not in_order:
        got.sort(key=first)
        expected.sort(key=first)
    assert_same(got, expected)


def test_what_is_late_at_the_beginning_of_the_next_epoch(nodes: str, tmp_path: Path) -> None:
    """The times of the previous epoch decide which task is late: fewer than 16 of this epoch are known by then."""
    options: dict[str, Any] = {**OPTIONS, "seed": 37, "tuning": Tuning(reorder_window=1), "timeout": PATIENCE_S}
    (tmp_path / "hung").touch()
    hanging = definitions.hanging(n=LENGTH, marks=str(tmp_path))
    with DataLoader[Any](hanging, **options, workers=nodes) as loader:
        expected = list(loader)
        late = next(number for number, batch in enumerate(expected) if 13 in batch["index"])
        assert late + 5 < 16
        os.mkfifo(tmp_path / "gate")
        (tmp_path / "hung").unlink()
        loader.set_epoch(0)
        batches = iter(loader)
        got = list(islice(batches, late + 50))
        (tmp_path / "gate").write_bytes(b"go on")
        got += batches
    assert_same(got, expected)


def first(batch: Any) -> int:
    return int(batch["index"][0])
