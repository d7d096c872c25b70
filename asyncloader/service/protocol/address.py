"""Where a service is: addresses, and what its nodes ask for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Service:
    """Where a service is, and how to connect to it.

    Attributes:
        url: addresses, separated by commas: ``tcp://host:port``, ``unix:/path``, or ``dns+tcp://name:port``, which is
            all addresses of that name. One without a scheme has that of the one before: ``tcp://a:7070,b:7070``.
        token: what the service asks for; None: the environment's ``ASYNCLOADER_TOKEN``, or what is in the file that
            ``ASYNCLOADER_TOKEN_FILE`` names; without either, none.
        tls_ca: file with the certificates that nodes' certificates are checked against; None: no TLS.
        tls_cert: file with the certificate that this side shows; None: none.
        tls_key: file with its key.
        wait: seconds to look for a node before an error is raised; and to go on while connections are made, and end
            again before any node delivers a batch. While the loader's other workers deliver, one that finds no node
            looks on. A node that is at a task for long is waited for all the same: `timeout` and `worker_timeout` of
            the loader bound that. One that says that it makes the dataset is waited for ten minutes, or `wait` if that
            is more.
        share: ``"epoch"``: batches are made once at each node for all loaders that read the same dataset with the same
            seed in the same epoch, and that ask for this; None: this loader's are its own.
    """

    url: str
    token: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    wait: float = 60.0
    share: str | None = None
    greeting_s: ClassVar[float] = 3.0  # until a node answers at all

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not self.url.strip():
            raise ValueError(f"workers={self.url!r} is no address: give tcp://host:port or unix:/path")
        for address in self.addresses:
            _check_address(address)
        if not self.wait > 0:
            raise ValueError(f"wait should be a number of seconds above 0, but got wait={self.wait!r}")
        if self.share not in (None, "epoch"):
            raise ValueError(f"share should be 'epoch' or None, but got share={self.share!r}")

    @property
    def addresses(self) -> tuple[str, ...]:
        """The parts of the URL."""
        found: list[str] = []
        for part in map(str.strip, self.url.split(",")):
            scheme, separator, _ = found[-1].partition("://") if found else ("", "", "")
            found.append(part if ":/" in part else scheme * bool(separator) + separator + part)
        return tuple(found)

    @property
    def remote(self) -> bool:
        """Whether it may be on another machine."""
        return any(not address.startswith("unix:") for address in self.addresses)

    def secret(self) -> str | None:
        """The token, wherever it is given.

        Raises:
            OSError: the file cannot be read.
        """
        if self.token is not None:
            return self.token
        path = os.environ.get("ASYNCLOADER_TOKEN_FILE")
        if path and "ASYNCLOADER_TOKEN" not in os.environ:
            return Path(path).read_text().strip()
        return os.environ.get("ASYNCLOADER_TOKEN") or None

    def workers_at(self, address: str) -> int:
        """How many processes the node there has, as far as is known."""
        del address
        return 1

    def watch(self, changed: Callable[[], None]) -> Callable[[], object]:
        """Have this called, in any thread, when `addresses` has changed. Returns what ends that."""
        del changed
        return _nothing

    def close(self) -> None:
        """The loader that this was made for is closed. Idempotent."""

    def __repr__(self) -> str:  # without the token
        return f"Service({self.url!r})"


def _nothing() -> None:
    pass


def _check_address(address: str) -> None:
    if address.startswith("unix:"):
        if len(address) > len("unix:"):
            return
    else:
        parts = urlsplit(address)
        with contextlib.suppress(ValueError):
            if parts.scheme in ("tcp", "dns+tcp") and parts.hostname and parts.port:
                return
    raise ValueError(f"workers={address!r} is no address: give tcp://host:port, dns+tcp://name:port or unix:/path")
