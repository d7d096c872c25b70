"""Caches of a graph: in memory and in files, shared by processes, with a writer that dies, and their errors."""

from __future__ import annotations

import hashlib
import io
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

import asyncloader.dataloader2
from asyncloader.dataloader2 import DataLoader2, MultiProcessingReadingService
from asyncloader.dataloader2.adapter import CacheTimeout, InvalidateCache
from asyncloader.dataloader2.datapipes.cache_files import _lock, claim
from asyncloader.dataloader2.datapipes.cache_in_memory import InMemoryCacheHolder
from tests import script_server
from tests.dataloader2.parts import MP, OnlyHere, double, numbers
from tests.helpers.running import ROOT, environment

_ = asyncloader.dataloader2  # registers the forms


class Reads(IterDataPipe[Any]):
    """A part that counts the items read."""

    def __init__(self, items: Any) -> None:
        self.items = items
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            self.read += 1
            yield item


def test_in_memory() -> None:
    """The source is read once; the items of an epoch that was left are not kept; kept items are not pickled."""
    source = Reads(range(5))
    graph = source.in_memory_cache()
    with pytest.raises(TypeError, match="doesn't have valid length until the cache is loaded"):
        len(graph)
    iterator = iter(graph)
    assert [next(iterator), next(iterator)] == [0, 1]
    assert [list(graph) for _ in range(3)] == [[0, 1, 2, 3, 4]] * 3
    assert (source.read, len(graph)) == (7, 5)
    with DataLoader2[int](graph) as loader:
        assert loader.datapipe is not None
        assert loader.datapipe.cache is None
        assert list(loader) == list(range(5))


@given(st.lists(st.integers(0, 3)), st.integers(0, 5))
def test_in_memory_up_to_a_size(lengths: list[int], limit: int) -> None:
    """The last items that fit are kept, and every epoch gives all items."""
    items = [np.zeros(length, np.uint8) + number for number, length in enumerate(lengths)]
    source = Reads(items)
    graph = InMemoryCacheHolder(source, size=limit / (1 << 20))
    for _ in range(3):
        assert all(found is item for found, item in zip(graph, items, strict=True))
    assert sum(item.nbytes for item in graph.cache or ()) <= limit
    kept = len(graph.cache or ())
    assert kept == len(items) or sum(lengths[len(items) - kept - 1 :]) > limit


def test_sizes_in_memory() -> None:
    """Tensors count by their elements, also within other objects."""
    items = [{"x": [torch.zeros(1 << 18)]}, (torch.zeros(1 << 18),), "y"]
    graph: Any = IterableWrapper(items, deepcopy=False).in_memory_cache(size=1.5)
    assert (len(list(graph)), graph.idx) == (3, 1)
    itself: list[Any] = [torch.ones(1 << 18).to_sparse()]  # indices have 8 bytes
    itself.append(itself)
    graph = IterableWrapper([itself, 1], deepcopy=False).in_memory_cache(size=2.5)
    assert (len(list(graph)), graph.idx) == (2, 1)


def in_folder(folder: Path, item: Any) -> str:
    return str(folder / "cached" / f"{item}.txt")


def logged(folder: Path, item: Any) -> tuple[str, bytes]:
    """Make the content of an item, and record that in a file."""
    with (folder / "made").open("a") as log:
        log.write(f"{item}\n")
    return in_folder(folder, item), f"content of {item}".encode()


def cached(folder: Path, source: Any, **options: Any) -> Any:
    made = source.on_disk_cache(filepath_fn=partial(in_folder, folder)).map(partial(logged, folder))
    return made.end_caching(skip_read=True, **options)


def made(folder: Path) -> list[str]:
    return (folder / "made").read_text().splitlines() if (folder / "made").exists() else []


def left_over(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.suffix in (".part", ".asyncloader_claim")]


def test_each_item_is_written_once(tmp_path: Path) -> None:
    """Paths are given in the items' order, whatever is cached; duplicates and later epochs make no item again."""
    (tmp_path / "cached").mkdir()
    (tmp_path / "cached" / "2.txt").write_text("before")
    graph = cached(tmp_path, IterableWrapper([3, 2, 1, 3]))
    expected = [in_folder(tmp_path, x) for x in (3, 2, 1, 3)]
    assert [list(graph), list(graph)] == [expected] * 2
    assert made(tmp_path) == ["3", "1"]
    assert [Path(path).read_text() for path in expected[:3]] == ["content of 3", "before", "content of 1"]
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("sharded", [True, False])
def test_workers_share_the_files(tmp_path: Path, sharded: bool) -> None:
    """Each item is written by one worker, even if all workers need it."""
    source = numbers(12).sharding_filter() if sharded else numbers(12)
    with DataLoader2[str](cached(tmp_path, source), None, MultiProcessingReadingService(2)) as loader:
        expected = [in_folder(tmp_path, x) for x in range(12) for _ in range(1 if sharded else 2)]
        assert [list(loader), list(loader)] == [expected] * 2
    assert sorted(made(tmp_path), key=int) == [str(x) for x in range(12)]


def several(folder: Path, item: int) -> Any:
    """Return the item's files, whose number is the item."""
    return [(str(folder / "cached" / f"{item}-{part}"), io.BytesIO(b"%d" % part)) for part in range(item)]


def below(folder: Path, name: str, path: str) -> str:
    """Return a path in the folder `name`, with the file name of `path`, or without one if that has no suffix."""
    return str(folder / name / (Path(path).name if Path(path).suffix else ""))


def opened(path: str) -> tuple[str, Any]:
    return path, Path(path).open("rb")


def test_one_item_many_files(tmp_path: Path) -> None:
    """Files are listed beside the item as by torchdata: no file, one file with another name, several files; a lost
    file is made again.
    """
    cache: Any = numbers(4).on_disk_cache(filepath_fn=partial(in_folder, tmp_path))
    made_of = Reads(cache.map(partial(several, tmp_path)))
    graph = made_of.unbatch().end_caching()
    files = [str(tmp_path / "cached" / f"{item}-{part}") for item in range(4) for part in range(item)]
    assert [list(graph), list(graph)] == [files] * 2
    assert made_of.read == 5  # the item without files, in each epoch
    listed = Path(in_folder(tmp_path, 3) + ".torchdata_list")
    assert listed.read_text().splitlines() == files[3:]
    Path(files[-1]).unlink()
    assert (list(graph), made_of.read) == (files, 7)
    assert Path(files[-1]).read_bytes() == b"2"
    twice = numbers(2, 2).on_disk_cache(partial(in_folder, tmp_path / "b")).map(partial(several, tmp_path)).unbatch()
    with pytest.raises(ValueError, match=r"two files of .*2\.txt have the same path: .*x"):
        list(twice.end_caching(filepath_fn=partial(below, tmp_path / "x", "y")))


def into(folder: Path, name: str) -> list[tuple[str, bytes]]:
    return [(str(folder / name / f"{part}\udcff"), b"x") for part in range(2)]


def under(folder: Path, name: str) -> str:
    return str(folder / name)


def test_files_in_a_folder_of_the_items_name(tmp_path: Path) -> None:
    """The folder is not taken for a cached file, while it is written or after a loss. Names need not be UTF-8."""
    cache: Any = IterableWrapper(["a"]).on_disk_cache(partial(under, tmp_path))
    graph = cache.map(partial(into, tmp_path)).unbatch().end_caching(skip_read=True)
    files = [name for name, _ in into(tmp_path, "a")]
    (tmp_path / "a").mkdir()
    assert [list(graph), list(graph)] == [files] * 2
    Path(files[0]).unlink()
    assert list(graph) == files
    assert Path(files[0]).exists()


def test_a_claim_that_is_deleted(tmp_path: Path) -> None:
    """A newer claim of the same name stays; no error is raised, and no descriptor stays open."""
    path = str(tmp_path / "x")
    name = Path(f"{path}.asyncloader_claim")
    with claim(path, 0):
        name.unlink()
        with claim(path, 0):
            assert name.exists()
    assert not name.exists()


def test_caches_in_a_row_and_within_each_other(tmp_path: Path) -> None:
    """Files of a cache are items of the next cache; an end belongs to the nearest beginning without an end."""
    second, outer, inner = (partial(below, tmp_path, name) for name in ("second", "outer", "inner"))
    graph = cached(tmp_path, numbers(3)).on_disk_cache(second).map(opened).end_caching(same_filepath_fn=True)
    graph = graph.on_disk_cache(outer).on_disk_cache(inner).map(opened).end_caching(filepath_fn=inner)
    graph = graph.map(opened).end_caching(filepath_fn=outer)
    for _ in range(2):
        assert list(graph) == [outer(f"{x}.txt") for x in range(3)]
    for path in (second, outer, inner):
        assert Path(path("1.txt")).read_text() == "content of 1"
    with pytest.raises(RuntimeError, match="`end_caching` can only be invoked once per `OnDiskCacheHolder`"):
        graph.end_caching()


@pytest.mark.parametrize("hash_type", ["sha256", "md5"])
def test_hashes(tmp_path: Path, hash_type: str) -> None:
    """A file with a wrong hash, or without a given hash, is never kept, and does not count as cached."""

    def graph(hashes: dict[str, str]) -> Any:
        path = partial(in_folder, tmp_path)
        cache: Any = numbers(1).on_disk_cache(path, hashes, hash_type)
        return cache.map(partial(logged, tmp_path)).end_caching(skip_read=True)

    file = in_folder(tmp_path, 0)
    right = hashlib.new(hash_type, b"content of 0").hexdigest()
    for wrong, message in (({file: "0"}, f"computed hash {right} of .* does not match"), ({}, "Unspecified hash")):
        with pytest.raises(RuntimeError, match=message):
            list(graph(wrong))
        assert not Path(file).exists()
    assert list(graph({file: right})) == [file]
    Path(file).write_text("torn")
    assert list(graph({file: right})) == [file]
    assert Path(file).read_text() == "content of 0"
    assert left_over(tmp_path) == []


def test_a_check_of_the_users(tmp_path: Path) -> None:
    """A file that the check refuses is written again."""
    cache: Any = numbers(2).on_disk_cache(partial(in_folder, tmp_path), extra_check_fn=lambda path: "1.txt" in path)
    graph = cache.map(partial(logged, tmp_path)).end_caching(skip_read=True)
    assert [len(list(graph)), len(list(graph))] == [2, 2]
    assert made(tmp_path) == ["0", "1", "0"]


class Handle:
    """Pieces of content that can be closed."""

    def __init__(self, *pieces: Any) -> None:
        self.pieces = pieces
        self.closed = False

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pieces)

    def close(self) -> None:
        self.closed = True


def test_kinds_of_content(tmp_path: Path) -> None:
    """Open files and iterables of pieces are read and closed; the mode decides on text or bytes; an error names a wrong
    kind.
    """

    def graph(content: Any, *arguments: Any, **options: Any) -> Any:
        (tmp_path / "x").unlink(missing_ok=True)
        cache: Any = IterableWrapper([str(tmp_path / "x")]).on_disk_cache()
        pairs = cache.zip(IterableWrapper([content], deepcopy=False))
        return pairs.end_caching(*arguments, **options)

    handle = Handle(b"a\n", b"b")
    assert [Path(path).read_bytes() for path in graph(handle)] == [b"a\nb"]
    assert handle.closed
    assert [Path(path).read_text("utf-8") for path in graph(Handle("ä", "b"), "wt")] == ["äb"]
    assert [Path(path).read_text("utf-8") for path in graph("ß", "t", skip_read=True)] == ["ß"]
    assert [Path(path).read_text("utf-8") for path in graph("ß", "t")] == ["ß"]  # torchdata accepts it
    for content, options in ((b"a", {}), (handle, {"skip_read": True})):
        with pytest.raises(TypeError, match="takes bytes and strings with skip_read=True, and open files without it"):
            list(graph(content, **options))
    cache: Any = IterableWrapper([str(tmp_path / "y")]).on_disk_cache()
    with pytest.raises(TypeError, match="needs pairs of a path and its content, not str"):
        list(cache.end_caching())
    assert left_over(tmp_path) == []


def test_errors() -> None:
    """The documented messages for a missing or second end, two functions, wrong modes, and parts not allowed inside."""
    cache: Any = numbers(2).on_disk_cache(str)
    with pytest.raises(RuntimeError, match=r"Please call `end_caching\(\)` before iteration"):
        list(cache.map(double))
    with pytest.raises(RuntimeError, match="`OnDiskCacheHolder` doesn't support add operation"):
        _ = cache + cache
    with pytest.raises(RuntimeError, match="Expected `OnDiskCacheHolder` existing in pipeline"):
        numbers(2).end_caching()
    with pytest.raises(ValueError, match="`filepath_fn` is mutually exclusive with `same_filepath_fn`"):
        cache.end_caching(filepath_fn=str, same_filepath_fn=True)
    with pytest.raises(ValueError, match="mode should be one of wb, b, w, wt, t, not 'r'"):
        cache.end_caching("r")
    with pytest.raises(ValueError, match="Invalid hash_type requested, should be one of"):
        numbers(2).on_disk_cache(str, {}, "crc")
    for part in (cache.sharding_filter(), cache.sharding_round_robin_dispatch(MP), OnlyHere(cache)):
        with pytest.raises(ValueError, match="put it before or after them"):
            part.map(double).end_caching()


def test_waits_for_the_writer(tmp_path: Path) -> None:
    """The reader waits until its timeout, and then raises the documented error. A reader whose wait ends takes the
    writer's file.
    """
    path = in_folder(tmp_path, 0)
    graph = cached(tmp_path, numbers(1), timeout=0)
    with claim(path, 0):
        with pytest.raises(TimeoutError, match=r"expected to be written by different process.*in 0 seconds"):
            list(graph)
        graph.set_timeout(60)
        found: list[str] = []
        reader = threading.Thread(target=lambda: found.extend(graph))
        reader.start()
        Path(path).write_text("of another")
    reader.join(60)
    assert (found, made(tmp_path), left_over(tmp_path)) == ([path], [], [])


def test_waiting_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning names the file that is waited for."""
    monkeypatch.setattr("asyncloader.dataloader2.datapipes.cache_files._LOG_AFTER", 0.01)
    path = str(tmp_path / "x")
    with claim(path, 0), caplog.at_level(logging.WARNING, "asyncloader"), pytest.raises(TimeoutError):
        _lock(f"{path}.asyncloader_claim", path, 0.05)
    assert "waits for another process to write" in caplog.text


def test_a_claim_that_is_waited_for(tmp_path: Path) -> None:
    """It is of the file that has the name: that of the owner before is deleted when its lock is free."""
    path, found = str(tmp_path / "x"), list[bool]()

    def read() -> None:
        with claim(path, float("inf")):
            found.append(Path(f"{path}.asyncloader_claim").exists())

    with claim(path, 0):
        waiting = threading.Thread(target=read)
        waiting.start()
        waiting.join(0.2)
        assert not found
    waiting.join(60)
    assert found == [True]


def test_a_writer_that_is_killed(tmp_path: Path) -> None:
    """No process waits for it, its half-written file is not taken for complete, and none of its files stay."""
    graph = cached(tmp_path, numbers(1))
    script = f"""
import os, sys
from pathlib import Path
from tests.dataloader2.test_caches import in_folder
from torch.utils.data.datapipes.iter import IterableWrapper
import asyncloader.dataloader2
def pieces():
    yield b"half"
    print("half", flush=True)
    sys.stdin.read()
def with_pieces(path):
    return path, pieces()
path = in_folder(Path({str(tmp_path)!r}), 0)
list(IterableWrapper([path]).on_disk_cache().map(with_pieces).end_caching())
"""
    command = [sys.executable, "-c", script]
    with script_server.start(command, env=environment(), cwd=ROOT, stdin=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half\n"
        assert sorted(Path(name).suffix for name in left_over(tmp_path)) == [".asyncloader_claim", ".part"]
        writer.send_signal(signal.SIGKILL)
    assert [Path(path).read_text() for path in graph] == ["content of 0"]
    assert left_over(tmp_path) == []


def test_cache_timeout_and_invalidation(tmp_path: Path) -> None:
    """The adapters set a cache's timeout, and let older files be written again, each by one of the workers."""
    graph = cached(tmp_path, numbers(3).sharding_filter())
    with DataLoader2[str](graph, CacheTimeout(7)) as loader:
        assert loader.datapipe is not None
        assert loader.datapipe.timeout == 7
        files = list(loader)
    adapters = [InvalidateCache()]
    for _ in range(2):
        with DataLoader2[str](graph, adapters, MultiProcessingReadingService(2)) as loader:
            assert [list(loader), list(loader)] == [files] * 2
    assert sorted(made(tmp_path)) == ["0", "0", "1", "1", "2", "2"]
    oldest = min(Path(file).stat().st_mtime_ns for file in files)
    with DataLoader2[str](graph, InvalidateCache(oldest)) as loader:
        assert list(loader) == files
    assert len(made(tmp_path)) == 6
    memory: Any = numbers(2).in_memory_cache()
    assert list(memory) == [0, 1]
    assert (InvalidateCache()(memory), memory.cache) == (memory, None)
    with pytest.raises(RuntimeError, match="needs an `on_disk_cache` or an `in_memory_cache` in the graph"):
        InvalidateCache()(numbers(2))


def test_an_epoch_resumes_whatever_is_cached(tmp_path: Path) -> None:
    """The rest of it is read in its order, though other items are cached than when the state was taken."""
    graph = cached(tmp_path, numbers(9).shuffle().sharding_filter())
    with DataLoader2[str](graph, None, MultiProcessingReadingService(2)) as loader:
        items = iter(loader)
        seen = [next(items) for _ in range(4)]
        state = loader.state_dict()
        rest = list(items)
    for path in (seen[1], rest[2], rest[3]):
        Path(path).unlink()
    with DataLoader2.from_state(state, MultiProcessingReadingService(2)) as loader:
        assert list(loader) == rest
    assert sorted([*seen, *rest]) == [in_folder(tmp_path, x) for x in range(9)]


def test_unzip() -> None:
    """Each place has a datapipe, except places left out; the buffer has its limit."""
    rows = IterableWrapper([(x, x + 10, x + 20) for x in range(3)])
    first, third = rows.unzip(sequence_length=3, columns_to_skip=[1])
    assert [list(first), list(third)] == [[0, 1, 2], [20, 21, 22]]
    assert list(first.zip(third)) == [(0, 20), (1, 21), (2, 22)]
    with pytest.raises(RuntimeError, match="All instances are being filtered out in UnZipperIterDataPipe"):
        rows.unzip(2, columns_to_skip=[0, 1])
    with pytest.raises(BufferError):
        list(rows.unzip(3, buffer_size=1)[0])
