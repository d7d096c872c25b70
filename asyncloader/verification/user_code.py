"""Which files are the user's, and which line of them is on the stack.

Data path: none. Python's own library, torch, numpy and asyncloader do not count; other installed packages count only
where no file of the user's is on the stack.
"""

from __future__ import annotations

import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

import asyncloader

_PATHS = sysconfig.get_paths()
_INSTALLED = tuple({str(Path(_PATHS[name]).resolve()) for name in ("purelib", "platlib")})
_LIBRARY = tuple({str(Path(_PATHS[name]).resolve()) for name in ("stdlib", "platstdlib")})
_PACKAGE = Path(asyncloader.__file__).resolve().parent
_FOREIGN = (
    *(str(Path(str(each.__file__)).resolve().parent) for each in (torch, np)),
    str(_PACKAGE),
    *(str((_PACKAGE / name).resolve()) for name in ("workers", "transports")),
)


class CodeLine(NamedTuple):
    """A line of a file, and the function that it is in."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{short(self.file)}:{self.line}"


@cache
def rank(file: str) -> int:
    """2: the user's file; 1: an installed package's; 0: none that is looked at."""
    if file.startswith("<"):
        return 0
    try:
        path = str(Path(file).resolve())
    except (ValueError, OSError, RuntimeError):  # compiled code may have any name; RuntimeError: links in a circle
        return 0
    if path.startswith(tuple(f"{each}/" for each in _FOREIGN)):
        return 0
    if path.startswith(tuple(f"{each}/" for each in _INSTALLED)) or "/site-packages/" in path:
        return 1
    if path.startswith(tuple(f"{each}/" for each in _LIBRARY)):
        return 0
    return 2


def is_users(code: CodeType) -> bool:
    """Whether the code is of the user's files."""
    return rank(code.co_filename) == 2


def users_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's files, or else of an installed package; None without either."""
    best: FrameType | None = None
    while frame is not None:
        level = rank(frame.f_code.co_filename)
        if level == 2:
            return frame
        if level == 1 and best is None:
            best = frame
        frame = frame.f_back
    return best


def place_of(frame: FrameType | None) -> CodeLine | None:
    """Return the place of the user's innermost frame."""
    found = users_frame(frame)
    return None if found is None else CodeLine(found.f_code.co_filename, found.f_lineno or 0, found.f_code.co_name)


def place_of_error(error: BaseException) -> CodeLine | None:
    """Return the user's innermost line in an error's traceback; without one, that in the traceback of its cause."""
    seen: set[int] = set()  # an error may be a cause of its cause
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, SyntaxError) and (found := _of_syntax_error(cause)) is not None:
            return found
        best: CodeLine | None = None
        level, trace = 0, cause.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            if rank(code.co_filename) and rank(code.co_filename) >= level:
                level, best = rank(code.co_filename), CodeLine(code.co_filename, trace.tb_lineno, code.co_name)
            trace = trace.tb_next
        if best is not None:
            return best
        cause = cause.__context__ if cause.__cause__ is None else cause.__cause__
    return None


def _of_syntax_error(error: SyntaxError) -> CodeLine | None:
    """Return the line that cannot be parsed, which no frame is in. User code may raise the error with any values."""
    file, line = error.filename, error.lineno
    if isinstance(file, str) and isinstance(line, int) and 0 < line < 1 << 31 and rank(file):
        return CodeLine(file, line, "<module>")
    return None


def definition_of(value: Any) -> CodeLine | None:
    """Return where a function, or the class of an object, is defined."""
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    if isinstance(code, CodeType):
        return CodeLine(code.co_filename, code.co_firstlineno, code.co_name)
    kind = value if isinstance(value, type) else type(value)
    module = sys.modules.get(kind.__module__)
    for member in vars(kind).values():
        code = getattr(member, "__code__", None)
        if isinstance(code, CodeType) and module is not None:
            return CodeLine(code.co_filename, code.co_firstlineno, kind.__name__)
    return None


def short(file: str) -> str:
    """Return the path from the current folder, where the file is below it."""
    try:
        return str(Path(file).resolve().relative_to(Path.cwd().resolve()))
    except (ValueError, OSError, RuntimeError):
        return file
