"""Turns workers' answers into batches, and copies them to page-locked memory or a device ahead of the consumer.

Data path: reorder -> [delivery] -> consumer. In the order in which a batch passes them:

    opener         opens an answer: a view of the slot, or a copy
    stage          a thread that works on each batch in order; the pinning stage
    device_stage   the stage that copies to a device; page-locks rings, keeps slots until their copies are done
    transfer       copies one batch to the device, neighbours together, and runs the user's `device_transform`
    tensors        finds and replaces the tensors of a batch; static tensors for CUDA graphs
    accelerator    the interface of a device
    cuda           CUDA: side streams, events, page-locking

This module chooses the accelerator for a `torch.device`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncloader.delivery.accelerator import Accelerator, PlainAccelerator
from asyncloader.errors import DeviceUnavailable

__all__ = ["OPENERS", "open_accelerator"]


def _open_cuda(device: torch.device) -> Accelerator:
    from asyncloader.delivery.cuda import CudaAccelerator

    return CudaAccelerator(device)


OPENERS: dict[str, Callable[[torch.device], Accelerator]] = {"cuda": _open_cuda}
"""Factories of accelerators, by device type."""


def open_accelerator(device: torch.device) -> Accelerator | None:
    """Open the accelerator for this device; None for the CPU, in whose memory batches are made.

    Raises:
        DeviceUnavailable: this process cannot use the device.
    """
    if device.type in OPENERS:
        return OPENERS[device.type](device)
    if device.type == "cpu":
        return None
    try:
        torch.empty(0, dtype=torch.uint8, device=device)
    except (AssertionError, RuntimeError) as error:  # torch was built without this backend
        reason = str(error).partition("\n")[0].rstrip(".")
        raise DeviceUnavailable(str(device), f"torch {torch.__version__} says: {reason}") from error
    return PlainAccelerator(device)
