"""A store on the loopback interface, in a process of its own: HTTP/1.1, objects and tar files, with a latency.

It does as little as it can, because client and store share the machine's cores, and the client is measured:
no framework, content without copies, connections that stay open. The latency is in the address
(``/50/objects/17`` takes 50 ms until the first byte), so that one store serves every row of the table.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from .harness import ROOT
from .remote_content import LARGE, SHARDS, SMALL, Content, Shards, tar_size

ADDRESS = re.compile(
    rb"(GET|HEAD) (?:http://[^/ ]+)?/(\d+)/(?:objects/(\d+)|(\w+)/(\d+)\.tar) HTTP/1\.1\r\n", re.IGNORECASE
)
RANGE = re.compile(rb"\r\nrange: *bytes=(\d+)-(\d*)\r\n", re.IGNORECASE)
JOINED = 2 * SMALL  # smaller parts are put together: a system call takes a limited number of them
START_S = 30.0  # in which a store must have started


class Answers(asyncio.Protocol):
    """One connection: a request, its latency, the answer, the next request.

    Args:
        content: the objects and files.
        loop: of the connection.
    """

    def __init__(self, content: Content, loop: asyncio.AbstractEventLoop) -> None:
        self._content = content
        self._loop = loop
        self._transport: Any = None
        self._asked = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._asked += data
        if self._asked.endswith(b"\r\n\r\n"):  # clients that wait for an answer before they ask again
            asked, self._asked = self._asked, b""
            match = ADDRESS.match(asked)
            if match is None:
                self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            else:
                self._loop.call_later(int(match[2]) / 1000, self._answer, match, RANGE.search(asked))

    def _answer(self, match: re.Match[bytes], wanted: re.Match[bytes] | None) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        shards = SHARDS.get((match[4] or b"").decode())
        number = int(match[3] or match[5])
        if number >= (self._content.objects if shards is None else shards.files) or (match[4] and shards is None):
            self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        size = LARGE if shards is None else tar_size(shards)
        start, end = 0, size
        if wanted is not None:
            start, end = int(wanted[1]), min(size, int(wanted[2] or size) + 1)
        if start >= end:
            self._transport.write(
                b"HTTP/1.1 416 Range Not Satisfiable\r\nContent-Range: bytes */%d\r\nContent-Length: 0\r\n\r\n" % size
            )
            return
        said = b"206 Partial Content\r\nContent-Range: bytes %d-%d/%d" % (start, end - 1, size) if wanted else b"200 OK"
        head = b'HTTP/1.1 %s\r\nETag: "%d"\r\nContent-Length: %d\r\n\r\n' % (said, number, end - start)
        if match[1] == b"HEAD":
            self._transport.write(head)
        else:
            self._transport.writelines([head, *self._body(shards, number, start, end)])

    def _body(self, shards: Shards | None, number: int, start: int, end: int) -> list[memoryview]:
        if shards is None:
            return [self._content.object(number)[start:end]]
        parts = self._content.tar(shards, number)
        if shards.size < JOINED:
            return [memoryview(b"".join(parts))[start:end]]
        cut: list[memoryview] = []
        for part in parts:
            if start < len(part) and end > 0:
                cut.append(part[max(start, 0) : end])
            start, end = start - len(part), end - len(part)
        return cut


async def serve() -> None:
    """Serve until standard input ends; the port is written to standard output."""
    loop = asyncio.get_running_loop()
    content = Content()
    server = await loop.create_server(lambda: Answers(content, loop), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)  # never written to: readable means its end
    await ended.wait()


@contextmanager
def running_store() -> Generator[str]:
    """Run a store in a process of its own, which ends with this process; gives its URL, without a ``/`` at the end.

    Raises:
        RuntimeError: it did not start.
    """
    command = [sys.executable, "-m", "tests.benchmarks.remote_store"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the store ended with {process.wait(START_S)} instead of starting")
            yield f"http://127.0.0.1:{int(line)}"
        finally:
            process.stdin.close()
            try:
                process.wait(START_S)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve())
