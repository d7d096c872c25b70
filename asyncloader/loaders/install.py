"""`install`: inside a block, code that creates torch's DataLoader gets ours.

Data path: none.

A last resort for code that builds loaders itself and accepts no class. It is explicit, and ends with its ``with``
block. No module's names are replaced, so it does not matter when and how libraries imported the class: its constructor
turns the new instance into one of ours:

- an instance of torch's class becomes one of our `DataLoader`;
- an instance of a subclass becomes one of a class of the same name, derived from the subclass and from ours, in which
  the subclass's ``super()`` is ours. The subclass itself is not changed.

The metaclass of both is torch's, `type`, which is compatible with any other. Inside the block the constructor of
torch's iterators warns of loaders that torch's own engine still reads.
"""

from __future__ import annotations

import functools
import threading
import types
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any

import torch.utils.data
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from asyncloader.base.process_hooks import in_forked_child
from asyncloader.epoch.sync_inline import CountedNext
from asyncloader.loaders.loader import DataLoader
from asyncloader.options.declaration import LoaderSpec

_Torchs: Any = torch.utils.data.DataLoader


def install() -> AbstractContextManager[type[DataLoader[Any]]]:
    """Make torch's `DataLoader` class create ours until the block ends. The context value is our class.

    Inside the block, in all threads, ``torch.utils.data.DataLoader(...)`` makes an `asyncloader.DataLoader`, whatever
    name it is called by, and so do its subclasses: their loaders are instances of their class and of ours. Loaders that
    were made inside the block stay ours; earlier loaders do not change. Blocks may be nested.

    A library that makes torch's *iterators* itself is not affected; a warning names it once when that happens inside
    the block.
    """
    return _Block()


class _Block(ContextDecorator):
    """The context manager. It has no finalizer, so a block that is never left does nothing at interpreter exit."""

    def __enter__(self) -> type[DataLoader[Any]]:
        _hooks.enter()
        return DataLoader

    def __exit__(self, *_: object) -> None:
        _hooks.leave()


class _Hooks:
    """Replaces two constructors while at least one block is open."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.blocks = 0
        self.named: set[str] = set()
        self._put: list[tuple[Any, Any]] = []

    def enter(self) -> None:
        with self.lock:
            self.blocks += 1
            if self.blocks == 1:
                hooks: list[tuple[Any, Any]] = [(_Torchs, _wrap_loader), (_BaseDataLoaderIter, _wrap_iterator)]
                for kind, hook in hooks:
                    self._put.append((kind, hook(kind.__init__)))
                    kind.__init__ = self._put[-1][1]

    def leave(self) -> None:
        with self.lock:
            self.blocks -= 1
            if not self.blocks:
                for kind, hook in self._put:
                    # If other code has wrapped our hook since, it stays, and with no block open only calls the
                    # original.
                    if kind.__init__ is hook:
                        kind.__init__ = hook.__wrapped__
                self._put.clear()
                self.named.clear()

    def warn(self, name: str, text: str) -> None:
        if name not in self.named:
            self.named.add(name)
            warnings.warn(f"asyncloader.install() does not reach {name}: {text}", stacklevel=4)


_hooks = _Hooks()
# Another thread may hold the lock at the fork; in the child it would never be released.
in_forked_child(lambda: setattr(_hooks, "lock", threading.Lock()))


def _wrap_loader(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def make(self: Any, /, *args: Any, **kwargs: Any) -> None:
        if _hooks.blocks and not issubclass(type(self), LoaderSpec) and _become_ours(self):
            self.__dict__["_asyncloader_installed"] = True
            DataLoader.__init__(self, *args, **kwargs)  # calls this function again, now for a class of ours
        else:
            original(self, *args, **kwargs)

    return make


def _become_ours(loader: Any) -> bool:
    kind = type(loader)
    try:
        object.__setattr__(loader, "__class__", DataLoader if kind is _Torchs else _derive(kind))
    except Exception as error:  # the class's own metaclass or `__init_subclass__` may raise anything
        _hooks.warn(_name(kind), f"no class can be derived from it ({error}). Its batches come from torch's engine")
        return False
    return True


def _derive(kind: type[Any]) -> type[Any]:
    """Derive our class from a subclass of torch's; the same class as before, as long as that is referenced."""
    for made in type.__subclasses__(kind):
        if made.__dict__.get("_asyncloader_of") is kind:
            return made
    body = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")} | {"_asyncloader_of": kind}
    reduce: Any = kind.__reduce__
    if reduce is object.__reduce__:
        # pickle finds a class by its name, which is the original's.
        body["__reduce__"] = lambda self: (_new, (kind,), self.__getstate__())
    return types.new_class(kind.__name__, (kind, DataLoader), exec_body=lambda names: names.update(body))


def _new(kind: type[Any]) -> Any:
    return object.__new__(_derive(kind))


def _wrap_iterator(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def begin(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        if _hooks.blocks and not isinstance(self, CountedNext) and not _was_made_before(self, loader):
            _hooks.warn(
                _name(type(loader)),
                f"it makes torch's iterators by itself (here {_name(type(self))}), so its batches come from torch's "
                "engine. Where it takes a loader, pass it one of asyncloader",
            )
        original(self, loader, *args, **kwargs)

    return begin


def _was_made_before(iterator: Any, loader: Any) -> bool:
    """Whether torch's engine is expected for this loader, because it was not made inside a block."""
    plain = type(iterator) in (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter)
    return plain and issubclass(type(loader), _Torchs) and not issubclass(type(loader), LoaderSpec)


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
