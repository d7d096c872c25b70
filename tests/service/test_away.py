"""Nodes that are away while others deliver: the epochs of a loader go on, and its workers stay where they are."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader, Service
from tests.service import definitions
from tests.service.proxy import proxied
from tests.service.serving import serving

OPTIONS: dict[str, Any] = {"batch_size": 2, "seed": 1, "num_workers": 2}


@pytest.mark.thorough
def test_a_worker_that_finds_no_node_while_another_delivers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It waits for longer than `wait`; the epoch goes on without it."""
    n = 1_000_000
    with (
        serving(tmp_path, ["numbers"], "--open", "numbers", listen=["127.0.0.1:0"]) as node,
        proxied(node.tcp) as stays,
        proxied(node.tcp) as leaves,
    ):
        service = Service(f"{stays.address},{leaves.address}", wait=0.5)
        with DataLoader[Any](definitions.numbers(n), **OPTIONS, workers=service) as loader:
            batches = iter(loader)
            list(islice(batches, 10))
            for proxy in (stays, leaves):
                proxy.refuse()
            leaves.reset()
            number = 10
            while "has been there for 3 seconds" not in caplog.text:
                assert next(batches)["index"].tolist() == [2 * number, 2 * number + 1]
                number += 1
