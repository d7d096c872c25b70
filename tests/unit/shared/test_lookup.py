from __future__ import annotations

import math
import subprocess
import sys
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.shared.layout import UnstableKeyError, bucket_count, bucket_of, hash_shift, stable_hash
from asyncloader.shared.share import share
from tests.unit.shared.test_layout import KEYS, Point


@given(st.dictionaries(KEYS, st.integers()), st.lists(KEYS))
def test_lookup_finds_what_a_dict_finds(value: dict[Any, int], others: list[Any]) -> None:
    """Each key is found with its value, and other keys are not found."""
    shared = share(value)
    for key in (*value, *others):
        assert (key in shared) == (key in value)
        assert shared.get(key) == value.get(key)


class Name(str):
    __slots__ = ()


EQUAL = [
    (1, 1.0),
    (1, True),
    (0, -0.0),
    (5, np.int64(5)),
    (0.5, np.float32(0.5)),
    (2, Fraction(2)),
    (3, Decimal(3)),
    (4, 4 + 0j),
    ("a", Name("a")),
    ("a", np.str_("a")),
    (b"a", np.bytes_(b"a")),
    ((1, "a"), (1.0, Name("a"))),
    ((1, 2), Point(1, 2)),
    (-1, -2),  # Python's own hash says -2 for both
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_keys_hash_alike(one: Any, other: Any) -> None:
    """A key may be looked up by any equal key, as in a dict."""
    assert stable_hash(one) == stable_hash(other)
    assert (other in share({one: 1})) == (one == other)


@pytest.mark.thorough
def test_hash_is_the_same_in_every_process() -> None:
    """Processes with different hash seeds compute the same hashes, though their own hashes of str differ."""
    keys = ["a", "é", b"a", 1, -7, 2.5, None, ("a", (1, None)), 1 << 80, math.inf]
    program = "from math import inf\nfrom asyncloader.shared.layout import stable_hash as h\n"
    program += f"print([h(k) for k in {keys!r}])\nprint(hash('a'))"
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[3])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for seed in ("1", "2")
    ]
    assert [hashes for hashes, _ in outputs] == [repr([stable_hash(key) for key in keys])] * 2
    assert len({own for _, own in outputs}) == 2


class Color(Enum):
    RED = 1


@pytest.mark.parametrize("key", [Color.RED, frozenset({1}), object, (1, Color.RED)])
def test_keys_without_a_stable_hash(key: Any) -> None:
    """A dict refuses such a key and names it. Looking it up is no error."""
    with pytest.raises(UnstableKeyError):
        stable_hash(key)
    with pytest.raises(TypeError, match=r"dict of 2 entries with the key .* str, bytes, numbers, None, or tuples"):
        share({"a": 1, key: 5})
    assert key not in share({"a": 1})


@pytest.mark.parametrize("key", [[], {}, (1, [])])
def test_unhashable_key(key: Any) -> None:
    """Looking up a key that no dict could have is an error, as in a dict."""
    shared: Any = share({"a": 1})
    with pytest.raises(TypeError, match="unhashable"):
        shared[key]


NAMED: dict[str, list[Any]] = {
    "numbered": [f"image_{i:07d}.jpg" for i in range(50_000)],
    "bytes": [b"%d" % i for i in range(50_000)],
    "integers": list(range(0, 50_000 * 64, 64)),
    "pairs": [(i % 200, str(i // 200)) for i in range(50_000)],
    "floats": [i / 7 for i in range(50_000)],
}


@pytest.mark.parametrize("name", NAMED)
def test_buckets_are_even(name: str) -> None:
    """Keys as they occur in practice, numbered or in steps, are spread: no bucket has more than 12."""
    keys = NAMED[name]
    number = bucket_count(len(keys))
    sizes = np.bincount([bucket_of(stable_hash(key), hash_shift(number)) for key in keys], minlength=number)
    assert sizes.max() <= 12
    # A lookup needs 1 + (keys before it in its bucket) / 2 comparisons: 1 + 0.76 / 2 if keys are spread at random.
    assert (sizes * (sizes + 1) / 2).sum() / len(keys) < 1.6
