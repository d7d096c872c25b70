from __future__ import annotations

import enum
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from asyncloader.workers.fetch.setup import install_worker_info
from asyncloader.workers.ipc.codec import Encoder
from asyncloader.workers.ipc.collate import Collator, use_private_memory
from tests.helpers.comparing import assert_same
from tests.unit.workers.ipc.through_memory import view


class Point(NamedTuple):
    x: Any
    y: Any


class Level(enum.IntEnum):
    LOW = 1


class Strict(dict[str, Any]):
    """A user's mapping that checks its values."""

    def __setitem__(self, key: str, value: Any) -> None:
        assert value.ndim >= 1
        super().__setitem__(key, value)

    def update(self, other: Any, /) -> None:  # type: ignore[override]
        for key, value in other.items():
            self[key] = value


class Polar:
    """A user's sample type with a registered collate function."""

    def __init__(self, radius: torch.Tensor) -> None:
        self.radius = radius


def collate_polar(batch: Sequence[Polar], *, collate_fn_map: Any = None) -> torch.Tensor:
    radii = torch_collate.collate([p.radius for p in batch], collate_fn_map=collate_fn_map)
    return radii.sum(0)  # type: ignore[no-any-return]


@pytest.fixture
def torch_map() -> Iterator[dict[Any, Any]]:
    """torch's table of collate functions, restored afterwards."""
    before = dict(torch_collate.default_collate_fn_map)
    yield torch_collate.default_collate_fn_map
    torch_collate.default_collate_fn_map.clear()
    torch_collate.default_collate_fn_map.update(before)


@pytest.fixture(autouse=True)
def in_a_worker() -> Iterator[None]:
    install_worker_info(0, 1, 0, None)
    yield
    torch_worker._worker_info = None


def ours(samples: Sequence[Any]) -> Any:
    return view(Collator(Encoder()).collate(samples))


class Tagged(torch.Tensor):
    pass


class Careful(np.ndarray[Any, np.dtype[Any]]):
    """Refuses `out=`, as arrays with units do: they only write to memory of their own."""

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("out") is not None:
            raise TypeError("no out=, please")
        return super().__array_function__(func, types, args, kwargs)


class Doubling(np.ndarray[Any, np.dtype[Any]]):
    """Gives `concatenate` a meaning of its own."""

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        made = super().__array_function__(func, types, args, kwargs)
        return made * 2 if func is np.concatenate else made


SAMPLES: dict[str, list[Any]] = {
    "tensor, then subclass": [torch.ones(2), torch.zeros(2).as_subclass(Tagged)],
    "subclass, then tensor": [torch.ones(2).as_subclass(Tagged), torch.zeros(2)],
    "subclass, then another dtype": [torch.ones(2).as_subclass(Tagged), torch.zeros(2, dtype=torch.float64)],
    "tensor, then subclass of another dtype": [torch.ones(2), torch.zeros(2, dtype=torch.int64).as_subclass(Tagged)],
    "channels-last subclass": [torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last).as_subclass(Tagged)] * 2,
    "tensor, then frozen parameter": [torch.ones(2), torch.nn.Parameter(torch.zeros(2), requires_grad=False)],
    "array, then tensor": [np.ones(2), torch.zeros(2)],
    "array, then subclass": [np.ones(2), np.zeros(2).view(Careful)],
    "arrays that refuse out=": [np.ones(2).view(Careful), np.zeros(2).view(Careful)],
    "arrays that concatenate otherwise": [np.ones(2).view(Doubling), np.ones(2).view(Doubling)],
    "masked arrays": [np.ma.masked_array([1, 2], [True, False]), np.ma.masked_array([3, 4], [False, True])],
    "records": [np.ones(2).view(np.recarray), np.zeros(2).view(np.recarray)],
    "tensors": [torch.zeros(2, 3), torch.ones(2, 3)],
    "transposed": [torch.arange(6).view(2, 3).t()] * 2,
    "scalars": [torch.tensor(1), torch.tensor(2)],
    "bfloat16": [torch.ones(3, dtype=torch.bfloat16)] * 2,
    "float32 before float64": [torch.ones(2), torch.ones(2, dtype=torch.float64)],
    "float tensor before int": [torch.ones(2), torch.ones(2, dtype=torch.int64)],
    "empty tensors": [torch.empty(0, 3)] * 3,
    "arrays": [np.arange(3.0), np.ones(3)],
    "fortran arrays": [np.asfortranarray(np.arange(6).reshape(2, 3))] * 2,
    "array scalars": [np.array(3), np.array(4)],
    "mixed arrays": [np.zeros(2, dtype="f4"), np.zeros(2, dtype="f8")],
    "array and tensor": [np.zeros(2), torch.ones(2, dtype=torch.float64)],
    "numpy numbers": [np.float32(1.5), np.float32(2)],
    "numpy bools": [np.bool_(True), np.bool_(False)],
    "ints": [1, -2, 3],
    "bools": [True, False],
    "bool before int": [True, 2],
    "int before bool": [2, True],
    "floats": [0.5, float("inf")],
    "float before int": [0.5, 2],
    "int before float": [2, 0.5],
    "enums": [Level.LOW, Level.LOW],
    "texts": ["a", "b"],
    "bytes": [b"a", b"b"],
    "mixed texts": ["a", b"b"],
    "tuples": [(1, torch.zeros(2), "a"), (2, torch.ones(2), "b")],
    "lists": [[1, 2], [3, 4]],
    "points": [Point(torch.zeros(2), 1), Point(torch.ones(2), 2)],
    "dicts": [{"a": 1, "b": {"c": [torch.zeros(1)]}}, {"a": 2, "b": {"c": [torch.ones(1)]}}],
    "ordered": [OrderedDict(b=1, a=2)] * 2,
    "default": [defaultdict(list, a=1.0)] * 2,
    "user dict": [UserDict(a=torch.zeros(2)), UserDict(a=torch.ones(2))],
    "mixed in a user dict": [UserDict(a=torch.zeros(2)), UserDict(a=torch.ones(2, dtype=torch.float64))],
    "mixed empty tensors": [torch.empty(0), torch.empty(0, dtype=torch.float64)],
    "strict mapping": [Strict(a=torch.zeros(2)), Strict(a=torch.ones(2))],
    "nothing inside": [{}, {}],
    "empty tuples": [(), ()],
    "one sample": [torch.arange(3)],
    "sparse": [torch.eye(2).to_sparse()] * 2,
}


@pytest.mark.parametrize("kind", [kind for kind in SAMPLES if kind != "sparse"])
def test_batch_is_torchs(kind: str) -> None:
    """Values, dtypes, shapes and container types are those of torch's default_collate in a worker."""
    got, expected = ours(SAMPLES[kind]), default_collate(SAMPLES[kind])
    assert_same(got, expected)
    if isinstance(expected, torch.Tensor):
        assert got.stride() == expected.stride()


FAULTS: dict[str, list[Any]] = {
    "none": [None, None],
    "object": [object(), object()],
    "set": [{1}, {2}],
    "text array": [np.array(["a"])] * 2,
    "object array": [np.array([{}])] * 2,
    "unequal lengths": [[1, 2], [3]],
    "missing key": [{"a": 1}, {"b": 1}],
    "int and text": [1, "a"],
    "float and none": [1.5, None],
    "int and list": [1, [2]],
    "too large": [1, 1 << 70],
    "empty batch": [],
    "sparse": SAMPLES["sparse"],
    "big endian": [np.zeros(2, dtype=">f4")] * 2,
}


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_are_told_in_torchs_words(kind: str) -> None:
    """Samples that torch cannot collate are refused with torch's type and message."""
    with pytest.raises(Exception) as theirs:
        default_collate(FAULTS[kind])
    with pytest.raises(theirs.type) as mine:
        ours(FAULTS[kind])
    assert str(mine.value) == str(theirs.value)


def test_plain_batches_are_written_once_and_straight() -> None:
    """Tensors and numbers of any structure are sent as leaves: no part of them is in the pickle."""
    samples = [{"image": torch.zeros(1000), "label": 7, "score": 0.5, "array": np.zeros(100)}] * 8
    encoded = Collator(Encoder()).collate(samples)
    assert encoded.nbytes == 8 * 4000 + 64 + 64 + 8 * 800
    assert encoded.pickled < 200


def test_samples_are_read_when_the_batch_is_written() -> None:
    """Samples are stacked at the slot, without a copy before."""
    sample = torch.zeros(3)
    encoded = Collator(Encoder()).collate([sample, sample])
    sample.fill_(5)
    assert view(encoded).tolist() == [[5.0] * 3] * 2


def test_registered_type_is_respected(torch_map: dict[Any, Any]) -> None:
    """A user's function for a type of their own is called, and may collate parts and look at the result."""
    torch_map[Polar] = collate_polar
    samples = [Polar(torch.ones(2)), Polar(torch.full((2,), 3.0))]
    assert ours(samples).tolist() == [4.0, 4.0]
    assert ours([{"p": sample} for sample in samples])["p"].tolist() == [4.0, 4.0]


def test_samples_that_require_grad() -> None:
    """Samples that require gradients are stacked as values."""
    batch = ours([torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)])
    assert batch.tolist() == [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason="this torch does not have the dtype")
def test_dtype_without_a_code() -> None:
    """A dtype that cannot be a leaf is collated by torch and pickled by its rules."""
    sample = torch.arange(2, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert ours([sample, sample]).view(torch.uint8).tolist() == [[0, 1]] * 2


def test_a_failed_batch_leaves_nothing_for_the_next() -> None:
    """Leaves of a refused batch are forgotten."""
    collator = Collator(Encoder())
    with pytest.raises(TypeError):
        collator.collate([(torch.zeros(1000), None)] * 2)
    encoded = collator.collate([1, 2])
    assert encoded.nbytes == 64
    assert view(encoded).tolist() == [1, 2]


def test_private_memory_replaces_torchs_shared_one(torch_map: dict[Any, Any]) -> None:
    """In our workers default_collate takes no shared memory, and gives the same values."""
    assert default_collate([torch.ones(2)] * 2).is_shared()
    use_private_memory()
    batch = default_collate([torch.ones(2)] * 2)
    assert not batch.is_shared()
    assert batch.tolist() == [[1.0, 1.0]] * 2
    mixed = default_collate([torch.ones(2), torch.ones(2, dtype=torch.float64)])
    assert mixed.dtype is torch.float32  # the first sample's, as in torch's workers
    with pytest.raises(RuntimeError, match="sparse"):
        default_collate(SAMPLES["sparse"])


def test_private_memory_leaves_a_users_function_alone(torch_map: dict[Any, Any]) -> None:
    """A user's own function for tensors stays in place."""

    def mine(batch: Any, **_: Any) -> str:
        return "mine"

    torch_map[torch.Tensor] = mine
    use_private_memory()
    assert torch_map[torch.Tensor] is mine
