from __future__ import annotations

import copy
import io
import pickle
from collections import deque
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from asyncloader.shared.share import SharedDict, SharedList, share

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


@pytest.mark.parametrize("index", [np.int64(1), torch.tensor(1), True])
def test_index_of_other_types(index: Any) -> None:
    """Every object that may index a list may index a SharedList."""
    assert share(WORDS)[index] == "bc"


@pytest.mark.parametrize("index", [6, -7, 1 << 80])
def test_index_out_of_range(index: int) -> None:
    """The error has the index and the length."""
    with pytest.raises(IndexError, match=f"index {index} is out of range for a SharedList of 6 items"):
        share(WORDS)[index]


def test_index_of_no_kind() -> None:
    """Other types are refused as indices."""
    shared: Any = share(WORDS)
    for index in ("1", 1.0, None):
        with pytest.raises(TypeError, match=f"integers or slices, not {type(index).__name__}"):
            shared[index]


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


def test_equality_with_arrays_inside() -> None:
    """Arrays and tensors are compared as a whole, with their dtype; a tensor does not equal an array."""
    value = [np.arange(3), torch.arange(3)]
    assert share(value) == value
    assert share(value) != [np.arange(3.0), torch.arange(3)]
    assert share(value) != [np.arange(4), torch.arange(3)]
    assert share(value) != value[::-1]
    assert torch.arange(3) in share(value)


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
    "mixed": {1: "a", (2, "x"): 3, None: 4, frozenset({1}): 5},
    "nothing": {},
}


@pytest.mark.parametrize("name", DICTS)
def test_dict_reads_like_its_original(name: str) -> None:
    """Length, look-up, order, views and membership are those of the dict, with few keys and with many."""
    value = DICTS[name]
    shared = share(value)
    assert isinstance(shared, SharedDict)
    assert len(shared) == len(value)
    assert list(shared) == list(value)
    assert list(reversed(shared)) == list(reversed(value))
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


@pytest.mark.parametrize("name", DICTS)
def test_missing_key(name: str) -> None:
    """`[]` raises a KeyError with the key; `get` returns its default and `in` is False."""
    shared = share(DICTS[name])
    assert "nowhere" not in shared
    assert shared.get("nowhere", 5) == 5
    with pytest.raises(KeyError, match="nowhere"):
        shared["nowhere"]


def test_dicts_differ() -> None:
    """Dicts differ by a value, a key or the size, but not by the order."""
    shared: Any = share({"a": 1, "b": np.arange(3)})
    assert shared == {"b": np.arange(3), "a": 1}
    for other in ({"a": 1}, {"a": 1, "c": 2}, {"a": 2, "b": np.arange(3)}, {"a": 1, "b": np.arange(4)}, [1]):
        assert shared != other


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
    assert shared == everything()
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
    assert share(copied) == everything()
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
    """Setting and deleting are errors that say what to do; other methods that change a list or dict do not exist."""
    shared: Any = share(value)
    for name, arguments in (("__setitem__", (0, 1)), ("__delitem__", (0,))):
        with pytest.raises(
            TypeError, match=r"cannot be changed: change the \w+ before share\(\), or take a plain copy"
        ):
            getattr(shared, name)(*arguments)
    assert not isinstance(shared, MutableSequence | MutableMapping)
    with pytest.raises(TypeError):
        hash(shared)
    with pytest.raises(AttributeError):
        shared.extra = 1
    assert shared == value


def test_abstract_types() -> None:
    """Shared lists and dicts are recognised by code that checks for abstract types."""
    assert isinstance(share([1]), Sequence)
    assert isinstance(share({}), Mapping)


def test_short_texts() -> None:
    """The repr has the size, not the contents."""
    assert repr(share(LARGE)) == "<SharedList: 2,000 int>"
    assert repr(share([{}])[:0]) == "<SharedList: 0 objects>"
    assert repr(share(dict.fromkeys(LARGE))) == "<SharedDict: 2,000 keys>"


@pytest.mark.parametrize("kind", [SharedList, SharedDict])
def test_made_by_share_only(kind: Any) -> None:
    """Calling the classes is a TypeError."""
    for arguments in ((), ([1],)):
        with pytest.raises(TypeError, match=r"made by share\("):
            kind(*arguments)


@pytest.mark.parametrize(
    "value",
    [
        {1},
        frozenset(),
        (i for i in "ab"),
        iter([]),
        1,
        1.5,
        "text",
        b"bytes",
        None,
        range(3),
        deque([1]),
        np.float32(1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unsupported_input(value: Any) -> None:
    """Any other type is refused; the error names it and the supported types."""
    with pytest.raises(
        TypeError, match=rf"takes a list, tuple, dict, numpy array or torch tensor, not {type(value).__name__}"
    ):
        share(value)


def test_shared_objects_are_taken_over() -> None:
    """Objects that are shared already stay in their own segments, wherever they are put."""
    words, table, array, tensor = share(WORDS), share({"a": 1}), share(np.arange(3)), share(torch.arange(3))
    assert share(words) is words
    assert share(array) is array
    assert share(tensor) is tensor
    both: Any = share({"words": words, "rows": [{"t": table, "a": array}, tensor], "deep": {"w": words}})
    assert both["words"] is words
    assert both["rows"][0]["t"] is table
    assert both["rows"][0]["a"] is array
    assert both["rows"][1] is tensor
    assert both["deep"]["w"] is words
    assert both.nbytes < 1000
    assert plain_types(both.todict()["deep"])


def test_default_collate_takes_shared_samples() -> None:
    """Shared samples are collated like any sequence or mapping."""
    assert default_collate([share([1, 2]), share([3, 4])])[0].tolist() == [1, 3]
    assert default_collate([share({"a": 1}), share({"a": 3})])["a"].tolist() == [1, 3]
