"""A plain sampler's indices, from any delivered position on, and what it takes to find that position again.

Data path: sampler -> [index stream] -> scheduler. Runs in the consumer's thread.

Three ways lead to a position, the first that the sampler allows: it seeks (`SeekableSampler`), it restores its own
state (`state_dict` and `load_state_dict`, on the sampler or on its iterator), or its indices are read and dropped,
which fetches no data. For the third the order must come again: what the sampler drew from torch's generators when it
began is kept, and set for it when it begins again.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler

from asyncloader.samplers.distributed import RankView, SeekableSampler
from asyncloader.samplers.generators import (
    drawn_from,
    draws_when_iterated,
    generator_states,
    generator_text,
    iterates_plainly,
    own_generator,
    set_generators,
)
from asyncloader.workers.fetch.dataset_state import is_stateful

__all__ = ["IndexStream", "StateLog", "base_sampler", "fresh_state"]

_END = object()


def base_sampler(index_sampler: Any) -> Any:
    """The user's own part of a loader's index sampler: what torch's `BatchSampler`, or a rank's view, reads from."""
    if isinstance(index_sampler, RankView) or type(index_sampler) is BatchSampler:
        return index_sampler.sampler
    return index_sampler


class StateLog:
    """A stateful sampler's states, each kept until its step is delivered. One thread notes, another may look.

    Args:
        every: take one every so many steps, beside that of step 0; 0 for no more.
        saved: the state to begin with, as `at` gave it.
    """

    def __init__(self, every: int, saved: dict[str, Any] | None) -> None:
        self._every = every
        self._states: deque[dict[str, Any]] = deque([saved] if saved is not None else [])

    def note(self, step: int, sampler: Any, iterator: Any = None, *, ended: bool = False) -> bool:
        """`step` steps have been taken from the sampler, and perhaps its end was seen. False if its `state_dict`
        failed, as one that wants arguments does: iteration must not suffer, and indices can still be read and dropped.
        """
        if step and (not self._every or step % self._every):
            return True
        iterator = None if iterator is sampler else iterator
        try:
            parts = [copy.deepcopy(part.state_dict()) if is_stateful(part) else None for part in (sampler, iterator)]
        except Exception:
            return False
        self._states.append({"at": step, "ended": ended, "sampler": parts[0], "iterator": parts[1]})
        return True

    def at(self, step: int) -> dict[str, Any] | None:
        """The newest state that is not beyond `step` steps; None if there is none."""
        return next((state for state in reversed(tuple(self._states)) if state["at"] <= step), None)

    def forget(self, step: int) -> None:
        """`step` steps have been delivered: states of which ``at(step - 1)`` and later ones know nothing can go."""
        states = self._states
        while len(states) > 1 and states[1]["at"] < step:
            states.popleft()


class _Ending:
    """An iterator that knows whether it has ended: who reads batches from it may see the end before the last batch."""

    def __init__(self, iterator: Any, first: Any = _END) -> None:
        self.iterator = iterator
        self.ended = False
        self._first = first

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        first, self._first = self._first, _END
        if first is not _END:
            return first
        try:
            return next(self.iterator)
        except StopIteration:
            self.ended = True
            raise


class IndexStream:
    """One epoch's indices, a step each. Whoever takes one moves the position on.

    Args:
        index_sampler: torch's batch sampler or the user's sampler, or a `RankView`.
        made: its iterator, just made.
        step: steps that were delivered before.
        beyond: numbers of steps after `step` that were delivered, too (out of order): they are left out.
        every: how often a stateful sampler is asked for its state, in steps.
        saved: the sampler's state to continue from, of a `StateLog`.
        generators: what `generators` was when the epoch began.
        drawn: states of the generators before `made` was made, of those that this drew from.
    """

    def __init__(
        self,
        index_sampler: Any,
        made: Iterator[Any],
        *,
        step: int = 0,
        beyond: frozenset[int] = frozenset(),
        every: int = 1,
        saved: dict[str, Any] | None = None,
        generators: dict[str, str] | None = None,
        drawn: dict[str, str] | None = None,
    ) -> None:
        self._drawn = drawn
        self._index_sampler = index_sampler
        self._sampler = base_sampler(index_sampler)
        self._made = made
        self._beyond = beyond
        self._saved = saved
        self._iterator: Any = None
        self._step = step
        self._every = every
        self._read: deque[Any] = deque()  # out of the sampler, and in no step; one at most
        self._pulled: tuple[int | None, int, Any] = None, 0, None  # the last one: for which task; its step and index
        self._own = own_generator(self._sampler)
        self.unclaimed: list[int] = []
        """Numbers of steps that ``next()`` gave, and that no task was made of."""
        self.log: StateLog | None = None
        """States of a stateful sampler; None when it has none."""
        self.generators = generators
        """Text of the torch generators' states from which the sampler drew its order; None when it drew nothing."""
        # Seeking draws nothing, so it is done at once: an iterator keeps the epoch that it was made in. torch's own
        # way, where nothing is to be sought, is to begin with the first index.
        seeks = isinstance(self._sampler, SeekableSampler) and (step or isinstance(index_sampler, RankView))
        self._items: Iterator[Any] | None = self._sought(step) if seeks else None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        step, index = self.pull()
        self.unclaimed.append(step)
        return index

    def pull(self, task: int | None = None) -> tuple[int, Any]:
        """The next step's number and index. StopIteration at the end. Asked again for the same task, whose answer was
        lost to Ctrl-C, it gives the same.
        """
        if task is not None and task == self._pulled[0]:
            return self._pulled[1:]
        if self._items is None:
            self._items = self._begin()
        read = self._read
        while True:
            if not read:
                # Into the deque by one call into C: Ctrl-C comes before or after that, or in the sampler's own code.
                read.extend(map(next, (self._items,)))
                if not read:
                    raise StopIteration
            step = self._step
            if self.log is not None:
                ended = isinstance(self._iterator, _Ending) and self._iterator.ended
                if not self.log.note(step + 1, self._sampler, _inner(self._iterator), ended=ended):
                    self.log = None
            # Nothing is called from here on, so that Ctrl-C does not come in between.
            item = read[0]
            del read[0]
            self._step = step + 1
            if step not in self._beyond:
                self._pulled = task, step, item
                return step, item

    def state(self, step: int) -> dict[str, Any] | None:
        """The sampler's state after `step` steps or before; None if it has none, or its indices must be read anew."""
        if self._items is None and self._saved is None:
            if self._step:
                return None
            if self._index_sampler is self._sampler and is_stateful(self._made) and not is_stateful(self._sampler):
                made: Any = self._made
                return {"at": 0, "ended": False, "sampler": None, "iterator": copy.deepcopy(made.state_dict())}
            return fresh_state(self._sampler)
        return self._saved if self.log is None else self.log.at(step)

    def end_of_epoch(self) -> None:
        """Bring the sampler to the end of the epoch that the saved state is of: the next one follows from there."""
        assert self._saved is not None
        iterator = self._own_iterator()
        if not self._saved["ended"]:
            for _ in iterator:
                pass

    def drawn(self) -> dict[str, str] | None:
        """`generators`; before anything was drawn, what a generator of the sampler's own will begin with."""
        if self.generators is None and self._items is None and self._own is not None:
            return {"own": generator_text(self._own)}
        return self.generators

    def own_state(self) -> str | None:
        """Text of the present state of the sampler's own generator, None if it has none."""
        return None if self._own is None else generator_text(self._own)

    def _begin(self) -> Iterator[Any]:
        """Find the position. Called with the first pull: torch's samplers, too, draw their random numbers there."""
        before = generator_states(self._own)
        if self.generators is not None:
            set_generators(self.generators, self._own)
        try:
            items = self._restored(self._step)
            # Not through itertools: its wrappers ask for an iterator anew, or do not go on after an error.
            self._read.extend(map(next, (items,)))
        finally:
            if self.generators is None:
                self.generators = self._drawn or drawn_from(before, generator_states(self._own))
            elif "global" in self.generators:
                # The order's draws were made long ago; this process's own generator is where the user wants it.
                torch.default_generator.set_state(before["global"])
        return items

    def _sought(self, step: int) -> Iterator[Any]:
        source = self._index_sampler
        if isinstance(source, RankView):
            return source.iter_from(step)
        if source is self._sampler:
            return source.iter_from(min(step, len(source)))  # type: ignore[no-any-return]
        size = source.batch_size
        return _batches(self._sampler.iter_from(min(step * size, len(self._sampler))), size, source.drop_last)

    def _restored(self, step: int) -> Iterator[Any]:
        """By the sampler's own state if there is one, and for the rest by reading and dropping."""
        source, saved = self._index_sampler, self._saved
        at = 0 if saved is None else saved["at"]
        if isinstance(source, RankView):
            iterator = _past(self._own_iterator(), (step - at) * source.cutter.stride)
            return source.iter_from(step, self._unless_ended(iterator))
        if source is self._sampler:
            if saved is None and self.generators is None:
                self._iterator = self._made
                self._begin_log()
                return _past(self._made, step)
            return _past(self._unless_ended(self._own_iterator()), step - at)
        if saved is None and iterates_plainly(self._sampler) and not is_stateful(self._sampler):
            return _past(self._made, step)
        items = self._unless_ended(self._own_iterator())
        return _past(_batches(items, source.batch_size, source.drop_last), step - at)

    def _own_iterator(self) -> Iterator[Any]:
        """The user's sampler's iterator, which torch's batch sampler would keep to itself, from the saved state on."""
        saved = self._saved
        if saved is not None and saved["sampler"] is not None:
            self._sampler.load_state_dict(copy.deepcopy(saved["sampler"]))
        iterator: Any = iter(self._sampler)
        if saved is not None and saved["iterator"] is not None:
            iterator.load_state_dict(copy.deepcopy(saved["iterator"]))
        first = _END
        if saved is not None and saved["sampler"] is not None and not saved["at"]:
            # A sampler that changes its state with its first index stood at its last epoch's end still.
            first = next(iterator, _END)
            if first is _END:
                iterator = iter(self._sampler)
        self._iterator = iterator
        self._begin_log()
        if self.log is None and first is _END:
            found: Iterator[Any] = iterator
            return found  # without a state its end need not be watched, which costs 30 ns an index
        ending = self._iterator = _Ending(iterator, first)
        return ending

    def _begin_log(self) -> None:
        iterator = _inner(self._iterator)
        if is_stateful(self._sampler) or is_stateful(iterator):
            self.log = StateLog(self._every, self._saved)
            if self._saved is None and not self._step and not self.log.note(0, self._sampler, iterator):
                self.log = None

    def _unless_ended(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Nothing, if the saved state is that of a sampler that has seen its end: it stands before its next epoch."""
        return iter(()) if self._saved is not None and self._saved["ended"] else iterator


def fresh_state(sampler: Any) -> dict[str, Any] | None:
    """A stateful sampler's state before anything was asked of it; None if it has none of its own."""
    try:
        if is_stateful(sampler):
            return {"at": 0, "ended": False, "sampler": copy.deepcopy(sampler.state_dict()), "iterator": None}
    except Exception:  # as in `StateLog.note`
        return None
    if not draws_when_iterated(sampler):
        return None
    # Its state is its iterator's, and making one draws from the generator, which must not be seen here.
    before = sampler.generator.get_state()
    try:
        iterator: Any = iter(sampler)
        if not is_stateful(iterator):
            return None
        return {"at": 0, "ended": False, "sampler": None, "iterator": copy.deepcopy(iterator.state_dict())}
    finally:
        sampler.generator.set_state(before)


def _inner(iterator: Any) -> Any:
    return iterator.iterator if isinstance(iterator, _Ending) else iterator


def _past(items: Iterator[Any], count: int) -> Iterator[Any]:
    """The iterator itself, `count` items later."""
    for _ in range(count):
        if next(items, _END) is _END:
            break
    return items


def _batches(items: Iterator[Any], size: int, drop_last: bool) -> Iterator[list[Any]]:
    """As torch's `BatchSampler`."""
    while batch := list(itertools.islice(items, size)):
        if len(batch) < size and drop_last:
            return
        yield batch
