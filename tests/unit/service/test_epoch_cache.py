"""The cache of shared batches, against a model: one maker at a time, nobody forgotten, and a bound on bytes."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from asyncloader.service.epoch_cache import EpochCache, MadeBatch
from asyncloader.workers.ipc.wire import Result

MOST = 10


def batch(key: int, size: int) -> MadeBatch:
    return MadeBatch(Result(0, key, 0, size, 0, 1, 0.0, same=False), b"", bytes(size), b"")


@given(st.lists(st.tuples(st.sampled_from(["ask", "made", "failed"]), st.integers(0, 3), st.integers(0, 6))))
def test_one_makes_it_and_all_get_it(steps: list[tuple[str, int, int]]) -> None:
    """Whoever is told to make it; after a failure the next one is."""
    cache = EpochCache(MOST)
    made: dict[int, int] = {}  # sizes, the oldest first
    makers: dict[int, int] = {}  # who makes what
    lines: dict[int, list[int]] = {key: [] for key in range(4)}
    told: dict[int, MadeBatch | None] = {}
    for number, (step, key, size) in enumerate(steps):
        told.clear()
        if step == "ask":
            found = cache.ask(key, partial(told.__setitem__, number))
            if key in made:
                assert isinstance(found, MadeBatch)
                assert len(found.payload) == made[key]
            elif key in makers:
                assert found == "wait"
                lines[key].append(number)
            else:
                assert found == "make"
                makers[key] = number
        elif key in makers and step == "made":
            del makers[key]
            cache.made(key, batch(key, size))
            made[key] = size
            while sum(made.values()) > MOST:
                del made[next(iter(made))]
            assert list(told) == lines[key]
            assert all(each is not None and len(each.payload) == size for each in told.values())
            lines[key].clear()
        elif key in makers:
            cache.failed(key)
            if lines[key]:
                makers[key] = lines[key].pop(0)
                assert told == {makers[key]: None}
            else:
                del makers[key]
                assert not told
    cache.clear()
    for key in range(4):
        if key not in makers:
            assert cache.ask(key, print) == "make"
