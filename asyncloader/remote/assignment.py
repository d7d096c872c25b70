"""Which worker reads which piece of which shard: decided in the main process, one lease at a time. Pure.

Data path: plan of pieces -> [leases] -> a worker's lane -> samples -> batch.

Every worker (a *lane*) fills its batches from the pieces that were leased to it, one after the other. Nobody else reads
those: so no sample comes twice, whatever the number of workers and shards.

The order is that of a single process which fills batches from the lanes in turn, and lets a lane take the next piece of
the plan when it begins its last one. It depends on no clock, although many processes work at once: a request has a
*stamp* (the lane's batch, the leases that it has had, its number), and requests are answered in the order of their
stamps. So one waits until every other lane is known to be past it, or to have asked with a later stamp. A lane asks for
a piece while it still reads another, and hardly ever has to wait. (With ``in_order=False`` nothing is promised about
the order, and requests are answered as they come.)

A lane that can fill no more batch *gives back* what it has left, and is over; another one reads that again: one whose
request has a later stamp. Only the last lane ends with a short batch.

*Healing.* A worker that takes another's place asks again for what it does not remember, and is answered as that one
was.

*Resuming.* `Ledger` has what was leased to whom, in order. Together with the states of the lanes at their delivered
batches it says what nobody has begun: leases that were taken later are as good as never given. Lanes then make again
the requests that they made since, with the same stamps, and are answered as before. What a lane gave back whose end was
delivered keeps its stamp, so that requests which were made before it do not get it now.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from asyncloader.remote.catalog import Piece

__all__ = ["LaneStart", "Lease", "LeaseBook", "Ledger", "LedgerState", "Reply", "Returned"]

Lease = tuple[Piece, ...]
"""Pieces for one lane to read, one after the other."""


class Reply(NamedTuple):
    """An answer to a lane.

    Attributes:
        lane: whose request it answers.
        number: how many leases the lane had had when it asked.
        lease: what it shall read next. None: there is nothing now.
        over: its stream ends here: what it has left is another's, unless `last`.
        last: nobody else has anything: what it has left is the last batch.
    """

    lane: int
    number: int
    lease: Lease | None = None
    over: bool = False
    last: bool = False


class LaneStart(NamedTuple):
    """Where a lane begins, or goes on.

    Attributes:
        asks: the first batch in which it may ask: the one in which it did ask for its next lease, if it has asked; else
            the one that it makes next.
        answers: the batch that its first answer is about.
        taken: leases that it has had.
        over: its stream has ended.
    """

    asks: int = 0
    answers: int = 0
    taken: int = 0
    over: bool = False


class Returned(NamedTuple):
    """What a lane that is over gave back.

    Attributes:
        stamp: of the request with which it did: the lane's batch, the leases that it has had, its number.
        lease: what it had left.
    """

    stamp: tuple[int, int, int]
    lease: Lease

    @property
    def giver(self) -> int:
        """The lane."""
        return self.stamp[2]


_STAMP = attrgetter("stamp")


class LedgerState(NamedTuple):
    """Where an epoch stands.

    Attributes:
        done: how many leases of the plan were given.
        back: leases that come before the rest of the plan, in their order.
        returned: what was given back by lanes whose end was delivered, and is nobody's yet, in the order of stamps.
        over: the lanes that are over because another one has what they gave back.
    """

    done: int
    back: list[Lease]
    returned: list[Returned]
    over: list[int]


class _Entry(NamedTuple):
    lane: int
    number: int
    lease: Lease
    source: int  # its place in the ledger's source; -1 for one that was given back
    giver: int  # the lane that gave it back; -1 for one of the source


class Ledger:
    """What was leased in one epoch, in order. Written by its `LeaseBook`; any thread may ask for the state.

    Args:
        plan: the epoch's leases, in their order.
        done: how many of them were given before the epoch was resumed.
        back: leases that come before the rest of the plan: they were taken, but not used, when the state was saved.
        returned: what had been given back, and was nobody's, in the order of stamps.
    """

    def __init__(
        self, plan: Sequence[Lease], done: int = 0, back: Sequence[Lease] = (), returned: Sequence[Returned] = ()
    ) -> None:
        self._plan = plan
        self._done = done
        self._back = list(back)
        self._entries: list[_Entry] = []
        self._returned = list(returned)
        self._takers: dict[int, _Entry] = {}  # giver -> who got what it gave back

    def __len__(self) -> int:
        """Leases of the source: those that came back, and the rest of the plan."""
        return len(self._back) + len(self._plan) - self._done

    @property
    def returned(self) -> tuple[Returned, ...]:
        """What lanes have given back so far, whoever has it now."""
        return tuple(self._returned)

    def source(self, number: int) -> Lease:
        """Lease `number` of the source."""
        if number < len(self._back):
            return self._back[number]
        return self._plan[self._done + number - len(self._back)]

    def note(self, lane: int, number: int, lease: Lease, source: int, giver: int) -> None:
        """A lease was given."""
        entry = _Entry(lane, number, lease, source, giver)
        self._entries.append(entry)
        if giver >= 0:
            self._takers[giver] = entry

    def note_return(self, returned: Returned) -> None:
        """A lane that is over gave back what it had left."""
        self._returned.append(returned)

    def state(self, taken: Sequence[int], ended: Collection[int] = ()) -> LedgerState:
        """Where the epoch stands when the lanes have had so many leases.

        Takes time for the leases since each lane's last one that counts.

        Args:
            taken: of each lane.
            ended: lanes whose place is behind their end. What another one gave back and is nobody's yet is its own
                again, as it is where it was before its end.
        """
        had = [math.inf if lane in ended else number for lane, number in enumerate(taken)]
        over: list[int] = []
        returned: list[Returned] = []
        for each in reversed(self._returned[:]):
            taker = self._takers.get(each.giver)
            if taker is not None and taker.number < had[taker.lane]:
                over.append(each.giver)
                had[each.giver] = math.inf  # what it gave back may be what it had last
            elif each.giver in ended:
                returned.append(each)
        unseen = set(range(len(taken)))
        later: list[Lease] = []
        used = -1
        for entry in reversed(self._entries[:]):
            used = max(used, entry.source)
            if entry.number < had[entry.lane]:
                unseen.discard(entry.lane)
            elif entry.source >= 0:
                later.append(entry.lease)
            if not unseen and used >= 0 and entry.source >= 0:
                break  # what was given back comes at the end, when the source is used up
        used += 1
        back = [*reversed(later), *self._back[used:]]
        return LedgerState(
            self._done + max(0, used - len(self._back)), back, sorted(returned, key=_STAMP), sorted(over)
        )


class LeaseBook:
    """Answers the lanes of one epoch.

    Args:
        ledger: of the epoch, with nothing noted in it yet.
        lanes: where each begins.
        ordered: answer in the order of stamps, which depends on no clock.
    """

    def __init__(self, ledger: Ledger, lanes: Sequence[LaneStart], *, ordered: bool = True) -> None:
        self.ledger = ledger
        self._ordered = ordered
        self._used = 0  # leases of the source
        self._returned = list(ledger.returned)  # in the order of stamps, if answers are
        self._batch = [lane.asks for lane in lanes]  # the first batch in which the lane may still ask
        self._next = [lane.answers for lane in lanes]
        self._first = [lane.taken for lane in lanes]
        self._had: list[list[Lease]] = [[] for _ in lanes]
        self._refused: list[set[int]] = [set() for _ in lanes]  # numbers of requests that there was nothing for
        self._over: list[Reply | None] = [
            Reply(at, 0, over=True) if lane.over else None for at, lane in enumerate(lanes)
        ]
        self._pending: dict[int, tuple[int, int, int, Lease | None]] = {}  # lane -> stamp, and what it would give back
        self._gone: set[int] = set()  # lanes whose pending request is that of a process that is no more

    def __repr__(self) -> str:
        left = len(self.ledger) - self._used
        return f"<LeaseBook {left} leases left, {len(self._pending)} of {len(self._batch)} lanes waiting>"

    def ask(self, lane: int, number: int, batch: int, left: Iterable[Sequence[Any]] | None = None) -> list[Reply]:
        """A lane asks for its next lease.

        Args:
            lane: who asks.
            number: how many it has had.
            batch: the batch that it is making.
            left: None: it has something to read yet. Else it has not, and not enough for a batch: this is the rest.

        Returns:
            All answers that this makes possible.

        Raises:
            ValueError: it cannot be this lane's next request.
        """
        had = self._first[lane] + len(self._had[lane])
        if not self._first[lane] <= number <= had:
            raise ValueError(f"lane {lane} asks for its lease number {number}, and has had {had}")
        if batch < 0 or (batch > self._next[lane] and len(self._next) > 1):  # a lane alone tells nothing of its batches
            # Its turn would come when the others are past a batch that nobody will make.
            raise ValueError(f"lane {lane} asks for batch {batch}, and makes its batch {self._next[lane]}")
        rest = None if left is None else _pieces(left)
        # Where it took the place of one that had the answer, it gets the same.
        if rest is None and number in self._refused[lane]:
            return [Reply(lane, number)]
        if number < had:
            return [Reply(lane, number, self._had[lane][number - self._first[lane]])]
        over = self._over[lane]
        if over is not None:
            return [over._replace(number=number)]
        self._pending[lane] = (batch, number, lane, rest)
        self._gone.discard(lane)
        return self._decide()

    def died(self, lane: int) -> None:
        """The lane's process is no more. Its request keeps its turn; who takes its place asks again for the answer.

        (An answer to that one's predecessor could be taken for one to a later request with the same number.)
        """
        if lane in self._pending:
            self._gone.add(lane)

    def answered(self, lane: int) -> list[Reply]:
        """The lane has made its next batch, or failed to. Returns the answers that this makes possible."""
        self._batch[lane] = self._next[lane] = self._next[lane] + 1
        return self._decide() if self._pending else []

    def _decide(self) -> list[Reply]:
        replies: list[Reply] = []
        while self._pending:
            lane = min(self._pending, key=lambda each: self._pending[each][:3])
            batch, number, _, left = self._pending[lane]
            if self._ordered and any(self._may_come_before(other, (batch, number, lane)) for other in self._running()):
                break
            del self._pending[lane]
            reply = self._reply((batch, number, lane), left)
            if lane in self._gone:
                self._gone.remove(lane)
            else:
                replies.append(reply)
        return replies

    def _running(self) -> list[int]:
        return [lane for lane, over in enumerate(self._over) if over is None]

    def _may_come_before(self, other: int, stamp: tuple[int, int, int]) -> bool:
        """Whether the lane may yet ask with an earlier stamp."""
        if other == stamp[2] or other in self._pending:
            return False
        return (self._batch[other], self._first[other] + len(self._had[other]), other) < stamp

    def _reply(self, stamp: tuple[int, int, int], left: Lease | None) -> Reply:
        _, number, lane = stamp
        last = self._running() == [lane]
        lease, source, giver = self._first_left(stamp, whatever=last and left is not None)
        if lease is not None:
            self._had[lane].append(lease)
            self.ledger.note(lane, number, lease, source, giver)
            return Reply(lane, number, lease)
        if left is None:
            self._refused[lane].add(number)
            return Reply(lane, number)
        reply = self._over[lane] = Reply(lane, number, over=True, last=last)
        if left and not last:
            returned = Returned(stamp, left)
            if self._ordered:
                insort(self._returned, returned, key=_STAMP)
            else:
                self._returned.append(returned)
            self.ledger.note_return(returned)
        return reply

    def _first_left(self, stamp: tuple[int, int, int], *, whatever: bool) -> tuple[Lease | None, int, int]:
        """The next lease for a request, its place in the source, and who gave it back. `whatever`: nobody else is left
        who could take what was given back.
        """
        if self._used < len(self.ledger):
            self._used += 1
            return self.ledger.source(self._used - 1), self._used - 1, -1
        if self._returned and (whatever or not self._ordered or self._returned[0].stamp < stamp):
            returned = self._returned.pop(0)
            return returned.lease, -1, returned.giver
        return None, -1, -1


def _pieces(plain: Iterable[Sequence[Any]]) -> Lease:
    """The pieces that a lane named.

    Raises:
        ValueError: they are none.
    """
    try:
        pieces = tuple(Piece(*each) for each in plain)
    except TypeError as error:
        raise ValueError(f"a lane gives back what is no list of pieces: {error}") from None
    if not all(isinstance(n, int) and n >= 0 for piece in pieces for n in (piece.shard, piece.start, piece.stop or 0)):
        raise ValueError(f"a lane gives back what is no list of pieces: {pieces!r}")
    return pieces
