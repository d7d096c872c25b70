from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from asyncloader.delivery.tensors import MOST_SETS, StaticTensors, tensors_of


def fill(static: StaticTensors, batch: Any) -> Any:
    return static.fill(batch, tensors_of(batch))


def addresses(batch: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors_of(batch)]


def test_batches_of_one_shape_lie_in_the_same_tensors() -> None:
    """They are the very same objects; the content and the structure are each batch's own."""
    static = StaticTensors()
    first = fill(static, {"x": torch.arange(4), "y": [torch.zeros(2, 3)], "name": "a"})
    kept = tensors_of(first)
    for number in range(1, 4):
        batch = {"x": torch.arange(4) + number, "y": [torch.full((2, 3), float(number))], "name": "b"}
        filled = fill(static, batch)
        assert all(a is b for a, b in zip(tensors_of(filled), kept, strict=True))
        assert filled["x"].tolist() == [number, number + 1, number + 2, number + 3]
        assert filled["y"][0].tolist() == [[float(number)] * 3] * 2
        assert filled["name"] == "b"
        assert batch["x"] is not filled["x"]


def test_they_are_not_the_batchs_own() -> None:
    """The batch's memory belongs to the side stream, and is freed with the batch."""
    batch = torch.arange(4)
    filled = fill(StaticTensors(), batch)
    assert filled.data_ptr() != batch.data_ptr()
    gone = weakref.ref(batch)
    del batch
    gc.collect()
    assert gone() is None
    assert filled.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(3, 4),
        torch.zeros(4, 3, dtype=torch.float64),
        torch.zeros(3, 4).t(),
        [torch.zeros(4, 3), torch.zeros(4, 3)],
    ],
    ids=["shape", "dtype", "strides", "number"],
)
def test_each_combination_has_its_own(other: Any) -> None:
    """An epoch's short last batch takes nothing from the full ones, and gets its own tensors again."""
    static = StaticTensors()
    usual = addresses(fill(static, torch.zeros(4, 3)))
    unusual = addresses(fill(static, other))
    assert not set(usual) & set(unusual)
    assert addresses(fill(static, torch.ones(4, 3))) == usual
    assert addresses(fill(static, other)) == unusual


def test_memory_format_is_kept() -> None:
    """channels_last stays: a graph was captured with these strides."""
    static = StaticTensors()
    for _ in range(2):
        batch = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
        filled = fill(static, batch)
        assert filled.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(filled, batch)


def test_one_tensor_that_occurs_twice() -> None:
    """It is replaced by one static tensor both times."""
    static = StaticTensors()
    for number in range(2):
        shared = torch.full((3,), number)
        filled = fill(static, [shared, {"again": shared}])
        assert filled[0] is filled[1]["again"]
        assert filled[0].tolist() == [number] * 3


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
def test_what_has_no_fixed_place_is_delivered_as_it_is() -> None:
    """Sparse and nested tensors are delivered themselves, beside dense tensors that are replaced."""
    static = StaticTensors()
    for layout in (torch.jagged, torch.strided):
        batch = [torch.eye(3).to_sparse(), torch.nested.nested_tensor([torch.ones(2)], layout=layout), torch.ones(3)]
        filled = fill(static, batch)
        assert filled[0] is batch[0]
        assert filled[1] is batch[1]
        assert filled[2] is not batch[2]


def test_validation_and_training_share_them() -> None:
    """Tensors that were made in inference mode could not be written to outside of it, nor used by autograd."""
    static = StaticTensors()
    with torch.inference_mode():
        first = fill(static, torch.zeros(3))
    second = fill(static, torch.ones(3))
    assert second is first
    assert not second.is_inference()
    weight = torch.ones(3, requires_grad=True)
    (weight * second).sum().backward()
    with torch.inference_mode():
        assert fill(static, torch.full((3,), 2.0)) is first
    assert first.tolist() == [2.0] * 3


def test_there_are_so_many_sets_and_no_more() -> None:
    """The first shapes keep their sets, since graphs may read there; other shapes are delivered as they are, with
    one warning.
    """
    static = StaticTensors()
    shapes = range(1, MOST_SETS + 1)
    kept = {size: addresses(fill(static, torch.zeros(size))) for size in shapes}
    others = [torch.full((size,), 7.0) for size in (1000, 1001, 1000)]
    with pytest.warns(RuntimeWarning, match="more than 32 combinations of shapes"):
        assert fill(static, others[0]) is others[0]
    assert all(fill(static, other) is other for other in others)  # a second warning would be an error here
    assert {size: addresses(fill(static, torch.ones(size))) for size in shapes} == kept
