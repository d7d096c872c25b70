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
from asyncloader.workers.kept_rings import KeptRings

__all__ = [
    "DEFAULT_PREFETCH_DEVICE",
    "DeviceLike",
    "check_device_options",
    "current_mover",
    "kept_rings_of",
    "mover_of",
]

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


class _Options(Protocol):
    device: DeviceLike
    device_transform: Callable[[Any], Any] | None
    static_buffers: bool


class _Loader(Protocol):
    @property
    def _asyncloader_options(self) -> _Options: ...


def mover_of(loader: _Loader) -> Mover | None:
    """What moves this loader's batches; None where nothing is to be done to them. All epochs of a loader share one: its
    static tensors keep their addresses. Called at the beginning of each epoch, by the thread that iterates: what its
    stream was given before is done before the epoch's copies and transforms.

    Raises:
        DeviceUnavailable: this process cannot use the device.
    """
    if loader._asyncloader_options.device is None:
        return None
    kept = _kept_of(loader)
    if not kept.opened:
        kept.mover = _make_mover(loader)
        kept.opened = True
    if kept.mover is not None:
        kept.mover.accelerator.follow()
    return kept.mover


def kept_rings_of(loader: _Loader) -> KeptRings | None:
    """Where this loader's page-locked rings are between epochs; None: it delivers to no device. The device is not
    opened for it.
    """
    return None if loader._asyncloader_options.device is None else _kept_of(loader).rings


def current_mover(loader: _Loader) -> Mover | None:
    """What moved this loader's batches last; None: nothing did."""
    kept: _Kept | None = loader.__dict__.get(_KEPT)
    return None if kept is None else kept.mover


_KEPT = "_asyncloader_mover"


def _kept_of(loader: _Loader) -> _Kept:
    kept: _Kept | None = loader.__dict__.get(_KEPT)
    if kept is None or not kept.serves(loader):
        # In the loader, which a transform may refer to: anywhere else the two would keep each other for ever.
        kept = loader.__dict__[_KEPT] = _Kept(loader)
    return kept


class _Kept:
    """A loader's mover, and its rings. Copies of the loader, also those that are pickled, and the loader in a forked
    child, have their own.
    """

    def __init__(self, loader: _Loader | None = None) -> None:
        self._loader = None if loader is None else weakref.ref(loader)
        self._owner = os.getpid()
        self.mover: Mover | None = None
        self.opened = False
        """Whether it is known that there is a mover, or is none."""
        self.rings = KeptRings()

    def serves(self, loader: _Loader) -> bool:
        return self._loader is not None and self._loader() is loader and self._owner == os.getpid()

    def __reduce__(self) -> Any:
        return _Kept, ()


def _make_mover(loader: _Loader) -> Mover | None:
    options = loader._asyncloader_options
    device = torch.device(options.device)  # type: ignore[arg-type]
    accelerator = open_accelerator(device)
    if accelerator is None:
        if options.device_transform is None and not options.static_buffers:
            return None
        accelerator = PlainAccelerator(device)
    return Mover(accelerator, options.device_transform, static=options.static_buffers)
