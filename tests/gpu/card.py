"""Shared by the tests on a card."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from asyncloader.delivery.tensors import map_tensors, tensors_of

ON_CARD = torch.cuda.is_available()
NEEDS_CARD = [pytest.mark.gpu, pytest.mark.skipif(not ON_CARD, reason="needs CUDA")]


def on_cpu(batch: Any) -> Any:
    """Copy the batch to the CPU's memory, after the work of the current stream."""
    return map_tensors(batch, lambda tensor: tensor.cpu())


def all_there(batch: Any) -> bool:
    """Whether every tensor of the batch is on a card."""
    return all(tensor.is_cuda for tensor in tensors_of(batch))


def settled() -> int:
    """Return the bytes of tensors on the card once all its work is done, and all garbage is collected."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # also frees memory that other streams have used
    return torch.cuda.memory_allocated()
