"""The acts of hostile peers of a service, drawn from seeds: values, bodies and acts. Pure: bytes, and no sockets.

A case is a peer that is honest up to a drawn moment, and then does one drawn act. Its messages are made here from
MessagePack and numbers alone, because the packing functions of asyncloader would refuse most of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from asyncloader.service.protocol import frames
from asyncloader.workers.ipc import wire

_TO_WORKER = (wire.TASK, wire.RING, wire.RESET, wire.STOP, wire.ASSIGNMENT)
_TO_NODE = (frames.HELLO, frames.PROOF, frames.OPENING, frames.PING, frames.KILL, frames.PLAN)
FROM_LOADER = (*_TO_WORKER, *_TO_NODE)
FROM_NODE = (
    *(wire.RESULT, wire.ERROR, wire.EXHAUSTED, wire.RESET_DONE, wire.READY, wire.STARTED, wire.ALL_DROPPED),
    *(wire.STREAM_ENDED, wire.BAD_SAMPLES, wire.LEAVING, wire.ASK, wire.COUNTS, wire.LOG),
    *(frames.CHALLENGE, frames.WELCOME, frames.OPENED, frames.REFUSED, frames.DIED, frames.PONG, frames.DRAINING),
    frames.PLANNED,
)

ESCAPE = "\x1b[31mhostile\x1b]0;title\x07\r\n\x00"
"""Text that must not reach a log unescaped."""
_PRIME = (1 << 61) - 1
"""Integers that differ by a multiple of it have one hash."""
_BEFORE_PROOF = 1 << 20
"""Bytes of a body that a node takes before the proof."""

# ------------------------------------------------------------------------------------------------------- cases

LOADER_ACTS: dict[str, int] = {
    "kind": 8,  # a message of an unexpected kind, with any body
    "sizes": 6,  # a header that announces too much, too little, or more than comes
    "cut": 6,  # a message that is cut off
    "skip": 4,  # messages are left out, so that the order is wrong
    "twice": 6,  # a message comes again and again
    "silence": 4,  # nothing more comes
    "slow": 5,  # a byte at a time
    "reset": 4,  # the connection is reset
    "half": 4,  # it is closed in one direction
    "value": 14,  # a value that no loader sends, somewhere in a message
    "token": 5,  # a wrong proof, or another connection's
    "epochs": 4,  # tasks of epochs that have not begun, are over, or never come
    "resets": 3,  # a flood of RESET
    "pings": 3,  # a flood of PING whose answers are not read
    "index": 4,  # an index that is huge, of nothing, or outside
    "descriptors": 4,  # descriptors with messages, where none belong
    "unread": 3,  # many tasks, whose batches are not read
    "kill": 2,  # KILL at tasks of its own, or at none
    "assignment": 2,  # shards that were not asked for
    "stop": 2,  # STOP, and then more
    "garbage": 4,  # no messages at all
    "flip": 6,  # bits
    "direct": 6,  # over a Unix socket: any of this to the process itself
}
NODE_ACTS: dict[str, int] = {
    "kind": 8,
    "sizes": 6,
    "cut": 6,
    "skip": 5,
    "twice": 4,
    "silence": 4,
    "slow": 3,
    "reset": 4,
    "half": 4,
    "value": 12,
    "token": 4,
    "garbage": 3,
    "flip": 4,
    "unasked": 5,  # a batch for a task that was not asked for
    "template": 6,  # a batch whose description cannot be read
    "error": 5,  # an error in a batch's place that cannot be read
    "died": 5,  # DIED
    "draining": 3,  # DRAINING
    "withheld": 4,  # no batch ever comes, but all else does
    "announced": 4,  # a batch is announced, and does not come
    "descriptors": 4,
    "log": 4,  # lines for the log
    "pongs": 2,  # a flood of PONG
    "refused": 4,  # REFUSED, with texts of all kinds
    "info": 3,  # WELCOME with another dataset's kind and length
}
CONTENT = frozenset(["flip", "value", "template", "error", "info", "kind"])
"""Acts of a node that may make a batch, an error or an end that cannot be distinguished from a correct one."""
ORDER = frozenset(["twice", "skip"])
"""Acts of a node that repeat its messages or leave some out: batches are correct, but any error may come."""


@dataclass(frozen=True)
class Case:
    """One peer.

    Attributes:
        seed: the seed that it was drawn from.
        side: the peer that it plays: ``"loader"`` or ``"node"``.
        place: how it is connected: ``"tcp"``, ``"unix"``, or ``"tls"``, with a token.
        name: the definition that is read.
        script: of a loader: its messages while it is honest; of a node: ``"beside"`` if an honest node runs beside it.
        at: messages before it turns hostile.
        act: its hostile act.
        end: and after that: ``"close"``, ``"reset"``, ``"half"``, ``"silence"``, or ``"on"``, as if nothing had been.
        always: a node: whether all its connections do it, or the first that comes so far.
    """

    seed: int
    side: str
    place: str
    name: str
    script: str
    at: int
    act: str
    end: str
    always: bool = False

    def __str__(self) -> str:
        return " ".join(str(getattr(self, field.name)) for field in fields(self)[1:])


def rng_of(seed: int, use: str) -> random.Random:
    """Random numbers of a seed for one use."""
    return random.Random(f"asyncloader peers {seed} {use}")


def draw(seed: int, side: str | None = None) -> Case:
    """The case of this seed."""
    rng = rng_of(seed, "case")
    drawn = "node" if rng.random() < 0.25 else "loader"
    side = side or drawn
    acts = LOADER_ACTS if side == "loader" else NODE_ACTS
    act = rng.choices(list(acts), list(acts.values()))[0]
    end = rng.choice(["close", "reset", "half", "silence", "on", "on"])
    if side == "node":
        name = rng.choice(["numbers", "numbers", "awaited", "stream"])
        script = rng.choice(["beside", "beside", "alone"])
        place = "unix" if act == "descriptors" or rng.random() < 0.2 else "tcp"
        at = rng.choice([0, 1, 2, 3, 4, 5, 5, 6, 7])
        return Case(seed, side, place, name, script, at, act, end, rng.random() < 0.6)
    name = rng.choice(["numbers", "numbers", "awaited", "stream", "large"])
    script = rng.choice(["worker"] * 7 + ["plan"])
    place = rng.choice(["tcp", "tcp", "tls", "unix"])
    at = rng.choice([0, 0, 1, 2, 3, 4, 5, 6, 7, 8])
    if act == "direct":
        place, script, at = "unix", "worker", 3
    elif act == "descriptors":
        place = "unix"
    elif act == "token":
        at = 1
    elif act in ("epochs", "resets", "index", "unread", "kill", "assignment", "stop"):
        script, at = "worker", max(3, at)
        place = "tls" if place == "unix" else place
    return Case(seed, side, place, name, script, at, act, end)


# ------------------------------------------------------------------------------------------------------ values


def _many(rng: random.Random, most: int) -> int:
    """A number up to `most`: mostly small, because large numbers take long."""
    return min(most, rng.choice([1, 3, 20, 300, 3000, 3000, 20_000, most]))


def _colliding(rng: random.Random) -> Any:
    tag, many = rng.choice([3, 4, 2, 5]), _many(rng, 42_000)
    numbers: list[Any] = [[6, hex(7 + k * _PRIME)] for k in range(many)]
    if rng.random() < 0.2:
        numbers = [[1, each] for each in numbers]
    if tag in (2, 5):
        return [tag, *(each for number in numbers for each in (number, None))]
    return [tag, *numbers]


def _flood(rng: random.Random) -> Any:
    return [rng.choice([0, 1, 3, 9, 13]), *[rng.choice([[], [0], [1], [2], None, 0, ""])] * _many(rng, 900_000)]


def _quantized(rng: random.Random) -> Any:
    kind = rng.choice(["qint8", "quint8", "qint32", "quint4x2", "quint2x4", "bits8", "uint64", "complex32"])
    tensor = [12, kind, [1, 4], b"\1\2\3\4" * rng.choice([1, 2, 4, 8])]
    return rng.choice([tensor, [14, kind], [3, tensor], [2, tensor, tensor], [7, tensor, 0], [0, tensor]])


def _array(rng: random.Random) -> Any:
    dtype = rng.choice(["<U1000000000", "S0", "U0", "M8[ns]", "<i8", "V4", "O", "f2", ">f8", "m8[99999999999Y]"])
    shape = [1, *rng.choice([[], [0], [4], [0, 1 << 62, 1 << 62], [1] * 64, [1] * 65, [-1], [1 << 63]])]
    if rng.random() < 0.4:
        return [12, rng.choice(["float32", "bool", "bfloat16", "float8_e4m3fn"]), shape, rng.choice([b"", b"\7" * 16])]
    return [rng.choice([10, 11]), dtype, shape, rng.choice([b"", b"\7" * 8, b"\xff" * 32])]


def _text(rng: random.Random) -> Any:
    return rng.choice([ESCAPE, "\n", "\x00", "\u202e", "\U0010ffff", "%s%n{0}"]) * _many(rng, 100_000)


def _deep(rng: random.Random) -> Any:
    many = rng.choice([60, 64, 65, 500, 1000, 5000, 200_000])
    return msgspec.Raw(rng.choice([b"\x91", b"\x92\x00", b"\x81\x00"]) * many + rng.choice([b"\xc0", b""]))


def _extension(rng: random.Random) -> Any:
    if rng.random() < 0.3:
        return msgspec.Raw(
            rng.choice([b"\xd6\xff", b"\xd7\xff", b"\xc7\x0c\xff"]) + rng.randbytes(12)[: rng.choice([4, 8, 12])]
        )
    return msgspec.msgpack.Ext(rng.randrange(-128, 128), rng.randbytes(_many(rng, 100_000)))


def _map(rng: random.Random) -> Any:
    many = _many(rng, 50_000)
    keys: list[Any] = rng.choice(
        [
            list(range(many)),
            [float(2.0 ** (61 * k)) for k in range(16)],
            [str(k) for k in range(many)],
            [7 + k * _PRIME for k in range(8)],
            [None],
        ]
    )
    return dict.fromkeys(keys, rng.choice([None, [], ESCAPE]))


def _number(rng: random.Random) -> Any:
    big = [6, rng.choice(["0x", "-0x", "", "0b"]) + rng.choice("f1_z") * _many(rng, 500_000)]
    return rng.choice([big, 1 << 63, -(1 << 63), (1 << 64) - 1, float("inf"), float("nan"), -0.0, True])


def _named(rng: random.Random) -> Any:
    name = rng.choice(["Cursor", "SkippedSample", "PositionedIndex", "os.system", "builtins.eval", ESCAPE])
    return [9, name, *rng.choice([[], [0], [1, 2], [_quantized(rng)] * 7, [ESCAPE] * 8, [None] * 7])]


def _plain(rng: random.Random) -> Any:
    limits = [n for bits in (7, 8, 15, 16, 31, 32, 63) for n in ((1 << bits) - 1, 1 << bits, -(1 << bits))]
    return rng.choice([None, True, False, -1, 0, 1, "", "x", b"", b"\x00" * 9, [], [0], [1], {}, *limits])


def _typed(rng: random.Random) -> Any:
    inner: Any = rng.choice([None, 1 << 40, -1, ESCAPE, b"x", [], [0], 1e308])
    return [rng.choice([*range(20), -1, 1 << 63, "", None, b"", True]), *[inner] * rng.randrange(4)]


_VALUES: list[Callable[[random.Random], Any]] = [
    *(_colliding, _flood, _quantized, _quantized, _array, _text, _deep, _extension, _map, _number, _named),
    *(_typed, _plain, _plain),
]


def value(rng: random.Random) -> Any:
    """A tree for `msgspec.msgpack.encode` that no honest peer sends."""
    made = rng.choice(_VALUES)(rng)
    return [rng.choice([0, 1, 3, 4]), made] if rng.random() < 0.15 else made


def encoded(tree: Any) -> bytes:
    """MessagePack of a tree, whatever is in it."""
    try:
        return msgspec.msgpack.encode(tree)
    except (OverflowError, RecursionError, UnicodeEncodeError, TypeError):
        return b"\xc1"


def spoiled(rng: random.Random, body: bytes, most: int = 2 * _BEFORE_PROOF) -> bytes:
    """The body with a hostile value at a drawn place, or in its place."""
    try:
        tree: Any = [msgspec.msgpack.decode(body)]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return encoded(value(rng))[:most]
    holder, at = tree, 0
    while rng.random() < 0.8:
        inner = holder[at]
        if type(inner) is list and inner:
            holder, at = inner, rng.randrange(len(inner))
        elif type(inner) is dict and inner:
            holder, at = inner, rng.choice(list(inner))
        else:
            break
    holder[at] = value(rng)
    return encoded(tree[0])[:most]


def any_body(rng: random.Random, honest: bytes) -> bytes:
    """A body: nothing, an honest one, a spoiled one, or bytes."""
    kind = rng.randrange(4)
    return [b"", honest, spoiled(rng, honest) if kind == 2 else b"", rng.randbytes(rng.randrange(64))][kind]


def any_head(rng: random.Random, kind: int, body: int) -> bytes:
    """The header of a message, with numbers at their limits."""
    sizes = [0, 1, 31, 1 << 16, 1 << 20, (1 << 20) + 1, frames.MOST_BODY, frames.MOST_BODY + 1, 1 << 31, (1 << 32) - 1]
    large = [0, 0, 1, 1 << 20, 1 << 31, 1 << 32, 1 << 40, (1 << 40) + 1, 1 << 63, (1 << 64) - 1]
    small = [0, 1, (1 << 31) - 1, (1 << 32) - 1]
    length = rng.choice([body, body, *sizes])
    return frames.pack_header(kind, length, rng.choice(small), rng.choice([*small, (1 << 64) - 1]), rng.choice(large))
