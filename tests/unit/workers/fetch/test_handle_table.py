"""What is kept open, and what is closed: the rules of `HandleTable`, against a model that remembers every use."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from asyncloader.workers.fetch.handle_table import Handle, HandleTable

STEPS = st.lists(st.tuples(st.sampled_from(["use", "fail", "return", "end"]), st.integers(0, 5)), max_size=60)


USED_AGAIN = [("use", 0), ("return", 0), ("use", 0), ("use", 1)]


@example(most=1, shared=False, steps=USED_AGAIN)
@example(most=1, shared=True, steps=USED_AGAIN)
@given(most=st.integers(1, 4), shared=st.booleans(), steps=STEPS)
def test_any_uses(most: int, shared: bool, steps: list[tuple[str, int]]) -> None:
    """An object in use is never closed, at most ``max(most, in use)`` are open, and the least recently used goes."""
    table: HandleTable[str] = HandleTable(most, shared=shared)
    used: list[Handle[Any]] = []  # once for each user
    unused: list[Handle[Any]] = []  # the least recently used first

    def closed(expired: list[Handle[Any]]) -> None:
        assert expired == unused[: len(expired)]
        del unused[: len(expired)]

    for step, number in steps:
        if step == "end":
            table.most = 0
            closed(table.excess())
        elif step == "return" and used:
            handle = used.pop(number % len(used))
            if handle not in used:
                unused.append(handle)
            closed(table.give_back(handle))
        elif step in ("use", "fail"):
            found = table.take(number)
            same = [each for each in (*unused, *(used if shared else ())) if each.key == number]
            if found is None:
                assert not same
                found, expired = table.reserve(number, None, None)
                closed(expired)
                if step == "fail":
                    table.remove(found)
                    assert table.give_back(found) == []  # by another user, who waited for it
                    continue
            else:
                assert found in same
                if found in unused:
                    unused.remove(found)
            used.append(found)
        assert table.every == {*used, *unused}
        assert table.idle == len(unused)
        assert len(table.every) <= max(table.most, len({*used}))


def test_the_object_used_last_serves_its_key_next() -> None:
    """Two users of a key had an object each; the one that was given back last is warm."""
    table: HandleTable[str] = HandleTable(4, shared=False)
    first, second = (table.reserve("key", None, None)[0] for _ in range(2))
    table.give_back(second)
    table.give_back(first)
    assert table.take("key") is first
    assert table.take("key") is second
    assert table.take("key") is None
