"""Descriptors and threads that worker connections leave in a node, and the end of a connection whose process lives."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from asyncloader import DataLoader
from asyncloader.service.node.admission import Refused
from asyncloader.service.node.server import Node
from asyncloader.service.protocol import frames
from asyncloader.service.protocol.connection import Link
from asyncloader.service.protocol.records import DatasetInfo
from asyncloader.workers.ipc.channel import channel_pair
from tests.helpers.comparing import assert_same
from tests.helpers.running import PATIENCE_S
from tests.processes import children_of
from tests.service import definitions
from tests.service.serving import NodeProcess, serving

OPTIONS: dict[str, Any] = {"batch_size": 4, "seed": 5, "num_workers": 8}
FEW_FILES = ["bash", "-c", 'ulimit -n 256; exec "$@"', "bash"]


def left(pid: int) -> tuple[int, int]:
    """Count the descriptors and threads of a process and of all processes that it has started."""
    proc = Path(f"/proc/{pid}")
    counts = [(len(os.listdir(proc / "fd")), len(os.listdir(proc / "task")))]  # noqa: PTH208
    counts += [left(child) for child in children_of(pid)]
    return sum(fds for fds, _ in counts), sum(threads for _, threads in counts)


def at_rest(node: NodeProcess, wanted: tuple[int, int] | None = None) -> tuple[int, int]:
    """Wait until closed worker connections are cleaned up. Returns the wanted count, or one that no longer changes."""
    deadline, counts, same = monotonic() + PATIENCE_S, (0, 0), 0
    while monotonic() < deadline and same < 50 and (wanted is None or counts > wanted):
        before, counts = counts, left(node.process.pid)
        same = same + 1 if counts == before else 0
    return counts


def test_processes_end_in_their_own_time(tmp_path: Path) -> None:
    """A node that ends waits while its processes run the functions that libraries have registered for their exit."""
    flushing = definitions.flushing(str(tmp_path))
    with serving(tmp_path, ["flushing"], "--open", "flushing") as node:
        loader = DataLoader[Any](flushing, seed=1, num_workers=2, workers=node.tcp)
        assert sum(1 for _ in loader) == 4
        loader.close()
    assert len([*tmp_path.glob("*.ended")]) == len([*tmp_path.glob("*.begun")]) == 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("place", "kind"), [("tcp", "numbers"), ("unix", "stream"), ("tcp", "drawn"), ("unix", "awaited")]
)
def test_a_hundred_worker_connections(place: str, kind: str, tmp_path: Path) -> None:
    """After many loaders, the node has at most 4 descriptors and threads more than after the third."""
    options: dict[str, Any] = {**OPTIONS, "concurrency": 4} if kind == "drawn" else OPTIONS
    with serving(tmp_path, [kind], within=FEW_FILES) as node:
        first = (0, 0)
        for epoch in range(12):
            with DataLoader[Any](getattr(definitions, kind)(), **options, workers=getattr(node, place)) as loader:
                assert sum(1 for _ in loader)
            if epoch == 2:
                first = at_rest(node)
        assert max(each - was for each, was in zip(at_rest(node, first), first, strict=True)) <= 4


@pytest.mark.parametrize("kind", ["hogging", "awaited_hogging"])
@pytest.mark.parametrize("place", ["tcp", "unix"])
def test_a_process_that_can_open_no_more_files(place: str, kind: str, tmp_path: Path) -> None:
    """Its worker connections end, and their loaders go on in other processes without waiting."""
    marks = tmp_path / "marks"
    marks.mkdir()
    options: dict[str, Any] = {"batch_size": 2, "seed": 5, "num_workers": 2, "max_worker_restarts": 0}
    served = getattr(definitions, kind)(str(marks))
    with serving(tmp_path, [kind], "--open", kind) as node:
        with DataLoader[Any](served, **options, workers=getattr(node, place)) as loader:
            got = list(loader)
        assert (marks / "hogged").exists()
        with DataLoader[Any](served, **options) as local:
            assert_same(got, list(local))
        node.kill()  # not asked to exit: without a descriptor left, uvloop's end is a traceback in the process's log


async def test_a_node_that_can_open_no_more_files() -> None:
    """It says so to the loader, which may find another node, and asks again."""
    node: Any = Node([], 1)
    ours, theirs = socket.socketpair()
    host: Any = SimpleNamespace(begun=AsyncMock(), setup=SimpleNamespace(arguments={}))
    host.open = AsyncMock(side_effect=OSError(errno.EMFILE, "Too many open files"))
    opening = SimpleNamespace(loader="loader", worker=0, credits=4)
    with ours, theirs, pytest.raises(Refused, match="ulimit -n") as caught:
        await node._open(Link(theirs), "here", host, SimpleNamespace(target="data:train"), opening, DatasetInfo())
    assert caught.value.for_now
    assert not node._quotas


async def test_a_connection_that_is_opened_while_the_node_drains() -> None:
    """Its loader is sent elsewhere at once: it would be cut off, with its tasks in work, when the node ends."""
    node: Any = Node([], 1)
    ours, theirs = socket.socketpair()
    process: list[socket.socket] = []
    closed: list[int] = []

    async def begun() -> None:
        await node.drain(PATIENCE_S)  # ends at once: there is no connection yet

    async def open_in_process(opening: Any, info: Any, make_end: Callable[..., Any]) -> tuple[int, int]:
        sock, other = channel_pair()
        process.append(other)
        make_end(sock, 7)
        return 7, 99

    setup = SimpleNamespace(arguments={})
    host = SimpleNamespace(begun=begun, open=open_in_process, setup=setup, close_connection=closed.append, kill=id)
    opening = SimpleNamespace(loader="loader", worker=0, credits=4)
    loader = Link(ours)
    await node._open(Link(theirs), "here", host, SimpleNamespace(target="data:train"), opening, DatasetInfo())
    assert [message.header.kind for message in loader.receive()] == [frames.OPENED]
    assert loader.ended
    assert closed == [7]
    assert not node.figures()["lanes"]
    assert not node._quotas
    loader.close()
    process[0].close()
