"""Reads a plain sampler's indices from any delivered position on, and saves the states that find a position again.

Data path: sampler -> [index_stream] -> scheduler. Runs in the consumer's thread.

A position is found in the first of three ways that the sampler supports: it seeks (`SeekableSampler`); it restores a
state (`state_dict` and `load_state_dict`, on the sampler or its iterator); or its indices are read and dropped, which
fetches no data. The third way needs the same order again: the states of the generators that the sampler drew from when
it began are saved, and restored before it begins again.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from functools import cached_property
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import BatchSampler, SequentialSampler

from asyncloader.errors import interrupts, left_a_generator, warn_aside
from asyncloader.samplers.distributed import RankView, SeekableSampler, seek
from asyncloader.samplers.generators import (
    draws_when_iterated,
    find_drawn,
    generator_states,
    generator_text,
    iterates_plainly,
    own_generator,
    set_generators,
)
from asyncloader.samplers.surviving import Groups
from asyncloader.telemetry.counters import Recorder
from asyncloader.workers.fetch.dataset_state import is_stateful

_END = object()
_OWN_ORDERS = (
    "{} drew its order from torch's global generator: where that differs between ranks, each shares out an order of "
    "its own, and some samples come twice and others never. Give it a generator that each rank seeds alike, or leave "
    "sampler= out and set shuffle=True"
)


def base_sampler(index_sampler: Any) -> Any:
    """Return the user's sampler: the index sampler, or the sampler that a `BatchSampler` or `RankView` reads."""
    reads = isinstance(index_sampler, RankView) or type(index_sampler) is BatchSampler
    return index_sampler.sampler if reads else index_sampler


class StateLog:
    """A stateful sampler's states, each kept until its step is delivered. One thread writes, another may read.

    Args:
        every: number of steps between saved states; 0: only the state of step 0 is saved.
        saved: the first state, a result of `at`.
    """

    def __init__(self, every: int, saved: dict[str, Any] | None) -> None:
        self._every = every
        self.seconds = 0.0
        """Seconds that saving has taken; `time_pull` resets it."""
        self._states: deque[dict[str, Any]] = deque([saved] if saved is not None else [])

    def note(self, step: int, sampler: Any, iterator: Any = None, *, ended: bool = False) -> bool:
        """Save the state after `step` steps, if a state is due. `ended`: the sampler has reached its end. Returns False
        if `state_dict` failed, for example because it takes arguments: iteration continues, and a resume reads and
        drops indices instead.
        """
        if step and (not self._every or step % self._every):
            return True
        iterator = None if iterator is sampler else iterator
        began = perf_counter()
        try:
            parts = [copy.deepcopy(part.state_dict()) if is_stateful(part) else None for part in (sampler, iterator)]
        except Exception:
            return False
        self._states.append({"at": step, "ended": ended, "sampler": parts[0], "iterator": parts[1]})
        self.seconds += perf_counter() - began
        return True

    def at(self, step: int) -> dict[str, Any] | None:
        """Return the newest state of at most `step` steps; None if none is kept."""
        # A copy: the other thread may append, and a deque that changes cannot be iterated over.
        return next((state for state in reversed(tuple(self._states)) if state["at"] <= step), None)

    def forget(self, step: int) -> None:
        """Drop the states that `at` does not return for ``step - 1`` or a later step."""
        states = self._states
        while len(states) > 1 and states[1]["at"] < step:
            states.popleft()


def time_pull(log: StateLog | None, recorder: Recorder, seconds: float) -> None:
    """Record the seconds that the sampler took for an index, less the seconds in which its state was saved."""
    if log is not None and log.seconds:
        recorder.time("snapshot", log.seconds)
        seconds, log.seconds = max(0.0, seconds - log.seconds), 0.0
    recorder.time("sampler", seconds)


class _Ending:
    """An iterator that records whether it has ended: a batching reader may reach the end before its last batch."""

    def __init__(self, iterator: Any, first: Any = _END) -> None:
        self.iterator = iterator
        self.ended = False
        self._first = first

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        # The item that `_own_iterator` has taken, to find out whether the sampler was at its end.
        first, self._first = self._first, _END
        if first is not _END:
            return first
        # Not `next`, as Ctrl-C could strike between its return and ours, and the item would be lost.
        items = map(next, (self.iterator,))
        for item in items:
            return item
        self.ended = True
        raise StopIteration


class IndexStream:
    """One epoch's indices, one per step. `pull` advances the position.

    Args:
        index_sampler: torch's batch sampler or the user's sampler, or a `RankView`.
        made: its iterator, newly made.
        step: number of steps that were delivered before.
        beyond: numbers of later steps that were delivered, too (out of order); they are skipped.
        every: number of steps after which a stateful sampler's state is saved again.
        saved: the sampler's state from which the epoch continues, of a `StateLog`.
        generators: the attribute `generators` of the stream with which the epoch began.
        drawn: for each generator from which `made` drew while it was made: the state before.
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
        self._before: dict[str, torch.Tensor] | None = None  # the generators' states when the beginning was sought
        self._restoring: Iterator[Any] | None = None  # becomes `_items`
        self._step = step
        self._every = every
        self._read: deque[Any] = deque()  # taken from the sampler, and not returned; one item at most
        self._pulled: tuple[int | None, int, Any] = None, 0, None  # task, step and index of the last pull
        self._begun = False  # items were dropped to find the position
        self.unclaimed: list[int] = []
        """Numbers of steps that ``next()`` returned to code outside the loader, and that became no task."""
        self.log: StateLog | None = None
        """The states of a stateful sampler; None without states."""
        self.generators = generators
        """States, as text, of the generators from which the sampler drew its order; None if it drew nothing."""
        # torch reads its own sampler of 0, 1, 2, ... without a draw. To look takes as long as to collate a small batch.
        self._may_draw = generators is not None or type(self._sampler) is not SequentialSampler
        # Seeking draws nothing, so it happens at once: the iterator stays in the epoch in which it was made. Without a
        # position to seek, the sampler begins with the first index, as in torch. The protocol is tested last, which
        # takes longest.
        seeks = (step or isinstance(index_sampler, RankView)) and isinstance(self._sampler, SeekableSampler)
        self._items: Iterator[Any] | None = self._seek(step) if seeks else None
        self._broken = False  # what interrupted the last pull passed through a generator

    @cached_property
    def _own(self) -> torch.Generator | None:
        """The sampler's own generator."""
        return own_generator(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        step, index = self.pull()
        self.unclaimed.append(step)
        return index

    def pull(self, task: int | None = None) -> tuple[int, Any]:
        """Return the next step's number and index. StopIteration at the end. A second call for the same task, after
        Ctrl-C lost the result of the first, returns the same result.
        """
        if task is not None and task == self._pulled[0]:
            return self._pulled[1:]
        if self._items is None:
            self._items = self._begin()
        read = self._read
        while True:
            if not read:
                # A single call into C moves the item to the deque, so Ctrl-C cannot lose it, except in the sampler's
                # own code.
                try:
                    read.extend(map(next, (self._items,)))
                except BaseException as error:
                    self._broken = interrupts(error) and left_a_generator(error)
                    if isinstance(error, Exception):
                        self._begin_later()
                    raise
                if not read:
                    if not self._broken:
                        raise StopIteration
                    self._seek_again()
                    return self.pull(task)
            step = self._step
            if self.log is not None:
                ended = isinstance(self._iterator, _Ending) and self._iterator.ended
                if not self.log.note(step + 1, self._sampler, _inner(self._iterator), ended=ended):
                    self.log = None
            # No calls from here on: Ctrl-C cannot come between these assignments.
            item = read[0]
            del read[0]
            self._step = step + 1
            if step not in self._beyond:
                self._pulled = task, step, item
                return step, item

    def _seek_again(self) -> None:
        """A generator that was interrupted has ended: find the position again, as a resumed epoch does."""
        self._saved, self.generators = self.state(self._step), self.drawn()
        self._made, self._before, self._restoring = iter(self._index_sampler), None, None
        self._items = self._seek(self._step) if isinstance(self._sampler, SeekableSampler) else None
        self._broken = False

    def state(self, step: int) -> dict[str, Any] | None:
        """Return the sampler's newest state of at most `step` steps; None: the indices must be read again."""
        if self._items is None and self._saved is None:
            if self._step:
                return None
            if self._index_sampler is self._sampler and is_stateful(self._made) and not is_stateful(self._sampler):
                made: Any = self._made
                return {"at": 0, "ended": False, "sampler": None, "iterator": copy.deepcopy(made.state_dict())}
            return fresh_state(self._sampler)
        return self._saved if self.log is None else self.log.at(step)

    def end_of_epoch(self) -> None:
        """Advance the sampler to the end of the saved state's epoch, at which the next epoch continues."""
        assert self._saved is not None
        iterator = self._own_iterator()
        if not self._saved["ended"]:
            for _ in iterator:
                pass

    def drawn(self) -> dict[str, str] | None:
        """Return `generators`; before the first index, the states from before the draw, which may be still to come."""
        if self.generators is not None or self._items is not None:
            return self.generators
        return self._drawn or (None if self._own is None else {"own": generator_text(self._own)})

    def own_state(self) -> str | None:
        """Return the current state of the sampler's own generator, as text; None without a generator."""
        return None if self._own is None else generator_text(self._own)

    def _begin(self) -> Iterator[Any]:
        """Find the position. Called at the first pull, at which torch's samplers draw, too; and again if Ctrl-C has
        interrupted it: then it continues after the first index if that was taken, and otherwise draws the same order.
        """
        before = self._before
        if before is None:
            before = self._before = generator_states(self._own) if self._may_draw else {}
        elif self._own is not None and "own" in before and not self._read:
            # Ctrl-C has interrupted the draw: the second draw must give the same order.
            self._own.set_state(before["own"])
        try:
            if not self._read:
                if self.generators is not None:
                    set_generators(self.generators, self._own)
                self._restoring = self._restore(self._step)
                # Not through itertools: its wrappers call `iter` again, or do not continue after an error.
                self._read.extend(map(next, (self._restoring,)))
        except BaseException as error:
            if interrupts(error):
                if left_a_generator(error):
                    self._made = iter(self._index_sampler)
                raise
            self._note_draws(before)
            self._before = None
            # The sampler's error, once the position was found, is raised once: the next call reads on.
            self._items = self._items or self._restoring
            self._begin_later()
            raise
        self._note_draws(before)
        assert self._restoring is not None  # made above, or by the call that Ctrl-C ended
        return self._restoring

    def _begin_later(self) -> None:
        """After an error of the sampler's first item: let the next call begin the same order. Later, and in torch mode,
        an order that raises has ended.
        """
        if isinstance(self._index_sampler, RankView) and self._pulled[2] is None and not self._begun:
            self._items = self._before = None

    def _note_draws(self, before: dict[str, torch.Tensor]) -> None:
        """Note the generators from which the order was drawn. A resumed order must not change the global generator."""
        if self.generators is None:
            self.generators = self._drawn or find_drawn(before, generator_states(self._own) if self._may_draw else {})
            view, shared = self._index_sampler, "global" in (self.generators or ())
            if shared and isinstance(view, RankView) and view.share.topology.world_size > 1:
                warn_aside(_OWN_ORDERS.format(type(self._sampler).__name__))
        elif "global" in self.generators:
            # The order was drawn when the epoch first began; the user's global generator must not change now.
            torch.default_generator.set_state(before["global"])

    def _seek(self, step: int) -> Iterator[Any]:
        source = self._index_sampler
        if isinstance(source, RankView):
            return source.iter_from(step)
        if source is self._sampler:
            return seek(source, step, 1)
        size = source.batch_size
        return _batches(seek(self._sampler, step * size, size), size, source.drop_last)

    def _restore(self, step: int) -> Iterator[Any]:
        """Restore the sampler's state, if one is saved; then read and drop the indices up to `step`."""
        source, saved = self._index_sampler, self._saved
        at = 0 if saved is None else saved["at"]
        if isinstance(source, RankView):
            skip = (step - at) * source.cutter.stride
            iterator = _past(self._own_iterator(), min(skip, 1))
            self._begun = skip > 0
            return source.iter_from(step, self._unless_ended(_past(iterator, skip - 1)))
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
        """Return an iterator of the user's sampler from the saved state on; torch's batch sampler would hide it."""
        saved = self._saved
        if saved is not None and saved["sampler"] is not None:
            self._sampler.load_state_dict(copy.deepcopy(saved["sampler"]))
        try:
            iterator: Any = iter(self._sampler)
        except BaseException as error:
            if not interrupts(error):
                # Not called again: torch's batch sampler is a generator, which has ended with the error.
                self._items = iter(())
            raise
        if saved is not None and saved["iterator"] is not None:
            iterator.load_state_dict(copy.deepcopy(saved["iterator"]))
        first = _END
        if saved is not None and saved["sampler"] is not None and not saved["at"]:
            # A sampler whose state only changes with its first index was still at the end of its last epoch.
            first = next(iterator, _END)
            if first is _END:
                iterator = iter(self._sampler)
        self._iterator = iterator
        self._begin_log()
        if self.log is None and first is _END:
            found: Iterator[Any] = iterator
            return found  # without a state, its end is not needed, and recording it costs 30 ns per index
        ending = self._iterator = _Ending(iterator, first)
        return ending

    def _begin_log(self) -> None:
        iterator = _inner(self._iterator)
        if is_stateful(self._sampler) or is_stateful(iterator):
            self.log = StateLog(self._every, self._saved)
            if self._saved is None and not self._step and not self.log.note(0, self._sampler, iterator):
                self.log = None

    def _unless_ended(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Return `iterator`; if the saved sampler had reached its end, an empty one: it would begin its next epoch."""
        return iter(()) if self._saved is not None and self._saved["ended"] else iterator


def fresh_state(sampler: Any) -> dict[str, Any] | None:
    """Return a stateful sampler's state before its first use; None without a state."""
    try:
        if is_stateful(sampler):
            return {"at": 0, "ended": False, "sampler": copy.deepcopy(sampler.state_dict()), "iterator": None}
    except Exception:  # as in `StateLog.note`
        return None
    if not draws_when_iterated(sampler):
        return None
    # The state is the iterator's. To make an iterator draws from the generator, which is undone below.
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
    """Advance the iterator by `count` items, and return it."""
    for _ in range(count):
        if next(items, _END) is _END:
            break
    return items


def _batches(items: Iterator[Any], size: int, drop_last: bool) -> Iterator[list[Any]]:
    """Return batches like those of torch's `BatchSampler`."""
    least = size if drop_last else 1
    return Groups(lambda: items, size, lambda _, batch: batch if len(batch) >= least else None)
