"""`write_shards`: reading and writing are a round trip; killed, cancelled or failed writers leave whole shards only."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typing_extensions import Buffer

from asyncloader import RemoteIterableDataset, ShardWriteError, WrittenShard, write_shards, write_shards_sync
from asyncloader.transports import MemoryTransport, ObjectInfo, WriteFailed, file_writing

FORMATS = ["tar", "tar.gz", "tgz", "jsonl", "jsonl.zst", "tfrecord", "mds", "mds.gz", "mds.zst", "parquet"]
NUMBER = 40


def sample_of(format: str, number: int) -> dict[str, Any]:
    """Sample `number`, of a size that differs from the others'."""
    data = bytes([number % 256]) * (number * 37 % 400)
    kind = format.partition(".")[0]
    if kind in ("tar", "tgz"):
        return {"__key__": f"dir/{number:05d}", "jpg": data, "cls": b"%d" % number}
    if kind == "jsonl":
        return {"text": data.hex(), "number": number, "nested": {"a": [None, 1.5]}}
    if kind == "tfrecord":
        return {"record": data}
    return {"image": data, "label": number, "box": np.arange(4, dtype=np.float32) + number, "text": f"ä{number}"}


class Numbered:
    """A map dataset, of which the samples that were asked for are counted."""

    def __init__(self, format: str, number: int = NUMBER) -> None:
        self.format = format
        self.number = number
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.asked.append(index)
        return sample_of(self.format, index)


class Concurrent(Numbered):
    async def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        await asyncio.sleep(0)
        return sample_of(self.format, index)


def samples_of(format: str, number: int = NUMBER) -> Iterator[dict[str, Any]]:
    return (sample_of(format, each) for each in range(number))


def pattern(folder: Path | str, format: str) -> str:
    return f"{folder}/train-{{shard:03d}}.{format}"


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def same(one: Any, other: Any) -> bool:
    if isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


LIMIT: dict[str, Any] = {"max_bytes": 12_000, "max_samples": 9}


# --------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("format", FORMATS)
async def test_reading_and_writing_is_a_round_trip(format: str, tmp_path: Path) -> None:
    """What is written is read, and what is read is written again: the same shards, byte for byte."""
    shards = await write_shards(samples_of(format), pattern(tmp_path / "a", format), **LIMIT)
    assert sum(shard.samples for shard in shards) == NUMBER
    assert len(shards) > 3
    for shard in shards:
        assert len(files_in(tmp_path / "a")[shard.url.rpartition("/")[2]]) == shard.bytes
    # The folder's listing: the index is not taken for a shard, whatever the format is named.
    kind = format.partition(".")[0]
    for named in ("mds",) if kind == "mds" else (None, format):
        dataset = RemoteIterableDataset(f"{tmp_path}/a/", format=named)
        found = [sample async for sample in dataset]
        assert len(found) == NUMBER
        for number, sample in enumerate(found):
            for name, value in sample_of(format, number).items():
                assert same(sample[name], value)
    again = RemoteIterableDataset(f"{tmp_path}/a/", format="mds" if kind == "mds" else None)
    await write_shards(again, pattern(tmp_path / "b", format), **LIMIT)
    assert files_in(tmp_path / "a") == files_in(tmp_path / "b")


@pytest.mark.parametrize("format", ["tar", "mds", "parquet"])
@pytest.mark.parametrize("kind", [Numbered, Concurrent])
async def test_workers_write_the_same_bytes(format: str, kind: type[Numbered], tmp_path: Path) -> None:
    """A map dataset, plain or asynchronous, in this process and in workers; a list; and all of it without a loop."""
    await write_shards(samples_of(format), pattern(tmp_path / "a", format), **LIMIT)
    for workers in (0, 2):
        await write_shards(kind(format), pattern(tmp_path / f"{workers}", format), workers=workers, **LIMIT)
        names = [name for name in files_in(tmp_path / "a") if not name.startswith("_")]
        assert {name: files_in(tmp_path / f"{workers}")[name] for name in names} == {
            name: files_in(tmp_path / "a")[name] for name in names
        }
    write_shards_sync(list(samples_of(format)), pattern(tmp_path / "list", format), **LIMIT)
    assert files_in(tmp_path / "list") == files_in(tmp_path / "a")


@pytest.mark.parametrize("format", ["tar", "parquet"])
async def test_no_samples_and_their_index(format: str, tmp_path: Path) -> None:
    """Nothing is written but an index without shards."""
    assert await write_shards([], pattern(tmp_path, format)) == []
    assert await write_shards([], pattern(tmp_path, format)) == []
    index = json.loads((tmp_path / f"_train-index.{format}.json").read_text())
    assert (index["complete"], index["shards"]) == (True, {})


async def test_a_large_sample_among_small_ones(tmp_path: Path) -> None:
    """Small samples before and after it are in its shard as far as the limit allows."""
    sizes = [1000] * 500 + [9 << 20] + [1000] * 500
    samples = [{"__key__": f"{at}", "bin": bytes(size)} for at, size in enumerate(sizes)]
    one = await write_shards(iter(samples), pattern(tmp_path / "a", "tar"), max_bytes="10MiB", buffer_bytes="1MiB")
    two = await write_shards(samples, pattern(tmp_path / "b", "tar"), max_bytes="10MiB", workers=2)
    assert [shard[1:] for shard in one] == [shard[1:] for shard in two]
    assert sum(shard.samples for shard in one) == 1001
    assert [len(each["bin"]) async for each in RemoteIterableDataset(f"{tmp_path}/a/")] == sizes


# ---------------------------------------------------------------------------------------------- killed, and resumed

STEPS = [(os, "fsync"), (os, "replace"), (file_writing, "_write")]


def kill(left: Iterator[int], call: Callable[..., Any], *args: Any) -> Any:
    if next(left) == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return call(*args)


def killed_at(step: int, write: Callable[[], object]) -> bool:
    """Call `write` in a forked child that kills itself at the given step; return whether it came so far."""
    child = os.fork()
    if not child:
        try:
            left = count(step, -1)
            for module, name in STEPS:
                setattr(module, name, partial(kill, left, getattr(module, name)))
            write()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    return False


@pytest.mark.parametrize("format", ["tar", "mds.zst", pytest.param("parquet", marks=pytest.mark.thorough)])
def test_killed_anywhere_and_resumed(format: str, tmp_path: Path) -> None:
    """At each step that changes the folder: every visible shard is whole; and the next run makes the same files."""
    write_shards_sync(samples_of(format), pattern(tmp_path / "whole", format), **LIMIT)
    expected = files_in(tmp_path / "whole")
    steps = range(0, 60, 5) if format == "tar" else range(2, 60, 17)
    kills = 0
    for step in steps:
        folder = tmp_path / f"{step}"
        kills += killed_at(step, partial(write_shards_sync, samples_of(format), pattern(folder, format), **LIMIT))
        found = files_in(folder) if folder.exists() else {}
        shards = {name for name in found if name.startswith("train")}
        assert all(found[name] == expected[name] for name in shards)
        if "index.json" in found:
            assert shards == {name for name in expected if name.startswith("train")}
        write_shards_sync(samples_of(format), pattern(folder, format), **LIMIT)
        assert files_in(folder) == expected
    assert kills > 1


def test_a_map_dataset_goes_on_after_the_complete_shards(tmp_path: Path) -> None:
    """Not asked for samples of complete shards, unless a shard is damaged; a shard without a record is written."""
    expected_dataset = Numbered("tar")
    shards = write_shards_sync(expected_dataset, pattern(tmp_path, "tar"), **LIMIT)
    expected = files_in(tmp_path)
    index = tmp_path / "_train-index.tar.json"
    value = json.loads(index.read_text())
    value["complete"] = False
    del value["shards"]["3"], value["shards"]["4"]
    incomplete = json.dumps(value)

    def asked() -> list[int]:
        dataset = Numbered("tar")
        assert write_shards_sync(dataset, pattern(tmp_path, "tar"), **LIMIT) == shards
        assert files_in(tmp_path) == expected
        return dataset.asked

    edges = np.cumsum([0, *(shard.samples for shard in shards)]).tolist()
    index.write_text(incomplete)
    assert asked() == list(range(edges[3], NUMBER))
    for damage in (b"", expected["train-001.tar"][:-512], bytes(len(expected["train-001.tar"]))):
        index.write_text(incomplete)
        (tmp_path / "train-001.tar").write_bytes(damage)
        assert asked() == list(range(edges[1], NUMBER))
    index.write_text(incomplete)
    (tmp_path / "train-000.tar").unlink()
    assert asked() == list(range(NUMBER))


# ------------------------------------------------------------------------------------- stores that fail or are slow


class Store(MemoryTransport):
    """Calls `act` before and after each write and delete, with the number of the call."""

    def __init__(self, act: Callable[[int], object] = lambda _: None) -> None:
        super().__init__()
        self.act = act
        self.calls = count()

    async def write(self, path: str, pieces: Sequence[Buffer]) -> ObjectInfo:
        await self.step()
        info = await super().write(path, pieces)
        await self.step()
        return info

    async def delete(self, path: str) -> None:
        await self.step()
        await super().delete(path)

    async def step(self) -> None:
        self.act(next(self.calls))
        await asyncio.sleep(0)


def check_whole(store: MemoryTransport, expected: MemoryTransport) -> None:
    for path, data in store._objects.items():
        if not path.startswith("_"):
            assert data == expected._objects[path]


@pytest.mark.parametrize("format", ["tar", "mds"])
@pytest.mark.parametrize("how", ["cancel", "fail"])
async def test_cancelled_and_failed_at_every_step_of_the_store(format: str, how: str) -> None:
    """Whole shards only; the error of the store is raised as it is; the next run makes the same objects."""
    url = f"train-{{shard:03d}}.{format}"
    whole = MemoryTransport()
    await write_shards(samples_of(format, 14), url, transport=whole, max_samples=5)
    for step in count():
        store = Store()
        task = asyncio.create_task(write_shards(samples_of(format, 14), url, transport=store, max_samples=5))

        def act(number: int, step: int = step, task: asyncio.Task[Any] = task) -> None:
            if number == step and how == "cancel":
                task.cancel()
            elif number == step:
                raise WriteFailed("the store is out")

        store.act = act
        try:
            await task
        except asyncio.CancelledError:
            assert how == "cancel"
        except WriteFailed:
            assert how == "fail"
        check_whole(store, whole)
        assert len(asyncio.all_tasks()) == 1
        came = next(store.calls)
        store.act = lambda _: None
        await write_shards(samples_of(format, 14), url, transport=store, max_samples=5)
        assert store._objects == whole._objects
        if came <= step:
            return


async def test_a_slow_store_holds_the_samples_back() -> None:
    """Shards are uploaded at the same time, as many as the buffer has room for, and no sample is taken beyond that."""
    taken, at_once, most = 0, 0, 0
    full = asyncio.Event()  # however long the next shards take to assemble

    class Slow(MemoryTransport):
        async def write(self, path: str, pieces: Sequence[Buffer]) -> ObjectInfo:
            nonlocal at_once, most
            at_once += path.startswith("train")
            most = max(most, at_once)
            if at_once == 3:
                full.set()
            if path.startswith("train"):
                await full.wait()
            for _ in range(200):
                await asyncio.sleep(0)
            info = await super().write(path, pieces)
            at_once -= path.startswith("train")
            return info

    async def samples() -> AsyncGenerator[dict[str, Any], None]:
        nonlocal taken
        for number in range(40):
            written = sum(path.startswith("train") for path in store._objects)
            # Three shards of two samples fit into the buffer, and a fourth waits; a fifth grows.
            assert number - 2 * written <= 2 * 4 + 2
            taken += 1
            # So large that each is passed on alone.
            yield {"__key__": f"{number}", "bin": bytes(1 << 20)}

    store = Slow()
    shards = await write_shards(
        samples(), "train-{shard}.tar", transport=store, max_bytes="2.5MiB", buffer_bytes="10MiB"
    )
    assert taken == 40
    assert most == 3
    assert {shard.samples for shard in shards} == {2}


async def test_a_writer_keeps_the_shards_before_a_bad_sample() -> None:
    """The error names it; once it is mended, the rest is written."""
    store = MemoryTransport()
    good = list(samples_of("tar"))
    bad = [*good[:30], {"__key__": "wrong", "x": 3}, *good[30:]]
    with pytest.raises(
        ShardWriteError, match=r"^sample 30 \('wrong'\) cannot be written: its field 'x' is a int"
    ) as caught:
        await write_shards(bad, "train-{shard:03d}.tar", transport=store, **LIMIT)
    assert (caught.value.number, caught.value.key) == (30, "wrong")
    whole = MemoryTransport()
    await write_shards(good, "train-{shard:03d}.tar", transport=whole, **LIMIT)
    kept = [path for path in store._objects if path.startswith("train")]
    assert len(kept) >= 3
    check_whole(store, whole)
    await write_shards(good, "train-{shard:03d}.tar", transport=store, **LIMIT)
    assert store._objects == whole._objects


# ---------------------------------------------------------------------------------------------- what exists already


async def test_an_existing_target_is_refused_or_overwritten() -> None:
    """Whoever wrote it. Overwriting leaves no shard of before."""
    store = MemoryTransport()

    async def write(samples: Any = None, **options: Any) -> list[WrittenShard]:
        chosen = samples_of("tar") if samples is None else samples
        return await write_shards(chosen, "train-{shard:03d}.tar", transport=store, **{**LIMIT, **options})

    store.put("train-999.tar", b"of another program")
    with pytest.raises(FileExistsError, match=r"train-999\.tar exists, and 0 others, without an index"):
        await write()
    shards = await write(overwrite=True)
    assert "train-999.tar" not in store._objects
    before = dict(store._objects)
    assert await write() == shards
    with pytest.raises(FileExistsError, match="written with max_samples=9, not 3"):
        await write(max_samples=3)
    with pytest.raises(FileExistsError, match=r"with other samples than those from number \d+ on"):
        await write([{"__key__": f"{number}", "x": b""} for number in range(NUMBER)])
    with pytest.raises(FileExistsError, match="from more samples than there are now"):
        await write(list(samples_of("tar"))[: shards[0].samples])
    store.put("train-999.tar", b"of another program")
    store.put("_train-index.tar.json", before["_train-index.tar.json"])
    with pytest.raises(FileExistsError, match=rf"train-999\.tar exists, and is none of the {len(shards)} shards"):
        await write()
    await store.delete("train-999.tar")
    assert store._objects == before
    few = await write(list(samples_of("tar"))[:3], overwrite=True)
    assert len(few) == 1
    assert store._objects.keys() == {"train-000.tar", "_train-000.tar.samples", "_train-index.tar.json"}
    store.put("_train-index.tar.json", b"something else")
    with pytest.raises(FileExistsError, match="is no index of these shards"):
        await write()
    await write(overwrite=True)
    assert len(store._objects) == len(before)


async def test_another_mds_dataset_is_not_damaged() -> None:
    """Its index.json is in the same folder."""
    store = MemoryTransport({"index.json": b"theirs"})
    with pytest.raises(FileExistsError, match=r"^index\.json exists"):
        await write_shards(samples_of("mds"), "{shard:05d}.mds", transport=store)
    assert store._objects == {"index.json": b"theirs"}


# -------------------------------------------------------------------------------------------------- disks and stores


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says so; the files are whole; and with space again the rest is written."""
    calls = count()

    def full(descriptor: int) -> None:
        if next(calls) > 6:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(WriteFailed, match="No space left on device; free some space") as caught:
            write_shards_sync(samples_of("tar"), pattern(tmp_path / "a", "tar"), **LIMIT)
    assert caught.value.errno == errno.ENOSPC
    assert not [name for name in files_in(tmp_path / "a") if name.startswith(".")]
    write_shards_sync(samples_of("tar"), pattern(tmp_path / "a", "tar"), **LIMIT)
    write_shards_sync(samples_of("tar"), pattern(tmp_path / "b", "tar"), **LIMIT)
    assert files_in(tmp_path / "a") == files_in(tmp_path / "b")
