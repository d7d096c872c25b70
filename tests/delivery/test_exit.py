"""The interpreter's end, and forks, in the middle of an epoch with a stage before the consumer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncloader import DataLoader, DeviceOptions
from tests.delivery.fake import installed
from tests.helpers.datasets import Numbers
from tests.helpers.running import run_script
from tests.pairwise import quickly

PREAMBLE = """
import asyncio, threading, torch
from asyncloader import AsyncDataLoader, DataLoader, DeviceOptions

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        return torch.full((3,), index)

def negated(batch):
    return -batch

DEVICE = DeviceOptions(device_transform=negated, device_prefetch=3)
OPTIONS = dict(num_workers=2, device="cpu", device_options=DEVICE)

if __name__ == "__main__":
"""

ENDS = {
    "sync": """
    batches = iter(DataLoader(Numbers(), **OPTIONS))
    print(next(batches).tolist())
    """,
    "async": """
    async def run():
        global batches
        batches = aiter(AsyncDataLoader(Numbers(), **OPTIONS))
        print((await anext(batches)).tolist())
    asyncio.run(run())
    """,
    "error": """
    for batch in DataLoader(Numbers(), **OPTIONS):
        print(batch.tolist())
        raise SystemExit(0)
    """,
    "thread": """
    def run():
        global batches
        batches = iter(DataLoader(Numbers(), **OPTIONS))
        print(next(batches).tolist())
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    """,
}


@pytest.mark.thorough
@pytest.mark.parametrize("end", quickly(ENDS, "sync", "async"))
def test_a_program_that_closes_nothing(end: str, tmp_path: Path) -> None:
    """It ends with its own exit code and without a message, whatever batches are ready or under way."""
    done = run_script(tmp_path, PREAMBLE + ENDS[end])
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[[0, 0, 0]]", "")


def test_a_fork_in_the_middle_of_an_epoch() -> None:
    """The child unlocks nothing and waits for no thread of its parent's; the parent's epoch goes on and is right."""
    with (
        installed() as machine,
        DataLoader[Any](
            Numbers(60), num_workers=2, device="cpu", device_options=DeviceOptions(device_prefetch=2)
        ) as loader,
    ):
        batches = iter(loader)
        got = [next(batches) for _ in range(5)]
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                del batches
                loader.close()
                status = sum(lock.undone for lock in machine.locks)
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        got += list(batches)
        assert torch.cat(got)[:, 0].tolist() == [100.0 * index for index in range(60)]
