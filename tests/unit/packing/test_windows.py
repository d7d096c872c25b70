"""`JoinSequences`: the window of some sequences, and its rules for those that are too long."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader import JoinSequences, PackSequences
from asyncloader.errors import StateError
from asyncloader.packing.bin_packing import STRATEGIES
from asyncloader.packing.windows import Carried, RowPosition, Window, WindowPacker, is_consistent

BEGINNING = RowPosition(0, [], 0, None)


def test_too_long_is_an_error() -> None:
    """It says which sequence it is; strategies that cut have no such error. Empty sequences are left out."""
    samples = [{"tokens": [1, 2], "name": "short"}, {"tokens": [1, 2, 3, 4], "name": "long"}]
    with pytest.raises(ValueError, match=r"sequence 1 of the batch has 4 tokens.*max_tokens=3.*'name': 'long'"):
        JoinSequences(3)(samples)
    assert JoinSequences(3, strategy="wrap")([*samples, {"tokens": [], "name": ""}]).lengths.tolist() == [2, 4]


def test_fields_that_are_no_tokens() -> None:
    """Whatever is no array of numbers is a value of its sequence: also lists of lists of different lengths."""
    value: Any
    for value in ([[1, 2], [3]], ["a", "b"], {"a": [1]}, None, 0.5, [2**70], [{}]):
        window = JoinSequences(3)([{"tokens": [1, 2], "about": value}] * 2)
        assert window.fields["about"] == [value, value]


def test_bad_arguments() -> None:
    """Bad arguments are refused, with the value; those that were removed, with what takes their place."""
    with pytest.raises(ValueError, match="max_tokens should be positive, but got max_tokens=0"):
        JoinSequences(0)
    with pytest.raises(ValueError, match="got strategy='none'"):
        JoinSequences(3, strategy="none")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"no domain=: domain= and on_too_long= were removed"):
        JoinSequences(3, domain=len)


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": [2, 1]},
        {"lengths": np.array([2, 1], np.int32)},
        {"lengths": np.array([2, 2])},
        {"lengths": np.array([4, -1])},
        {"lengths": np.array([2**62, 2**62, 2**62, 2**62, 2, 1])},
        {"fields": {"id": [1, 2]}},
        {"fields": {"tokens": torch.arange(2)}},
        {"fields": {"tokens": torch.arange(3), "id": [1]}},
        {"fields": {"tokens": torch.arange(3), "id": "ab"}},
        {"max_tokens": True},
        {"strategy": "none"},
    ],
)
def test_windows_of_others(change: dict[str, Any]) -> None:
    """What a service's node could not have made of sequences is refused before it is packed."""
    window = JoinSequences(4)([{"tokens": [1, 2], "id": 3}, {"tokens": [3], "id": 4}])
    assert is_consistent(window)
    assert is_consistent(JoinSequences(4)([[]]))
    assert not is_consistent(window._replace(**change))
    packer = WindowPacker(PackSequences(), BEGINNING, drop_last=False)
    with pytest.raises(ValueError, match="a window contradicts itself"):
        packer.add({}, [window._replace(**change)])


MOST = 30


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Window], bool]:
    """The windows of an epoch; token n of the epoch is n."""
    strategy: Any = draw(st.sampled_from(STRATEGIES))
    join = JoinSequences(MOST, strategy=strategy)
    longest = MOST if strategy == "best_fit" else 50
    windows, token, name = [], 0, 0
    for lengths in draw(st.lists(st.lists(st.integers(0, longest), min_size=1, max_size=12), max_size=5)):
        samples = []
        for length in lengths:
            samples.append({"tokens": torch.arange(token, token + length), "name": name})
            token, name = token + length, name + 1
        windows.append(join(samples))
    return windows, draw(st.booleans())


def run(
    windows: list[Window],
    drop_last: bool,
    state: int = 0,
    carried: Carried | None = None,
    delivered: int = 0,
    options: dict[str, Any] | None = None,
) -> list[tuple[Any, dict[str, Any]]]:
    """The rows from a position on, each with the position before it; the loader's state is the number of windows."""
    packer = WindowPacker(PackSequences(), RowPosition(state, carried or [], delivered, options), drop_last=drop_last)
    rows: list[tuple[Any, dict[str, Any]]] = []
    while True:
        while (row := packer.row()) is not None:
            rows.append((packer.position, row))
            packer.delivered += 1
        if packer.over:
            return rows
        packer.add(state, windows[state : state + 1])
        state += 1


@settings(deadline=None)
@given(cases())
def test_every_token_once(case: tuple[list[Window], bool]) -> None:
    """No row is empty or too long; it has sequences of two windows at most; little is left out."""
    windows, drop_last = case
    lengths = [length for window in windows for length in window.lengths.tolist()]
    window_of = [number for number, window in enumerate(windows) for _ in range(int(window.lengths.sum()))]
    found: list[int] = []
    for _, row in run(windows, drop_last):
        tokens = row["tokens"].tolist()
        found += tokens
        assert 0 < len(tokens) <= MOST
        assert len(row["name"]) == len(row["cu_seqlens"]) - 1
        assert row["cu_seqlens"][-1] == len(row["position_ids"]) == len(tokens)
        assert len({window_of[token] for token in tokens}) <= 2
        assert max(window_of[token] for token in tokens) - min(window_of[token] for token in tokens) <= 1
    assert len(set(found)) == len(found)
    left_out = set(range(sum(lengths))) - set(found)
    assert len(left_out) < (MOST if drop_last else 1)


@settings(deadline=None)
@given(cases(), st.lists(st.floats(0, 0.999), min_size=1, max_size=3))
def test_any_row_is_found_again(case: tuple[list[Window], bool], places: list[float]) -> None:
    """A packer that begins at the position of a row, with the windows from there on, gives the rest of the rows."""
    windows, drop_last = case
    whole = run(windows, drop_last)
    for number in {int(place * len(whole)) for place in places if whole}:
        again = run(windows, drop_last, *whole[number][0])
        assert [(place, row["tokens"].tolist()) for place, row in again] == [
            (place, row["tokens"].tolist()) for place, row in whole[number:]
        ]


@pytest.mark.parametrize("position", [(0, [[7, 0, 3]], 0), (0, [[0, 0, 9]], 0), (0, [], 9), (1, [[0, 0, 1]], 0)])
def test_other_sequences(position: tuple[int, Carried, int]) -> None:
    """A state whose sequences are not there, or are shorter, is refused."""
    windows = [JoinSequences(MOST)([torch.ones(4)])]
    with pytest.raises(StateError, match="saved of other sequences than those that the loader reads now"):
        run(windows, False, *position)


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ({"max_tokens": 60}, "saved with max_tokens=30 of JoinSequences, which now has max_tokens=60"),
        ({"strategy": "wrap"}, "saved with strategy='best_fit' of JoinSequences, which now has strategy='wrap'"),
    ],
)
def test_other_options(now: dict[str, Any], message: str) -> None:
    """The number of the rows that were delivered finds the next row only where the rows are packed as before."""
    samples = [{"tokens": torch.ones(20)} for _ in range(4)]
    options: dict[str, Any] = {"max_tokens": MOST} | now
    position = run([JoinSequences(MOST)(samples)], False)[2][0]
    with pytest.raises(StateError, match=re.escape(message)):
        run([JoinSequences(**options)(samples)], False, *position)


@pytest.mark.parametrize("pad_to", [None, MOST])
def test_rows_are_on_the_device_of_their_windows(pad_to: int | None) -> None:
    """With all of their tensors; also those that have parts of two windows."""
    sequences = [{"tokens": torch.zeros(size, device="meta"), "name": str(size)} for size in (20, 9, 8)]
    windows = [JoinSequences(MOST)(sequences[:2]), JoinSequences(MOST)(sequences[2:])]
    packer = WindowPacker(PackSequences(pad_to=pad_to), BEGINNING, drop_last=False)
    rows: list[dict[str, Any]] = []
    for state in range(3):
        packer.add(state, windows[state : state + 1])
        while (row := packer.row()) is not None:
            rows.append(row)
            packer.delivered += 1
    assert [name for row in rows for name in row["name"]] == ["20", "9", "8"]
    assert {row[name].device.type for row in rows for name in ("tokens", "position_ids", "cu_seqlens")} == {"meta"}
