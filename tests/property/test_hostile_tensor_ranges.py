"""Tensor ranges that no worker of ours would send are refused with a reason, or built without reading outside the
anchor.

Data path: worker -> [leaves -> codec] -> consumer. The pickle inside a template comes from our own child and is
trusted; the numbers in it are not.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.workers.ipc.codec import Encoder
from asyncloader.workers.ipc.leaves import DTYPES, LEAF_SPECS, Dense, LeafSpec, Raw, Storage, Strided, extent
from asyncloader.workers.ipc.ring import make_anchor
from asyncloader.workers.ipc.template import Template
from tests.property.hostile import INSIDE, NBYTES, WALLED, outcome, template_of, wild

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

small = st.integers(-1, 9)
shapes = st.lists(st.one_of(small, small, wild), max_size=5).map(tuple)
codes = st.one_of(st.integers(0, len(DTYPES) - 1), st.integers(-3, len(DTYPES) + 2), wild)
junk = st.one_of(st.none(), st.text(max_size=2), st.floats(), st.booleans(), st.lists(wild, max_size=2))


@st.composite
def near_specs(draw: st.DrawFn) -> tuple[Any, ...]:
    """Draw specs that are right, or wrong in one number."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    count = int(np.prod(shape))
    code = draw(st.integers(0, len(DTYPES) - 1))
    item = DTYPES[code].itemsize
    offset = draw(st.integers(0, NBYTES // 64)) * 64
    kind = draw(st.sampled_from(LEAF_SPECS))
    spec: LeafSpec
    if kind is Dense:
        spec = Dense(offset, count, code, shape)
    elif kind is Strided:
        stride = tuple(draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape))))
        reach = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
        first = draw(st.integers(0, 5))
        spec = Strided(offset, max(0, first + reach) * item, code, shape, stride, first)
    else:
        spec = (Raw if kind is Raw else Storage)(offset, draw(st.integers(0, NBYTES)))
    values = list(spec)
    if draw(st.booleans()):
        wrong = draw(st.integers(0, len(values) - 1))
        values[wrong] = draw(shapes if isinstance(values[wrong], tuple) else wild)
    return LEAF_SPECS.index(kind), tuple(values)


any_specs = st.one_of(
    near_specs(),
    near_specs(),
    st.tuples(st.just(0), st.tuples(wild, wild, codes, shapes)),
    st.tuples(st.just(1), st.tuples(wild, wild, codes, shapes, shapes, wild)),
    st.tuples(st.sampled_from([2, 3]), st.tuples(wild, wild)),
    st.tuples(small, st.lists(st.one_of(wild, junk), max_size=6).map(tuple)),
)


def seen(leaf: Any) -> bytes:
    """Return every byte that a leaf shows."""
    if isinstance(leaf, torch.Tensor):
        assert leaf.untyped_storage().nbytes() <= NBYTES
        if not leaf.numel():
            return b""
        if leaf.dtype is torch.bool:
            leaf = leaf.view(torch.uint8)  # else the copy would write 1 for every byte that is not zero
        return leaf.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()  # type: ignore[no-any-return]
    if isinstance(leaf, torch.UntypedStorage):
        return bytes(leaf.tolist())
    return bytes(leaf)


REFUSED: list[tuple[Any, ...]] = [
    ((0, (-64, 16, 0, (16,))),),  # numpy would read 64 bytes before the buffer
    ((0, (0, 16, -1, (16,))),),
    ((0, (0, 16, 0, (-1,))),),
    ((0, (1, 16, 1, (16,))),),
    ((0, (0, 0, 0, (1 << 62, 1 << 62, 0))),),
    ((0, (0, 1 << 124, 0, (1 << 62, 1 << 62))),),
    ((0, (0, 0, 0, ((1 << 64) + 1, 0))),),
    ((1, (-1, 0, 0, (1 << 40,), (1,), 0)),),  # torch would allocate 4 TiB
    ((1, (0, 64, 4, (8,), (-1,), 8)),),
    ((1, (0, 64, 0, (2,), (1 << 62,), 0)),),
    ((1, (0, 64, 0, (4,), (1,), -1)),),
    ((1, (0, 64, 0, (4, 4), (1,), 0)),),
    ((3, (0, 64)), (1, (0, NBYTES, 4, (NBYTES,), (1,), 0))),  # one storage of two sizes
    ((2, (NBYTES - 1, 2)),),
    ((2, (-1, 2)),),
    ((2, (0, -1)),),
    ((3, (1 << 63, 1 << 63)),),
    ((0, (0.0, 16.0, 0, (16.0,))),),
    ((0, ("0", 16, 0, "16")),),
    ((1, (8, 64, 8, (8,), (1,), 0)),),
    ((1, (-64, 64, 0, (0,), (1,), 0)),),  # no elements, but bytes before the anchor that a copy would read
    ((4, (0, 16)),),
    ((0, ()),),
    ((0, (0, 16, 0, (-4, -4))),),
    ((0, (0, 16, len(DTYPES), (16,))),),
    ((1, (0, 64, -1, (8,), (1,), 0)),),
]


@pytest.mark.parametrize("specs", REFUSED, ids=str)
def test_what_was_found(specs: tuple[Any, ...]) -> None:
    """Each is malformed or lies outside, and is refused with a message."""
    with pytest.raises(ValueError, match="a worker's answer is broken"):
        Template(template_of(specs)).build(WALLED.anchor())


@settings(deadline=None)
@given(st.lists(any_specs, max_size=4).map(tuple), st.sampled_from([NBYTES, NBYTES, 64, 1000]))
def test_no_leaf_lies_outside_of_the_anchor(specs: tuple[Any, ...], nbytes: int) -> None:
    """Whatever numbers the specs have: a `ValueError`, or leaves that show nothing but the anchor's bytes."""
    leaves = outcome(lambda: Template(template_of(specs)).build(WALLED.anchor(nbytes)))
    if isinstance(leaves, ValueError):
        assert "broken" in str(leaves)
        return
    assert len(leaves) == len(specs)
    for leaf in leaves:
        shown = seen(leaf)
        assert len(shown) <= 10 * NBYTES or min(leaf.stride()) == 0
        assert set(shown) <= {INSIDE}


@settings(deadline=None)
@given(st.lists(near_specs(), max_size=3).map(tuple))
def test_what_is_accepted_builds_on_memory_of_its_extent_and_on_no_less(specs: tuple[Any, ...]) -> None:
    """The extent is exact: a template builds on that number of bytes, as a view or a copy, and not on one byte less."""
    template = outcome(lambda: Template(template_of(specs)))
    if isinstance(template, ValueError):
        return
    needed = extent(tuple(LEAF_SPECS[kind](*values) for kind, values in specs))
    if needed > NBYTES:
        with pytest.raises(ValueError, match=f"byte {needed} of {NBYTES}"):
            template.build(WALLED.anchor())
        return
    exact = WALLED.anchor(needed)
    assert [seen(a) for a in template.build(exact)] == [seen(b) for b in template.copy_out(exact)]
    if needed:
        with pytest.raises(ValueError, match=f"byte {needed} of {needed - 1}"):
            template.build(WALLED.anchor(needed - 1))
        with pytest.raises(ValueError, match=f"byte {needed} of 0"):
            template.build(None)


def test_leaves_of_the_same_bytes_take_them_once() -> None:
    """A peer that names the same bytes ten thousand times gets one copy of them, not ten thousand."""
    count = NBYTES // 4
    template = Template(template_of(((0, (0, count, 0, (count,))),) * 10_000))
    leaves = template.copy_out(WALLED.anchor(NBYTES))
    assert len({leaf.data_ptr() for leaf in leaves}) == 1
    assert {INSIDE} == set(seen(leaves[-1]))


def test_what_the_encoder_writes_is_accepted() -> None:
    """The check refuses nothing of ours: leaves of every kind, empty, odd and shared, on the bytes written."""
    base = torch.arange(60.0).view(3, 4, 5)
    value = {
        "views": [base, base[1:, ::2], base.permute(2, 0, 1), base[0, 0, 0]],
        "expanded": torch.ones(3, 1).expand(3, 4),
        "empty": [torch.empty(0, 3), torch.empty(3, 0, dtype=torch.int64), torch.empty(0).expand(5, 0)],
        "every dtype": [torch.zeros(3, dtype=dtype) for dtype in DTYPES],
        "storage": torch.arange(7).untyped_storage(),
        "odd": torch.arange(9, dtype=torch.uint8)[1:].view(2, 4),
        "arrays": [np.arange(6).reshape(2, 3), np.empty((0, 4)), np.array("text", dtype=object)],
        "text": "x" * (1 << 16),
    }
    encoded = Encoder().encode(value)
    memory = mmap.mmap(-1, encoded.nbytes + 64)
    encoded.write(memory, 64)
    got = Template(encoded.template).build(make_anchor(memory, 64, encoded.nbytes))
    assert torch.equal(got["views"][1], base[1:, ::2])
    assert [t.shape for t in got["empty"]] == [(0, 3), (3, 0), (5, 0)]
    assert [t.dtype for t in got["every dtype"]] == list(DTYPES)
    assert got["text"] == value["text"]
