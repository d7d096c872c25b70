"""Batches collated in this process are torch's; large ones come in memory that is reused."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.data import default_collate
from torch.utils.data._utils import collate as torch_collate

from asyncloader.workers.ipc import inline_collate as module
from asyncloader.workers.ipc.inline_collate import Recycler, inline_collate


class Pair(NamedTuple):
    """A sample of a user's own named tuple type."""

    image: torch.Tensor
    label: int


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound that small tensors reach."""
    monkeypatch.setattr(module, "LARGE", 256)


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    "samples",
    [
        pytest.param([torch.arange(600.0).view(20, 30) + i for i in range(4)], id="plain"),
        pytest.param([torch.arange(600).view(20, 30) % 2 == i % 2 for i in range(4)], id="bool"),
        pytest.param([torch.full((40, 3), float(i), dtype=torch.bfloat16) for i in range(4)], id="bfloat16"),
        pytest.param([torch.arange(600.0).view(20, 30).T + i for i in range(4)], id="transposed"),
        pytest.param([torch.rand(8, 9, 3).permute(2, 0, 1) for _ in range(4)], id="channels last"),
        pytest.param([torch.rand(1, 20, 30) for _ in range(4)], id="one channel"),
        pytest.param([torch.rand(20, 30), torch.rand(20, 30).double()], id="promoted"),
        pytest.param([torch.rand(20, 30, requires_grad=True), torch.rand(20, 30)], id="gradient"),
        pytest.param([torch.zeros(20, 0) for _ in range(4)], id="empty"),
        pytest.param([torch.rand(1).expand(20, 30) for _ in range(4)], id="expanded"),
        pytest.param([torch.complex(torch.rand(40, 2), torch.rand(40, 2)).conj() for _ in range(4)], id="conjugate"),
        pytest.param([np.random.rand(20, 30) for _ in range(4)], id="arrays"),
        pytest.param([{"a": torch.rand(20, 30), "b": [i, "x"]} for i in range(4)], id="dict"),
        pytest.param([Pair(torch.rand(20, 30), i) for i in range(4)], id="named tuple"),
        pytest.param([1, 2, 3], id="ints"),
    ],
)
def test_batch_is_torchs(samples: list[Any]) -> None:
    """Values, dtypes, shapes, strides, gradients and containers are those of `default_collate`."""
    assert_same_batch(inline_collate()(samples), default_collate(samples))


SHAPES = [(), (0,), (1,), (5,), (1, 4), (3, 1), (2, 3, 4), (1, 3, 4), (1, 1, 1), (2, 3, 4, 5), (1, 3, 4, 5)]
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda array: array,
    "columns first": np.asfortranarray,
    "transposed": lambda array: array.T,
    "reversed": lambda array: array[::-1] if array.ndim else array,
    "every second": lambda array: np.repeat(array, 2, axis=0)[::2] if array.ndim else array,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i4", "i8", "u1", "u2", "?", "c8", ">f4", "S3", "U2", "O"])
def test_arrays_are_torchs(dtype: str, layout: str) -> None:
    """Arrays of all dtypes, shapes and layouts; errors, strides and the right to resize the batch included."""
    for shape, number in itertools.product(SHAPES, [1, 3]):
        arrays = [LAYOUTS[layout](np.arange(math.prod(shape)).reshape(shape).astype(dtype)) for _ in range(number)]
        assert outcome(inline_collate(), arrays) == outcome(default_collate, arrays), shape


@pytest.mark.parametrize(
    "samples",
    [
        *([1, 2, 3], [True, False], [1, True], [True, 1], [1, 2.0], [2.0, 1], [1.5, math.inf], [2**63 - 1, -(2**63)]),
        *(
            [2**63],
            [1, 2**70],
            [1, None],
            [1.0, None],
            [1, "a"],
            [1.0, "a"],
            [np.float64(1), 2.0],
            [2.0, np.float64(1)],
        ),
        *([1, np.int64(2)], [np.int64(1), 1], [1j, 2j], [np.zeros(2), np.zeros(3)], [np.zeros(2), np.zeros(2, "f4")]),
        *([np.zeros(2), [1, 2]], [np.zeros(2), torch.zeros(2)], [torch.zeros(2), np.zeros(2)]),
        *([np.ma.masked_array([1, 2])] * 2, [np.zeros((1, 2)), np.zeros((2, 1))], [np.zeros(2), np.zeros(2)[::-1]]),
        *([np.zeros((1, 2)), np.zeros((1, 2))[::-1]], [np.zeros(4096), np.zeros(4096)[::-1]], [np.ones(4096)] * 2),
    ],
    ids=repr,
)
def test_numbers_and_mixtures_are_torchs(samples: list[Any]) -> None:
    """What has not one plain type, shape and dtype is left to torch, and so are numbers beyond 64 bits."""
    assert outcome(inline_collate(), samples) == outcome(default_collate, samples)


@pytest.mark.parametrize("samples", [[1, 2], [1.5], [np.zeros(3)]], ids=repr)
def test_where_torch_would_make_the_batch(samples: list[Any]) -> None:
    """The default device, inference mode and fake tensors are respected."""
    with torch.device("meta"):
        assert inline_collate()(samples).device.type == "meta"
    with torch.inference_mode():
        assert inline_collate()(samples).is_inference()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(inline_collate()(samples), FakeTensor)


def outcome(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """Describe the batch, or the error."""
    try:
        batch = collate(samples)
    except Exception as error:
        return type(error), str(error)
    if not isinstance(batch, torch.Tensor):
        return batch
    storage = batch.untyped_storage()
    return batch.dtype, batch.shape, batch.stride(), storage.nbytes(), storage.resizable(), batch.tolist()


def assert_same_batch(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        assert got.requires_grad == expected.requires_grad
        assert got.stride() == expected.stride()
        assert torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key, value in expected.items():
            assert_same_batch(got[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for mine, torchs in zip(got, expected, strict=True):
            assert_same_batch(mine, torchs)
    else:
        assert got == expected


@pytest.mark.usefixtures("large")
def test_large_batches_share_two_pieces() -> None:
    """A consumer that holds one batch while the next is made gets two alternating addresses, for any number."""
    collate = inline_collate()
    seen, batch = set(), None
    for i in range(20):
        batch = collate([torch.full((20, 30), float(i + k)) for k in range(4)])
        assert batch[:, 0, 0].tolist() == [i, i + 1, i + 2, i + 3]
        seen.add(address(batch))
    assert len(seen) == 2


@pytest.mark.usefixtures("large")
def test_kept_batches_keep_their_content() -> None:
    """A consumer may keep all batches."""
    collate = inline_collate()
    kept = [collate([torch.full((20, 30), float(i))] * 4) for i in range(10)]
    assert [float(batch.mean()) for batch in kept] == list(range(10))


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    "samples",
    [
        pytest.param([torch.rand(20, 30), torch.rand(20, 31)], id="shapes"),
        pytest.param([torch.rand(20, 30).to_sparse()] * 2, id="sparse"),
        pytest.param([torch.rand(20, 30), 1], id="types"),
    ],
)
def test_errors_are_torchs(samples: list[Any]) -> None:
    """Samples that `default_collate` refuses are refused with its message."""
    with pytest.raises((RuntimeError, TypeError)) as torchs:
        default_collate(samples)
    with pytest.raises(torchs.type) as ours:
        inline_collate()(samples)
    assert str(ours.value) == str(torchs.value)


@pytest.mark.usefixtures("large")
def test_a_users_function_for_tensors_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that is registered in torch's map after the loader was made counts, too."""
    collate = inline_collate()
    monkeypatch.setitem(torch_collate.default_collate_fn_map, torch.Tensor, lambda batch, **_: len(batch))
    assert collate([torch.rand(20, 30)] * 3) == 3


# ------------------------------------------------------------------------------------------------ memory that is reused


def test_piece_comes_back_when_its_last_view_dies() -> None:
    """A slice keeps the block in use; once the slice is freed the same memory is used again."""
    recycler = Recycler()
    first = torch.frombuffer(recycler.take(8192), dtype=torch.uint8)
    place, view = address(first), first[10:20]
    del first
    second = torch.frombuffer(recycler.take(8192), dtype=torch.uint8)
    assert address(second) != place
    del view
    third = torch.frombuffer(recycler.take(8192), dtype=torch.uint8)
    assert address(third) == place
    assert address(second) != place


def test_pieces_of_another_size_are_not_kept_for_long() -> None:
    """Batches that grow do not leave their smaller predecessors behind."""
    recycler = Recycler()
    for pages in range(1, 20):
        recycler.take(4096 * pages)
    assert len(recycler._free) <= module._KEPT
    assert len(recycler._leases) <= 1


def test_views_outlive_their_recycler() -> None:
    """A batch that the consumer keeps stays valid after the loader was freed."""
    recycler = Recycler()
    kept = torch.frombuffer(recycler.take(4096), dtype=torch.uint8)
    kept.fill_(7)
    del recycler
    gc.collect()
    assert int(kept.sum()) == 7 * 4096
