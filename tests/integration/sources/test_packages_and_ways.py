"""Folders of LitData and Lance in every way in which a map dataset is read: the samples that the packages themselves
read, in the batches that any map dataset of this length has.

A row is a kind of folder, a column a way of reading. What uses Lance in this process would spoil it for forks: ways
without workers, and by threads, are those of other processes. LitData is imported here, so that forks have it: an
import takes a second or two.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader
from tests.helpers.package_tables import PACKAGES, open_table, texts_of, written
from tests.helpers.rank_group import RankGroup
from tests.service import definitions
from tests.service.serving import NodeProcess, serving

pytestmark = [
    pytest.mark.independent,
    # The second is what LitData ignores in a process that imports it itself.
    pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:The given buffer is not writable"),
]

OPTIONS: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3}
OURS: dict[str, Any] = {"collate_fn": texts_of, **OPTIONS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


@pytest.fixture(scope="module")
def samples(folder: Path) -> dict[str, list[str]]:
    """The samples of each kind, as the packages read them."""
    with suppress(ImportError), warnings.catch_warnings(action="ignore"):  # of the package's own
        import_module("litdata")
    return {kind: texts for package in PACKAGES for kind, texts in written(folder, package).items()}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with serving(tmp_path_factory.mktemp("node"), ["table"], "--open", "table") as made:
        yield made


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    with RankGroup(1, tmp_path_factory.mktemp("alone")) as group:
        yield group


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    """Two ranks that use neither package themselves."""
    with RankGroup(2, tmp_path_factory.mktemp("trainers")) as group:
        yield group


@pytest.fixture(params=[kind for kinds in PACKAGES.values() for kind in kinds])
def kind(request: pytest.FixtureRequest, samples: dict[str, list[str]]) -> str:
    found: str = request.param
    if found not in samples:
        pytest.skip("its package is not installed")
    return found


@pytest.fixture
def expected(kind: str, samples: dict[str, list[str]]) -> list[list[str]]:
    """The batches of a list of the samples."""
    plain: Any = samples[kind]
    with DataLoader[Any](plain, collate_fn=list, **OPTIONS) as loader:
        return list(loader)


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("spawn", "forkserver"))]
)
def test_by_processes(kind: str, method: str, folder: Path, expected: list[list[str]]) -> None:
    """However the workers are started."""
    table = open_table(kind, folder)
    workers = 2 if method == "fork" else 1  # the others import the packages themselves
    with DataLoader[Any](table, num_workers=workers, multiprocessing_context=method, **OURS) as loader:
        assert list(loader) == expected


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "workers": "threads"}], ids=["no workers", "threads"])
@pytest.mark.parametrize("loop", ["sync", "asyncio"])
def test_in_the_trainer(
    kind: str, options: dict[str, Any], loop: str, folder: Path, alone: RankGroup, expected: list[list[str]]
) -> None:
    """Without a process of its own for each worker, on either kind of loop."""
    assert alone("table", kind, str(folder), loop=loop, **OPTIONS, **options) == [expected]


@pytest.mark.thorough
def test_resumed(kind: str, folder: Path, node: NodeProcess, expected: list[list[str]]) -> None:
    """Here, and then at a service, with other workers: a service's node reads the same samples."""
    with DataLoader[Any](open_table(kind, folder), num_workers=2, multiprocessing_context="fork", **OURS) as loader:
        batches = iter(loader)
        head = [next(batches) for _ in range(3)]
        state = loader.state_dict()
    with DataLoader[Any](definitions.table(kind, str(folder)), num_workers=1, workers=node.tcp, **OPTIONS) as loader:
        loader.load_state_dict(state)
        assert [*head, *loader] == expected


def check_ranks(ranks: list[list[list[str]]], samples: list[str]) -> None:
    """Each sample is on one rank: the length is that of the whole folder on both."""
    first, second = ([text for batch in rank for text in batch] for rank in ranks)
    assert abs(len(first) - len(second)) < 2
    assert {*first, *second} <= {*samples}
    assert len({*first, *second}) >= len(samples) - 1


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_by_the_workers_of_two_ranks(
    method: str, folder: Path, trainers: RankGroup, samples: dict[str, list[str]]
) -> None:
    """By processes that are forked from a rank, with its group, others of which continue; and by those that know no
    group.
    """
    workers = {"num_workers": 1, "multiprocessing_context": method, "batch_size": 1}
    steps = 5 if method == "fork" else None  # workers of a fork server import the packages for seconds
    for kind in [kinds[0] for kinds in PACKAGES.values() if kinds[0] in samples]:
        check_ranks(trainers("table", kind, str(folder), steps=steps, **OPTIONS | workers), samples[kind])
