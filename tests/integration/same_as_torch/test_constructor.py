"""Constructors: torch's signature, torch's refusals with torch's text, then our own refusals."""

from __future__ import annotations

import inspect
import multiprocessing
from typing import Any

import pytest
import torch

from asyncloader import AsyncDataLoader, DataLoader, Tuning
from tests.helpers.datasets import Numbers
from tests.helpers.running import BOTH
from tests.helpers.side_by_side import outcome
from tests.torch_versions import says_the_same

LOADERS: dict[str, Any] = {"sync": DataLoader, "asyncio": AsyncDataLoader}
MAP = Numbers(6)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("options", [{"batch_size": -3}, {"batch_size": 2.0}, {"no_such_option": 1}], ids=str)
def test_refused_as_by_torch(kind: str, options: dict[str, Any]) -> None:
    """A bad argument raises the error of torch's constructor: same type, same text (see also
    test_constructor_and_attributes.py).
    """
    error, text = outcome(torch.utils.data.DataLoader, MAP, **options)
    text = text.replace("DataLoader.__init__", f"{LOADERS[kind].__name__}.__init__")
    assert outcome(LOADERS[kind], MAP, **options) == (error, text)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("value", ["2", 2.0, None])
def test_a_number_of_workers_that_is_none(kind: str, value: Any) -> None:
    """A TypeError, as in torch; torch's names neither the option nor the value, or is raised when iteration begins."""
    with pytest.raises(TypeError, match=f"^num_workers should be an integer or 'auto', but got num_workers={value!r}$"):
        LOADERS[kind](MAP, num_workers=value)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"concurrency": 0}, ValueError, "but got concurrency=0"),
        (
            {"tuning": 1 << 20},
            TypeError,
            r"tuning should be an asyncloader.Tuning, but got .*tuning=Tuning\(ring_bytes=",
        ),
        ({"group": 3}, TypeError, "group should be a torch.distributed process group or a DeviceMesh .* but got 3"),
    ],
)
def test_our_own_options_are_checked(kind: str, options: dict[str, Any], error: type[Exception], words: str) -> None:
    """Our options out of range, or of another type: the error has the option and its value."""
    with pytest.raises(error, match=words):
        LOADERS[kind](MAP, num_workers=1, **options)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's own half-constructed iterator
@pytest.mark.parametrize("kind", BOTH)
def test_prefetch_factor_zero_is_found_by_iter(kind: str) -> None:
    """prefetch_factor=0 passes the constructor and fails when iteration starts, with torch's text."""
    torch_loader = torch.utils.data.DataLoader(MAP, num_workers=1, prefetch_factor=0)
    loader = LOADERS[kind](MAP, num_workers=1, prefetch_factor=0)
    with pytest.raises(AssertionError) as expected:
        iter(torch_loader)
    with pytest.raises(AssertionError) as got:
        iter(loader) if kind == "sync" else aiter(loader)
    assert says_the_same(str(got.value), str(expected.value))


@pytest.mark.parametrize("kind", BOTH)
def test_timeout_without_workers(kind: str) -> None:
    """A timeout needs workers: like torch, the loader raises at `iter()`."""
    torch_loader = torch.utils.data.DataLoader(MAP, timeout=1)
    loader = LOADERS[kind](MAP, timeout=1)
    with pytest.raises(AssertionError) as expected:
        iter(torch_loader)
    with pytest.raises(AssertionError) as got:
        iter(loader) if kind == "sync" else aiter(loader)
    assert says_the_same(str(got.value), str(expected.value))


@pytest.mark.parametrize("kind", BOTH)
def test_positional_arguments(kind: str) -> None:
    """All arguments up to `generator` may be positional."""
    generator = torch.Generator()
    init = print
    args = (MAP, 2, False, None, None, 1, list, False, True, 3, init, "spawn", generator)
    loader, torch_loader = LOADERS[kind](*args), torch.utils.data.DataLoader(*args)
    for name in ("batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn"):
        assert getattr(loader, name) == getattr(torch_loader, name)
    assert loader.generator is generator
    assert loader.multiprocessing_context.get_start_method() == "spawn"


@pytest.mark.parametrize("kind", BOTH)
def test_options_are_attributes(kind: str) -> None:
    """Every argument can be read under its own name, with torch's defaults filled in as torch does."""
    options: dict[str, Any] = {
        "num_workers": 2,
        "prefetch_factor": 3,
        "persistent_workers": True,
        "in_order": False,
        "multiprocessing_context": multiprocessing.get_context("fork"),
        "tuning": Tuning(ring_bytes=1 << 20),
        "concurrency": 7,
    }
    loader = LOADERS[kind](MAP, **options)
    for name, value in options.items():
        assert getattr(loader, name) == value
    plain, torch_plain = LOADERS[kind](MAP, num_workers=1), torch.utils.data.DataLoader(MAP, num_workers=1)
    for name in inspect.signature(torch.utils.data.DataLoader.__init__).parameters:
        if name in ("self", "shuffle", "sampler", "batch_sampler", "collate_fn"):
            continue
        assert getattr(plain, name) == getattr(torch_plain, name), name
    assert plain.collate_fn is torch_plain.collate_fn
    assert type(plain.sampler) is type(torch_plain.sampler)
    assert type(plain.batch_sampler) is type(torch_plain.batch_sampler)
    assert len(plain) == len(torch_plain)
