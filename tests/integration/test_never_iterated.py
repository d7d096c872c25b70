"""`NeverIteratedWarning`: a loader that was replaced by a framework says so when it is collected; others keep quiet."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncloader
from asyncloader import AsyncDataLoader, DataLoader, NeverIteratedWarning
from tests.integration.datasets import Numbers
from tests.integration.running import run_script


def messages(action: Callable[[], object]) -> list[str]:
    """The texts of the warnings while `action` runs and what it left is collected."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
        gc.collect()
    return [str(w.message) for w in caught if w.category is NeverIteratedWarning]


def test_its_class() -> None:
    """It can be filtered by its class, which is a UserWarning."""
    assert issubclass(NeverIteratedWarning, UserWarning)
    assert asyncloader.NeverIteratedWarning is NeverIteratedWarning


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"batch_size": None}, {"shuffle": True}], ids=str)
def test_an_unused_loader_warns_once(options: dict[str, Any]) -> None:
    """Collected without having been iterated, it tells which loader it was, and what to look at."""
    found = messages(lambda: DataLoader[Any](Numbers(4), **options))
    assert len(found) == 1
    assert repr(DataLoader[Any](Numbers(4), **options)) in found[0]
    assert "asyncloader.integrations" in found[0]
    assert "asyncloader.install" in found[0]


def test_an_unused_loader_in_a_cycle_warns() -> None:
    """Also when only the garbage collector finds it."""

    def make() -> None:
        loader: Any = DataLoader[Any](Numbers(4))
        loader._cycle = loader

    assert len(messages(make)) == 1


def test_reading_it_is_no_use() -> None:
    """Length and attributes are what a framework reads before it makes a loader of its own."""

    def read() -> None:
        loader = DataLoader[Any](Numbers(4), batch_size=2)
        assert len(loader) == 2
        options = {name: getattr(loader, name) for name in ("batch_sampler", "collate_fn", "num_workers")}
        assert len(list(torch.utils.data.DataLoader(loader.dataset, **options))) == 2

    assert len(messages(read)) == 1


USES: dict[str, Callable[[DataLoader[Any]], object]] = {
    "an epoch": list,
    "one batch": lambda loader: next(iter(loader)),
    "an iterator only": iter,
    "clone": lambda loader: list(loader.clone(dataset=Numbers(2))),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", USES)
def test_a_used_loader_is_silent(name: str, workers: int) -> None:
    """After iterating, even a little, cloning, copying or pickling there is nothing to tell."""

    def use() -> None:
        loader = DataLoader[Any](Numbers(4), num_workers=workers)
        USES[name](loader)

    assert messages(use) == []


COPIES: dict[str, Callable[[DataLoader[Any]], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda loader: pickle.loads(pickle.dumps(loader)),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_silent(name: str) -> None:
    """An unused copy of a loader does not warn: it may have been made in passing."""
    loader = DataLoader[Any](Numbers(4))
    assert messages(lambda: COPIES[name](loader)) == []
    list(loader)


def test_a_clone_warns_for_itself() -> None:
    """A clone is a loader like any other: if nobody iterates it, it says so."""
    loader = DataLoader[Any](Numbers(4))
    assert len(messages(loader.clone)) == 1
    list(loader)


def test_another_loader_of_ours_took_its_place() -> None:
    """A framework may make another loader of our class for the same dataset and iterate that one (Lightning does)."""
    dataset = Numbers(4)

    def replace() -> None:
        loader = DataLoader[Any](dataset)
        assert len(list(DataLoader[Any](loader.dataset, batch_size=2))) == 2

    assert messages(replace) == []
    assert len(messages(lambda: DataLoader[Any](Numbers(4)))) == 1, "another dataset says nothing about this one"


def test_a_refused_constructor_is_silent() -> None:
    """What never became a loader has nothing to say."""

    def refuse() -> None:
        with pytest.raises(ValueError, match="batch_size"):
            DataLoader[Any](Numbers(4), batch_size=0)
        with pytest.raises(ValueError, match="concurrency"):
            DataLoader[Any](Numbers(4), concurrency=0)

    assert messages(refuse) == []


def test_the_async_loader_is_silent() -> None:
    """No framework takes it for a DataLoader, so none replaces it."""
    assert messages(lambda: AsyncDataLoader[Any](Numbers(4))) == []


SCRIPT = """
import builtins, gc, os, sys
import torch
from asyncloader import DataLoader

class Keeper:
    pass

unused = DataLoader(torch.arange(4))
keeper = Keeper()
keeper.loader = DataLoader(torch.arange(4), num_workers=1)
keeper.keeper = keeper
builtins.dies_last = sys.dies_last = DataLoader(torch.arange(4))
"""


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "gc.disable()"])
def test_at_exit_of_a_script(end: str, tmp_path: Path) -> None:
    """A script that ends with an unused loader ends in silence, also if that dies after most modules."""
    done = run_script(tmp_path, f"{SCRIPT}\n{end}\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_at_exit_after_an_error(tmp_path: Path) -> None:
    """A script that ends by an error tells of that one alone."""
    done = run_script(tmp_path, SCRIPT + "\nraise ZeroDivisionError\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError"
    assert "NeverIteratedWarning" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_the_script_would_warn_before_its_end(tmp_path: Path) -> None:
    """The same script with the loader dropped earlier does say so (as an error that nobody can catch)."""
    done = run_script(tmp_path, SCRIPT + "\ndel unused\n")
    assert done.returncode == 0
    assert done.stderr.count("NeverIteratedWarning") == 1


def test_in_a_forked_child(tmp_path: Path) -> None:
    """A child that inherits the parent's loaders and drops them is silent; one of its own it does speak of."""
    body = """
pid = os.fork()
if not pid:
    {body}
    sys.exit(0)
_, status = os.waitpid(pid, 0)
assert status == 0
list(unused)
list(keeper.loader)
list(builtins.dies_last)
"""
    silent = run_script(
        tmp_path, SCRIPT + body.format(body="del unused, keeper, builtins.dies_last, sys.dies_last; gc.collect()")
    )
    assert (silent.returncode, silent.stdout, silent.stderr) == (0, "", "")
    own = run_script(tmp_path, SCRIPT + body.format(body="own = DataLoader(torch.arange(3)); del own"))
    assert own.returncode == 0
    assert own.stderr.count("NeverIteratedWarning") == 1
