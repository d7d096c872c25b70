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

from asyncloader import AsyncDataLoader, DataLoader, PackedLoader, PackingSampler
from asyncloader.packing.bin_packing import Strategy
from tests.helpers.comparing import assert_same
from tests.helpers.running import run_async
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
@pytest.mark.parametrize("strategy", ["first_fit", "best_fit", "wrap", "best_fit_wrap"])
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


def test_windows_of_an_async_loader(folder: Path, node: NodeProcess) -> None:
    """The same rows."""

    async def read(**options: Any) -> list[Any]:
        loader = AsyncDataLoader[Any](
            definitions.window_shards(str(folder)), batch_size=40, seed=1, num_workers=2, **options
        )
        async with loader:
            return [row async for row in PackedLoader(loader)]

    assert_same(run_async(read(workers=node.tcp)), run_async(read()))


@pytest.mark.parametrize("kind", ["planned", "map", "shards"])
def test_a_node_that_dies(kind: str, tmp_path: Path, folder: Path, node: NodeProcess) -> None:
    """In the middle of an epoch: the other node reads the rest, and no token is lost, doubled or packed otherwise."""

    def make(**options: Any) -> Any:
        return planned("best_fit_wrap", **options) if kind == "planned" else packed(kind, folder, **options)

    local = make()
    with local if kind == "planned" else local.loader:
        expected = list(local)
    with serving(tmp_path, NAMES, *(f"--open={name}" for name in NAMES), module=MODULE) as dying:
        rows = make(workers=f"{dying.tcp},{node.tcp}")
        with rows if kind == "planned" else rows.loader:
            iterator = iter(rows)
            found = list(islice(iterator, 4))
            dying.kill()
            found += iterator
    assert_same(found, expected)


def test_errors_of_a_sequence(node: NodeProcess) -> None:
    """A sequence that cannot be joined is an error of its window, with the same text as of a local worker."""
    texts = []
    for workers in (None, node.tcp):
        defined = definitions.windows(max_tokens=30)
        with DataLoader[Any](defined, batch_size=40, seed=1, num_workers=1, workers=workers) as loader:
            with pytest.raises(ValueError, match="which is more than max_tokens=30") as raised:
                list(PackedLoader(loader))
            texts.append(str(raised.value).splitlines()[-1])
    assert texts[0] == texts[1]
