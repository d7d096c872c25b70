"""Tensors of every kind through the slot and back."""

from __future__ import annotations

import gc
import mmap
import tracemalloc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncloader.workers.ipc.codec import Encoder
from asyncloader.workers.ipc.leaves import DTYPES
from asyncloader.workers.ipc.ring import Anchor, make_anchor
from asyncloader.workers.ipc.template import Template
from tests.helpers.comparing import assert_same
from tests.unit.workers.ipc.through_memory import OFFSET, copied, round_trip, view, write

# Made at import: torch loads its compiler for it, whose many objects would slow down the leak check of later tests.
JAGGED = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)


def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor with distinct, finite values."""
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return (torch.arange(count) % 3 == 0).view(shape)
    if dtype.is_complex:
        return torch.complex(torch.arange(count).float(), -torch.arange(count).float()).to(dtype).view(shape)
    return (torch.arange(count) % 100).to(dtype).view(shape)


class Tagged(torch.Tensor):
    pass


def labelled(tensor: torch.Tensor) -> torch.Tensor:
    tensor.label = "kept"  # type: ignore[attr-defined]
    return tensor


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.tensor([0.0, 0.5, 1.0]), 0.1, 3, torch.quint8)


def csr() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(3).to_sparse_csr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_and_shape(dtype: torch.dtype) -> None:
    """Contiguous tensors of each dtype, scalars and empty tensors come back to the bit, as views and as copies."""
    for shape in [(), (1,), (3, 5), (0,), (2, 0, 3)]:
        tensor = of(dtype, *shape)
        assert_same(view(Encoder().encode(tensor)), tensor)
        assert_same(copied(Encoder().encode(tensor)), tensor)


STRIDED: dict[str, Callable[..., Any]] = {
    "transposed": lambda: torch.arange(12).view(3, 4).t(),
    "column": lambda: torch.arange(12.0).view(3, 4)[:, 1],
    "every second": lambda: torch.arange(12, dtype=torch.int16)[1::2],
    "expanded": lambda: torch.tensor([1.0, 2.0]).expand(3, 2),
    "slice in the middle": lambda: torch.arange(100, dtype=torch.uint8)[33:47],
    "bfloat16 permuted": lambda: torch.arange(24).to(torch.bfloat16).view(2, 3, 4).permute(2, 0, 1),
    "channels last": lambda: torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "imaginary part": lambda: torch.tensor([1 + 2j, 3 - 4j]).imag,
    "as_strided overlap": lambda: torch.arange(5).as_strided((3, 3), (1, 1)),
    "one channel, channels last": lambda: torch.rand(2, 1, 4, 4).to(memory_format=torch.channels_last),
    "one image, channels last": lambda: torch.rand(1, 1, 1, 4).to(memory_format=torch.channels_last),
    "one row of a wide one": lambda: torch.rand(4, 1000)[:1, :3],
    "one column": lambda: torch.rand(4, 3)[:, :1],
    "one element": lambda: torch.rand(4, 3)[3:, 2:],
    "scalar with strides": lambda: torch.arange(9).as_strided((1, 1), (0, 7), 3),
    "empty and strided": lambda: torch.empty(3, 0, 2).permute(2, 1, 0),
}


@pytest.mark.parametrize("kind", STRIDED)
def test_strides_are_kept(kind: str) -> None:
    """A tensor view keeps its values and its strides."""
    tensor = STRIDED[kind]()
    for through in (view, copied):
        got = through(Encoder().encode(tensor))
        assert_same(got, tensor)
        assert got.stride() == tensor.stride()


COLUMN_BYTES = 40_000

# Views of 10,000 rows of 100 floats, and the number of bytes that they show.
USED: dict[str, tuple[Callable[[torch.Tensor], Any], int]] = {
    "slice": (lambda t: t[5_000, :10], 40),
    "rows far apart": (lambda t: [t[9_999], t[3], t[5_000]], 1200),
    "rows, some twice": (lambda t: [t[i] for i in (9_999, 3, 3, 9_999)], 800),
    "subclass": (lambda t: [t[9_999].as_subclass(Tagged), t[0].as_subclass(Tagged)], 800),
    "requires grad": (lambda t: [t[i].detach().requires_grad_() for i in (0, 9_999)], 800),
    "parameter": (lambda t: [torch.nn.Parameter(t[i]) for i in (0, 9_999)], 800),
    "attribute": (lambda t: [labelled(t[0]), labelled(t[9_999])], 800),
    "lazy conjugate": (lambda t: [t.view(torch.complex64)[i].conj() for i in (0, 9_999)], 800),
    "new dtype that requires its rules": (lambda t: labelled(t.view(torch.uint32)[0]), 400),
    "column": (lambda t: t[:, 7], COLUMN_BYTES),
    "a column twice": (lambda t: [t[:, 7], t[:, 7]], COLUMN_BYTES),
    "columns of other rows": (lambda t: [t[:5_000, 7], t[5_000:, 8]], COLUMN_BYTES),
    "column of bytes": (lambda t: t.view(torch.uint8)[:, 399], 10_000),
    "column of a subclass": (lambda t: t[:, 7].as_subclass(Tagged), COLUMN_BYTES),
    "expanded column": (lambda t: t[:, 7].expand(5, 10_000), COLUMN_BYTES),
    "permuted block": (lambda t: t.view(100, 100, 100)[:, 3:5, :3].permute(2, 0, 1), 2400),
    "interleaved": (lambda t: [t[:, i] for i in range(100)], 100 * COLUMN_BYTES),
}


@pytest.mark.parametrize("kind", USED)
def test_only_what_is_seen_travels(kind: str) -> None:
    """A batch of views costs the bytes seen through them, and not the bytes between or around them."""
    make, used = USED[kind]
    value = make(torch.arange(1_000_000.0).view(10_000, 100))
    encoded = Encoder().encode(value)
    assert encoded.nbytes <= used + 64 * 100
    for through in (view, copied):
        assert_same(through(Encoder().encode(value)), value)


def test_gaps_are_left_out_in_the_order_of_the_dimensions() -> None:
    """Where strides cannot be kept without the bytes between, they become those of the dense tensor in that order."""
    image = torch.zeros(64, 64, 64).permute(2, 0, 1)[::8, ::8]
    assert round_trip(image).stride() == (1, 8 * 64, 8)
    assert round_trip(image[:, :1].expand(8, 5, 64)).stride() == (1, 0, 8)


SHARING: dict[str, Callable[..., Any]] = {
    "the same tensor twice": lambda t: [t, t],
    "view and whole": lambda t: [t, t[2:5]],
    "whole and transposed": lambda t: {"a": t, "b": t.view(2, 4).t()},
    "overlapping slices": lambda t: (t[1:5], t[3:8]),
    "other dtype": lambda t: (t, t.view(torch.int32)),
    "column and row": lambda t: (t.as_strided((2,), (5000,)), t[:3]),
    "column twice": lambda t: (t.as_strided((2,), (5000,)), t.as_strided((2,), (5000,))),
    "parameter and its data": lambda t: (torch.nn.Parameter(t), t),
    "plain and requires_grad": lambda t: (t.detach().requires_grad_(), t),
    "tensor and storage": lambda t: (t, torch.empty(0).set_(t.untyped_storage(), 0, (8,), (1,))),
}


@pytest.mark.parametrize("kind", SHARING)
def test_tensors_that_share_a_storage_still_do(kind: str) -> None:
    """A write through one alias is seen through the other, as before."""
    value = SHARING[kind](torch.arange(8192.0)[:8])
    got = round_trip(value)
    assert_same(got, value)
    first, second = got.values() if isinstance(got, dict) else got
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    with torch.no_grad():
        first.fill_(77)
    assert (second.view(torch.float32) == 77).any()


def test_sharing_views_of_other_sizes_stay_aligned() -> None:
    """A view of bytes that begins anywhere, and a view of floats over the same storage, keep their distance."""
    base = torch.arange(8.0)
    value = (base.view(torch.uint8)[5:20], base[2:4], base.view(torch.complex64)[1:])
    for through in (view, copied):
        assert_same(through(Encoder().encode(value)), value)
    some_bytes, some_floats, _ = round_trip(value)
    some_bytes[3:7] = 0  # where the first float is
    assert some_floats.tolist() == [0.0, 3.0]


def test_storage_itself_stays_shared() -> None:
    """An untyped storage beside a tensor over it is the same memory afterwards."""
    tensor = torch.arange(4.0)
    got, storage = round_trip([tensor, tensor.untyped_storage()])
    assert_same(got, tensor)
    assert isinstance(storage, torch.UntypedStorage)
    assert storage.data_ptr() == got.data_ptr()


def test_identity_is_kept() -> None:
    """A tensor that occurs twice in a batch is decoded as one tensor."""
    tensor = torch.arange(3)
    got = round_trip([tensor, {"again": tensor}])
    assert got[0] is got[1]["again"]


SPECIAL: dict[str, Callable[..., Any]] = {
    "parameter": lambda: torch.nn.Parameter(torch.arange(3.0)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.arange(3.0), requires_grad=False),
    "requires grad": lambda: torch.arange(3.0, requires_grad=True),
    "conjugate": lambda: torch.tensor([1 + 2j]).conj().resolve_conj(),
    "sparse": lambda: torch.eye(3).to_sparse().coalesce(),
    "sparse csr": csr,
    "subclass": lambda: torch.arange(4).as_subclass(Tagged),
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_special_tensors(kind: str) -> None:
    """Tensors with rules of their own keep type, values and flags."""
    value = SPECIAL[kind]()
    assert_same(view(Encoder().encode(value)), value)
    assert_same(copied(Encoder().encode(value)), value)


def test_lazy_conjugate_keeps_its_values() -> None:
    """A tensor that is only marked as conjugate arrives conjugated."""
    value = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert round_trip(value).resolve_conj().tolist() == [1 - 2j, 3 + 4j]
    assert round_trip(value.imag).tolist() == [-2.0, 4.0]


@pytest.mark.filterwarnings("ignore:.*quantized", "ignore:torch.quantize", "ignore:TypedStorage")
def test_quantized_tensor() -> None:
    """A quantized tensor keeps values, scale and zero point."""
    value = quantized()
    got = round_trip(value)
    assert (got.dtype, got.q_scale(), got.q_zero_point()) == (value.dtype, 0.1, 3)
    assert got.int_repr().tolist() == value.int_repr().tolist()


FLAGS: dict[str, Callable[[torch.Tensor], Any]] = {
    "requires grad": lambda t: t.requires_grad_() if t.is_floating_point() or t.is_complex() else t,
    "attribute": labelled,
    "subclass": lambda t: t.as_subclass(Tagged),
    "conjugate": lambda t: labelled(t.conj()),
    "subclass of a view": lambda t: t.view(3, 1)[1:].as_subclass(Tagged),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=t.is_floating_point() or t.is_complex()),
}


@pytest.mark.parametrize("kind", FLAGS)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_flags_of_every_dtype(kind: str) -> None:
    """A tensor that is not plain keeps type, flags, strides and values, whatever its dtype."""
    for dtype in DTYPES:
        value = FLAGS[kind](of(dtype, 3))
        for through in (view, copied):
            got = through(Encoder().encode(value))
            assert_same(got, value)
            assert (got.stride(), vars(got)) == (value.stride(), vars(value))


def test_nested_tensor() -> None:
    """A jagged tensor keeps the lengths and values of its parts."""
    got = round_trip(JAGGED)
    assert [part.tolist() for part in got.unbind()] == [[1.0, 1.0], [0.0, 0.0, 0.0]]


def test_special_tensors_travel_in_memory() -> None:
    """The bytes of a large parameter, subclass or tensor with gradient are not pickled."""
    big = torch.zeros(100_000)
    for value in (torch.nn.Parameter(big), big.as_subclass(Tagged), big.clone().requires_grad_()):
        encoded = Encoder().encode(value)
        assert encoded.nbytes >= 400_000
        assert len(encoded.template) < 2000


def test_views_lie_in_the_slot_and_copies_do_not() -> None:
    """A view shows later writes to the slot; a copy does not."""
    encoded = Encoder().encode([torch.zeros(4), torch.zeros(3, dtype=torch.bfloat16)])
    memory = write(encoded)
    anchor = codec_anchor(memory, encoded.nbytes)
    template = Template(encoded.template)
    views, copies = template.build(anchor), template.copy_out(anchor)
    memory[:] = b"\xff" * len(memory)
    assert all(t.isnan().all() for t in views)
    assert [t.tolist() for t in copies] == [[0.0] * 4, [0.0] * 3]


KEPT: dict[str, Callable[[torch.Tensor], tuple[Any, Any]]] = {
    "tensors": lambda t: (t, t[:2].clone()),
    "views of one storage": lambda t: (t[2:], t[:2]),
    "a dtype that numpy lacks": lambda t: (t.bfloat16(), t[:2].bfloat16()),
    "strided": lambda t: (t.clone()[::2], t[:4].clone()[::2]),
    "arrays": lambda t: (t.numpy(), t[:2].clone().numpy()),
    "subclass": lambda t: (t.as_subclass(Tagged), t[:2].clone().as_subclass(Tagged)),
    "array and tensor": lambda t: (t.numpy(), t[:2].clone()),
}


@pytest.mark.parametrize("kind", KEPT)
def test_a_leaf_that_is_kept_costs_its_own_bytes(kind: str) -> None:
    """After a batch was copied out, keeping its labels does not keep its images."""
    value = KEPT[kind](torch.arange(1_000_000.0))
    small: Any = copied(Encoder().encode(value))[1]
    if isinstance(small, torch.Tensor):
        assert small.untyped_storage().nbytes() < 64
        return
    owner: Any = small
    while getattr(owner, "base", None) is not None:
        owner = owner.base
    assert memoryview(owner).nbytes < 64


def test_copied_leaves_are_freed_one_by_one() -> None:
    """The memory of a leaf that is dropped is free at once, while another leaf of its batch is kept."""
    encoded = Encoder().encode([torch.zeros(4 << 20), torch.zeros(3)])
    tracemalloc.start()  # numpy reports its allocations to it
    try:
        kept = [copied(encoded)[1] for _ in range(3)]
        assert tracemalloc.get_traced_memory()[0] < 4 << 20
    finally:
        tracemalloc.stop()
    assert [t.tolist() for t in kept] == [[0.0] * 3] * 3


def codec_anchor(memory: mmap.mmap, nbytes: int) -> Anchor:
    return make_anchor(memory, OFFSET, nbytes)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_every_kind_of_view_keeps_the_anchor() -> None:
    """The lease lasts as long as any kind of tensor over the slot, and no longer."""
    kinds: dict[str, Callable[..., Any]] = {**SPECIAL, **STRIDED, "plain": lambda: torch.zeros(5)}
    for kind, make in kinds.items():
        encoded = Encoder().encode(make())
        if not encoded.nbytes:
            continue
        anchor = codec_anchor(write(encoded), encoded.nbytes)
        alive = weakref.ref(anchor)
        batch = Template(encoded.template).build(anchor)
        del anchor
        assert alive() is not None, kind
        del batch
        gc.collect()
        assert alive() is None, kind
