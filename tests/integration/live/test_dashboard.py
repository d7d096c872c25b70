"""The view of a loader: it follows real runs of every kind, and nothing of it is left when they end."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from asyncloader import AsyncDataLoader, DataLoader
from asyncloader.errors import LoaderClosed
from asyncloader.live.client import LoaderSocket, NotWatched, open_sockets, receive_all
from asyncloader.live.dashboard import Dashboard
from tests.helpers.datasets import Numbers
from tests.helpers.running import PATIENCE_S, await_our_threads, run_async, run_script

pytestmark = pytest.mark.network


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes of this user may be watched at the same time."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


def look(path: str) -> dict[str, Any]:
    opened = LoaderSocket(Path(path))
    receive_all([opened], PATIENCE_S)
    opened.close()
    assert opened.latest is not None
    return opened.latest


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"num_workers": 2, "multiprocessing_context": "fork"},
        pytest.param({"num_workers": 2, "multiprocessing_context": "forkserver"}, marks=pytest.mark.thorough),
        {"num_workers": 2, "workers": "threads"},
    ],
    ids=["inline", "fork", "forkserver", "threads"],
)
def test_it_follows_a_run(options: dict[str, Any]) -> None:
    """Position, workers and rings are those of the run; between epochs and after the end no worker is shown."""
    with DataLoader[Any](Numbers(40), batch_size=4, seed=1, **options) as loader:
        board = loader.dashboard()
        assert loader.dashboard() is board
        assert look(board.socket)["place"] == "not iterated yet"
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        found = look(board.socket)
        assert found["place"] == "epoch 0, 3 of 10 batches delivered"
        assert found["totals"]["batches"] == 3
        assert found["pid"] == os.getpid()
        assert [each["worker"] for each in found["workers"]] == [*range(options["num_workers"])]
        for each in found["workers"]:
            assert bool(each["slots"]) == (options.get("workers") != "threads")
            assert 0 <= each["slots_in_use"] <= each["slots"]
        assert "<title>asyncloader</title>" in fetch(board.url)
        assert len([*batches]) == 7
        assert look(board.socket)["place"] == "epoch 0, finished"
        assert not look(board.socket)["workers"]
    assert not board.open
    with pytest.raises(NotWatched, match="No such file"):
        LoaderSocket(Path(board.socket))
    with pytest.raises(urllib.error.URLError):
        fetch(board.url)
    with pytest.raises(LoaderClosed):
        loader.dashboard()


@pytest.mark.parametrize("make", [DataLoader, AsyncDataLoader])
def test_threads_that_ask_at_the_same_time(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Get the same view, with one page; and a child that is forked meanwhile can open its own."""
    loader: Any = make(Numbers(8))
    entered, go, begin = threading.Event(), threading.Event(), Dashboard.__init__

    def held_up(self: Any, *given: Any) -> None:
        entered.set()
        assert go.wait(PATIENCE_S)
        begin(self, *given)

    monkeypatch.setattr(Dashboard, "__init__", held_up)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(loader.dashboard)
        assert entered.wait(PATIENCE_S)
        second = threads.submit(loader.dashboard)
        if not (child := os.fork()):
            signal.alarm(30)
            monkeypatch.undo()
            os._exit(0 if loader.dashboard().open else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        go.set()
        assert first.result() is second.result()
    assert "<title>asyncloader</title>" in fetch(first.result().url)
    loader.close()
    assert not first.result().open


def test_a_loader_that_is_closed_while_its_view_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The view is closed, and the thread that asked for it is told why."""
    loader, made, begin = DataLoader[Any](Numbers(8)), list[Dashboard](), Dashboard.__init__

    def closing(self: Any, *given: Any) -> None:
        loader.close()
        begin(self, *given)
        made.append(self)

    monkeypatch.setattr(Dashboard, "__init__", closing)
    with pytest.raises(LoaderClosed):
        loader.dashboard()
    assert [each.open for each in made] == [False]


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_an_async_loader(kind: str) -> None:
    """Has the same view, which ends with `aclose`; persistent workers are shown between epochs, too."""

    async def main() -> None:
        options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "seed": 1}
        async with AsyncDataLoader[Any](Numbers(40), batch_size=4, **options) as loader:
            board = loader.dashboard()
            async for _ in loader:
                pass
            found = look(board.socket)
            assert found["name"] == "AsyncDataLoader of Numbers"
            assert [each["activity"] for each in found["workers"]] == ["idle: it has no task"] * 2
        assert not board.open

    run_async(main(), kind)


def test_a_loader_that_is_dropped() -> None:
    """Is freed although it is watched, also as part of a cycle, and its thread and socket go with it."""
    loader = DataLoader[Any](Numbers(8))
    board = loader.dashboard()
    opened = LoaderSocket(Path(board.socket))
    receive_all([opened], PATIENCE_S)
    loader.cycle = loader
    del loader
    gc.collect()
    await_our_threads()
    while not opened.ended:
        opened.receive()
    opened.close()
    assert not board.open
    assert not Path(board.socket).exists()
    board.close()


def test_it_is_closed_before_the_loader() -> None:
    """The loader goes on, and can be watched again, at another address."""
    with DataLoader[Any](Numbers(8), num_workers=1) as loader:
        first = loader.dashboard()
        batches = iter(loader)
        next(batches)
        first.close()
        assert repr(first) == "<Dashboard, closed>"
        assert len([*batches]) == 7
        second = loader.dashboard()
        assert second is not first
        assert second.url != first.url
        assert second.url in second._repr_html_()


def test_a_forked_child_has_no_view() -> None:
    """Its copies of the sockets are let go, so that readers see the end; its own loader may open its own view."""
    with DataLoader[Any](Numbers(8)) as loader:
        board = loader.dashboard()
        opened = LoaderSocket(Path(board.socket))
        receive_all([opened], PATIENCE_S)
        waits, ends = os.pipe()
        child = os.fork()
        if not child:  # pragma: no cover - in the child
            code = 1
            try:
                os.close(ends)
                own = loader.dashboard()
                good = not board.open and own.url != board.url and look(own.socket)["pid"] == os.getpid()
                board.close()
                loader.close()
                os.read(waits, 1)  # until the parent has seen the end
                code = int(not good)
            finally:
                os._exit(code)
        os.close(waits)
    while not opened.ended:
        opened.receive()
    opened.close()
    os.close(ends)
    assert os.waitpid(child, 0)[1] == 0


def test_only_what_is_asked_for(tmp_path: Path) -> None:
    """A loader has no thread and no socket for its view before, and none of its code is imported."""
    done = run_script(
        tmp_path,
        """
        import sys, threading
        from asyncloader import DataLoader
        with DataLoader(range(8), batch_size=2) as loader:
            assert len([*loader]) == 4
            assert threading.active_count() == 1
            assert not {name for name in sys.modules if "asyncloader.live." in name}
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """ASYNCLOADER_TOP opens the socket, and no port, at `iter()`; a failure there does not end the run."""
    monkeypatch.setenv("ASYNCLOADER_TOP", "1")
    with DataLoader[Any](Numbers(8), num_workers=1) as loader:
        batches = iter(loader)
        (opened,) = open_sockets(None)
        receive_all([opened], PATIENCE_S)
        opened.close()
        assert opened.latest is not None
        assert opened.latest["name"] == "DataLoader of Numbers"
        board = loader._asyncloader_state._view
        assert board is not None
        assert not board.url
        assert len([*batches]) == 8
        opened.path.parent.chmod(0o755)
    with DataLoader[Any](Numbers(8)) as loader:
        assert len([*loader]) == 8
        with pytest.raises(PermissionError, match="chmod 700"):
            loader.dashboard()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("asyncloader")]


@pytest.mark.parametrize("ending", ["pass", "sys.exit(0)", "iterator = iter(loader); next(iterator)"])
def test_a_process_that_exits(ending: str, tmp_path: Path) -> None:
    """Ends by itself, without a word, and leaves no socket behind."""
    done = run_script(
        tmp_path,
        f"""
        import sys, tempfile
        from asyncloader import DataLoader
        tempfile.tempdir = {str(tmp_path)!r}
        if __name__ == "__main__":
            loader = DataLoader(range(8), batch_size=2, num_workers=1)
            board = loader.dashboard()
            {ending}
        """,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not [*tmp_path.glob("*/*.sock")]


def test_the_table_for_notebooks() -> None:
    """Has the figures and the verdict of the run, once there is one."""
    with DataLoader[Any](Numbers(40), batch_size=4) as loader:
        assert "verdict" not in loader._repr_html_()
        assert len([*loader]) == 10
        assert "<th>delivered</th><td>10 batches, 40 samples</td>" in loader._repr_html_()
        assert "<th>verdict</th><td>" in loader._repr_html_()
        json.dumps(loader._repr_html_())


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    """Does not keep the loader, and all else that it has, from being closed."""
    with DataLoader[Any](Numbers(8), num_workers=1) as loader:
        board = loader.dashboard()
        shutil.rmtree(Path(board.socket).parent)
        Path(board.socket).parent.touch()
        assert len([*loader]) == 8
    assert not board.open


def test_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A run that is watched by its environment goes on unwatched, and the log says why."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setenv("ASYNCLOADER_TOP", "1")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert len([*DataLoader[Any](Numbers(8))]) == 8
    assert "cannot be watched: can't start new thread" in caplog.text
