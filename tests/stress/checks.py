"""The batches and errors that a case must give, and their differences from the recorded events. Pure.

An epoch is a row of items: batches of known indices, or errors in a batch's place. Some cases may, or must, stop before
the end with one of certain errors; everything before it must still be right. A case that leaves early has an open end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tests.stress.consumer import Event
from tests.stress.faults import ERRORS
from tests.stress.schedule import KILLING, START, STRIDE, Case, Fault, interleaved


class Item(NamedTuple):
    """A batch with these indices (None: no batch may come here), or an error of one of these classes in its place."""

    indices: tuple[int, ...] | None
    errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Epoch:
    """The expected items of an epoch.

    Args:
        items: batches and errors.
        stop: classes of errors that end the epoch, after at least `after` and at most `by` items.
        must_stop: such an error must come.
        ordered: the items come in this order.
        open_end: the consumer may have left at any point.
        bad: what ``loader.skipped_samples`` must have at its end, sorted; None: not known beforehand.
    """

    items: list[Item]
    stop: tuple[str, ...] = ()
    after: int = 0
    by: int = 0
    must_stop: bool = False
    ordered: bool = True
    open_end: bool = False
    bad: list[int] | None = None


# -------------------------------------------------------------------------------------- the expected epochs


def placed_faults(case: Case, orders: Sequence[Sequence[int]]) -> list[tuple[int, Fault]]:
    """The faults in workers, each with the index of its sample. `orders` has the indices of each epoch of a map."""
    found: list[tuple[int, Fault]] = []
    for fault in case.having(*KILLING, "raise", "starve"):
        if fault.at == START:
            found.append((START - fault.worker, fault))
            continue
        place = fault.worker * STRIDE + fault.at if case.streams else orders[fault.epoch][fault.at]
        found.append((place, fault))
    return found


def expected(case: Case, orders: Sequence[Sequence[int]], refilled: Sequence[Sequence[Event]] = ()) -> list[Epoch]:
    """Every epoch of the case. `refilled`: the events of an undisturbed run, where substitutes are drawn."""
    return [_epoch(case, number, orders, refilled) for number in range(case.epochs)]


def _epoch(case: Case, number: int, orders: Sequence[Sequence[int]], refilled: Sequence[Sequence[Event]]) -> Epoch:
    bad = {index: fault for index, fault in placed_faults(case, orders) if _raises(fault, number)}
    if case.on_error == "refill":
        items = [Item(event.indices) for event in refilled[number] if event.kind == "batch"]
    elif case.streams:
        items = _stream_items(case, bad)
    else:
        items = _map_items(case, orders[number], bad)
    epoch = Epoch(items, ordered=case.in_order, bad=_bad_at_end(case, bad))
    epoch = _with_deaths(case, number, epoch, orders)
    if case.max_skipped_samples is not None and len(bad) > case.max_skipped_samples:
        epoch = replace(epoch, stop=("TooManySkippedSamples",), by=len(items), must_stop=True)
    epoch = _with_shortage(case, number, epoch)
    if case.leave in ("exhaust", "resume") or number != case.epochs - 1:
        return epoch
    if case.leave in ("close", "close elsewhere"):
        epoch = replace(epoch, stop=("LoaderClosed",), after=0, by=len(items))
    return replace(epoch, open_end=True)


def _bad_at_end(case: Case, bad: dict[int, Fault]) -> list[int] | None:
    if case.leave != "exhaust" or case.on_error == "refill" or case.streams:
        return None
    if case.max_skipped_samples is not None and len(bad) > case.max_skipped_samples:
        return None
    return [] if case.on_error == "raise" else sorted(bad)


def _raises(fault: Fault, epoch: int) -> bool:
    return fault.kind == "raise" and fault.epoch == epoch


def _map_items(case: Case, order: Sequence[int], bad: dict[int, Fault]) -> list[Item]:
    items: list[Item] = []
    for begin in range(0, len(order), case.batch_size):
        indices = tuple(order[begin : begin + case.batch_size])
        struck = [bad[index] for index in indices if index in bad]
        if not struck:
            items.append(Item(indices))
        elif case.on_error == "raise":
            items.append(Item(None, tuple(ERRORS[fault.number][0].__name__ for fault in struck)))
        elif case.on_error == "callable":
            items.append(Item(tuple(-1 - index if index in bad else index for index in indices)))
        elif left := tuple(index for index in indices if index not in bad):
            items.append(Item(left))
    return items


def _stream_items(case: Case, bad: dict[int, Fault]) -> list[Item]:
    """A batch with a bad sample is lost, and the next batch begins after that sample, as in torch."""
    if not bad:
        return [Item(tuple(indices)) for indices in interleaved(case)]
    rows: list[list[Item]] = []
    for worker, share in enumerate(case.shares):
        row: list[Item] = []
        batch: list[int] = []
        for index in range(worker * STRIDE, worker * STRIDE + share):
            if index in bad:
                row.append(Item(None, (ERRORS[bad[index].number][0].__name__,)))
                batch = []
                continue
            batch.append(index)
            if len(batch) == case.batch_size:
                row.append(Item(tuple(batch)))
                batch = []
        rows.append([*row, *([Item(tuple(batch))] if batch else [])])
    items: list[Item] = []
    while any(rows):
        items += [row.pop(0) for row in rows if row]
    return items


def _with_deaths(case: Case, number: int, epoch: Epoch, orders: Sequence[Sequence[int]]) -> Epoch:
    """The expected epoch where workers die."""
    deaths = [(index, f) for index, f in placed_faults(case, orders) if f.kind in KILLING and f.epoch == number]
    if case.timeout and deaths:
        place = _batch_of(epoch.items, deaths[0][0])
        return replace(epoch, stop=("LoaderTimeout",), by=_by(epoch, place), must_stop=True, open_end=True)
    if not deaths:
        return epoch
    restarts = case.max_worker_restarts
    if restarts is None:
        restarts = 3 if case.seeded else 0
    poison = [index for index, fault in deaths if fault.strikes != 1]
    if poison and not deaths[0][1].blamed:
        if deaths[0][1].strikes:
            return epoch  # as long as there are restarts
        place = _batch_of(epoch.items, poison[0])
        return replace(epoch, stop=("WorkerDied",), by=_by(epoch, place), must_stop=True)
    if poison and case.streams:  # a stream cannot go on behind it
        place = _batch_of(epoch.items, poison[0])
        return replace(epoch, stop=("TaskQuarantined",), by=_by(epoch, place), must_stop=True)
    if poison:
        items = list(epoch.items)
        place = _batch_of(items, poison[0])
        items[place] = Item(None, ("TaskQuarantined",))
        if case.on_error != "raise":
            epoch = replace(epoch, bad=sorted((*(epoch.bad or []), *(epoch.items[place].indices or ()))))
            given = tuple(-1 - index for index in epoch.items[place].indices or ())
            items[place : place + 1] = [Item(given)] if case.on_error == "callable" else []
        return replace(epoch, items=items)
    impassable = case.stateless and not case.allow_replay
    if impassable and restarts and deaths[0][1].at < case.batch_size:
        return epoch  # that stream had given no batch: nothing needs to be read again
    if restarts == 0 or impassable or (case.workers == 1 and len(deaths) > restarts):
        fatal = sorted(_batch_of(epoch.items, index) for index, _ in deaths)[0 if impassable else restarts]
        return replace(
            epoch, stop=("WorkerDied",), by=_by(epoch, fatal), must_stop=case.workload != "async stream" or not restarts
        )
    return epoch


def _by(epoch: Epoch, place: int) -> int:
    """Items that may come before a death over number `place` ends the epoch."""
    return place if epoch.ordered else len(epoch.items) - 1


def _batch_of(items: list[Item], index: int) -> int:
    return next(place for place, item in enumerate(items) if item.indices is not None and index in item.indices)


def _with_shortage(case: Case, number: int, epoch: Epoch) -> Epoch:
    """The expected epoch with a shortage of memory or descriptors: errors in place, or its end."""
    starved = [fault for fault in case.having("starve") if fault.epoch <= number]
    short = [fault for fault in case.having("descriptors", "disk") if fault.epoch == number]
    if starved and (starved[0].epoch == number or case.persistent):
        names: tuple[str, ...] = ("RingMemoryError",)
        if starved[0].number < 0:  # without address space anything may fail, also what torch allocates for itself
            names = ("MemoryError", "RuntimeError", "OSError", "WorkerDied")
            epoch = replace(epoch, stop=("WorkerDied", "TaskQuarantined"), by=len(epoch.items))
        return replace(epoch, items=[Item(item.indices, (*item.errors, *names)) for item in epoch.items])
    if short:
        names = ("RingMemoryError", "OSError", "WorkerDied")
        items = [Item(item.indices, (*item.errors, *names)) for item in epoch.items]
        return replace(epoch, items=items, stop=names, after=short[0].at, by=len(items))
    return epoch


# ------------------------------------------------------------------------------------------ the recorded events


@dataclass
class _Matching:
    """Walks through the events of one epoch."""

    epoch: Epoch
    stopped: bool = False
    ended: bool = False
    unbegun: bool = False  # an error came before the first batch, and the next call began the epoch again
    lost: int = 0  # out of order: errors in place of a batch that cannot be identified
    problems: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.left = list(self.epoch.items)

    @property
    def taken(self) -> int:
        return len(self.epoch.items) - len(self.left) + self.lost

    def take(self, event: Event, last: bool) -> None:
        """The next event; `last` says that only the end can follow."""
        if event.wrong:
            self.problems.append(f"{event}: {event.wrong}")
        if self.stopped and not self.taken and event.kind != "end":
            self.stopped, self.unbegun = False, True
        if self.ended or (self.stopped and event.kind != "end"):
            self.problems.append(f"{event} came after the end")
        elif event.kind == "end":
            self.ended = True
            if len(self.left) != self.lost and not self.stopped:
                self.problems.append(f"the end came after {self.taken} of {len(self.epoch.items)} items")
        elif event.kind == "batch":
            self._batch(event)
        else:
            self._error(event, last)

    def _candidates(self) -> list[Item]:
        return self.left[:1] if self.epoch.ordered else self.left

    def _batch(self, event: Event) -> None:
        for item in self._candidates():
            if item.indices == event.indices:
                self.left.remove(item)
                return
        self._unexpected(event)

    def _error(self, event: Event, last: bool) -> None:
        names, epoch = set(event.names), self.epoch
        if set(epoch.stop) & names and (last or not any(set(item.errors) & names for item in self._candidates())):
            self.stopped = True
            if not epoch.after <= self.taken <= epoch.by:
                self.problems.append(f"{event} came after {self.taken} items, not {epoch.after} to {epoch.by}")
            return
        for item in sorted(self._candidates(), key=lambda item: item.indices is not None):
            if set(item.errors) & names:
                if epoch.ordered or item.indices is None:
                    self.left.remove(item)
                else:
                    self.lost += 1
                return
        self._unexpected(event)

    def _unexpected(self, event: Event) -> None:
        wanted = f"{self.left[0]}" if self.left and self.epoch.ordered else "anything else"
        self.problems.append(f"{event} came in place of {wanted}")


def compare(epoch: Epoch, events: Sequence[Event], name: str) -> list[str]:
    """Where the events of one epoch differ from it, in words."""
    matching = _Matching(epoch)
    for number, event in enumerate(events):
        matching.take(event, all(later.kind == "end" for later in events[number + 1 :]))
        if len(matching.problems) > 3:
            break
    problems = matching.problems
    begins_again = matching.unbegun and not matching.taken  # and fails again, each time
    if not (matching.ended or epoch.open_end or begins_again):
        problems.append("no end came")
    if epoch.must_stop and not (matching.stopped or matching.unbegun):
        problems.append(f"none of {epoch.stop} came")
    if problems:
        wanted = Counter(item.indices for item in epoch.items if item.indices is not None)
        got = Counter(event.indices for event in events if event.kind == "batch")
        if not (matching.stopped or epoch.open_end) and (missing := wanted - got):
            problems.append(f"missing: {list(missing)[:5]}")
        if doubled := got - wanted:
            problems.append(f"doubled, or never asked for: {list(doubled)[:5]}")
    return [f"{name}: {problem}" for problem in problems]


def draws_differ(events: Sequence[Event], undisturbed: Sequence[Event], name: str) -> list[str]:
    """Samples whose random numbers are not those of the undisturbed run."""
    wanted = Counter(pair for event in undisturbed for pair in zip(event.indices, event.draws, strict=True))
    got = Counter(pair for event in events for pair in zip(event.indices, event.draws, strict=True))
    others = sorted({index for index, _ in got - wanted if index >= 0})  # else it is a substitute
    return [f"{name}: samples {others[:5]} have other random numbers than undisturbed"] if others else []
