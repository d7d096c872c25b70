"""Lets the ranks of a run make one plan together, before an epoch's first step.

Data path: process_group -> [exchange] -> remote.sample_counts. For shards that a single rank lists and counts.

Each method is collective: every rank calls the same methods in the same order. They are awaited; the reductions run in
a thread. A rank that cannot go on says so in the next `check`, so that the others do not wait for it. A rank that
leaves in between gives up its group, and the others get an error, now or when they come to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from asyncloader.base.topology import Topology
from asyncloader.errors import RanksDisagree
from asyncloader.ranks.agreement import start_thread
from asyncloader.ranks.process_group import RankGroup

_T = TypeVar("_T")

_NO_RANK = 1 << 31

_MOST_TEXT = 2000  # characters of another rank's error
_SHOWN = 300  # characters of a rank's value in an error


class RankExchange:
    """Exchanges values between the ranks of a loader while they plan.

    Args:
        group: from `make_group`.
        topology: this process's rank, and the number of ranks.

    Attributes:
        rank: this process's.
        ranks: their number.
        done: whether they have a plan.
    """

    def __init__(self, group: RankGroup, topology: Topology) -> None:
        self._group = group
        self.rank, self.ranks = topology
        self.done = False
        self._planning = asyncio.Lock()
        self._checked = False

    @asynccontextmanager
    async def planning(self) -> AsyncGenerator[None, None]:
        """Hold while the other methods are called, for one plan at a time.

        If the block is cancelled, or fails by another error than `check` raises, the other ranks get an error, too.
        """
        async with self._planning:
            self._checked = False
            try:
                yield
            except BaseException:
                if not self._checked:
                    start_thread(self._group.close)
                raise

    async def check(self, error: Exception | None) -> None:
        """Raise this rank's error, or say that another rank has one.

        Raises:
            RanksDisagree: another rank has an error, whose text it has.
            Exception: `error`.
        """
        first = (await self._call(partial(self._group.reduce, _NO_RANK if error is None else self.rank)))[0]
        if first == _NO_RANK:
            return
        text = await self.share(f"{type(error).__name__}: {error}"[:_MOST_TEXT].encode(errors="replace"), first)
        self._checked = True
        if error is not None:
            raise error
        raise RanksDisagree(f"rank {first} could not plan the epoch: {text.decode(errors='replace')}")

    async def compare(self, values: Mapping[str, Any]) -> None:
        """Check that plain values are the same on all ranks.

        Raises:
            RanksDisagree: they are not. All ranks raise it, and the text has the first that differs.
        """
        text = json.dumps(values).encode()
        mine = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
        least, most = await self._call(partial(self._group.reduce, mine))
        if least < 0:  # a number of batches that is not known: see `Agreement`
            raise RanksDisagree(
                "another rank reads a stream whose samples are not counted, and this one reads fixed streams: give all "
                "ranks the same dataset, with streams=, and the same seed="
            )
        if least != most:
            first = json.loads(await self.share(text))
            await self.check(difference(first, values, self.rank))

    async def share(self, data: bytes, rank: int = 0) -> bytes:
        """Return the data of one rank; those of the others are not used."""
        return await self._call(partial(self._group.share, data, rank))

    async def _call(self, function: Callable[[], _T]) -> _T:
        try:
            found: _T = await in_daemon(function)
        except RuntimeError as error:
            raise RanksDisagree(
                "the ranks could not agree on a plan: another rank has ended or left, torch.distributed was shut down, "
                f"or the network failed ({error})"
            ) from None
        return found


async def together(work: Awaitable[_T], ranks: RankExchange | None) -> _T:
    """Return the result of this rank's work. If it fails on any rank, all raise, like `RankExchange.check`."""
    if ranks is None:
        return await work
    try:
        found = await work
    except Exception as error:
        await ranks.check(error)
        raise
    await ranks.check(None)
    return found


async def in_daemon(function: Callable[[], Any]) -> Any:
    """Call a blocking method in a daemon thread, so that other ranks that never join delay neither loop nor process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    # The thread reaches the future and the outcome through this list alone, and `done` empties it: a thread that has
    # not ended yet must not keep an error that was caught, and with it the frames that it passed.
    answer: list[Any] = [future]

    def done() -> None:
        waiting, result, error = answer
        answer.clear()
        if waiting.cancelled():
            return
        if error is None:
            waiting.set_result(result)
        else:
            waiting.set_exception(error)

    def run() -> None:
        try:
            answer.extend((function(), None))
        except Exception as error:
            answer.extend((None, error))
        with contextlib.suppress(RuntimeError):  # the loop was closed during the call
            loop.call_soon_threadsafe(done)

    start_thread(run)
    try:
        return await future
    finally:
        del future  # its error refers to this frame


def difference(theirs: Mapping[str, Any], mine: Mapping[str, Any], rank: int) -> RanksDisagree | None:
    """Return the error that names the first value that differs between rank 0 and this rank; None: none does."""
    for name, value in json.loads(json.dumps(mine)).items():
        if theirs.get(name) == value:
            continue
        here, there = value, theirs.get(name)
        if isinstance(here, list) and isinstance(there, list):  # from the first element that differs on
            at = next((at for at, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), None)
            at = min(len(here), len(there)) if at is None else at
            here, there = here[at : at + 3], there[at : at + 3]
        return RanksDisagree(
            f"rank {rank} has {name}={here!r:.{_SHOWN}} and rank 0 has {name}={there!r:.{_SHOWN}}: give all ranks "
            "the same dataset and the same options"
        )
    return None
