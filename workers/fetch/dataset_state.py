"""Saves and restores the state of a stateful dataset, as a cursor after each batch.

Data path: worker: fetch -> [dataset_state] -> answer -> consumer. A cursor travels with the batch after which it was
taken, so the main process always has the cursor of the last *delivered* batch, however much was fetched ahead.

Stateful are objects with `state_dict` and `load_state_dict` (torchdata's protocol): the dataset, its iterator, or both.
The order is torchdata's: the dataset is restored, then ``iter(dataset)`` is called, then that iterator is restored. A
dataset that is its own iterator is restored only once, as an iterator: its `__iter__` may create the state to be
restored.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

from asyncloader.base.events import Cursor, PackedCursor


@runtime_checkable
class Stateful(Protocol):
    """An object that can save its state and resume from it: a sampler, a dataset, or an iterator of either.

    States should be plain values; they are copied, and become part of the loader's state. Those of an iterable dataset
    fit the same number of workers; any number, if it says by an attribute `loader_streams` how many streams it is.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the current state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from this state."""


def is_stateful(thing: Any) -> bool:
    """Whether the object is `Stateful`; cheaper than `isinstance`."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


CursorPacker: TypeAlias = Callable[[Cursor], PackedCursor]
"""Packs the cursors of one copy of a dataset. Raises the error of a state that cannot be packed."""


def pickle_cursor(cursor: Cursor) -> PackedCursor:
    """Pack a cursor as pickle."""
    return PackedCursor(pickle.dumps(tuple(cursor), 5))


class Bookmark:
    """Takes and restores cursors of one copy of a dataset.

    Args:
        dataset: the dataset.
        every: number of batches between two cursors; 0: never take one.
        pack: packs the cursors.
    """

    def __init__(self, dataset: Any, every: int, pack: CursorPacker = pickle_cursor) -> None:
        self._dataset = dataset
        self._dataset_is_stateful = is_stateful(dataset)
        self._every = every
        self._iterator: Any = None
        self._own = False  # the dataset is its own iterator, and `__iter__` was called
        self._initial: PackedCursor | None = None
        self._pack = pack
        self.batches = 0
        self.keeps_state = self._dataset_is_stateful
        """Whether the dataset, or the iterator that is read, has a state."""

    def begin(self, cursor: Cursor | None) -> None:
        """Begin an epoch: restore the dataset. Call before ``iter(dataset)``."""
        self.batches = 0 if cursor is None else cursor.batches
        self._iterator = None
        self._own = False
        self.keeps_state = self._dataset_is_stateful
        # A dataset that is its own iterator is restored later: `iter(dataset)` may create the state to be restored.
        if cursor is not None and cursor.dataset is not None and cursor.itself in ("", "ended"):
            self._dataset.load_state_dict(cursor.dataset)

    def restore_iterator(self, iterator: Any, cursor: Cursor | None) -> Any:
        """Restore the iterator that ``iter(dataset)`` returned. Returns the iterator to read from."""
        itself = "" if cursor is None else cursor.itself
        if cursor is not None and itself == "ended":
            iterator.load_state_dict(cursor.iterator)
        elif cursor is not None and itself:
            self._dataset.load_state_dict(cursor.dataset)
        # The state that was restored is that of another epoch's end: this begins the next.
        if itself in ("before", "ended"):
            iterator = aiter(self._dataset) if hasattr(type(iterator), "__aiter__") else iter(self._dataset)
        self._own = iterator is self._dataset
        self._iterator = iterator if not self._own and is_stateful(iterator) else None
        self.keeps_state = self._dataset_is_stateful or self._iterator is not None
        if cursor is not None and cursor.iterator is not None and itself != "ended":
            iterator.load_state_dict(cursor.iterator)
        # Taken now, before anything is read, for a resume before the first cursor is due.
        if cursor is None and self._every != 1:
            self._initial = self.initial()
        return iterator

    def initial(self) -> PackedCursor | None:
        """Return the cursor before the first batch; None without a state, or after a batch."""
        return self._take(0, ended=False) if not self.batches else None

    def final(self) -> PackedCursor | None:
        """Return the cursor at the end of the stream; None without a state."""
        return self._take(0, ended=True)

    def after_batch(self, samples: int, *, ended: bool) -> PackedCursor | None:
        """Count a batch. Returns the cursor after it; None without a state, or if no cursor is due."""
        self.batches += 1
        initial, self._initial = self._initial, None
        if not self._every or self.batches % self._every:
            return initial  # until a cursor is due, a resume begins here and reads on
        return self._take(samples, ended=ended)

    def now(self, samples: int, *, ended: bool) -> PackedCursor | None:
        """Return the cursor of this moment; None without a state, or if no cursors are taken."""
        return self._take(samples, ended=ended) if self._every else None

    def _take(self, samples: int, *, ended: bool) -> PackedCursor | None:
        if not self.keeps_state:
            return None
        try:
            dataset = self._dataset.state_dict() if self._dataset_is_stateful else None
            iterator = None if self._iterator is None else self._iterator.state_dict()
            itself = "within" if self._own and self._dataset_is_stateful else ""
            # Packed at once, before the dataset reads on: it may return the state that it works with, and no copy.
            return self._pack(Cursor(self.batches, samples, ended, dataset, iterator, "", itself))
        except Exception as error:  # a state that cannot be saved must not fail the batch
            problem = f"{type(error).__name__}: {error}"
        return self._pack(Cursor(self.batches, samples, ended, None, None, problem))


def bytes_of(cursor: PackedCursor | None) -> bytes:
    """Return a cursor as it is sent; empty for None."""
    return b"" if cursor is None else cursor.data
