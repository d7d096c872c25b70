"""A store on the loopback interface, in a process of its own: HTTP/1.1, objects and tar files, with a latency.

It does as little as it can, because client and store share the machine's cores, and the client is measured:
no framework, content without copies, connections that stay open. The latency is in the address
(``/50/objects/17`` takes 50 ms until the first byte), so that one store serves every row of the table. The files of a
folder, ``0000.tar`` and so on, have addresses like ``/50/files/0000.tar``.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
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
        content: the objects and tar files.
        files: of a folder.
        loop: of the connection.
    """

    def __init__(self, content: Content, files: list[memoryview], loop: asyncio.AbstractEventLoop) -> None:
        self._content = content
        self._files = files
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
        folder = (match[4] or b"").decode()
        shards = SHARDS.get(folder)
        number = int(match[3] or match[5])
        known = {"": self._content.objects, "files": len(self._files)}
        if number >= (shards.files if shards else known.get(folder, 0)):
            self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        size = tar_size(shards) if shards else len(self._files[number]) if folder else LARGE
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
            whole = folder == "files"
            body = [self._files[number][start:end]] if whole else self._body(shards, number, start, end)
            self._transport.writelines([head, *body])

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


async def serve(files: list[memoryview]) -> None:
    """Serve until standard input ends, these files too; the port is written to standard output."""
    loop = asyncio.get_running_loop()
    content = Content()
    server = await loop.create_server(lambda: Answers(content, files, loop), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)  # never written to: readable means its end
    await ended.wait()


@contextmanager
def running_store(folder: Path | None = None) -> Generator[str]:
    """Run a store in a process of its own, which ends with this process; gives its URL, without a ``/`` at the end.

    Args:
        folder: whose tar files it serves, too.

    Raises:
        RuntimeError: it did not start.
    """
    command = [sys.executable, "-m", "tests.benchmarks.remote_store", *([str(folder)] if folder else [])]
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

    paths = [path for folder in sys.argv[1:] for path in sorted(Path(folder).glob("*.tar"))]
    uvloop.run(serve([memoryview(path.read_bytes()) for path in paths]))
