"""Names Unix sockets in a folder of this user: those of loaders that can be watched, and of a fork server.

Data path: none.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import sys
import tempfile
from contextlib import suppress
from itertools import count
from multiprocessing import process, util
from pathlib import Path
from typing import Any

MOST_PATH = 103 if sys.platform == "darwin" else 107
"""Bytes of a Unix socket's path, at most."""
_LISTENER = len("/listener-01234567")  # bytes that multiprocessing adds to its folder's name

_numbers = count()


def folder() -> Path:
    """Return the folder, which only this user may enter; it is made if it does not exist.

    It lies in ``$XDG_RUNTIME_DIR``, or else in the folder for temporary files, or, where the names of those leave no
    room for a socket's, in ``/tmp``.

    Raises:
        PermissionError: a folder of this name exists, and is another user's, or others may enter it.
        OSError: it cannot be made.
    """
    mine = f"asyncloader-{os.geteuid()}"
    paths = [Path(tempfile.gettempdir()) / mine, Path("/tmp") / mine]  # noqa: S108 - checked below
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and _is_private(Path(runtime)):
        paths.insert(0, Path(runtime) / "asyncloader")
    path = next((each for each in paths if _fits(each / "01234567")), paths[-1])
    path.mkdir(mode=0o700, exist_ok=True)
    # Others may write to the folder for temporary files, and may have made this folder before.
    if not _is_private(path):
        raise PermissionError(
            f"{path} must be a folder of this user that nobody else may enter (chmod 700): rename it, or set "
            "XDG_RUNTIME_DIR to a folder of your own"
        )
    return path


def _fits(path: Path) -> bool:
    """Whether a folder of this name has room for multiprocessing's sockets, which have longer names than ours."""
    return len(os.fsencode(path)) + _LISTENER <= MOST_PATH


def shorten_multiprocessing() -> None:
    """Have multiprocessing put its sockets into `folder`, if the folder for temporary files leaves no room for them.

    For this process and those that multiprocessing starts from it. Without this, none of its sockets can be made.
    """
    config: dict[str, Any] = process.current_process()._config  # type: ignore[attr-defined]
    if _fits(Path(config.get("tempdir") or f"{tempfile.gettempdir()}/pymp-01234567")):
        return
    made = tempfile.mkdtemp(prefix="", dir=folder())
    # At exit, when the sockets are not used any more, as `multiprocessing` removes a folder of its own.
    util.Finalize(None, shutil.rmtree, (made, True), exitpriority=-100)
    config["tempdir"] = made


def _is_private(path: Path) -> bool:
    try:
        found = path.lstat()  # not through a link, whose target another user may change
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def bind_socket() -> tuple[socket.socket, Path]:
    """Listen at a new socket of this process in the folder.

    Raises:
        OSError: it cannot; also if the folder's name is too long for a socket's address, some 100 bytes.
    """
    while True:
        path = folder() / f"{os.getpid()}-{next(_numbers)}.sock"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            try:
                sock.bind(str(path))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise OSError(
                        f"{path} cannot be a socket: {error}; set XDG_RUNTIME_DIR to another folder"
                    ) from None
            else:
                sock.listen(8)
                return sock, path
        except BaseException:
            sock.close()
            raise
        # A process that had this number was killed and has left its socket: take the next name.
        sock.close()


def sockets() -> list[Path]:
    """Return the sockets in the folder, the newest first. Some may be of processes that were killed."""
    found = []
    for path in folder().glob("*.sock"):
        with suppress(FileNotFoundError):  # its loader was closed just now
            status = path.lstat()
            if stat.S_ISSOCK(status.st_mode):
                found.append((status.st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]
