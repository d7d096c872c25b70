"""Prints on standard output and standard error: lines, whose marks have colours in a terminal, or JSON.

Data path: findings -> [terminal].

Lines are the same on every machine, and are not wrapped: programs read them. They have no control characters of names
in data, which a terminal would obey.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO

from asyncloader.verification.findings import Finding, as_lines, plain, printable

_COLOURS = {"ok": "32", "note": "33", "problem": "1;31"}


class CannotPrint(Exception):
    """Standard output cannot be written.

    Attributes:
        error: why; a `BrokenPipeError`: the reader of the pipe has closed it.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.error = error


def print_finding(finding: Finding) -> None:
    """Print a finding on standard output, at once. Raises as `print_line`."""
    print_line(coloured(finding, as_lines(finding)) if has_colours(sys.stdout) else as_lines(finding))


def coloured(finding: Finding, line: str) -> str:
    """Return a finding's line, which begins with its mark, with the mark in colour."""
    return f"\x1b[{_COLOURS[finding.state]}m{line[:2]}\x1b[0m{line[2:]}"


def has_colours(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal that has colours, and is to show them."""
    return (
        stream is not None and stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def print_line(line: str) -> None:
    """Print a line on standard output, at once.

    Raises:
        CannotPrint: it cannot be written.
    """
    try:
        print(line, flush=True)  # noqa: T201 - a command's own words
    except OSError as error:
        raise CannotPrint(error) from None


def print_json(value: Mapping[str, Any]) -> None:
    """Print an object as a JSON document. Raises as `print_line`."""
    print_line(json.dumps(plain(value), indent=2))


@contextmanager
def quiet_output() -> Generator[None]:
    """Context in which standard output is standard error, also for code in C and for child processes: the
    prints of a user's function or a library are no part of a document on standard output.
    """
    stdout: TextIO | None = sys.stdout
    kept: int | None = None
    with redirect_stdout(sys.stderr):
        # If either was closed before Python began, its number may be that of another file by now.
        if stdout is not None and sys.stderr is not None:
            with suppress(OSError):  # either was closed since
                kept = os.dup(1)
                os.dup2(2, 1)
        try:
            yield
        finally:
            if stdout is not None and kept is not None:
                with suppress(OSError):
                    stdout.flush()  # the prints of code that keeps the stream
                os.dup2(kept, 1)
                os.close(kept)


def discard(stream: TextIO | None) -> None:
    """Have a stream that cannot be written write to nowhere: its buffer is written again when Python ends."""
    with suppress(OSError, ValueError, AttributeError):  # AttributeError: it was closed before Python began
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]
        os.close(nowhere)


def encode_all(stream: TextIO | None) -> None:
    """Have characters that the stream's encoding lacks printed as escapes; they would raise."""
    if isinstance(stream, io.TextIOWrapper):
        with suppress(OSError):  # a descriptor that has become a pipe since, where the stream asks for its position
            stream.reconfigure(errors="backslashreplace")


def print_error(command: str, why: str) -> None:
    """Print on standard error why a command could not be carried out, if it can be written."""
    encode_all(sys.stderr)
    try:
        print(f"asyncloader {command}:", printable(why), file=sys.stderr, flush=True)  # noqa: T201 - a command's own words
    except (OSError, ValueError):  # ValueError: user code has closed it
        discard(sys.stderr)
