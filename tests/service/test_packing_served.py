"""Sequences that a service reads and packs: the rows of local workers, resumed anywhere.

Windows that are packed where they are read are batches of a type of the library's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader, PackedLoader
from tests.helpers.comparing import assert_same
from tests.service import packing_definitions as definitions
from tests.service.serving import NodeProcess, serving

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

MODULE = "tests.service.packing_definitions"
NAMES = ["windows", "window_shards"]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with serving(tmp_path_factory.mktemp("node"), NAMES, *(f"--open={name}" for name in NAMES), module=MODULE) as made:
        yield made


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
