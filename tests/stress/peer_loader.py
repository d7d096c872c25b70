"""A loader that turns hostile: speaks to a real node as a loader does, over a plain blocking socket, up to its act."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from asyncloader.service.protocol import frames
from asyncloader.service.protocol.frames import HEADER_BYTES, pack_header
from asyncloader.service.protocol.handshake import Proof, proof
from asyncloader.service.protocol.msgpack_values import pack
from asyncloader.service.protocol.records import pack_record
from asyncloader.workers.fetch.setup import EpochStart
from asyncloader.workers.ipc import wire
from tests.stress.hostility import FROM_LOADER, Case, any_body, any_head, encoded, rng_of, spoiled, value
from tests.stress.wire_inputs import REQUEST, Original, changed, hello, openings, whole

ANSWER_S = 3.0
"""Seconds in which a node must answer an honest message."""
_MOST_ANSWER = 1 << 30


class Stalled(Exception):
    """The node did not answer an honest message in time."""


class Place(NamedTuple):
    """The address of a node, with the token and the certificate that it requires, if any."""

    address: str
    token: str | None = None
    tls_ca: str | None = None


class Connection:
    """A connection to a node, that may be broken in any way.

    Args:
        place: where it goes.
    """

    def __init__(self, place: Place) -> None:
        self._rest = b""
        self.fds: list[int] = []
        self.drip = b""
        """Bytes that go out one at a time."""
        host = ""
        if place.address.startswith("unix:"):
            self.raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.raw.settimeout(ANSWER_S)
            self.raw.connect(place.address.removeprefix("unix:"))
        else:
            host, _, port = place.address.removeprefix("tcp://").rpartition(":")
            self.raw = socket.create_connection((host, int(port)), ANSWER_S)
        self.sock: socket.socket = self.raw
        if place.tls_ca is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(place.tls_ca)
            try:
                self.sock = context.wrap_socket(self.raw, server_hostname=host)
            except TimeoutError:
                raise Stalled("no TLS handshake") from None

    def send(self, data: bytes, fds: tuple[int, ...] = ()) -> bool:
        """Send all of it. Returns whether the node still takes it."""
        try:
            if fds:
                sent = socket.send_fds(self.sock, [data[:1]], list(fds))
                data = data[sent:]
            self.sock.sendall(data)
        except (OSError, ValueError):
            return False
        return True

    def message(self) -> tuple[int, bytes] | None:
        """The next message's kind and body; None: the node has closed the connection.

        Raises:
            Stalled: nothing comes.
        """
        head = self._take(HEADER_BYTES)
        if head is None:
            return None
        header = frames.unpack_header(head, _MOST_ANSWER, _MOST_ANSWER)
        body = self._take(header.body)
        if body is None or self._take(header.payload) is None:
            return None
        return header.kind, body

    def _take(self, size: int) -> bytes | None:
        while len(self._rest) < size:
            try:
                if self.raw is self.sock and self.raw.family == socket.AF_UNIX:
                    data, fds, _, _ = socket.recv_fds(self.raw, 1 << 16, 4)
                    self.fds += fds
                else:
                    data = self.sock.recv(1 << 20)
            except TimeoutError:
                raise Stalled(f"no answer to an honest message in {ANSWER_S:.0f} s") from None
            except OSError:
                data = b""
            if not data:
                return None
            self._rest += data
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def reset(self) -> None:
        """Close it by a RST, where there is such a thing."""
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def half(self) -> None:
        """Close it in one direction."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_WR)

    def trickle(self) -> bool:
        """Send a byte of what goes out slowly. Returns whether the connection still stands, as far as is known."""
        if self.drip:
            self.sock.settimeout(0)
            with contextlib.suppress(OSError):
                self.sock.send(self.drip[:1])
                self.drip = self.drip[1:]
        poll = select.poll()
        poll.register(self.sock.fileno(), select.POLLRDHUP)
        return not poll.poll(0)

    def close(self) -> None:
        """Close it, and the descriptors that came with it."""
        with contextlib.suppress(OSError):
            self.sock.close()
        while self.fds:
            os.close(self.fds.pop())


@dataclass
class Step:
    """An honest message, and the kind of its answer, which is waited for; 0: none."""

    kind: int
    body: bytes
    epoch: int = 0
    task: int = 0
    answer: int = 0

    def packed(self) -> bytes:
        return pack_header(self.kind, len(self.body), self.epoch, self.task) + self.body


def _challenged(body: bytes) -> bytes:
    """The random number in a CHALLENGE, however it is packed."""
    found = [msgspec.msgpack.decode(body)]
    while found:
        each = found.pop()
        if isinstance(each, bytes):
            return each
        if isinstance(each, list):
            found += each
    return bytes(32)


_REPLAYED: list[bytes] = [b""]
"""The newest proof that was right for another connection."""


def _steps(case: Case) -> list[Step]:
    """The messages of an honest loader."""
    first = Step(frames.HELLO, hello(case.name, "{}"), answer=frames.CHALLENGE)
    steps = [first, Step(frames.PROOF, b"", answer=frames.WELCOME)]
    if case.script == "plan":
        return [*steps, Step(frames.PLAN, REQUEST)]
    opening = openings()[0]
    started = pack(tuple(EpochStart(epoch=1, epoch_set=True)))
    again = wire.pack_reset(wire.RESET, 1, started)[wire.PREFIX_BYTES :]
    tasks = [Step(wire.TASK, pack([task, 1 + task]), 0, task, wire.RESULT if task == 1 else 0) for task in range(3)]
    steps += [Step(frames.OPENING, opening, answer=frames.OPENED), *tasks]
    return [*steps, Step(wire.RESET, again), Step(wire.TASK, pack([0, 1]), 1, 0, wire.RESULT), Step(wire.STOP, b"")]


def play(case: Case, place: Place) -> tuple[Connection | None, str]:
    """Play it. Returns the connection, if it is to be left standing, and how far it came.

    Raises:
        Stalled: the node did not answer an honest message.
    """
    try:
        peer = Connection(place)
    except TimeoutError:
        raise Stalled("no connection") from None
    except OSError as error:
        return None, f"not connected: {error}"
    try:
        return _Play(case, peer, place.token).run()
    except BaseException:
        peer.close()
        raise


class _Play:
    def __init__(self, case: Case, peer: Connection, token: str | None) -> None:
        self._case = case
        self._peer = peer
        self._token = token
        self._rng = rng_of(case.seed, "play")
        self._steps = _steps(case)
        self._worker: socket.socket | None = None

    def run(self) -> tuple[Connection | None, str]:
        case, steps = self._case, self._steps
        at = min(case.at, len(steps) - 1)
        for number in range(at):
            if not self._honest(steps[number]):
                self._peer.close()
                return None, f"refused at {number}"
        self._act(at)
        if case.end == "on" and case.act not in ("silence", "slow", "unread"):
            for step in steps[at:]:
                if not self._peer.send(step.packed()):
                    break
        return self._ended()

    def _honest(self, step: Step) -> bool:
        """Send it and wait for its answer. Returns whether that came."""
        if self._worker is not None and step.kind in FROM_LOADER[:6]:
            return True  # the process has that socket
        if not self._peer.send(step.packed()):
            return False
        while step.answer:
            message = self._peer.message()
            if message is None or message[0] in (frames.REFUSED, frames.DIED, frames.DRAINING):
                return False
            if message[0] == frames.CHALLENGE:
                theirs = _challenged(message[1])
                mine = proof(self._token, "loader", bytes(32), theirs)
                _REPLAYED[0] = mine
                self._steps[1].body = pack_record(Proof(mine))
            if message[0] == frames.OPENED and self._peer.fds:
                self._worker = socket.socket(fileno=self._peer.fds.pop(0))
                self._worker.settimeout(ANSWER_S)
                return True
            if message[0] == step.answer or message[0] in (wire.ERROR, wire.EXHAUSTED, wire.ALL_DROPPED):
                return True
        return True

    def _ended(self) -> tuple[Connection | None, str]:
        case, peer = self._case, self._peer
        if self._worker is not None:
            self._worker.close()
        if case.act in ("silence", "slow", "unread", "half") or case.end in ("silence", "half"):
            if case.act == "half" or case.end == "half":
                peer.half()
            return peer, "left standing"
        if case.act == "reset" or case.end == "reset":
            peer.reset()
        else:
            peer.close()
        return None, "done"

    # ------------------------------------------------------------------------------------------------- acts

    def _act(self, at: int) -> None:
        due = self._steps[at]
        name = {"token": "_wrong_token"}.get(self._case.act, f"_{self._case.act}")
        act = getattr(self, name, None)  # some acts are only how it ends
        if act is not None:
            act(due)

    def _kind(self, due: Step) -> None:
        rng = self._rng
        for _ in range(rng.choice([1, 1, 3])):
            kind = rng.choice([*FROM_LOADER, *FROM_LOADER, rng.randrange(256)])
            honest = next((step.body for step in self._steps if step.kind == kind), due.body)
            body = any_body(rng, honest)
            epoch, task = rng.choice([(0, 0), (0, 7), (1, 1), (1 << 31, 1 << 63)])
            self._peer.send(pack_header(kind, len(body), epoch, task) + body)

    def _sizes(self, due: Step) -> None:
        kind = self._rng.choice([due.kind, due.kind, *FROM_LOADER])
        body = any_body(self._rng, due.body)
        self._peer.send(any_head(self._rng, kind, len(body)) + body)

    def _cut(self, due: Step) -> None:
        data = due.packed()
        self._peer.send(data[: self._rng.randrange(len(data))])

    def _skip(self, due: Step) -> None:
        del self._steps[self._steps.index(due)]

    def _twice(self, due: Step) -> None:
        self._peer.send(due.packed() * self._rng.choice([2, 2, 3, 50, 2000]))

    def _slow(self, due: Step) -> None:
        self._peer.drip = due.packed()

    def _value(self, due: Step) -> None:
        body = spoiled(self._rng, due.body) if due.body else encoded(value(self._rng))
        self._peer.send(pack_header(due.kind, len(body), due.epoch, due.task) + body)

    def _wrong_token(self, due: Step) -> None:
        rng, secret = self._rng, (self._token or "") + "x"
        wrong: Any = rng.choice(
            [
                *(b"", b"\x00" * 32, rng.randbytes(32), rng.randbytes(1 << 19), None, 1, "x" * 32),
                *(_REPLAYED[0], proof(secret, "loader", bytes(32), bytes(32))),
            ]
        )
        body = encoded([wrong])
        self._peer.send(pack_header(due.kind, len(body)) + body)

    def _epochs(self, due: Step) -> None:
        rng = self._rng
        for _ in range(rng.choice([1, 10, 300])):
            epoch = rng.choice([0, 1, 2, 7, (1 << 31) - 1, (1 << 32) - 1])
            body = pack([rng.randrange(40)])
            self._peer.send(
                pack_header(wire.TASK, len(body), epoch, rng.choice([0, 1, 5, 1 << 40, (1 << 64) - 1])) + body
            )

    def _resets(self, due: Step) -> None:
        rng, data = self._rng, b""
        for epoch in range(rng.choice([3, 100, 3000])):
            start = pack(tuple(EpochStart(epoch=epoch, epoch_set=True)))
            if rng.random() < 0.1:
                start = spoiled(rng, start, 1 << 16)
            body = wire.pack_reset(wire.RESET, rng.choice([epoch, 0, (1 << 32) - 1]), start)[wire.PREFIX_BYTES :]
            data += pack_header(wire.RESET, len(body)) + body
        self._peer.send(data)

    def _pings(self, due: Step) -> None:
        self._unhindered(pack_header(frames.PING) * self._rng.choice([100, 10_000, 100_000]))

    def _unhindered(self, data: bytes) -> None:
        """Send as much as the node takes without a pause of 0.2 seconds."""
        self._peer.sock.settimeout(0.2)
        self._peer.send(data)
        with contextlib.suppress(OSError):
            self._peer.sock.settimeout(ANSWER_S)

    def _index(self, due: Step) -> None:
        rng = self._rng
        bodies: list[Callable[[], bytes]] = [
            lambda: pack(list(range(rng.choice([1000, 100_000])))),
            lambda: pack([rng.choice([-1, 1 << 62, 10**30, 40])]),
            lambda: pack([rng.choice(["x", None, 1.5, b"", [[]], {"a": 1}])]),
            lambda: pack([0] * rng.choice([1000, 100_000])),
            lambda: encoded(value(rng)),
            lambda: spoiled(rng, pack([0, 1, 2])),
        ]
        body = rng.choice(bodies)()
        for task in range(100, 100 + rng.choice([1, 1, 4])):
            self._unhindered(pack_header(wire.TASK, len(body), 0, task) + body)

    def _unread(self, due: Step) -> None:
        data = b"".join(
            Step(wire.TASK, pack([23, 22, 21, 20] * 2), 0, task).packed()
            for task in range(100, 100 + self._rng.choice([8, 64, 1000]))
        )
        self._unhindered(data)

    def _kill(self, due: Step) -> None:
        data = Step(wire.TASK, pack([0]), 0, 50).packed() if self._rng.random() < 0.5 else b""
        self._peer.send(data + pack_header(frames.KILL) * self._rng.choice([1, 1, 100]))

    def _assignment(self, due: Step) -> None:
        rng = self._rng
        body = wire.pack_assignment(rng.randrange(3), rng.randrange(3), any_body(rng, pack([(0, 0, 1)])))
        self._peer.send(pack_header(wire.ASSIGNMENT, len(body) - wire.PREFIX_BYTES) + body[wire.PREFIX_BYTES :])

    def _stop(self, due: Step) -> None:
        self._peer.send(pack_header(wire.STOP) * self._rng.choice([1, 2, 50]))

    def _garbage(self, due: Step) -> None:
        rng, raw = self._rng, self._peer.raw
        data = rng.choice(
            [
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01\x00",
                rng.randbytes(9000),
                b"ALS2" + bytes(28),
                b"ALS1" * 9,
            ]
        )
        if rng.random() < 0.3:  # beneath TLS, if there is any
            with contextlib.suppress(OSError, ValueError):
                socket.socket.send(raw if raw.fileno() >= 0 else self._peer.sock, data)
        else:
            self._peer.send(data)

    def _flip(self, due: Step) -> None:
        following = b"".join(step.packed() for step in self._steps[self._steps.index(due) :])
        self._peer.send(changed(self._rng, [Original((following,), b"".join), *whole(due.packed())]))

    def _descriptors(self, due: Step) -> None:
        rng, data = self._rng, due.packed()
        made = random_of(rng, rng.choice([1, 2, 4, 5, 60]))
        try:
            for _ in range(rng.choice([1, 1, 20])):
                at = rng.randrange(len(data))
                if not (
                    self._peer.send(data[:at] or b"A", tuple(made)) and self._peer.send(data[at:], tuple(made[:1]))
                ):
                    break
        finally:
            for fd in made:
                os.close(fd)

    def _direct(self, due: Step) -> None:
        """The socket of the process itself."""
        rng = self._rng
        if self._worker is None and not (self._honest(due) and self._worker is not None):
            return
        worker = self._worker
        assert worker is not None
        worker.settimeout(0.3)
        slots, size = rng.choice([(4, 4096), (1, 1 << 20), (1 << 31, 1 << 40), (0, 0), (4, 1 << 62)])
        made = random_of(rng, rng.choice([0, 1, 3]))
        task = wire.pack_task(0, 0, rng.choice([0, 3, 99, -1, -2]), rng.choice([0, 0, 5]), 0.0, pack([0, 1]))
        pieces: list[tuple[bytes, list[int]]] = [
            (wire.pack_ring(0, slots, size), made),
            (task, []),
            (wire.pack(rng.choice([*FROM_LOADER, rng.randrange(256)]), any_body(rng, due.body)), made),
            (rng.choice([b"\x00" * 5, b"\xff" * 5, b"\x01\x00\x00\x80\x01", rng.randbytes(300)]), []),
            (wire.pack_task(0, 1, -1, 0, 0.0, spoiled(rng, pack([0, 1]))), []),
        ]
        try:
            with contextlib.suppress(OSError):
                for data, fds in rng.sample(pieces, rng.randrange(1, 5)):
                    if fds:
                        socket.send_fds(worker, [data], fds)
                    else:
                        worker.sendall(data)
        finally:
            for fd in made:
                os.close(fd)


def random_of(rng: Any, many: int) -> list[int]:
    """Descriptors of drawn kinds; the caller owns them."""
    made: list[int] = []

    def a_pipe() -> int:
        ours, theirs = os.pipe()
        os.close(ours)
        return theirs

    def a_segment() -> int:
        fd = os.memfd_create("hostile")
        os.ftruncate(fd, rng.choice([0, 1, 4096, 1 << 20]))
        return fd

    kinds: list[Callable[[], int]] = [
        a_pipe,
        a_segment,
        lambda: os.open("/dev/zero", os.O_RDWR),
        lambda: os.open("/", os.O_RDONLY),
        lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).detach(),
    ]
    while len(made) < many:
        made.append(rng.choice(kinds)())
    return made
