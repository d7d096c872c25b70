"""Tensors that stay where they are: each batch is copied into those that were made for the first one of its shapes.

Data path: delivery -> stage -> mover -> [static] -> consumer.

A CUDA graph reads from the addresses that it was captured with. The copy is one within the device, in the consumer's
own stream, behind whatever that stream still does with the batch before: no step sees a batch change under it.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from typing import Any

import torch

from asyncloader.device.tensors import map_tensors

__all__ = ["MOST_SETS", "StaticTensors"]


MOST_SETS = 32
"""A set takes the memory of a batch for good: it cannot be given to other shapes, since a graph may read from it."""


class StaticTensors:
    """The sets of tensors, one for each combination of shapes, strides and dtypes; an epoch's short last batch has its
    own. They live as long as this object. The first `MOST_SETS` combinations have one; batches of others are delivered
    as they are, with one warning.
    """

    def __init__(self) -> None:
        self._sets: dict[Hashable, list[torch.Tensor]] = {}
        self._warned = False

    def fill(self, batch: Any, tensors: list[torch.Tensor]) -> Any:
        """The batch, its tensors being the static ones, which hold its values once the current stream is there.

        Args:
            batch: on the device.
            tensors: of the batch, each once. Sparse and nested ones are delivered as they are.
        """
        tensors = [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_nested]
        with torch.inference_mode(False), torch.no_grad():  # they serve training and validation
            kept = self._filled(tensors)
        replaced = {id(tensor): static for tensor, static in zip(tensors, kept, strict=True)}
        return map_tensors(batch, lambda tensor: replaced.get(id(tensor), tensor))

    def _filled(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        key = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors)
        kept = self._sets.get(key)
        if kept is None and len(self._sets) >= MOST_SETS:
            self._warn()
            return tensors
        if kept is None:
            # Made by the consumer's stream, unlike the batch's own: no other stream ever has a claim on their memory.
            kept = self._sets[key] = [tensor.clone() for tensor in tensors]
        else:
            for static, tensor in zip(kept, tensors, strict=True):
                static.copy_(tensor, non_blocking=True)
        return kept

    def _warn(self) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"static_buffers: batches came in more than {MOST_SETS} combinations of shapes. The first {MOST_SETS} keep "
            "their tensors; batches of any other are delivered in tensors of their own, which no CUDA graph should "
            "read. Pad batches to a few shapes, or leave out static_buffers.",
            RuntimeWarning,
            stacklevel=2,
        )
