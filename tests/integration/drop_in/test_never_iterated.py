"""`NeverIteratedWarning` is given when a stock loader made from ours is iterated in its place, and only then."""

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
from torch.utils.data import BatchSampler, SequentialSampler

import asyncloader
from asyncloader import DataLoader, NeverIteratedWarning
from tests.helpers.datasets import Numbers
from tests.helpers.running import run_script
from tests.pairwise import quickly

Torchs: Any = torch.utils.data.DataLoader


def messages(action: Callable[[], object]) -> list[str]:
    """The texts of these warnings while `action` runs and its garbage is collected."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
        gc.collect()
    return [str(w.message) for w in caught if w.category is NeverIteratedWarning]


def stock_from(loader: Any, batch_sampler: Any = None, **options: Any) -> Any:
    """A stock loader made from another loader's parts, as frameworks make it."""
    parts = {name: getattr(loader, name) for name in ("num_workers", "collate_fn", "persistent_workers")}
    return Torchs(loader.dataset, batch_sampler=batch_sampler or loader.batch_sampler, **parts | options)


class Share:
    """A wrapper around a batch sampler, like those that share batches among ranks."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Any:
        return iter(self.batch_sampler)


# ------------------------------------------------------------------------------------------------- the warning is given


@pytest.mark.parametrize("wrapper", [lambda batches: batches, Share], ids=["as it is", "shared out"])
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"shuffle": True}, {"seed": 1}], ids=str)
def test_a_stock_loader_in_its_place_warns(options: dict[str, Any], wrapper: Any) -> None:
    """The stock loader warns once, when iterated with ours collected unused; the text names ours and the remedies."""
    stock = []

    def replace() -> None:
        loader = DataLoader[Any](Numbers(4), **options)
        stock.append(stock_from(loader, wrapper(loader.batch_sampler)))

    assert messages(replace) == [], "it may be that nobody iterates it"
    list(stock[0].batch_sampler)
    found = messages(lambda: list(stock[0]))
    assert len(found) == 1
    assert repr(DataLoader[Any](Numbers(4), **options)) in found[0]
    assert "asyncloader.integrations" in found[0]
    assert "asyncloader.install" in found[0]
    assert messages(lambda: list(stock[0])) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_as_an_error_it_costs_nothing(workers: int) -> None:
    """Made an error, the warning is raised by the first `iter()`; the next `iter()` gives all batches."""
    loader = DataLoader[Any](Numbers(4), num_workers=workers)
    stock = stock_from(loader)
    del loader
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(NeverIteratedWarning):
            iter(stock)
    assert len(list(stock)) == 4


def test_until_then_the_batch_sampler_is_torchs() -> None:
    """Copies and pickles of it are plain, and do not warn, and so is what its class makes; its length is its own. A
    loader of ours that is made of it takes it over.
    """
    loader = DataLoader[Any](Numbers(4), batch_size=2)
    batches: Any = loader.batch_sampler
    del loader
    assert isinstance(batches, BatchSampler)
    assert (len(batches), list(batches)) == (2, [[0, 1], [2, 3]])
    for twin in (
        type(batches)(batches.sampler, 2, False),
        copy.copy(batches),
        copy.deepcopy(batches),
        *(pickle.loads(pickle.dumps(batches, p)) for p in range(6)),
    ):
        assert type(twin) is BatchSampler
        assert vars(twin).keys() == vars(batches).keys()
        assert messages(lambda twin=twin: list(Torchs(Numbers(4), batch_sampler=twin))) == []  # type: ignore[misc]
    assert len(list(DataLoader[Any](Numbers(4), batch_sampler=Share(batches)))) == 2
    assert type(batches) is BatchSampler


# ------------------------------------------------------------------------------------------------- no warning


def unused() -> Any:
    """A loader that is made and never used, like an evaluation-only script's training loader."""
    return DataLoader[Any](Numbers(4), shuffle=True)


def in_a_cycle() -> None:
    loader: Any = DataLoader[Any](Numbers(4))
    loader._cycle = loader


def used_as_well() -> None:
    """Our loader is iterated, too: the program knows that a stock loader exists beside it."""
    loader = DataLoader[Any](Numbers(4))
    stock = stock_from(loader)
    list(loader)
    del loader
    list(stock)


def replaced_inside_install() -> None:
    """Inside `install` the framework's replacement is our loader."""
    loader = DataLoader[Any](Numbers(4))
    with asyncloader.install():
        replacement = stock_from(loader)
        del loader
        list(replacement)


def replaced_by_ours() -> None:
    """The replacement is our loader, as in Lightning and the integrations."""
    loader = DataLoader[Any](Numbers(4))
    replacement = DataLoader[Any](loader.dataset, batch_sampler=loader.batch_sampler)
    del loader
    assert type(replacement.batch_sampler) is BatchSampler
    list(replacement)


def users_own_parts() -> None:
    """A stock loader that the user made from the same parts: it is not made from ours."""
    dataset = Numbers(4)
    batches = BatchSampler(SequentialSampler(dataset), 2, False)
    loader = DataLoader[Any](dataset, batch_sampler=batches, collate_fn=list)
    stock = Torchs(dataset, batch_sampler=batches, collate_fn=list)
    del loader
    list(stock)


def same_dataset() -> None:
    """Two loaders over one dataset, of which one is used."""
    dataset = Numbers(4)
    loader, stock = DataLoader[Any](dataset, batch_size=2), Torchs(dataset, batch_size=2)
    del loader
    list(stock)


def read_only() -> None:
    """The batch sampler was read and kept, and no loader was made of it."""
    loader = DataLoader[Any](Numbers(4))
    batches, shown, size = loader.batch_sampler, repr(loader), len(loader)
    del loader
    assert (len(list(batches or [])), size) == (4, 4)
    assert shown


def copies() -> None:
    """Copies made in passing: the loader from which a stock loader was made still exists."""
    loader = DataLoader[Any](Numbers(4))
    stock = stock_from(loader)
    for make in (copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it)), DataLoader.clone):
        make(loader)
    list(stock)
    list(loader)


def refused() -> None:
    """The constructor failed: no loader exists."""
    with pytest.raises(ValueError, match="batch_size"):
        DataLoader[Any](Numbers(4), batch_size=0)
    with pytest.raises(ValueError, match="concurrency"):
        DataLoader[Any](Numbers(4), concurrency=0)


SILENT = [
    unused,
    in_a_cycle,
    used_as_well,
    replaced_inside_install,
    replaced_by_ours,
    users_own_parts,
    same_dataset,
    read_only,
    copies,
    refused,
]


@pytest.mark.parametrize("case", SILENT)
def test_nothing_is_said(case: Callable[[], object]) -> None:
    """No stock loader made from ours is iterated in its place, or the loader cannot know."""
    assert messages(case) == []


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
keeper.stock = torch.utils.data.DataLoader(torch.arange(4), batch_sampler=unused.batch_sampler)
builtins.dies_last = sys.dies_last = DataLoader(torch.arange(4))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("end", quickly(["", "sys.exit(0)", "gc.disable()"], ""))
def test_at_exit_of_a_script(end: str, tmp_path: Path) -> None:
    """A script that exits with an unused loader prints nothing, also if the loader is deleted after most modules."""
    done = run_script(tmp_path, f"{SCRIPT}\n{end}\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_in_a_forked_child(tmp_path: Path) -> None:
    """A child that inherits loaders deletes them without reading the state that it shares with its parent."""
    body = """
pid = os.fork()
if not pid:
    del unused
    assert type(keeper.stock) is torch.utils.data.DataLoader
    list(keeper.stock)
    del keeper, builtins.dies_last, sys.dies_last
    gc.collect()
    sys.exit(0)
_, status = os.waitpid(pid, 0)
assert status == 0
"""
    done = run_script(tmp_path, SCRIPT + body)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
