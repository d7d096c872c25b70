"""The loader's end of a worker connection: when a node counts as lost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, contextmanager

import pytest

from asyncloader.service.client import remote_channel
from asyncloader.service.client.remote_channel import RemoteChannel
from asyncloader.service.protocol import frames
from asyncloader.service.protocol.connection import Link
from asyncloader.workers.ipc import segment, wire
from tests.helpers.running import LOOPS, PATIENCE_S, run_async

CHECKS = remote_channel._MOST_PINGS + 4


def checked(meanwhile: Callable[[socket.socket, Link], object]) -> bool:
    """Whether a node with a task counts as connected after the checks; `meanwhile` runs between them, and no reader."""

    async def run() -> bool:
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # as while connecting
                ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000)
            link = Link(ours)
            theirs, _ = server.accept()
            with theirs:
                channel = RemoteChannel(link)
                channel.send(wire.pack_task(0, 0, -1, 0, 0.0, b""))
                for _ in range(CHECKS):
                    channel._check()
                    meanwhile(theirs, link)
                alive = not channel.ended
                channel.close()
                return alive

    return run_async(run())


def test_a_silent_node() -> None:
    """The node counts as lost."""
    assert not checked(lambda node, link: None)


def test_a_silent_node_in_a_later_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node counts as lost, too: each epoch may have its own loop, and timers of a closed loop never fire."""
    monkeypatch.setattr(remote_channel, "_CHECK_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = Link(socket.create_connection(server.getsockname()))
        theirs, _ = server.accept()
        channel = RemoteChannel(link)

        async def begin(task: int) -> None:
            channel.send(wire.pack_task(0, task, -1, 0, 0.0, b""))

        async def wait() -> None:
            await begin(1)
            with open(channel.gone_fd, "rb", closefd=False) as gone:  # noqa: ASYNC230 - in a thread
                assert await asyncio.to_thread(gone.read) == b""

        run_async(begin(0))
        run_async(wait())
        assert channel.ended
        channel.close()
        theirs.close()


def test_answers_that_the_loop_has_not_read() -> None:
    """Unread answers prove that the node lives: only the loop was blocked."""
    assert checked(lambda node, link: node.send(frames.pack_header(frames.PONG)))


def test_a_slow_payload() -> None:
    """Its bytes prove that the node lives, although too few have arrived to wake the reader."""

    def trickle(node: socket.socket, link: Link) -> None:
        if not link.received:
            node.send(frames.pack_header(wire.RESULT, 0, 0, 0, 1 << 20))
            list(link.receive())
        node.send(bytes(100))

    assert checked(trickle)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="no such option")
def test_a_worker_connection_has_no_time_out_of_the_kernels() -> None:
    """The kernel's time-out would also end a connection whose window is closed."""
    seen = []
    checked(lambda node, link: seen.append(link.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)))
    assert set(seen) == {0}


def test_a_batch_that_no_memory_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node may announce any size, so it is no error of the loader: the connection ends, its tasks go elsewhere. A
    batch may take half of what is left.
    """
    monkeypatch.setattr(segment, "memory_limit", lambda: (1 << 20, "memory available on this machine"))

    async def run() -> tuple[bool, str]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            link = Link(socket.create_connection(server.getsockname()))
            node, _ = server.accept()
            with node:
                channel = RemoteChannel(link)
                channel.send(wire.pack_task(0, 3, -1, 0, 0.0, b""))
                node.sendall(frames.pack_header(wire.RESULT, 0, 0, 3, (1 << 19) + 1))
                link.sock.setblocking(True)
                link.sock.recv(1, socket.MSG_PEEK)  # it has arrived
                link.sock.setblocking(False)
                assert list(channel.receive()) == []
                ended = channel.ended, channel.why
                channel.close()
                return ended

    broken, why = run_async(run())
    assert broken
    assert why.startswith("a batch for which this machine has no memory: asyncloader wants 524,289 bytes")
    assert "524,288 bytes (half of the memory available on this machine;" in why


@contextmanager
def with_task() -> Generator[tuple[RemoteChannel, socket.socket]]:
    """A channel with task 3 of epoch 0, and the node's end of its connection."""
    theirs, ours = socket.socketpair()
    channel = RemoteChannel(Link(ours))
    try:
        channel.send(wire.pack_task(0, 3, -1, 0, 0.0, b""))
        yield channel, theirs
    finally:
        channel.close()
        theirs.close()


@pytest.mark.parametrize(("task", "nbytes", "sound"), [(3, 5, True), (3, 6, False), (3, 1 << 40, False), (4, 5, False)])
async def test_a_batch_that_is_not_as_its_header_says(task: int, nbytes: int, sound: bool) -> None:
    """The connection is ended: the batch would be read from memory that was not sent, or taken for another batch."""
    with with_task() as (channel, node):
        result = wire.Result(0, task, 0, nbytes, 0, 1, 0.0, same=False)
        body = wire.pack_result(result, b"template")[wire.PREFIX_BYTES :]
        node.sendall(frames.pack_header(wire.RESULT, len(body), 0, 3, 5) + body + b"bytes")
        assert [kind for kind, _ in channel.receive()] == [wire.RESULT] * sound
        assert channel.ended == (not sound)


@pytest.mark.parametrize("loop_factory", LOOPS.values(), ids=LOOPS)
def test_when_tasks_are_on_their_way(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Those of a callback go once it has returned, in order, however full the socket is; a coroutine's at once, behind
    those that wait: it may compute for long.
    """

    async def run() -> None:
        loop = asyncio.get_running_loop()
        with with_task() as (channel, theirs), closing(Link(theirs)) as node:
            came: list[int] = []

            def send(numbers: Iterable[int], nbytes: int) -> list[int]:
                for number in numbers:
                    channel.send(wire.pack_task(0, number, -1, 0, 0.0, bytes(nbytes)))
                return take()

            def take() -> list[int]:
                came.extend(message.header.task for message in node.receive())
                return came.copy()

            meanwhile: list[list[int]] = [take()]
            loop.call_soon(lambda: meanwhile.append(send(range(4, 9), 1 << 20)))
            async with asyncio.timeout(PATIENCE_S):
                while len(came) < 6:
                    await asyncio.sleep(0)
                    take()
            loop.call_soon(lambda: meanwhile.append(send([9], 1)))
            await asyncio.sleep(0)
            assert send([10], 1) == [*range(3, 11)]
            assert meanwhile == [[3], [3], [*range(3, 9)]]

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())
