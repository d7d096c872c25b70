"""A page's trace: the last seconds of the trace that is on, else the next; `loader.trace()` goes before a page."""

from __future__ import annotations

import asyncio
import http.client
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from asyncloader import AsyncDataLoader, DataLoader
from asyncloader.bridge import in_thread
from asyncloader.live.client import fetch_trace
from asyncloader.tracing.recording import Recording
from tests.helpers.datasets import Numbers
from tests.helpers.recorded_seconds import Seconds
from tests.helpers.running import PATIENCE_S, run_async
from tests.helpers.trace_events import Found, read_trace

pytestmark = pytest.mark.network


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes of this user may be watched at the same time."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    """The time of recordings."""
    return Seconds(monkeypatch)


class Asked:
    """A page's request, which waits in a thread."""

    def __init__(self, board: Any) -> None:
        url = urlsplit(board.url)
        self._connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=PATIENCE_S)
        self._connection.request("POST", f"{url.path}trace?seconds=9")

    def leave(self) -> None:
        """Close the connection."""
        self._connection.close()

    def answer(self, file: Path) -> Found | None:
        """Wait for the trace; None: there is none."""
        with self._connection.getresponse() as answer:
            data = answer.read()
            status = answer.status
        self._connection.close()
        if status == 204:
            return None
        assert status == 200
        file.write_bytes(data)
        return read_trace(file)


@contextmanager
def watched(**options: Any) -> Generator[DataLoader[Any]]:
    with DataLoader[Any](Numbers(40), batch_size=4, seed=1, **options) as loader:
        loader.dashboard()
        yield loader


@pytest.mark.parametrize("workers", [0, 1])
def test_the_next_seconds(workers: int, seconds: Seconds, tmp_path: Path) -> None:
    """Are recorded where no trace is on, for all pages that ask meanwhile; then the loader records nothing."""
    with watched(num_workers=workers) as loader:
        board, statistics = loader.dashboard(), loader._asyncloader_state.statistics
        list(loader)
        first = Asked(board)
        seconds.began()
        assert statistics.trace is not None
        list(loader)
        second = Asked(board)
        seconds.began()
        seconds.passed()
        found = first.answer(tmp_path / "a.json.gz")
        assert found is not None
        assert found.delivered == [(2, seq) for seq in range(10)]
        assert found.facts["loader"] == "DataLoader"
        list(loader)
        seconds.passed()
        found = second.answer(tmp_path / "b.json.gz")
        assert found is not None
        assert found.delivered == [(run, seq) for run in (2, 3) for seq in range(10)]
        assert statistics.trace is None
        assert statistics.recorder.sink is None
        list(loader)
        with loader.trace(tmp_path / "c.json"):
            list(loader)
    assert len(read_trace(tmp_path / "c.json").delivered) == 10


def test_the_last_seconds(seconds: Seconds, tmp_path: Path) -> None:
    """Of the trace that is on come at once, and it goes on."""
    with watched(num_workers=1) as loader:
        with loader.trace(tmp_path / "run.json"):
            list(loader)
            found = Asked(loader.dashboard()).answer(tmp_path / "a.json.gz")
            assert found is not None
            assert found.ways.keys() == set(found.delivered) == {(1, seq) for seq in range(10)}
            list(loader)
        assert not seconds.begun.acquire(blocking=False)
    assert len(read_trace(tmp_path / "run.json").delivered) == 20


def test_the_programs_own_trace_goes_first(seconds: Seconds, tmp_path: Path) -> None:
    """It begins although a page has a recording, which ends there; and it has all that it would have without a page."""
    with watched(num_workers=1) as loader:
        asked = Asked(loader.dashboard())
        seconds.began()
        list(loader)
        with loader.trace(tmp_path / "run.json"):
            list(loader)
            seconds.passed()
            found = asked.answer(tmp_path / "a.json.gz")
            assert found is not None
            assert found.delivered == [(1, seq) for seq in range(10)]
            list(loader)
            with pytest.raises(RuntimeError, match=r"being traced already, to .*run\.json"):
                loader.trace(tmp_path / "b.json")
    assert read_trace(tmp_path / "run.json").delivered == [(run, seq) for run in (2, 3) for seq in range(10)]


def test_a_page_that_leaves(seconds: Seconds) -> None:
    """Ends its recording, unless another page waits for it."""
    with watched() as loader:
        statistics = loader._asyncloader_state.statistics
        first, second = Asked(loader.dashboard()), Asked(loader.dashboard())
        seconds.began()
        seconds.began()
        first.leave()
        seconds.ended()
        assert isinstance(statistics.trace, Recording)
        second.leave()
        seconds.ended()
        # The request's task ends in the loop that answers this.
        Asked(loader.dashboard()).leave()
        seconds.began()


def test_a_loader_that_ends_first(seconds: Seconds, tmp_path: Path) -> None:
    """Is not held up, and the page gets an answer."""
    with watched(num_workers=1) as loader:
        asked = Asked(loader.dashboard())
        seconds.began()
        list(loader)
    assert asked.answer(tmp_path / "a.json.gz") is None
    assert loader._asyncloader_state.statistics.trace is None


def test_by_the_socket(seconds: Seconds, tmp_path: Path) -> None:
    """As `asyncloader top --web` does, whose page another process serves; what is no loader's socket is an error."""

    async def main() -> None:
        async with AsyncDataLoader[Any](Numbers(40), batch_size=4, num_workers=1) as loader:
            path = Path(loader.dashboard().socket)
            asking = asyncio.create_task(fetch_trace(path, 5))
            await in_thread(seconds.began)
            async for _ in loader:
                pass
            seconds.passed()
            (tmp_path / "a.json.gz").write_bytes(await asking)
            asking = asyncio.create_task(fetch_trace(path, 5))
            await in_thread(seconds.began)
        with pytest.raises(OSError, match="has ended"):
            await asking
        with pytest.raises(OSError, match="cannot be read"):
            await fetch_trace(path, 5)

    run_async(main())
    assert len(read_trace(tmp_path / "a.json.gz").delivered) == 10


def test_a_forked_child(seconds: Seconds, tmp_path: Path) -> None:
    """Has no recording of its parent's, and may begin a trace of its own."""
    with watched() as loader:
        asked = Asked(loader.dashboard())
        seconds.began()
        child = os.fork()
        if not child:  # pragma: no cover - in the child
            code = 1
            try:
                with loader.trace(tmp_path / "b.json"):
                    list(loader)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        list(loader)
        seconds.passed()
        found = asked.answer(tmp_path / "a.json.gz")
        assert found is not None
        assert len(found.delivered) == 10
    assert len(read_trace(tmp_path / "b.json").delivered) == 10
