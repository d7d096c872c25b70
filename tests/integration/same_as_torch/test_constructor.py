"""Constructors: torch's signature, torch's refusals with torch's text, then our own refusals."""

from __future__ import annotations

import inspect
import multiprocessing
import warnings
from typing import Any

import pytest
import torch

from asyncloader import AsyncDataLoader, DataLoader, Tuning
from tests.helpers.datasets import CountedStream, Numbers
from tests.helpers.running import BOTH, outcomes
from tests.torch_versions import says_the_same

LOADERS: dict[str, Any] = {"sync": DataLoader, "asyncio": AsyncDataLoader}
MAP = Numbers(6)
STREAM = CountedStream(6, said=6)

REFUSED: list[tuple[Any, dict[str, Any]]] = [
    (MAP, {"num_workers": -1}),
    (MAP, {"timeout": -1}),
    (MAP, {"prefetch_factor": 2}),
    (MAP, {"num_workers": 1, "prefetch_factor": -1}),
    (MAP, {"persistent_workers": True}),
    (MAP, {"multiprocessing_context": "fork"}),
    (MAP, {"num_workers": 1, "multiprocessing_context": "teleport"}),
    (MAP, {"num_workers": 1, "multiprocessing_context": 5}),
    (STREAM, {"shuffle": True}),
    (STREAM, {"sampler": [1]}),
    (STREAM, {"batch_sampler": [[1]]}),
    (MAP, {"sampler": [1], "shuffle": True}),
    (MAP, {"batch_sampler": [[1]], "batch_size": 3}),
    (MAP, {"batch_sampler": [[1]], "shuffle": True}),
    (MAP, {"batch_sampler": [[1]], "sampler": [1]}),
    (MAP, {"batch_sampler": [[1]], "drop_last": True}),
    (MAP, {"batch_size": None, "drop_last": True}),
    (MAP, {"batch_size": 0}),
    (MAP, {"batch_size": -3}),
    (MAP, {"batch_size": True}),
    (MAP, {"batch_size": 2.0}),
    (MAP, {"drop_last": "yes"}),
    (MAP, {"num_workers": -1, "timeout": -1}),
    (Numbers(0), {"shuffle": True}),
    (MAP, {"no_such_option": 1}),
]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("dataset", "options"), REFUSED, ids=[repr(options) for _, options in REFUSED])
def test_refused_as_by_torch(kind: str, dataset: Any, options: dict[str, Any]) -> None:
    """A bad argument raises the error of torch's constructor: same type, same text."""
    with pytest.raises((ValueError, TypeError)) as expected:
        torch.utils.data.DataLoader(dataset, **options)
    with pytest.raises((ValueError, TypeError)) as got:
        LOADERS[kind](dataset, **options)
    assert type(got.value) is type(expected.value)
    text = str(expected.value)
    if "no_such_option" in options:
        text = text.replace("DataLoader.__init__", f"{LOADERS[kind].__name__}.__init__")
    assert str(got.value) == text


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("value", ["2", 2.0, None])
def test_a_number_of_workers_that_is_none(kind: str, value: Any) -> None:
    """A TypeError, as in torch; torch's names neither the option nor the value, or is raised when iteration begins."""
    with pytest.raises(TypeError, match=f"^num_workers should be an integer, but got num_workers={value!r}$"):
        LOADERS[kind](MAP, num_workers=value)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"concurrency": 0}, ValueError, "concurrency should be a positive integer or None, but got concurrency=0"),
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
def test_signature_begins_with_torchs(kind: str) -> None:
    """Same names, kinds, order and defaults as torch's; our options follow, by keyword only."""
    theirs = list(inspect.signature(torch.utils.data.DataLoader.__init__).parameters.values())
    ours = list(inspect.signature(LOADERS[kind].__init__).parameters.values())
    key = [(p.name, p.kind, p.default) for p in theirs]
    assert [(p.name, p.kind, p.default) for p in ours][: len(key)] == key
    assert [p.name for p in ours[len(key) :]][:2] == ["snapshot_every_n_steps", "seed"]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(key) :])


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


def test_too_many_workers_are_warned_about() -> None:
    """More workers than CPUs: torch's warning from the constructor."""

    def messages(make: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make(MAP, num_workers=1000)
        return [str(w.message) for w in caught if w.category is UserWarning]

    expected = messages(torch.utils.data.DataLoader)
    assert "1000 worker processes" in expected[0]
    assert messages(DataLoader) == messages(AsyncDataLoader) == expected


@pytest.mark.parametrize("kind", BOTH)
def test_options_changed_later_take_effect(kind: str) -> None:
    """Options that torch allows to be set after construction (num_workers, collate_fn) hold from the next `iter()`."""
    if kind == "sync":
        loader = DataLoader[Any](MAP, batch_size=2)
        loader.collate_fn = len
        loader.num_workers = 2
        loader.prefetch_factor = 1
        assert list(loader) == [2, 2, 2]
    expected = outcomes("torch", MAP, batch_size=2, collate_fn=len)
    assert outcomes(kind, MAP, batch_size=2, collate_fn=len, num_workers=2) == expected
