"""`loader.trace()`: the file has the format, and every batch its way, however and wherever batches are made."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

from asyncloader import AsyncDataLoader, DataLoader, LoaderTimeout, RemoteIterableDataset, StatefulDataLoader
from asyncloader.telemetry import recording
from asyncloader.telemetry.trace import Trace
from tests.helpers.datasets import AsyncNumbers, DiesOnce, Numbers
from tests.helpers.http_store import serving, status
from tests.helpers.running import KINDS, run_async
from tests.helpers.trace_events import Found, read_trace

WAY = ["main_loop", "tasks", "ready_batches", "consumer"]
METHODS = ["fork", "threads", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("forkserver", "spawn"))]


def started(method: str) -> dict[str, Any]:
    """The options of workers that are started by this method."""
    return {"workers": "threads"} if method == "threads" else {"multiprocessing_context": method}


def read_all(kind: str, dataset: Any, file: Path, *, epochs: int = 1, **options: Any) -> Found:
    """Trace all epochs of a loader."""
    if kind == "sync":
        with DataLoader[Any](dataset, **options) as loader, loader.trace(file):
            for _ in range(epochs):
                list(loader)
        return read_trace(file)

    async def load() -> None:
        async with AsyncDataLoader[Any](dataset, **options) as loader, loader.trace(file):
            for _ in range(epochs):
                async for _ in loader:
                    pass

    run_async(load(), kind)
    return read_trace(file)


@pytest.mark.loops
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dataset", [Numbers(40), AsyncNumbers(40)], ids=["plain", "async"])
def test_every_batch_has_one_way(kind: str, method: str, dataset: Any, tmp_path: Path) -> None:
    """From the main loop to a worker, back, and to the consumer; with a track for each worker."""
    found = read_all(kind, dataset, tmp_path / "a.json.gz", batch_size=4, num_workers=2, epochs=2, **started(method))
    assert found.delivered == [(run, seq) for run in (1, 2) for seq in range(10)]
    assert found.ways == dict.fromkeys(found.delivered, WAY)
    main, workers = found.tracks[0], found.tracks[1:]
    assert main.endswith(f"(pid {os.getpid()})")
    # Workers that are started anew, and so are other processes or threads, have tracks of their own.
    assert [each.partition(" (")[0] for each in sorted(workers)] == ["worker 0"] * 2 + ["worker 1"] * 2
    tasks = [found.spans[worker, "tasks"] for worker in workers]
    assert sum(each["batch"] for each in tasks) == 20
    assert sum(each["fetch"] + each["first_read"] for each in tasks) == 20
    assert sum(each["collate"] for each in tasks) == sum(each["write"] for each in tasks) == 20
    consumer = found.spans[main, "consumer"]
    assert (consumer["batch"], consumer["open"], consumer["step"]) == (20, 20, 18)
    assert found.spans[main, "main_loop"]["assign"] == 20
    assert len(found.events.get("lease", [])) == (0 if method == "threads" else 20)
    assert found.facts["complete"]
    assert not found.facts["left_out"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dataset", [Numbers(40), AsyncNumbers(40)], ids=["plain", "async"])
def test_without_workers(kind: str, dataset: Any, tmp_path: Path) -> None:
    """What the consumer waits for is made in this process, and is seen there."""
    found = read_all(kind, dataset, tmp_path / "a.json", batch_size=4)
    assert found.delivered == [(1, seq) for seq in range(10)]
    assert not found.ways
    (main,) = found.tracks
    assert found.spans[main, "consumer"]["batch"] == 10
    made = found.spans[main, "stages"]
    assert (made["fetch"], made["collate"]) == (10, 10)


def test_persistent_workers_and_two_traces(tmp_path: Path) -> None:
    """A trace that begins while workers run has their spans at once, none between two traces, and those of the second
    again; a loader has one trace at a time.
    """
    with StatefulDataLoader[Any](Numbers(40), batch_size=4, num_workers=1, persistent_workers=True) as loader:
        list(loader)
        with loader.trace(tmp_path / "a.json") as trace:
            list(loader)
            with pytest.raises(RuntimeError, match=r"being traced already, to .*a\.json"):
                loader.trace(tmp_path / "b.json")
            early = trace.dump(tmp_path / "early.json")
            list(loader)
        list(loader)
        with loader.trace(tmp_path / "b.json"):
            list(loader)
        list(loader)
    first, second = read_trace(tmp_path / "a.json"), read_trace(tmp_path / "b.json")
    assert first.delivered == [(run, seq) for run in (2, 3) for seq in range(10)]
    assert read_trace(early).delivered == first.delivered[:10]
    assert second.delivered == [(5, seq) for seq in range(10)]
    assert second.ways == dict.fromkeys(second.delivered, WAY)
    assert len(second.tracks) == 2
    assert second.spans[second.tracks[1], "tasks"]["fetch"] == 10


def test_a_worker_that_dies(tmp_path: Path) -> None:
    """Its death and its replacement are events of its tracks, and each batch has one way nevertheless."""
    dataset = DiesOnce(40, tmp_path / "died")
    found = read_all("sync", dataset, tmp_path / "a.json", batch_size=4, num_workers=2, seed=1)
    assert sorted(found.delivered) == [(1, seq) for seq in range(10)]
    assert found.ways == dict.fromkeys(found.delivered, WAY)
    (death,), (replaced,) = found.events["worker died"], found.events["worker replaced"]
    assert death["exitcode"] == -signal.SIGKILL
    assert death["track"].partition(" (")[0] == replaced["track"].partition(" (")[0]
    assert any(replaced["place"] in track for track in found.tracks)


@pytest.mark.parametrize("workers", [0, 1])
def test_early_ends(workers: int, tmp_path: Path) -> None:
    """After a break, and after an error in the block, the file is written; the error is the one that is raised."""
    with DataLoader[Any](Numbers(40), batch_size=4, num_workers=workers) as loader:
        with loader.trace(tmp_path / "a.json"):
            for _ in loader:
                break
        batches = iter(loader)
        next(batches)
        with pytest.raises(KeyError, match="mine"), loader.trace(tmp_path / "b.json"):
            raise KeyError(f"mine, at {next(batches)}")
        del batches
        trace = loader.trace(tmp_path / "c.json")
        next(iter(loader))
    trace.close()  # the loader's end has closed it
    assert read_trace(tmp_path / "a.json").delivered == [(1, 0)]
    assert read_trace(tmp_path / "b.json").delivered == [(2, 1)]
    assert read_trace(tmp_path / "c.json").delivered == [(3, 0)]


def make_and_fail(directory: Path) -> None:
    directory.mkdir()
    raise KeyError


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    """Are refused before anything is recorded, and the loader can be traced elsewhere."""
    with DataLoader[Any](Numbers(8), batch_size=4) as loader:
        for name, error in (("no/a.json", FileNotFoundError), (".", ValueError), ("a.txt", ValueError)):
            with pytest.raises(error):
                loader.trace(tmp_path / name)
        (tmp_path / "d.json").mkdir()
        with pytest.raises(IsADirectoryError):
            loader.trace(tmp_path / "d.json")
        with pytest.raises(ValueError, match="last is a number of seconds above 0, got 0"):
            loader.trace(tmp_path / "a.json", last=0)
        gone = tmp_path / "gone"
        gone.mkdir()
        trace = loader.trace(gone / "a.json")
        list(loader)
        gone.rmdir()
        with pytest.raises(FileNotFoundError):
            trace.close()
        trace.close()
        with pytest.raises(KeyError) as caught, loader.trace(tmp_path / "a.json"):
            make_and_fail(tmp_path / "a.json")
        assert "Its trace could not be written" in caught.value.__notes__[0]
        (tmp_path / "a.json").rmdir()
        with loader.trace(tmp_path / "a.json"):
            list(loader)
    assert len(read_trace(tmp_path / "a.json").delivered) == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.json", "d.json"]


@pytest.mark.parametrize(("limit", "most"), [("MOST_RECORDS", 100), ("MOST_SPAN_BYTES", 2000)])
def test_memory_is_bounded(limit: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest records stay, in number and bytes, and the file says that older ones are missing."""
    monkeypatch.setattr(recording, limit, most)
    found = read_all("sync", Numbers(400), tmp_path / "a.json", batch_size=4, num_workers=1)
    assert not found.facts["complete"]
    assert found.delivered[-1] == (1, 99)
    assert 5 < len(found.delivered) <= 25


class Waits(Dataset[int]):
    """Its last sample comes once the pipe is written to."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 7:
            os.read(self.pipe, 1)
        return index


async def traced(batches: Any, trace: Trace) -> None:
    async with trace:
        async for _ in batches:
            pass


@pytest.mark.parametrize("kind", KINDS)
def test_a_time_out_is_dumped(kind: str, tmp_path: Path) -> None:
    """With `last=`, beside the file that the end writes, and the error names it."""
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 1, "timeout": 0.3, "multiprocessing_context": "fork"}
    file = tmp_path / "run.json.gz"
    reads, writes = os.pipe()
    if kind == "sync":
        with DataLoader[Any](Waits(reads), **options) as loader:
            with pytest.raises(LoaderTimeout) as caught, loader.trace(file, last=60):
                list(loader)
            os.write(writes, b"!")  # or the worker would have to be killed, after some seconds
    else:

        async def load() -> pytest.ExceptionInfo[LoaderTimeout]:
            async with AsyncDataLoader[Any](Waits(reads), **options) as loader:
                batches = aiter(loader)
                with pytest.raises(LoaderTimeout) as caught:
                    await traced(batches, loader.trace(file, last=60))
                os.write(writes, b"!")
                return caught

        caught = run_async(load(), kind)
    os.close(reads)
    os.close(writes)
    dumped = tmp_path / "run-1-timeout.json.gz"
    assert caught.value.__notes__[-1] == f"Its last 60 seconds are in {dumped}"
    (event,) = read_trace(dumped).events["time-out"]
    assert "Waiting for task 3 at worker 0" in event["report"]
    assert read_trace(file).delivered == [(1, 0), (1, 1), (1, 2)]


def test_copies_before_the_trace_are_none_of_its_events(tmp_path: Path) -> None:
    """Only batches that were copied out of their ring since are."""
    with DataLoader[Any](Numbers(8), batch_size=4) as loader:
        loader._asyncloader_state.statistics.ring_copies = 3
        with loader.trace(tmp_path / "a.json") as trace:
            for seq, copies in enumerate((3, 4, 4)):
                trace._recording.delivered(1, seq, 0, 0.0, 0.0, None, -1, copies)
            assert [getattr(each, "copied", None) for each in trace._recording._records] == [False, True, False]


def test_a_forked_child_has_traces_of_its_own(tmp_path: Path) -> None:
    """Its parent's goes on in the parent alone."""
    loader = AsyncDataLoader[Any](Numbers(8), batch_size=4)

    async def load() -> None:
        async for _ in loader:
            pass

    with loader.trace(tmp_path / "a.json"):
        asyncio.run(load())
        child = os.fork()
        if not child:
            code = 1
            try:
                with loader.trace(tmp_path / "b.json"):
                    asyncio.run(load())
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert not (tmp_path / "a.json").exists()
    assert [len(read_trace(tmp_path / name).delivered) for name in ("a.json", "b.json")] == [2, 2]


@pytest.mark.parametrize("workers", [0, 1])
def test_reads_and_retries_of_a_store(workers: int, tmp_path: Path) -> None:
    """Are spans and events of the process that reads."""

    async def load() -> None:
        async with serving() as store:
            for name in "abc":
                store.put(f"{name}.jsonl", b'{"n": 1}\n' * 8)
            store.faults["b.jsonl"].extend([status(503)] * 2)
            dataset = RemoteIterableDataset(f"{store.url}/{{a,b,c}}.jsonl")
            options: dict[str, Any] = {"batch_size": 8, "num_workers": workers}
            options["multiprocessing_context"] = "fork" if workers else None
            async with AsyncDataLoader[Any](dataset, **options) as loader, loader.trace(tmp_path / "a.json"):
                assert len([batch async for batch in loader]) == 3

    run_async(load())
    found = read_trace(tmp_path / "a.json")
    reads = [names["read"] for (track, _), names in found.spans.items() if track == found.tracks[-1]]
    assert sum(reads) >= 3
    assert len(found.events["retry"]) == 2


class Odd(Numbers):
    """Its sample 5 raises."""

    def __getitem__(self, index: int) -> Any:
        return 1 / 0 if index == 5 else super().__getitem__(index)


def test_skipped_samples_and_errors(tmp_path: Path) -> None:
    """Samples that raise are events, and so is an error in place of a batch."""
    skipping = read_all("sync", Odd(8), tmp_path / "a.json", batch_size=2, num_workers=1, seed=1, on_error="skip")
    assert [each["samples"] for each in skipping.events["samples skipped"]] == [1]
    with pytest.raises(ZeroDivisionError):
        read_all("sync", Odd(8), tmp_path / "b.json", batch_size=2, num_workers=1)
    (event,) = read_trace(tmp_path / "b.json").events["no batch"]
    assert (event["outcome"], event["batch"]) == ("WorkerFailure", 2)


def ranges_of(profiler: Any) -> set[str]:
    return {each.key for each in profiler.key_averages()}


def test_the_profiler_has_ranges() -> None:
    """Of waiting, and of fetching in this process; the loader's own range is torch's."""
    from torch.autograd.profiler import profile

    for workers, expected in ((0, "asyncloader::fetch"), (1, "asyncloader::wait")):
        with DataLoader[Any](Numbers(8), batch_size=4, num_workers=workers) as loader, profile() as profiler:
            list(loader)
        names = ranges_of(profiler)
        assert expected in names
        assert any(name.startswith("enumerate(DataLoader)#") for name in names)

    async def load() -> set[str]:
        async with AsyncDataLoader[Any](Numbers(8), batch_size=4, num_workers=1) as loader:
            with profile() as profiler:
                async for _ in loader:
                    pass
        return ranges_of(profiler)

    assert "asyncloader::wait" in run_async(load())


def test_a_worker_thread_that_has_ended_is_not_traced(tmp_path: Path) -> None:
    """Nothing refers from its counters, which the loader keeps, to what noted its spans."""
    with DataLoader[Any](Numbers(8), batch_size=4, num_workers=1, workers="threads") as loader:
        with loader.trace(tmp_path / "a.json"):
            list(loader)
        workers = loader._asyncloader_state.statistics._workers
    assert [each.recorder.sink for each in workers.values()] == [None]
