"""`PackingSampler`: every token once, rows that are the same in every process, and any row found again."""

from __future__ import annotations

import asyncio
import pickle
import tracemalloc
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader import DataLoader, Dataset, PackingSampler, PackSequences, SequenceRows, Subset
from asyncloader.packing.bin_packing import STRATEGIES
from tests.unit.samplers.length_samplers import SEEDS, joined, some_lengths

ANY = pytest.mark.parametrize("strategy", STRATEGIES)


def row_of(batch: Any, lengths: Any) -> list[tuple[int, int, int]]:
    """The row's slices; of whole sequences, too."""
    return [(each, 0, int(lengths[each])) if isinstance(each, int) else each for each in batch]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[str] | None, dict[str, Any]]:
    lengths = draw(st.lists(st.integers(0, 60), max_size=120))
    domains = draw(st.none() | st.lists(st.sampled_from("abc"), min_size=len(lengths), max_size=len(lengths)))
    options = {
        "max_tokens": draw(st.integers(1, 80)),
        "seed": draw(SEEDS),
        "strategy": draw(st.sampled_from(STRATEGIES)),
        "on_too_long": draw(st.sampled_from(["skip", "truncate", "split"])),
        "shuffle": draw(st.booleans()),
        "drop_last": draw(st.booleans()),
        "window": draw(st.none() | st.integers(1, 130)),
    }
    return lengths, domains, options


@settings(deadline=None)
@given(cases(), SEEDS)
def test_every_token_once(case: tuple[list[int], list[str] | None, dict[str, Any]], epoch: int) -> None:
    """Each token is in one row; no row is empty, too long, or of two domains; and little is left out at the end."""
    lengths, domains, options = case
    sampler = PackingSampler(lengths, domains=domains, **options)
    sampler.set_epoch(epoch)
    most, rule = sampler.max_tokens, options["on_too_long"]
    wanted = {
        (index, at)
        for index, length in enumerate(lengths)
        if rule != "skip" or length <= most
        for at in range(min(length, most) if rule == "truncate" else length)
    }
    rows = [row_of(batch, lengths) for batch in sampler]
    tokens = [(index, at) for row in rows for index, start, stop in row for at in range(start, stop)]
    assert len(tokens) == len(set(tokens))
    assert all(0 < sum(stop - start for _, start, stop in row) <= most for row in rows)
    assert all(start < stop for row in rows for _, start, stop in row)
    if domains is not None:
        assert all(len({domains[index] for index, _, _ in row}) == 1 for row in rows)
    left_out = wanted - set(tokens)
    assert set(tokens) <= wanted
    assert len(left_out) <= (sampler.drop_last and len(set(domains or "a")) * (most - 1))
    if options["strategy"] == "wrap" and options["drop_last"]:
        assert len(tokens) == len(rows) * most
    for row in rows:  # the slices of a sequence in a row are in its order
        assert all(one[0] != other[0] or one[2] <= other[1] for at, one in enumerate(row) for other in row[at + 1 :])


@settings(deadline=None)
@given(cases(), st.lists(st.floats(0, 1), min_size=1, max_size=3))
def test_the_rest_of_an_epoch_from_any_row(
    case: tuple[list[int], list[str] | None, dict[str, Any]], places: list[float]
) -> None:
    """`iter_from(k)` is the epoch without its first k rows, and `len` their number; so also in a fresh copy."""
    lengths, domains, options = case
    sampler = PackingSampler(lengths, domains=domains, **options)
    rows = list(sampler)
    assert len(sampler) == len(rows)
    for start in {0, len(rows), *(round(place * len(rows)) for place in places)}:
        assert list(sampler.iter_from(start)) == rows[start:]
        assert list(PackingSampler(lengths, domains=domains, **options).iter_from(start)) == rows[start:]
    for start in (-1, len(rows) + 1):
        with pytest.raises(ValueError, match=f"between 0 and {len(rows)}, but got start={start}"):
            PackingSampler(lengths, domains=domains, **options).iter_from(start)


@ANY
def test_many_windows(strategy: Any) -> None:
    """Every token comes, and any row is found again, behind what was left over of the windows before."""
    lengths = some_lengths(5000)
    sampler = PackingSampler(lengths, 2000, 1, strategy=strategy, domains=lengths % 3, window=20)
    rows = list(sampler)
    assert sum(stop - start for row in rows for _, start, stop in row_of(row, lengths)) == lengths.sum()
    for start in range(0, len(rows), 31):
        assert next(PackingSampler.iter_from(sampler, start)) == rows[start]


def test_in_order() -> None:
    """Without a shuffle `wrap` is the dataset, cut where rows are full; every epoch is the same."""
    sampler = PackingSampler([3, 0, 4, 2], 5, 0, strategy="wrap", shuffle=False)
    for epoch in (0, 3):
        sampler.set_epoch(epoch)
        assert list(sampler) == [((0, 0, 3), (2, 0, 2)), ((2, 2, 4), (3, 0, 2))]
    sampler = PackingSampler([5, 3, 4, 2, 6], 7, 0, shuffle=False)
    assert list(sampler) == [(0, 3), (2, 1), (4,)]
    sampler.drop_last = True
    assert list(sampler) == [(0, 3), (2, 1)]


@pytest.mark.parametrize(
    ("strategy", "rule", "rows"),
    [
        ("best_fit", "skip", [(2, 0)]),
        ("best_fit", "truncate", [((1, 0, 6),), ((2, 0, 3), (0, 0, 2))]),
        ("best_fit", "split", [((1, 0, 6),), ((1, 6, 9), (2, 0, 3)), ((0, 0, 2),)]),
        ("wrap", None, [((0, 0, 2), (1, 0, 4)), ((1, 4, 9), (2, 0, 1)), ((2, 1, 3),)]),
        ("wrap", "skip", [((0, 0, 2), (2, 0, 3))]),
    ],
)
def test_too_long(strategy: Any, rule: Any, rows: list[Any]) -> None:
    """A sequence of 9 tokens among others of 2 and 3, in rows of 6."""
    sampler = PackingSampler([2, 9, 3], 6, 0, strategy=strategy, on_too_long=rule, shuffle=False)
    assert list(sampler) == rows
    assert sampler.skipped == (rule == "skip")
    small = np.array([2, 3], np.uint8)  # `max_tokens` is no such number
    assert sum(len(row) for row in PackingSampler(small, 1000, 0, strategy=strategy, on_too_long=rule)) == 2


def test_too_long_is_an_error() -> None:
    """Without a rule, the error names the first sequence, and says how many there are."""
    message = r"sequence 1 has 9 tokens, which is more than max_tokens=6; 2 of 3 sequences are too long.*longest has 12"
    with pytest.raises(ValueError, match=message):
        PackingSampler([2, 9, 12], 6, 0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lengths": [3, -4]}, ValueError, "lengths should be 0 or more, but sequence 1 has length -4"),
        ({"domains": [1, 2]}, ValueError, r"one label a sequence, shape \(3,\), but got shape \(2,\)"),
        ({"max_tokens": 0}, ValueError, "max_tokens should be positive, but got max_tokens=0"),
        ({"max_tokens": 2.5}, TypeError, r"max_tokens should be an integer, but got max_tokens=2\.5"),
        ({"window": 0}, ValueError, "window should be positive, but got window=0"),
        ({"strategy": "worst_fit"}, ValueError, "got strategy='worst_fit'"),
        ({"strategy": "best_fit_wrap"}, ValueError, "strategy='best_fit_wrap' was removed: \"wrap\" fills all rows"),
        ({"on_too_long": "cut"}, ValueError, "got on_too_long='cut'"),
        ({"seed": -1}, ValueError, "seed=-1"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """Bad arguments are refused; the error has the value."""
    arguments: dict[str, Any] = {"lengths": [1, 2, 3], "max_tokens": 8, "seed": 0}
    with pytest.raises(error, match=message):
        PackingSampler(**(arguments | options))
    with pytest.raises(ValueError, match=f"epoch={2**64}"):
        PackingSampler([1], 8, 0).set_epoch(2**64)


def test_memory_is_that_of_a_window() -> None:
    """For a million sequences, an epoch's first row takes less than 2 MB beside two bytes per length."""
    sampler = PackingSampler(some_lengths(1_000_000), 2048, 1, window=4000)
    tracemalloc.start()
    try:
        next(iter(sampler))
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert sampler._lengths.nbytes == 2_000_000


LENGTHS = [5, 30, 1, 17, 12, 0, 8, 64]


class Plain(Dataset[Any]):
    """Sequence i consists of the tokens ``100 * i``, ``100 * i + 1``, ..."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def read(self, index: int) -> Any:
        return np.arange(100 * index, 100 * index + LENGTHS[index])

    def __getitem__(self, index: int) -> Any:
        return self.read(index)


class Fields(Plain):
    def __getitem__(self, index: int) -> Any:
        return {"tokens": torch.from_numpy(self.read(index)), "labels": self.read(index), "name": str(index)}


class Batched(Plain):
    def __getitem__(self, index: int) -> Any:
        raise AssertionError("batches are read at once")

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self.read(index) for index in indices]


class Awaited(Plain):
    async def __aenter__(self) -> Self:
        self.entered = True
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def __getitem__(self, index: int) -> Any:
        assert self.entered
        return self.read(index)


class AwaitedBatches(Awaited):
    async def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        assert self.entered
        return [self.read(index) for index in indices]


def expected(sampler: PackingSampler) -> list[list[int]]:
    """The tokens of each row."""
    rows: Any = sampler
    return [[100 * index + at for index, start, stop in row for at in range(start, stop)] for row in rows]


@pytest.mark.parametrize("kind", [Plain, Fields, Batched, Awaited, AwaitedBatches])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(("view", "size"), [(False, None), (True, 1), (False, 3)])
def test_every_way_to_read(kind: type[Plain], workers: int, seed: int | None, view: bool, size: int | None) -> None:
    """Blocking and awaited datasets, of samples and of batches, also behind torch's views, give the rows' tokens; rows
    of a batch lie one behind the other.
    """
    sampler = PackingSampler(LENGTHS, 20, 1, on_too_long="split")
    wanted = expected(sampler)  # now: in seeded mode a loader sets the sampler's next epoch
    dataset: Any = Subset(kind(), range(len(LENGTHS))) if view else kind()
    with DataLoader[Any](
        SequenceRows(dataset),
        batch_size=size,
        sampler=sampler,
        collate_fn=PackSequences(),
        num_workers=workers,
        seed=seed,
    ) as loader:
        batches = [batch["tokens"].tolist() for batch in loader]
    assert batches == [joined(wanted[at : at + (size or 1)]) for at in range(0, len(wanted), size or 1)]


def test_torch_reads_it() -> None:
    """torch's loader reads rows, too, and a copy of them."""
    sampler = PackingSampler(LENGTHS, 20, 1, strategy="wrap")
    for dataset in (Plain(), Batched()):
        rows = pickle.loads(pickle.dumps(SequenceRows(dataset)))
        assert len(rows) == len(LENGTHS)
        loader = torch.utils.data.DataLoader(rows, batch_size=1, sampler=sampler, collate_fn=PackSequences())
        assert [row["tokens"].tolist() for row in loader] == expected(sampler)


def test_a_row() -> None:
    """Fields with an element for each token are cut; the others stay. Whole sequences are as they were read."""
    (part,) = SequenceRows(Fields())[((3, 2, 4),)]
    assert part["tokens"].tolist() == part["labels"].tolist() == [302, 303]
    assert part["name"] == "3"
    assert [each.tolist() for each in SequenceRows(Plain())[((3, 2, 4), (2, 0, 1))]] == [[302, 303], [200]]
    assert [each.tolist() for each in SequenceRows(Batched())[2, 0]] == [[200], [0, 1, 2, 3, 4]]


def test_sequences_that_fail() -> None:
    """An error is the sequence's own, also if it is awaited with others; too short a sequence is an error."""
    with pytest.raises(ValueError, match="the sequence has 17 tokens, but the plan has 18 or more"):
        SequenceRows(Plain())[((3, 2, 18),)]
    for kind in (Awaited, AwaitedBatches):
        with pytest.raises(AttributeError, match="entered"):  # its context was not entered
            asyncio.run(SequenceRows(kind())[0, 1, 2])


def test_a_bad_sequence_costs_its_row() -> None:
    """With an error policy the row is left out, and the others stay."""

    class Bad(Plain):
        def __getitem__(self, index: int) -> Any:
            if index == 4:
                raise ValueError("bad")
            return self.read(index)

    sampler = PackingSampler(LENGTHS, 70, 1)
    kept: list[Any] = [row for row in sampler if 4 not in row]
    assert 0 < len(kept) < len(sampler)
    with DataLoader[Any](
        SequenceRows(Bad()), batch_size=1, sampler=sampler, collate_fn=PackSequences(), on_error="skip"
    ) as loader:
        found = [batch["tokens"].tolist() for batch in loader]
    assert found == [[at for index in row for at in Plain().read(index).tolist()] for row in kept]
