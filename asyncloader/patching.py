"""`install`: for a while, code that makes torch's DataLoader makes ours.

Data path: none.

The last resort, for frameworks that build loaders themselves and take no class. It is explicit, it ends with its
``with`` block, and it touches these names and no others: the two places where torch keeps the class, and the globals of
the frameworks that imported it from there.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.utils.data

from asyncloader.loader import DataLoader

__all__ = ["InstalledDataLoader", "install"]

T_co = TypeVar("T_co", covariant=True)

_TORCHS: type[Any] = torch.utils.data.DataLoader

PLACES = (
    "torch.utils.data",
    "torch.utils.data.dataloader",
    "accelerate.data_loader",
    "ignite.distributed.auto",
    "ray.train.torch.train_loop_utils",
    "timm.data.loader",
    "transformers.trainer",
    "webdataset.compat",
)
"""Modules in which the global `DataLoader` is replaced, if they are imported and have it."""


class _AnyLoader(type):
    """`isinstance(x, torch.utils.data.DataLoader)` must go on to be true of torch's own loaders."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _TORCHS) if cls is InstalledDataLoader else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _TORCHS) if cls is InstalledDataLoader else super().__subclasscheck__(subclass)


class InstalledDataLoader(DataLoader[T_co], metaclass=_AnyLoader):
    """Our `DataLoader` in the place of torch's."""


@contextmanager
def install() -> Generator[type[DataLoader[Any]], None, None]:
    """Put our `DataLoader` in the place of torch's until the block ends; gives the class.

    ``torch.utils.data.DataLoader``, and the name in the modules of accelerate, transformers, Ray Train, Ignite, timm
    and webdataset that are imported by then, mean ours inside the block, in all threads. Code that took the name from
    torch before keeps torch's class. A module that is first imported inside the block, and takes the name from torch,
    keeps ours afterwards unless it is one of those: import what you need before. Blocks may be nested.
    """
    inside_another = any(_present(place) is InstalledDataLoader for place in PLACES)
    for place in PLACES:
        _replace(place, _TORCHS, InstalledDataLoader)
    try:
        yield InstalledDataLoader
    finally:
        if not inside_another:
            for place in PLACES:
                _replace(place, InstalledDataLoader, _TORCHS)


def _present(place: str) -> Any:
    return getattr(sys.modules.get(place), "DataLoader", None)


def _replace(place: str, old: type[Any], new: type[Any]) -> None:
    if _present(place) is old:
        sys.modules[place].DataLoader = new  # type: ignore[attr-defined]
