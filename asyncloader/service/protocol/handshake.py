"""The messages at the beginning of a connection between a loader and a node, for both sides. Pure: no sockets.

    loader -> node: HELLO      versions, the definition's name, arguments and fingerprint, a random number
    node -> loader: CHALLENGE  whether a token is needed, a random number
    loader -> node: PROOF      HMAC of both numbers with the token
    node -> loader: WELCOME    the node's HMAC, the dataset's kind and length
    loader -> node: OPENING    a logical worker's options
    node -> loader: OPENED     the process of the worker
    node -> loader: REFUSED    instead of any answer: the reason

Instead of OPENING a loader may send PLAN, which asks for an epoch's shards where the loader assigns them, and is
answered by PLANNED.
"""

from __future__ import annotations

import hmac
import secrets
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
from msgspec import Meta
from torch.utils.data import default_collate, default_convert

from asyncloader.base.version import __version__
from asyncloader.service.protocol.msgpack_values import pack
from asyncloader.service.protocol.records import Count, DatasetInfo, Name, pack_record, read_record
from asyncloader.service.protocol.shard_plan import Catalog, check_catalog
from asyncloader.workers.fetch.sample_errors import ErrorPolicy
from asyncloader.workers.fetch.setup import SeededSetup, WorkerSetup

if TYPE_CHECKING:
    from asyncloader.service.protocol.definition import Defined

PROTOCOL = 6
MOST_WORKERS = 1 << 16
MOST_ARGUMENTS = 1 << 16
"""Characters of a definition's arguments as JSON, at most."""
_MOST_CREDITS = 1 << 12
_NONCE = 32

_Nonce = Annotated[bytes, Meta(min_length=_NONCE, max_length=_NONCE)]
_ProofBytes = Annotated[bytes, Meta(max_length=64)]
_Version = Annotated[str, Meta(max_length=64)]


class Hello(NamedTuple):
    """A loader's first message."""

    protocol: int
    name: Name
    arguments: Annotated[str, Meta(max_length=MOST_ARGUMENTS)]
    """JSON; it is not parsed before the proof."""
    fingerprint: _Version
    version: _Version
    torch: _Version
    nonce: _Nonce

    @classmethod
    def of(cls, defined: Defined) -> Hello:
        """Make the first message of a loader of this definition.

        Raises:
            TypeError: the definition's arguments cannot be sent.
        """
        made_by, arguments = defined.definition, defined.packed_arguments()
        if len(arguments) > MOST_ARGUMENTS:
            raise TypeError(
                f"{made_by.name}: its arguments are {len(arguments):,} characters of JSON, and a service takes "
                f"{MOST_ARGUMENTS:,}: give the name of a file that has them"
            )
        return cls(PROTOCOL, made_by.name, arguments, made_by.fingerprint(), *cls.versions(), nonce())

    @staticmethod
    def versions() -> tuple[str, str]:
        """Return the versions that must be equal on both sides: asyncloader's, and torch's without its build."""
        # Builds of one version for CPUs and for CUDA make the same samples; another version may draw other numbers.
        return __version__, str(torch.__version__).partition("+")[0]


class Challenge(NamedTuple):
    """A node's answer to HELLO."""

    needed: bool
    """Whether the loader must have a token."""
    nonce: _Nonce


class Proof(NamedTuple):
    """The loader's proof that it has the token."""

    proof: _ProofBytes


class Welcome(NamedTuple):
    """A node's answer to a proof."""

    proof: _ProofBytes
    info: DatasetInfo

    def checked_info(self) -> DatasetInfo:
        """Return the dataset's kind and length. Raises ValueError if they are invalid."""
        # A node is not trusted: `len()` of a number of more than 63 bits raises, and a map dataset needs a length.
        info = self.info
        numbers = all(number is None or 0 <= number < 1 << 63 for number in (info.length, info.shuffle))
        if not numbers or (not info.iterable and info.length is None and not info.problem):
            raise ValueError("broken stream: a WELCOME that cannot be read")
        return info


class Refusal(NamedTuple):
    """A node's answer that it does not serve a loader.

    Attributes:
        text: the reason.
        for_now: whether to ask again later.
    """

    text: str
    for_now: bool


class Opened(NamedTuple):
    """The id of the worker's process."""

    pid: Count


class Opening(NamedTuple):
    """A request for a logical worker, as the node reads it."""

    loader: str
    worker: int
    credits: int
    setup: WorkerSetup
    """Without `starts`."""
    start: bytes
    """The `EpochStart`, packed. Only the worker's process reads it: it may contain a dataset's state, of any size."""
    catalog: Catalog | None
    """The shards that the loader assigns; None: the loader assigns none."""

    def mismatch(self, info: DatasetInfo) -> str:
        """Return why such a worker cannot read the dataset; empty if it can."""
        if (self.catalog is None) != (info.shuffle is None):
            return "this dataset's shards are, or are not, assigned by the loader"
        if self.catalog is not None and (self.catalog.batch > 0) != (info.streams is not None):
            return "this dataset's streams are, or are not, fixed"
        return ""


def nonce() -> bytes:
    """A new random number."""
    return secrets.token_bytes(_NONCE)


def proof(token: str | None, side: str, loaders: bytes, nodes: bytes) -> bytes:
    """Compute the proof that this side has the token; empty without a token."""
    # With both random numbers, which are new for each connection: a recorded proof fits no other. With the side's name:
    # otherwise a node could prove itself by sending the loader's own proof back.
    return b"" if token is None else hmac.digest(token.encode(), b"|".join((side.encode(), loaders, nodes)), "sha256")


def proves(given: Any, token: str | None, side: str, loaders: bytes, nodes: bytes) -> bool:
    """Whether the other side has proved that it has the token."""
    # `==` takes longer the more bytes are right, so an attacker could find the proof byte by byte.
    return isinstance(given, bytes) and hmac.compare_digest(given, proof(token, side, loaders, nodes))


class _LoaderOptions(NamedTuple):
    """Fields of a `WorkerSetup` with their ranges. They decide how much memory and how many threads a worker takes."""

    # The limits are far above any use. Without them a number could overflow in a process, or start threads without end.

    iterable: bool
    auto_collation: bool
    batch_size: Annotated[int, Meta(ge=0, le=1 << 40)] | None
    drop_last: bool
    base_seed: Count
    num_workers: Annotated[int, Meta(ge=0, le=MOST_WORKERS)]
    concurrency: Annotated[int, Meta(ge=0, le=1 << 16)]
    snapshot_every: Annotated[int, Meta(ge=0, le=1 << 62)]
    attachment: Annotated[int, Meta(ge=0, le=1 << 31)]
    replays: bool
    fetch_threads: Annotated[int, Meta(ge=0, le=1 << 10)]
    decode_threads: Annotated[int, Meta(ge=0, le=1 << 10)]
    workers: Annotated[int, Meta(ge=1, le=MOST_WORKERS)]


class _Seeds(NamedTuple):
    """Fields of a `SeededSetup`. The node sets `seed_collate` by its definition."""

    seed: Count
    replicas: Count
    first_stream: Count
    seed_collate: bool


class _Policy(NamedTuple):
    """Fields of an `ErrorPolicy` that skips samples."""

    refill: bool
    length: Count | None
    seed: Count | None


class _OpeningMessage(NamedTuple):
    # Printable, because the node's log has it.
    loader: Annotated[str, Meta(min_length=1, max_length=64, pattern="^[ -~]*$")]
    worker: Annotated[int, Meta(ge=0, le=MOST_WORKERS - 1)]
    credits: Annotated[int, Meta(ge=1, le=_MOST_CREDITS)]
    options: _LoaderOptions
    start: bytes
    seeds: _Seeds
    policy: _Policy | None
    shards: Catalog | None


def pack_opening(
    loader: str, worker: int, credits: int, setup: WorkerSetup, *, catalog: Catalog | None = None
) -> bytes:
    """Pack the body of OPENING. The functions of the set-up are not sent: they come from the node's definition."""
    policy, seeded, start = setup.policy, setup.seeded, setup.starts[worker]
    assert seeded is not None  # a service serves seeded loaders only
    return pack_record(
        _OpeningMessage(
            loader=loader,
            worker=worker,
            credits=credits,
            options=_LoaderOptions(*(getattr(setup, name) for name in _LoaderOptions._fields)),
            start=pack(tuple(start)),
            seeds=_Seeds(*seeded),
            policy=None if policy is None else _Policy(policy.refill, policy.length, policy.seed),
            shards=catalog,
        )
    )


def read_opening(body: bytes) -> Opening:
    """Read the body of OPENING, and check it.

    Raises:
        ValueError: it cannot be read, or a value is out of range.
    """
    asked = read_record(_OpeningMessage, body)
    options, policy = asked.options, asked.policy
    if asked.shards is not None:
        check_catalog(asked.shards)
    setup = WorkerSetup(
        dataset=None,
        # Used if the definition returns no `collate_fn`: an OPENING has no functions.
        collate_fn=default_collate if options.auto_collation else default_convert,
        worker_init_fn=None,
        starts=(),
        seeded=SeededSetup(*asked.seeds),
        policy=None if policy is None else ErrorPolicy("skip", *policy),
        **options._asdict(),
    )
    return Opening(*(asked.loader, asked.worker, asked.credits, setup, asked.start, asked.shards))
