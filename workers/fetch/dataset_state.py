"""Saves and restores the state of a stateful dataset, as a cursor after each batch.

Data path: worker: fetch -> [dataset_state] -> answer -> consumer. A cursor travels with the batch after which it was
taken, so the main process always has the cursor of the last *delivered* batch, however much was fetched ahead.

Stateful is whatever has `state_dict` and `load_state_dict` (torchdata's protocol): the dataset, its iterator, or both.
As in torchdata the dataset is restored first, then ``iter(dataset)`` is called, then that iterator is restored. A
dataset that is its own iterator is restored only once, as an iterator: its `__iter__` may create the state to be
restored.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple, Protocol, runtime_checkable

from asyncloader.workers.fetch.mocks import has_method
from asyncloader.workers.fetch.repeated_pickle import RepeatedPickle


@runtime_checkable
class Stateful(Protocol):
    """An object that can save its state and resume from it: a sampler, a dataset, or an iterator of either.

    States should be plain values; they are copied, and become part of the loader's state. A list that is equal to that
    of the state before counts as the same.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the current state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from this state."""
        ...


def is_stateful(thing: Any) -> bool:
    """Whether the object is `Stateful`; cheaper than `isinstance`."""
    return has_method(thing, "state_dict") and has_method(thing, "load_state_dict")


class Cursor(NamedTuple):
    """The state of one worker's copy of a dataset after some batches.

    Attributes:
        batches: batches that this worker has answered in the epoch: made, or raised the error of.
        samples: samples read from its stream.
        ended: the stream is exhausted.
        dataset: the dataset's state; None if it has none.
        iterator: its iterator's state; None if it has none, or is the dataset itself.
        problem: why the state could not be saved; empty if it could.
        itself: whether the dataset is its own iterator. "": it is not. "within": it is, and `dataset` was taken after
            ``iter(dataset)``, and is restored after it. "before": the state is that of another epoch's end; restored
            so, it has yet to begin anew: ``iter(dataset)`` follows once more. "ended": it is not, and its iterator's
            state is that of another epoch's end. It is restored, as persistent workers had it: what that does to the
            process, such as setting a generator, holds for the next epoch. Then ``iter(dataset)`` follows once more.
    """

    batches: int
    samples: int
    ended: bool
    dataset: Any
    iterator: Any
    problem: str = ""
    itself: str = ""

    def epoch_later(self) -> Cursor | None:
        """Return the cursor that the next epoch begins with, if this one is at an epoch's end; None without a state."""
        if self.problem or (self.dataset is None and self.iterator is None):
            return None
        if self.iterator is not None:
            return Cursor(0, 0, False, self.dataset, self.iterator, itself="ended")
        return Cursor(0, 0, False, self.dataset, None, itself="before" if self.itself else "")


class Bookmark:
    """Takes and restores cursors of one copy of a dataset.

    Args:
        dataset: the dataset.
        every: number of batches between two cursors; 0: never take one.
    """

    def __init__(self, dataset: Any, every: int) -> None:
        self._dataset = dataset
        self._dataset_is_stateful = is_stateful(dataset)
        self._every = every
        self._iterator: Any = None
        self._own = False  # the dataset is its own iterator, and `__iter__` was called
        self._initial = b""
        self._dataset_state, self._iterator_state = RepeatedPickle(), RepeatedPickle()
        self.batches = 0

    @property
    def keeps_state(self) -> bool:
        """Whether there is a state to save."""
        return self._dataset_is_stateful or self._iterator is not None

    def begin(self, cursor: Cursor | None) -> None:
        """Begin an epoch: restore the dataset. Call before ``iter(dataset)``."""
        self.batches = 0 if cursor is None else cursor.batches
        self._iterator = None
        self._own = False
        if cursor is not None and cursor.dataset is not None and cursor.itself in ("", "ended"):
            self._dataset.load_state_dict(cursor.dataset)

    def restore_iterator(self, iterator: Any, cursor: Cursor | None) -> Any:
        """Restore the iterator that ``iter(dataset)`` returned. Returns the iterator to read from."""
        itself = "" if cursor is None else cursor.itself
        if cursor is not None and itself == "ended":
            iterator.load_state_dict(cursor.iterator)
        elif cursor is not None and itself:
            self._dataset.load_state_dict(cursor.dataset)
        if itself in ("before", "ended"):
            iterator = aiter(self._dataset) if hasattr(type(iterator), "__aiter__") else iter(self._dataset)
        self._own = iterator is self._dataset
        self._iterator = iterator if not self._own and is_stateful(iterator) else None
        if cursor is not None and cursor.iterator is not None and itself != "ended":
            iterator.load_state_dict(cursor.iterator)
        if cursor is None and self._every != 1:
            self._initial = self.initial()
        return iterator

    def initial(self) -> bytes:
        """Return the pickled cursor before the first batch, or nothing."""
        return self._take(0, ended=False) if not self.batches else b""

    def final(self) -> bytes:
        """Return the pickled cursor at the end of the stream, or nothing."""
        return self._take(0, ended=True)

    def after_batch(self, samples: int, *, ended: bool) -> bytes:
        """Count a batch. Returns the pickled cursor after it, or nothing if none is due."""
        self.batches += 1
        initial, self._initial = self._initial, b""
        if not self._every or self.batches % self._every:
            return initial  # until the first one is due, a resume begins here and reads on
        return self._take(samples, ended=ended)

    def now(self, samples: int, *, ended: bool) -> bytes:
        """Return the pickled cursor of this moment, or nothing."""
        return self._take(samples, ended=ended) if self._every else b""

    def _take(self, samples: int, *, ended: bool) -> bytes:
        if not self.keeps_state:
            return b""
        dataset = iterator = None
        problem = ""
        try:
            if self._dataset_is_stateful:
                dataset = self._dataset_state.lean(self._dataset.state_dict())
            if self._iterator is not None:
                iterator = self._iterator_state.lean(self._iterator.state_dict())
            itself = "within" if self._own and self._dataset_is_stateful else ""
            return pickle.dumps(tuple(Cursor(self.batches, samples, ended, dataset, iterator, "", itself)), 5)
        except Exception as error:  # a state that cannot be saved must not fail the batch
            problem = f"{type(error).__name__}: {error}"
        return pickle.dumps(tuple(Cursor(self.batches, samples, ended, None, None, problem)), 5)
