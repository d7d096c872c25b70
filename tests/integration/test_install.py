"""`asyncloader.install()`: inside the block torch's name means our class, everywhere; afterwards nothing is left."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data

import asyncloader
from asyncloader import DataLoader, install
from asyncloader.patching import PLACES
from tests.integration.comparing import assert_same
from tests.integration.datasets import Numbers
from tests.integration.running import collect, environment

Torchs = torch.utils.data.DataLoader


def names() -> list[Any]:
    """What the two names of torch's are now."""
    import torch.utils.data.dataloader as module

    return [torch.utils.data.DataLoader, module.DataLoader]


def test_the_name_means_ours_and_then_torchs_again() -> None:
    """Both of torch's names are our class inside the block, which `with` gives, and torch's own class after it."""
    with install() as ours:
        assert names() == [ours, ours]
        assert issubclass(ours, DataLoader)
    assert names() == [Torchs, Torchs]


def test_an_error_in_the_block_puts_torchs_back() -> None:
    """An exception passes through, and torch's class is back."""
    with pytest.raises(ZeroDivisionError), install():
        raise ZeroDivisionError
    assert names() == [Torchs, Torchs]


def test_blocks_nest() -> None:
    """An inner block changes nothing, and its end neither; a second block after the first works like it."""
    for _ in range(2):
        with install() as outer:
            with install() as inner:
                assert inner is outer
            assert names() == [outer, outer]
        assert names() == [Torchs, Torchs]


def test_a_name_that_somebody_else_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left alone, and the other names come back all the same."""
    import torch.utils.data.dataloader as module

    class Theirs(Torchs[Any]):
        """Another package's."""

    monkeypatch.setattr(torch.utils.data, "DataLoader", Theirs)
    with install() as ours:
        assert names() == [Theirs, ours]
    assert names() == [Theirs, Torchs]
    assert module.DataLoader is Torchs


@pytest.mark.parametrize("workers", [0, 2])
def test_code_that_makes_torchs_loader_gets_ours(workers: int) -> None:
    """Same arguments, same batches, our loader; it lives on after the block."""
    with install():
        loader: Any = torch.utils.data.DataLoader(Numbers(7), batch_size=2, shuffle=False, num_workers=workers)
        typed = torch.utils.data.DataLoader[Any](Numbers(7))
    assert isinstance(loader, DataLoader)
    assert isinstance(typed, DataLoader)
    for _ in range(2):
        assert_same(list(loader), collect("torch", Numbers(7), batch_size=2))
    assert loader.stats()["data/batches"] == 8


def test_isinstance_stays_true() -> None:
    """Inside the block torch's own loaders, ours, and subclasses of either still are DataLoaders; nothing else is."""

    class Theirs(Torchs[Any]):
        pass

    class Mine(DataLoader[Any]):
        pass

    kinds: list[Any] = [Torchs, DataLoader, Theirs, Mine]
    loaders = [kind(Numbers(3)) for kind in kinds]
    with install() as ours:
        for kind, loader in zip(kinds, loaders, strict=True):
            assert isinstance(loader, torch.utils.data.DataLoader)
            assert issubclass(kind, torch.utils.data.DataLoader)
        assert isinstance(ours(Numbers(3)), torch.utils.data.DataLoader)
        assert not isinstance([1], torch.utils.data.DataLoader)
        assert not issubclass(list, torch.utils.data.DataLoader)
        made = ours(Numbers(3))
    assert isinstance(made, Torchs)
    assert isinstance(made, torch.utils.data.DataLoader)


def test_a_subclass_made_inside_is_a_class_like_any_other() -> None:
    """`class Own(torch.utils.data.DataLoader)` in the block: a subclass of ours, and only its instances are its own."""
    with install():

        class Own(torch.utils.data.DataLoader[Any]):
            def __iter__(self) -> Any:
                return (batch + 1 for batch in super().__iter__())

        own = Own(Numbers(2))
        assert isinstance(own, Own)
        assert isinstance(own, torch.utils.data.DataLoader)
        assert not isinstance(Torchs(Numbers(2)), Own)
        assert not issubclass(Torchs, Own)
    assert isinstance(own, DataLoader)
    assert [float(batch[0, 0]) for batch in own] == [1.0, 101.0]


def test_a_name_taken_before_stays_torchs() -> None:
    """Code that has torch's class goes on having it: its loaders are torch's, and so are its subclasses."""
    with install():
        loader = Torchs(Numbers(4), num_workers=1)
        assert type(loader) is Torchs
        assert_same(list(loader), collect("torch", Numbers(4)))


def test_it_holds_in_all_threads() -> None:
    """Another thread sees the same name."""
    seen: list[Any] = []
    with install() as ours:
        thread = threading.Thread(target=lambda: seen.append(torch.utils.data.DataLoader))
        thread.start()
        thread.join()
    assert seen == [ours]


FRAMEWORKS = [place for place in PLACES if not place.startswith("torch.")]


@pytest.mark.parametrize("place", FRAMEWORKS)
def test_frameworks_that_took_the_name(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework's module that took the name from torch has ours inside the block, and torch's again after it."""
    framework: Any = types.ModuleType(place)
    framework.DataLoader = Torchs
    monkeypatch.setitem(sys.modules, place, framework)
    with install() as ours:
        assert framework.DataLoader is ours
        with install():
            pass
        assert framework.DataLoader is ours
    assert framework.DataLoader is Torchs


def test_other_names_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module on the list that has another `DataLoader`, or none, is not touched."""
    patched, bare = types.ModuleType("timm.data.loader"), types.ModuleType("webdataset.compat")
    patched.DataLoader = list  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, patched.__name__, patched)
    monkeypatch.setitem(sys.modules, bare.__name__, bare)
    with install():
        assert patched.DataLoader is list
        assert not hasattr(bare, "DataLoader")
    assert patched.DataLoader is list
    assert not hasattr(bare, "DataLoader")


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


def test_its_loaders_pickle_and_clone() -> None:
    """A loader made inside can be pickled, read and cloned outside, and the other way round."""
    with install():
        inside: Any = torch.utils.data.DataLoader(Numbers(4), batch_size=2)
        packed = pickle.dumps(inside)
    copy = pickle.loads(packed)
    assert type(copy) is type(inside) is type(inside.clone())
    with install():
        assert_same(list(pickle.loads(packed)), collect("sync", Numbers(4), batch_size=2))
    assert_same(list(copy), list(inside))


def test_it_is_part_of_the_package() -> None:
    """`asyncloader.install` is it."""
    assert asyncloader.install is install
    assert "install" in asyncloader.__all__
