"""Samples of every type that users have, two of each, for the test of custom types."""

# ruff: noqa: PLW0108 - a table of functions of one shape

from __future__ import annotations

import datetime as dt
import decimal
import enum
import fractions
import pathlib
import uuid
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pack_sequence


class Point(NamedTuple):
    x: Any
    y: Any = "default"


@dataclass
class Record:
    image: torch.Tensor
    label: int
    tags: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class Frozen:
    value: Any


class Tags(dict[str, Any]):
    """A dictionary with an attribute."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.origin = "tags"


class Row(list[Any]):
    """A list with an attribute."""

    origin = "row"


class Triple(tuple[Any, ...]):
    __slots__ = ()


class Lookup(Mapping[str, Any]):
    """A mapping that is no dict."""

    def __init__(self, values: Any) -> None:
        self.values_ = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self.values_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


class Series(Sequence[Any]):
    """A sequence that is no list."""

    def __init__(self, values: Any) -> None:
        self.values = list(values)

    def __getitem__(self, index: Any) -> Any:
        return self.values[index]

    def __len__(self) -> int:
        return len(self.values)


class Colour(enum.IntEnum):
    RED = 1
    BLUE = 2


class Kind(enum.Enum):
    CAT = "cat"
    DOG = "dog"


class Text(str):
    __slots__ = ()


class Number(int):
    pass


class Named(torch.Tensor):
    """A user's own tensor class."""


class SimpleBatch:
    """A user's batch with a method `pin_memory`."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples
        self.pinned = False

    def pin_memory(self) -> SimpleBatch:
        self.pinned = True
        return self


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: Any) -> None:
        self.a = a

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slotted) and self.a == other.a and not hasattr(other, "b")

    __hash__ = None  # type: ignore[assignment]


class Reduced:
    """An object with its own pickle rule."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return Reduced, (self.value,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reduced) and torch.equal(self.value, other.value)

    __hash__ = None  # type: ignore[assignment]


def _tagged(i: int) -> torch.Tensor:
    tensor = torch.full((2,), float(i))
    tensor.tag = f"tag {i}"  # type: ignore[attr-defined]
    return tensor


def _recursive(i: int) -> list[Any]:
    same = torch.full((2,), i)
    return [same, same, {"again": same}]


def _record_array(i: int) -> Any:
    return np.rec.array([(i, 0.5)], dtype=[("a", "i4"), ("b", "f8")])


_FLOATS = torch.arange(24, dtype=torch.float32)
_INTEGERS = ["bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"]
_FLOATING = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"]


def _of_dtype(name: str) -> Callable[[int], Any]:
    return lambda i: torch.tensor([0, 1, i], dtype=torch.float32).to(getattr(torch, name))


def _scalar(name: str) -> Callable[[int], Any]:
    return lambda i: np.dtype(name).type(i)


SAMPLES: dict[str, Callable[[int], Any]] = {
    # containers
    "named tuple": lambda i: Point(torch.tensor([i]), i),
    "named tuple with default": lambda i: Point(float(i)),
    "nested named tuple": lambda i: Point(Point(i, i), [Point(i, "s")]),
    "dataclass": lambda i: Record(torch.full((2, 2), i), i, [f"t{i}"]),
    "frozen dataclass": lambda i: Frozen({"v": torch.tensor(i)}),
    "dict": lambda i: {"a": i, "b": {"c": torch.tensor(i)}},
    "dict subclass": lambda i: Tags(a=i, b=torch.tensor(i)),
    "ordered dict": lambda i: OrderedDict(z=i, a=i),
    "default dict": lambda i: defaultdict(list, {"a": torch.tensor([i])}),
    "user dict": lambda i: UserDict({"a": i}),
    "counter": lambda i: Counter(a=i + 1, b=2),
    "chain map": lambda i: ChainMap({"a": i}, {"b": 2}),
    "mapping": lambda i: Lookup({"a": i, "t": torch.tensor(i)}),
    "dict of other keys": lambda i: {0: i, (1, "x"): i, None: i},
    "list": lambda i: [i, float(i), "s"],
    "list subclass": lambda i: Row([i, torch.tensor(i)]),
    "user list": lambda i: UserList([i, i + 1]),
    "tuple": lambda i: (i, (i, (torch.tensor(i),))),
    "tuple subclass": lambda i: Triple((i, i)),
    "deque": lambda i: deque([i, i]),
    "sequence": lambda i: Series([i, torch.tensor(i)]),
    "range": lambda i: range(i, i + 3),
    "set": lambda i: {i, "a"},
    "frozen set": lambda i: frozenset({i}),
    "empty list": lambda i: [],
    "empty dict": lambda i: {},
    "empty tuple": lambda i: (),
    "shared inside": _recursive,
    # objects
    "with pin_memory": lambda i: SimpleBatch([torch.full((3,), i)]),
    "slots": lambda i: Slotted(i),
    "own pickle rule": lambda i: Reduced(torch.full((2,), i)),
    "namespace": lambda i: SimpleNamespace(x=torch.tensor(i)),
    "none": lambda i: None,
    "ellipsis": lambda i: ...,
    "enum": lambda i: [Kind.CAT, Kind.DOG][i % 2],
    "int enum": lambda i: [Colour.RED, Colour.BLUE][i % 2],
    "date": lambda i: dt.datetime(2024, 5, 6 + i % 2, tzinfo=dt.UTC),
    "path": lambda i: pathlib.PurePosixPath("a") / str(i),
    "fraction": lambda i: fractions.Fraction(i, 7),
    "decimal": lambda i: decimal.Decimal(i) / 8,
    "uuid": lambda i: uuid.UUID(int=i),
    "function": lambda i: same_stride,
    "class": lambda i: Point,
    "device": lambda i: torch.device("cpu"),
    "dtype": lambda i: torch.bfloat16,
    "size": lambda i: torch.Size([i, 2]),
    # numbers and text
    "int": lambda i: i,
    "big int": lambda i: i + (1 << 62),
    "huge int": lambda i: i + (1 << 70),
    "negative int": lambda i: -i,
    "int subclass": lambda i: Number(i),
    "bool": lambda i: i % 2 == 0,
    "float": lambda i: i / 3,
    "special floats": lambda i: [float("nan"), float("-inf"), -0.0],
    "complex": lambda i: complex(i, -1),
    "str": lambda i: "ä" * i + "\0\n",
    "str subclass": lambda i: Text(f"text {i}"),
    "surrogate": lambda i: "\ud800",
    "empty str": lambda i: "",
    "bytes": lambda i: bytes([i % 256, 0]),
    "bytearray": lambda i: bytearray([i % 256]),
    "long bytes": lambda i: bytes([i % 256]) * 5000,
    # numpy
    **{
        f"np.{name}": _scalar(name)
        for name in ["float16", "float32", "float64", "int8", "uint8", "int64", "uint32", "complex64", "bool"]
    },
    "np.datetime64": lambda i: np.datetime64("2024-05-06") + i,
    "np.str_": lambda i: np.str_(f"s{i}"),
    "np.bytes_": lambda i: np.bytes_(b"b"),
    "array": lambda i: np.full((2, 3), i, np.float32),
    "0-d array": lambda i: np.array(i),
    "empty array": lambda i: np.zeros((0, 3), np.int16),
    "uint16 array": lambda i: np.full(3, i, np.uint16),
    "bool array": lambda i: np.array([True, i % 2 == 0]),
    "Fortran array": lambda i: np.asfortranarray(np.full((2, 3), i)),
    "strided array": lambda i: np.arange(12)[::3] + i,
    "reversed array": lambda i: np.arange(4)[::-1],
    "read-only array": lambda i: np.broadcast_to(np.float32(i), (2, 2)),
    "big-endian array": lambda i: np.arange(3, dtype=">i4") + i,
    "structured array": lambda i: np.array([(i, 1.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "record array": _record_array,
    "object array": lambda i: np.array([None, {"k": i}, "s"], dtype=object),
    "string array": lambda i: np.array(["ab", f"c{i}"]),
    "masked array": lambda i: np.ma.masked_array([1, i], mask=[False, True]),
    "matrix": lambda i: np.asmatrix([[i, 1], [2, 3]]),
    # tensors
    **{f"torch.{name}": _of_dtype(name) for name in [*_INTEGERS, *_FLOATING]},
    "0-d tensor": lambda i: torch.tensor(i),
    "empty tensor": lambda i: torch.empty(0),
    "empty in the middle": lambda i: torch.empty(3, 0, 2, dtype=torch.int32),
    "transposed": lambda i: (_FLOATS + i).reshape(4, 6).t(),
    "every other": lambda i: (_FLOATS + i)[1::2],
    "offset": lambda i: (_FLOATS + i)[20:],
    "expanded": lambda i: torch.tensor([i, 1]).expand(3, 2),
    "broadcast": lambda i: torch.tensor(float(i)).expand(2, 2),
    "overlapping": lambda i: (_FLOATS + i).as_strided((3, 4), (2, 1), 1),
    "channels last": lambda i: (_FLOATS + i).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "conjugate": lambda i: torch.tensor([complex(i, 1)]).conj(),
    "negated view": lambda i: torch.tensor([complex(i, 1)]).conj().imag,
    "real view": lambda i: torch.tensor([complex(i, 1)] * 2).real,
    "from numpy": lambda i: torch.from_numpy(np.arange(3.0) + i),
    "parameter": lambda i: torch.nn.Parameter(torch.full((2,), float(i))),
    "needs gradient": lambda i: torch.full((2,), float(i), requires_grad=True),
    "tensor subclass": lambda i: torch.full((2,), float(i)).as_subclass(Named),
    "tensor with attribute": _tagged,
    "shared memory": lambda i: torch.full((2,), i).share_memory_(),
    "storage": lambda i: torch.full((3,), i, dtype=torch.uint8).untyped_storage(),
    "sparse": lambda i: torch.eye(3).mul(i).to_sparse(),
    "uncoalesced": lambda i: torch.sparse_coo_tensor(
        torch.tensor([[0, 0]]), torch.tensor([1.0, float(i)]), (3,), check_invariants=True
    ),
    "hybrid sparse": lambda i: torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]), torch.full((2, 2), i), (3, 2), check_invariants=True
    ),
    "csr": lambda i: torch.eye(3).mul(i).to_sparse_csr(),
    "csc": lambda i: torch.eye(3).mul(i).to_sparse_csc(),
    "bsr": lambda i: torch.eye(4).mul(i + 1).to_sparse_bsr((2, 2)),
    "quantized": lambda i: torch.quantize_per_tensor(torch.arange(4.0) + i, 0.5, 2, torch.qint8),
    "quantized by channel": lambda i: torch.quantize_per_channel(
        torch.ones(2, 3) * i, torch.tensor([0.5, 1.0]), torch.tensor([0, 1]), 0, torch.quint8
    ),
    "nested": lambda i: torch.nested.nested_tensor([torch.full((2,), float(i)), torch.ones(3)]),
    "jagged": lambda i: torch.nested.nested_tensor(
        [torch.full((2, 2), float(i)), torch.ones(1, 2)], layout=torch.jagged
    ),
    "packed": lambda i: pack_sequence([torch.full((3,), i), torch.ones(2)], enforce_sorted=True),
}


class Everything(torch.utils.data.Dataset[Any]):
    """A dataset in which indices ``2 * n`` and ``2 * n + 1`` are two samples of the `n`-th type."""

    def __init__(self) -> None:
        self.names = [*SAMPLES]

    def __len__(self) -> int:
        return 2 * len(self.names)

    def __getitem__(self, index: int) -> Any:
        return SAMPLES[self.names[index // 2]](index % 7)


def same_stride(a: Any, b: Any) -> bool:
    """Whether all strided tensors in two equal structures have the same strides."""
    if isinstance(a, torch.Tensor):
        return a.layout is not torch.strided or a.is_nested or a.stride() == b.stride()
    if isinstance(a, Mapping):
        return all(same_stride(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return all(same_stride(x, y) for x, y in zip(a, b, strict=True))
    return True
