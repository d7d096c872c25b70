"""Lets one rank find something out, and gives the others its result.

Data path: [one_for_all] -> remote.shared_listing. For lists that are requested once per job, and not once per rank.

The first rank that needs the result claims it in the store of torch.distributed, finds it out, and leaves it there in
pieces. This is no collective: a rank that never needs the result delays none, one that comes late finds it, and the
error of the claimant is the error of all. While the claimant works it writes heartbeats to the store. If it is
cancelled, or is silent for 20 seconds because it was killed, the next rank claims the result; all ranks agree on which
result counts, also a claimant that was only stopped for a while. A rank without such a store, and one that the store
fails, finds it out by itself.

All calls to the store are made in threads, over a connection of their own: the trainer's is not held up, and a forked
child does not share it. The result stays in the store as long as that exists. No rank gets it twice: after
torch.distributed was shut down and initialized again on the same store, it is found out anew.
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
from asyncloader.workers.ipc.peer_text import block_of

_T = TypeVar("_T")

PIECE = 1 << 20
"""Bytes of a message, at most: the store serves other ranks in between."""
MOST = 1 << 29
"""Bytes of a result, at most, before and after compression. Each rank finds out a larger result by itself."""

_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.02, 1.0  # between two looks at the store: 10,000 ranks may wait
_BEAT_S = 1.5  # between two heartbeats
_LISTEN_S = 4.0  # between two looks for a heartbeat
_MOST_SILENT = 5
"""Looks without a new heartbeat after which a claimant is given up. Looks are counted, and not seconds: processes
that are stopped together, as in a container that is frozen, go on together.
"""
_SAY_AFTER_S = 10.0  # and again each time that the wait has doubled
_WARN_AFTER_S = 60.0
_MOST_HEADER = 1 << 14
_MOST_TEXT = 2000  # characters of an error
_MOST_RANK = 1 << 31

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
        self._token = secrets.token_hex(16)
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
            turn = await self._claim()
            if turn is None:
                return await make()
            if turn.mine:
                found = await self._find_for_all(turn, make, pack)
                if found:
                    return found[0]
                continue
            answer = await self._wait_for(turn)
            if answer.again:
                self._attempt += 1
            elif answer.error is not None:
                self._attempt += 1
                raise RanksDisagree(f"rank {answer.rank} could not do what it does for all ranks: {answer.error}")
            elif answer.data is None:
                return await make()
            else:
                try:
                    read_here: _T = await in_daemon(partial(read, answer.data))
                except ValueError as error:
                    self._attempt += 1
                    raise RanksDisagree(f"the result of rank {answer.rank} cannot be read: {error}") from None
                return read_here

    async def _claim(self) -> _Turn | None:
        turns: list[_Turn] = []
        left = threading.Event()
        try:
            await in_daemon(partial(_claim, self._name, self._token, self._attempt, turns, left))
        except RuntimeError as error:
            _log.debug("this rank asks for itself: %s", error)
            return None
        except BaseException:
            # Either the thread finds that this rank has left, or its claim is found here; or both.
            left.set()
            for turn in turns:
                start_thread(partial(_give_up, turn))
            raise
        return turns[0] if turns else None

    async def _find_for_all(
        self, turn: _Turn, make: Callable[[], Awaitable[_T]], pack: Callable[[_T], bytes]
    ) -> list[_T]:
        """Find the result out. Returns it as the only element; nothing if it does not count, because the others gave
        this rank up, which then takes part in the next attempt.
        """
        done = threading.Event()
        try:
            start_thread(partial(_beat, turn, done))
            found = await make()
            counts = await in_daemon(partial(_publish, turn, partial(pack, found)))
        except Exception as error:
            self._attempt += 1
            text = f"{type(error).__name__}: {error}"[:_MOST_TEXT]
            if not await in_daemon(partial(_say, turn, {"error": text})):
                return []
            raise
        except BaseException:
            self._attempt += 1
            start_thread(partial(_give_up, turn))
            raise
        finally:
            done.set()
        self._attempt += not counts
        return [found] if counts else []

    async def _wait_for(self, turn: _Turn) -> _Answer:
        left = threading.Event()
        try:
            answer: _Answer = await in_daemon(partial(_answer, turn, left))
        except RanksDisagree:
            self._attempt += 1
            raise
        except RuntimeError as error:  # the store's process has ended
            _log.info("rank %d asks the store for itself: torch.distributed's has ended (%s)", turn.rank, error)
            return _Answer(turn.rank)
        finally:
            left.set()
        return answer


class _Turn(NamedTuple):
    """An attempt to find out a result.

    Attributes:
        store: of this attempt.
        mine: whether this rank makes it.
        rank: this process's.
        claimant: the rank that makes it, for texts.
    """

    store: Any
    mine: bool
    rank: int
    claimant: str


class _Answer(NamedTuple):
    """The outcome of an attempt, as the rank that has made it reports it.

    Attributes:
        rank: its number.
        data: the result; None: no result, or one that is too large.
        error: its error.
        again: it was cancelled, or given up.
    """

    rank: int
    data: bytes | None = None
    error: str | None = None
    again: bool = False


# --------------------------------------------------------------------------------------------- these block, in a thread


def _claim(name: str, token: str, attempt: int, turns: list[_Turn], left: threading.Event) -> None:
    """Claim an attempt, and add it to `turns`. Nothing is added where there are no other ranks, or torch's stores
    cannot be copied, as in 2.6. If the caller has left, the claim is given up again.
    """
    distributed: Any = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    default: Any = _get_default_store()
    if not hasattr(default, "clone"):
        return
    join_at_exit()
    names: Any = PrefixStore(f"asyncloader/once/{name}", default.clone())
    names.set_timeout(timedelta(seconds=60))
    rank = distributed.get_rank()
    store: Any = PrefixStore(f"{_number_of_use(names, rank, token)}/{attempt}", names)
    own = f"{rank} {secrets.token_hex(16)}"
    claim = bytes(store.compare_set("claim", "", own))
    turn = _Turn(store, claim == own.encode(), rank, _rank_in(claim))
    turns.append(turn)
    if left.is_set():
        _give_up(turn)


def _number_of_use(names: Any, rank: int, token: str) -> int:
    """Return how often this rank has used these names before: in processes that had its number before, and before
    torch.distributed was initialized again. The ranks use them equally often.

    Args:
        names: the store.
        rank: this process's.
        token: of this use; a repeated call has the same result.
    """
    number = 0
    while names.check([f"{number}/over"]) or bytes(names.compare_set(f"{number}/{rank}", "", token)) != token.encode():
        # For ranks that had no part in that use, and come after this rank: it is not theirs either.
        names.set(f"{number}/over", "1")
        number += 1
    return number


def _rank_in(claim: bytes) -> str:
    number = claim[:12].partition(b" ")[0]
    return f"rank {int(number)}" if number.isdigit() else "another program's claim in torch.distributed's store"


def _beat(turn: _Turn, done: threading.Event) -> None:
    """Write heartbeats until the work is done."""
    number = 0
    try:
        while not done.wait(_BEAT_S):
            number += 1
            turn.store.set("beat", str(number))
    except RuntimeError as error:
        _log.debug("no further heartbeats: %s", error)


def _publish(turn: _Turn, pack: Callable[[], bytes]) -> bool:
    """Leave a result for the others. Returns whether it counts."""
    data = pack()
    packed = zlib.compress(data, 1) if len(data) <= MOST else b""
    if max(len(data), len(packed)) > MOST:
        return _say(turn, {"bytes": None})
    try:
        for number, first in enumerate(range(0, len(packed), PIECE)):
            turn.store.set(str(number), packed[first : first + PIECE])
    except RuntimeError as error:
        _log.debug("the other ranks ask for themselves: %s", error)
    return _say(turn, {"bytes": len(data), "packed": len(packed)})


def _say(turn: _Turn, header: dict[str, Any]) -> bool:
    """Report how an attempt has ended. Returns whether that counts: the first report does, on all ranks."""
    said = json.dumps({"rank": turn.rank, **header})
    try:
        return bytes(turn.store.compare_set("header", "", said)) == said.encode()
    except RuntimeError as error:
        _log.debug("the other ranks ask for themselves: %s", error)
        return True


def _give_up(turn: _Turn) -> None:
    """Have another rank make the next attempt, if this rank has claimed the present attempt."""
    if turn.mine:
        _say(turn, {"again": True})


def _answer(turn: _Turn, left: threading.Event) -> _Answer:
    """Wait for the answer, until the caller has left.

    Raises:
        RuntimeError: the store cannot be asked.
        RanksDisagree: the answer cannot be read.
    """
    began = listened = monotonic()
    pause, say_after = _FIRST_PAUSE_S, _SAY_AFTER_S
    beat, silent = b"", 0
    # Not by the store's `wait`: nothing can end it, and it writes to stderr when its time is over.
    while not turn.store.check(["header"]):
        if left.wait(pause):
            return _Answer(turn.rank)
        now = monotonic()
        if now - listened > _LISTEN_S:
            # Unlike `get`, this does not wait for a value that was not written.
            listened, last, beat = now, beat, bytes(turn.store.compare_set("beat", "", ""))
            silent = silent + 1 if beat == last else 0
        if silent >= _MOST_SILENT:
            # All ranks that wait go on with the next attempt then; and the claimant, should it live.
            _say(turn, {"again": True})
            _log.warning(
                "rank %d gives %s up, which was to ask the store for all ranks: it was silent for %.0f s, and has died "
                "or hangs. Another rank asks now",
                *(turn.rank, turn.claimant, silent * _LISTEN_S),
            )
            silent = 0
        elif now - began > say_after:
            level = logging.WARNING if say_after >= _WARN_AFTER_S else logging.INFO
            text = "rank %d waits for %s, which asks the store for all ranks, for %.0f s now"
            _log.log(level, text, turn.rank, turn.claimant, now - began)
            say_after *= 2
        pause = min(2 * pause, _MOST_PAUSE_S)
    return _read(turn.store)


def _read(store: Any) -> _Answer:
    header = bytes(store.get("header"))
    try:
        if len(header) > _MOST_HEADER:
            raise ValueError(f"a header of {len(header):,} bytes")
        said: Any = json.loads(header)
        if type(said) is not dict or type(rank := said.get("rank")) is not int or not 0 <= rank < _MOST_RANK:
            raise ValueError("a header that is none")
        if type(error := said.get("error")) is str:
            return _Answer(rank, error=block_of(error, _MOST_TEXT))
        if said.get("again") is True:
            return _Answer(rank, again=True)
        if said.get("bytes") is None:
            return _Answer(rank)
        return _Answer(rank, _pieces(store, _size(said["bytes"]), _size(said.get("packed"))))
    except (ValueError, RecursionError, zlib.error) as error:
        raise RanksDisagree(
            f"what another rank has left for this one is broken: {error}. If another program writes to "
            "torch.distributed's store, give it another one"
        ) from None


def _size(value: Any) -> int:
    """Check a size, before anything is allocated."""
    if type(value) is not int or not 0 <= value <= MOST:
        raise ValueError("a size that is out of range")
    return value


def _pieces(store: Any, size: int, packed: int) -> bytes:
    unpack = zlib.decompressobj()
    found = bytearray()
    if packed and not store.check([str(number) for number in range(-(-packed // PIECE))]):
        raise ValueError("a piece is missing")  # `get` would wait for it
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
