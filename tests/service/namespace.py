"""A network namespace for a node, joined to this one by a virtual cable that can be cut. Linux, as root."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager

CUTS = ("to_node", "to_loader", "both")
_numbers = itertools.count()


class Namespace:
    """The far network.

    Attributes:
        address: the IP address of the node.
        within: the command that runs another command in that network.
    """

    def __init__(self) -> None:
        self._name = f"al{os.getpid() % 1_000_000}-{next(_numbers)}"
        place = hash(self._name)
        net = f"10.{128 + place % 100}.{place // 100 % 250}"
        self.address = f"{net}.2"
        self.within = ("ip", "netns", "exec", self._name)
        self._near, self._far = f"{self._name}a", f"{self._name}b"
        _ip("netns", "add", self._name)
        try:
            _ip("link", "add", self._near, "type", "veth", "peer", self._far, "netns", self._name)
            _ip("address", "add", f"{net}.1/30", "dev", self._near)
            _ip("link", "set", self._near, "up")
            self._there("address", "add", f"{self.address}/30", "dev", self._far)
            self._there("link", "set", self._far, "up")
            self._there("link", "set", "lo", "up")
            self._there("route", "add", "default", "via", f"{net}.1")
        except BaseException:
            self.close()
            raise

    def _there(self, *arguments: str) -> None:
        _ip("-n", self._name, *arguments)

    def cut(self, which: str) -> None:
        """Drop all packets in this direction, one of `CUTS`, without a reset."""
        if which == "both":
            _ip("link", "set", self._near, "down")
        elif which == "to_node":
            _ip("route", "add", "blackhole", f"{self.address}/32")
        else:
            self._there("route", "add", "blackhole", f"{self.address[:-1]}1/32")

    def close(self) -> None:
        """Remove the network and its cuts. The processes in it must have ended."""
        subprocess.run(["ip", "route", "delete", "blackhole", f"{self.address}/32"], capture_output=True, check=False)
        _ip("netns", "delete", self._name)  # this removes the cable, too


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=True, timeout=20)


@contextmanager
def namespace() -> Generator[Namespace]:
    """Return a network that is removed at the end."""
    made = Namespace()
    try:
        yield made
    finally:
        made.close()


@functools.cache
def namespaces_work() -> bool:
    """Whether this process may make network namespaces."""
    if os.geteuid() or shutil.which("ip") is None:
        return False
    try:
        with namespace():
            return True
    except subprocess.CalledProcessError:
        return False
