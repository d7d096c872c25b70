"""`torch.set_default_device` is the user's: our code never makes a tensor on that device, or of a default dtype."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import _device

from tests.helpers.running import run_script

ROOT = Path(__file__).parent.parent
CONSTRUCTORS = _device._device_constructors()
OF_ANOTHERS_DTYPE = {torch.as_tensor, torch.asarray, torch.tensor}  # the dtype is that of the data


def unnamed(tree: ast.AST) -> Iterator[str]:
    """Find the calls that make a tensor and leave the device, or the dtype, to defaults."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.")):
            continue
        called: Any = torch
        for name in ast.unparse(node.func).split(".")[1:]:
            called = getattr(called, name, None)  # None: a method of another call's result
        if called not in CONSTRUCTORS:  # torch.cuda.nvtx.range, for one, makes no tensor
            continue
        named = {keyword.arg for keyword in node.keywords}
        if None in named:
            continue  # **options: a comment stands where these are made
        if "device" not in named or not ("dtype" in named or called in OF_ANOTHERS_DTYPE):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_every_tensor_of_ours_names_its_device_and_dtype() -> None:
    """No constructor in the source tree takes the user's defaults."""
    found = [
        f"{path.relative_to(ROOT)}, {call}"
        for room in ("asyncloader", "workers", "transports")
        for path in sorted((ROOT / room).rglob("*.py"))
        if not path.is_symlink()
        for call in unnamed(ast.parse(path.read_text()))
    ]
    assert not found, "\n".join(found)


def test_the_search_finds() -> None:
    """Both defaults are found, in calls of any shape."""
    calls = ["torch.empty(3)", "torch.zeros(3, dtype=d)", "torch.ones(3, device=d)", "torch.sparse_coo_tensor(i, v)"]
    assert [len(list(unnamed(ast.parse(call)))) for call in calls] == [1] * 4
    assert not list(unnamed(ast.parse("torch.empty(3, dtype=d, device='cpu'); x.empty(3)")))


PROGRAM = """
import sys
import torch
torch.set_default_device("meta")
import asyncloader  # after it: constants of modules are made under it
import numpy as np

SAMPLES = torch.arange(24.0, device="cpu").view(8, 3)

class Rows:
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return SAMPLES[i], np.full(3, i, np.float32), i, float(i), {"e": np.zeros((0, 2)), "s": np.int64(i)}

def as_they_are(samples):
    rows = [sample[0] for sample in samples]
    return torch.stack(rows), torch.stack(rows).t(), rows[0][:0], [rows[0], rows[0][1:]], rows[0].as_subclass(Sub)

class Sub(torch.Tensor):
    pass

def cpu_only(value):
    if isinstance(value, torch.Tensor):
        assert value.device.type == "cpu", value
        value.tolist()
    elif isinstance(value, dict):
        cpu_only(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for part in value:
            cpu_only(part)

def check(kept, first):
    assert len(kept) == 8, kept
    cpu_only(kept)
    assert [batch[0].tolist() for batch in kept] == [[SAMPLES[i].tolist()] for i in first]

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        for collate in (None, torch.utils.data.default_collate, as_they_are):
            loader = asyncloader.DataLoader(
                Rows(), batch_size=1, num_workers=1, collate_fn=collate, multiprocessing_context=method,
                generator=torch.Generator(),
            )
            check(list(loader), range(8))  # all are kept: the last are copied out
    seeded = dict(batch_size=2, shuffle=True, seed=1, num_workers=1, multiprocessing_context="fork")
    with asyncloader.DataLoader(Rows(), **seeded) as loader:
        shuffled = [batch for batch in loader]
    cpu_only(shuffled)
    torch.set_default_device("cpu")
    with asyncloader.DataLoader(Rows(), **seeded) as loader:
        assert [b[2].tolist() for b in loader] == [b[2].tolist() for b in shuffled]
    print("done")
"""


def test_batches_do_not_depend_on_it(tmp_path: Path) -> None:
    """With "meta", where no tensor can be read, batches are the usual ones: collated, copied out, strided, empty."""
    done = run_script(tmp_path, PROGRAM, fresh=True)
    assert done.stdout.strip() == "done", done.stderr
