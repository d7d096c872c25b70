"""Positions of a dataset: states taken after batches, and restored in torchdata's order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asyncloader.base.events import Cursor, PackedCursor
from asyncloader.workers.fetch.dataset_state import Bookmark, is_stateful


class Plain:
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Part:
    """A dataset or an iterator with a state; records its calls."""

    def __init__(self, state: Any = 0, calls: list[str] | None = None, name: str = "dataset") -> None:
        self.state = state
        self.name = name
        self.calls: list[str] = [] if calls is None else calls

    def __iter__(self) -> Any:
        self.calls.append(f"iter {self.name}")
        return self

    def __next__(self) -> Any:
        raise StopIteration

    def state_dict(self) -> Any:
        self.calls.append(f"save {self.name}")
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.calls.append(f"load {self.name} {state}")
        self.state = state


class Failing(Part):
    def state_dict(self) -> Any:
        raise RuntimeError("no state today")


def read(cursor: PackedCursor | None) -> Cursor:
    assert cursor is not None
    return cursor.value


def begun(dataset: Any, iterator: Any = None, every: int = 1, cursor: Cursor | None = None) -> Bookmark:
    bookmark = Bookmark(dataset, every)
    bookmark.begin(cursor)
    if iterator is not None:
        bookmark.restore_iterator(iterator, cursor)
    return bookmark


def test_stateful_is_what_can_save_and_load() -> None:
    """Both methods are needed, and must be methods."""

    class Half:
        def state_dict(self) -> Any:
            return {}

    class Odd(Half):
        load_state_dict = 3

    assert is_stateful(Part())
    assert not any(map(is_stateful, (Plain(), Half(), Odd(), None, [1])))


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], Any, Any]] = {
    "dataset": (lambda: Part("D"), lambda: iter([1]), "D", None),
    "iterator": (Plain, lambda: Part("I"), None, "I"),
    "both": (lambda: Part("D"), lambda: Part("I"), "D", "I"),
}


@pytest.mark.parametrize("case", CASES)
def test_cursor_holds_the_states_there_are(case: str) -> None:
    """A cursor has the state of the dataset, its iterator, or both; the counts; and whether the stream has ended."""
    dataset, iterator, of_dataset, of_iterator = CASES[case]
    bookmark = begun(dataset(), iterator())
    assert read(bookmark.after_batch(4, ended=False)) == Cursor(1, 4, False, of_dataset, of_iterator)
    assert read(bookmark.after_batch(7, ended=True)) == Cursor(2, 7, True, of_dataset, of_iterator)


def test_states_are_restored_in_torchdatas_order() -> None:
    """The dataset is restored first, then ``iter(dataset)`` is called, then that iterator is restored."""
    calls: list[str] = []
    dataset, iterator = Part(0, calls), Part(0, calls, "iterator")
    bookmark = Bookmark(dataset, 1)
    cursor = Cursor(5, 20, False, "D", "I")
    bookmark.begin(cursor)
    iter(dataset)
    bookmark.restore_iterator(iterator, cursor)
    assert calls == ["load dataset D", "iter dataset", "load iterator I"]
    assert bookmark.batches == 5
    assert read(bookmark.after_batch(24, ended=False)) == Cursor(6, 24, False, "D", "I")


@pytest.mark.parametrize(("every", "expected"), [(0, []), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6]), (7, [7]), (8, [])])
def test_cursors_are_taken_every_so_many_batches(every: int, expected: list[int]) -> None:
    """Between snapshots the dataset is not asked for its state."""
    dataset = Part()
    bookmark = begun(dataset, every=every)
    taken = [bookmark.after_batch(1, ended=False) for _ in range(7)]
    assert [number for number, data in enumerate(taken, 1) if data] == expected
    assert len(dataset.calls) == len(expected)


def test_snapshots_keep_their_beat_after_resuming() -> None:
    """Batches are counted from the epoch's beginning, not from the position where it was resumed."""
    bookmark = begun(Part(), every=3, cursor=Cursor(4, 0, False, "D", None))
    assert [bool(bookmark.after_batch(1, ended=False)) for _ in range(5)] == [False, True, False, False, True]


@pytest.mark.parametrize(
    ("dataset", "iterator", "words"),
    [
        (Failing(), iter([1]), "RuntimeError: no state today"),
        (Part("D"), Failing(), "RuntimeError: no state today"),
        (Part(threading.Lock()), iter([1]), "TypeError: cannot pickle '_thread.lock' object"),
        (Part(lambda: 0), iter([1]), "pickle"),
    ],
    ids=["dataset", "iterator", "lock", "function"],
)
def test_a_state_that_cannot_be_saved_is_told_and_not_raised(dataset: Any, iterator: Any, words: str) -> None:
    """The batch is good; the cursor has the error, and no state at all, not half of one."""
    bookmark = begun(dataset, iterator)
    cursor = read(bookmark.after_batch(4, ended=True))
    assert cursor[:5] == (1, 4, True, None, None)
    assert words in cursor.problem
    assert read(bookmark.after_batch(8, ended=True)).batches == 2


def test_the_beginning_is_a_place_too() -> None:
    """Before the first batch the cursor is that of the beginning; afterwards `initial` returns None."""
    bookmark = begun(Part("D"), iter([1]))
    assert read(bookmark.initial()) == Cursor(0, 0, False, "D", None)
    bookmark.after_batch(1, ended=False)
    assert bookmark.initial() is None
    assert begun(Plain(), iter([1])).initial() is None


@pytest.mark.parametrize("every", [0, 3])
def test_until_the_first_snapshot_the_beginning_is_the_place_to_go_on_from(every: int) -> None:
    """The state of a stream's beginning is sent once, with the first batch; a resumed stream has a state already."""
    dataset = Part({"at": 0})
    bookmark = begun(dataset, iter([1]), every)
    dataset.state["at"] = 1
    assert read(bookmark.after_batch(1, ended=False)) == Cursor(0, 0, False, {"at": 0}, None)
    assert bookmark.after_batch(2, ended=False) is None
    assert bool(bookmark.after_batch(3, ended=False)) == bool(every)
    resumed = begun(Part(0), iter([1]), every, Cursor(4, 8, False, 4, None))
    assert resumed.after_batch(9, ended=False) is None


def test_the_end_of_an_epoch_is_the_place_before_the_next() -> None:
    """Counts are zero again. A dataset that is its own iterator, or has another, is iterated again once restored."""
    end = Cursor(5, 20, True, "D", None)
    assert end.epoch_later() == Cursor(0, 0, False, "D", None)
    assert end._replace(itself="within").epoch_later() == Cursor(0, 0, False, "D", None, itself="before")
    assert end._replace(iterator="I").epoch_later() == Cursor(0, 0, False, "D", "I", itself="ended")
    assert end._replace(dataset=None).epoch_later() is None
    assert end._replace(problem="no state today").epoch_later() is None
