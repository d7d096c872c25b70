"""torch's iterator base under our iterators: its constructor gets the loader, and the sampler iterator it holds is
read.

Libraries patch `_BaseDataLoaderIter`, as SpeechBrain does to resume within an epoch, or advance and replace the
attributes of its instances. Each test compares with torch's own loader under the same treatment.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from asyncloader import AsyncDataLoader, DataLoader, StateError
from tests.drawn import scaled
from tests.helpers.running import run_async

SIZE = 40
DATA: Any = torch.arange(SIZE).share_memory_()  # shared: workers that are not forked would otherwise move it


class Eager:
    """A sampler whose `__iter__` is no generator function, and draws as soon as it is called."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE).tolist())


class EagerBatches(Eager):
    """A batch sampler whose `__iter__` draws as soon as it is called."""

    def __iter__(self) -> Iterator[Any]:
        return iter([part.tolist() for part in torch.randperm(SIZE).split(2)])


class Stateful:
    """A sampler with a state of its own."""

    def __init__(self) -> None:
        self.given = 0

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        while self.given < SIZE:
            self.given += 1
            yield SIZE - self.given
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


SHAPES: dict[str, Callable[[], dict[str, Any]]] = {
    "sequential": lambda: {"batch_size": 2},
    "shuffled": lambda: {"batch_size": 2, "shuffle": True},
    "sampler": lambda: {"batch_size": 2, "sampler": Eager()},
    "stateful sampler": lambda: {"batch_size": 2, "sampler": Stateful()},
    "batch sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(SIZE)), 2, False)},
    "eager batch sampler": lambda: {"batch_sampler": EagerBatches()},
    "single samples": lambda: {"batch_size": None, "sampler": Eager()},
}


@pytest.fixture
def skipping(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The base patched as in SpeechBrain's documentation: a resumed epoch advances the sampler's iterator by the
    loader's `skip_to`, once, and sets it to None. Gives the loaders that the base's constructor got.
    """
    begin, reset, seen = _BaseDataLoaderIter.__init__, _BaseDataLoaderIter._reset, list[Any]()

    def new_begin(self: Any, loader: Any, *args: Any, **options: Any) -> None:
        begin(self, loader, *args, **options)
        seen.append(loader)
        if getattr(loader, "skip_to", None) is not None:
            for _ in range(loader.skip_to):
                next(self._sampler_iter)
            self._num_yielded = loader.skip_to
            loader.skip_to = None

    def new_reset(self: Any, loader: Any, first_iter: bool = False, *args: Any, **options: Any) -> None:
        if not first_iter:  # the first reset would start the sampler again
            reset(self, loader, first_iter, *args, **options)

    monkeypatch.setattr(_BaseDataLoaderIter, "__init__", new_begin)
    monkeypatch.setattr(_BaseDataLoaderIter, "_reset", new_reset)
    return seen


def resuming(kind: type[Any], workers: int, shape: str, skip: int, **options: Any) -> Any:
    class Resuming(kind):  # type: ignore[misc]
        skip_to: int | None = None

    torch.manual_seed(3)
    loader = Resuming(DATA, num_workers=workers, **SHAPES[shape](), **options)
    loader.skip_to = skip
    return loader


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_library_that_patches_the_base_skips_as_with_torch(shape: str, workers: int, skipping: list[Any]) -> None:
    """Equal are the rest of the epoch, the whole next epoch, and the count that the library keeps."""
    found = []
    for kind in (torch.utils.data.DataLoader, DataLoader):
        loader = resuming(kind, workers, shape, 4)
        iterator = iter(loader)
        rest = list(iterator)
        found.append((rest, iterator._num_yielded, list(loader)))
        assert skipping[-1] is loader
        assert loader.skip_to is None
    assert str(found[1]) == str(found[0])
    assert len(found[0][0]) == len(found[0][2]) - 4


@pytest.mark.parametrize("workers", [0, 2])
def test_seeded_mode_skips_the_same_and_draws_from_the_seed(workers: int, skipping: list[Any]) -> None:
    """In seeded mode the base gets the loader itself, too, and the process's generator does not change."""
    whole = list(DataLoader(DATA, 2, shuffle=True, seed=1))
    loader = resuming(DataLoader, workers, "shuffled", 4, seed=1)
    before = torch.get_rng_state()
    rest = list(loader)
    assert torch.equal(torch.get_rng_state(), before)
    assert str(rest) == str(whole[4:])
    assert skipping[-1] is loader
    assert loader.generator is None


@pytest.mark.parametrize("workers", [0, 2])
def test_the_async_loader_reads_what_the_base_holds(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base skips for every loader; a persistent pool's second iterator begins before the first is read."""
    begin = _BaseDataLoaderIter.__init__

    def new_begin(self: Any, loader: Any) -> None:
        begin(self, loader)
        for _ in range(4 if workers == 0 else 0):
            self._next_index()

    monkeypatch.setattr(_BaseDataLoaderIter, "__init__", new_begin)

    async def both() -> tuple[list[Any], list[Any], list[Any]]:
        persistent = workers > 0
        async with AsyncDataLoader(DATA, 2, num_workers=workers, persistent_workers=persistent) as loader:
            whole = [batch async for batch in loader]
            first, second = aiter(loader), aiter(loader)
            return whole, [batch async for batch in first], [batch async for batch in second]

    torch.manual_seed(3)
    expected = [batch.tolist() for batch in torch.arange(SIZE).split(2)][4 if workers == 0 else 0 :]
    for batches in run_async(both()):
        assert [batch.tolist() for batch in batches] == expected


def advance(iterator: Any, count: int) -> None:
    for _ in range(count):
        next(iterator._sampler_iter, None)


def ask(iterator: Any, count: int) -> None:
    with contextlib.suppress(StopIteration):
        for _ in range(count):
            iterator._next_index()


def wrap(iterator: Any, count: int) -> None:
    iterator._sampler_iter = itertools.islice(iterator._sampler_iter, count, None)


def replace(iterator: Any, count: int) -> None:
    batched = iterator._auto_collation
    iterator._sampler_iter = iter([[index, index + 1] if batched else index for index in range(2 * count)])


def again(iterator: Any, count: int) -> None:
    iterator._sampler_iter = iter(iterator._index_sampler)
    advance(iterator, count)


ADVANCING = [advance, ask]
TREATMENTS = st.dictionaries(
    st.integers(0, 22), st.tuples(st.sampled_from([*ADVANCING, wrap, replace, again]), st.integers(0, 9)), max_size=3
)


def treated(loader: Any, treatments: dict[int, tuple[Callable[..., None], int]]) -> list[Any]:
    """The batches; each treatment is applied after the number of batches that is its key, 0: right after ``iter()``."""
    iterator = iter(loader)
    batches: list[Any] = []
    while True:
        treat, count = treatments.get(len(batches), (advance, 0))
        treat(iterator, count)
        try:
            batches.append(next(iterator).tolist())
        except StopIteration:
            return batches
        if len(batches) > 200:  # the order was started again and again
            return batches


def compare(shape: str, workers: int, treatments: dict[int, tuple[Callable[..., None], int]]) -> None:
    found = []
    for kind in (torch.utils.data.DataLoader, DataLoader):
        torch.manual_seed(5)
        found.append(treated(kind(DATA, num_workers=workers, **SHAPES[shape]()), treatments))
    assert found[1] == found[0]


def resume(shape: str, workers: int, at: int, skip: int) -> None:
    """A state saved after a skip leads to the same rest, whatever was in flight when it was saved."""
    torch.manual_seed(5)
    loader = DataLoader(DATA, num_workers=workers, **SHAPES[shape]())
    iterator = iter(loader)
    for _ in range(at):
        next(iterator)
    advance(iterator, skip)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in iterator]
    torch.manual_seed(6)
    other = DataLoader(DATA, num_workers=2 - workers, **SHAPES[shape]())
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == rest


QUICK = settings(
    max_examples=scaled(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.generate],
)


@QUICK
@given(shape=st.sampled_from([*SHAPES]), treatments=TREATMENTS)
def test_what_the_base_holds_is_read(shape: str, treatments: dict[int, Any]) -> None:
    """The sampler's iterator is advanced, read, wrapped, replaced or started again, at any moment: torch's batches."""
    compare(shape, 0, treatments)


@pytest.mark.thorough
@settings(QUICK, max_examples=scaled(12))
@given(shape=st.sampled_from([*SHAPES]), treatments=TREATMENTS)
def test_what_the_base_holds_is_read_with_workers(shape: str, treatments: dict[int, Any]) -> None:
    """With workers, tasks in flight have the effect that they have in torch."""
    compare(shape, 2, treatments)


@pytest.mark.thorough
@settings(QUICK, max_examples=scaled(12))
@given(shape=st.sampled_from([*SHAPES]), workers=st.sampled_from([0, 2]), at=st.integers(0, 9), skip=st.integers(1, 9))
def test_a_state_counts_what_was_skipped(shape: str, workers: int, at: int, skip: int) -> None:
    """The skip may happen at any moment, with and without workers; the state is resumed with 2 or 0 workers instead."""
    resume(shape, workers, at, skip)


def test_a_replaced_order_has_no_position() -> None:
    """`state_dict` raises instead of giving a wrong position; after the epoch's end it works again."""
    loader = DataLoader(DATA, 2)
    iterator = iter(loader)
    next(iterator)
    wrap(iterator, 3)
    next(iterator)
    with pytest.raises(StateError, match="another _sampler_iter"):
        loader.state_dict()
    list(iterator)
    assert loader.state_dict()["finished"]


def test_seeded_mode_wants_positions() -> None:
    """Indices without a position cannot be given random numbers of the seed: `next` raises."""
    loader = DataLoader(DATA, 2, seed=1)
    iterator = iter(loader)
    replace(iterator, 3)
    with pytest.raises(TypeError, match="leave out seed="):
        next(iterator)


def test_counters_have_torchs_names() -> None:
    """The counters of torch's iterator can be read under torch's names, with torch's values."""
    found = []
    iterator: Any = None
    for kind in (torch.utils.data.DataLoader, DataLoader):
        iterator = iter(kind(DATA, 2, num_workers=2))
        next(iterator)
        next(iterator)
        found.append((iterator._send_idx, iterator._rcvd_idx, iterator._num_yielded, len(iterator._workers)))
    assert found[1] == found[0] == (6, 2, 2, 2)
    assert iterator._tasks_outstanding == 4
