"""Lets old code import DataLoader2 under its old name, where torchdata no longer has it.

    from asyncloader.dataloader2 import compat

    compat.install()
    from torchdata.dataloader2 import DataLoader2

Data path: none. Nothing is installed by importing this module.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

__all__ = ["install", "uninstall"]

_PACKAGE = "torchdata"
_OLD = f"{_PACKAGE}.dataloader2"
_NEW = "asyncloader.dataloader2"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `torchdata.dataloader2` and its modules, and `torchdata` itself, where torchdata does not have them.

    It is asked first: a path finder would load the modules of our package again, under the old names.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in (_PACKAGE, _OLD):
            if importlib.machinery.PathFinder.find_spec(fullname, path) is not None:
                return None
            return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname == _PACKAGE)
        if fullname.startswith(f"{_OLD}.") and sys.modules[_OLD].__name__ == _NEW:
            name = _NEW + fullname.removeprefix(_OLD)
            if importlib.util.find_spec(name) is not None:
                return importlib.machinery.ModuleSpec(fullname, self)
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ != _PACKAGE:
            ours = importlib.import_module(_NEW + module.__name__.removeprefix(_OLD))
            sys.modules[module.__name__] = ours  # the import system then takes this one


_finder = _Finder()


def install() -> None:
    """Have ``import torchdata.dataloader2`` give `asyncloader.dataloader2`, unless torchdata has one. Idempotent."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Undo `install`. What was imported meanwhile stays valid where it is held. Idempotent."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for name, module in list(sys.modules.items()):
        if name == _OLD or name.startswith(f"{_OLD}."):
            if module.__name__.startswith(_NEW):
                del sys.modules[name]
        elif name == _PACKAGE and getattr(module.__spec__, "loader", None) is _finder:
            del sys.modules[name]
    package = sys.modules.get(_PACKAGE)
    ours = getattr(package, "dataloader2", None)
    if ours is not None and ours.__name__ == _NEW:
        del package.dataloader2  # type: ignore[union-attr]
