"""How tensors of special kinds are pickled: by parts that are plain tensors, which become leaves.

Data path: worker: collate -> [reductions, in codec: encode] -> ring -> reorder -> [codec: decode] -> consumer.

torch's own ways would do, but for their side effects in a process that lives long.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["reduce_quantized", "reduce_sparse", "reduce_typed_storage"]


def reduce_sparse(tensor: torch.Tensor) -> Any:
    """A sparse tensor by its parts. torch's own way keeps every tensor that it unpickles in a global list, for ever."""
    if tensor.layout is torch.sparse_coo:
        parts = (tensor._indices(), tensor._values())
        return _sparse_coo, (*parts, tuple(tensor.shape), tensor.is_coalesced())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return _sparse_compressed, (
            (tensor.crow_indices(), tensor.col_indices(), tensor.values()),
            tuple(tensor.shape),
            tensor.layout,
        )
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return _sparse_compressed, (
            (tensor.ccol_indices(), tensor.row_indices(), tensor.values()),
            tuple(tensor.shape),
            tensor.layout,
        )
    return tensor.__reduce_ex__(5)


def _sparse_coo(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], is_coalesced: bool
) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced, check_invariants=False)


def _sparse_compressed(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor], shape: tuple[int, ...], layout: torch.layout
) -> torch.Tensor:
    return torch.sparse_compressed_tensor(*parts, shape, layout=layout, check_invariants=False)


def reduce_quantized(tensor: torch.Tensor) -> Any:
    """A quantized tensor by its parts. torch's own way asks our storage for its type, and warns that this is old."""
    if tensor.dtype in (torch.qint8, torch.quint8, torch.qint32):
        scheme = tensor.qscheme()
        if scheme == torch.per_tensor_affine:
            parts = (tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point())
            return torch._make_per_tensor_quantized_tensor, parts  # pyright: ignore[reportPrivateImportUsage]
        if scheme == torch.per_channel_affine:
            channels = (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), tensor.q_per_channel_axis())
            make = torch._make_per_channel_quantized_tensor  # pyright: ignore[reportPrivateImportUsage]
            return make, (tensor.int_repr(), *channels)
    return tensor.__reduce_ex__(5)


def reduce_typed_storage(storage: torch.storage.TypedStorage) -> Any:
    """A typed storage by the untyped one under it."""
    return _typed_storage, (storage._untyped_storage, storage.dtype)


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
