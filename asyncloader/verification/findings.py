"""The findings of a command, as lines for people or as JSON. Pure.

Data path: none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

_MARKS = {"ok": "ok", "note": "--", "problem": "!!"}
_NAME_WIDTH = 22  # of the column of names, with a space behind them

_DEEPEST = 20  # levels of a JSON document
_MOST_BITS = 1024  # of an integer: Python writes no integer of thousands of digits, and other languages read none


class Finding(NamedTuple):
    """One fact.

    Attributes:
        name: its subject.
        state: ``"ok"``; ``"note"``: to be known; ``"problem"``: to be mended.
        text: the fact, in words.
        advice: what to do; empty: nothing.
        figures: the same for programs: plain values.
    """

    name: str
    state: Literal["ok", "note", "problem"]
    text: str
    advice: str = ""
    figures: Mapping[str, Any] = {}


def as_lines(finding: Finding) -> str:
    """Return a finding's line, and one with its advice."""
    below = "\n" + " " * (_NAME_WIDTH + 4)
    # Names and texts have parts of files, which may look like a line of another finding.
    text = below.join(map(printable, finding.text.split("\n")))
    line = f"{_MARKS[finding.state]}  {printable(finding.name):{_NAME_WIDTH - 1}} {text}"
    return f"{line}{below}-> {printable(finding.advice)}" if finding.advice else line


def printable(text: str) -> str:
    """Return a text with escapes in the place of characters that are not printed: a terminal would obey some, and
    parts of file names that are no text cannot be encoded.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def document(findings: Sequence[Finding], error: str | None = None) -> dict[str, Any]:
    """Return the object that `--json` prints: the findings, whether all is well, and why the command could not be
    carried out (None: it was).
    """
    rows = [{**each._asdict(), "figures": dict(each.figures)} for each in findings]
    return {"ok": error is None and not has_problem(findings), "error": error, "findings": rows}


def plain(value: Any, depth: int = 0) -> Any:
    """Return a value that every reader of JSON takes. Figures may come from files: numbers that JSON lacks become None;
    other objects, and those that nest deeper than `_DEEPEST`, become texts.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):  # parts of file names that are no text are no Unicode, either
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _MOST_BITS else None
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if depth < _DEEPEST and isinstance(value, Mapping):
        return {plain(str(key)): plain(each, depth + 1) for key, each in value.items()}
    if depth < _DEEPEST and isinstance(value, list | tuple):
        return [plain(each, depth + 1) for each in value]
    return f"<{type(value).__name__}>"


def has_problem(findings: Sequence[Finding]) -> bool:
    """Whether something is to be mended."""
    return any(each.state == "problem" for each in findings)


def in_bytes(number: float) -> str:
    """Return a number of bytes as a text with three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1000:
            return f"{number:.0f} B" if unit == "B" else f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"
