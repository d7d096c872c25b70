"""A TCP proxy that resets connections, or goes silent in one direction or both."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Generator

from asyncloader.service.protocol.frames import pack_header
from asyncloader.workers.ipc.wire import RESULT

TASK = b"ALS1\1\0\0\0"
HEAD = struct.Struct("<8x4sIQQ")


class Proxy:
    """Forwards connections to an address.

    Args:
        target: ``tcp://host:port``.
    """

    def __init__(self, target: str) -> None:
        self._target = ("", 0)
        self.aim(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.to_node, self.to_loader = threading.Event(), threading.Event()
        self.to_node.set()
        self.to_loader.set()
        self.forwarded = threading.Semaphore(0)
        """Released for each piece that was sent to the loader."""
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._run(self._accept)

    def aim(self, target: str) -> None:
        """Forward new connections to this address."""
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = host, int(port)

    def _run(self, function: object, *args: object) -> None:
        thread = threading.Thread(target=function, args=args)  # type: ignore[arg-type]
        self._threads = [each for each in self._threads if each.is_alive()]
        thread.start()
        self._threads.append(thread)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                self._sockets |= {near, far}
                # the second direction to end fails to acquire it, and closes both sockets
                last = threading.Semaphore(1)
                self._run(self._pump, near, far, self.to_node, False, last)
                self._run(self._pump, far, near, self.to_loader, True, last)

    def _pump(
        self,
        source: socket.socket,
        target: socket.socket,
        allowed: threading.Event,
        counts: bool,
        last: threading.Semaphore,
    ) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._forward(source, target, allowed, counts)
        if not allowed.is_set():
            allowed.wait()  # a silent network does not report an end, either
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if not last.acquire(blocking=False):
            self._sockets -= {source, target}
            source.close()
            target.close()

    def _forward(self, source: socket.socket, target: socket.socket, allowed: threading.Event, counts: bool) -> None:
        while data := source.recv(1 << 16):
            allowed.wait()
            target.sendall(data)
            if counts:
                self.forwarded.release()

    def reset(self) -> None:
        """Break all connections."""
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RDWR)

    def refuse(self) -> None:
        """Accept no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self) -> None:
        """Break all connections, and end the proxy's threads."""
        self.refuse()
        self.to_node.set()
        self.to_loader.set()
        self.reset()
        for thread in self._threads:
            thread.join()
        for sock in list(self._sockets):
            sock.close()


@contextlib.contextmanager
def proxied(target: str) -> Generator[Proxy]:
    """Return a proxy for this address."""
    proxy = Proxy(target)
    try:
        yield proxy
    finally:
        proxy.close()


class FruitlessProxy(Proxy):
    """Lets loaders open worker connections, and ends or stalls each connection once it has a task.

    Args:
        target: as of `Proxy`.
        how: "ends": the connection ends. "announces": a batch is announced and never sent.
    """

    def __init__(self, target: str, how: str) -> None:
        self.opened = 0
        """Connections that got a task."""
        self._how = how
        super().__init__(target)

    def _forward(self, source: socket.socket, target: socket.socket, allowed: threading.Event, counts: bool) -> None:
        if counts:
            super()._forward(source, target, allowed, counts)
            return
        while data := source.recv(1 << 16):
            at = data.find(TASK)
            if at < 0:
                target.sendall(data)
                continue
            self.opened += 1
            if self._how == "announces":
                _, epoch, task, _ = HEAD.unpack_from(data, at)
                source.sendall(pack_header(RESULT, 0, epoch, task, 1 << 20))
                while source.recv(1 << 16):
                    pass
            return


@contextlib.contextmanager
def fruitless(target: str, how: str) -> Generator[FruitlessProxy]:
    """Return such a proxy for this address."""
    proxy = FruitlessProxy(target, how)
    try:
        yield proxy
    finally:
        proxy.close()
