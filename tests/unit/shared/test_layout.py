from __future__ import annotations

import pickle
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.shared.layout import SharedDict, SharedList, plain
from asyncloader.shared.share import share

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=6)  # lone surrogates too
SCALARS = st.one_of(
    ANY_TEXT, st.binary(max_size=6), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False)
)
KEYS = st.one_of(SCALARS, st.tuples(SCALARS, SCALARS))
STRUCTURES: Any = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=8),
        st.lists(inner, max_size=8).map(tuple),
        st.dictionaries(KEYS, inner, max_size=8),
    ),
    max_leaves=40,
)


class Point(NamedTuple):
    x: Any
    y: Any


def shared(value: Any, large: int = 4) -> Any:
    """The shared structure, in which lists and dicts of `large` entries are large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncloader.shared.builder.LARGE", large)
        return share(value)


# ------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.thorough
@given(st.one_of(st.lists(STRUCTURES), st.dictionaries(KEYS, STRUCTURES)), st.integers(1, 6))
def test_structure_comes_back(value: Any, large: int) -> None:
    """Any nesting of lists, tuples and dicts is read as it was written, with its types and its order of keys."""
    # As texts, which differ for 1, 1.0 and True, for lists and tuples, and for other orders of keys.
    assert repr(plain(shared(value, large))) == repr(value)


@given(st.one_of([st.lists(each) for each in (ANY_TEXT, st.binary(), st.integers(), st.floats(), st.booleans())]))
def test_lists_of_one_type_come_back(value: list[Any]) -> None:
    """The packed kinds keep every value, including infinities, NaNs and huge integers."""
    assert repr(plain(shared(value))) == repr(value)


@pytest.mark.parametrize(
    ("value", "kind", "most"),
    [
        (["ab"] * 1000, "str", 6),
        (["é"] * 1000, "str", 6),
        ([b"abc"] * 1000, "bytes", 7),
        ([True, False] * 500, "bool", 1),
        ([-128, 127] * 500, "int", 1),
        ([-129, 0] * 500, "int", 2),
        ([40000, 0] * 500, "int", 4),
        ([1 << 40, 0] * 500, "int", 8),
        ([0.5] * 1000, "float", 8),
        ([1 << 63, 0] * 500, "objects", 20),
        (["ab", None] * 500, "objects", 20),
        ([1, True] * 500, "objects", 20),
    ],
)
def test_bytes_an_item(value: list[Any], kind: str, most: int) -> None:
    """A packed text takes its bytes and four bytes of a table, a number the fewest bytes for the list's range.

    Lists of other items are pickled.
    """
    found = share(value)
    assert found.nbytes <= most * len(value) + 200
    assert repr(found) == f"<SharedList: 1,000 {kind}>"
    assert found == value


def test_numpys_str_is_text() -> None:
    """A list made from a numpy array of str is packed like any other list of text, and gives plain str."""
    found = share(list(np.array(["a", "bc"])))
    assert repr(found) == "<SharedList: 2 str>"
    assert [type(item) for item in found] == [str, str]


@pytest.mark.parametrize("make", [OrderedDict, lambda pairs: defaultdict(int, pairs)])
def test_kinds_of_dict(make: Any) -> None:
    """Subclasses of dict are read as dicts."""
    value = {str(i): i for i in range(9)}
    assert plain(shared([make(value), 1, 2, 3, 4])) == [value, 1, 2, 3, 4]
    assert plain(shared(make(value))) == value


# ------------------------------------------------------------------------------------------- values that become nodes


BIG = list(range(4))


@pytest.mark.parametrize(
    ("value", "nodes"),
    [
        ({"a": BIG, "b": [1], "c": tuple(BIG)}, {"a", "c"}),
        ({"a": {"b": {"c": BIG}}, "b": {"c": {"d": [1]}}}, {"a"}),
        ({"a": (BIG, 1), "b": Point(BIG, 1)}, {"a"}),
    ],
)
def test_what_leads_to_a_large_one_is_a_node(value: dict[str, Any], nodes: set[str]) -> None:
    """In a small dict, large values and the containers on the way to them are nodes. A named tuple is a plain value."""
    found = shared(value)
    assert {key for key in found if isinstance(found[key], SharedList | SharedDict)} == nodes
    assert plain(found) == value


def test_rows_are_plain() -> None:
    """Items of a large list become nodes if they are large themselves; containers inside of them stay plain."""
    value = [{"tokens": BIG}, [BIG], BIG, (1,), {1: 1, 2: 2, 3: 3, 4: 4}]
    found = shared(value)
    assert [type(item) for item in found] == [dict, list, SharedList, tuple, SharedDict]
    assert plain(found) == value


def test_one_list_in_two_places_is_written_once() -> None:
    """An object that occurs twice is written as one node."""
    twice, once = [list(range(10_000))] * 2, [list(range(10_000))]
    assert share(twice).nbytes < share(once).nbytes + 100


def test_shared_parts_are_copied() -> None:
    """A structure that is part of another is in both segments, and reads alike."""
    words = share(["a", "b"])
    found = share({"words": words, "rows": [words] * 1500})
    assert found["words"] == ["a", "b"]
    assert found["rows"][7] == ["a", "b"]


def test_structure_in_itself_is_refused() -> None:
    """Such a list would be written without end."""
    small: list[Any] = [BIG]
    small.append(small)
    for value in ({"x": small}, small):
        with pytest.raises(ValueError, match="contains itself"):
            shared(value)


def test_failing_item_is_named() -> None:
    """The error of an item that cannot be pickled names the item at each level."""
    with pytest.raises((AttributeError, pickle.PicklingError, TypeError)) as caught:
        shared({"rows": [1, 2, 3, 4, lambda: 0]})
    assert caught.value.__notes__ == ["while sharing item 4", "while sharing item 'rows'"]


# ------------------------------------------------------------------------------------------------ arrays and tensors

ARRAYS = {
    "floats": np.arange(6.0).reshape(2, 3),
    "other order": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "strided": np.arange(20)[::3],
    "backwards": np.arange(5, dtype=np.int16)[::-1],
    "no dimension": np.array(3.5),
    "empty": np.zeros((0, 3), np.float32),
    "text": np.array(["a", "bcd"]),
    "time": np.array(["2020-01-01", "NaT"], "datetime64[D]"),
    "big-endian": np.arange(3, dtype=">i4"),
    "fields": np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "read-only": np.broadcast_to(np.arange(3), (2, 3)),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_array_is_a_read_only_view(name: str) -> None:
    """Arrays of any layout and dtype are read back equal, read-only, and (unless empty) in the segment's memory."""
    value = ARRAYS[name]
    shared: Any = share([{"x": value}, value])
    for found in (shared[0]["x"], shared[1]):
        assert type(found) is np.ndarray
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(found, value)
        if value.nbytes:
            assert np.shares_memory(found, np.frombuffer(shared._segment.view, np.uint8))
            with pytest.raises(ValueError, match="read-only"):
                found[...] = found


def test_array_of_objects_is_pickled() -> None:
    """Python objects in an array are pickled together with it."""
    found = share([np.array(["a", None, 3], object)])[0]
    assert found.tolist() == ["a", None, 3]


TENSORS = {
    "floats": torch.arange(6.0).view(2, 3),
    "transposed": torch.arange(6).view(2, 3).t(),
    "a piece": torch.arange(100, dtype=torch.int16)[10:20:3],
    "no dimension": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "complex": torch.tensor([1 + 2j]).conj(),
    "grad": torch.ones(2, requires_grad=True),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensor_comes_back(name: str) -> None:
    """Tensors of any layout and dtype are read back equal, also inside of items."""
    value = TENSORS[name]
    shared: Any = share([{"x": value}, value])
    for found in (shared[0]["x"], shared[1]):
        assert (found.dtype, found.layout, found.requires_grad) == (value.dtype, value.layout, value.requires_grad)
        assert torch.equal(found.to_dense(), value.to_dense())


def test_tensor_elsewhere_is_refused() -> None:
    """A tensor of another device cannot be in this memory; the error says what to do and where the tensor is."""
    with pytest.raises(TypeError, match=r"on meta: call cpu\(\)") as caught:
        share([1, torch.ones(2, device="meta")])
    assert caught.value.__notes__ == ["while sharing item 1"]


def test_original_is_independent() -> None:
    """Later changes of the original do not show in the shared copy, nor the reverse."""
    array, tensor = np.zeros(3), torch.zeros(3)
    shared: Any = share([array, tensor])
    array[0] = tensor[0] = 1
    shared[1][1] = 2
    assert shared[0].tolist() == [0, 0, 0]
    assert shared[1].tolist() == [0, 2, 0]
    assert tensor.tolist() == [1, 0, 0]
    assert array.flags.writeable


@dataclass
class Sample:
    name: str
    image: np.ndarray[Any, Any]
    mask: torch.Tensor


def test_arrays_deep_in_an_object() -> None:
    """Arrays and tensors are found wherever pickle finds them; the object around them is rebuilt at each reading."""
    shared = share([Sample("a", np.arange(3), torch.arange(2))])
    one, two = shared[0], shared[0]
    assert one is not two
    assert one.name == "a"
    assert np.shares_memory(one.image, two.image)
    assert one.mask.data_ptr() == two.mask.data_ptr()
