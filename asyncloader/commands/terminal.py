"""Prints on standard output and standard error: in a terminal with colours and tables, elsewhere as lines or JSON.

Data path: findings -> [terminal] -> rich, where it is installed.

Plain lines are the same on every machine, and are not wrapped: programs read them. All texts are given to rich as
`Text`, and without their control characters: names in data may look like rich's markup, or like commands to a terminal.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self, TextIO

from asyncloader.commands.findings import MARKS, NAME_WIDTH, Finding, as_lines, plain, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}
_ADVICE = "cyan"


class CannotPrint(Exception):
    """Standard output cannot be written.

    Attributes:
        error: why; a `BrokenPipeError`: the reader of the pipe has closed it.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.error = error


class FindingPrinter:
    """Prints findings on standard output as they are made. In a terminal they are rows below a heading, and the last
    line counts problems and notes.

    Args:
        heading: what is examined.
    """

    def __init__(self, heading: str) -> None:
        encode_all(sys.stdout)
        self._console = console_of(sys.stdout)
        self._heading = heading
        self._counts: Counter[str] = Counter()

    def __enter__(self) -> Self:
        if self._console is not None:
            self._console.rule(text(printable(self._heading), "bold"), align="left")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._console is not None and kind is None:
            self._console.print(_summary(self._counts))

    def print(self, finding: Finding) -> None:
        """Print a finding."""
        self._counts[finding.state] += 1
        if self._console is None:
            print_line(as_lines(finding))
        else:
            self._console.print(row(finding, self._console.width))


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


def console_of(stream: TextIO | None) -> Console | None:
    """Return rich's console for a stream. None: plain lines are to be printed, because the stream is no terminal, or
    one without colours (``NO_COLOR``, ``TERM=dumb``), or rich is not installed.
    """
    if stream is None or not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return None
    if find_spec("rich") is None:
        return None
    from rich.console import Console

    return Console(file=stream, markup=False, emoji=False, highlight=False)


def encode_all(stream: TextIO | None) -> None:
    """Have characters that the stream's encoding lacks printed as escapes; they would raise."""
    if isinstance(stream, io.TextIOWrapper):
        with suppress(OSError):  # a descriptor that has become a pipe since, where the stream asks for its position
            stream.reconfigure(errors="backslashreplace")


def print_error(command: str, why: str) -> None:
    """Print on standard error why a command could not be carried out, if it can be written."""
    encode_all(sys.stderr)
    console, head = console_of(sys.stderr), f"asyncloader {command}:"
    line = printable(why)
    try:
        if console is None:
            print(head, line, file=sys.stderr, flush=True)  # noqa: T201 - a command's own words
        else:
            console.print(text(head, "bold red"), text(line))
    except (OSError, ValueError):  # ValueError: user code has closed it
        discard(sys.stderr)


def row(finding: Finding, width: int) -> Table:
    """Return a finding as a row: its mark, its name, and its text with the advice below."""
    from rich.table import Table

    made = Table.grid(padding=(0, 1, 0, 0), expand=True)
    made.add_column(width=2)
    made.add_column(width=max(4, min(NAME_WIDTH - 1, width // 3)), overflow="fold")
    made.add_column(ratio=1, overflow="fold")
    words = text(finding.text)
    if finding.advice:
        words.append("\n")
        words.append_text(text(f"-> {finding.advice}", _ADVICE))
    mark = text(MARKS[finding.state], _STYLES[finding.state])
    made.add_row(mark, text(printable(finding.name), "bold"), words)
    return made


def _summary(counts: Counter[str]) -> Text:
    problems, notes = counts["problem"], counts["note"]
    words = f"{problems or 'no'} problem{'s' * (problems != 1)}"
    if notes:
        words += f", {notes} note{'s' * (notes != 1)}"
    return text(words, _STYLES["problem" if problems else "ok"])


def text(words: str, style: str = "") -> Text:
    """Return a text for rich, without control characters but ends of lines. Nothing in it is markup."""
    from rich.text import Text

    return Text("\n".join(map(printable, words.split("\n"))), style, overflow="fold")
