"""The addresses of a service in `workers=`."""

from __future__ import annotations

import re

import pytest

from asyncloader import Service


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("tcp://a:7070,b:7071", ("tcp://a:7070", "tcp://b:7071")),
        ("dns+tcp://name:1, other:2", ("dns+tcp://name:1", "dns+tcp://other:2")),
        ("tcp://a:1,unix:/run/node", ("tcp://a:1", "unix:/run/node")),
        ("unix:/run/node,tcp://[::1]:1,[::2]:2", ("unix:/run/node", "tcp://[::1]:1", "tcp://[::2]:2")),
    ],
)
def test_several_addresses(url: str, addresses: tuple[str, ...]) -> None:
    """An address without a scheme has the scheme of the address before."""
    assert Service(url).addresses == addresses


@pytest.mark.parametrize("files", [{"tls_cert": "mine.pem"}, {"tls_cert": "a", "tls_key": "b"}, {"tls_key": "b"}])
def test_a_certificate_without_authorities(files: dict[str, str]) -> None:
    """It is refused: the connection would be without TLS."""
    with pytest.raises(ValueError, match="has no tls_ca=, without which there is no TLS: set tls_ca= to the file"):
        Service("tcp://a:7070", **files)  # type: ignore[arg-type]


def test_a_shared_epoch_was_removed() -> None:
    """The error says what takes its place."""
    with pytest.raises(ValueError, match="was removed: each loader has its batches made"):
        Service("tcp://a:7070", share="epoch")


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("a:7070", "a:7070"),
        ("unix:/run/node,b:1", "b:1"),
        ("tcp://a:7070,b", "tcp://b"),
        ("tcp://a:1,,", "tcp://"),
        ("tcp://a..b:1", "tcp://a..b:1"),
        ("tcp://[::1", "tcp://[::1"),
        ("unix:/" + 107 * "a", "unix:/" + 107 * "a"),
    ],
)
def test_what_is_no_address(url: str, named: str) -> None:
    """The error names it."""
    with pytest.raises(ValueError, match=re.escape(f"workers='{named}' is no address")):
        Service(url)
