from __future__ import annotations

import pickle
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.shared.builder import Builder
from tests.unit.shared.structures import (
    ANY_TEXT,
    KEYS,
    STRUCTURES,
    Bytes,
    Opened,
    Point,
    built,
    dict_of,
    list_of,
    plain,
)

# ------------------------------------------------------------------------------------------------------- round trips


def exact(value: Any) -> str:
    """A text that differs for 1, 1.0 and True, for lists and tuples, and for other orders of keys."""
    return repr(value)


@pytest.mark.thorough
@given(st.one_of(st.lists(STRUCTURES), st.dictionaries(KEYS, STRUCTURES)), st.integers(1, 6))
def test_structure_comes_back(value: Any, large: int) -> None:
    """Any nesting of lists, tuples and dicts is read as it was written, with its types and its order of keys."""
    assert exact(plain(built(value, large))) == exact(value)


@given(st.one_of([st.lists(each) for each in (ANY_TEXT, st.binary(), st.integers(), st.floats(), st.booleans())]))
def test_lists_of_one_type_come_back(value: list[Any]) -> None:
    """The packed kinds keep every value, including infinities, NaNs and huge integers."""
    assert exact(plain(built(value))) == exact(value)


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
    sink = Bytes()
    Builder(sink).build(value)
    assert len(sink.data) <= most * len(value) + 200
    assert list_of(value).kind == kind


def test_chunks_of_mixed_text() -> None:
    """Long lists are encoded in parts, ASCII or not, and the boundaries do not show."""
    value = [f"é{i}" if 20_000 < i < 40_000 else str(i) for i in range(60_000)]
    assert plain(built(value)) == value


def test_numpys_str_is_text() -> None:
    """A list made from a numpy array of str is packed like any other list of text, and gives plain str."""
    node = list_of(list(np.array(["a", "bc"])))
    assert node.kind == "str"
    assert [type(node.item(i)) for i in range(2)] == [str, str]


@pytest.mark.parametrize("make", [OrderedDict, lambda pairs: defaultdict(int, pairs)])
@pytest.mark.parametrize("count", [2, 9])
def test_kinds_of_dict(make: Any, count: int) -> None:
    """Subclasses of dict are read as dicts."""
    value = {str(i): i for i in range(count)}
    assert plain(built([make(value), 1, 2, 3, 4])) == [value, 1, 2, 3, 4]
    assert plain(built(make(value))) == value


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
    node = dict_of(value, wrap=Opened)
    assert {node.key(i) for i in range(node.count) if isinstance(node.value(i), Opened)} == nodes


def test_rows_are_plain() -> None:
    """Items of a large list become nodes if they are large themselves; containers inside of them stay plain."""
    node = list_of([{"tokens": BIG}, [BIG], BIG, (1,), {1: 1, 2: 2, 3: 3, 4: 4}], wrap=Opened)
    assert [isinstance(node.item(i), Opened) for i in range(5)] == [False, False, True, False, True]
    assert node.item(0) == {"tokens": BIG}


def test_one_list_in_two_places_is_written_once() -> None:
    """An object that occurs twice is written as one node."""
    node = dict_of({"a": BIG, "b": BIG}, wrap=Opened)
    assert node.value(0).node.offset == node.value(1).node.offset


def test_structure_in_itself_is_refused() -> None:
    """Such a list would be written without end."""
    around: list[Any] = [*BIG]
    around.append({"a": around})
    small: list[Any] = [BIG]
    small.append(small)
    for value in ({"x": small}, small):
        with pytest.raises(ValueError, match="contains itself"):
            built(value)


def test_failing_item_is_named() -> None:
    """The error of an item that cannot be pickled names the item at each level."""
    with pytest.raises((AttributeError, pickle.PicklingError, TypeError)) as caught:
        built({"rows": [1, 2, 3, 4, lambda: 0]})
    assert caught.value.__notes__ == ["while sharing item 4", "while sharing item 'rows'"]
    assert plain(built([1, "a"])) == [1, "a"]


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
    "bools": np.array([True, False]),
    "read-only": np.broadcast_to(np.arange(3), (2, 3)),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_array_is_a_read_only_view(name: str) -> None:
    """Arrays of any layout and dtype are read back equal, read-only, and (unless empty) in the segment's memory."""
    value = ARRAYS[name]
    node = list_of([{"x": value}, value])
    for found in (node.item(0)["x"], node.item(1)):
        assert type(found) is np.ndarray
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(found, value)
        if value.nbytes:
            assert np.shares_memory(found, np.frombuffer(node.region.view, np.uint8))
            with pytest.raises(ValueError, match="read-only"):
                found[...] = found


def test_array_of_objects_is_pickled() -> None:
    """Python objects in an array are pickled together with it."""
    found = list_of([np.array(["a", None, 3], object)]).item(0)
    assert found.tolist() == ["a", None, 3]


TENSORS = {
    "floats": torch.arange(6.0).view(2, 3),
    "transposed": torch.arange(6).view(2, 3).t(),
    "a piece": torch.arange(100, dtype=torch.int16)[10:20:3],
    "no dimension": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "complex": torch.tensor([1 + 2j]).conj(),
    "bool": torch.tensor([True, False]),
    "grad": torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensor_comes_back(name: str) -> None:
    """Tensors of any layout and dtype are read back equal, also inside of items."""
    value = TENSORS[name]
    node = list_of([{"x": value}, value])
    for found in (node.item(0)["x"], node.item(1)):
        assert (found.dtype, found.requires_grad) == (value.dtype, value.requires_grad)
        assert torch.equal(found, value)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions")
def test_tensors_of_other_layouts() -> None:
    """Sparse and quantized tensors are written as their parts and rebuilt."""
    sparse = torch.eye(3).to_sparse()
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.qint8)
    node = list_of([sparse, quantized])
    assert torch.equal(node.item(0).to_dense(), torch.eye(3))
    assert torch.equal(node.item(1).dequantize(), torch.ones(3))


def test_dense_tensor_is_a_view() -> None:
    """A tensor's bytes are the segment's: in this process a write to the tensor shows when it is read again."""
    node = list_of([torch.zeros(3)])
    node.item(0)[1] = 7
    assert node.item(0).tolist() == [0, 7, 0]


def test_tensor_elsewhere_is_refused() -> None:
    """A tensor of another device cannot be in this memory; the error says what to do and where the tensor is."""
    with pytest.raises(TypeError, match=r"on meta: call cpu\(\)") as caught:
        built([1, torch.ones(2, device="meta")])
    assert caught.value.__notes__ == ["while sharing item 1"]


@dataclass
class Sample:
    name: str
    image: np.ndarray[Any, Any]
    mask: torch.Tensor


def test_arrays_deep_in_an_object() -> None:
    """Arrays and tensors are found wherever pickle finds them; the object around them is rebuilt at each reading."""
    node = list_of([Sample("a", np.arange(3), torch.arange(2))])
    one, two = node.item(0), node.item(0)
    assert one is not two
    assert one.name == "a"
    assert np.shares_memory(one.image, two.image)
    assert one.mask.data_ptr() == two.mask.data_ptr()


class Buffered:
    """Pickles a buffer out of band, as third-party array types do."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Buffered, (pickle.PickleBuffer(self.data),)


def test_foreign_buffers() -> None:
    """Out-of-band buffers of other types are read-only views, too, whether they were writable or not."""
    for data in (b"hello", bytearray(b"hello")):
        found = list_of([Buffered(data)]).item(0).data
        assert bytes(found) == b"hello"
        assert memoryview(found).readonly


class Token:
    """Stands for an object that was shared before."""


def test_what_is_shared_already_is_kept() -> None:
    """Objects of the given types are not written: reading returns the identical objects, at any depth."""
    one, two = Token(), Token()
    node = dict_of({"a": one, "b": [one, (two, "x")], "c": {"d": [two]}}, shared=(Token,))
    assert node.value(0) is one
    assert node.value(1)[0] is one
    assert node.value(1)[1][0] is two
    assert node.value(2)["d"][0] is two
