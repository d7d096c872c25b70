"""Says which files are the user's, which of their lines made or stopped something, and why a process gave no result.

Data path: none. Python's own library, torch, numpy and asyncloader do not count; other installed packages count only
where no file of the user's is on the stack.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

import asyncloader
from asyncloader.errors import text_of

_PATHS = sysconfig.get_paths()
_INSTALLED = tuple({f"{Path(_PATHS[name]).resolve()}/" for name in ("purelib", "platlib")})
_LIBRARY = tuple({f"{Path(_PATHS[name]).resolve()}/" for name in ("stdlib", "platstdlib")})
_PACKAGE = Path(asyncloader.__file__).resolve().parent
_FOREIGN = (
    *(f"{Path(str(each.__file__)).resolve().parent}/" for each in (torch, np)),
    *(f"{(_PACKAGE / name).resolve()}/" for name in (".", "workers", "transports")),
)
_MOST_TEXT = 4000


class CodeLine(NamedTuple):
    """A line of a file, and the function that it is in."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{short(self.file)}:{self.line}"


class UserFailure(NamedTuple):
    """Why a process of the user's code gave no result.

    Attributes:
        text: its end in words, as ``"raised KeyError: 3"``.
        line: the user's line that did it.
        advice: what to do.
        error: the class of the error that was raised; empty: none was.
        late: whether its time was up.
    """

    text: str
    line: CodeLine | None = None
    advice: str = ""
    error: str = ""
    late: bool = False

    @classmethod
    def of(cls, error: BaseException) -> UserFailure:
        """Describe an error. Whatever its class does, this succeeds."""
        kind, text, notes = type(error).__name__, text_of(error)[-_MOST_TEXT:], list[str]()
        with suppress(Exception):
            notes += [f" ({each})" for each in error.__notes__]
        last = text.splitlines()[-1] if text.splitlines() else kind
        told = last if last.startswith(kind) else f"{kind}: {last}"  # the traceback of a worker ends with the class
        line = _line_of_error(error) or _innermost(
            re.findall(r'^ *File "(.+?)", line (\d+), in (\S+)', text, re.MULTILINE)[::-1]
        )
        return cls(f"raised {told}{''.join(notes[:1])}", line, "the line above raised it" if line else "", kind)


@cache
def rank(file: str) -> int:
    """2: the user's file; 1: an installed package's; 0: none that is looked at."""
    if file.startswith("<"):
        return 0
    try:
        path = str(Path(file).resolve())
    except (ValueError, OSError, RuntimeError):  # compiled code may have any name; RuntimeError: links in a circle
        return 0
    if path.startswith(_FOREIGN):
        return 0
    if path.startswith(_INSTALLED) or "/site-packages/" in path:
        return 1
    return 0 if path.startswith(_LIBRARY) else 2


def line_of_frame(frame: FrameType | None) -> CodeLine | None:
    """Return the innermost line of the user's files, or else of an installed package, in a frame and its callers."""
    return _best([CodeLine(each.f_code.co_filename, line, each.f_code.co_name) for each, line in walk_stack(frame)])


def line_of_stacks(stacks: str) -> CodeLine | None:
    """Return the user's innermost line in stacks of `faulthandler`, of which the innermost come first."""
    return _innermost(re.findall(r'^  File "(.+?)", line (\d+) in (\S+)', stacks, re.MULTILINE))


def line_of_definition(value: Any) -> CodeLine | None:
    """Return where a function, or the class of an object, is defined."""
    kind = value if isinstance(value, type) else type(value)
    for each in (getattr(value, "__func__", value), *vars(kind).values()):
        code = getattr(each, "__code__", None)
        if isinstance(code, CodeType) and rank(code.co_filename):
            return CodeLine(code.co_filename, code.co_firstlineno, code.co_name)
    return None


def _innermost(found: Iterable[tuple[str, str, str]]) -> CodeLine | None:
    return next((CodeLine(file, int(line), name) for file, line, name in found if rank(file) == 2), None)


def _best(lines: list[CodeLine]) -> CodeLine | None:
    """Return the first line of the highest rank; None if no line counts."""
    best = max(lines, key=lambda each: rank(each.file), default=None)
    return best if best is not None and rank(best.file) else None


def _line_of_error(error: BaseException) -> CodeLine | None:
    """Return the user's innermost line in an error's traceback; without one, that in the traceback of its cause."""
    seen: set[int] = set()  # an error may be a cause of its cause
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        trace = walk_tb(cause.__traceback__)
        lines = [CodeLine(each.f_code.co_filename, line, each.f_code.co_name) for each, line in trace]
        if isinstance(cause, SyntaxError):  # no frame is in a line that cannot be parsed; user code may give any values
            file, line = cause.filename, cause.lineno
            if isinstance(file, str) and isinstance(line, int) and 0 < line < 1 << 31:
                lines.append(CodeLine(file, line, "<module>"))
        if (found := _best(lines[::-1])) is not None:
            return found
        cause = cause.__context__ if cause.__cause__ is None else cause.__cause__
    return None


def short(file: str) -> str:
    """Return the path from the current folder, where the file is below it."""
    try:
        return str(Path(file).resolve().relative_to(Path.cwd().resolve()))
    except (ValueError, OSError, RuntimeError):
        return file
