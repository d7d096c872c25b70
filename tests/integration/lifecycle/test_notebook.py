"""Cells of a notebook, run in a real kernel: their classes and functions work in every kind of worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import PATIENCE_S, environment, without_slow_start

pytest.importorskip("cloudpickle")

# Runs in a process of its own: the client leaves threads and sockets of zmq, which end with the process.
CLIENT = """
import sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[1])
"""


def run_cells(folder: Path, *cells: str) -> list[Any]:
    """Run the cells in one kernel; the outputs of each cell. A cell that raises fails the test, with its traceback."""
    pytest.importorskip("ipykernel")
    pytest.importorskip("nbclient")
    notebooks = pytest.importorskip("nbformat.v4")
    file = folder / "cells.ipynb"
    file.write_text(notebooks.writes(notebooks.new_notebook(cells=[*map(notebooks.new_code_cell, cells)])))
    env = {
        **environment(),
        "PYTHONWARNINGS": "default",  # the kernel's own code causes warnings
        **dict.fromkeys(["IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"], str(folder)),
    }
    command = [sys.executable, "-c", CLIENT, str(file)]
    client = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=3 * PATIENCE_S, env=env, cwd=folder
    )
    assert client.returncode == 0, client.stderr
    return [cell.outputs for cell in notebooks.reads(file.read_text()).cells]


DEFINITIONS = """
import asyncio, enum, multiprocessing, os, signal, threading, warnings
from dataclasses import dataclass
from typing import NamedTuple
import torch
from asyncloader import AsyncDataLoader, DataLoader, Dataset, share

# A notebook's kernel has threads, and shows what Python 3.12 and later say of a fork then.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)

SCALE = 10

class Row(NamedTuple):      # of the sampler alone: no worker is started with it
    number: int

class Kind(enum.Enum):
    EVEN = 0
    ODD = 1

class Refused(Exception):
    pass

class Numbers(Dataset):
    class Sample:
        def __init__(self, number):
            self.number = number
    def __len__(self):
        return 8
    def __getitem__(self, row):
        if row.number == 100:
            raise Refused(row.number)
        return Numbers.Sample(row.number * SCALE)

@dataclass
class Batch:
    numbers: torch.Tensor
    kinds: list
    samples: list

def collate(samples):
    numbers = torch.tensor([sample.number for sample in samples])
    return Batch(numbers, [Kind(sample.number // SCALE % 2) for sample in samples], samples)
"""
CHECKS = """
def check(batches, scale=10):
    assert torch.cat([batch.numbers for batch in batches]).tolist() == [scale * i for i in range(8)]
    for batch in batches:
        assert type(batch) is Batch and batch.kinds == [Kind.EVEN, Kind.ODD]
        assert all(type(sample) is Numbers.Sample for sample in batch.samples)

def make(kind=DataLoader, rows=range(8), **options):
    options = {"collate_fn": collate, "num_workers": 1, "multiprocessing_context": METHOD, **options}
    return kind(Numbers(), 2, sampler=[Row(number) for number in rows], **options)
"""
READ = """
with make(persistent_workers=True) as loader:
    for _ in range(2):
        check(list(loader))
"""
READ_ASYNC = """
async with make(AsyncDataLoader) as loader:
    check([batch async for batch in loader])
"""
RAISE = """
try:
    list(make(rows=[100, 0]))
    raise AssertionError("no error")
except Refused as error:
    assert "100" in str(error)
"""
REDEFINE = """
class Numbers(Dataset):
    class Sample(Numbers.Sample):
        pass
    def __len__(self):
        return 8
    def __getitem__(self, row):
        return Numbers.Sample(row.number * SCALE * 3)
class Batch(Batch):
    pass
with make() as loader:
    check(list(loader), scale=30)
"""
INTERRUPT = """
class Stuck(Numbers):
    def __getitem__(self, row):
        if row.number == 3:
            os.kill(KERNEL, signal.SIGINT)    # as the interrupt button does
            threading.Event().wait()
        return super().__getitem__(row)
KERNEL = os.getpid()
loader = make()
loader = DataLoader(Stuck(), sampler=loader.sampler, collate_fn=list, num_workers=1, multiprocessing_context=METHOD)
try:
    for batch in loader:
        pass
    raise AssertionError("no interrupt")
except KeyboardInterrupt:
    loader.close()
assert multiprocessing.active_children() == []
"""


@pytest.mark.thorough
@pytest.mark.network
def test_what_cells_define_goes_to_workers_and_comes_back_as_itself(tmp_path: Path) -> None:
    """Dataset, collate function, indices, batches and exceptions keep their classes; a cell that is run again takes
    effect; an interrupt ends the workers.
    """
    cells = [
        cell
        for method in ("fork", "spawn", "forkserver")
        for cell in (DEFINITIONS, f"METHOD = {method!r}\n{CHECKS}", READ, READ_ASYNC, RAISE, REDEFINE, INTERRUPT)
    ]
    outputs: list[Any] = run_cells(tmp_path, *cells, "make()")
    assert not any(outputs[:-1]), outputs
    (shown,) = outputs[-1]
    assert "<table" in shown["data"]["text/html"]
    assert "num_workers" in shown["data"]["text/html"]


STREAMED = """
from asyncloader import DataLoader, Dataset, share

class Item:                 # of the shared list alone: the dataset's code does not name it
    def __init__(self, number):
        self.number = number

class Index:                # of the sampler alone
    def __init__(self, number):
        self.number = number

class Items(Dataset):
    def __init__(self, items):
        self.items = items
    def __len__(self):
        return 4
    def __getitem__(self, index):
        assert type(index) is Index
        return self.items[index.number]

indices = [Index(number) for number in range(4)]
loader = DataLoader(
    Items(share([Item(number) for number in range(4)])), None, sampler=indices, num_workers=1,
    multiprocessing_context="spawn", persistent_workers=True,
)
with loader:
    for epoch in range(2):
        items = list(loader)
        assert all(type(item) is Item for item in items)
        assert [item.number for item in items] == list(range(4))
"""


@pytest.mark.thorough
def test_classes_of_a_program_from_standard_input(tmp_path: Path) -> None:
    """Those of the dataset, of indices and of a shared list are the same in the worker; no child can import the
    program's `__file__`.
    """
    command = [sys.executable, "-"]
    ran = subprocess.run(
        command, input=STREAMED, capture_output=True, text=True, check=False, timeout=3 * PATIENCE_S, env=environment()
    )
    assert ran.returncode == 0, ran.stderr
    assert not without_slow_start(ran.stderr)
