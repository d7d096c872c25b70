"""`PackSequences`: batches of rows of sequences, of every kind and type."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncloader import PackSequences


@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=12), pad=st.none() | st.integers(0, 9))
def test_a_row(lengths: list[int], pad: int | None) -> None:
    """Tokens are in order; positions begin at 0 for each sequence, and `cu_seqlens` has where; padding comes last."""
    ends = np.cumsum([0, *lengths])
    samples = [torch.arange(start, stop) for start, stop in pairwise(ends)]
    total = int(ends[-1])
    pack_to = None if pad is None or not total + pad else total + pad
    batch = PackSequences(pad_to=pack_to, pad_values=None if pack_to is None else {"tokens": -1})([samples])
    row = batch if pack_to is None else batch | {name: batch[name][0] for name in ("tokens", "position_ids")}
    assert row["tokens"].tolist() == [*range(total), *[-1] * ((pack_to or total) - total)]
    kept = [length for length in [*lengths, (pack_to or total) - total] if length]
    assert row["position_ids"].tolist() == [at for length in kept for at in range(length)]
    assert row["cu_seqlens"].tolist() == np.cumsum([0, *kept]).tolist()
    assert row["max_seqlen"] == max(kept, default=0)
    assert (row["position_ids"].dtype, row["cu_seqlens"].dtype) == (torch.int64, torch.int32)


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
@pytest.mark.parametrize("kind", ["torch", "numpy", "read-only", "both"])
def test_types_stay(dtype: str, kind: str) -> None:
    """Tensors and arrays give a tensor of their type, in memory of its own, also for a single sequence."""
    arrays = [np.arange(3).astype(dtype), np.arange(2).astype(dtype)]
    for array in arrays:
        array.flags.writeable = kind != "read-only"
    given_: list[Any] = [torch.from_numpy(arrays[0]) if kind in ("torch", "both") else arrays[0]]
    given_.append(torch.from_numpy(arrays[1]) if kind == "torch" else arrays[1])
    for samples in (given_, given_[:1]):
        for collate in (PackSequences(), PackSequences(pad_to=5)):
            row = collate([samples])["tokens"].flatten()
            assert row.dtype == getattr(torch, dtype)
            assert row.tolist()[:5] == ([0, 1, 2, 0, 1] if len(samples) == 2 else [0, 1, 2, 0, 0][: len(row)])
            row[0] = 7
            assert arrays[0][0] == 0


@given(
    rows=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), min_size=1, max_size=5),
    pad=st.none() | st.integers(1, 4),
)
def test_batches_of_rows(rows: list[list[int]], pad: int | None) -> None:
    """Rows lie one behind the other, or each is padded; every field agrees with the rows by themselves."""
    sequences = [[torch.arange(length) + 10 * number for number, length in enumerate(row)] for row in rows]
    pad_to = None if pad is None else max(map(sum, rows)) + pad - 1 or 1
    collate = PackSequences(pad_to=pad_to)
    batch, alone = collate(sequences), [collate([row]) for row in sequences]
    for name in ("tokens", "position_ids"):
        assert torch.equal(batch[name], torch.cat([each[name] for each in alone]))
        assert batch[name].shape == ((sum(map(sum, rows)),) if pad_to is None else (len(rows), pad_to))
    lengths = [length for each in alone for length in np.diff(each["cu_seqlens"]).tolist()]
    assert batch["cu_seqlens"].tolist() == np.cumsum([0, *lengths]).tolist()
    assert batch["max_seqlen"] == max(each["max_seqlen"] for each in alone)
    assert 0 not in lengths


def test_fields() -> None:
    """Fields of a mapping are packed alike, of any further shape; other values become lists; labels have a padding of
    their own.
    """
    samples = [
        {"input_ids": [5, 6], "labels": np.array([-100, 6]), "vectors": torch.ones(2, 3), "name": "a", "weight": 0.5},
        {"input_ids": [], "labels": np.array([], int), "vectors": torch.ones(0, 3), "name": "empty", "weight": 3.0},
        {"input_ids": [7], "labels": np.array([7]), "vectors": torch.zeros(1, 3), "name": "b", "weight": 2.0},
    ]
    row = PackSequences(pad_to=5)([samples[:2], samples[2:]])
    assert row["input_ids"].tolist() == [[5, 6, 0, 0, 0], [7, 0, 0, 0, 0]]
    assert row["labels"].tolist() == [[-100, 6, -100, -100, -100], [7, -100, -100, -100, -100]]
    assert row["vectors"].sum(2).tolist() == [[3, 3, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert row["name"] == ["a", "b"]
    assert row["weight"] == [0.5, 2.0]
    assert row["cu_seqlens"].tolist() == [0, 2, 5, 6, 10]


@pytest.mark.parametrize(
    ("samples", "error", "message"),
    [
        (["text"], TypeError, "a list of tokens, or a mapping with such fields, but it is str: 'text'"),
        ([{"name": "a"}], TypeError, "but it is dict"),
        ([{"a": [1, 2], "b": [1]}], ValueError, r"an element for each token, but they have \{'a': 2, 'b': 1\}"),
        ([{"a": [1]}, {"b": [1]}], ValueError, r"sequence 1 of it has \['b'\], and the first \['a'\]"),
        ([{"tokens": [1], "cu_seqlens": [1]}], ValueError, "has the field 'cu_seqlens', which packing makes"),
        ([[1, 2, 3], [4, 5]], ValueError, "row 0 of the batch has 5 tokens, which is more than pad_to=4"),
    ],
)
def test_bad_sequences(samples: list[Any], error: type[Exception], message: str) -> None:
    """What cannot be packed is refused; the error says what it was."""
    with pytest.raises(error, match=message):
        PackSequences(pad_to=4)([samples])


@pytest.mark.parametrize(
    ("dtype", "padded"), [("bool", "int64"), ("uint8", "int64"), ("uint16", "int64"), ("int16", "int16")]
)
def test_labels_are_padded_with_no_class(dtype: str, padded: str) -> None:
    """-100 stays -100: unsigned labels become signed, in full rows, too, so that all rows are of one type."""
    for size in (2, 5):
        ones = np.ones(size, dtype)
        batch = PackSequences(pad_to=5)([[{"tokens": ones, "labels": ones}]])
        assert batch["labels"].dtype == getattr(torch, padded)
        assert batch["tokens"].dtype == getattr(torch, dtype)
        assert batch["labels"].tolist() == [[1] * size + [-100] * (5 - size)]


@pytest.mark.parametrize(
    ("dtype", "value", "fits"),
    [
        ("uint16", 65535, True),
        ("uint16", -1, False),
        ("uint8", 0.5, False),
        ("int32", float("nan"), False),
        ("float16", float("nan"), True),
        ("uint64", -100, False),
    ],
)
def test_padding_that_the_type_can_hold(dtype: str, value: float, fits: bool) -> None:
    """Is put in as it is; other padding is refused, and the error names field, value and type."""
    collate, samples = PackSequences(pad_to=2, pad_values={"labels": value}), [{"labels": np.ones(1, dtype)}]
    if fits:
        labels = collate([samples])["labels"]
        assert labels.dtype == getattr(torch, dtype)
        assert labels[0, 1].item() == pytest.approx(value, rel=0.01, nan_ok=True)
    else:
        with pytest.raises(ValueError, match=rf"of 'labels' is {value}, which its type, torch\.{dtype}, can"):
            collate([samples])


def test_bad_padding() -> None:
    """A row has a token at least; values are given with `pad_to`, and for fields of tokens that sequences have."""
    with pytest.raises(ValueError, match="pad_to should be positive, but got pad_to=0"):
        PackSequences(pad_to=0)
    with pytest.raises(ValueError, match=r"pad_values=\{'labels': 0\} needs pad_to"):
        PackSequences(pad_values={"labels": 0})
    for name in ("labels", "lable", "name"):
        with pytest.raises(ValueError, match=rf"pad_values has '{name}', but .* are \['label'\]"):
            PackSequences(pad_to=2, pad_values={name: 0})([[{"label": [1], "name": "a"}]])
