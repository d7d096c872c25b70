from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from asyncloader.base.socket_folder import bind_socket, folder, sockets
from tests.helpers.running import run_script


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


def test_the_folder_is_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made so, in XDG_RUNTIME_DIR if that is private, too."""
    made = folder()
    assert made == tmp_path / f"asyncloader-{os.geteuid()}"
    assert made.stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "own").mkdir(mode=0o700)
    for name, expected in (("open", made), ("missing", made), ("own", tmp_path / "own" / "asyncloader")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / name))
        assert folder() == expected


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    """So is a link, behind which another user may put anything, and a file."""
    path = folder()
    path.chmod(0o750)
    with pytest.raises(PermissionError, match="chmod 700"):
        folder()
    path.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="nobody else may enter"):
        folder()
    path.unlink()
    path.touch()
    with pytest.raises(OSError, match=str(path)):
        folder()


def test_names_of_sockets_that_were_left_are_not_taken() -> None:
    """A process that was killed leaves its socket; another process may get its number."""
    first, path = bind_socket()
    first.close()
    pid, _, number = path.stem.partition("-")
    left = path.with_name(f"{pid}-{int(number) + 1}.sock")
    path.rename(left)
    second, other = bind_socket()
    second.close()
    assert other not in (path, left)
    assert {*sockets()} == {left, other}


LONG = """
import os
import sys
import tempfile
from multiprocessing import get_context
from asyncloader.base.socket_folder import bind_socket
from asyncloader.workers.process import start
if __name__ == "__main__":
    os.makedirs(sys.path[0] + "/" + 90 * "x")
    tempfile.tempdir = sys.path[0] + "/" + 90 * "x"
    sock, path = bind_socket()
    sock.close()
    path.unlink()
    context = get_context("forkserver")
    context.set_forkserver_preload([])
    for _ in range(2):
        process = context.Process(target=os.getpid)
        start(process, context, 0)
        process.join()
        print(process.exitcode, path.parent, *{oct(each.stat().st_mode) for each in path.parent.iterdir()})
"""


def test_a_folder_whose_name_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has no sockets: loaders that are watched, and the fork server, have them in a short folder of the user."""
    long = tmp_path / ("y" * 90)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setattr("tempfile.tempdir", str(long))
    assert folder() == Path(f"/tmp/asyncloader-{os.geteuid()}")
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        done = run_script(tmp_path, LONG)
        assert done.stdout.splitlines() == 2 * [f"0 {short}/asyncloader 0o40700"], done.stderr
        assert not [*Path(short, "asyncloader").iterdir()]
