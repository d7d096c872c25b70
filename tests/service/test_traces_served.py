"""Traces of loaders whose workers are at a service: each node's worker is a track."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader
from tests.helpers.trace_events import Found, read_trace
from tests.service import definitions
from tests.service.serving import NodeProcess, serving

WAY = ["main_loop", "tasks", "ready_batches", "consumer"]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Generator[NodeProcess]:
    with serving(tmp_path_factory.mktemp("node"), ["numbers", "awaited"], "--open", "numbers") as made:
        yield made


def traced(address: str, file: Path, defined: Any) -> Found:
    options: dict[str, Any] = {"batch_size": 4, "seed": 5, "num_workers": 2, "workers": address}
    with DataLoader[Any](defined, **options) as loader, loader.trace(file):
        list(loader)
        list(loader)
    return read_trace(file)


@pytest.mark.parametrize("kind", ["numbers", "awaited"])
def test_workers_of_a_node(kind: str, node: NodeProcess, tmp_path: Path) -> None:
    """Each batch has its way through a worker of a node on this machine, with its stages."""
    defined = definitions.numbers() if kind == "numbers" else definitions.awaited()
    found = traced(node.unix, tmp_path / "a.json", defined)
    assert found.ways == dict.fromkeys(found.delivered, WAY)
    assert len(found.delivered) == 20
    tasks = [found.spans[track, "tasks"] for track in found.tracks[1:]]
    assert sum(each["fetch"] + each["first_read"] for each in tasks) == 20
    assert all(" at " in track for track in found.tracks[1:])


def test_workers_over_a_network(node: NodeProcess, tmp_path: Path) -> None:
    """Their batches are seen as far as the answers say."""
    found = traced(node.tcp, tmp_path / "a.json", definitions.numbers())
    assert len(found.delivered) == 20
    assert found.ways == dict.fromkeys(found.delivered, WAY)
    assert not any(found.spans[track, "tasks"]["fetch"] for track in found.tracks[1:])
