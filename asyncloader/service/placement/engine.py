"""Interface of an engine, which places a service's nodes on machines and knows their addresses, as Ray's does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from asyncloader.service.definition import Defined, PickledDefinition
from asyncloader.service.protocol.address import Service


class EngineNode(NamedTuple):
    """A node that is ready.

    Attributes:
        address: at which this process reaches it.
        workers: processes that it has for each dataset.
    """

    address: str
    workers: int


class Credentials(NamedTuple):
    """The token and the certificates of an engine's nodes. The fields are those of `Service`."""

    token: str
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None


@runtime_checkable
class Engine(Protocol):
    """Places nodes, and replaces those that die. Any thread may call its methods."""

    def serve(self, what: PickledDefinition) -> Credentials:
        """Start missing nodes, and have each node serve this definition, later nodes included. Blocks for seconds."""
        ...

    def left(self) -> None:
        """Note that a loader which called `serve` is closed. Called once for each call of `serve`."""
        ...

    def nodes(self) -> Sequence[EngineNode]:
        """Return the nodes that are ready, as last reported. Does not block."""
        ...

    def watch(self, changed: Callable[[], None]) -> Callable[[], object]:
        """Call `changed`, in any thread, when `nodes` has changed. Returns a function that ends this."""
        ...


@dataclass(frozen=True)
class EngineService(Service):
    """The service that an engine runs. Its addresses change.

    Attributes:
        engine: the engine.
    """

    engine: Engine = field(kw_only=True)
    _left: Callable[[], object] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # `Service.__post_init__` is not called: it checks the addresses in `url`, which is the engine's name here.
        # A loader that is dropped without `close` must not keep the nodes. `finalize` calls once, whichever comes
        # first.
        left = weakref.finalize(self, self.engine.left)
        left.atexit = False  # an engine may be unusable while the interpreter ends
        object.__setattr__(self, "_left", left)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the nodes that are ready."""
        return tuple(node.address for node in self.engine.nodes())

    @property
    def remote(self) -> bool:
        """True: nodes that come later may be on other machines."""
        return True

    def workers_at(self, address: str) -> int:
        """How many processes the node at this address has for a dataset."""
        return next((node.workers for node in self.engine.nodes() if node.address == address), 1)

    def watch(self, changed: Callable[[], None]) -> Callable[[], object]:
        """Call `changed` when nodes come or go. See `Engine.watch`."""
        return self.engine.watch(changed)

    def close(self) -> None:
        """Report to the engine that the loader is closed. Idempotent."""
        self._left()

    def __repr__(self) -> str:
        return self.url


def engine_service(engine: Engine, defined: Defined) -> EngineService:
    """Have an engine serve a pickled definition."""
    assert isinstance(defined.definition, PickledDefinition)
    credentials = engine.serve(defined.definition)
    return EngineService(repr(engine), *credentials, engine=engine)
