"""Makes text that another program sent fit for a log or an error, and bounds how much of it is logged. Pure.

Data path: connection -> [peer_text] -> log, or an error's text.

A newline in such a text would forge a line of the log, an escape sequence would give orders to the terminal, and a mark
of writing direction would show the text in another order than it has. All of these are replaced by their escapes.
"""

from __future__ import annotations

from typing import Final

LINE: Final = 500
"""Characters of a line, at most."""
LINES_PER_MINUTE: Final = 60
"""Lines that are logged of a peer in a minute, at most."""
_MINUTE_S = 60.0
_MARK = 40  # characters, at most, of the note that stands for the middle


def line_of(text: object, most: int = LINE) -> str:
    """A text as one line of at most `most` characters. The middle of a longer one is left out.

    Other values are not converted to text, because even that may fail for a value that a peer has made.
    """
    if type(text) is not str:
        return f"<{type(text).__name__}>"
    # Cut twice: before, because a text may be of any length, and after, because escapes are longer than their
    # characters.
    return _cut(_escaped(_cut(text, most)), most)


def block_of(text: object, most: int) -> str:
    """The last lines of a text, at most `most` characters: newlines and tabs stay as they are."""
    if type(text) is not str:
        return line_of(text)
    kept = text[-most:].replace("\r\n", "\n")
    # Cut again, because escapes are longer than their characters.
    return "\n".join("\t".join(map(_escaped, line.split("\t"))) for line in kept.split("\n"))[-most:]


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    kept = max(0, most - _MARK)
    end = kept // 3
    return f"{text[: kept - end]} [{len(text) - kept:,} characters] {text[len(text) - end :]}"


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class LineLimit:
    """Bounds the lines that a peer has logged in a minute.

    Args:
        most: lines in a minute.
    """

    def __init__(self, most: int = LINES_PER_MINUTE) -> None:
        self._most = most
        self._began = 0.0
        self._admitted = 0

    def admits(self, now: float) -> bool:
        """Whether a line may be logged now. `now` is any clock's time in seconds."""
        if now - self._began >= _MINUTE_S:
            self._began, self._admitted = now, 0
        if self._admitted >= self._most:
            return False
        self._admitted += 1
        return True
