"""`asyncloader.install()`: inside the block torch's class constructs our loader in all code; nothing stays after it."""

from __future__ import annotations

import copy
import functools
import pickle
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data

from asyncloader import DataLoader, install
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import Numbers
from tests.helpers.installing import Torchs, told
from tests.helpers.running import collect, environment, run_script

pytestmark = pytest.mark.usefixtures("constructors")


# ------------------------------------------------------------------------------------------------- the block


def test_it_ends_with_its_block() -> None:
    """`with` gives our class; torch's class constructs it inside, and no longer after an exception left the block."""
    made = []

    def fail() -> None:
        with install() as ours:
            made.extend([ours, type(torch.utils.data.DataLoader(Numbers(3)))])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert made == [DataLoader, DataLoader]
    assert type(torch.utils.data.DataLoader(Numbers(3))) is Torchs


def test_blocks_nest_and_overlap() -> None:
    """The replacement lasts until the last of overlapping blocks is left, in any order."""
    first, second = install(), install()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert type(Torchs(Numbers(3))) is DataLoader
    with install():
        pass
    assert type(Torchs(Numbers(3))) is DataLoader
    second.__exit__(None, None, None)
    assert type(Torchs(Numbers(3))) is Torchs


@pytest.mark.parametrize("workers", [0, 2])
def test_code_that_makes_torchs_loader_gets_ours(workers: int) -> None:
    """Same arguments, same batches, our loader; the loader works after the block, too."""
    with install():
        loader: Any = torch.utils.data.DataLoader(Numbers(7), batch_size=2, shuffle=False, num_workers=workers)
        typed = torch.utils.data.DataLoader[Any](Numbers(7))
    assert isinstance(loader, DataLoader)
    assert isinstance(typed, DataLoader)
    for _ in range(2):
        assert_same(list(loader), collect("torch", Numbers(7), batch_size=2))
    assert loader.stats()["data/batches"] == 8


def test_wherever_the_class_was_taken_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under another name in a module, in a table, as a default argument, in a `partial`: each makes our loader."""

    def default(kind: Any = torch.utils.data.DataLoader) -> Any:
        return kind(Numbers(3))

    library: Any = types.ModuleType("library")
    library.TorchDataLoader, library.table = Torchs, {"plain": Torchs}
    monkeypatch.setitem(sys.modules, "library", library)
    part = functools.partial(Torchs, Numbers(3))
    with install():
        made = [default(), library.TorchDataLoader(Numbers(3)), library.table["plain"](Numbers(3)), part()]
        assert library.TorchDataLoader is Torchs, "no name is replaced"
    assert {type(loader) for loader in made} == {DataLoader}
    assert {type(loader) for loader in (default(), part())} == {Torchs}


def test_loaders_made_before_stay_torchs() -> None:
    """Older loaders are iterated by torch's engine inside the block, without a warning; they pickle and copy."""
    before = Torchs(Numbers(4), num_workers=1)
    with warnings.catch_warnings(record=True) as caught, install():
        warnings.simplefilter("always")
        assert isinstance(before, torch.utils.data.DataLoader)
        for loader in (before, pickle.loads(pickle.dumps(before)), copy.copy(before)):
            assert type(loader) is Torchs
            assert_same(list(loader), collect("torch", Numbers(4)))
    assert told(caught) == []


def test_a_library_that_wraps_torchs_constructor_inside() -> None:
    """The library's wrapper stays in place when the block ends; the constructor that it calls is then torch's alone."""
    kind: Any = Torchs
    original = kind.__init__
    calls = []
    with install():
        inside = kind.__init__

        def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
            calls.append(type(self))
            inside(self, *args, **kwargs)

        kind.__init__ = wrapper
    try:
        assert type(Torchs(Numbers(3))) is Torchs
        with install():
            assert type(Torchs(Numbers(3))) is DataLoader
        assert kind.__init__ is wrapper
    finally:
        kind.__init__ = original
    assert calls == [Torchs, DataLoader]


@pytest.mark.thorough
def test_nothing_is_imported_for_it(tmp_path: Path) -> None:
    """Frameworks that the program does not use are not imported."""
    program = """
import sys
import asyncloader
with asyncloader.install():
    pass
found = {name.partition(".")[0] for name in sys.modules}
print(sorted(found & {"accelerate", "ignite", "ray", "timm", "transformers", "webdataset"}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment(), cwd=tmp_path
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("held", ["", "block = "])
def test_a_block_that_is_never_left(held: str, tmp_path: Path) -> None:
    """The replacement lasts for the rest of the process, with or without a reference; nothing is printed at exit."""
    script = f"""
import torch
import asyncloader
{held}asyncloader.install()
{held or "block = "}asyncloader.install().__enter__()
assert isinstance(torch.utils.data.DataLoader([1]), asyncloader.DataLoader)
"""
    done = run_script(tmp_path, script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
