"""Nodes with other code or other data than the loader, from the start or from mid-epoch: batches of both never mix."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module, invalidate_caches
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader, Service, ServiceUnavailable, StateError
from tests import script_server
from tests.helpers.running import PATIENCE_S, environment
from tests.service.proxy import proxied
from tests.service.serving import NodeProcess, serving

OPTIONS: dict[str, Any] = {"batch_size": 4, "seed": 3, "num_workers": 2, "shuffle": True}
DATA = """
import json
from pathlib import Path
from torch.utils.data import Dataset, IterableDataset
import asyncloader
from skewed import steps

SHIFT = 100

class Shifted(Dataset):
    def __init__(self, n):
        self.n = n
    def __len__(self):
        return self.n
    def __getitem__(self, index):
        if not 0 <= index < self.n:
            raise IndexError(index)
        return steps.changed(index + SHIFT)

class Stream(IterableDataset):
    def __iter__(self):
        yield from range(8)

@asyncloader.definition
def data():
    length = int(Path("length").read_text())
    return Shifted(length) if length else Stream()
"""
STEPS = "def changed(value):\n    return 2 * value\n"


@pytest.fixture(autouse=True)
def modules(tmp_path: Path) -> Iterator[Path]:
    """Install the loader's copy of the package until the test's end."""
    folder = install(tmp_path / "loader")
    sys.path.insert(0, str(folder))
    forget()
    yield folder
    sys.path.remove(str(folder))
    forget()


def install(folder: Path, data: str = DATA, steps: str = STEPS, length: int = 40) -> Path:
    """Make a machine's folder with the package and its data, by default equal to the others."""
    (folder / "skewed").mkdir(parents=True, exist_ok=True)
    (folder / "skewed" / "__init__.py").touch()
    (folder / "skewed" / "data.py").write_text(data)
    (folder / "skewed" / "steps.py").write_text(steps)
    (folder / "length").write_text(str(length))
    return folder


@contextmanager
def node_in(folder: Path, **options: Any) -> Generator[NodeProcess]:
    """Start a node in this folder, where it finds the package. Edits may leave the size and time of a file."""
    options = {"listen": ["127.0.0.1:0"], "workers": 1, **options}
    with serving(folder, ["data"], module="skewed.data", cwd=folder, PYTHONDONTWRITEBYTECODE="1", **options) as node:
        yield node


def defined() -> Any:
    return import_module("skewed.data").data()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"steps": STEPS.replace("2", "3")}, "the definition data differs"),
        ({"length": 41}, "length=41, and the loader planned with length=40"),
    ],
    ids=["library", "length"],
)
@pytest.mark.thorough
def test_a_node_that_differs_is_not_used(change: Any, text: str, tmp_path: Path, caplog: Any) -> None:
    """The other node makes all batches, and the reason is logged; without another, an error names both versions."""
    with (
        node_in(install(tmp_path / "first")) as first,
        node_in(install(tmp_path / "second", **change)) as second,
        DataLoader[Any](defined(), **OPTIONS, workers=f"{first.tcp},{second.tcp}") as loader,
    ):
        got = sorted(int(value) for batch in loader for value in batch)
        assert got == [2 * (index + 100) for index in range(40)]
        if "definition" in text:
            with pytest.raises(ServiceUnavailable, match=rf"{second.tcp}.*{text}"):
                iter(DataLoader[Any](defined(), **OPTIONS, workers=second.tcp))
    assert text in caplog.text
    assert second.tcp in caplog.text


@pytest.mark.thorough
@pytest.mark.parametrize("between", [False, True], ids=["within", "between"])
def test_a_node_that_comes_back_with_other_data(between: bool, tmp_path: Path) -> None:
    """Whether it comes back in mid-epoch or between epochs of persistent workers: an error names the node and both
    lengths, and no batch of the new data is delivered.
    """
    folder = install(tmp_path / "node", length=400)
    options: dict[str, Any] = {**OPTIONS, "persistent_workers": True, "max_worker_restarts": 0}
    with ExitStack() as lives:
        node = lives.enter_context(node_in(folder))
        proxy = lives.enter_context(proxied(node.tcp))
        loader = DataLoader[Any](defined(), **options, workers=Service(proxy.address, wait=PATIENCE_S))
        lives.callback(loader.close)
        batches = iter(loader)
        got = list(batches) if between else list(islice(batches, 3))
        node.kill()
        node = lives.enter_context(node_in(install(folder, length=600)))
        proxy.aim(node.tcp)
        with pytest.raises(ServiceUnavailable, match=rf"{proxy.address}.*length=600.*planned with length=400"):
            got += list(loader if between else batches)
        assert all(int(value) < 2 * (400 + 100) for batch in got for value in batch)


@pytest.mark.thorough
def test_processes_that_are_replaced_after_a_change(tmp_path: Path) -> None:
    """The stored data change under a running node: batches of a new process are not mixed with those of the others."""
    folder = install(tmp_path / "node", length=400)
    with node_in(folder) as node:
        options: dict[str, Any] = {**OPTIONS, "num_workers": 1, "max_worker_restarts": 9}
        with DataLoader[Any](defined(), **options, workers=node.tcp) as loader:
            batches, got = iter(loader), []
            got.append(next(batches))
            install(folder, length=500)
            for process in node.workers():
                process.kill()
            # The error is raised by the node, if it knows of the change by then, or by the process.
            with pytest.raises((ServiceUnavailable, StateError), match=r"length=500, .* planned with .*400"):
                got += batches
            assert all(int(value) < 2 * (400 + 100) for batch in got for value in batch)


@pytest.mark.thorough
def test_code_that_is_edited_under_a_node(tmp_path: Path) -> None:
    """New processes would run the edited code, and the old ones not: loaders get an error at once that names the
    definition, and the node serves again when the code has been put back.
    """
    folder = install(tmp_path / "node", length=400)
    with node_in(folder) as node:
        options: dict[str, Any] = {**OPTIONS, "num_workers": 1, "max_worker_restarts": 9}
        text = r"the definition data differs: .* in the node, and"
        with DataLoader[Any](defined(), **options, workers=Service(node.tcp, wait=1)) as loader:
            batches = iter(loader)
            got = [next(batches)]
            install(folder, steps=STEPS.replace("2", "3"), length=400)
            for process in node.workers():
                process.kill()
            with pytest.raises(ServiceUnavailable, match=text):
                got += batches
            assert all(int(value) % 2 == 0 for batch in got for value in batch)
        with pytest.raises(ServiceUnavailable, match=text):
            iter(DataLoader[Any](defined(), **options, workers=Service(node.tcp, wait=1)))
        install(folder, length=400)
        with DataLoader[Any](defined(), **options, workers=node.tcp) as loader:
            assert len(list(loader)) == 100


def test_the_code_that_a_fingerprint_covers(tmp_path: Path, modules: Path) -> None:
    """It covers the module with all its helpers, and the modules of its package that it imports; not other files,
    line endings, or the folder. It is that of the code that runs, not of a later edit.
    """
    other = "from . import other\n" + STEPS
    windows = install(tmp_path / "windows")
    for file in ("data.py", "steps.py"):
        path = windows / "skewed" / file
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    unused = install(tmp_path / "unused")
    (unused / "skewed" / "other.py").write_text("X = 1\n")
    assert len({fingerprint_in(each) for each in (modules, windows, unused)}) == 1
    folders = [
        modules,
        install(tmp_path / "helper", DATA.replace("SHIFT = 100", "SHIFT = 101")),
        install(tmp_path / "library", steps=STEPS.replace("2", "3")),
        install(tmp_path / "of the library", steps=other),
        install(tmp_path / "of the library too", steps=other),
    ]
    for number, folder in enumerate(folders[-2:]):
        (folder / "skewed" / "other.py").write_text(f"X = {number}\n")
    assert len({fingerprint_in(each) for each in folders}) == len(folders)
    made_by = defined().definition
    before = made_by.fingerprint()
    install(modules, steps=STEPS.replace("2", "4"))
    assert made_by.fingerprint() == before
    with pytest.raises(ValueError, match=rf"data differs: .* 0123 at the node, and {before} where"):
        made_by.check("0123", "at the node")


@pytest.mark.parametrize("how", [["skewed/data.py"], ["-m", "skewed.data"]], ids=["file", "module"])
def test_the_main_module_is_the_module_that_nodes_import(how: list[str], modules: Path) -> None:
    """The program may itself have the definition. A module that is run as a file is in no package."""
    path = modules / "skewed" / "data.py"
    show = "\nif __name__ == '__main__': print(data.fingerprint())\n"
    path.write_text((DATA if how[0] == "-m" else DATA.replace("from skewed import steps", "")) + show)
    done = script_server.run([sys.executable, *how], timeout=PATIENCE_S, env=environment(), cwd=modules)
    assert done.stdout.strip() == fingerprint_in(modules), done.stderr


def fingerprint_in(folder: Path) -> str:
    """Return the fingerprint of the definition in this folder."""
    forget()
    sys.path.insert(0, str(folder))
    try:
        found: str = import_module("skewed.data").data.fingerprint()
        return found
    finally:
        sys.path.remove(str(folder))
        forget()


def forget() -> None:
    """Forget the imported modules, so that the next import reads the disk."""
    invalidate_caches()
    for name in [each for each in sys.modules if each.partition(".")[0] == "skewed"]:
        del sys.modules[name]
