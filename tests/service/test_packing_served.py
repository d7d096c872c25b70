"""Sequences that a service reads and packs: the rows of local workers, resumed anywhere, also where a node dies.

Rows that are planned from lengths are indices that a loader sends to the nodes; windows that are packed where they are
read are batches of a type of the library's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader, PackedLoader, PackingSampler
from asyncloader.packing.bin_packing import Strategy
from tests.helpers.comparing import assert_same
from tests.service import packing_definitions as definitions
from tests.service.serving import NodeProcess, serving

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

MODULE = "tests.service.packing_definitions"
NAMES = ["texts", "windows", "window_shards"]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with serving(tmp_path_factory.mktemp("node"), NAMES, *(f"--open={name}" for name in NAMES), module=MODULE) as made:
        yield made


def planned(strategy: Strategy, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    """A loader of rows that are planned from lengths."""
    lengths = definitions.TEXT_LENGTHS
    return DataLoader(
        definitions.texts(asynchronous=options.pop("asynchronous", False)),
        batch_size=batch_size,
        sampler=PackingSampler(
            lengths,
            128,
            seed=1,
            strategy=strategy,
            domains=[n % 2 for n in lengths],
            window=100,
        ),
        seed=1,
        num_workers=2,
        **options,
    )


def packed(kind: str, folder: Path, **options: Any) -> PackedLoader:
    """A loader of windows."""
    defined = definitions.windows() if kind == "map" else definitions.window_shards(str(folder))
    order: dict[str, Any] = {"shuffle": True} if kind == "map" else {}
    return PackedLoader(DataLoader[Any](defined, batch_size=40, seed=1, num_workers=2, **order, **options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shards")
    for number in range(4):
        lines = [f'{{"n": {n}}}\n' for n in range(75 * number, 75 * number + 75)]
        (made / f"{number}.jsonl").write_text("".join(lines))
    return made


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "awaited"])
@pytest.mark.parametrize("strategy", ["best_fit", "wrap"])
def test_planned_rows(strategy: Strategy, asynchronous: bool, node: NodeProcess) -> None:
    """Indices and slices arrive as they were planned: the batches of local workers; the rest after a resume."""
    with planned(strategy, asynchronous=asynchronous) as loader:
        expected = list(loader)
    with planned(strategy, asynchronous=asynchronous, workers=node.tcp) as loader:
        found = list(islice(loader, 3))
        state = loader.state_dict()
    with planned(strategy, asynchronous=asynchronous, workers=node.unix) as loader:
        loader.load_state_dict(state)
        assert_same([*found, *loader], expected)


@pytest.mark.parametrize("kind", ["map", "shards"])
@pytest.mark.parametrize("places", ["there", "to there", "from there"])
def test_windows(kind: str, places: str, folder: Path, node: NodeProcess) -> None:
    """The rows of local workers, in parts that other loaders read."""
    with ExitStack() as stack:
        local = packed(kind, folder)
        stack.enter_context(local.loader)
        expected = list(local)
    state: dict[str, Any] = {}
    found: list[Any] = []
    for part, count in enumerate((5, 9, None)):
        away = places == "there" or (part > 0) == (places == "to there")
        rows = packed(kind, folder, **({"workers": node.tcp} if away else {}))
        with rows.loader:
            rows.load_state_dict(state)
            found += islice(rows, count)
            state = rows.state_dict()
    assert len(found) > 30
    assert_same(found, expected)
