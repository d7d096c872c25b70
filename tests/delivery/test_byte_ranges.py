from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncloader.delivery.transfer import JOINED_BYTES, copy_ranges


class Copier:
    """Copies as torch does, and records the size of each copy in bytes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
        self.sizes.append(tensor.nbytes)
        return tensor.clone()


def check(tensors: list[torch.Tensor], slot: torch.Tensor | None = None) -> list[int]:
    """Check that every tensor has an equal copy in other memory. Returns the sizes of the ranges copied."""
    copier = Copier()
    copies = copy_ranges(tensors, slot, copier)
    for tensor in tensors:
        copy = copies[id(tensor)]
        assert torch.equal(copy, tensor)
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    return copier.sizes


def leaves(slot: torch.Tensor, *ranges: tuple[int, torch.dtype, int]) -> list[torch.Tensor]:
    """Make tensors with these numbers of elements at offsets of a slot, each with its own storage, as in a batch."""
    return [
        torch.frombuffer(slot.numpy().data, dtype=dtype, count=count, offset=offset) for offset, dtype, count in ranges
    ]


def new_slot(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 100, (nbytes,), dtype=torch.uint8)


def test_small_neighbours_are_copied_together() -> None:
    """They are one copy, whatever their number, types and order."""
    slot = new_slot(4096)
    batch = leaves(slot, (128, torch.int64, 8), (0, torch.uint8, 100), (1024, torch.int16, 5), (256, torch.float32, 7))
    assert check(batch, slot) == [1034]


def test_large_ones_keep_memory_of_their_own() -> None:
    """A small tensor that is kept does not keep large tensors alive, nor more small ones than fit a bound."""
    slot = new_slot(6 * JOINED_BYTES)
    large = (1024, torch.uint8, 2 * JOINED_BYTES)
    small = [(0, torch.uint8, 10), (64, torch.uint8, 10), (3 * JOINED_BYTES, torch.uint8, 10)]
    assert check(leaves(slot, *small, large), slot) == [74, 2 * JOINED_BYTES, 10]
    many = [(index * 65536, torch.uint8, 65536) for index in range(40)]
    assert check(leaves(slot, *many), slot) == [JOINED_BYTES, JOINED_BYTES, JOINED_BYTES // 2]


WITH_GAPS: dict[str, Any] = {
    "gaps": lambda x: x[:, ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 1000)[0:1],
    "expanded rows": lambda x: x[0].expand(50, -1),
    "transposed part": lambda x: x.t()[1:],
    "overlapping": lambda x: x.view(-1).as_strided((5, 4), (2, 1), 3),
}


@pytest.mark.parametrize("name", WITH_GAPS)
@pytest.mark.parametrize("in_slot", [False, True])
def test_what_is_not_dense_is_copied_once_and_viewed(name: str, in_slot: bool) -> None:
    """The view keeps its strides: no dense copy is made in ordinary memory, however small the range or however often
    its elements are seen.
    """
    slot = new_slot(1024)
    (whole,) = leaves(slot, (64, torch.int32, 60))
    view = WITH_GAPS[name](whole.view(6, 10))
    copier = Copier()
    copies = copy_ranges([view], slot if in_slot else None, copier)
    assert torch.equal(copies[id(view)], view)
    assert copies[id(view)].stride() == view.stride()
    assert len(copier.sizes) == 1
    assert copier.sizes[0] <= whole.nbytes


def test_views_of_one_storage_stay_views_of_one() -> None:
    """Also outside of a slot: the range that they cover is copied once."""
    whole = torch.arange(100)
    first, second = whole[:60], whole[40:]
    copies = copy_ranges([first, second], None, Copier())
    assert check([first, second]) == [800]
    copies[id(first)][50] = -1
    assert copies[id(second)][10] == -1


def test_a_view_within_another_is_in_its_copy() -> None:
    """The copied range ends where the longer tensor does, whichever tensor begins last."""
    whole = torch.arange(100)
    assert check([whole, whole[10:20], whole[90:]]) == [800]
    assert check([whole[10:20], whole]) == [800]


def test_a_few_elements_of_much_memory_are_gathered() -> None:
    """The column belongs to a large table outside the batch: the table stays where it is."""
    table = torch.arange(100_000).view(1000, 100)
    assert check([table[:, 3]]) == [8000]


def test_what_is_no_plain_tensor_is_left_out() -> None:
    """Such tensors are copied without being joined."""
    others = [
        torch.eye(3).to_sparse(),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3, requires_grad=True),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.empty(0, 3),
        torch.empty(3, device="meta"),
    ]
    assert copy_ranges(others, new_slot(64), Copier()) == {}
