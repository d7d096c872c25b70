"""The sockets at which a node listens."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from asyncloader.service.protocol.sockets import bind

pytestmark = pytest.mark.network


async def test_the_socket_of_a_killed_node_is_replaced(tmp_path: Path) -> None:
    """The killed node's file is left over, and no process listens at it."""
    path = tmp_path / "node.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    sock, name = await bind(f"unix:{path}")
    with sock:
        assert name == f"unix:{path}"
        assert path.is_socket()


async def test_the_socket_of_a_living_node_stays(tmp_path: Path) -> None:
    """A second node at the same address does not start."""
    path = tmp_path / "node.sock"
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(path))
        living.listen()
        with pytest.raises(OSError, match="in use"):
            await bind(f"unix:{path}")
        with socket.socket(socket.AF_UNIX) as loader:
            loader.connect(str(path))


async def test_a_file_that_is_no_socket_stays(tmp_path: Path) -> None:
    """The kernel refuses a connection to it, too, as to the socket of a killed node."""
    path = tmp_path / "samples.bin"
    path.write_bytes(b"of a user")
    with pytest.raises(OSError, match="in use"):
        await bind(f"unix:{path}")
    assert path.read_bytes() == b"of a user"
