"""Sends functions and classes that a session defines in `__main__` to its workers by value.

Data path: main process: dataset, task index, state -> [notebook_pickling] -> spawned worker.

A session is a program whose `__main__` lies in no file: a notebook's kernel, an interactive interpreter, ``python -c``,
a program read from standard input. Its workers cannot import it, so its functions and classes are pickled by
cloudpickle, code and all.

The worker sets each as an attribute of its own `__main__`. Each is sent to a worker only once.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from asyncloader.plain_context import plain_context
from asyncloader.workers.main_guard import FORK

_MAIN = "__main__"


def in_session() -> bool:
    """Whether a process that is spawned now cannot import the `__main__` of this process."""
    main = sys.modules[_MAIN]
    # Run by ``python -m``: a child imports it by its name.
    if getattr(main, "__spec__", None) is not None:
        return False
    file = getattr(main, "__file__", None)
    return file is None or not Path(file).exists()


@plain_context
def file_of_main_hidden() -> Generator[None]:
    """Context around the start of a process. In a session it hides the `__file__` of `__main__`: a program read from
    standard input has "<stdin>", which multiprocessing would have the child import.
    """
    names = vars(sys.modules[_MAIN])
    if not in_session() or "__file__" not in names:
        yield
        return
    file = names.pop("__file__")
    try:
        yield
    finally:
        names["__file__"] = file


class SessionPickler(pickle.Pickler):
    """Pickles functions and classes of `__main__` by value, if cloudpickle is installed.

    Args:
        file: what to write to.
        reducers: a dispatch table that goes before cloudpickle's.
        known: the objects that the worker has, by name; they are pickled by reference.

    Raises:
        ImportError: (`dump`) cloudpickle is not installed, and a function or class is defined in `__main__`.
    """

    def __init__(self, file: io.BytesIO, reducers: Mapping[type, Any], known: Mapping[str, Any]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._known = known
        self.sent: dict[str, Any] = {}
        """The objects that were pickled by value and have a name in `__main__`."""
        self._by_value: Any = None
        tables: list[Any] = [reducers, copyreg.dispatch_table]
        try:
            from cloudpickle import Pickler
        except ImportError:
            pass
        else:
            # It pickles nothing itself: only its `reducer_override` is asked.
            self._by_value = Pickler(file)
            tables.append(Pickler.dispatch_table)
        self.dispatch_table = ChainMap(*tables)

    def reducer_override(self, obj: Any) -> Any:
        """Decide how a function or a class is pickled; other objects are pickled as ever."""
        if type(obj) is not FunctionType and not issubclass(type(obj), type):
            return NotImplemented
        name = obj.__qualname__
        in_main = obj.__module__ == _MAIN and "<" not in name  # a local object has no name by which it could be found
        named = in_main and vars(sys.modules[_MAIN]).get(name) is obj
        # By identity: a cell that is run again makes another object of the same name, which the worker does not have.
        if named and self._known.get(name) is obj:
            return NotImplemented
        if self._by_value is None:
            if in_main:
                raise ImportError(
                    f"{name} is defined in __main__ of a session, which a spawned worker cannot import: put it into a "
                    f"module that can be imported, pip install 'asyncloader[notebook]', or use {FORK}"
                )
            return NotImplemented
        reduced = self._by_value.reducer_override(obj)
        if not in_main:
            return reduced
        if named:
            self.sent[name] = obj
        make, arguments, *state = reduced
        return (_define, (name, named, make, arguments), *state)


def _define(name: str, named: bool, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """In a worker: make the function or class, and give it its name; in `__main__`, too, if it has that there."""
    made = make(*arguments)
    made.__qualname__ = name  # cloudpickle leaves it out for a class, which would lose a class that is nested in it
    if named:
        # Plain pickle then finds it there: what the worker sends back refers to it by name, and arrives as an object of
        # the session's own class.
        setattr(sys.modules[_MAIN], name, made)
    return made


def dump_message(known: dict[str, Any], value: Any) -> bytes:
    """Pickle a value for a worker that has started; `known` are the session's objects that it has, and is brought up to
    date.
    """
    data = pickle.dumps(value, 5)
    # Only a pickle that contains the module's name can refer to one of the session's objects by name.
    if _MAIN.encode() not in data:
        return data
    buffer = io.BytesIO()
    pickler = SessionPickler(buffer, {}, known)
    pickler.dump(value)
    # Only now, because `dump` may have raised.
    known.update(pickler.sent)
    return buffer.getvalue()
