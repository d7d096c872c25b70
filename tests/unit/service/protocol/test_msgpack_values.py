"""Values that are sent to a service and back: unchanged afterwards, and no received value is executed."""

from __future__ import annotations

import math
import mmap
import pickle
from collections import OrderedDict
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn
from msgspec.msgpack import Ext

from asyncloader import register_batch_type
from asyncloader.base.events import Cursor, PositionedIndex
from asyncloader.service.protocol.msgpack_codec import BatchEncoder, BatchTemplate
from asyncloader.service.protocol.msgpack_values import MOST_ARRAYS, Unsendable, pack
from asyncloader.service.protocol.unpacking import build, check, decode, unpack
from asyncloader.workers.ipc.leaves import DTYPES
from asyncloader.workers.ipc.ring import make_anchor
from tests.helpers.comparing import assert_same


@register_batch_type
class Point(NamedTuple):
    x: Any
    y: Any


@register_batch_type
@dataclass
class Boxed:
    x: Any
    hidden: int = field(default=3, init=False)


@register_batch_type
@dataclass
class Scaled:
    """An image that is divided where it is made."""

    x: torch.Tensor
    scale: InitVar[float]
    shape: Any = field(init=False)
    unset: Any = field(init=False)

    def __post_init__(self, scale: float) -> None:
        self.x = self.x / scale
        self.shape = tuple(self.x.shape)
        self.note = "an attribute that is no field"


@register_batch_type
@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    known: int = field(default=3, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", self.x + 1)


class Number(NamedTuple):
    x: int


@register_batch_type
class Summed(Number):  # without slots, so that it can have attributes
    def __new__(cls, x: int) -> Self:
        return super().__new__(cls, x + 1)


@dataclass
class Mapped(dict[str, Any]):
    x: int = 0


class Unregistered(NamedTuple):
    x: Any


class Sub(torch.Tensor):
    pass


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | stn.arrays(stn.scalar_dtypes(), stn.array_shapes(min_dims=0, min_side=0, max_side=3)),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
        | st.builds(Point, inner, inner)
        | st.builds(Boxed, inner)
        | st.builds(PositionedIndex, st.integers() | st.lists(st.integers()).map(tuple), inner)
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_values_come_back(value: Any) -> None:
    """Types are kept at any depth, and so are the sign of zero and the bits of NaN."""
    back = unpack(pack(value))
    assert pickle.dumps(_exact(back)) == pickle.dumps(_exact(value))


def _exact(value: Any) -> Any:
    """An object whose pickle differs where `==` does not see a difference, and is equal for equal values."""
    if isinstance(value, np.ndarray):
        return ["array", value.dtype.str, value.shape, value.tobytes()]
    if isinstance(value, dict):
        return ["dict", [(_exact(key), _exact(item)) for key, item in value.items()]]
    if isinstance(value, tuple | list):
        return [type(value).__name__, [_exact(item) for item in value]]
    if isinstance(value, Boxed):
        return ["Boxed", _exact(value.x), value.hidden]
    if isinstance(value, float) and math.isnan(value):
        return ["nan"]
    return [type(value).__name__, repr(value)]


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        frozenset("ab"),
        OrderedDict(b=1, a=2),
        bytearray(b"x"),
        torch.Size([2, 3]),
        torch.bfloat16,
        np.float32(1.5),
        np.int64(-3),
        np.array(["a", "bc"]),
        np.datetime64("2026-01-01"),
        torch.tensor(3.5),
        torch.arange(6).reshape(2, 3).t(),
        torch.zeros(0, 3),
        torch.arange(2.0)[::2],
        torch.ones(3, dtype=torch.bfloat16),
        Cursor(1, 2, False, {"at": torch.tensor([1, 2])}, None),
        1 << 200,
        -(1 << 63) - 1,
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_come_back(value: Any) -> None:
    """Types and dtypes are kept."""
    back = unpack(pack(value))
    assert type(back) is type(value)
    assert_same(back, value)


def attributed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with an attribute of its own."""
    tensor.note = "n"  # type: ignore[attr-defined]
    return tensor


def test_conjugated_and_negated_views() -> None:
    """Arrive with their values, in a state and in a batch."""
    numbers = torch.tensor([[1 + 2j, 3 - 4j], [5j, 6.0]])
    views = {"conj": numbers.conj(), "transposed": numbers.mH[:, :1], "negated": numbers.conj().imag}
    encoded = BatchEncoder().encode(views)
    encoded.write(memory := mmap.mmap(-1, encoded.nbytes), 0)
    batch = BatchTemplate(encoded.template).copy_out(make_anchor(memory, 0, encoded.nbytes))
    for back in (unpack(pack(views)), batch):
        assert_same(back, {name: view.resolve_conj().resolve_neg() for name, view in views.items()})


UNSENDABLE = {
    "an object": ({"a": [1, object()]}, r"\['a'\]\[1\] is a builtins.object, which a service does not send"),
    "a function": (Point(1, len), r"\.y is a builtins.builtin_function_or_method"),
    "an array of objects": ([np.array([None])], r"\[0\] is an array of dtype object"),
    "a subclass": ((Sub([1.0]),), r"\[0\] is a .*Sub"),
    "a sparse tensor": ({"a": torch.zeros(2).to_sparse()}, r"\['a'\] is a tensor of layout .*: send its indices"),
    "a tensor with a gradient": (
        torch.ones(2, requires_grad=True),
        r"it is a tensor with requires_grad=True, which .*: detach\(\) it",
    ),
    "a tensor with an attribute": (attributed(torch.ones(2)), "it is a tensor with attributes of its own, .*: note"),
    "half a character": ({"name": "a\udc80"}, "not valid Unicode"),
}


@pytest.mark.parametrize(("value", "text"), UNSENDABLE.values(), ids=UNSENDABLE)
def test_what_cannot_be_sent_is_named(value: Any, text: str) -> None:
    """The error names the path to it and its type."""
    with pytest.raises(Unsendable, match=text):
        pack(value)


def test_a_value_that_contains_itself() -> None:
    """The value is an error, and no endless loop."""
    value: list[Any] = []
    value.append(value)
    with pytest.raises(Unsendable, match="or refers to itself"):
        pack(value)


def test_objects_are_restored_and_not_made_anew() -> None:
    """Their constructors are not called a second time, and every attribute arrives."""
    scaled, frozen, summed = unpack(pack([Scaled(torch.full((2,), 255.0), 255.0), Frozen(4), Summed(1)]))
    assert scaled.x.tolist() == [1, 1]
    assert (scaled.shape, scaled.note, hasattr(scaled, "unset")) == ((2,), "an attribute that is no field", False)
    assert (frozen, frozen.x, frozen.known) == (unpack(pack(frozen)), 5, 3)
    assert (type(summed), summed.x) == (Summed, 2)
    with pytest.raises(TypeError, match=r"it is made by dict.__new__"):
        register_batch_type(Mapped)
    with pytest.raises(Unsendable, match=r"it is made by dict.__new__"):
        pack(Mapped(1))
    summed.extra = 1
    with pytest.raises(Unsendable, match=r"attributes besides its fields, .*: extra"):
        pack(summed)


@pytest.mark.parametrize("values", [[["__array_interface__", 1, "x", 2]], [["x"]], [[5, 1]], [["note", 1]]])
def test_attributes_that_no_loader_sends(values: list[Any]) -> None:
    """Are refused: names that give an object other memory, names without a value, and fields that are missing."""
    for each in values:
        with pytest.raises(ValueError, match="broken stream"):
            unpack(msgspec.msgpack.encode([9, f"{__name__}.Boxed", *each]))


def test_only_registered_types_are_made() -> None:
    """A type that this process did not register is an error that names the type and the remedy."""
    with pytest.raises(ValueError, match=r"register_batch_type\(Unregistered\)"):
        unpack(pack(Unregistered(1)))
    batch = {"a": [1, Boxed(Point(1, (Unregistered(2),)))]}
    with pytest.raises(TypeError, match=r"^the batch has a .*Unregistered, .*register_batch_type\(Unregis"):
        build(decode(pack(batch)), ())
    with pytest.raises(TypeError, match="named tuple or a dataclass"):
        register_batch_type(dict)


def nested(depth: int) -> Any:
    return [0, nested(depth - 1)] if depth else [0]


BROKEN = {
    "nothing": b"",
    "no MessagePack": b"\xc1",
    "a map": msgspec.msgpack.encode({"a": 1}),
    "an empty array": msgspec.msgpack.encode([]),
    "no tag": msgspec.msgpack.encode(["a"]),
    "an unknown tag": msgspec.msgpack.encode([99]),
    "a list as tag": msgspec.msgpack.encode([[0]]),
    "an odd dictionary": msgspec.msgpack.encode([2, 1]),
    "a key that cannot be hashed": msgspec.msgpack.encode([2, [0], 1]),
    "a leaf": msgspec.msgpack.encode([15, 0]),
    "too deep": msgspec.msgpack.encode(nested(100)),
    "a size of bytes": msgspec.msgpack.encode([8, 1 << 40]),
    "an array of objects": msgspec.msgpack.encode([11, "O", [1, 1], Ext(0, b"12345678")]),
    "an array that is too long": msgspec.msgpack.encode([11, "<i4", [1, 1 << 40], Ext(0, b"1234")]),
    "an array of negative length": msgspec.msgpack.encode([11, "<i4", [1, -1, -1], Ext(0, b"1234")]),
    "a tensor of no dtype": msgspec.msgpack.encode([12, "nn", [1, 1], Ext(0, b"1234")]),
    "bytes as MessagePack has them": msgspec.msgpack.encode([0, b"1234"]),
    "an extension": msgspec.msgpack.encode([0, Ext(1, b"1234")]),
    "a moment": b"\xd6\xff\x00\x00\x00\x00",
    "a quantized tensor": msgspec.msgpack.encode([12, "qint8", [1, 4], Ext(0, b"1234")]),
    "a tensor of pieces of bytes": msgspec.msgpack.encode([12, "bits8", [1, 4], Ext(0, b"1234")]),
    "a complex number of a tensor": msgspec.msgpack.encode([7, [12, "uint8", [1, 1], Ext(0, b"1")], 0.0]),
    "a tensor as key": msgspec.msgpack.encode([2, [12, "uint8", [1, 1], Ext(0, b"1")], 0]),
    "an integer with underscores": msgspec.msgpack.encode([6, "0x1_0"]),
    "an integer of a text": msgspec.msgpack.encode([6, "10"]),
    "a size that is too large": msgspec.msgpack.encode([13, (1 << 63)]),
    "an array of texts without bytes": msgspec.msgpack.encode([11, "<U0", [1, 1 << 40], Ext(0, b"")]),
    "an array of many dtypes": msgspec.msgpack.encode([11, "i4,i4", [1, 1], Ext(0, b"12345678")]),
    "integers of one hash": pack({7 + k * ((1 << 61) - 1) for k in range(40)}),
    "tuples of one hash": pack({(7 + k * ((1 << 61) - 1),) for k in range(40)}),
    "a pickle": pickle.dumps(print),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_broken_values(data: bytes) -> None:
    """Each of them is a ValueError."""
    with pytest.raises(ValueError):
        unpack(data)


def test_how_many_containers() -> None:
    """Containers are bounded, since few bytes would take much memory; texts and numbers are not."""
    many = MOST_ARRAYS + 50_000
    texts: list[Any] = [[f"x{number}", number] for number in range(many)]
    assert unpack(pack(texts)) == texts
    with pytest.raises(Unsendable, match="containers in"):
        pack([()] * many)
    bomb = msgspec.msgpack.encode([0, *([[0]] * many)])
    for data in (bomb, msgspec.msgpack.encode([0, *([[]] * many)])):
        with pytest.raises(ValueError, match=r"more than 1\d\d,\d\d\d containers"):
            unpack(data)
    alike = [b"\x90" * many, "é" * many, [0x9090] * 10, {"a" * 40: [b"\x91" * 40] * 4}]  # bytes as of containers
    assert unpack(pack(alike)) == alike


def test_how_many_keys() -> None:
    """Texts are hashed with a secret; other keys are bounded, when sent and when received."""
    texts = {f"key {number}": number for number in range(50_000)}
    assert unpack(pack(texts)) == texts
    graphs = [{number: [number] for number in range(300)} for _ in range(300)]
    assert unpack(pack(graphs)) == graphs
    half = (1 << 19) + 1
    assert len(unpack(pack(set(range(half))))) == half
    with pytest.raises(Unsendable, match="1,048,576 keys that are not texts"):
        pack([set(range(half)), dict.fromkeys(range(half))])
    twice = msgspec.msgpack.encode([0, [3, *range(half)], [3, *range(half)]])
    with pytest.raises(ValueError, match="too many keys"):
        unpack(twice)


def test_how_deep() -> None:
    """A value that may be sent may be received: up to 62 levels, with an array in the last."""
    for levels in (61, 62, 63, 64):
        value: Any = np.arange(2)
        for _ in range(levels):
            value = [value]
        if levels > 62:
            with pytest.raises(Unsendable, match="nested more than 62 levels"):
                pack(value)
        else:
            assert_same(unpack(pack(value)), value)


def test_keys_of_registered_types_are_checked_without_making_them() -> None:
    """Any number of such keys is accepted: their encodings are alike, but the keys differ."""
    value = {Point(number, "x"): number for number in range(40)}
    tree = decode(pack(value))
    check(tree, ())
    assert build(tree, ()) == value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_made_can_be_used(dtype: torch.dtype) -> None:
    """A tensor of any bytes can be printed and compared without ending the process."""
    name = str(dtype).removeprefix("torch.")
    tensor = unpack(msgspec.msgpack.encode([12, name, [1, 1], Ext(0, b"\xff" * dtype.itemsize)]))
    for use in (repr, bool, hash, complex, lambda value: value == value):
        with suppress(RuntimeError, NotImplementedError, TypeError, ValueError):
            use(tensor)


TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats()
    | st.text()
    | st.builds(Ext, st.integers(-1, 1), st.binary()),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(st.integers(-1, 18), inner, inner).map(list),
    max_leaves=10,
)


@given(TREES)
def test_any_tree(tree: Any) -> None:
    """Any tree of values with any tags gives a value or a ValueError."""
    with suppress(ValueError):
        unpack(msgspec.msgpack.encode(tree))
