"""Loaders without workers and with worker threads need nothing that Windows lacks. There is no Windows here: a Python
from which those modules and functions were removed, and which calls itself win32, stands for it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.running import run_script

PROGRAM = """
import asyncio, sys, warnings
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from tests.helpers.like_windows import MODULES, become_windows

become_windows()
warnings.simplefilter("error")
from asyncloader import AsyncDataLoader, DataLoader, Recovery, StatefulDataLoader, UnsupportedPlatform, sample_rng

class Rows(Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, index):
        return torch.full((3,), index) + torch.rand((), generator=sample_rng().torch) * 0

class Awaited(Rows):
    async def __getitem__(self, index):
        await asyncio.sleep(0.001)
        return torch.full((3,), index)

class Large(Rows):
    def __getitem__(self, index):
        return torch.full((4 << 20,), index, dtype=torch.uint8)

class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        return iter(range(0 if info is None else info.id, 20, 1 if info is None else info.num_workers))

async def every(loader):
    return [batch async for batch in loader]

for dataset in (Rows(), Awaited(), Large(), Stream()):
    size = 10 if type(dataset) is Large else 4
    for where in ({}, {"num_workers": 2, "workers": "threads"}):
        for options in ({}, {"seed": 3, "recovery": Recovery(worker_timeout=50) if where else Recovery()}):
            for kind in (DataLoader, AsyncDataLoader, *[StatefulDataLoader] * (not options)):
                loader = kind(dataset, batch_size=size, **where, **options)
                got = asyncio.run(every(loader)) if kind is AsyncDataLoader else list(loader)
                assert sorted(int(row.flatten()[0]) for batch in got for row in batch) == list(range(20))
                loader.stats(), loader.explain(), loader.state_dict()
    for kind in (DataLoader, AsyncDataLoader, StatefulDataLoader):
        try:
            kind(dataset, num_workers=2)
        except UnsupportedPlatform as error:
            assert 'workers="threads"' in str(error), error
        else:
            raise AssertionError("worker processes were not refused")
try:
    from asyncloader import install
except UnsupportedPlatform:
    pass
else:
    raise AssertionError("install was not refused")
assert not MODULES & set(sys.modules)
print("trained")
"""


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="newer standard libraries import what they think Windows has, which is not here"
)
def test_epochs_without_what_windows_lacks(tmp_path: Path) -> None:
    """Map, async and iterable datasets and large batches, by all three loaders, in torch and seeded mode, with no
    workers and with threads; worker processes and `install` are refused with an error that says what to do.
    """
    ended = run_script(tmp_path, PROGRAM, fresh=True)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("trained\n", "", 0)
