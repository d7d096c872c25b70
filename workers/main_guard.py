"""Recognises a program without ``if __name__ == "__main__":`` whose workers are spawned or come from a fork server.

Data path: none. Each such worker imports the program's main module. Without the guard the import runs the program,
which makes a loader and would start workers again.
"""

from __future__ import annotations

import ast
import sys
from multiprocessing import process
from pathlib import Path

__all__ = ["leave_if_importing_main", "unguarded_main"]

_ADVICE = (
    "A worker that is spawned, or comes from a fork server, imports {path}, which makes a loader and reads it while it "
    'is imported. Put what the program does under `if __name__ == "__main__":`.'
)


def leave_if_importing_main(start_method: str) -> None:
    """End this process if it is a child that still imports its main module, and so may not start workers.

    `multiprocessing` would raise RuntimeError; its traceback of 20 lines, for each worker, hides what to do. The parent
    says it, in the error of the worker that has gone.

    Raises:
        SystemExit: with exit code 1, after one line on standard error.
    """
    if start_method != "fork" and getattr(process.current_process(), "_inheriting", False):
        raise SystemExit(_ADVICE.format(path=_path() or "the program"))


def unguarded_main() -> str:
    """What to do, if the program's main module does not ask for its `__name__`; "" if it does, or is not a file."""
    path = _path()
    try:
        tree = ast.parse(Path(path).read_bytes()) if path else None
    except (OSError, SyntaxError, ValueError):
        return ""
    if tree is None or any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(tree)):
        return ""
    return _ADVICE.format(path=path)


def _path() -> str:
    # In a worker that still imports it, the program's main module has its second name only.
    modules = (sys.modules.get(name) for name in ("__main__", "__mp_main__"))
    return next(filter(None, (getattr(module, "__file__", None) for module in modules)), "")
