"""`asyncloader top`: shows a running loader of this user, as lines, as JSON, in a terminal, and as a page."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader
from asyncloader.__main__ import main
from asyncloader.base.socket_folder import folder
from tests.helpers.datasets import Numbers
from tests.helpers.running import PATIENCE_S, environment

pytestmark = pytest.mark.network


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes of this user may be watched at the same time."""
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture
def running() -> Iterator[DataLoader[Any]]:
    """Gives a loader in the middle of an epoch, which is watched."""
    with DataLoader[Any](Numbers(400), batch_size=4, num_workers=1, seed=1) as loader:
        loader.dashboard()
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        yield loader


def test_lines_and_json(running: DataLoader[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Have the position and the verdict; the exit code is that of the verdict."""
    code = main(["top"])
    lines = capsys.readouterr().out
    assert "ok  loader                DataLoader of Numbers, process " in lines
    assert "position              epoch 0, 5 of 100 batches delivered" in lines
    assert re.search(r"worker 0 +pid \d+, .*slots in use", lines)
    assert main(["top", running.dashboard().socket, "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] == (code == 0)
    (found,) = told["loaders"]
    assert found["totals"]["batches"] == 5
    assert found["verdict"]["text"] in lines


def test_several_loaders(running: DataLoader[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """All are shown; the page is one loader's, and the others are named with the command for each."""
    with DataLoader[Any](Numbers(8)) as other:
        other.dashboard()
        main(["top", "--json"])
        found = json.loads(capsys.readouterr().out)["loaders"]
        assert {each["place"] for each in found} == {"not iterated yet", "epoch 0, 5 of 100 batches delivered"}
        assert main(["top", "--web"]) == 2
        words = capsys.readouterr().err
        for loader in (running, other):
            assert f"asyncloader top --web {loader.dashboard().socket}" in words


def test_nothing_to_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The text says how a loader is watched; a socket that was left behind is removed, and one that lies is named."""
    with subprocess.Popen(["true"]) as ended:
        pass
    left, begins = folder() / f"{ended.pid}-0.sock", folder() / f"{os.getpid()}-0.sock"
    for each in (left, begins):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(each))
    assert main(["top"]) == 2
    assert "ASYNCLOADER_TOP=1" in capsys.readouterr().err
    assert not left.exists()
    assert begins.exists()  # its process runs, and may be about to listen
    assert main(["top", str(tmp_path / "missing")]) == 2
    assert "missing cannot be read: No such file or directory" in capsys.readouterr().err


def test_a_system_without_unix_sockets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Has the page, which the text names."""
    monkeypatch.delattr(socket, "AF_UNIX")
    assert main(["top"]) == 2
    assert "see the page of loader.dashboard()" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "words"),
    [(b'{"version": 99}\n', "other snapshots"), (b"[]\n", "other snapshots"), (b"x" * (5 << 20), "more than 4 MiB")],
)
def test_a_socket_that_is_no_loaders(
    answer: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Is refused with its name, however much it sends."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()

        def lie() -> None:
            sock, _ = listener.accept()
            with sock:
                try:
                    sock.sendall(answer)
                    sock.recv(1)
                except OSError:
                    pass

        thread = threading.Thread(target=lie)
        thread.start()
        assert main(["top", str(tmp_path / "s")]) == 2
        thread.join(PATIENCE_S)
    assert words in capsys.readouterr().err


@pytest.mark.thorough
def test_the_page(running: DataLoader[Any]) -> None:
    """Is served by the command's process, follows the loader, and ends with it."""
    command = [sys.executable, "-m", "asyncloader", "top", "--web"]
    env = {**environment(), "XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"]}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with urllib.request.urlopen(f"{url}events", timeout=PATIENCE_S) as events:
            line = events.readline().decode()
            assert json.loads(line.removeprefix("data: "))["place"] == "epoch 0, 5 of 100 batches delivered"
            running.close()
            assert events.read().decode().endswith("event: end\ndata: \n\n")
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("ends", ["Ctrl-C", "the loader's end"])
def test_in_a_terminal(ends: str, running: DataLoader[Any]) -> None:
    """The view is renewed, and leaves with exit code 0: when it is asked to, or with a line when the loader ends."""
    env = {**environment(), "XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"], "TERM": "xterm", "COLUMNS": "120"}
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "asyncloader", "top"]
    with (
        subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)  # an error below must not wait for a process that waits for its terminal
        os.close(theirs)
        shown = b""
        while shown.count(b"epoch 0, 5 of 100") < 2:
            shown += os.read(ours, 1 << 16)
        if ends == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        else:
            running.close()
        try:
            while data := os.read(ours, 1 << 16):
                shown += data
        except OSError:  # the terminal's other end is closed
            pass
        os.close(ours)
        assert process.wait(PATIENCE_S) == 0, shown.decode(errors="replace")
    assert b"DataLoader of Numbers" in shown
    assert (b", has ended" in shown) == (ends != "Ctrl-C")
    assert b"Traceback" not in shown
