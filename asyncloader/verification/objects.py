"""Walks all that a loader's dataset, sampler and functions keep: values, handles, and parts that do not pickle.

Data path: loader -> [objects] -> causes.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import pickle
import random
import socket
import sqlite3
import sys
import threading
import types
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncloader.errors import text_of
from asyncloader.verification.tokens import token
from asyncloader.verification.user_code import CodeLine, definition_of, rank

_MOST_OBJECTS = 5_000
_DEEPEST = 6
_MOST_ELEMENTS = 50  # of a list, whose elements are looked at one by one
_LOCKS: tuple[Any, ...] = (type(threading.Lock()), type(threading.RLock()))
_GENERATORS = random.Random | np.random.Generator | np.random.RandomState | torch.Generator


class Kept(NamedTuple):
    """A value that some object keeps.

    Attributes:
        path: such as ``dataset.transform.rng``.
        get: returns the value now.
        set: replaces it.
    """

    path: str
    get: Callable[[], Any]
    set: Callable[[Any], None]


def parts(loader: Any) -> dict[str, Any]:
    """Return the user's objects in a loader, by the names of its arguments."""
    names = ("dataset", "sampler", "batch_sampler", "collate_fn", "worker_init_fn")
    found = {name: getattr(loader, name, None) for name in names}
    return {name: each for name, each in found.items() if each is not None and not _is_library(each)}


def _is_library(value: Any) -> bool:
    """Whether a function is torch's, or a sampler that the loader made."""
    if isinstance(value, types.FunctionType):
        return value.__module__.partition(".")[0] in {"torch", "asyncloader"}
    kind = type(value)
    return kind.__module__.startswith("asyncloader.") and kind.__name__ == "SeededSampler"


def kept(roots: dict[str, Any]) -> Iterator[Kept]:
    """Yield the values that objects keep: attributes, elements, closures' values, data of their classes' modules."""
    seen: set[int] = set()
    modules: dict[str, types.ModuleType] = {}
    left: list[tuple[str, Any, int]] = [(name, value, 0) for name, value in roots.items()]
    while left and len(seen) < _MOST_OBJECTS:
        path, value, depth = left.pop(0)
        if id(value) in seen or depth > _DEEPEST:
            continue
        seen.add(id(value))
        _note_module(value, modules)
        for each in _members(path, value):
            yield each
            inner = _value(each)
            if _is_object(inner):
                left.append((each.path, inner, depth + 1))
    for name, module in modules.items():
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                yield from _class_data(value)
            elif not key.startswith("__") and _is_data(value):
                yield _item(f"{name}.{key}", vars(module), key)


def _value(each: Kept) -> Any:
    try:
        return each.get()
    except Exception:
        return None


def _note_module(value: Any, modules: dict[str, types.ModuleType]) -> None:
    name = getattr(value, "__module__", None) or ""
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is not None and rank(getattr(module, "__file__", None) or "<>") == 2:
        modules[name] = module


def _is_object(value: Any) -> bool:
    if isinstance(value, torch.Tensor | np.ndarray | types.ModuleType | type | str | bytes | _GENERATORS):
        return False
    return hasattr(value, "__dict__") or isinstance(value, dict | list | tuple | types.FunctionType | functools.partial)


def _is_data(value: Any) -> bool:
    if isinstance(value, types.ModuleType | type | types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return False
    return not type(value).__module__.startswith(("typing", "__future__"))


def _members(path: str, value: Any) -> Iterator[Kept]:
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield Kept(f"{path}.<{name}>", lambda cell=cell: cell.cell_contents, _cell_setter(cell))  # type: ignore[misc]
        for number, default in enumerate(value.__defaults__ or ()):
            yield Kept(f"{path}.<default {number}>", lambda default=default: default, lambda _: None)  # type: ignore[misc]
        return
    if isinstance(value, types.MethodType):
        yield Kept(f"{path}.__self__", lambda: value.__self__, lambda _: None)
        return
    if isinstance(value, functools.partial):
        for number, each in enumerate([value.func, *value.args, *value.keywords.values()]):
            yield Kept(f"{path}.<argument {number}>", lambda each=each: each, lambda _: None)  # type: ignore[misc]
        return
    if isinstance(value, dict):
        for key in itertools.islice(list(value), _MOST_ELEMENTS):
            yield _item(f"{path}[{key!r}]", value, key)
        return
    if isinstance(value, list):
        for number in range(min(len(value), _MOST_ELEMENTS)):
            yield _item(f"{path}[{number}]", value, number)
        return
    if isinstance(value, tuple):
        for number, each in enumerate(value[:_MOST_ELEMENTS]):
            yield Kept(f"{path}[{number}]", lambda each=each: each, lambda _: None)  # type: ignore[misc]
        return
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        for name in list(own):
            if not name.startswith("_asyncloader"):
                yield _item(f"{path}.{name}", own, name)
    for kind in type(value).__mro__:
        for slot in getattr(kind, "__slots__", ()):
            if isinstance(slot, str) and hasattr(value, slot) and not slot.startswith("__"):
                yield Kept(
                    f"{path}.{slot}", functools.partial(getattr, value, slot), functools.partial(setattr, value, slot)
                )


def _class_data(kind: type) -> Iterator[Kept]:
    for name, value in list(vars(kind).items()):
        if (
            not name.startswith("__")
            and _is_data(value)
            and isinstance(value, int | float | list | dict | set | functools._lru_cache_wrapper | _GENERATORS)
        ):
            path = f"{kind.__module__}.{kind.__qualname__}.{name}"
            yield Kept(path, functools.partial(getattr, kind, name), functools.partial(setattr, kind, name))


def _item(path: str, holder: Any, key: Any) -> Kept:
    return Kept(path, functools.partial(holder.__getitem__, key), functools.partial(holder.__setitem__, key))


def _cell_setter(cell: types.CellType) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        cell.cell_contents = value

    return change


def snapshot(roots: dict[str, Any]) -> dict[str, str]:
    """Return a token of each value that is kept, by its path."""
    return {each.path: token(_value(each), 3) for each in kept(roots)}


def copied(value: Any) -> Any:
    """Return a copy of a value.

    Raises:
        Exception: it cannot be copied.
    """
    if isinstance(value, torch.Generator):
        return value.clone_state() if hasattr(value, "clone_state") else torch.Generator().set_state(value.get_state())
    return copy.deepcopy(value)


# ---------------------------------------------------------------------------------------------- handles


class SharedHandle(NamedTuple):
    """Something that a forked worker shares with the process that it is forked from.

    Attributes:
        path: where it is kept.
        kind: in words.
        value: the object.
    """

    path: str
    kind: str
    value: Any


def handles(roots: dict[str, Any]) -> list[SharedHandle]:
    """Return the open files, sockets, connections and locks that the objects keep."""
    found: list[SharedHandle] = []
    seen: set[int] = set()
    for each in kept(roots):
        value = _value(each)
        kind = _kind_of_handle(value)
        if kind and id(value) not in seen:
            seen.add(id(value))
            found.append(SharedHandle(each.path, kind, value))
    return found


def _kind_of_handle(value: Any) -> str:
    match value:
        case io.IOBase():
            return "" if value.closed or isinstance(value, io.BytesIO | io.StringIO) else "an open file"
        case socket.socket():
            return "an open socket" if value.fileno() >= 0 else ""
        case sqlite3.Connection() | sqlite3.Cursor():
            return "an open connection of sqlite3"
        case _:
            return "a lock" if isinstance(value, _LOCKS) else ""


# ------------------------------------------------------------------------------------------------ pickling


class Unpicklable(NamedTuple):
    """A part that cannot be pickled: its path, its value, in words what that is, and where it is defined."""

    path: str
    value: Any
    what: str
    why: str
    place: CodeLine | None


def unpicklable(roots: dict[str, Any]) -> Unpicklable | None:
    """Return the innermost part that a spawned worker could not be sent."""
    for name, value in roots.items():
        why = _refusal(value)
        if why:
            return _innermost(name, value, why, _DEEPEST)
    return None


def _innermost(path: str, value: Any, why: str, depth: int) -> Unpicklable:
    if depth:
        for each in _members(path, value):
            inner = _value(each)
            reason = _refusal(inner)
            if reason:
                return _innermost(each.path, inner, reason, depth - 1)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    what = "lambda" if "<lambda>" in name else name
    return Unpicklable(path, value, what, why, definition_of(value))


def _refusal(value: Any) -> str:
    """Return why a value cannot be pickled for a process that is being spawned; "" if it can."""
    from asyncloader.workers.setup_payload import _Collector, _set_spawning

    _set_spawning(_Collector())
    try:
        reduction.ForkingPickler(_Nowhere(), pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:
        return f"{type(error).__name__}: {text_of(error)}".splitlines()[0]
    finally:
        _set_spawning(None)
    return ""


class _Nowhere:
    """A file whose bytes are dropped."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes
