"""What the commands print in a terminal: coloured rows and tables as wide as it, and nothing that data could add."""

from __future__ import annotations

import os
import pty
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncloader.__main__ import main
from asyncloader.commands import terminal
from asyncloader.commands.findings import Finding
from asyncloader.commands.terminal import FindingPrinter

rich_cells = pytest.importorskip("rich.cells")

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
NAMES = ("[red]x[bold].jsonl", "\x1b[2Ja.jsonl", "\nok  damage.jsonl", "\x1b]0;title\x07.jsonl", "数据" * 30 + ".jsonl")

Show = Callable[..., tuple[int, str]]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Show:
    """Runs a command whose output is a terminal. Returns the exit code, and all that the terminal got."""

    def run(*argv: Any, columns: int = 80, stream: str = "stdout", **environ: str) -> tuple[int, str]:
        ours, theirs = pty.openpty()
        got: list[bytes] = []

        def read() -> None:
            try:
                while chunk := os.read(ours, 1 << 16):
                    got.append(chunk)
            except OSError:  # the other end is closed
                pass

        reader = threading.Thread(target=read)
        reader.start()
        try:
            with monkeypatch.context() as patch, open(theirs, "w", encoding="utf-8") as tty:  # noqa: PTH123 - a number
                for name in ("NO_COLOR", "TERM", "FORCE_COLOR"):
                    patch.delenv(name, raising=False)
                for name, value in {"COLUMNS": str(columns), "TERM": "xterm-256color", **environ}.items():
                    patch.setenv(name, value)
                patch.setattr(sys, stream, tty)
                code = main([*map(str, argv)])
        finally:
            reader.join()
            os.close(ours)
        return code, b"".join(got).decode().replace("\r\n", "\n")

    return run


def words(text: str) -> str:
    """The text without colours, and without the blanks that lay it out."""
    return re.sub(r"\s", "", COLOUR.sub("", text))


@pytest.mark.parametrize("columns", [1, 12, 40, 200])
def test_names_in_data_are_neither_markup_nor_commands(columns: int, tmp_path: Path, show: Show) -> None:
    """However wide the terminal is, no line is wider, and nothing but colours is sent to it."""
    for name in NAMES:
        (tmp_path / name).write_text("no\n")
    code, shown = show("inspect", f"{tmp_path}/", columns=columns)
    assert code == 1
    plain = COLOUR.sub("", shown)
    assert COLOUR.search(shown)
    assert all(each.isprintable() for each in plain.split("\n"))
    assert max(map(rich_cells.cell_len, plain.split("\n"))) <= columns
    if columns > 12:
        for part in ("[red]x[bold].jsonl", r"\x1b[2Ja.jsonl", r"\x1b]0;title\x07.jsonl", "数据" * 30):
            assert part in words(shown)
        assert plain.rstrip().endswith("problems")
        assert f"{len(NAMES)} of {len(NAMES)}".replace(" ", "") in words(shown)


def test_the_words_are_those_of_the_lines(tmp_path: Path, show: Show, capsys: pytest.CaptureFixture[str]) -> None:
    """Without colours, without rich, and in a dumb terminal the output is what a pipe gets; with colours it has the
    same words in the same order.
    """
    (tmp_path / "a.jsonl").write_text('{"a": 1}\nno\n')
    assert main(["inspect", str(tmp_path / "a.jsonl")]) == 1
    piped = capsys.readouterr().out
    for environ in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert show("inspect", tmp_path / "a.jsonl", **environ) == (1, piped)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "find_spec", lambda _: None)
        assert show("inspect", tmp_path / "a.jsonl") == (1, piped)
    code, shown = show("inspect", tmp_path / "a.jsonl", columns=100)
    assert code == 1
    assert words(piped) in words(shown)
    # NO_COLOR counts if it is not empty: https://no-color.org
    assert show("inspect", tmp_path / "a.jsonl", columns=100, NO_COLOR="") == (1, shown)


def test_errors_and_what_an_encoding_lacks(
    tmp_path: Path, show: Show, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error's text is no markup, either; a character that standard output cannot encode is an escape."""
    code, shown = show("inspect", tmp_path / "[red]none[/]" / "", stream="stderr", columns=300)
    assert code == 2
    assert COLOUR.search(shown)
    assert "asyncloaderinspect:" in words(shown)
    assert "[red]none[/]" in words(shown)
    (tmp_path / "数据.jsonl").write_text("no\n")
    with open(tmp_path / "out", "w", encoding="ascii") as out:  # noqa: PTH123 - as standard output is made
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["inspect", f"{tmp_path}/"]) == 1
    assert r"\u6570\u636e.jsonl" in (tmp_path / "out").read_text()


def test_an_interrupted_command(monkeypatch: pytest.MonkeyPatch, show: Show) -> None:
    """Shows what was found until then, and ends with the exit code that shells give to Ctrl-C."""

    def findings(*_: Any) -> Any:
        yield Finding("worker 0", "ok", "first", figures={"mean_s": {}})
        raise KeyboardInterrupt

    monkeypatch.setattr("asyncloader.commands.command_line._findings", findings)
    code, shown = show("doctor")
    assert code == 130
    assert "okworker0first" in words(shown)


def test_rows_come_as_they_are_found(show: Show, capsys: pytest.CaptureFixture[str]) -> None:
    """In a pipe each line is written when its finding is made."""
    with FindingPrinter("doctor") as printer:
        printer.print(Finding("a", "ok", "b"))
        assert capsys.readouterr().out == f"ok  {'a':21} b\n"
