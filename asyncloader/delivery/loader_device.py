"""Finds the transfer to a loader's `device`, which all of its epochs share.

Data path: options -> [loader_device] -> transfer.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from asyncloader.delivery import open_accelerator
from asyncloader.delivery.accelerator import DeviceLike, PlainAccelerator
from asyncloader.workers.ipc.ring_manager import KeptRings

if TYPE_CHECKING:
    from asyncloader.delivery.transfer import DeviceTransfer


class _Options(Protocol):
    @property
    def device(self) -> DeviceLike: ...
    @property
    def device_transform(self) -> Callable[[Any], Any] | None: ...
    @property
    def static_buffers(self) -> bool: ...


class _Loader(Protocol):
    @property
    def _asyncloader_options(self) -> _Options: ...


def transfer_of(loader: _Loader) -> DeviceTransfer | None:
    """The loader's transfer; None if its batches stay as they are. All epochs share one, so that static tensors keep
    their addresses. Called at the beginning of each epoch in the iterating thread: the epoch's copies and transforms
    wait for the work that this thread's stream has so far.

    Raises:
        DeviceUnavailable: this process cannot use the device.
    """
    if loader._asyncloader_options.device is None:
        return None
    kept = _kept_of(loader)
    if not kept.opened:
        kept.transfer = _make_transfer(loader)
        # Last: after an error the next epoch tries again.
        kept.opened = True
    if kept.transfer is not None:
        kept.transfer.accelerator.sync_side_streams()
    return kept.transfer


def kept_rings_of(loader: _Loader) -> KeptRings | None:
    """The store of the loader's page-locked rings between epochs; None if it has no `device`. Does not open the
    device.
    """
    return None if loader._asyncloader_options.device is None else _kept_of(loader).rings


def current_transfer(loader: _Loader) -> DeviceTransfer | None:
    """The transfer that the loader's last epoch used; None without such an epoch."""
    kept: _Kept | None = loader.__dict__.get(_KEPT)
    return None if kept is None else kept.transfer


_KEPT = "_asyncloader_transfer"


def _kept_of(loader: _Loader) -> _Kept:
    kept: _Kept | None = loader.__dict__.get(_KEPT)
    if kept is None or not kept.serves(loader):
        # Kept in the loader: a transform may refer to the loader, and only so can the collector free the cycle.
        kept = loader.__dict__[_KEPT] = _Kept(loader)
    return kept


class _Kept:
    """A loader's transfer and rings. Copies of the loader, also those that are pickled, and the loader in a forked
    child, have their own.
    """

    def __init__(self, loader: _Loader | None = None) -> None:
        self._loader = None if loader is None else weakref.ref(loader)
        self._owner = os.getpid()
        self.transfer: DeviceTransfer | None = None
        self.opened = False
        """Whether `transfer` was set; None is then the final value."""
        self.rings = KeptRings()

    def serves(self, loader: _Loader) -> bool:
        return self._loader is not None and self._loader() is loader and self._owner == os.getpid()

    def __reduce__(self) -> Any:
        return _Kept, ()


def _make_transfer(loader: _Loader) -> DeviceTransfer | None:
    from asyncloader.delivery.transfer import DeviceTransfer  # late: few loaders have a device

    options = loader._asyncloader_options
    device = torch.device(options.device)  # type: ignore[arg-type]
    accelerator = open_accelerator(device)
    if accelerator is None:
        if options.device_transform is None and not options.static_buffers:
            return None
        accelerator = PlainAccelerator(device)
    return DeviceTransfer(accelerator, options.device_transform, static=options.static_buffers)
