"""Another program's text, as it is logged: it controls no terminal, and forges no line."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.base.peer_text import LINE, LineLimit, block_of, line_of

HOSTILE = {
    "a line of its own": ("ok\n2026 ERROR forged", r"ok\n2026 ERROR forged"),
    "carriage return": ("real\rforged", r"real\rforged"),
    "escape sequence": ("\x1b]0;title\x07\x1b[2J", r"\x1b]0;title\x07\x1b[2J"),
    "escape sequence in one character": ("\x9b31m", r"\x9b31m"),
    "next line": ("a\x85b", r"a\x85b"),
    "line separator": ("a\u2028b", r"a\u2028b"),
    "order of writing": ("a\u202eb\u2066c\u200f", r"a\u202eb\u2066c\u200f"),
    "nothing": ("a\0b", r"a\x00b"),
    "half a character": ("a\ud800b", r"a\ud800b"),
    "backspace and delete": ("a\b\x7f", r"a\x08\x7f"),
    "tab": ("a\tb", r"a\tb"),
}


@pytest.mark.parametrize(("text", "expected"), HOSTILE.values(), ids=HOSTILE)
def test_what_a_terminal_or_a_log_would_obey_is_escaped(text: str, expected: str) -> None:
    """Characters that control a terminal or a log are escaped, and the result can be encoded."""
    assert line_of(text) == expected
    line_of(text).encode()
    assert block_of(text, 100) == {"a line of its own": text, "tab": text}.get(_name(text), expected)


def _name(text: str) -> str:
    return next(name for name, (each, _) in HOSTILE.items() if each == text)


def test_people_s_text_stays() -> None:
    """Text in any script is unchanged."""
    for text in ("", "C:\\new\\table", "naïve Größe 東京 مرحبا 🙂", "x" * LINE):
        assert line_of(text) == text


def test_a_long_line_keeps_its_beginning_and_its_end() -> None:
    """An error's cause is often at the end; escapes count towards the length."""
    cut = line_of("begin " + "x" * 10_000_000 + " end")
    assert len(cut) <= LINE
    assert cut.startswith("begin xxx")
    assert cut.endswith("xxx end")
    assert "characters]" in cut
    assert len(line_of("\U000e0001" * 10_000)) <= LINE


def test_a_block_keeps_its_last_lines() -> None:
    """Newlines and tabs, which a traceback needs, are kept, and nothing else."""
    text = 'Traceback:\r\n\tFile "a"\nValueError: \x1b[2Jbad'
    assert block_of(text, 1000) == 'Traceback:\n\tFile "a"\nValueError: \\x1b[2Jbad'
    assert block_of("first\n" * 1000 + "last", 10) == "first\nlast"
    assert len(block_of("\x1b" * 1000, 100)) == 100


@given(st.text(st.characters(codec=None)), st.integers(60, 600))
def test_any_text(text: str, most: int) -> None:
    """Any text becomes printable characters, on one line or, as a block, on several."""
    line = line_of(text, most)
    assert len(line) <= most
    assert not {unicodedata.category(each) for each in line} & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    block = block_of(text, most)
    assert len(block) <= most
    assert block.replace("\n", "").replace("\t", "").isprintable()


@pytest.mark.parametrize("value", [None, b"\x1b[2J", ["\n"], 7])
def test_what_is_no_text_is_named_by_its_type(value: object) -> None:
    """The value's own text is not used."""
    assert line_of(value) == block_of(value, 100) == f"<{type(value).__name__}>"


def test_lines_in_a_minute() -> None:
    """Lines beyond the limit are not logged."""
    limit = LineLimit(3)
    assert [limit.admits(now) for now in (100.0, 101.0, 102.0, 103.0, 159.0)] == [True, True, True, False, False]
    assert limit.admits(160.0)
    assert [limit.admits(now) for now in (161.0, 162.0, 163.0)] == [True, True, False]
