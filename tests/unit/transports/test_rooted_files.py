from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from asyncloader.transports.errors import AccessDenied, InvalidPath, ObjectNotFound, ReadFailed
from asyncloader.transports.rooted_files import RootedFiles, os_errors


@pytest.fixture(params=["/proc/self/fd", "/nowhere"], ids=["descriptors shown", "names resolved again"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> RootedFiles:
    """A root with the file a/b.txt, and a secret beside the root; with and without help from /proc."""
    (tmp_path / "root/a").mkdir(parents=True)
    (tmp_path / "root/a/b.txt").write_bytes(b"inside")
    (tmp_path / "root-2").mkdir()
    (tmp_path / "root-2/secret").write_bytes(b"outside")
    return RootedFiles(str(tmp_path / "root"), descriptors=request.param)


def read(root: RootedFiles, path: str) -> bytes:
    descriptor, size = root.open(path)
    try:
        return os.pread(descriptor, size + 1, 0)
    finally:
        os.close(descriptor)


def link(root: RootedFiles, name: str, target: str | Path) -> None:
    (Path(root.directory) / name).symlink_to(target)


@pytest.mark.parametrize(
    ("name", "target", "path"),
    [
        ("evil", "../root-2/secret", "evil"),
        ("evil", "../root-2", "evil/secret"),
        ("evil", "/etc/passwd", "evil"),
        ("evil", "/", "evil/etc/passwd"),
        ("a/evil", "../../root-2/secret", "a/evil"),
        ("evil", "a/../../root-2/secret", "evil"),
    ],
)
def test_links_that_lead_out_are_refused(root: RootedFiles, name: str, target: str, path: str) -> None:
    """Refused are relative and absolute links, to files and through directories, also to a sibling of similar name."""
    link(root, name, target)
    with pytest.raises(InvalidPath, match=f"'{path}' leads out of the root .* by a link") as caught:
        root.open(path)
    assert caught.value.path == path


def test_links_inside_are_followed(root: RootedFiles) -> None:
    """Files and directories may have a second name below the root."""
    link(root, "file", "a/b.txt")
    link(root, "directory", Path(root.directory) / "a")
    assert read(root, "file") == read(root, "directory/b.txt") == b"inside"
    assert root.paths("") == ["a/b.txt", "directory/b.txt", "file"]


def test_the_root_may_be_a_link_that_moves(root: RootedFiles, tmp_path: Path) -> None:
    """A root such as `current` is followed to its present target, before and after it was first used."""
    current = tmp_path / "current"
    current.symlink_to("root")
    moving = RootedFiles(str(current), root._descriptors)
    assert read(moving, "a/b.txt") == b"inside"
    current.unlink()
    current.symlink_to("root-2")
    assert read(moving, "secret") == b"outside"
    assert moving.paths("") == ["secret"]


def test_a_file_replaced_while_it_is_opened(tmp_path: Path) -> None:
    """Where names have to be resolved again, another file under the same name is not taken for the opened file."""
    file = tmp_path / "a"
    file.write_bytes(b"old")
    root = RootedFiles(str(tmp_path), descriptors="/nowhere")
    descriptor, _ = root.open("a")
    try:
        file.rename(tmp_path / "b")
        file.write_bytes(b"new")
        with pytest.raises(ReadFailed, match="'a' was replaced while it was opened; read it again"):
            root._true_path(descriptor, "a")
    finally:
        os.close(descriptor)


def test_the_file_system_as_root() -> None:
    """Below / everything is inside."""
    descriptor, _ = RootedFiles("/").open(str(Path(__file__).resolve()).removeprefix("/"))
    os.close(descriptor)


def test_what_is_no_regular_file_is_not_found(root: RootedFiles) -> None:
    """A directory, a FIFO without a writer, a socket and a device raise at once instead of hanging."""
    os.mkfifo(Path(root.directory) / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(root.directory, os.O_RDONLY)  # a name short enough for a socket, however long the root's is
        try:
            listener.bind(f"/proc/self/fd/{here}/socket")
        finally:
            os.close(here)
        for path in ["a", "fifo", "socket"]:
            with pytest.raises(ObjectNotFound, match=f"{path}' is not a regular file"):
                root.open(path)
    assert root.paths("") == ["a/b.txt"]
    with pytest.raises(ObjectNotFound, match="null' is not a regular file"):
        RootedFiles("/dev").open("null")


def test_missing(root: RootedFiles, tmp_path: Path) -> None:
    """A missing file, a file used as a directory, and a missing root have different errors."""
    for path in ["c", "a/c", "c/d", "a/b.txt/c"]:
        with pytest.raises(ObjectNotFound, match=f"/{path}' does not exist"):
            root.open(path)
    gone = RootedFiles(str(tmp_path / "gone"))
    with pytest.raises(ObjectNotFound, match=r"the root '.*/gone' is not a directory"):
        gone.open("a")
    for directory in ["", "a"]:
        with pytest.raises(ObjectNotFound, match=r"the root '.*/gone' is not a directory"):
            gone.paths(f"{directory}/" if directory else "")


def test_names_that_the_system_refuses(root: RootedFiles) -> None:
    """A name too long and a link to itself are errors about the path."""
    link(root, "self", "self")
    for path in ["n" * 300, "self"]:
        with pytest.raises(InvalidPath):
            root.open(path)


def test_listing_refuses_links_that_lead_out(root: RootedFiles) -> None:
    """A link that cannot be read is an error, not a dataset that is silently smaller."""
    link(root, "a/evil", "../../root-2/secret")
    with pytest.raises(InvalidPath, match="'a/evil'"):
        root.paths("")
    (Path(root.directory) / "a/evil").unlink()
    link(root, "evil", "../root-2")
    with pytest.raises(InvalidPath, match="'evil'"):
        root.paths("")


def test_listing_passes_over_dangling_links_and_cycles(root: RootedFiles) -> None:
    """A link to nothing lists nothing; a walk through links that lead back terminates."""
    link(root, "nothing", "no/such/file")
    link(root, "itself", "itself")
    link(root, "a/up", "..")
    (Path(root.directory) / "x").mkdir()
    (Path(root.directory) / "y").mkdir()
    link(root, "x/y", "../y")
    link(root, "y/x", "../x")
    (Path(root.directory) / "y/file").write_bytes(b"")
    assert root.paths("") == ["a/b.txt", "x/y/file", "y/file"]


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, ObjectNotFound),
        (errno.ENOTDIR, ObjectNotFound),
        (errno.ENXIO, ObjectNotFound),
        (errno.EACCES, AccessDenied),
        (errno.EPERM, AccessDenied),
        (errno.ENAMETOOLONG, InvalidPath),
        (errno.ELOOP, InvalidPath),
        (errno.EIO, ReadFailed),
        (errno.EMFILE, ReadFailed),
        (errno.ESTALE, ReadFailed),
    ],
)
def test_errors_of_the_system(number: int, kind: type[Exception], tmp_path: Path) -> None:
    """Each number has one of our errors, which names the whole path, and keeps number and cause."""
    original = OSError(number, os.strerror(number))
    with pytest.raises(kind) as caught, os_errors("a/b", str(tmp_path)):
        raise original
    assert caught.value.__cause__ is original
    assert f"'{tmp_path}/a/b'" in str(caught.value)
    if isinstance(caught.value, ReadFailed):
        assert caught.value.errno == number
        assert os.strerror(number) in str(caught.value)
