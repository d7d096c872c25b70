"""Loaders that share an epoch: each batch is made once, and each loader gets all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader, Service
from tests.helpers.comparing import assert_same
from tests.service import definitions
from tests.service.serving import NodeProcess, serving

LENGTH = 160
OPTIONS: dict[str, Any] = {"batch_size": 4, "seed": 5, "num_workers": 2, "shuffle": True, "persistent_workers": True}
NAMES = ["counted", "deadly", "hanging", "stream"]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    opened = [part for name in NAMES[:3] for part in ("--open", name)]
    with serving(tmp_path_factory.mktemp("node"), NAMES, *opened, workers=2) as made:
        yield made


def at(address: str) -> Service:
    return Service(address, share="epoch")


@pytest.mark.parametrize("place", ["tcp", "unix"])
@pytest.mark.parametrize("bad", [0, 7])
def test_each_sample_is_made_once(bad: int, place: str, node: NodeProcess, tmp_path: Path) -> None:
    """Three loaders read two epochs side by side; each of them gets the records of samples that raised."""
    options: dict[str, Any] = {**OPTIONS, "on_error": "skip" if bad else "raise"}
    here, there = tmp_path / "here", tmp_path / "there"
    with DataLoader[Any](definitions.counted(LENGTH, str(here), bad), **options) as local:
        expected = [list(local) for _ in range(2)]
        records = local.skipped_samples
    served = definitions.counted(LENGTH, str(there), bad)
    with ExitStack() as stack:
        workers = at(getattr(node, place))
        loaders = [stack.enter_context(DataLoader[Any](served, **options, workers=workers)) for _ in range(3)]
        for epoch in expected:
            for mine, *others in zip(epoch, *loaders, strict=True):
                for other in others:
                    assert_same(other, mine)
        for loader in loaders:
            assert [(each.index, each.position) for each in loader.skipped_samples] == [
                (each.index, each.position) for each in records
            ]
    assert Counter(there.read_text().split()) == Counter(here.read_text().split())


def test_another_seed_or_epoch_has_other_batches(node: NodeProcess, tmp_path: Path) -> None:
    """No batch is taken from an epoch with another seed, or from an earlier epoch, although its indices are alike."""
    served = definitions.counted(LENGTH, str(tmp_path / "log"))
    with ExitStack() as stack:  # the node keeps batches only as long as a loader is open
        for seed in (1, 2):
            options: dict[str, Any] = {**OPTIONS, "seed": seed, "shuffle": False}
            with DataLoader[Any](served, **options) as local:
                expected: list[Any] = [list(local) for _ in range(2)]
            loader = stack.enter_context(DataLoader[Any](served, **options, workers=at(node.tcp)))
            for epoch in expected:
                assert_same(list(loader), epoch)


def test_a_loader_that_leaves(node: NodeProcess, tmp_path: Path) -> None:
    """Batches that it was to make are made for the loaders that wait for them."""
    served = definitions.hanging(LENGTH, str(tmp_path))  # one sample hangs for the loader that asks for it first
    with DataLoader[Any](definitions.numbers(LENGTH), **OPTIONS) as local:
        expected = list(local)
    first, second = (DataLoader[Any](served, **OPTIONS, workers=at(node.tcp)) for _ in range(2))
    with ThreadPoolExecutor(2) as threads:
        reading = threads.submit(list, first)
        while not (tmp_path / "hung").exists():
            pass
        other = threads.submit(list, second)
        first.close()
        assert reading.exception() is not None
        assert_same(other.result(), expected)
    second.close()


def test_processes_that_die(node: NodeProcess, tmp_path: Path) -> None:
    """Each loader gets the batch that the dead process was to make."""
    with DataLoader[Any](definitions.numbers(40), **OPTIONS) as local:
        expected = list(local)
    loaders = [
        DataLoader[Any](definitions.deadly(40, str(tmp_path)), **OPTIONS, workers=at(node.tcp)) for _ in range(2)
    ]
    with ThreadPoolExecutor(2) as threads:
        for reading in [threads.submit(list[Any], loader) for loader in loaders]:
            assert_same(reading.result(), expected)
    for loader in loaders:
        loader.close()


def test_a_stream_is_not_shared(node: NodeProcess) -> None:
    """A worker's next batch depends on those before it."""
    with pytest.raises(ValueError, match=r"share='epoch' is for datasets with an index .* and stream\(\) is not one"):
        iter(DataLoader[Any](definitions.stream(), 4, seed=1, num_workers=1, workers=at(node.tcp)))
