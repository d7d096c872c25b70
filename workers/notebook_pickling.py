"""Has a worker find what the program's `__main__` defines, or says why it cannot.

Data path: main process: dataset, task index, state -> [notebook_pickling] -> spawned worker.

A session is a program whose `__main__` lies in no file: a notebook's kernel, an interactive interpreter, ``python -c``,
a program read from standard input. Its workers cannot import it, so its functions and classes are pickled by
cloudpickle, code and all.

The worker sets each as an attribute of its own `__main__`. An index that has one of them carries it each time.

A worker that is spawned, or comes from a fork server, imports the main module of any other program. Without ``if
__name__ == "__main__":`` the import runs the program, which makes a loader and would start workers again.
"""

from __future__ import annotations

import ast
import contextlib
import copyreg
import io
import os
import pickle
import sys
import threading
from collections import ChainMap
from collections.abc import Callable, Generator, Mapping
from multiprocessing import process
from pathlib import Path
from types import FunctionType
from typing import Any

from asyncloader.workers.fetch.error_notes import add_note

FORK = (
    'multiprocessing_context="fork", the default on Linux before Python 3.14: a worker may then hang if another thread '
    "of the program holds a lock as it is forked, and cannot use CUDA if the program has used it"
)
"""Advice for a program that worked before Python 3.14, with its risks."""
_GUARD = 'if __name__ == "__main__":'
_ADVICE = (
    "A worker that is spawned, or comes from a fork server, imports {path}, which makes a loader and reads it while it "
    f"is imported. Put what the program does under `{_GUARD}`"
)


def leave_if_importing_main(start_method: str) -> None:
    """End this process if it is a child that still imports its main module, and so may not start workers.

    `multiprocessing` would raise RuntimeError; its traceback of 20 lines, for each worker, hides what to do. The parent
    says it, in the error of the worker that has gone.

    Raises:
        SystemExit: with exit code 1, after one line on standard error.
    """
    if start_method == "fork" or not getattr(process.current_process(), "_inheriting", False):
        return
    text = f"{_ADVICE.format(path=_path() or 'the program')}."
    if threading.current_thread() is threading.main_thread():
        raise SystemExit(text)
    # An event loop that waits for this thread would print 40 lines of the calls that the exit came through.
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
    os._exit(1)


def unguarded_main() -> str:
    """What to do, if the program's main module does not compare its `__name__`; "" if it does, or is not a file."""
    path = _path()
    try:
        tree = ast.parse(Path(path).read_bytes()) if path else None
    except (OSError, SyntaxError, ValueError):
        return ""
    if tree is None or any(isinstance(node, ast.Compare) and _has_name(node) for node in ast.walk(tree)):
        return ""
    return f"{_ADVICE.format(path=path)}."


def _has_name(comparison: ast.Compare) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(comparison))


def about_main() -> str:
    """What to do about a worker, or a fork server, that has ended as one does whose import of the main module failed;
    "" if there is no file to import.
    """
    advice = unguarded_main()
    if advice:
        return f"{advice.removesuffix('.')}, or use {FORK}."
    path = _path()
    return path and (
        f"It imports {path} first: what that raised is above. Put all that a worker cannot do, such as reading a "
        f"loader, under `{_GUARD}`."
    )


@contextlib.contextmanager
def found_in_main() -> Generator[None]:
    """Context around unpickling in a worker: if a name is missing in the main module, notes on the error why."""
    try:
        yield
    except AttributeError as error:
        if "'__mp_main__'" in str(error):
            add_note(
                error,
                f"a worker that is spawned, or comes from a fork server, imports {_path()}, and finds there nothing "
                f"that is defined under `{_GUARD}` or in a function. Define it at the top of a module, or use {FORK}",
            )
        raise


def _path() -> str:
    # In a worker that still imports it, the program's main module has its second name only.
    modules = (sys.modules.get(name) for name in ("__main__", "__mp_main__"))
    return next(filter(None, (getattr(module, "__file__", None) for module in modules)), "")


_MAIN = "__main__"


def in_session() -> bool:
    """Whether a process that is spawned now cannot import the `__main__` of this process."""
    main = sys.modules[_MAIN]
    # Run by ``python -m``: a child imports it by its name.
    if getattr(main, "__spec__", None) is not None:
        return False
    file = getattr(main, "__file__", None)
    return file is None or not Path(file).exists()


@contextlib.contextmanager
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

    Raises:
        ImportError: (`dump`) cloudpickle is not installed, and a function or class is defined in `__main__`.
    """

    def __init__(self, file: io.BytesIO, reducers: Mapping[type, Any]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
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


def dump_message(value: Any) -> bytes:
    """Pickle a value for a worker of a session that has started."""
    data = pickle.dumps(value, 5)
    # Only a pickle that contains the module's name can refer to one of the session's objects by name.
    if _MAIN.encode() not in data:
        return data
    buffer = io.BytesIO()
    SessionPickler(buffer, {}).dump(value)
    return buffer.getvalue()
