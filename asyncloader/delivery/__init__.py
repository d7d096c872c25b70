"""Batches on an accelerator, ahead of the consumer.

Data path: reorder -> delivery -> [device] -> consumer. In the order of a batch:

    options        what the user asked for, checked
    accelerator    what is asked of a device; which one serves a torch.device
    cuda, driver   CUDA: a side stream, events, page-locking
    numa           where there are several nodes: near the device
    locking        rings are page-locked when their first batch comes
    stage          a batch is opened, and copied from its slot
    release        its slot is kept until the copy is done
    transfer          what happens to it on the device, and how the consumer gets it
    ranges         tensors that lie side by side are copied together
    tensors        the tensors of a batch, wherever in it they are
    static         tensors that stay where they are, for CUDA graphs
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
"""By type of device."""


def open_accelerator(device: torch.device) -> Accelerator | None:
    """What serves this device; None where batches are there already: they are made in the CPU's memory.

    Raises:
        DeviceUnavailable: this process cannot use it.
    """
    if device.type in OPENERS:
        return OPENERS[device.type](device)
    if device.type == "cpu":
        return None
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:  # what torch raises for a backend that it was built without
        reason = str(error).partition("\n")[0].rstrip(".")
        raise DeviceUnavailable(str(device), f"torch {torch.__version__} says: {reason}") from error
    return PlainAccelerator(device)
