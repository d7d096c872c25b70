from __future__ import annotations

import types
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from asyncloader.delivery.tensors import dense_parts, map_tensors, move, tensors_of

META = torch.device("meta")  # a device that every machine has, and that is not the CPU


def to_meta(batch: Any) -> Any:
    return move(batch, META, lambda tensor: tensor.to(META))


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Plain:
    x: torch.Tensor
    name: str = "plain"


@dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    inner: list[Any] = field(default_factory=list[Any])


@dataclass
class Unset:
    x: torch.Tensor
    later: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.undeclared = self.x + 1


class Attributes:
    """An object of a type that the loader does not know."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Movable:
    """Has a method `to` of its own."""

    def __init__(self, x: torch.Tensor, lengths: torch.Tensor) -> None:
        self.x = x
        self.lengths = lengths
        self.calls: list[dict[str, Any]] = []

    def to(self, device: torch.device, **options: Any) -> Movable:
        moved = Movable(self.x.to(device, **options), self.lengths)
        moved.calls = [{"device": device, **options}]
        return moved


class Narrow:
    """An object whose `to` takes a device and nothing else."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Narrow:
        return Narrow(self.x.to(device))


class Encoding(UserDict[str, Any]):
    """A mapping whose `to` changes itself, as in transformers."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Encoding:
        self.data = {
            name: value.to(device, non_blocking=non_blocking) if isinstance(value, torch.Tensor) else value
            for name, value in self.data.items()
        }
        return self


class Silent(UserDict[str, Any]):
    """Its `to` changes it and returns nothing."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> None:
        self["x"] = self["x"].to(device)


class FrozenMapping(Mapping[str, Any]):
    """Immutable, and made from a mapping."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


T = torch.arange(3)

CONTAINERS: dict[str, Any] = {
    "list": [T, 1],
    "tuple": (T, "a"),
    "named tuple": Pair(T, None),
    "dict": {"x": T, 3: "y"},
    "OrderedDict": OrderedDict([("b", 1), ("a", T)]),
    "defaultdict": defaultdict(list, {"x": T}),
    "deque": deque([T, 2], maxlen=5),
    "UserList": UserList([T]),
    "UserDict": UserDict({"x": T}),
    "mapping": FrozenMapping({"x": T}),
    "proxy": types.MappingProxyType({"x": T}),
    "dataclass": Plain(T),
    "frozen dataclass": Frozen(T, [T]),
    "nested": {"a": [Pair((T,), {"b": [Frozen(T)]})]},
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_comes_back_as_what_it_was(kind: str) -> None:
    """It has the same type, its tensors are on the device, all else is the same object; the original is unchanged."""
    batch = CONTAINERS[kind]
    moved = to_meta(batch)
    assert type(moved) is type(batch)
    assert moved is not batch
    found = tensors_of(moved)
    assert found
    assert all(tensor.device == META and tensor.shape == (3,) for tensor in found)
    assert all(tensor is T for tensor in tensors_of(batch))


def test_what_is_beside_the_tensors_is_kept() -> None:
    """Order of keys, default factories, bounds, and values that are no tensors."""
    moved = to_meta(CONTAINERS)
    assert list(moved["OrderedDict"]) == ["b", "a"]
    assert moved["defaultdict"]["new"] == []
    assert moved["deque"].maxlen == 5
    assert moved["dataclass"].name == "plain"
    assert (moved["dict"][3], moved["tuple"][1], moved["list"][1]) == ("y", "a", 1)


def test_one_tensor_in_two_places_is_one_afterwards() -> None:
    """It is copied once; so is a list that occurs twice."""
    shared = [T]
    copies: list[torch.Tensor] = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(tensor)
        return tensor.clone()

    moved = move({"a": T, "b": (T, shared), "c": shared}, torch.device("cpu"), copy)
    assert len(copies) == 1
    assert moved["a"] is moved["b"][0] is moved["b"][1][0]
    assert moved["c"] is moved["b"][1]


def test_objects_are_moved_by_their_own_method() -> None:
    """`to` is called with ``non_blocking=True`` if it takes that; tensors that it leaves on the CPU stay there."""
    moved = to_meta([Movable(T, T), Narrow(T)])
    assert moved[0].calls == [{"device": META, "non_blocking": True}]
    assert moved[0].x.device == META
    assert moved[0].lengths is T
    assert moved[1].x.device == META


@pytest.mark.parametrize("kind", [Encoding, Silent])
def test_objects_that_change_themselves(kind: Any) -> None:
    """The object itself is delivered, whatever its method returns."""
    batch = kind({"x": T, "ids": [1, 2]})
    moved = to_meta(batch)
    assert moved is batch
    assert moved["x"].device == META
    assert moved["ids"] == [1, 2]


def test_an_error_of_the_method_is_raised() -> None:
    """A TypeError from inside a user's `to` is not taken for a sign that it accepts fewer arguments."""

    class Broken:
        def to(self, device: torch.device, **options: Any) -> Any:
            raise TypeError("no such field")

    with pytest.raises(TypeError, match="no such field"):
        to_meta({"x": Broken()})


@pytest.mark.parametrize("there", [False, True], ids=["moved", "there already"])
def test_a_packed_sequence_keeps_its_lengths_on_the_cpu(there: bool) -> None:
    """torch demands it, also where the sequence's `to` has nothing to do."""
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    batch_sizes = packed.batch_sizes
    moved = to_meta(to_meta(packed) if there else packed)
    assert isinstance(moved, PackedSequence)
    assert moved.data.device == META
    assert moved.batch_sizes.tolist() == batch_sizes.tolist() == [2, 2, 1]


def test_attributes_are_found_and_replaced() -> None:
    """They are needed for `record_stream` and static tensors; `move` leaves them alone, as torch's pinning does."""
    inner = Attributes(x=T + 1, name="inner")
    batch = Attributes(inner=inner, parts=[Plain(T + 2)], unset=Unset(T + 3))
    assert to_meta(batch) is batch
    assert sorted(int(tensor[0]) for tensor in tensors_of(batch)) == [1, 2, 3, 4]
    mapped = map_tensors(batch, lambda tensor: tensor * 10)
    assert mapped is not batch
    assert (mapped.inner.name, mapped.inner.x.tolist()) == ("inner", [10, 20, 30])
    assert mapped.parts[0].x.tolist() == [20, 30, 40]
    assert mapped.unset.undeclared.tolist() == [40, 50, 60]
    assert batch.inner is inner
    assert inner.x.tolist() == [1, 2, 3]


def test_circles_come_to_an_end() -> None:
    """Objects refer to each other: every tensor is found once, and moved."""
    parent, child = Attributes(x=T + 1), Attributes(x=T + 2)
    parent.child, child.parent = child, parent  # type: ignore[attr-defined]
    assert [int(tensor[0]) for tensor in tensors_of(parent)] == [1, 2]
    ring: list[Any] = [T]
    ring.append(ring)
    moved = to_meta(ring)
    assert moved[0].device == META
    assert moved[1] is ring


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
def test_the_parts_of_tensors_that_are_not_dense() -> None:
    """They are the tensors that hold the elements of sparse and nested tensors, each of them dense."""
    dense = torch.eye(4)
    for tensor, count in (
        (dense, 1),
        (dense.to_sparse(), 2),
        (dense.to_sparse_csr(), 3),
        (dense.to_sparse_csc(), 3),
        (dense.to_sparse_bsr((2, 2)), 3),
        (dense.to_sparse_bsc((2, 2)), 3),
    ):
        parts = dense_parts(tensor)
        assert len(parts) == count
        assert all(part.layout is torch.strided for part in parts)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert [part.numel() for part in dense_parts(nested)][:2] == [5, 3]
    assert all(type(part) is torch.Tensor for part in dense_parts(nested))


@pytest.mark.parametrize("view", [torch.conj, lambda x: x.conj().imag, lambda x: x[:1].conj().imag])
def test_parts_have_no_conjugate_or_negative_bit(view: Any) -> None:
    """They are the same memory: `record_stream` of a tensor with such a bit would apply to a computed copy."""
    tensor = view(torch.tensor([1 + 2j, 3 - 4j]))
    assert tensor.is_conj() or tensor.is_neg()
    (part,) = dense_parts(tensor)
    assert not part.is_conj()
    assert not part.is_neg()
    assert part.data_ptr() == tensor.data_ptr()
