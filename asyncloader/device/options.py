"""The options of the device, and what they make.

Data path: options -> [device options] -> consumer.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch

from asyncloader.device.accelerator import PlainAccelerator, open_accelerator
from asyncloader.device.mover import Mover

__all__ = ["DEFAULT_PREFETCH_DEVICE", "DeviceLike", "check_device_options", "mover_of"]

DeviceLike: TypeAlias = torch.device | str | int | None
"""As torch takes it: ``"cuda"``, ``"cuda:1"``, a `torch.device`, a number."""

DEFAULT_PREFETCH_DEVICE = 1


def check_device_options(*, device: Any, prefetch_device: Any, device_transform: Any, static_buffers: Any) -> None:
    """Check the options.

    Raises:
        TypeError, ValueError: one is out of range, or does not go with the others.
    """
    if not isinstance(prefetch_device, int) or isinstance(prefetch_device, bool) or prefetch_device < 1:
        raise ValueError(
            f"prefetch_device should be a number of batches, at least 1, but got prefetch_device={prefetch_device!r}"
        )
    if device_transform is not None and not callable(device_transform):
        raise TypeError(
            f"device_transform should be a function from a batch to a batch, but got {type(device_transform).__name__}"
        )
    if device is None:
        given = {"device_transform": device_transform is not None, "static_buffers": bool(static_buffers)}
        for name in (name for name, set_ in given.items() if set_):
            raise ValueError(f"{name} is about batches on a device, and needs device=, for example device='cuda'")
        return
    try:
        torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device should be what torch.device takes, but got device={device!r}: {error}") from None


class DeviceOptions(Protocol):
    """Those of a loader."""

    device: DeviceLike
    device_transform: Callable[[Any], Any] | None
    static_buffers: bool


def mover_of(loader: DeviceOptions) -> Mover | None:
    """What moves this loader's batches; None where nothing is to be done to them. All epochs of a loader share one: its
    static tensors keep their addresses.

    Raises:
        DeviceUnavailable: this process cannot use the device.
    """
    if loader.device is None:
        return None
    key = (os.getpid(), loader.device, loader.device_transform, loader.static_buffers)
    known = _movers.get(loader)
    if known is None or known[0] != key:
        known = _movers[loader] = key, _make_mover(loader)
    return known[1]


# Not attributes of the loaders, which are copied and pickled.
_movers: weakref.WeakKeyDictionary[DeviceOptions, tuple[Any, Mover | None]] = weakref.WeakKeyDictionary()


def _make_mover(loader: DeviceOptions) -> Mover | None:
    device = torch.device(loader.device)  # type: ignore[arg-type]
    accelerator = open_accelerator(device)
    if accelerator is None:
        if loader.device_transform is None and not loader.static_buffers:
            return None
        accelerator = PlainAccelerator(device)
    return Mover(accelerator, loader.device_transform, static=loader.static_buffers)
