"""Lets old code import DataLoader2 and its datapipes under their old names, where torchdata no longer has them.

    from asyncloader.dataloader2 import compat

    compat.install()
    from torchdata.dataloader2 import DataLoader2
    from torchdata.datapipes.iter import IterableWrapper

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
from typing import Any

import torch.utils.data
import torch.utils.data.datapipes.iter as torch_iter
import torch.utils.data.datapipes.map as torch_map
from torch.utils.data.datapipes.utils.common import StreamWrapper

from asyncloader.dataloader2 import datapipes

__all__ = ["install", "uninstall"]

_PACKAGE = "torchdata"
_OLD = f"{_PACKAGE}.dataloader2"
_NEW = "asyncloader.dataloader2"
_PIPES = f"{_PACKAGE}.datapipes"


def _names(module: Any, *further: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in (*module.__all__, *further)}


_OURS = {name: kind for name, kind in _names(datapipes).items() if name not in ("register_forms", "unzip")}
# The names of torchdata's modules of datapipes that torch or this package has.
_MODULES: dict[str, dict[str, Any]] = {
    _PIPES: _names(torch.utils.data, "functional_datapipe"),
    f"{_PIPES}.iter": {
        "IterDataPipe": torch.utils.data.IterDataPipe,
        **_names(torch_iter),
        **_OURS,
        "UnZipper": datapipes.unzip,
    },
    f"{_PIPES}.map": {"MapDataPipe": torch.utils.data.MapDataPipe, **_names(torch_map)},
    f"{_PIPES}.utils": {"StreamWrapper": StreamWrapper},
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `torchdata.dataloader2`, `torchdata.datapipes` and their modules, and `torchdata` itself, where torchdata
    does not have them.

    `install` puts it before the other finders: a path finder would load our modules a second time, under the old names.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in (_PACKAGE, _OLD, _PIPES):
            if importlib.machinery.PathFinder.find_spec(fullname, path) is not None:
                return None
            return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname != _OLD)
        if fullname in _MODULES and _is_ours(sys.modules[_PIPES]):
            return importlib.machinery.ModuleSpec(fullname, self)
        if fullname.startswith(f"{_OLD}.") and sys.modules[_OLD].__name__ == _NEW:
            name = _NEW + fullname.removeprefix(_OLD)
            if importlib.util.find_spec(name) is not None:
                return importlib.machinery.ModuleSpec(fullname, self)
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in _MODULES:
            vars(module).update(_MODULES[name], __all__=sorted(_MODULES[name]))
            for within in _MODULES if name == _PIPES else ():
                importlib.import_module(within)  # ``torchdata.datapipes.iter`` needs no import of its own
        elif name != _PACKAGE:
            # After this method the import system returns the module in `sys.modules`, not the empty one it has made.
            sys.modules[name] = importlib.import_module(_NEW + name.removeprefix(_OLD))


def _is_ours(module: ModuleType) -> bool:
    return getattr(module.__spec__, "loader", None) is _finder


_finder = _Finder()


def install() -> None:
    """Have ``import torchdata.dataloader2`` give `asyncloader.dataloader2`, unless torchdata has one. Idempotent.

    Likewise ``torchdata.datapipes`` with its ``iter``, ``map`` and ``utils``, which then have torch's own datapipes,
    and ours. Importing another name that torchdata 0.9 had there is an ImportError.
    """
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Undo `install`. Modules and names that were imported since stay valid. Idempotent."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _PACKAGE and (_is_ours(module) or module.__name__.startswith(_NEW)):
            del sys.modules[name]
            package, _, attribute = name.rpartition(".")
            if package in sys.modules:
                vars(sys.modules[package]).pop(attribute, None)
