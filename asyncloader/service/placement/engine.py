"""Engines: what places a service's nodes on machines, and says where they are.

Data path: none; before a node of a service is there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from asyncloader.service.definition import Defined
from asyncloader.service.pickled import PickledDefinition
from asyncloader.service.protocol.address import Service


class EngineNode(NamedTuple):
    """A node that is ready.

    Attributes:
        address: where this process reaches it.
        workers: how many processes it has for a dataset.
    """

    address: str
    workers: int


class Credentials(NamedTuple):
    """What an engine's nodes ask for, and what they show: as the attributes of `Service`."""

    token: str
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None


@runtime_checkable
class Engine(Protocol):
    """Places nodes, and replaces those that die. Any thread may call its methods."""

    def serve(self, what: PickledDefinition) -> Credentials:
        """Start what is missing, and have each node serve this, those that come later, too. Blocks, some seconds."""
        ...

    def left(self) -> None:
        """A loader has gone that called `serve`."""
        ...

    def nodes(self) -> Sequence[EngineNode]:
        """The nodes that are ready now, as far as is known. Does not block."""
        ...

    def watch(self, changed: Callable[[], None]) -> Callable[[], object]:
        """Have this called, in any thread, when `nodes` has changed. Returns what ends that."""
        ...


@dataclass(frozen=True)
class EngineService(Service):
    """The service that an engine runs. Its addresses change.

    Attributes:
        engine: it.
    """

    engine: Engine = field(kw_only=True)
    _left: Callable[[], object] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        left = weakref.finalize(self, self.engine.left)
        left.atexit = False
        object.__setattr__(self, "_left", left)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Those of the nodes that are ready now."""
        return tuple(node.address for node in self.engine.nodes())

    @property
    def remote(self) -> bool:
        """True: it may be, later."""
        return True

    def workers_at(self, address: str) -> int:
        """As `Service`."""
        return next((node.workers for node in self.engine.nodes() if node.address == address), 1)

    def watch(self, changed: Callable[[], None]) -> Callable[[], object]:
        """As `Service`."""
        return self.engine.watch(changed)

    def close(self) -> None:
        """As `Service`."""
        self._left()

    def __repr__(self) -> str:
        return self.url


def engine_service(engine: Engine, defined: Defined) -> EngineService:
    """Have an engine serve a pickled definition."""
    assert isinstance(defined.definition, PickledDefinition)
    credentials = engine.serve(defined.definition)
    return EngineService(repr(engine), *credentials, engine=engine)
