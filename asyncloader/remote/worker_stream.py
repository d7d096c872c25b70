"""One worker's stream: from its leases to the samples of its batches. Data path: lease -> reading -> [lane] -> batch.

A lane makes one batch at a time. What it reads ahead of that are bytes only (`read_ahead.py`): samples are taken when
a batch needs them, so that where the lane stands follows from its batches alone, on every run.

Its state is that of its last batch: the pieces that it has still to read, with offsets; of the shuffle buffer, the
pieces that fill it again; what it asks the main process for. None of it grows with the epoch.

Leases for a lane in the same process. Data path: lease book -> [local_leases] -> lane.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from asyncloader.errors import StateError
from asyncloader.formats import Sample
from asyncloader.remote.assignment import LeaseBook
from asyncloader.remote.catalog import Piece, Shard, bytes_left
from asyncloader.remote.prefetch import LookAhead, Open, PieceReading
from asyncloader.remote.shuffle import ShuffleBlocks
from asyncloader.workers.fetch.assignment_client import LeaseAnswer, LeaseSource

__all__ = [
    "Lane",
    "LocalLeases",
    "merged",
]

ASK_AHEAD = 12 << 20
"""Bytes before a lease's end at which the next one is asked for, where the end is known; else at its beginning. And
bytes that are open behind the present place: a round trip of 50 ms at 250 MB/s a worker."""


class Entry(NamedTuple):
    """A sample, and the piece that holds it alone."""

    sample: Sample
    piece: Piece


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """The same pieces, neighbours made one."""
    found: list[Piece] = []
    _extend(found, pieces)
    return found


def _extend(found: list[Piece], pieces: Iterable[Piece]) -> None:
    for piece in pieces:
        if found and found[-1].shard == piece.shard and found[-1].stop == piece.start:
            found[-1] = found[-1]._replace(stop=piece.stop)
        else:
            found.append(piece)


class Lane:
    """Reads what is leased to it. Not for concurrent use: one `take` after the other.

    Args:
        shards: the catalogue that pieces refer to.
        open: reads a piece.
        source: gives leases.
        shuffle: items of a block of the shuffle buffer; 0 for none.
    """

    def __init__(self, shards: Sequence[Shard], open: Open, source: LeaseSource, shuffle: int) -> None:
        self._shards = shards
        self._open = open
        self._source = source
        self._blocks: ShuffleBlocks[Entry] | None = None if not shuffle else ShuffleBlocks(shuffle, source.key)
        self._batch = -1
        self._taken = 0  # leases that were begun
        self._asked: int | None = None  # the batch in which the next one was asked for
        self._dry = False  # there was none
        self._over = False
        self._gave_back = False
        self._todo: deque[Piece] = deque()  # of the present lease; the first begins where reading goes on
        self._reading: PieceReading | None = None  # of that one
        self._ahead = LookAhead(shards, open, ASK_AHEAD)
        self._answer: asyncio.Future[LeaseAnswer] | None = None  # to the present request
        self._leased: Sequence[Sequence[Any]] | None = None  # the next lease, if it is known
        self._fault: Exception | None = None  # the piece cannot be read on
        self._block: list[Piece] = []  # what the shuffle buffer's blocks were filled from
        self._filling: list[Piece] = []
        self._carry: list[Entry] = []  # taken for a batch that failed; the next one has them
        self._given: list[Piece] = []  # what the present batch was given
        self._bad: list[Piece] = []  # bad samples that were told of while it was made
        self._lost: list[Piece] = []  # rests of pieces that could not be read on meanwhile
        self._saved: dict[str, Any] | None = None

    # ------------------------------------------------------------------------------------------------ batches

    def next_batch(self) -> None:
        """The next batch begins."""
        self._batch += 1
        self._given, self._bad, self._lost = [], [], []

    @property
    def gave_back(self) -> bool:
        """The stream has ended, and everything that the present batch was given or told of is another lane's now: the
        batch is none.
        """
        return self._gave_back

    async def refill(self) -> None:
        """Read again what was taken and not given out when the state was saved that the lane goes on from.

        May be called again when it has raised. The lane cannot go on without: no sample may be left out for it.

        Raises:
            StateError: the shards are not what they were.
            ShardError, TransportError: they cannot be read.
        """
        if self._saved is not None:
            await self._refill(self._saved)
            self._saved = None

    async def take(self, size: int) -> list[Sample]:
        """Samples for the present batch: `size` of them, fewer only where the epoch ends.

        May be called again for the same batch: to fill it up, where some of its samples turned out to be bad; and when
        it has raised, after which what was taken until then is not lost.

        Raises:
            StopAsyncIteration: there are no more; see `gave_back`.
            ShardError, TransportError: a sample, or the rest of a piece, cannot be read. The next call goes on behind.
            Exception: as `refill`, which is done first where it was not.
        """
        await self.refill()
        if self._over:
            raise StopAsyncIteration
        if not self._taken and self._asked is None and not self._dry:
            self._ask()
        out, self._carry = self._carry, []
        try:
            while len(out) < size:
                got = await self._some(size - len(out))
                out += got
                if got:
                    continue
                answer = await self._source.ask(self._taken, self._batch, self._present(out))
                if answer.lease is not None:
                    self._begin(answer.lease)
                    continue
                self._over = True
                if not answer.last:
                    out, self._gave_back = [], True
                break
        except BaseException:
            self._carry = out
            raise
        if not out:
            raise StopAsyncIteration
        self._given += (entry.piece for entry in out)
        return [entry.sample for entry in out]

    def _present(self, out: Iterable[Entry]) -> list[Piece]:
        """What the present batch has, `out` included, and what was bad meanwhile: each before what it stood before.

        A rest stays a piece of its own: who cannot read it either must not lose what is behind it.
        """
        pieces = [*self._given, *(entry.piece for entry in out)]
        for bad in reversed(self._bad):
            behind = (at for at, piece in enumerate(pieces) if (piece.shard, piece.start) == (bad.shard, bad.stop))
            pieces.insert(next(behind, len(pieces)), bad)
        return merged(pieces) + self._lost

    async def _some(self, most: int) -> list[Entry]:
        """Between 1 and `most` samples; none: there is nothing to read now."""
        blocks = self._blocks
        if blocks is None:
            return await self._pull(most)
        blocks.begin(most)
        if not blocks.left:
            await self._fill(blocks, 0)
            self._block, self._filling = self._filling, []
            if not blocks.turn():
                return []
        number = min(most, blocks.left)
        await self._fill(blocks, number)
        return blocks.take(number)

    async def _fill(self, blocks: ShuffleBlocks[Entry], giving: int) -> None:
        while (missing := blocks.missing(giving)) and (got := await self._pull(missing)):
            blocks.filling += got
            _extend(self._filling, (entry.piece for entry in got))

    # ------------------------------------------------------------------------------------------------ reading

    async def _pull(self, most: int) -> list[Entry]:
        """Between 1 and `most` samples in the order of the pieces; none: the leases are read, and there is no other."""
        while not self._dry:
            if not self._todo:
                await self._next_lease()
                continue
            reading = self._reading
            if reading is None:
                reading = self._reading = self._ahead.open(self._todo[0])
                self._look_ahead()
            if got := self._pull_found(reading, most):
                return got
            if self._fault is not None:
                fault, self._fault = self._fault, None
                self._lost.append(self._todo[0])
                await self._end_piece()
                try:
                    raise fault
                finally:
                    del fault  # it refers to this frame
            try:
                await reading.more()
            except StopAsyncIteration:
                if not reading.bad:
                    await self._end_piece()
            except Exception as error:
                self._fault = error
            except BaseException:  # cancelled, and the stream with it: it is opened again where reading stands
                self._reading = None
                raise
        return []

    def _pull_found(self, reading: PieceReading, most: int) -> list[Entry]:
        got: list[Entry] = []
        found, bad = reading.found, reading.bad
        limit = bad[0].resume if bad else None
        shard, start, stop, sync = self._todo[0]
        while found and len(got) < most and (limit is None or found[0].resume < limit):
            sample, resume = found.popleft()
            got.append(Entry(sample, Piece(shard, start, resume, sync)))
            start, sync = resume, False
        if got:
            self._todo[0] = Piece(shard, start, stop, sync)
            self._ask_near_end()
            self._look_ahead()
        elif bad and limit is not None:
            self._bad.append(Piece(shard, start, limit, sync))
            self._todo[0] = Piece(shard, limit, stop, False)
            raise bad.popleft()
        return got

    async def _end_piece(self) -> None:
        reading, self._reading = self._reading, None
        self._todo.popleft()
        self._ask_near_end()
        if reading is not None:
            await reading.aclose()

    def _look_ahead(self) -> None:
        """Open pieces behind the present one, also those of the next lease, if its answer is there."""
        if self._todo:
            behind = [*islice(self._todo, 1, None), *map(_piece, self._leased or ())]
            self._ahead.look(self._todo[0], behind)

    # ------------------------------------------------------------------------------------------------- leases

    def _ask(self) -> None:
        """Ask for the next lease."""
        self._asked = self._batch
        self._ask_again(self._batch)

    def _ask_again(self, batch: int) -> None:
        # Sent now: the request's stamp says that this batch is not answered yet.
        self._source.prepare(self._taken, batch)
        self._answer = asyncio.ensure_future(self._source.ask(self._taken, batch, None))
        self._answer.add_done_callback(self._note_answer)

    def _note_answer(self, answer: asyncio.Future[LeaseAnswer]) -> None:
        if answer is self._answer and not answer.cancelled() and answer.exception() is None:
            self._leased = answer.result().lease
            self._look_ahead()

    async def _next_lease(self) -> None:
        if self._answer is None:
            self._ask()
        assert self._answer is not None
        answer = await asyncio.shield(self._answer)
        self._answer = self._asked = None
        if answer.lease is None:
            self._dry = True
        else:
            self._begin(answer.lease)

    def _begin(self, lease: Iterable[Sequence[Any]]) -> None:
        self._todo.extend(map(_piece, lease))
        self._leased = None
        self._taken += 1
        self._dry = False
        self._ask_near_end()

    def _ask_near_end(self) -> None:
        if self._asked is None and not self._dry and self._left() <= ASK_AHEAD:
            self._ask()

    def _left(self) -> int:
        """Bytes until the lease's end, as far as they are known."""
        return sum(bytes_left(self._shards[piece.shard], piece) or 0 for piece in self._todo)

    async def aclose(self) -> None:
        """Stop reading."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.cancel()
            await asyncio.wait([answer])
        reading, self._reading = self._reading, None
        try:
            if reading is not None:
                await reading.aclose()
        finally:
            await self._ahead.aclose()

    # -------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Where the lane stands after its last batch. Plain values."""
        if self._saved is not None:
            return self._saved
        blocks = self._blocks
        state: dict[str, Any] = {
            "batch": self._batch,
            "taken": self._taken,
            "asked": self._asked,
            "dry": self._dry,
            "over": self._over,
            "todo": [list(piece) for piece in self._todo],
            "carry": _plain(merged(entry.piece for entry in self._carry)),
            "blocks": None,
        }
        if blocks is not None:
            state["blocks"] = {
                "number": blocks.number,
                "aim": blocks.aim,
                "given": blocks.given,
                "size": len(blocks.block),
                "block": _plain(self._block),
                "filling": _plain(self._filling),
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; `refill` fills the buffer again."""
        self._batch, self._taken, self._asked = state["batch"], state["taken"], state["asked"]
        self._dry, self._over = state["dry"], state["over"]
        self._todo.extend(Piece(*piece) for piece in state["todo"])
        self._saved = state
        if self._asked is not None and not self._over:
            self._ask_again(self._asked)

    async def _refill(self, state: dict[str, Any]) -> None:
        """Read again what was taken and not given out."""
        self._carry = await self._read_again(state["carry"])
        saved = state["blocks"]
        if self._blocks is None or saved is None:
            return
        self._block = [Piece(*piece) for piece in saved["block"]]
        self._filling = [Piece(*piece) for piece in saved["filling"]]
        block = await self._read_again(saved["block"])
        if len(block) != saved["size"]:
            raise StateError(
                f"the shuffle buffer held {saved['size']} samples when the state was saved, and their places hold "
                f"{len(block)} now: the shards are not the same"
            )
        filling = await self._read_again(saved["filling"])
        self._blocks.restore(saved["number"], saved["aim"], saved["given"], block, filling)

    async def _read_again(self, pieces: Iterable[Sequence[Any]]) -> list[Entry]:
        entries: list[Entry] = []
        for each in pieces:
            piece = Piece(*each)
            stream = self._open(self._shards[piece.shard], piece, lambda _: None)
            try:
                async for found in stream:
                    for sample, resume in found:
                        entries.append(Entry(sample, piece._replace(stop=resume)))
                        piece = piece._replace(start=resume, sync=False)
            finally:
                await stream.aclose()
        return entries


def _piece(fields: Sequence[Any]) -> Piece:
    return Piece(*fields)


def _plain(pieces: Iterable[Piece]) -> list[list[Any]]:
    return [list(piece) for piece in pieces]


class LocalLeases:
    """`LeaseSource` of the only lane there is, in the same process.

    Args:
        book: of the epoch.
        key: of the lane.
    """

    def __init__(self, book: LeaseBook, key: int) -> None:
        self._book = book
        self.key = key

    def prepare(self, number: int, batch: int) -> None:
        """As `LeaseSource.prepare`: nothing takes time here."""

    async def ask(self, number: int, batch: int, left: Sequence[Sequence[Any]] | None) -> LeaseAnswer:
        """As `LeaseSource.ask`."""
        (reply,) = self._book.ask(0, number, batch, left)
        return LeaseAnswer(reply.lease, reply.over, reply.last)
