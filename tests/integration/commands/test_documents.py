"""With `--json`, standard output is one document, however the command ends and whatever else prints; and what cannot be
printed, or is read from strange files, ends a command with its exit code.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncloader.__main__ import main
from asyncloader.verification.findings import Finding
from tests.helpers.running import PATIENCE_S

Document = Callable[..., tuple[int, dict[str, Any]]]


def refuse(constant: str) -> Any:
    raise AssertionError(f"JSON has no {constant}")


@pytest.fixture
def document(capfd: pytest.CaptureFixture[str]) -> Document:
    """Runs a command with `--json`. Returns the exit code, and the document that is all of its output."""

    def call(*argv: Any) -> tuple[int, dict[str, Any]]:
        capfd.readouterr()
        code = main([*map(str, argv), "--json"])
        told, errors = capfd.readouterr()
        assert told.isascii()
        assert told.count("\n{") == 0
        found: dict[str, Any] = json.loads(told, parse_constant=refuse)
        parts = ["loaders"] if argv[0] == "top" else ["findings"]
        assert [*found] == ["ok", "error", *parts]
        assert found["ok"] == (code == 0)
        if code == 2:
            assert found["error"].splitlines()[-1] in errors.splitlines()[-1]
        else:
            assert found["error"] is None
        for each in found.get("findings", ()):
            assert [*each] == ["name", "state", "text", "advice", "figures"]
        return code, found

    return call


@pytest.mark.parametrize(
    "argv",
    [
        ["inspect", "/nowhere/"],
        ["checkpoint", "show", "/nowhere/a.pt"],
        ["verify", "nowhere:make", "--seconds", "-1"],
        ["try", "nowhere:make", "--seconds", "-1"],
        ["top", "/nowhere/a.sock"],
        ["top", "--port", "99999"],
    ],
    ids=lambda argv: " ".join(argv[:2]),
)
def test_a_command_that_cannot_be_carried_out(argv: list[str], document: Document) -> None:
    """Says why in the document, too."""
    assert document(*argv)[0] == 2


TARGET = """
import os
import sys

print("imported")


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError


def raises():
    print("called", flush=True)
    os.write(1, b"from code in C\\n")
    os.system("echo from a child")
    raise Unspeakable


def leaves():
    sys.exit("gone")
"""


def test_a_target_that_prints_raises_or_leaves(
    tmp_path: Path, document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adds nothing to the document; its error does not end the command."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "target_module.py").write_text(TARGET)
    (tmp_path / "target_leaver.py").write_text("import sys\nsys.exit(7)\n")
    for name, why in (
        ("target_module.py:raises", "Unspeakable"),
        ("target_module.py:leaves", "SystemExit: gone"),
        ("target_leaver.py:make", "SystemExit: 7"),
    ):
        code, found = document("verify", f"{tmp_path}/{name}")
        assert code == 1
        assert why in found["findings"][-1]["text"]


def test_an_interrupted_command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Has what was found until then."""

    def findings(*_: Any) -> Any:
        yield Finding(
            "a", "ok", "\udcff", figures={"inf": float("inf"), "deep": [[]], "other": Finding, "1": 1 << 9999}
        )
        raise KeyboardInterrupt

    monkeypatch.setattr("asyncloader.commands.command_line._findings", findings)
    assert main(["doctor", "--json"]) == 130
    told = json.loads(capfd.readouterr().out, parse_constant=refuse)
    assert (told["ok"], told["error"]) == (False, "it was interrupted")
    assert told["findings"] == [
        {
            "name": "a",
            "state": "ok",
            "text": r"\udcff",
            "advice": "",
            "figures": {"inf": None, "deep": [[]], "other": "<type>", "1": None},
        }
    ]


def test_an_error_of_asyncloader(document: Document, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Is no finding about what was examined: the exit code is 2, below the traceback."""

    def findings(*_: Any) -> Any:
        raise LookupError("a fault of ours")

    monkeypatch.setattr("asyncloader.commands.command_line._findings", findings)
    code, found = document("doctor")
    assert (code, found["error"]) == (2, "LookupError: a fault of ours")
    main(["doctor"])
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize("how", ["lines", "json"])
def test_output_that_cannot_be_written(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A reader that has gone, a full disk, and no output at all: each has its exit code, and no traceback."""
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    command = ["inspect", str(tmp_path / "a.jsonl"), *["--json"] * (how == "json")]
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone, open("/dev/full", "w") as full:  # noqa: PTH123 - as standard output is made
        for stdout, code, why in ((gone, 141, ""), (full, 2, "No space left"), (None, 0, "")):
            monkeypatch.setattr(sys, "stdout", stdout)
            assert main(command) == code
            monkeypatch.undo()
            out, errors = capfd.readouterr()
            assert not out
            assert why in errors
            assert errors.count("\n") == bool(why)
    os_error = open("/dev/full", "w", buffering=1)  # noqa: PTH123, SIM115
    with os_error:
        monkeypatch.setattr(sys, "stderr", os_error)
        assert main(["inspect", "/nowhere/"]) == 2


# ------------------------------------------------------------------------------------------- strange files


def test_files_that_are_no_files(tmp_path: Path, document: Document) -> None:
    """A pipe that nobody writes, a device without end, a link to itself and a folder are refused, at once."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for file in (tmp_path / "fifo", "/dev/zero", tmp_path / "loop", tmp_path, tmp_path / ("x" * 300)):
        assert document("checkpoint", "show", file)[0] == 2


def test_an_archive_that_is_none_of_torchs(tmp_path: Path, document: Document) -> None:
    """And a damaged one are named."""
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/other", b"")
    code, found = document("checkpoint", "show", tmp_path / "a.pt")
    assert code == 2
    assert "has no data.pkl" in found["error"]
    torch.save({}, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    for at in range(0, len(whole), 41):
        (tmp_path / "b.pt").write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        assert main(["checkpoint", "show", str(tmp_path / "b.pt")]) == 2


@pytest.mark.parametrize("snapshot", [{}, {"kind": "loader"}, {"kind": 1}, {"kind": "loader", "rates": "a"}, [[[]]]])
def test_snapshots_of_strangers(snapshot: Any, tmp_path: Path, document: Document) -> None:
    """A loader's socket that sends something else is named, and so is text that nests too deep."""
    text = json.dumps(snapshot | {"version": 2}) if isinstance(snapshot, dict) else "[" * 100_000
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()

        def send() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(f"{text}\n".encode())

        thread = threading.Thread(target=send)
        thread.start()
        code, found = document("top", tmp_path / "s")
        thread.join(PATIENCE_S)
    assert code == 2
    assert "snapshot" in found["error"]
