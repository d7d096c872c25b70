from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import threading
import weakref
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from asyncloader.shared.layout import SharedDict, SharedList
from asyncloader.shared.share import share

WORDS = ["a", "bc", "", "é", "d" * 300, "\udc80"]
LARGE = list(range(2000))


# ------------------------------------------------------------------------------------------------------------- lists

LISTS: dict[str, list[Any]] = {
    "str": WORDS,
    "bytes": [b"a", b"", b"bcd"],
    "int": [3, -1, 2],
    "float": [0.5, -1.0],
    "bool": [True, False],
    "objects": [{"a": 1}, None, (1, 2), "x"],
    "nothing": [],
}
SLICES = st.builds(slice, *[st.none() | st.integers(-8, 8)] * 2, st.none() | st.integers(-3, 3).filter(bool))


@pytest.mark.parametrize("name", LISTS)
def test_list_reads_like_its_original(name: str) -> None:
    """Length, items from both ends, iteration both ways, membership, counting and searching are those of the list."""
    value = LISTS[name]
    shared = share(value)
    assert isinstance(shared, SharedList)
    assert len(shared) == len(value)
    assert bool(shared) == bool(value)
    for place in range(-len(value), len(value)):
        assert shared[place] == value[place]
        assert type(shared[place]) is type(value[place])
    assert list(shared) == value == shared.tolist()
    assert list(reversed(shared)) == value[::-1]
    for item in [*value, "nowhere"]:
        assert (item in shared) == (item in value)
        assert shared.count(item) == value.count(item)
        if item in value:
            assert shared.index(item) == value.index(item)


@given(st.sampled_from(sorted(LISTS)), st.lists(SLICES, max_size=3))
def test_slices_are_views(name: str, slices: list[slice]) -> None:
    """Slices, and slices of slices, equal the list's slices; they are SharedLists too."""
    value, shared = LISTS[name], share(LISTS[name])
    for each in slices:
        value, shared = value[each], shared[each]
        assert isinstance(shared, SharedList)
        assert shared == value
        assert [shared[i] for i in range(-len(value), len(value))] == value + value
        assert list(reversed(shared)) == value[::-1]


def test_indices() -> None:
    """Every object that may index a list may index a SharedList; others raise the list's errors."""
    shared: Any = share(WORDS)
    for index in (np.int64(1), torch.tensor(1), True):
        assert shared[index] == "bc"
    for outside in (6, -7, 1 << 80):
        with pytest.raises(IndexError, match=f"index {outside} is out of range for a SharedList of 6 items"):
            shared[outside]
    for wrong in ("1", 1.0, None):
        with pytest.raises(TypeError):
            shared[wrong]


def test_equality_is_the_lists() -> None:
    """A SharedList equals an equal list, or an equal tuple if it was made from a tuple, and other shares of those."""
    shared: Any = share(WORDS)
    assert shared == WORDS
    assert WORDS == shared  # noqa: SIM300 - Python asks the list first
    assert shared == share(list(WORDS))
    assert shared != [*WORDS, "x"]
    assert shared != [*WORDS[:-1], "x"]
    assert shared != tuple(WORDS)
    assert shared != share(tuple(WORDS))
    assert share(tuple(WORDS)) == tuple(WORDS)
    assert shared != "abc"
    assert shared[:2] == ["a", "bc"]


def test_array_of_numbers() -> None:
    """numpy gets the numbers, also of slices, without a copy and read-only; other lists are converted as lists are."""
    shared = share([1, 2, 3, 4])
    view = np.asarray(shared)
    assert np.shares_memory(view, np.asarray(shared[1:]))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    for each in (slice(None, None, -1), slice(2, None, -2), slice(1, 3), slice(3, 1), slice(None, None, 3)):
        assert np.asarray(shared[each]).tolist() == [1, 2, 3, 4][each]
    assert np.array(shared, np.float32).dtype == np.float32
    own = np.array(shared)
    own[0] = 9
    assert shared[0] == 1
    assert np.asarray(share(["a", "b"])).tolist() == ["a", "b"]


# ------------------------------------------------------------------------------------------------------------- dicts

DICTS: dict[str, dict[Any, Any]] = {
    "str": {"a": 1, "b": 2},
    "many str": {f"key {i}": str(i) for i in range(3000)},
    "many int": {i * i: {"square": i} for i in range(3000)},
    "many bytes": {b"%d" % i: None for i in range(3000)},
    "many pairs": {(i, str(i)): i for i in range(3000)},
    "mixed": {1: "a", (2, "x"): 3, None: 4},
    "nothing": {},
}


@pytest.mark.parametrize("name", DICTS)
def test_dict_reads_like_its_original(name: str) -> None:
    """Length, look-up, order, views, membership and missing keys are those of the dict, with few keys and with many."""
    value = DICTS[name]
    shared = share(value)
    assert isinstance(shared, SharedDict)
    assert len(shared) == len(value)
    assert list(shared) == list(value)
    assert list(shared.keys()) == list(value.keys())
    assert list(shared.values()) == list(value.values())
    assert list(shared.items()) == list(value.items())
    assert all(shared[key] == value[key] for key in value)
    assert all(key in shared for key in value)
    assert shared == value
    assert value == shared
    assert shared.todict() == value
    assert list(shared.todict()) == list(value)
    assert shared == share(value)
    assert shared.keys() == value.keys()
    for item in list(value.values())[:3]:
        assert item in shared.values()
    assert ("nowhere", 1) not in shared.items()
    assert shared.get("nowhere", 5) == 5
    with pytest.raises(KeyError, match="nowhere"):
        shared["nowhere"]
    assert shared != {**value, "nowhere": 1}
    assert shared.__eq__([1]) is NotImplemented


# --------------------------------------------------------------------------------------------------------- all kinds


def everything() -> dict[str, Any]:
    return {
        "train": {"paths": [f"{i}.jpg" for i in range(2000)], "boxes": np.arange(8.0).reshape(2, 4)},
        "test": (LARGE, [1, 2]),
        "small": {"x": [1, 2]},
        "weights": torch.arange(5.0),
        "by id": {f"{i}": {"tokens": LARGE} for i in range(1100)},
    }


def test_what_is_shared_inside() -> None:
    """Large lists and dicts, and containers around them, are shared in one segment; rows and small values are plain."""
    shared: Any = share(everything())
    assert isinstance(shared["train"], SharedDict)
    assert isinstance(shared["train"]["paths"], SharedList)
    assert type(shared["train"]["boxes"]) is np.ndarray
    assert isinstance(shared["test"], SharedList)
    assert isinstance(shared["test"][0], SharedList)
    assert shared["test"][1] == [1, 2]
    assert type(shared["small"]) is dict
    assert type(shared["weights"]) is torch.Tensor
    assert isinstance(shared["by id"], SharedDict)
    assert shared["by id"]["7"] == {"tokens": LARGE}
    assert shared["train"]["paths"].nbytes == shared.nbytes


def plain_types(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(plain_types, value.values()))
    return not isinstance(value, SharedList | SharedDict) and (
        not isinstance(value, list | tuple) or all(map(plain_types, value))
    )


@pytest.mark.thorough
def test_plain_copies_are_plain_all_through() -> None:
    """The results of `todict()` and `tolist()` contain no shared list or dict; tuples are tuples again."""
    shared: Any = share(everything())
    copied = shared.todict()
    assert plain_types(copied)
    assert isinstance(copied["test"], tuple)
    assert repr(copied) == repr(everything())
    assert plain_types(share([everything(), LARGE]).tolist())


@pytest.mark.parametrize("value", [WORDS, {"a": 1}, tuple(WORDS), {"train": [LARGE]}])
def test_pickles_by_value(value: Any) -> None:
    """pickle and torch.save store the contents, as the plain list, tuple or dict."""
    shared = share(value)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        found = pickle.loads(pickle.dumps(shared, protocol))
        assert type(found) is type(value)
        assert found == value
        assert plain_types(found)
    file = io.BytesIO()
    torch.save({"shared": shared}, file)
    file.seek(0)
    assert torch.load(file, weights_only=False) == {"shared": value}


def test_slice_pickles_by_value() -> None:
    """The pickle of a slice has only the items of the slice."""
    assert pickle.loads(pickle.dumps(share(LARGE)[5:7])) == [5, 6]


@pytest.mark.parametrize("value", [WORDS, {"a": 1}])
def test_copies_are_itself(value: Any) -> None:
    """A shared value cannot change, so a copy is the same object."""
    shared = share(value)
    assert copy.copy(shared) is shared
    assert copy.deepcopy({"x": shared})["x"] is shared


@pytest.mark.parametrize("value", [WORDS, {"a": 1}])
def test_cannot_be_changed(value: Any) -> None:
    """Nothing changes a shared structure; it is recognised by code that checks for abstract types."""
    shared: Any = share(value)
    with pytest.raises(TypeError, match="does not support item assignment"):
        shared[0] = 1
    with pytest.raises(TypeError, match="support item deletion"):
        del shared[0]
    assert isinstance(shared, Sequence | Mapping)
    assert not isinstance(shared, MutableSequence | MutableMapping)
    with pytest.raises(TypeError):
        hash(shared)
    with pytest.raises(AttributeError):
        setattr(shared, "extra", 1)  # noqa: B010
    assert shared == value


def test_short_texts() -> None:
    """The repr has the size, not the contents."""
    assert repr(share(LARGE)) == "<SharedList: 2,000 int>"
    assert repr(share([{}])[:0]) == "<SharedList: 0 objects>"
    assert repr(share(dict.fromkeys(LARGE))) == "<SharedDict: 2,000 keys>"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({1}, "set; make a list of it"),
        (range(3), "range; make a list of it"),
        ("text", "str; make a list of it"),
        (1, "int$"),
        (None, "NoneType$"),
        (
            np.arange(3),
            r"ndarray: forked workers share it as it is; for spawned ones",
        ),
        (torch.arange(3), "Tensor: workers share it as it is, forked or spawned"),
    ],
)
def test_unsupported_input(value: Any, text: str) -> None:
    """Any other type is refused; the error names it, and what to do where something can be done."""
    with pytest.raises(TypeError, match=rf"takes a list, tuple or dict, not {text}"):
        share(value)


def test_default_collate_takes_shared_samples() -> None:
    """Shared samples are collated like any sequence or mapping."""
    assert default_collate([share([1, 2]), share([3, 4])])[0].tolist() == [1, 3]
    assert default_collate([share({"a": 1}), share({"a": 3})])["a"].tolist() == [1, 3]
    for shared in (share([1, 2]), share({"a": 1})):
        assert share(shared) is shared


# ---------------------------------------------------------------------------------------------------------- lifetime


@pytest.mark.thorough
def test_reading_from_many_threads() -> None:
    """Threads that read the same items at once all read the right values."""
    shared: Any = share({"words": [f"é{i}" for i in range(2000)], "ids": {f"{i}": [i] for i in range(2000)}})
    start = threading.Barrier(8)

    def wrong(seed: int) -> list[Any]:
        start.wait()
        found = [(i, shared["words"][i % 2000], shared["ids"][f"{i % 2000}"]) for i in range(seed, seed + 3000)]
        return [each for each in found if each[1:] != (f"é{each[0] % 2000}", [each[0] % 2000])]

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(wrong, range(0, 2000, 250))) == [[]] * 8


def segments() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:asyncloader")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_memory_goes_with_the_last_view() -> None:
    """No reference cycle keeps the original, or the segment: that is unmapped with the last of the object, its parts
    and their arrays.
    """
    gc.collect()
    gc.disable()
    try:
        before, fds = segments(), len(list(Path("/proc/self/fd").iterdir()))
        array = np.arange(3)
        alive = weakref.ref(array)
        shared: Any = share({"a": array, "t": torch.arange(3), "l": LARGE})
        del array
        assert alive() is None
        kept = {"a": shared["a"], "t": shared["t"], "l": shared["l"][5:]}
        del shared
        for name in ("a", "t", "l"):
            assert segments() == before + 1
            assert len(kept[name])
            del kept[name]
        assert segments() == before
        assert len(list(Path("/proc/self/fd").iterdir())) == fds
    finally:
        gc.enable()
