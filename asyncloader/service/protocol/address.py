"""The addresses of a service, its token and its certificates."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from asyncloader.base.socket_folder import MOST_PATH


@dataclass(frozen=True)
class Service:
    """The addresses of a service, and how to connect to it.

    Attributes:
        url: addresses, separated by commas: ``tcp://host:port``, ``unix:/path``, or ``dns+tcp://name:port``, which
            stands for all addresses of that name. An address without a scheme has the scheme of the address before it:
            ``tcp://a:7070,b:7070``.
        token: the token that the service demands; None: the environment's ``ASYNCLOADER_TOKEN``, or the content of the
            file that ``ASYNCLOADER_TOKEN_FILE`` names; without either, no token.
        tls_ca: file with the authorities' certificates that nodes' certificates are checked against; None: no TLS.
        tls_cert: file with the loader's own certificate; None: no certificate.
        tls_key: file with the key of `tls_cert`.
        wait: seconds to look for a node before an error is raised. Also the seconds to go on if nodes accept
            connections, but all of these end before any node delivers a batch. While other workers of the loader
            deliver, a worker that finds no node keeps looking. A node that works on a task for a long time is not given
            up: the loader's `timeout` and `worker_timeout` bound that. For a node that reports that it makes the
            dataset the loader waits ten minutes, or `wait` if that is longer.
        share: was removed.
    """

    url: str
    token: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    wait: float = 60.0
    share: str | None = None

    def __post_init__(self) -> None:
        if self.share is not None:
            raise ValueError(
                f"Service(share={self.share!r}) was removed: each loader has its batches made; leave share= out"
            )
        if not isinstance(self.url, str) or not self.url.strip():
            raise ValueError(f"workers={self.url!r} is no address: give tcp://host:port or unix:/path")
        for address in self.addresses:
            _check_address(address)
        if self.tls_ca is None and (self.tls_cert, self.tls_key) != (None, None):
            raise ValueError(
                f"Service(tls_cert={self.tls_cert!r}, tls_key={self.tls_key!r}) has no tls_ca=, without which there is "
                "no TLS: set tls_ca= to the file with the authorities' certificates that nodes' certificates are "
                "checked against"
            )
        if not self.wait > 0:
            raise ValueError(f"wait should be a number of seconds above 0, but got wait={self.wait!r}")

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
        """Whether nodes may be on other machines."""
        return any(not address.startswith("unix:") for address in self.addresses)

    def secret(self) -> str | None:
        """Return the token from wherever it is given; None: no token is given.

        Raises:
            OSError: the file cannot be read.
        """
        if self.token is not None:
            return self.token
        path = os.environ.get("ASYNCLOADER_TOKEN_FILE")
        if path and "ASYNCLOADER_TOKEN" not in os.environ:
            return Path(path).read_text().strip()
        return os.environ.get("ASYNCLOADER_TOKEN") or None

    def __repr__(self) -> str:  # without the token
        return f"Service({self.url!r})"


def _check_address(address: str) -> None:
    if address.startswith("unix:"):
        length = len(os.fsencode(address)) - len("unix:")
        if length > MOST_PATH:
            raise ValueError(
                f"workers={address!r} is no address: a Unix socket's path has {MOST_PATH} bytes at most, and this has "
                f"{length}: give a shorter path"
            )
        if length:
            return
    else:
        with contextlib.suppress(ValueError):  # of `urlsplit`, too: a bracket that is not closed
            parts = urlsplit(address)
            # `encode` as `getaddrinfo`, which would raise UnicodeError for a name such as "a..b".
            if parts.scheme in ("tcp", "dns+tcp") and (parts.hostname or "").encode("idna") and parts.port:
                return
    raise ValueError(f"workers={address!r} is no address: give tcp://host:port, dns+tcp://name:port or unix:/path")
