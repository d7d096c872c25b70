"""All other objects that a batch may contain, through the slot and back."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from asyncloader.workers.ipc.codec import INLINE_PICKLE, Encoder
from tests.helpers.comparing import assert_same
from tests.unit.workers.ipc.through_memory import copied, round_trip, view


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    name: str
    meta: dict[str, Any]


class Pair(NamedTuple):
    left: Any
    right: Any


class Bag(dict[str, Any]):
    extra: Any = None


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slotted) and bool(torch.equal(self.x, other.x))

    __hash__ = None  # type: ignore[assignment]


def readonly() -> npt.NDArray[Any]:
    array = np.arange(6.0)
    array.flags.writeable = False
    return array


def objects() -> npt.NDArray[Any]:
    return np.array([{"a": 1}, None, "text"], dtype=object)


ARRAYS: dict[str, Callable[[], Any]] = {
    "plain": lambda: np.arange(6, dtype=np.float32).reshape(2, 3),
    "scalar array": lambda: np.array(5),
    "empty": lambda: np.zeros((0, 3)),
    "fortran": lambda: np.asfortranarray(np.arange(6).reshape(2, 3)),
    "strided": lambda: np.arange(10)[::3],
    "reversed": lambda: np.arange(10)[::-1],
    "readonly": readonly,
    "objects": objects,
    "structured": lambda: np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
    "strings": lambda: np.array(["ab", "c", ""]),
    "bytes": lambda: np.array([b"ab", b"c"]),
    "big endian": lambda: np.arange(3, dtype=">i4"),
    "bool": lambda: np.array([True, False]),
    "datetime": lambda: np.array(["2024-01-01", "NaT"], dtype="datetime64[D]"),
    "complex": lambda: np.array([1 + 2j]),
    "long double": lambda: np.array([1.5], dtype=np.longdouble),
    "record": lambda: np.rec.array([(1, "a")], dtype=[("n", "i4"), ("s", "U1")]),
    "masked": lambda: np.ma.masked_array([1, 2, 3], mask=[False, True, False]),
}


@pytest.mark.parametrize("kind", [kind for kind in ARRAYS if kind != "masked"])
def test_arrays(kind: str) -> None:
    """Arrays of every kind keep type, dtype, shape and content, as views and as copies."""
    value = ARRAYS[kind]()
    assert_same(view(Encoder().encode(value)), value)
    assert_same(copied(Encoder().encode(value)), value)


READONLY: dict[str, Callable[[], npt.NDArray[Any]]] = {
    "flag": readonly,
    "buffer": lambda: np.frombuffer(b"12345678", np.uint8),
    "fortran": lambda: readonly().reshape(3, 2).T,
    "strided": lambda: readonly()[::2],
    "broadcast": lambda: np.broadcast_to(np.arange(3), (2, 3)),
    "empty": lambda: np.frombuffer(b"", np.uint8),
    "memory view": lambda: np.asarray(memoryview(b"abc")),
}


@pytest.mark.parametrize("kind", READONLY)
def test_read_only_arrays_come_out_writable(kind: str) -> None:
    """An array may be written to, whether the worker's array was writable or not, as from torch's workers."""
    value = READONLY[kind]()
    assert not value.flags.writeable
    for through in (view, copied):
        got = through(Encoder().encode([value, {"again": value}]))
        assert_same(got[0], value)
        assert got[0].flags.writeable
        assert got[1]["again"] is got[0]
        assert got[0].flags.f_contiguous or not value.flags.f_contiguous


VALUES: dict[str, Any] = {
    "none": None,
    "empty list": [],
    "numbers": [1, 2.5, True, 1 << 200, 3j, Fraction(1, 3)],
    "text": ["a", "ä", b"bytes", "x" * 1000],
    "bytearray": bytearray(b"abc"),
    "dataclass": Sample(torch.arange(4.0), "one", {"deep": [torch.ones(2), "x"]}),
    "named tuple": Pair(torch.zeros(2), Pair("a", np.arange(2))),
    "ordered": OrderedDict([("b", torch.zeros(1)), ("a", 1)]),
    "default": defaultdict(list, {"a": [torch.ones(1)]}),
    "counter": Counter("abca"),
    "deque": deque([1, torch.zeros(2)], maxlen=5),
    "sets": [{1, 2}, frozenset("a")],
    "slots": Slotted(torch.arange(3)),
    "types": [int, torch.float32, torch.device("cpu"), np.dtype("f4"), torch.Size([1, 2])],
    "numpy scalars": [np.float32(2.5), np.int64(-3), np.bool_(True), np.str_("s")],
    "generator state": torch.Generator().manual_seed(7).get_state(),
    "layers": [[[[torch.zeros(1)]]], ({"k": (torch.ones(2),)},)],
}


@pytest.mark.parametrize("kind", VALUES)
def test_objects_ride_along(kind: str) -> None:
    """Any object that pickles comes back equal, with tensors found at any depth, as views and as copies."""
    assert_same(view(Encoder().encode(VALUES[kind])), VALUES[kind])
    assert_same(copied(Encoder().encode(VALUES[kind])), VALUES[kind])


def test_dict_subclass_with_attributes() -> None:
    """A user's dictionary keeps its type, entries and attributes."""
    bag = Bag(a=torch.arange(3))
    bag.extra = torch.ones(2)
    got = round_trip(bag)
    assert_same(got, bag)
    assert_same(got.extra, bag.extra)


def test_cycles_survive() -> None:
    """An object that contains itself does so afterwards."""
    loop: list[Any] = [torch.arange(2)]
    loop.append(loop)
    got = round_trip(loop)
    assert got[1] is got
    assert got[0].tolist() == [0, 1]


@pytest.mark.parametrize("through", [view, copied])
@pytest.mark.parametrize("nbytes", [INLINE_PICKLE - 300, INLINE_PICKLE + 1, 1 << 20])
def test_large_pickle_goes_through_memory(through: Any, nbytes: int) -> None:
    """Pickle above the bound is written to the slot, so that the descriptor stays small; it comes back either way."""
    value = {"text": "x" * nbytes, "tensor": torch.arange(5), "array": np.arange(3)}
    encoded = Encoder().encode(value)
    assert encoded.pickled >= nbytes
    assert (len(encoded.template) < 1000) == (nbytes > INLINE_PICKLE)
    assert (encoded.nbytes > nbytes) == (nbytes > INLINE_PICKLE)
    assert_same(through(encoded), value)


@pytest.mark.parametrize("through", [view, copied])
def test_large_pickle_in_pieces(through: Any) -> None:
    """Large objects are written one after the other, without copies before; bytearrays and texts, too."""
    value = [b"a" * 100_000, "\N{SNOWMAN}" * 50_000, bytearray(b"b" * 70_000), list(range(30_000)), b"c" * 65_537, b""]
    encoded = Encoder().encode([*value, torch.arange(3)])
    assert encoded.pickled > 400_000
    assert_same(through(encoded), [*value, torch.arange(3)])


def test_leaves_lie_on_cache_lines_in_a_compact_slot() -> None:
    """Leaves are aligned to 64 bytes and do not overlap (the bytes around the slot stay as they were)."""
    value = [torch.zeros(3, dtype=torch.uint8), torch.ones(5), np.arange(3), torch.ones(1, dtype=torch.bfloat16)]
    encoded = Encoder().encode(value)
    assert encoded.nbytes == 4 * 64
    got = view(encoded)
    assert all(t.data_ptr() % 64 == 0 for t in got if isinstance(t, torch.Tensor))
    assert_same(got, value)


def test_same_shapes_make_the_same_template() -> None:
    """Two batches that differ only in content have the same template; another shape or dtype has another."""

    def template(*tensors: torch.Tensor) -> bytes:
        return Encoder().encode({"x": list(tensors), "name": "batch"}).template

    same = template(torch.zeros(3), torch.zeros(2, 2))
    assert template(torch.ones(3), torch.rand(2, 2)) == same
    assert template(torch.ones(3), torch.rand(4)) != same
    assert template(torch.ones(3, dtype=torch.int32), torch.rand(2, 2)) != same


def test_one_encoder_encodes_many_batches() -> None:
    """No part of a batch is left in the encoder for the next batch, also after a failure."""
    encoder = Encoder()
    first = encoder.encode([torch.zeros(3), torch.ones(2)])
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError), match=r"pickle|local"):
        encoder.encode([torch.zeros(1000), lambda: None])
    second = encoder.encode([torch.zeros(3), torch.ones(2)])
    assert (second.template, second.nbytes) == (first.template, first.nbytes)
