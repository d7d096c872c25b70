"""Results of a user's collate function: tensors are found at any depth, and all other values travel with them."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from copy import deepcopy
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

from asyncloader import DataLoader
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import (
    Augmented,
    Custom,
    Deep,
    Numbers,
    Pair,
    Sized,
    collate_deep,
    collate_strings,
)
from tests.helpers.running import BOTH, KINDS, assert_like_torch, collect, outcomes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_dataclass_with_tensors_deep_inside(kind: str, workers: int) -> None:
    """A user's classes, views, empty tensors, Fortran and object arrays arrive equal to the bit."""
    run = assert_like_torch(kind, Numbers(10), num_workers=workers, batch_size=4, collate_fn=collate_deep)
    batch = run.epochs[0][0]
    assert isinstance(batch, Deep)
    assert batch.inner.meta["transposed"].stride() == (1, 3)


def collate_views_of_deep(samples: list[Any]) -> Deep:
    x = torch.stack(samples)
    return Deep(Custom(x, {}), {"views": [x[1:], x.numpy()]})


@pytest.mark.parametrize("kind", BOTH)
def test_tensors_of_a_users_object_are_no_pickle(kind: str) -> None:
    """A megabyte of tensors in a user's object costs a few hundred bytes of pickle, so no warning is given."""
    batches = collect(kind, Sized([1 << 20] * 8), num_workers=2, batch_size=4, collate_fn=collate_views_of_deep)
    assert [batch.inner.x.shape for batch in batches] == [(4, 1 << 20)] * 2
    assert [int(batch.by_name["views"][1][3, -1]) for batch in batches] == [3, 7]


def collate_views(samples: list[Any]) -> Any:
    x = default_collate(samples)
    return x, x[1], x.t()


@pytest.mark.parametrize("kind", BOTH)
def test_shared_storage_stays_shared(kind: str) -> None:
    """Tensors of one storage still share it: a write to one tensor is seen in the others."""
    for whole, row, transposed in collect(kind, Numbers(8), num_workers=2, batch_size=4, collate_fn=collate_views):
        row[0] = -5.0
        assert whole[1, 0] == transposed[0, 1] == -5.0


@pytest.mark.parametrize("kind", BOTH)
def test_batches_can_be_written_to(kind: str) -> None:
    """A batch is the consumer's own: in-place changes work and touch no other batch."""
    batches = collect(kind, Numbers(40), num_workers=2, batch_size=2)
    for batch in batches:
        batch.mul_(-1)
    expected = collect("torch", Numbers(40), batch_size=2)
    assert_same([-batch for batch in batches], expected)


@pytest.mark.parametrize("kind", BOTH)
def test_leaves_of_one_batch_do_not_overlap(kind: str) -> None:
    """Each leaf has the number with which it was filled, after all others have been filled with theirs."""
    for batch in collect(kind, Augmented(8), num_workers=2, batch_size=4):
        for number, leaf in enumerate(batch.values()):
            leaf.fill_(number)
        assert [leaf.unique().tolist() for leaf in batch.values()] == [[number] for number in range(4)]


@pytest.mark.parametrize("kind", BOTH)
def test_strings_and_objects_ride_along(kind: str) -> None:
    """Batches without a single tensor work, too."""
    assert_like_torch(kind, Numbers(9), num_workers=2, batch_size=2, collate_fn=collate_strings)


CONTAINERS: dict[str, Any] = {
    "ordered dict": OrderedDict(b=1, a=torch.ones(2)),
    "default dict": defaultdict(list, {"x": [torch.ones(2)]}),
    "user dict": UserDict({"x": torch.ones(2)}),
    "user list": UserList([torch.ones(2)]),
    "named tuple": Pair(torch.ones(2), np.ones(3)),
    "deque": deque([torch.ones(2)]),
    "set": {1, 2},
    "none": None,
    "exotic": (Fraction(1, 3), PurePosixPath("a/b"), range(3), 1 + 2j, ...),
    "numpy scalars": [np.float16(1.5), np.datetime64("2024-05-06"), np.bool_(1)],
    "structured array": np.zeros(3, dtype=[("a", "i4"), ("b", "f8")]),
    "big-endian array": np.arange(4, dtype=">i4"),
    "string array": np.array(["ab", "c"]),
    "zero-dimensional": (torch.tensor(3), np.array(4)),
    "size": torch.Size([2, 3]),
    "device and dtype": (torch.device("cpu"), torch.float8_e4m3fn),
    "float8": torch.ones(4).to(torch.float8_e4m3fn),
    "bool and complex": [torch.tensor([True]), torch.tensor([1j], dtype=torch.complex64)],
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "expanded": torch.arange(3).expand(4, 3),
    "channels last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "every other": torch.arange(10)[::2],
    "sparse": torch.eye(3).to_sparse(),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "packed sequence": pack_sequence([torch.ones(3), torch.ones(2)]),
    "bytearray": bytearray(b"abc"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("name", CONTAINERS)
def test_whatever_pickles_arrives(kind: str, name: str) -> None:
    """Any value that pickles arrives equal, with its type."""
    value = CONTAINERS[name]
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
    (batch,) = collect(kind, [0], collate_fn=lambda _: [value, "beside"], **options)
    assert_same(batch, [value, "beside"])
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_conj():
        assert batch[0].stride() == value.stride()


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "samples",
    [
        [torch.eye(3).to_sparse(), torch.eye(3).to_sparse()],
        [torch.ones(2), torch.ones(3)],
        [np.ones(2), np.ones((2, 1))],
        [np.array(["a"]), np.array(["b"])],
        [[1, 2], [3]],
        [object(), object()],
        [None, None],
        [{"a": 1}, {"b": 1}],
    ],
    ids=lambda samples: type(samples[0]).__name__,
)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_default_collate_refuses(kind: str, samples: list[Any], workers: int) -> None:
    """Samples that cannot be collated raise torch's error: same type, same last line; a note has their indices."""
    samples = deepcopy(samples)  # a tensor sent to a worker keeps its storage in shared memory
    ((expected, expected_text),) = outcomes("torch", samples, batch_size=2, num_workers=workers)
    ((error, text),) = outcomes(kind, samples, batch_size=2, num_workers=workers)
    assert error is expected
    text, note = text.rstrip("\n").rsplit("\n", 1)
    assert note.startswith("while collating the batch of indices [0, 1]")
    assert text.splitlines()[-1] == expected_text.splitlines()[-1]


@pytest.mark.parametrize("kind", BOTH)
def test_first_sample_decides_the_dtype(kind: str) -> None:
    """Samples of several dtypes are collated as in torch's workers, where the first sample's dtype holds."""
    dataset = [torch.ones(2), torch.ones(2, dtype=torch.float64) / 3, torch.ones(2, dtype=torch.int32)]
    assert_like_torch(kind, dataset, num_workers=1, batch_size=3)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
def test_numbers_of_mixed_types(kind: str) -> None:
    """Lists of bools, ints, floats, and ints beyond 64 bits are collated as by torch, error included."""
    for samples in ([1, 2.5], [1.5, 2], [True, False], [True, 2], [1 << 40, 1], [np.int8(1), np.int8(2)]):
        assert_like_torch(kind, samples, num_workers=1, batch_size=2)
    for huge in ([1 << 70, 1], [1, "x"]):
        ((expected, _),) = outcomes("torch", huge, num_workers=1, batch_size=2)
        ((error, text),) = outcomes(kind, huge, num_workers=1, batch_size=2)
        assert error is expected
        assert "in DataLoader worker process 0" in text


def test_types_registered_in_torchs_map_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function registered in `default_collate_fn_map` collates its type, in our forked workers as in torch's."""
    from torch.utils.data._utils.collate import default_collate_fn_map

    def collate_fractions(batch: list[Fraction], *, collate_fn_map: Any = None) -> Fraction:
        return sum(batch, Fraction(0))

    monkeypatch.setitem(default_collate_fn_map, Fraction, collate_fractions)
    dataset: Any = [{"f": Fraction(1, n), "t": torch.tensor(n)} for n in range(1, 7)]
    batches = list(DataLoader[Any](dataset, batch_size=3, num_workers=2, multiprocessing_context="fork"))
    assert [batch["f"] for batch in batches] == [Fraction(11, 6), Fraction(37, 60)]
    assert [batch["t"].tolist() for batch in batches] == [[1, 2, 3], [4, 5, 6]]
