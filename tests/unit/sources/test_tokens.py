"""`TokenFile`: which tokens a window has, for any file and any indices, in every kind of worker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncloader import DataLoader, TokenFile
from asyncloader.errors import ShardError


@given(
    tokens=st.integers(1, 60),
    context=st.integers(1, 12),
    stride=st.none() | st.integers(1, 15) | st.just(2**70),
    offset=st.integers(0, 3),
    dtype=st.sampled_from(["u1", "<u2", ">u2", "<i4", ">i8"]),
    data=st.data(),
)
def test_any_windows(
    tmp_path_factory: pytest.TempPathFactory,
    tokens: int,
    context: int,
    stride: int | None,
    offset: int,
    dtype: str,
    data: Any,
) -> None:
    """Windows are slices of the file's tokens, in the machine's byte order; the rest is left out."""
    path = tmp_path_factory.mktemp("tokens") / "file.bin"
    values = np.arange(tokens) * 3
    path.write_bytes(b"h" * offset + values.astype(dtype).tobytes())
    if tokens < context:
        with pytest.raises(ShardError, match=f"no window of {context}"):
            TokenFile(path, dtype, context, stride=stride, offset=offset)
        return
    windows = TokenFile(path, dtype, context, stride=stride, offset=offset)
    starts = range(0, tokens - context + 1, stride or context)
    assert len(windows) == len(starts)
    assert windows.num_tokens == tokens
    indices = data.draw(st.lists(st.integers(-len(windows), len(windows) - 1), max_size=8))
    found = windows.__getitems__(indices)
    assert [each.tolist() for each in found] == [values[starts[i] : starts[i] + context].tolist() for i in indices]
    assert all(each.dtype.isnative and each.flags.writeable for each in found)
    assert windows[-1].tolist() == values[starts[-1] : starts[-1] + context].tolist()


@pytest.mark.parametrize("index", [3, -4, np.uint64(2**64 - 1), 2**63, 2**70, -(2**70)])
def test_indices_out_of_range(tmp_path: Path, index: int) -> None:
    """An error that says which, alone and in a batch; what is no integer is refused."""
    np.arange(6, dtype="u2").tofile(tmp_path / "file")
    windows = TokenFile(tmp_path / "file", "u2", 2)
    with pytest.raises(IndexError, match=f"sample {index:,} of a dataset of 3"):
        windows[index]
    with pytest.raises(IndexError, match=f"sample {index:,} of a dataset of 3"):
        windows.__getitems__([-1, index])
    with pytest.raises(TypeError):
        windows[0.5]  # type: ignore[index]
    with pytest.raises(TypeError):
        windows.__getitems__([0.5])  # type: ignore[list-item]
    assert windows.__getitems__([]) == []


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"dtype": "f4"}, ValueError, "tokens are integers, not float32"),
        ({"context": 0}, ValueError, "context must be at least 1, not 0"),
        ({"stride": 0}, ValueError, "stride must be at least 1"),
        ({"offset": -1}, ValueError, "offset must be at least 0"),
        ({"dtype": "i4"}, ShardError, "no whole number of int32"),
        ({"offset": 14}, ShardError, "of which 14 are a header"),
    ],
)
def test_bad_arguments(tmp_path: Path, options: dict[str, Any], error: type[Exception], said: str) -> None:
    """Refused when the dataset is made."""
    np.arange(5, dtype="u2").tofile(tmp_path / "file")
    arguments: dict[str, Any] = {"dtype": "u2", "context": 2, **options}
    with pytest.raises(error, match=said):
        TokenFile(tmp_path / "file", **arguments)


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"num_workers": 2, "multiprocessing_context": "fork"},
        {"num_workers": 2, "multiprocessing_context": "forkserver"},
        {"num_workers": 2, "multiprocessing_context": "spawn"},
        {"num_workers": 2, "workers": "threads"},
    ],
    ids=["0", "fork", "forkserver", "spawn", "threads"],
)
def test_in_workers(tmp_path: Path, options: dict[str, Any]) -> None:
    """Shuffled by a seed: the same batches by any workers. A file that is cut while they read is an error of theirs."""
    path = tmp_path / "file"
    np.arange(4000, dtype="u2").tofile(path)
    windows = TokenFile(path, "u2", 5, stride=4)
    with DataLoader[Any](windows, batch_size=50, shuffle=True, seed=3) as loader:
        wanted = list(loader)
    with DataLoader[Any](windows, batch_size=50, shuffle=True, seed=3, **options) as loader:
        found = list(loader)
        assert all(map(torch.equal, found, wanted))
        assert found[0].dtype == torch.uint16
        assert torch.equal(found[0].long()[:, :1] + torch.arange(5), found[0].long())
    np.zeros(400_000, "u2").tofile(tmp_path / "long")  # more than any loader reads ahead
    with DataLoader[Any](TokenFile(tmp_path / "long", "u2", 5), batch_size=50, **options) as loader:
        batches = iter(loader)
        next(batches)
        os.truncate(tmp_path / "long", 100)
        with pytest.raises(ShardError, match="the file has changed"):
            for _ in batches:
                pass
        del batches
