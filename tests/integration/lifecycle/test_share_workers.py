"""`share` under real workers: one segment, for every loader and start method; writes stay private."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from asyncloader import DataLoader
from asyncloader.shared.layout import SharedDict, SharedList
from asyncloader.shared.share import share
from asyncloader.workers.setup_payload import Payload
from tests.helpers.running import run_loader
from tests.pairwise import quickly
from tests.unit.workers.test_setup_payload import setup

METHODS = ["fork", "spawn", "forkserver"]
WORDS = [f"é{i:06d}" for i in range(20_000)]

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")


def inode(shared: Any) -> int:
    """The inode of the segment that holds it."""
    return os.fstat(shared._segment._fd).st_ino


def is_mapped(number: int) -> bool:
    """Whether this process maps that segment; True where /proc does not exist."""
    maps = Path("/proc/self/maps")
    return not maps.exists() or bool(re.search(rf" {number} +/memfd:asyncloader", maps.read_text()))


class Everything(Dataset[Any]):
    """Reads every kind of shared structure; reports whether it lies in the segments of the main process."""

    def __init__(self) -> None:
        self.words = share(WORDS)
        self.tail = self.words[::-1]
        self.table = share({word: i for i, word in enumerate(WORDS)})
        self.nested: Any = share({"x": np.arange(100), "deep": {"words": WORDS[:2000]}, "t": torch.arange(100)})
        self.deep = self.nested["deep"]["words"]
        self.inodes = [inode(each) for each in (self.words, self.table, self.nested)]

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        assert isinstance(self.words, SharedList)
        assert isinstance(self.table, SharedDict)
        assert inode(self.deep) == inode(self.nested)
        assert inode(self.words) == inode(self.tail)
        return {
            "word": self.words[index],
            "last": self.tail[index],
            "place": self.table[WORDS[-1 - index]],
            "deep": self.deep[index],
            "x": self.nested["x"][index],
            "tensor": self.nested["t"][index],
            "same segments": all(map(is_mapped, self.inodes))
            and [inode(each) for each in (self.words, self.table, self.nested)],
            "pid": os.getpid(),
        }


def epoch(loader: str, dataset: Dataset[Any], method: str, **options: Any) -> list[Any]:
    options = {"num_workers": 2, "batch_size": 2, "collate_fn": list, "multiprocessing_context": method, **options}
    if loader == "torch":
        return [sample for batch in torch.utils.data.DataLoader(dataset, **options) for sample in batch]
    return [sample for batch in run_loader(loader, dataset, **options).epochs[0] for sample in batch]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("loader", "method"),
    quickly(
        [*[(loader, method) for loader in ("torch", "sync") for method in METHODS], ("asyncio", "fork")],
        ("torch", "fork"),
        ("sync", "spawn"),
        ("asyncio", "fork"),
    ),
)
def test_workers_read_the_main_process_segments(loader: str, method: str) -> None:
    """Under torch's loader and ours, forked or spawned: the contents are right, and the memory is the very same."""
    dataset = Everything()
    samples = epoch(loader, dataset, method)
    assert len({sample["pid"] for sample in samples} - {os.getpid()}) == 2
    for index, sample in enumerate(samples):
        del sample["pid"]
        assert sample == {
            "word": WORDS[index],
            "last": WORDS[-1 - index],
            "place": len(WORDS) - 1 - index,
            "deep": WORDS[index],
            "x": index,
            "tensor": index,
            "same segments": dataset.inodes,
        }


class Parts(Dataset[Any]):
    """Samples that are themselves parts of shared structures."""

    def __init__(self) -> None:
        self.data: Any = share({"words": WORDS[:2000], "x": torch.arange(6).view(2, 3), "t": torch.arange(3)})

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return self.data["words"][index : index + 2], self.data["x"][index], self.data["t"]


@pytest.mark.parametrize("loader", ["torch", "sync"])
@pytest.mark.parametrize("collate", ["default", "list"])
def test_shared_parts_as_samples(loader: str, collate: str) -> None:
    """A worker may return such parts: they are collated as sequences, or arrive by value as plain lists."""
    options: dict[str, Any] = {"collate_fn": list} if collate == "list" else {"collate_fn": None}
    dataset = Parts()
    make: Any = torch.utils.data.DataLoader if loader == "torch" else DataLoader
    (batch,) = make(dataset, batch_size=2, num_workers=1, **options)
    if collate == "list":
        assert batch[1][0] == WORDS[1:3]
        assert type(batch[1][0]) is list
        assert batch[1][1].tolist() == [3, 4, 5]
    else:
        words, x, t = batch
        assert [tuple(each) for each in words] == [(WORDS[0], WORDS[1]), (WORDS[1], WORDS[2])]
        assert (x.tolist(), t.tolist()) == ([[0, 1, 2], [3, 4, 5]], [[0, 1, 2]] * 2)


class Rows(Dataset[Any]):
    def __init__(self) -> None:
        self.data: Any = share({"x": np.arange(6.0).reshape(3, 2), "rows": [np.arange(2), np.arange(2)] * 2})

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return self.data["x"][index], {"row": self.data["rows"][index]}


@pytest.mark.parametrize("method", METHODS[:2])
def test_rows_of_arrays_as_samples(method: str) -> None:
    """Our workers collate read-only rows without a warning (torch's function warns): batches are writable."""
    ((x, rows),) = DataLoader[Any](Rows(), batch_size=3, num_workers=1, multiprocessing_context=method)
    assert x.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert rows["row"].tolist() == [[0, 1]] * 3
    x[0] = 7


def test_one_descriptor_for_all_parts() -> None:
    """However many parts of one segment a dataset holds, one descriptor is sent, and none of the content."""
    shared: Any = share({"words": WORDS, "more": WORDS[:5000]})
    payload = Payload.dump(setup([shared, shared["words"], shared["more"][::2], shared["words"][5:]]))
    try:
        assert len(payload.fds) == 1
        assert payload.nbytes < 5000
    finally:
        payload.close()


# ---------------------------------------------------------------------------------------------- writing and growing


class Writes(Dataset[Any]):
    """Each sample: this worker's writes to the shared tensor so far, and whether the write to the array was refused."""

    def __init__(self) -> None:
        self.inside: Any = share({"t": torch.zeros(10, dtype=torch.int64), "a": np.zeros(10)})

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.inside["t"][3] += 1
        return int(self.inside["t"][3]), not self.inside["a"].flags.writeable


@pytest.mark.thorough
@pytest.mark.parametrize("method", quickly(METHODS, "fork", "forkserver"))
def test_writing_is_private(method: str) -> None:
    """A worker's writes to a tensor are seen by that worker alone; an array refuses writes."""
    dataset = Writes()
    samples = epoch("sync", dataset, method, batch_size=1)
    # Two workers of four samples each: had they written to the same memory, counts would go up to 8.
    assert sorted(samples) == [(count, True) for count in (1, 1, 2, 2, 3, 3, 4, 4)]
    assert not dataset.inside["t"].any()


def private_growth(data: Any) -> int:
    """Bytes of private memory that reading all items adds to this process."""
    before = private_memory()
    for item in data:
        len(item)
    for place in range(len(data)):
        len(data[place])
    return private_memory() - before


def private_memory() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * sum(int(kilobytes) for kilobytes in re.findall(r"^Private_\w+:\s+(\d+)", text, re.MULTILINE))


def measure(connection: Any, data: Any, growth: Callable[[Any], int]) -> None:
    growth(data[:10])  # loads the code's own pages
    connection.send(growth(data))


def growth_in_child(data: Any) -> int:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=measure, args=(theirs, data, private_growth))
    child.start()
    theirs.close()
    grown: int = ours.recv()
    child.join()
    child.close()
    ours.close()
    return grown


@linux
def test_forked_reader_does_not_grow() -> None:
    """Reading everything copies no page in a forked process; reading the plain list copies nearly all of it."""
    data = [f"{i:0200d}" for i in range(50_000)]
    assert growth_in_child(data) > 8_000_000
    shared = share(data)
    assert shared == data  # read all pages: a page that a single process has read counts as private to it
    assert growth_in_child(shared) < 1_000_000


# ------------------------------------------------------------------------------------------------- passing it on


def rank(connection: Any, dataset: Everything, method: str) -> None:
    """A launcher's process, whose loader starts workers itself."""
    samples = epoch("torch", dataset, method, num_workers=1)
    connection.send([(sample["word"], sample["same segments"]) for sample in samples])


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS[1:])
def test_passed_on_by_a_spawned_process(method: str) -> None:
    """A spawned process that spawns others passes the same segments on."""
    dataset = Everything()
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=rank, args=(theirs, dataset, method))
    child.start()
    theirs.close()
    assert ours.recv() == [(WORDS[index], dataset.inodes) for index in range(12)]
    child.join()
    child.close()
    ours.close()
