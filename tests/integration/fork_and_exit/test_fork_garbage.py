"""Garbage that the main process had when a worker was forked: the worker never collects it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.running import run_script

LEAVES_GARBAGE = """
import gc, os, pathlib, sys

here = pathlib.Path(sys.argv[0]).parent
parent = os.getpid()
ENABLED = {enabled}
gc.enable() if ENABLED else gc.disable()


class Recorded:
    def __del__(self):
        if os.getpid() != parent:
            (here / f"collected by {{os.getpid()}}").touch()


def just_before_a_fork():
    enabled = gc.isenabled()
    gc.disable()
    recorded = Recorded()
    recorded.itself = recorded
    del recorded
    gc.set_threshold(1, 1, 1)  # from here on every new object may set off a collection
    if enabled:
        gc.enable()


# The first to be registered is the last to be called: nothing is made between it and the fork.
os.register_at_fork(before=just_before_a_fork, after_in_parent=lambda: gc.set_threshold(700, 10, 10))

import torch
from asyncloader import DataLoader


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        gc.collect()
        assert gc.isenabled() == ENABLED
        if index == 2 and not (here / "died").exists():
            (here / "died").touch()
            os._exit(1)  # so that a replacement is forked, too
        return index


assert sum(map(len, DataLoader(Data(), num_workers=2, seed=1, multiprocessing_context="fork"))) == 4
assert gc.isenabled() == ENABLED
assert (here / "died").exists()
print(*here.glob("collected by *"))
"""


@pytest.mark.parametrize("enabled", [True, False], ids=["collector on", "collector off"])
def test_a_forked_worker_collects_none_of_its_parents_garbage(enabled: bool, tmp_path: Path) -> None:
    """Neither before the worker's first line nor later; in both processes the collector stays on or off."""
    done = run_script(tmp_path, LEAVES_GARBAGE.format(enabled=enabled))
    assert (done.returncode, done.stdout) == (0, "\n")
    assert re.fullmatch(r"worker 0 \(pid \d+\) is replaced: exit code 1\n", done.stderr)
