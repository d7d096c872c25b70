"""The messages with which a session begins, for both sides: who is there, what is read, and how. Pure: no sockets.

    loader -> node: HELLO      versions, the definition's name, arguments and fingerprint, a random number
    node -> loader: CHALLENGE  whether a token is needed, a random number
    loader -> node: PROOF      HMAC of both numbers with the token
    node -> loader: WELCOME    the node's HMAC, what the dataset is
    loader -> node: OPENING    a logical worker's options; or STAY, nothing: only to be there; or PLAN, which asks what
                               an epoch reads, where the loader assigns a dataset's shards
    node -> loader: OPENED     the process that has it; or PLANNED, a part of the plan
    node -> loader: REFUSED    instead of any answer: why

Either side proves that it has the token without sending it. The numbers are new for every connection, so a proof that
somebody recorded is of no use.
"""

from __future__ import annotations

import hmac
import json
import secrets
from typing import Any, NamedTuple

import torch
from torch.utils.data import default_collate, default_convert

import asyncloader
from asyncloader.service.definition import Defined
from asyncloader.service.lane_host import Facts
from asyncloader.service.served_shards import Catalog, read_catalog
from asyncloader.service.values import pack, unpack
from asyncloader.workers.fetch.dataset_state import Cursor
from asyncloader.workers.fetch.sample_errors import ErrorPolicy
from asyncloader.workers.fetch.setup import EpochStart, SeededSetup, WorkerSetup

__all__ = [
    "MOST_WORKERS",
    "Hello",
    "Opening",
    "Welcome",
    "nonce",
    "pack_opening",
    "proof",
    "proves",
    "read_opening",
    "read_record",
]

PROTOCOL = 1
MOST_WORKERS = 1 << 16
_MOST_CREDITS = 1 << 12


class Hello(NamedTuple):
    """A loader's first message."""

    protocol: int
    name: str
    arguments: str
    """JSON."""
    fingerprint: str
    version: str
    torch: str
    nonce: bytes

    @classmethod
    def of(cls, defined: Defined) -> Hello:
        """A new one, for this definition."""
        made_by = defined.definition
        return cls(
            *(PROTOCOL, made_by.name, defined.packed_arguments(), made_by.fingerprint()),
            *(*cls.versions(), nonce()),
        )

    @staticmethod
    def versions() -> tuple[str, str]:
        """Those that both sides must have: asyncloader's, and torch's whatever it was built for."""
        return asyncloader.__version__, str(torch.__version__).partition("+")[0]

    def checked(self) -> Hello:
        """Raise ValueError if a field is of the wrong type."""
        texts = (self.name, self.arguments, self.fingerprint, self.version, self.torch)
        if type(self.protocol) is not int or not all(type(each) is str for each in texts):
            raise ValueError("broken stream: a HELLO that cannot be read")
        try:
            given = json.loads(self.arguments)
        except RecursionError:
            given = None
        if type(self.nonce) is not bytes or len(self.nonce) != _NONCE or type(given) is not dict:
            raise ValueError("broken stream: a HELLO that cannot be read")
        return self


class Welcome(NamedTuple):
    """A node's answer to a proof."""

    proof: bytes
    facts: tuple[Any, ...]

    def checked_facts(self) -> Facts:
        """What the dataset is. Raises ValueError."""
        if type(self.facts) is not tuple or len(self.facts) != len(Facts._fields):
            raise ValueError("broken stream: a WELCOME that cannot be read")
        iterable, length, asynchronous, stateful, shuffle, problem = self.facts
        for number in (length, shuffle):
            if number is not None and (type(number) is not int or number < 0):
                raise ValueError("broken stream: a WELCOME that cannot be read")
        return Facts(bool(iterable), length, bool(asynchronous), bool(stateful), shuffle, str(problem))


class Opening(NamedTuple):
    """A request for a logical worker, as the node reads it."""

    session: str
    worker: int
    credits: int
    share: bool
    """Whether its batches are made once for all loaders that read the same."""
    setup: WorkerSetup
    catalog: Catalog | None
    """The shards that the loader assigns; None: of no such dataset."""


_NONCE = 32


def nonce() -> bytes:
    """A new random number."""
    return secrets.token_bytes(_NONCE)


def proof(token: str | None, side: str, loaders: bytes, nodes: bytes) -> bytes:
    """What shows that this side has the token; nothing without one."""
    return b"" if token is None else hmac.digest(token.encode(), b"|".join((side.encode(), loaders, nodes)), "sha256")


def proves(given: Any, token: str | None, side: str, loaders: bytes, nodes: bytes) -> bool:
    """Whether the other side has shown that it has the token. Takes the same time for any wrong proof."""
    return isinstance(given, bytes) and hmac.compare_digest(given, proof(token, side, loaders, nodes))


def read_record(kind: type, body: bytes) -> Any:
    """Unpack a message's body to this named tuple.

    Raises:
        ValueError: it is none.
    """
    values = unpack(body)
    try:
        return kind(*values)
    except TypeError:
        raise ValueError(f"broken stream: a {kind.__name__} that cannot be read") from None


def pack_opening(
    session: str, worker: int, credits: int, setup: WorkerSetup, *, share: bool, catalog: Catalog | None = None
) -> bytes:
    """The body of OPENING, from a set-up whose functions are the definition's."""
    policy = None if setup.policy is None else tuple(setup.policy)
    seeded = None if setup.seeded is None else tuple(setup.seeded)
    values = {name: getattr(setup, name) for name in _PLAIN_FIELDS}
    shards = None if catalog is None else tuple(catalog)
    return pack((session, worker, credits, share, values, tuple(setup.starts[worker]), seeded, policy, shards))


def read_opening(body: bytes) -> Opening:
    """The other way. What is read is checked: it decides what the node's processes do.

    Raises:
        ValueError: it cannot be read, or is out of range.
    """
    try:
        session, worker, credits, share, values, start, seeded, policy, shards = unpack(body)
        if type(session) is not str or len(session) > 64:
            raise ValueError("broken stream: an OPENING without a session")
        _check_number("worker", worker, MOST_WORKERS - 1)
        _check_number("credits", credits, _MOST_CREDITS, least=1)
        options = {name: _checked(name, values[name]) for name in _PLAIN_FIELDS}
        begin = EpochStart(*start)
        if begin.cursor is not None and not isinstance(begin.cursor, Cursor):
            raise ValueError("broken stream: an OPENING with a cursor that cannot be read")
        _check_number("skip", begin.skip, 1 << 62)
        _check_number("epoch", begin.epoch, 1 << 62)
        _check_number("stream_key", begin.stream_key, 1 << 64)
        catalog = read_catalog(shards)
        seeds = SeededSetup(*seeded)
        for name in ("seed", "replicas", "first_stream"):
            _check_number(name, getattr(seeds, name), 1 << 64)
        setup = WorkerSetup(
            dataset=None,
            collate_fn=default_collate if options["auto_collation"] else default_convert,
            worker_init_fn=None,
            starts=[begin] * (worker + 1),
            seeded=seeds,
            policy=None if policy is None else _policy(*policy),
            **options,
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"broken stream: an OPENING that cannot be read ({error})") from None
    return Opening(session, worker, credits, bool(share), setup, catalog)


_PLAIN_FIELDS = {
    "iterable": bool,
    "auto_collation": bool,
    "batch_size": 1 << 40,
    "drop_last": bool,
    "base_seed": 1 << 64,
    "num_workers": MOST_WORKERS,
    "concurrency": 1 << 16,
    "snapshot_every": 1 << 62,
    "attachment": 1 << 31,
    "replays": bool,
    "fetch_threads": 1 << 10,
    "decode_threads": 1 << 10,
}


def _checked(name: str, value: Any) -> Any:
    most: Any = _PLAIN_FIELDS[name]
    if most is bool:
        return bool(value)
    if value is None and name == "batch_size":
        return None
    _check_number(name, value, most)
    return value


def _check_number(name: str, value: Any, most: int, least: int = 0) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}={value!r:.40} is not between {least} and {most}")


def _policy(on_error: Any, refill: Any, population: Any, seed: Any) -> ErrorPolicy:
    if on_error != "skip":
        raise ValueError(f"on_error={on_error!r:.40} cannot be asked for")
    return ErrorPolicy(on_error, bool(refill), population, seed)
