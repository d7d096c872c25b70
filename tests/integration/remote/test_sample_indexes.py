"""Indexes of samples: where they lie, which are used, and which are refused; and the files of one host."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncloader import (
    AsyncDataLoader,
    RemoteIterableDataset,
    RemoteMapDataset,
    index_shards,
    index_shards_sync,
    write_shards_sync,
)
from asyncloader.errors import ShardError
from asyncloader.remote.random_access import host_files
from asyncloader.remote.random_access.indexing import Indexer
from asyncloader.transports import MemoryTransport, WriteFailed
from asyncloader.transports.file_lock import open_regular, try_lock
from asyncloader.transports.open_files import OpenFiles
from tests import script_server
from tests.helpers.http_store import serving as serving_http
from tests.helpers.running import LOOPS, ROOT, environment, run_async
from tests.helpers.shards_of_formats import SIZES, write
from tests.integration.remote.test_random_access import compared, put_all, samples_of, write_tars
from tests.unit.remote.shards import tar

pytestmark = pytest.mark.independent

TABLELESS = ["tar", "jsonl", "tfrecord"]
TOTAL = sum(SIZES)


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Tar shards that a test may change."""
    return write_tars(tmp_path / "tars")


def index_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("_*.samples"))


@pytest.mark.parametrize("format", TABLELESS)
def test_indexes_beside_the_shards(format: str, tmp_path: Path) -> None:
    """They are written once, shards are not read when the length is asked for, and a stream does not take them for
    shards.
    """
    write(tmp_path, format)

    async def run() -> None:
        assert await index_shards(f"{tmp_path}/") == len(SIZES)
        index_files(tmp_path)[2].unlink()  # as if the call had been killed
        assert await index_shards(f"{tmp_path}/") == 1
        whole = await samples_of(RemoteIterableDataset(f"{tmp_path}/"))
        async with serving_http() as store:
            # Local files and their indexes can be copied to any store.
            urls = [url for url in put_all(store, tmp_path) if not url.endswith(".samples")]
            dataset = RemoteMapDataset(urls)
            await dataset.prepare()
            assert not [asked for asked in store.asked if asked.method == "GET" and "/_" not in f"/{asked.path}"]
            found = compared(await dataset.__getitems__(range(TOTAL)))
            assert found == [
                sample | {"__url__": sample["__url__"].replace(str(tmp_path), store.url)} for sample in compared(whole)
            ]

    run_async(run())


@pytest.mark.parametrize("name", ["a-{shard}.tar", "a-{shard}.tar.gz", "a-{shard}.jsonl", "a-{shard}.tfrecord"])
def test_indexes_of_a_writer(tmp_path: Path, name: str) -> None:
    """Byte for byte those that are made by reading the shards; none of a shard that was overwritten is left."""
    unit: str | bytes = "x" if "jsonl" in name else b"x"
    field = "record" if "tfrecord" in name else "f"
    samples = [{"__key__": f"k{number}", field: unit * number} for number in range(1, 30)]
    write_shards_sync(samples, f"{tmp_path}/{name}", max_samples=8)
    written = {path.name: path.read_bytes() for path in index_files(tmp_path)}
    assert len(written) == 4
    for path in index_files(tmp_path):
        path.unlink()
    assert index_shards_sync(f"{tmp_path}/") == 4
    assert {path.name: path.read_bytes() for path in index_files(tmp_path)} == written
    write_shards_sync(samples[:3], f"{tmp_path}/{name}", overwrite=True)
    assert len(index_files(tmp_path)) == 1
    assert len(RemoteMapDataset(f"{tmp_path}/")) == 3


def test_indexes_are_found_without_reading_shards() -> None:
    """A store whose objects have no versions: sizes prove what they can."""

    class Counting(MemoryTransport):
        streamed = 0

        def stream(self, path: str, **options: Any) -> Any:
            type(self).streamed += 1
            return super().stream(path, **options)

    async def run() -> None:
        transport = Counting({f"s{n}.tar": tar(range(n * 10, n * 10 + 10)) for n in range(3)})
        assert await index_shards("s{0..2}.tar", transport=transport) == 3
        Counting.streamed = 0
        dataset = RemoteMapDataset("s{0..2}.tar", transport=transport)
        await dataset.prepare()
        assert [sample["n"] for sample in await dataset.__getitems__([3, 25])] == [b"3", b"25"]
        assert not Counting.streamed
        await transport.write("s1.tar", [tar(range(30))])
        with pytest.raises(ShardError, match=r"make it again by index_shards"):
            await RemoteMapDataset("s{0..2}.tar", transport=transport).prepare()
        assert await index_shards("s{0..2}.tar", transport=transport) == 1

    run_async(run())


def test_indexes_that_cannot_be_written(tars: Path) -> None:
    """A web server takes none, and a shard that is cut off gets none."""

    async def run() -> None:
        async with serving_http() as store:
            with pytest.raises(WriteFailed):
                await index_shards(put_all(store, tars))
        (tars / "s1.tar").write_bytes((tars / "s1.tar").read_bytes()[:7000])
        with pytest.raises(ShardError, match="cannot be read beyond byte"):
            await index_shards(f"{tars}/s1.tar")

    run_async(run())


HOSTILE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + b"x",
    "a flipped bit": lambda data: data[:70] + bytes([data[70] ^ 1]) + data[71:],
    "a pickle": lambda _: pickle.dumps(range(100)),
    "an impossible count": lambda data: data[:32] + (1 << 62).to_bytes(8, "little") + data[40:],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_indexes(tars: Path, name: str) -> None:
    """Beside a shard they are refused, whatever they are."""
    run_async(index_shards(f"{tars}/"))
    path = tars / "_s1.tar.samples"
    path.write_bytes(HOSTILE[name](path.read_bytes()))
    with pytest.raises(ShardError, match=r"'_s1.tar.samples', cannot be used"):
        len(RemoteMapDataset(f"{tars}/"))


def test_a_damaged_index_in_the_cache(tars: Path, tmp_path: Path) -> None:
    """It is made again."""
    cache = tmp_path / "cache"
    dataset = RemoteMapDataset(f"{tars}/", cache_dir=cache)
    assert len(dataset) == TOTAL
    kept = [*(cache / "asyncloader-sample-indexes").rglob("objects/*/*")]
    assert len(kept) == len(SIZES)
    for path in kept:
        data = path.read_bytes()
        path.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
    again = RemoteMapDataset(f"{tars}/", cache_dir=cache)
    assert len(again) == TOTAL
    assert run_async(again.__getitems__([20]))[0]["n"] == b"20"


def test_a_kept_index_saves_reading(tars: Path, tmp_path: Path) -> None:
    """The second dataset reads no shard; workers read none either."""

    async def run() -> None:
        async with serving_http() as store:
            urls = put_all(store, tars)
            for time in range(2):
                dataset = RemoteMapDataset(urls, cache_dir=tmp_path / "cache")
                await dataset.prepare()
                read = [asked for asked in store.asked if asked.method == "GET" and not asked.path.startswith("_")]
                assert bool(read) == (time == 0)
                store.asked.clear()

    run_async(run())


def own_folders() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("asyncloader-samples-*")}


def test_the_folder_of_a_dataset_ends_with_it(
    tars: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with its copies."""
    monkeypatch.setattr(
        tempfile, "tempdir", str(tmp_path_factory.mktemp("folders"))
    )  # without other processes' folders
    before = own_folders()
    dataset = RemoteMapDataset(f"{tars}/")
    assert len(dataset) == TOTAL
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(own_folders() - before) == 1
    assert run_async(copy.__getitems__([4]))[0]["n"] == b"4"
    del copy
    gc.collect()
    assert len(own_folders() - before) == 1
    del dataset
    gc.collect()
    assert own_folders() == before


@pytest.mark.parametrize("removed", ["before", "after"])
def test_a_new_folder_that_another_process_removes(monkeypatch: pytest.MonkeyPatch, removed: str) -> None:
    """Until it is locked it looks like that of a process that was killed: the dataset makes another one."""
    taken, locks = list[str](), list[int]()

    def take(path: str, flags: int, mode: int = 0o600) -> int:
        """Open a file; between the first open of a new folder's lock and its locking, the other process has it."""
        descriptor = open_regular(path, flags, mode)
        if flags & os.O_CREAT and not taken:
            taken.append(str(Path(path).parent))
            locks.append(open_regular(path, os.O_RDWR))
            assert try_lock(locks[0])
            if removed == "before":
                end()
        return descriptor

    def end() -> None:
        shutil.rmtree(taken[0])
        os.close(locks[0])

    monkeypatch.setattr(host_files, "open_regular", take)
    files = host_files.HostFiles(None, None, OpenFiles())
    files.prepare()
    if removed == "after":
        end()
    assert files._private not in (None, taken[0])
    assert Path(str(files._private), "owner").is_file()
    host_files._sweep()
    assert Path(str(files._private), "owner").is_file()


@pytest.mark.thorough
def test_the_folder_of_a_process_that_was_killed(tars: Path) -> None:
    """The next dataset removes it."""
    script = (
        "import sys, time, asyncloader\n"
        f"dataset = asyncloader.RemoteMapDataset({str(tars)!r} + '/')\n"
        "print(len(dataset), dataset._files._private, flush=True)\n"
        "time.sleep(60)\n"
    )
    with script_server.start([sys.executable, "-c", script], env=environment(), cwd=ROOT) as process:
        assert process.stdout is not None
        count, folder = process.stdout.readline().split()
        assert int(count) == TOTAL
        other = RemoteMapDataset(f"{tars}/")
        len(other)
        assert Path(folder).is_dir()  # its process lives
        process.send_signal(signal.SIGKILL)
        process.wait()
    another = RemoteMapDataset(f"{tars}/")
    len(another)
    assert not Path(folder).exists()


@pytest.mark.parametrize("kind", LOOPS)
def test_a_loop_that_was_stopped_while_it_makes_an_index(
    tars: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may never go on, and has the lock: after a wait `state_dict` and the next loop make the index without it."""
    make, begun = Indexer.make, asyncio.Event()

    async def stops(self: Indexer, *args: Any) -> Any:
        if asyncio.get_running_loop() is stopped:
            if not begun.is_set():  # once: uvloop keeps a second stop for the next run, which cancels the tasks
                stopped.stop()
            begun.set()
            await stopped.create_future()
        return await make(self, *args)

    loader = AsyncDataLoader[Any](RemoteMapDataset(f"{tars}/"), None, sampler=range(TOTAL))

    async def whole() -> list[Any]:
        return [sample async for sample in loader]

    monkeypatch.setattr(Indexer, "make", stops)
    with asyncio.Runner(loop_factory=LOOPS[kind]) as runner:
        stopped = runner.get_loop()
        first = stopped.create_task(anext(aiter(loader)))
        stopped.run_forever()
        assert not first.done()
        with monkeypatch.context() as patch:
            patch.setattr(host_files, "_WAIT_S", 0.05)
            assert loader.state_dict()["length"] == TOTAL
            assert len(run_async(whole(), kind)) == TOTAL
