"""Traces of loaders whose workers are at a service: each node's worker is a track, and its clock is joined."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader
from asyncloader.telemetry import spans
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


@pytest.mark.parametrize("network", ["tcp", "unix"])
@pytest.mark.parametrize("kind", ["numbers", "awaited"])
def test_workers_of_a_node(network: str, kind: str, node: NodeProcess, tmp_path: Path) -> None:
    """Each batch has its way through a node's worker, with its stages."""
    defined = definitions.numbers() if kind == "numbers" else definitions.awaited()
    found = traced(node.tcp if network == "tcp" else node.unix, tmp_path / "a.json", defined)
    assert found.ways == dict.fromkeys(found.delivered, WAY)
    assert len(found.delivered) == 20
    tasks = [found.spans[track, "tasks"] for track in found.tracks[1:]]
    assert sum(each["fetch"] + each["first_read"] for each in tasks) == 20
    assert all(" at " in track for track in found.tracks[1:])


def test_a_node_with_another_clock(node: NodeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its spans are moved to this machine's clock: between the sending of the task and the arrival of the batch."""
    original = spans.with_asked

    def an_hour_ahead(body: bytes, asked_at: Any) -> bytes:
        epoch, seq, _, begin, end, own = spans._head(body)
        moved = [
            (number, at + 3600.0, seconds) for number, at, seconds in spans._SPAN.iter_unpack(body[spans._HEAD.size :])
        ]
        head = spans._HEAD.pack(epoch, seq, 0.0, begin + 3600.0, end + 3600.0, own)
        return original(head + b"".join(spans._SPAN.pack(*each) for each in moved), asked_at)

    monkeypatch.setattr("asyncloader.service.client.remote_channel.with_asked", an_hour_ahead)
    found = traced(node.tcp, tmp_path / "a.json", definitions.numbers())
    assert found.ways == dict.fromkeys(found.delivered, WAY)
    assert sum(found.spans[track, "tasks"]["batch"] for track in found.tracks[1:]) == 20
