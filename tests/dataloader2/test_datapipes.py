"""Our functional forms, their registration beside other libraries' forms, and the old import path."""

from __future__ import annotations

import asyncio
import gc
import importlib
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

import asyncloader.dataloader2
from asyncloader.dataloader2 import DataLoader2, compat
from asyncloader.dataloader2.datapipes import Prefetcher
from asyncloader.dataloader2.datapipes.async_map import await_parts
from asyncloader.dataloader2.datapipes.forms import has_form, is_replicable
from tests import script_server
from tests.dataloader2.parts import (
    MP,
    OnlyHere,
    Unreadable,
    async_fails_at_5,
    double,
    fails_at_5,
    numbers,
    slow_double,
    ticking,
)
from tests.helpers.running import PATIENCE_S, ROOT, environment


class Counting(IterDataPipe[int]):
    """Counts the items read, and lets a test wait for them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read = 0
        self.more = threading.Condition()

    def __iter__(self) -> Iterator[int]:
        for x in range(self.count):
            with self.more:
                self.read += 1
                self.more.notify_all()
            yield x

    def wait_for(self, read: int) -> None:
        with self.more:
            assert self.more.wait_for(lambda: self.read >= read, timeout=60)


def test_prefetch_reads_ahead() -> None:
    """It reads until its buffer is full; each epoch starts again; a dropped iterator ends the thread."""
    source = Counting(20)
    graph = source.prefetch(3)
    iterator = iter(graph)
    assert next(iterator) == 0
    source.wait_for(4)
    assert list(iterator) == list(range(1, 20))
    assert source.read == 20
    assert len(numbers(5).prefetch()) == 5
    iterator = iter(graph)
    assert [next(iterator), next(iterator)] == [0, 1]
    assert list(graph) == list(range(20))
    for bad in (0, -1):
        with pytest.raises(ValueError, match=r"^'buffer_size' is required to be a positive integer"):
            numbers(1).prefetch(bad)


def test_prefetch_pauses() -> None:
    """Nothing is read while it is paused."""
    source = Counting(20)
    graph = source.prefetch(2)
    iterator = iter(graph)
    next(iterator)
    source.wait_for(3)
    graph.pause()
    assert [next(iterator), next(iterator)] == [1, 2]
    with source.more:
        assert not source.more.wait_for(lambda: source.read > 3, timeout=0.05)
    graph.resume()
    assert list(iterator) == list(range(3, 20))
    graph.shutdown()
    graph.shutdown()


class Held:
    """Returns 0 at once, and other items once the test allows it."""

    def __init__(self) -> None:
        self.begun, self.gate = threading.Event(), threading.Event()

    def __call__(self, x: int) -> int:
        if x:
            self.begun.set()
            assert self.gate.wait(60)
        return x


def test_a_pause_waits_for_the_item_that_is_being_read() -> None:
    """Afterwards the source is left alone: a state of it can be saved."""
    held = Held()
    graph = numbers(3).map(held).prefetch(2)
    iterator = iter(graph)
    assert next(iterator) == 0
    assert held.begun.wait(60)
    with ThreadPoolExecutor(1) as threads:
        pausing = threads.submit(graph.pause)
        assert not wait([pausing], 0.05).done
        held.gate.set()
        pausing.result(60)
    graph.resume()
    assert list(iterator) == [1, 2]


def test_prefetch_raises_where_the_item_would_come() -> None:
    """An error is raised after the items before it."""
    iterator = iter(numbers(9).map(fails_at_5).prefetch(8))
    assert [next(iterator) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="five"):
        next(iterator)


def test_round_robin_demux() -> None:
    """Item ``i`` goes to reader ``i % n``, in every epoch; the buffer has its limits."""
    readers = numbers(7).round_robin_demux(3)
    for _ in range(2):
        assert [list(each) for each in readers] == [[0, 3, 6], [1, 4], [2, 5]]
    graph = numbers(4)
    assert graph.round_robin_demux(1) == [graph]
    assert [list(each) for each in numbers(5000).round_robin_demux(2, buffer_size=-1)][1] == list(range(1, 5000, 2))
    with pytest.raises(BufferError, match="buffer overflow"):
        list(numbers(5000).round_robin_demux(2)[0])
    with pytest.raises(ValueError, match="Expected `num_instances` larger than 0, but 0 is found"):
        numbers(4).round_robin_demux(0)
    with pytest.raises(ValueError, match="Expected `buffer_size` larger than 0"):
        numbers(4).round_robin_demux(2, buffer_size=0)


def test_dispatch_form() -> None:
    """The form changes nothing without workers; it accepts no other priority than the workers'."""
    graph = numbers(4).sharding_round_robin_dispatch(MP)
    assert (list(graph), len(graph)) == ([0, 1, 2, 3], 4)
    for other in (SHARDING_PRIORITIES.DISTRIBUTED, None):
        with pytest.raises(NotImplementedError, match=r"only supports `SHARDING_PRIORITIES.MULTIPROCESSING`"):
            numbers(4).sharding_round_robin_dispatch(other)


class Gate:
    """Counts the calls in flight; each call waits until the wanted number was in flight."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.now = self.most = 0
        self.reached = asyncio.Event()

    async def __call__(self, x: int) -> int:
        self.now += 1
        self.most = max(self.most, self.now)
        if self.most >= self.wanted:
            self.reached.set()
        await self.reached.wait()
        self.now -= 1
        return x


def test_amap_keeps_calls_in_flight_in_order() -> None:
    """`concurrency` calls are in flight: with fewer the test would wait for ever. Results have the items' order."""
    gate = Gate(5)
    assert list(numbers(20).amap(gate, concurrency=5)) == list(range(20))
    assert gate.most == 5
    assert len(numbers(3).amap(slow_double)) == 3
    with pytest.raises(ValueError, match="concurrency must be at least 1, not 0"):
        numbers(3).amap(slow_double, concurrency=0)


def test_amap_raises_where_the_result_would_come() -> None:
    """An error is raised in its item's place."""
    iterator = iter(numbers(9).amap(async_fails_at_5, concurrency=4))
    assert [next(iterator) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="five"):
        next(iterator)


def _cancels(x: int) -> Any:
    raise asyncio.CancelledError


def test_amap_gives_what_came_before_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """An error of its source is raised after the results before it; the error for a plain function names it; errors
    of calls whose result is never read are not logged.
    """
    iterator = iter(numbers(9).map(fails_at_5).amap(slow_double, concurrency=9))
    assert [next(iterator) for _ in range(5)] == [0, 2, 4, 6, 8]
    with pytest.raises(ValueError, match="five"):
        next(iterator)
    with pytest.raises(TypeError, match=r"^`amap` needs a coroutine function, and .*double.* returned int: use `map`"):
        list(numbers(9).amap(double))
    with pytest.raises(RuntimeError, match="a call of `amap` raised CancelledError"):
        list(numbers(9).amap(_cancels))
    gc.collect()
    assert not caplog.records


def test_amap_of_a_source_that_cannot_begin() -> None:
    """The event loop's thread ends."""
    with pytest.raises(ValueError, match="cannot begin"):
        list(Unreadable(ValueError).amap(slow_double))
    assert not [thread for thread in threading.enumerate() if thread.name == "asyncloader-loop"]


class _Cancelled(IterDataPipe[int]):
    async def __aiter__(self) -> AsyncIterator[int]:
        yield 0
        raise asyncio.CancelledError


def test_an_awaited_part_that_raises_cancelled_error() -> None:
    """It is an error of the graph, after the items before it, and no cancellation of its reader."""
    kind: Any = _Cancelled  # without `__iter__` it is abstract to type checkers
    iterator = iter(await_parts(kind()))
    assert next(iterator) == 0
    with pytest.raises(RuntimeError, match="raised CancelledError"):
        next(iterator)


def run_alone(script: str) -> tuple[int, str, str]:
    """Run a program in a process of its own. Returns its exit code, output and errors."""
    ran = script_server.run([sys.executable, "-c", script], env=environment(), cwd=ROOT, timeout=PATIENCE_S)
    return ran.returncode, ran.stdout, ran.stderr


def test_an_unfinished_awaited_part_at_the_end_of_the_program() -> None:
    """The program ends, with its own exit code and no other error."""
    script = (
        "import asyncloader.dataloader2\n"
        "from asyncloader.dataloader2.datapipes.async_map import await_parts\n"
        "from tests.dataloader2.parts import ticking\n"
        "items = iter(await_parts(ticking(9)))\n"
        "next(items)\n"
        "raise SystemExit(3)\n"
    )
    assert run_alone(script) == (3, "", "")


def test_an_awaited_part_in_a_forked_child() -> None:
    """The child drops it without an error, and the parent reads on."""
    script = (
        "import os, warnings\n"
        "warnings.simplefilter('ignore', DeprecationWarning)\n"  # of a fork beside threads, from Python 3.12 on
        "import asyncloader.dataloader2\n"
        "from asyncloader.dataloader2.datapipes.async_map import await_parts\n"
        "from tests.dataloader2.parts import ticking\n"
        "items = iter(await_parts(ticking(3)))\n"
        "next(items)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    del items\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print(list(items))\n"
    )
    assert run_alone(script) == (0, "[1, 2]\n", "")


@pytest.mark.parametrize("fails", [False, True])
def test_amap_cancels_the_calls_in_flight(fails: bool) -> None:
    """An error of another call does, and so does dropping the iterator."""
    cancelled = threading.Event()

    async def wait_for_cancellation(x: int) -> int:
        if x == 0:
            return x
        if x == 1 and fails:
            raise ValueError("one")
        try:
            return int(await asyncio.get_running_loop().create_future())
        except asyncio.CancelledError:
            cancelled.set()
            raise

    iterator = iter(numbers(9).amap(wait_for_cancellation, concurrency=4))
    assert next(iterator) == 0
    if fails:
        with pytest.raises(ValueError, match="one"):
            next(iterator)
    del iterator
    assert cancelled.wait(PATIENCE_S)


def test_awaited_parts_are_wrapped_once() -> None:
    """Wrapping again changes nothing; the graph can be read twice, and left in the middle."""
    graph: Any = await_parts(ticking(5).map(double))
    assert await_parts(graph) is graph
    assert [list(graph), list(graph)] == [[0, 2, 4, 6, 8]] * 2
    iterator = iter(graph)
    next(iterator)
    del iterator


class Other(IterDataPipe[Any]):
    def __init__(self, source: Any, *_: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        yield from self.source


@pytest.fixture
def registered() -> Iterator[None]:
    """Another library registers two of our names, after us."""
    IterDataPipe.register_datapipe_as_function("prefetch", Other)
    IterDataPipe.register_datapipe_as_function("sharding_round_robin_dispatch", Other)
    yield
    for name in ("prefetch", "sharding_round_robin_dispatch"):
        del IterDataPipe.functions[name]


def test_a_name_that_others_register_is_theirs(registered: None) -> None:
    """Registering a name after us works; the form then makes their class; both classes are recognized by the name."""
    assert type(numbers(3).prefetch(2)) is Other
    assert has_form(numbers(3).prefetch(2), "prefetch")
    assert has_form(Prefetcher(numbers(3)), "prefetch")
    assert has_form(numbers(3).sharding_round_robin_dispatch(MP), "sharding_round_robin_dispatch")
    assert not has_form(numbers(3), "prefetch")
    assert is_replicable(numbers(3))
    assert not is_replicable(OnlyHere(numbers(3)))
    with DataLoader2[int](
        numbers(6).sharding_round_robin_dispatch(MP).map(double),
        reading_service=asyncloader.dataloader2.MultiProcessingReadingService(2),
    ) as loader:
        assert list(loader) == [0, 2, 4, 6, 8, 10]


def test_nothing_is_registered_without_the_package() -> None:
    """`import asyncloader` and its loader do not import it; the package registers the forms, and prints nothing."""
    script = (
        "import sys, asyncloader; asyncloader.DataLoader\n"
        "from torch.utils.data.datapipes.iter import IterableWrapper\n"
        "assert 'asyncloader.dataloader2' not in sys.modules\n"
        "assert not hasattr(IterableWrapper([]), 'prefetch')\n"
        "import asyncloader.dataloader2\n"
        "assert list(IterableWrapper([1]).prefetch()) == [1]\n"
    )
    assert run_alone(script) == (0, "", "")


@pytest.mark.parametrize("torchdata", ["none", "without", "with"])
def test_the_old_import_path(torchdata: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between `install` and `uninstall`, both idempotent, the old names give our modules, unless an installed torchdata
    has them. Before and after they cannot be imported.
    """
    package = tmp_path / "torchdata"
    for name in {"none": [], "without": ["."], "with": [".", "dataloader2", "datapipes"]}[torchdata]:
        (package / name).mkdir(parents=True, exist_ok=True)
        (package / name / "__init__.py").touch()
    # Without the torchdata that is installed for other tests.
    others = [each for each in sys.path if not Path(each, "torchdata").exists()]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *others])
    importlib.invalidate_caches()
    names = ("torchdata.dataloader2", "torchdata.datapipes")
    compat.install()
    compat.install()
    try:
        loader2, datapipes = map(importlib.import_module, names)
        if torchdata == "with":
            assert [each.__file__ for each in (loader2, datapipes)] == [
                str(package / name / "__init__.py") for name in ("dataloader2", "datapipes")
            ]
            return
        assert loader2 is asyncloader.dataloader2
        for name in ("graph", "adapter", "random", "reading_service", "utils", "utils.dispatch", "error", "linter"):
            module = importlib.import_module(f"torchdata.dataloader2.{name}")
            assert module is importlib.import_module(f"asyncloader.dataloader2.{name}")
        assert loader2.__spec__ is not None
        assert loader2.__spec__.name == "asyncloader.dataloader2"
        assert datapipes.iter.IterableWrapper is IterableWrapper
        assert datapipes.iter.Prefetcher is Prefetcher
        assert [len(datapipes.iter.UnZipper(numbers(0), 2)), datapipes.map.__all__[-1]] == [2, "Zipper"]
        for name in (f"{name}.nonsense" for name in names):
            with pytest.raises(ModuleNotFoundError):
                importlib.import_module(name)
    finally:
        compat.uninstall()
        compat.uninstall()
        left = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("torchdata")}
        assert list(left) == {"none": [], "without": ["torchdata"], "with": ["torchdata", *names]}[torchdata]
    assert [name for name in ("dataloader2", "datapipes") if left and hasattr(left["torchdata"], name)] == []
    for name in names:
        with pytest.raises(ImportError):
            importlib.import_module(name)
    sys.modules.pop("torchdata", None)
