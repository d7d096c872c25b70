"""Recognises a program without ``if __name__ == "__main__":`` whose workers are spawned or come from a fork server.

Data path: none. Each such worker imports the program's main module. Without the guard the import runs the program,
which makes a loader and would start workers again.
"""

from __future__ import annotations

import ast
import os
import sys
import threading
from collections.abc import Generator
from multiprocessing import process
from pathlib import Path

from asyncloader.plain_context import plain_context
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


@plain_context
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
