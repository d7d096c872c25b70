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
from collections.abc import Sequence
from string import ascii_lowercase, ascii_uppercase

MOST = 1_000_000
"""Maximum number of URLs of a pattern: a typing error easily adds a factor of ten."""

DEEPEST = 50

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
    # The open groups. Each has its alternatives, as all their texts so far; the last alternative still grows.
    stack: list[list[list[str]]] = [[[""]]]
    plain = True  # the innermost group contains only text: it may be a range
    text: list[str] = []

    def add(texts: Sequence[str]) -> None:
        # Counted before they are made. A pattern never means fewer texts than a part of it.
        if not 0 < len(stack[-1][-1]) * len(texts) <= most:
            raise ValueError(f"{pattern!r} means too many URLs; {most:,} are allowed at most: check its numbers")
        stack[-1][-1] = [before + each for before in stack[-1][-1] for each in texts]

    signs = iter(pattern)
    for sign in signs:
        if sign == "\\":
            text.append(next(signs, sign))
        elif sign == "{":
            add(["".join(text)])
            text.clear()
            stack.append([[""]])
            plain = True
            if len(stack) > DEEPEST:
                raise ValueError(f"{pattern!r} nests braces deeper than {DEEPEST - 1}")
        elif sign == "}":
            if len(stack) == 1:
                raise ValueError(f"{pattern!r} has a '}}' without its '{{'; write \\}} for the character itself")
            whole = "".join(text)
            add([whole])
            text.clear()
            group = stack.pop()
            numbers = _range(whole, most) if plain and len(group) == 1 else None
            if numbers is None:
                texts = [each for alternative in group for each in alternative]
                numbers = texts if len(group) > 1 else [f"{{{each}}}" for each in texts]
            add(numbers)
            plain = False
        elif sign == "," and len(stack) > 1:
            add(["".join(text)])
            text.clear()
            stack[-1].append([""])
        else:
            text.append(sign)
    if len(stack) > 1:
        raise ValueError(f"{pattern!r} has a '{{' without its '}}'; write \\{{ for the character itself")
    add(["".join(text)])
    return stack[0][0]


def _range(text: str, most: int) -> list[str] | None:
    """Return the range that `text` describes; None if it is no range, an empty list if it is longer than `most`."""
    if found := _NUMBERS.fullmatch(text):
        first, last, step = found.groups()
        # As in bash, a leading zero in either number pads all of them.
        padded = any(len(digits) > 1 and digits[0] == "0" for digits in (first.lstrip("-"), last.lstrip("-")))
        width = max(len(first), len(last)) if padded else 0
        numbers = _span(int(first), int(last), step)
        return [str(number).zfill(width) for number in numbers] if len(numbers) <= most else []
    if found := _LETTERS.fullmatch(text):
        first, last, step = found.groups()
        return [ALPHABET[number] for number in _span(ALPHABET.index(first), ALPHABET.index(last), step)]
    return None


def _span(first: int, last: int, step: str | None) -> range:
    """Return the range from `first` to `last`, both included. They determine the direction, and not the step's sign."""
    size = abs(int(step)) if step else 1
    size = size or 1
    return range(first, last + 1, size) if first <= last else range(first, last - 1, -size)
