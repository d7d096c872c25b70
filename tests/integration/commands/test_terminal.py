"""What the commands print in a terminal: lines with coloured marks, and nothing that data could add."""

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
from asyncloader.commands.terminal import print_finding
from asyncloader.verification.findings import Finding

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
NAMES = ("[red]x[bold].jsonl", "\x1b[2Ja.jsonl", "\nok  damage.jsonl", "\x1b]0;title\x07.jsonl", "数据" * 30 + ".jsonl")

Show = Callable[..., tuple[int, str]]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Show:
    """Runs a command whose output is a terminal. Returns the exit code, and all that the terminal got."""

    def run(*argv: Any, **environ: str) -> tuple[int, str]:
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
                for name, value in {"TERM": "xterm-256color", **environ}.items():
                    patch.setenv(name, value)
                patch.setattr(sys, "stdout", tty)
                code = main([*map(str, argv)])
        finally:
            reader.join()
            os.close(ours)
        return code, b"".join(got).decode().replace("\r\n", "\n")

    return run


def test_a_terminal_gets_the_lines_with_coloured_marks(
    tmp_path: Path, show: Show, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing else, whatever names in data are; without colours, and in a dumb terminal, what a pipe gets."""
    for name in NAMES:
        (tmp_path / name).write_text("no\n")
    assert main(["inspect", f"{tmp_path}/"]) == 1
    piped = capsys.readouterr().out
    assert all(each.isprintable() for each in piped.split("\n"))
    for environ in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert show("inspect", f"{tmp_path}/", **environ) == (1, piped)
    # NO_COLOR counts if it is not empty: https://no-color.org
    code, shown = show("inspect", f"{tmp_path}/", NO_COLOR="")
    assert (code, COLOUR.sub("", shown)) == (1, piped)
    assert "\x1b[1;31m!!\x1b[0m  damage" in shown
    assert "\x1b[32mok\x1b[0m  shards" in shown


def test_what_an_encoding_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A character that standard output cannot encode is an escape."""
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
    assert "worker 0              first" in shown


def test_lines_come_as_they_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    """Each is written when its finding is made."""
    print_finding(Finding("a", "ok", "b"))
    assert capsys.readouterr().out == f"ok  {'a':21} b\n"
