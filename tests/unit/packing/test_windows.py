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
from asyncloader.packing.windows import Carried, Window, WindowPacker, is_consistent


@pytest.mark.parametrize(
    ("rule", "tokens", "lengths"),
    [("skip", [1, 2], [2]), ("truncate", [1, 2, 3, 4, 5], [2, 3]), ("split", [1, 2, 3, 4, 5, 6, 7], [2, 5])],
)
def test_too_long(rule: Any, tokens: list[int], lengths: list[int]) -> None:
    """Sequences of 2, 0 and 5 tokens, in rows of 3: those without tokens are left out."""
    samples = [{"tokens": np.array(each, np.uint16), "name": str(each)} for each in ([1, 2], [], [3, 4, 5, 6, 7])]
    domain: Any = lambda sample: np.int64(len(sample["name"]))  # noqa: E731
    window = JoinSequences(3, on_too_long=rule, domain=domain)(samples)
    assert window.fields["tokens"].dtype == torch.uint16
    assert window.fields["tokens"].tolist() == tokens
    assert window.lengths.tolist() == lengths
    assert window.fields["name"] == ["[1, 2]", "[3, 4, 5, 6, 7]"][: len(lengths)]
    assert window.domains == [6, 15][: len(lengths)]
    assert all(type(domain) is int for domain in window.domains or [])


def test_too_long_is_an_error() -> None:
    """It says which sequence of the batch it is, with its other fields; strategies that cut have no such error."""
    samples = [{"tokens": [1, 2], "name": "short"}, {"tokens": [1, 2, 3, 4], "name": "long"}]
    with pytest.raises(ValueError, match=r"sequence 1 of the batch \(\{'name': 'long'\}\) has 4 tokens.*max_tokens=3"):
        JoinSequences(3)(samples)
    assert JoinSequences(3, strategy="wrap")(samples).lengths.tolist() == [2, 4]
    with pytest.raises(ValueError, match="sequence 0 of the batch has 4 tokens"):
        JoinSequences(3)([[1, 2, 3, 4]])


def test_fields_that_are_no_tokens() -> None:
    """Whatever is no array of numbers is a value of its sequence: also lists of lists of different lengths."""
    value: Any
    for value in ([[1, 2], [3]], ["a", "b"], {"a": [1]}, None, 0.5, [2**70], [{}]):
        window = JoinSequences(3)([{"tokens": [1, 2], "about": value}] * 2)
        assert window.fields["about"] == [value, value]


def test_bad_arguments() -> None:
    """Bad arguments and domains are refused, with the value."""
    with pytest.raises(ValueError, match="max_tokens should be positive, but got max_tokens=0"):
        JoinSequences(0)
    with pytest.raises(ValueError, match="got strategy='none'"):
        JoinSequences(3, strategy="none")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="got on_too_long='cut'"):
        JoinSequences(3, on_too_long="cut")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    none: Any = lambda _: 0.5  # noqa: E731
    with pytest.raises(TypeError, match=r"a domain should be an integer or a string, but got 0\.5"):
        JoinSequences(3, domain=none)([[1]])


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
        {"domains": [1]},
        {"domains": [1, None]},
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
    packer = WindowPacker(PackSequences(), drop_last=False, state={}, carried=[], delivered=0)
    with pytest.raises(ValueError, match="a window contradicts itself"):
        packer.add({}, [window._replace(**change)])


MOST = 30


def by_domain(sample: Any) -> str:
    return str(sample["domain"])


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Window], bool]:
    """The windows of an epoch; token n of the epoch is n."""
    domains = draw(st.sampled_from([1, 1, 3]))
    strategy: Any = draw(st.sampled_from(STRATEGIES))
    join = JoinSequences(MOST, strategy=strategy, domain=by_domain, on_too_long="split")
    windows, token, name = [], 0, 0
    for lengths in draw(st.lists(st.lists(st.integers(0, 50), max_size=12), max_size=5)):
        samples = []
        for length in lengths:
            samples.append({"tokens": torch.arange(token, token + length), "domain": name % domains, "name": name})
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
    packer = WindowPacker(
        PackSequences(), drop_last=drop_last, state=state, carried=carried or [], delivered=delivered, options=options
    )
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
    """No row is empty, too long, or of two domains; it has sequences of two windows at most; little is left out."""
    windows, drop_last = case
    lengths = [length for window in windows for length in window.lengths.tolist()]
    window_of = [number for number, window in enumerate(windows) for _ in range(int(window.lengths.sum()))]
    found: list[int] = []
    domains = set()
    for _, row in run(windows, drop_last):
        tokens = row["tokens"].tolist()
        found += tokens
        assert 0 < len(tokens) <= MOST
        assert len(set(row["domain"])) == 1
        domains |= set(row["domain"])
        assert len(row["name"]) == len(row["cu_seqlens"]) - 1
        assert row["cu_seqlens"][-1] == len(row["position_ids"]) == len(tokens)
        assert len({window_of[token] for token in tokens}) <= 2
        assert max(window_of[token] for token in tokens) - min(window_of[token] for token in tokens) <= 1
    assert len(set(found)) == len(found)
    left_out = set(range(sum(lengths))) - set(found)
    assert len(left_out) < (MOST * 3 if drop_last else 1)


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


def test_what_is_left_over_waits_for_one_window() -> None:
    """A domain that the next window does not have makes a short row there."""
    join = JoinSequences(MOST, domain=by_domain)

    def window(domain: str, *lengths: int) -> Window:
        return join([{"tokens": torch.ones(length), "domain": domain} for length in lengths])

    windows = [window("rare", 4), window("other", MOST, 7), window("other", 20), window("rare", 5)]
    sizes = [(row["domain"][0], row["tokens"].numel()) for _, row in run(windows, drop_last=False)]
    assert sizes == [("rare", 4), ("other", MOST), ("other", 27), ("rare", 5)]
    sizes = [(row["domain"][0], row["tokens"].numel()) for _, row in run(windows, drop_last=True)]
    assert sizes == [("rare", 4), ("other", MOST), ("other", 27)]


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
        ({"domain": by_domain}, "saved with domain=None of JoinSequences, which now has domain=a function"),
    ],
)
def test_other_options(now: dict[str, Any], message: str) -> None:
    """The number of the rows that were delivered finds the next row only where the rows are packed as before."""
    samples = [{"tokens": torch.ones(20), "domain": number} for number in range(4)]
    options: dict[str, Any] = {"max_tokens": MOST} | now
    position = run([JoinSequences(MOST)(samples)], False)[2][0]
    with pytest.raises(StateError, match=re.escape(message)):
        run([JoinSequences(**options)(samples)], False, *position)


@pytest.mark.parametrize("pad_to", [None, MOST])
def test_rows_are_on_the_device_of_their_windows(pad_to: int | None) -> None:
    """With all of their tensors; also those that have parts of two windows."""
    sequences = [{"tokens": torch.zeros(size, device="meta"), "name": str(size)} for size in (20, 9, 8)]
    windows = [JoinSequences(MOST)(sequences[:2]), JoinSequences(MOST)(sequences[2:])]
    packer = WindowPacker(PackSequences(pad_to=pad_to), drop_last=False, state=0, carried=[], delivered=0)
    rows: list[dict[str, Any]] = []
    for state in range(3):
        packer.add(state, windows[state : state + 1])
        while (row := packer.row()) is not None:
            rows.append(row)
            packer.delivered += 1
    assert [name for row in rows for name in row["name"]] == ["20", "9", "8"]
    assert {row[name].device.type for row in rows for name in ("tokens", "position_ids", "cu_seqlens")} == {"meta"}
