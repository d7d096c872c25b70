from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset, default_collate

from asyncloader.shared.share import share

ARRAYS = {
    "rows": np.arange(12.0).reshape(3, 4),
    "other order": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "strided": np.arange(20)[::3],
    "no dimension": np.array(3.5),
    "empty": np.zeros((0, 3), np.float32),
    "text": np.array(["a", "bcd"]),
    "time": np.array(["2020-01-01", "NaT"], "datetime64[D]"),
    "fields": np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
}
TENSORS = {
    "rows": torch.arange(12.0).view(3, 4),
    "transposed": torch.arange(6).view(2, 3).t(),
    "no dimension": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
}


@pytest.fixture
def warn_always() -> Iterator[None]:
    """torch warns each time instead of once per process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.mark.parametrize("name", ARRAYS)
def test_array_is_an_equal_read_only_array(name: str) -> None:
    """A shared array is a numpy array of the same dtype, shape and contents that cannot be written to."""
    value = ARRAYS[name]
    shared = share(value)
    assert isinstance(shared, np.ndarray)
    assert (shared.dtype, shared.shape) == (value.dtype, value.shape)
    np.testing.assert_array_equal(shared, value)
    with pytest.raises(ValueError, match="read-only"):
        shared[...] = value
    again = pickle.loads(pickle.dumps(shared))
    assert type(again) is np.ndarray
    np.testing.assert_array_equal(again, value)


@pytest.mark.usefixtures("warn_always")
def test_what_comes_from_an_array_is_plain() -> None:
    """Rows, slices and results are plain arrays and numpy scalars, so collation and arithmetic accept them."""
    shared = share(ARRAYS["rows"])
    for each in (shared[0], shared[1:], shared[:, [1, 2]], shared + 1, np.sqrt(shared), shared.sum(0)):
        assert type(each) is np.ndarray
    assert type(shared[0, 0]) is np.float64
    assert type(shared.sum()) is np.float64
    assert np.shares_memory(shared[1:], shared)
    with pytest.warns(UserWarning, match="not writable"):  # torch warns so of any read-only array, once per process
        assert default_collate([shared[0], shared[1]]).tolist() == ARRAYS["rows"][:2].tolist()
    assert [row.tolist() for row in shared] == ARRAYS["rows"].tolist()
    assert pickle.loads(pickle.dumps(shared.T)).tolist() == ARRAYS["rows"].T.tolist()


def test_file_backed_array(tmp_path: Path) -> None:
    """A numpy memmap is accepted like any array."""
    value = np.memmap(tmp_path / "x", np.int32, "w+", shape=5)
    value[:] = range(5)
    assert share(value).tolist() == [0, 1, 2, 3, 4]
    value._mmap.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", TENSORS)
def test_tensor_is_an_equal_tensor(name: str) -> None:
    """A shared tensor is a torch tensor of the same dtype, shape and contents."""
    value = TENSORS[name]
    shared = share(value)
    assert isinstance(shared, torch.Tensor)
    assert (shared.dtype, shared.shape) == (value.dtype, value.shape)
    assert torch.equal(shared, value)
    again = pickle.loads(pickle.dumps(shared))
    assert type(again) is torch.Tensor
    assert torch.equal(again, value)


def test_what_comes_from_a_tensor_is_plain() -> None:
    """Rows, slices and results are plain tensors, so torch's own datasets and collation accept a shared tensor."""
    shared = share(TENSORS["rows"])
    for each in (shared[0], shared[1:], shared + 1, shared.sum(), shared.view(4, 3), torch.stack([shared, shared])):
        assert type(each) is torch.Tensor
    assert shared[1:].untyped_storage().data_ptr() == shared.untyped_storage().data_ptr()
    dataset = TensorDataset(shared)
    assert default_collate([dataset[0], dataset[2]])[0].tolist() == TENSORS["rows"][[0, 2]].tolist()


def test_original_is_independent() -> None:
    """Later changes of the original do not show in the shared copy, nor the reverse."""
    array, tensor = np.zeros(3), torch.zeros(3)
    shared_array, shared_tensor = share(array), share(tensor)
    array[0] = tensor[0] = 1
    shared_tensor[1] = 2
    assert shared_array.tolist() == [0, 0, 0]
    assert shared_tensor.tolist() == [0, 2, 0]
    assert tensor.tolist() == [1, 0, 0]


@pytest.mark.parametrize("value", [np.arange(3), torch.arange(3)])
def test_copies_are_itself(value: Any) -> None:
    """`copy` and `deepcopy`, for example of the dataset, return the same object and copy no data."""
    shared = share(value)
    assert copy.copy(shared) is shared
    assert copy.deepcopy([shared])[0] is shared


def test_private_copy_of_a_shared_array_is_not_shared() -> None:
    """numpy copies a shared array to private memory, in the same class. Its copies are independent of it, and `share`
    does not keep it, alone or in a list: later changes of it do not show.
    """
    private = share(np.zeros(3)).astype(np.float32)
    copied, alone, inside = copy.deepcopy(private), share(private), share([private])
    private[0] = 1
    assert copied.tolist() == alone.tolist() == inside[0].tolist() == [0, 0, 0]


REFUSED: dict[str, tuple[Any, str]] = {
    "objects": (np.array([None], object), "holds Python objects: give share"),
    "masked": (np.ma.masked_array([1], [True]), "not MaskedArray"),
    "grad": (torch.ones(2, requires_grad=True), r"requires grad: call detach\(\)"),
    "device": (torch.ones(2, device="meta"), r"on meta: call cpu\(\)"),
    "sparse": (torch.eye(2).to_sparse(), "of layout torch.sparse_coo"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """Other arrays and tensors are refused; the error says why and what to do."""
    value, text = REFUSED[name]
    with pytest.raises(TypeError, match=rf"share\(\) takes .*{text}"):
        share(value)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
@pytest.mark.parametrize("value", [np.arange(3), torch.arange(3)])
def test_memory_goes_with_the_last_view(value: Any) -> None:
    """A row keeps the memory mapped; after the row nothing does."""

    def segments() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:asyncloader")

    gc.collect()
    before = segments()
    shared = share(value)
    row = shared[1:]
    del shared
    assert segments() == before + 1
    assert row.tolist() == [1, 2]
    del row
    gc.collect()
    assert segments() == before
