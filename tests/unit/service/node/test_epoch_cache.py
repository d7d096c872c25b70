"""The cache of shared batches: one maker at a time, no waiter is forgotten, and its memory is bounded."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from asyncloader.service.node.epoch_cache import _ENTRY_BYTES, EpochCache, MadeBatch
from asyncloader.workers.ipc.wire import Result

MOST = 10
"""The limit, in units of an entry's own cost."""


def batch(key: int, size: int) -> MadeBatch:
    """A batch whose payload is `size` units."""
    return MadeBatch(Result(0, key, 0, size, 0, 1, 0.0, same=False), b"", bytes(size * _ENTRY_BYTES), b"")


@given(st.lists(st.tuples(st.sampled_from(["ask", "made", "failed", "leave"]), st.integers(0, 3), st.integers(0, 6))))
def test_one_makes_it_and_all_get_it(steps: list[tuple[str, int, int]]) -> None:
    """One waiter at a time is asked to make a batch; after a failure the next is. A waiter that left is not asked."""
    cache = EpochCache(MOST * _ENTRY_BYTES)
    made: dict[int, int] = {}  # sizes, the oldest first
    makers: dict[int, int] = {}  # the maker of each batch
    lines: dict[int, dict[int, object]] = {key: {} for key in range(4)}
    told: dict[int, MadeBatch | None] = {}

    def tell(number: int, made: MadeBatch | None) -> bool:
        told[number] = made
        return True

    for number, (step, key, size) in enumerate(steps):
        told.clear()
        if step == "ask":
            waiter = partial(tell, number)
            found = cache.ask(key, waiter)
            if key in made:
                assert isinstance(found, MadeBatch)
                assert len(found.payload) == made[key] * _ENTRY_BYTES
            elif key in makers:
                assert found == "wait"
                lines[key][number] = waiter
            else:
                assert found == "make"
                makers[key] = number
        elif step == "leave" and lines[key]:
            cache.leave(key, lines[key].pop(min(lines[key])))  # type: ignore[arg-type]
        elif key in makers and step == "made":
            del makers[key]
            cache.made(key, batch(key, size))
            made[key] = size
            while sum(each + 1 for each in made.values()) > MOST:
                del made[next(iter(made))]
            assert list(told) == list(lines[key])
            assert all(each is not None and len(each.payload) == size * _ENTRY_BYTES for each in told.values())
            lines[key].clear()
        elif key in makers and step == "failed":
            cache.failed(key)
            if lines[key]:
                makers[key] = next(iter(lines[key]))
                del lines[key][makers[key]]
                assert told == {makers[key]: None}
            else:
                del makers[key]
                assert not told
    assert cache._entries == len(makers) + sum(map(len, lines.values()))
    cache.clear()
    for key in range(4):
        if key not in makers:
            assert cache.ask(key, bool) == "make"


def test_a_hundred_thousand_waiters_that_are_gone() -> None:
    """Whether they refuse or fail to make it, each is asked once, and the last waiter makes it."""
    for by_failing in (False, True):
        cache, asked = EpochCache(1 << 20), 0

        def gone(_: MadeBatch | None) -> bool:
            nonlocal asked
            asked += 1
            if by_failing:  # noqa: B023 - called within the turn
                cache.failed("key")  # noqa: B023
            return by_failing  # noqa: B023

        assert cache.ask("key", gone) == "make"
        for _ in range(100_000):
            assert cache.ask("key", partial(gone)) == "wait"
        assert cache.ask("key", lambda _: True) == "wait"
        cache.failed("key")
        assert asked == 100_000
        assert cache.ask("key", gone) == "wait"


def test_what_has_no_payload_is_evicted_too() -> None:
    """A batch of texts is all template; an empty batch counts with its entry."""
    for template in (bytes(32 << 10), b""):
        cache = EpochCache(100 << 10)
        for key in range(1000):
            assert cache.ask(key, bool) == "make"
            cache.made(key, batch(key, 0)._replace(template=template))
        assert len(cache._made) <= (100 << 10) // _ENTRY_BYTES
        assert cache._bytes <= 100 << 10


def test_a_line_that_is_full() -> None:
    """When the line is full the next connection makes the batch, too, and all waiters get it."""
    cache, came = EpochCache(1 << 20, most_waiting=2), []

    def take(made: MadeBatch | None) -> bool:
        came.append(made)
        return True

    assert [cache.ask("key", take), cache.ask("key", take), cache.ask("key", bool)] == ["make", "wait", "make"]
    cache.made("key", batch(0, 1))
    cache.made("key", batch(0, 1))
    cache.failed("key")
    assert len(came) == 1
    assert cache._entries == 0
    assert isinstance(cache.ask("key", bool), MadeBatch)


def test_without_connections_nothing_is_kept() -> None:
    """When the last connection leaves, all batches are dropped."""
    cache = EpochCache(1 << 20)
    cache.join()
    cache.join()
    cache.ask("key", bool)
    cache.made("key", batch(0, 1))
    cache.part()
    assert isinstance(cache.ask("key", bool), MadeBatch)
    cache.part()
    assert cache.ask("key", bool) == "make"
