"""Lets one rank find something out, and gives the others its result.

Data path: [one_for_all] -> remote.shared_listing. For what a store is asked for once per job, and not once per rank.

The first rank that needs the result claims it in the store of torch.distributed, finds it out, and leaves it there in
pieces. This is no collective: a rank that never needs the result delays none, one that comes late finds it, and the
error of the claimant is the error of all. If the claimant is cancelled, or says nothing for ten minutes, the next rank
claims it. A rank without such a store, and one that the store fails, finds it out by itself.

All calls to the store are made in threads, over a connection of their own: the trainer's is not held up, and a forked
child does not share it. The result stays in the store as long as that exists.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import torch

from asyncloader.errors import RanksDisagree
from asyncloader.ranks.agreement import in_daemon, join_at_exit, start_thread

_T = TypeVar("_T")

PIECE = 1 << 20
"""Bytes of a message, at most: the store serves other ranks in between."""
MOST = 1 << 29
"""Bytes of a result, at most, before and after compression. A larger one is found out by each rank."""

_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.02, 1.0  # between two looks at the store: 10,000 ranks may wait
_PATIENCE_S = 600.0
_SAY_AFTER_S = 10.0
_MOST_HEADER = 1 << 14
_MOST_TEXT = 2000  # characters of an error

_log = logging.getLogger("asyncloader")

# How often each name was used since torch.distributed was initialized: the ranks use it in the same order.
_used: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


class OneForAll:
    """One result, which a single rank finds out. Copies, and pickles, as its name and number.

    Args:
        name: the same on the ranks whose result is the same.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        world = torch.distributed.group.WORLD if torch.distributed.is_available() else None
        if world is not None:
            number = _used.setdefault(world, Counter())
            number[name] += 1
            self._name += f"/{number[name]}"
        self._attempt = 0

    async def find(
        self, make: Callable[[], Awaitable[_T]], pack: Callable[[_T], bytes], read: Callable[[bytes], _T]
    ) -> _T:
        """Return the result. After an error, the next call tries again, on all ranks.

        Args:
            make: finds it out, on a single rank.
            pack: returns it as bytes. Called in a thread.
            read: checks these bytes, and returns the result. Raises ValueError. Called in a thread.

        Raises:
            RanksDisagree: the rank that was to find it out has an error, whose text this has; or its result is broken.
            The errors of `make`.
        """
        while True:
            try:
                turn = await in_daemon(partial(_claim, self._name, self._attempt))
            except RuntimeError as error:  # the store's process has ended
                _log.debug("this rank asks for itself: %s", error)
                turn = None
            if turn is None:
                return await make()
            if turn.mine:
                return await self._find_for_all(turn, make, pack)
            left = threading.Event()
            try:
                answer: _Answer | None = await in_daemon(partial(_answer, turn, left))
            except RanksDisagree:
                self._attempt += 1
                raise
            except RuntimeError as error:
                _log.debug("this rank asks for itself: %s", error)
                return await make()
            finally:
                left.set()
            if answer is None or answer.again:
                self._attempt += 1
            elif answer.error is not None:
                self._attempt += 1
                raise RanksDisagree(f"rank {answer.rank} could not do what it does for all ranks: {answer.error}")
            elif answer.data is None:
                return await make()
            else:
                try:
                    found: _T = await in_daemon(partial(read, answer.data))
                except ValueError as error:
                    self._attempt += 1
                    raise RanksDisagree(f"the result of rank {answer.rank} cannot be read: {error}") from None
                return found

    async def _find_for_all(self, turn: _Turn, make: Callable[[], Awaitable[_T]], pack: Callable[[_T], bytes]) -> _T:
        try:
            found = await make()
            await in_daemon(partial(_publish, turn, partial(pack, found)))
        except Exception as error:
            self._attempt += 1
            text = f"{type(error).__name__}: {error}"[:_MOST_TEXT]
            await in_daemon(partial(_say, turn, {"error": text}))
            raise
        except BaseException:
            self._attempt += 1
            start_thread(partial(_say, turn, {"again": True}))
            raise
        return found


class _Turn(NamedTuple):
    """An attempt to find out a result.

    Attributes:
        store: of this attempt.
        mine: whether this rank makes it.
        rank: this process's.
    """

    store: Any
    mine: bool
    rank: int


class _Answer(NamedTuple):
    """What the rank that has made an attempt says.

    Attributes:
        rank: its number.
        data: the result; None: there is none, or it is too large.
        error: its error.
        again: it was cancelled.
    """

    rank: int
    data: bytes | None = None
    error: str | None = None
    again: bool = False


# --------------------------------------------------------------------------------------------- these block, in a thread


def _claim(name: str, attempt: int) -> _Turn | None:
    """Claim an attempt; None: there are no other ranks, or torch's stores cannot be copied, as in 2.6."""
    distributed: Any = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return None
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    default: Any = _get_default_store()
    if not hasattr(default, "clone"):
        return None
    join_at_exit()
    store: Any = PrefixStore(f"asyncloader/once/{name}/{attempt}", default.clone())
    store.set_timeout(timedelta(seconds=60))
    own = secrets.token_hex(16)
    return _Turn(store, bytes(store.compare_set("claim", "", own)) == own.encode(), distributed.get_rank())


def _publish(turn: _Turn, pack: Callable[[], bytes]) -> None:
    data = pack()
    packed = zlib.compress(data, 1) if len(data) <= MOST else b""
    if max(len(data), len(packed)) > MOST:
        _say(turn, {"bytes": None})
        return
    try:
        for number, first in enumerate(range(0, len(packed), PIECE)):
            turn.store.set(str(number), packed[first : first + PIECE])
    except RuntimeError as error:
        _log.debug("the other ranks ask for themselves: %s", error)
    _say(turn, {"bytes": len(data), "packed": len(packed)})


def _say(turn: _Turn, header: dict[str, Any]) -> None:
    try:
        turn.store.set("header", json.dumps({"rank": turn.rank, **header}))
    except RuntimeError as error:
        _log.debug("the other ranks ask for themselves: %s", error)


def _answer(turn: _Turn, left: threading.Event) -> _Answer | None:
    """Wait for the answer; None: it does not come, or the caller has left.

    Raises:
        RuntimeError: the store cannot be asked.
    """
    began, pause, said = monotonic(), _FIRST_PAUSE_S, False
    # Not by the store's `wait`: nothing can end it, and it writes to stderr when its time is over.
    while not turn.store.check(["header"]):
        waited = monotonic() - began
        if left.wait(pause) or waited > _PATIENCE_S:
            return None
        if waited > _SAY_AFTER_S and not said:
            said = True
            _log.info("this rank waits for another one, which asks the store for all ranks, for %.0f s now", waited)
        pause = min(2 * pause, _MOST_PAUSE_S)
    return _read(turn.store)


def _read(store: Any) -> _Answer:
    header = bytes(store.get("header"))
    try:
        if len(header) > _MOST_HEADER:
            raise ValueError(f"a header of {len(header):,} bytes")
        said: Any = json.loads(header)
        if type(said) is not dict or type(rank := said.get("rank")) is not int:
            raise ValueError("a header that is none")
        if type(error := said.get("error")) is str:
            return _Answer(rank, error=error)
        if said.get("again") is True:
            return _Answer(rank, again=True)
        if said.get("bytes") is None:
            return _Answer(rank)
        return _Answer(rank, _pieces(store, _size(said["bytes"]), _size(said.get("packed"))))
    except (ValueError, RecursionError, zlib.error) as error:
        raise RanksDisagree(f"what another rank has left for this one is broken: {error}") from None


def _size(value: Any) -> int:
    """Check a size, before anything is allocated."""
    if type(value) is not int or not 0 <= value <= MOST:
        raise ValueError("a size that is out of range")
    return value


def _pieces(store: Any, size: int, packed: int) -> bytes:
    unpack = zlib.decompressobj()
    found = bytearray()
    for first in range(0, packed, PIECE):
        piece = bytes(store.get(str(first // PIECE)))
        if len(piece) != min(PIECE, packed - first):
            raise ValueError(f"a piece of {len(piece):,} bytes")
        found += unpack.decompress(piece, size + 1 - len(found))
        if unpack.unconsumed_tail or len(found) > size:
            raise ValueError("it has more bytes than it says")
    if len(found) != size or not unpack.eof:
        raise ValueError(f"it has {len(found):,} bytes, and says {size:,}")
    return bytes(found)
