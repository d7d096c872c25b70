r"""Expands brace patterns such as ``shard-{000..127}.tar`` to URLs. Pure.

Data path: pattern -> [braces] -> URLs -> discovery.

The rules are those of webdataset's patterns, which follow bash:

    {a,b}          each alternative; alternatives may be empty, and contain braces again
    {0..3}         numbers, ascending or descending; {0..9..3} in steps of 3
    {000..127}     padded with zeros to the longer of the two, if either begins with a zero
    {a..e}         letters, in the order A to Z, a to z
    {a}, {}        stand for themselves: they have no alternatives
    \{  \,  \\     the character itself

Several groups in one pattern give all combinations; the leftmost changes most slowly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from string import ascii_lowercase, ascii_uppercase
from typing import TypeAlias

MOST = 1_000_000
"""Maximum number of URLs of a pattern: a typing error easily adds a factor of ten."""

DEEPEST = 50

Part: TypeAlias = "str | Sequence[str] | Choice"
"""A text, a range, or a choice; ranges are sequences that compute their texts on demand."""


class Choice(list["list[Part]"]):
    """Alternatives, each a list of parts."""


class Numbers(Sequence[str]):
    """The texts of a range of numbers, computed on demand."""

    def __init__(self, numbers: range, width: int) -> None:
        self._numbers = numbers
        self._width = width

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int | slice) -> str:
        assert isinstance(index, int)
        return str(self._numbers[index]).zfill(self._width)


ALPHABET = ascii_uppercase + ascii_lowercase

DIGITS = 18
"""Longer numbers are not treated as numbers."""

_NUMBERS = re.compile(rf"(-?\d{{1,{DIGITS}}})\.\.(-?\d{{1,{DIGITS}}})(?:\.\.(-?\d{{1,{DIGITS}}}))?", re.ASCII)
_LETTERS = re.compile(rf"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?\d{{1,{DIGITS}}}))?", re.ASCII)


def expand(pattern: str, *, most: int = MOST) -> list[str]:
    """Return the expansion of `pattern`, in order: of a text without braces, the text.

    Raises:
        ValueError: unmatched braces; more than `most` results; alternatives nested deeper than 50.
    """
    if not any(sign in pattern for sign in "{}\\"):
        return [pattern]
    parts = _parse(pattern)
    count = _count(parts)
    if count > most:
        raise ValueError(f"{pattern!r} means {count:,} URLs; {most:,} are allowed at most: check its numbers")
    return list(_texts(parts))


def _parse(pattern: str) -> list[Part]:
    """Parse with a stack of the open groups. Each has its alternatives so far, and the last alternative still grows."""
    stack: list[list[list[Part]]] = [[[]]]
    plain = True  # the innermost group contains only text: it may be a range
    text: list[str] = []

    def flush() -> None:
        if text:
            stack[-1][-1].append("".join(text))
            text.clear()

    signs = iter(pattern)
    for sign in signs:
        if sign == "\\":
            text.append(next(signs, sign))
        elif sign == "{":
            flush()
            stack.append([[]])
            plain = True
            if len(stack) > DEEPEST:
                raise ValueError(f"{pattern!r} nests braces deeper than {DEEPEST - 1}")
        elif sign == "}":
            if len(stack) == 1:
                raise ValueError(f"{pattern!r} has a '}}' without its '{{'; write \\}} for the character itself")
            whole = "".join(text)
            flush()
            group = stack.pop()
            numbers = _range(whole) if plain and len(group) == 1 else None
            if numbers is not None:
                stack[-1][-1].append(numbers)
            elif len(group) > 1:
                stack[-1][-1].append(Choice(group))
            else:
                stack[-1][-1] += ["{", *group[0], "}"]
            plain = False
        elif sign == "," and len(stack) > 1:
            flush()
            stack[-1].append([])
        else:
            text.append(sign)
    if len(stack) > 1:
        raise ValueError(f"{pattern!r} has a '{{' without its '}}'; write \\{{ for the character itself")
    flush()
    return stack[0][0]


def _range(text: str) -> Sequence[str] | None:
    """Return the range that `text` describes; None if it is no range."""
    if found := _NUMBERS.fullmatch(text):
        first, last, step = found.groups()
        # As in bash, a leading zero in either number pads all of them.
        padded = any(len(digits) > 1 and digits[0] == "0" for digits in (first.lstrip("-"), last.lstrip("-")))
        width = max(len(first), len(last)) if padded else 0
        return Numbers(_span(int(first), int(last), step), width)
    if found := _LETTERS.fullmatch(text):
        first, last, step = found.groups()
        return [ALPHABET[number] for number in _span(ALPHABET.index(first), ALPHABET.index(last), step)]
    return None


def _span(first: int, last: int, step: str | None) -> range:
    """Return the range from `first` to `last`, both included. They determine the direction, and not the step's sign."""
    size = abs(int(step)) if step else 1
    size = size or 1
    return range(first, last + 1, size) if first <= last else range(first, last - 1, -size)


def _count(parts: Sequence[Part]) -> int:
    return prod(_choices(part) for part in parts)


def _choices(part: Part) -> int:
    if isinstance(part, str):
        return 1
    return sum(_count(alternative) for alternative in part) if isinstance(part, Choice) else len(part)


def _texts(parts: Sequence[Part]) -> Iterator[str]:
    return ("".join(texts) for texts in product(*map(_alternatives, parts)))


def _alternatives(part: Part) -> Sequence[str]:
    if isinstance(part, str):
        return [part]
    return [text for alternative in part for text in _texts(alternative)] if isinstance(part, Choice) else part
