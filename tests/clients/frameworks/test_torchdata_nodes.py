from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

import asyncloader
from tests.clients.frameworks.helping import Rows, RowStream, batches_given, draws, seed_all
from tests.helpers.comparing import assert_same

pytestmark = pytest.mark.clients

STOCK: Any = torch.utils.data.DataLoader
OURS: Any = asyncloader.DataLoader


@pytest.fixture(scope="module")
def nodes() -> Any:
    return import_module("torchdata.nodes")


@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
@pytest.mark.parametrize("dataset", [Rows(36), RowStream(36)], ids=["map", "stream"])
def test_our_loader_as_a_source(nodes: Any, dataset: Any, persistent: bool) -> None:
    """`Loader(IterableWrapper(loader))` gives torch's batches over several epochs."""
    loader: Any = None
    runs = []
    for make in (STOCK, OURS):
        seed_all()
        loader = make(dataset, 8, num_workers=2, persistent_workers=persistent)
        outer = nodes.Loader(nodes.IterableWrapper(loader))
        runs.append(([list(outer) for _ in range(3)], draws()))
    assert_same(runs[1], runs[0])
    assert batches_given(loader) == 3 * len(runs[1][0][0])


def test_resume_in_the_middle(nodes: Any) -> None:
    """A state taken after two batches leads to the third batch in a new loader; the nodes fast-forward our loader."""
    outer = nodes.Loader(nodes.IterableWrapper(OURS(torch.arange(40), 8, num_workers=2)))
    batches = iter(outer)
    first = [next(batches) for _ in range(2)]
    state = outer.state_dict()
    again = nodes.Loader(nodes.IterableWrapper(OURS(torch.arange(40), 8, num_workers=2)))
    again.load_state_dict(state)
    rest = list(again)
    assert torch.cat(first + rest).tolist() == list(range(40))
