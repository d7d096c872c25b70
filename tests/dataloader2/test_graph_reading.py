"""The page of a DataLoader2, `asyncloader top`, its progress bar, and its figures for exporters."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from asyncloader.__main__ import main
from asyncloader.dataloader2 import DataLoader2, MultiProcessingReadingService
from asyncloader.errors import LoaderClosed
from asyncloader.integrations.exported import ExportedLoaders
from asyncloader.live.client import open_sockets
from tests.dataloader2.parts import OnlyHere, as_tensor, double, fails_at_5, numbers, process
from tests.helpers.running import PATIENCE_S
from tests.helpers.trace_events import read_trace

pytestmark = [pytest.mark.network, pytest.mark.filterwarnings("ignore:This DataLoader will create")]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes of this user may be watched at the same time."""
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))


def workers(number: int) -> MultiProcessingReadingService:
    return MultiProcessingReadingService(number, multiprocessing_context="fork", main_prefetch_cnt=0)


def look(url: str) -> Any:
    """The figures that a page gets first."""
    with urllib.request.urlopen(f"{url}events", timeout=PATIENCE_S) as events:
        return json.loads(events.readline().removeprefix(b"data: "))


OF_SAMPLES = {"samples", "skipped_samples", "worker_retirements"}
OF_WORKERS = {"bytes", "queue_depth", "worker_restarts", "ring_copies", "oversize_batches"}


@pytest.mark.parametrize("number", [0, 2])
def test_the_page_follows_a_run(number: int) -> None:
    """It has the position, the workers by their numbers in the graph, and no figure that a graph does not have; the
    socket and the page end with the loader.
    """
    graph = numbers(40).sharding_filter().map(as_tensor)
    with DataLoader2[Any](graph, reading_service=workers(number) if number else None) as loader:
        board = loader.dashboard()
        assert loader.dashboard() is board
        before = look(board.url)
        assert (before["name"], before["place"]) == ("DataLoader2 of Mapper", "not iterated yet")
        items = iter(loader)
        for _ in range(30):
            next(items)
        found = look(board.url)
        assert (found["place"], found["unit"], found["state"]) == (
            "30 items of this epoch delivered",
            "items",
            "running",
        )
        assert found["totals"]["batches"] == 30
        assert found["rates"]["batches_per_s"] > 0
        assert not OF_SAMPLES & found["totals"].keys()
        assert OF_WORKERS & found["totals"].keys() == (OF_WORKERS if number else set())
        assert [each["worker"] for each in found["workers"]] == [*range(number)]
        assert len({each["place"] for each in found["workers"]}) == number
        assert (found["store"] is None) == (not number)
        assert {"wait", "fetch"} <= {each["stage"] for each in found["stages"]}
        assert found["verdict"]["change"] == {}
        assert len(list(items)) == 10
        assert look(board.url)["place"] == "between two epochs"
        table = loader._repr_html_()
        assert "<th>delivered</th><td>40 items</td>" in table
        assert "<th>position</th><td>between two epochs</td>" in table
    assert not board.open
    with pytest.raises(urllib.error.URLError):
        look(board.url)
    with pytest.raises(LoaderClosed):
        loader.dashboard()


def test_a_page_gets_a_trace(tmp_path: Path) -> None:
    """Of the graph's last seconds, where its trace is on."""
    with DataLoader2[Any](numbers(8)) as loader, loader.trace(tmp_path / "a.json"):
        list(loader)
        request = urllib.request.Request(f"{loader.dashboard().url}trace?seconds=10", method="POST")
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            (tmp_path / "b.json.gz").write_bytes(answer.read())
    assert read_trace(tmp_path / "b.json.gz").delivered == [(1, seq) for seq in range(8)]


@pytest.mark.parametrize("number", [0, 2])
def test_by_the_environment(number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`asyncloader top` lists one loader, also of a graph whose workers have loaders of their own; and they are forked
    before there is a thread for it.
    """
    monkeypatch.setenv("ASYNCLOADER_TOP", "1")
    graph = numbers(40).sharding_filter()
    with DataLoader2[Any](graph, reading_service=workers(number) if number else None) as loader:
        items = iter(loader)
        next(items)
        (opened,) = open_sockets(None)
        opened.close()
        main(["top"])
        lines = capsys.readouterr().out
        assert "DataLoader2 of ShardingFilter, process " in lines
        assert "1 items of this epoch delivered" in lines
        assert "1 items\n" in lines
        assert "samples" not in lines
        assert lines.count("slots in use") == number
        assert len(list(items)) == 39
        main(["top", "--json"])
        (found,) = json.loads(capsys.readouterr().out)["loaders"]
        assert found["totals"]["batches"] == 40


def test_a_worker_that_is_killed(tmp_path: Path) -> None:
    """In the middle of a graph with parts behind it, while the page is open and a trace on: its row and its track are
    those of the new process, and no item is missing or comes twice.
    """
    graph = OnlyHere(numbers(60).sharding_filter().map(process)).map(double_first)
    with DataLoader2[Any](graph, reading_service=workers(2)) as loader, loader.trace(tmp_path / "a.json"):
        board = loader.dashboard()
        items = iter(loader)
        found = [next(items) for _ in range(2)]
        os.kill(found[1][1], signal.SIGKILL)
        with pytest.warns(RuntimeWarning):
            found += items
        rows = look(board.url)["workers"]
        assert [x for x, _ in found] == [2 * x for x in range(60)]
        assert [each["place"] for each in rows] == [f"pid {pid}" for pid in (found[0][1], found[-1][1])]
        assert look(board.url)["totals"]["worker_restarts"] == 1
        assert loader.stats()["data/batches"] == 60
    events = read_trace(tmp_path / "a.json").events
    assert len(events["worker died"]) == len(events["worker replaced"]) == 1


def double_first(pair: tuple[int, int]) -> tuple[int, int]:
    return 2 * pair[0], pair[1]


def test_a_graph_that_raises() -> None:
    """Ends the loader: its page says so, until the loader is shut down."""
    loader = DataLoader2[Any](numbers(8).map(fails_at_5))
    board = loader.dashboard()
    with pytest.raises(ValueError, match="five is right out"):
        list(loader)
    found = look(board.url)
    assert (found["state"], found["place"], found["totals"]["batches"]) == ("closed", "shut down", 5)
    assert "shut down" in loader._repr_html_()
    loader.shutdown()
    loader.shutdown()
    assert not board.open


def test_exporters_get_what_a_graph_has() -> None:
    """Beside the loaders of another kind; what only workers count is exported once there are workers."""
    with DataLoader2[Any](numbers(8).sharding_filter(), reading_service=workers(1)) as loader:
        plain = DataLoader2[Any](numbers(3))
        exported = ExportedLoaders({"graph": loader, "plain": plain})
        list(loader)
        found = exported.metrics()
    values = {each.labels["loader"]: each.value for each in found["asyncloader_data_batches"].samples}
    assert values == {"graph": 8, "plain": 0}
    assert [each.labels["loader"] for each in found["asyncloader_store_requests"].samples] == ["graph"]
    assert "asyncloader_data_skipped_samples" not in found


def test_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar counts items, by ``for`` and ``async for``, and begins where the loader resumes."""
    shown: list[Any] = []

    class Bar:
        format_dict: Any = property(lambda bar: {"unit": bar.unit})

        def __init__(self, *, desc: str, total: int | None, initial: int, unit: str, **_: Any) -> None:
            shown.append([desc, total, initial, unit])
            self.unit = unit

        def update(self) -> None:
            shown[-1][2] += 1
            assert self.format_dict["postfix"].startswith("waits ")

        def close(self) -> None:  # idempotent, as tqdm's
            shown[-1][4:] = ["closed"]

    monkeypatch.setattr("tqdm.tqdm", Bar)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    graph = numbers(8).map(double)
    with DataLoader2[Any](graph) as loader:
        assert list(loader.progress()) == [2 * x for x in range(8)]
        items = iter(loader)
        next(items)
        state = loader.state_dict()
    loader = DataLoader2[Any](None)
    loader.load_state_dict(state)

    async def load() -> list[Any]:
        async with loader:
            return [item async for item in loader.progress()]

    assert asyncio.run(load()) == [2 * x for x in range(1, 8)]
    assert shown == [["DataLoader2", None, 8, "item", "closed"]] * 2
