from __future__ import annotations

from typing import Any

import pytest
from yarl import URL

from asyncloader.transports.http import HttpTransport
from asyncloader.transports.http_client import origin_of
from asyncloader.transports.http_session import MOST_ORIGINS


@pytest.mark.parametrize("url", ["https://host", "https://HOST:443/a", "https://user:password@host/b?c"])
def test_an_origin_has_one_form(url: str) -> None:
    """The scheme's default port and the case of the host make no difference."""
    for encoded in (False, True):
        assert origin_of(URL(url, encoded=encoded)) == ("https", "host", 443)


@pytest.mark.parametrize("url", ["http://host/", "https://host:444/", "https://host.example/", "https://other/"])
def test_other_origins(url: str) -> None:
    """Another scheme, port or host is another origin."""
    assert origin_of(URL(url)) != origin_of(URL("https://host/"))


@pytest.mark.parametrize("headers", [5, "Authorization: secret", [("Authorization", "secret")], {"secret"}])
def test_headers_that_are_no_mapping(headers: Any) -> None:
    """They are refused, not left out in silence; the text does not repeat a secret."""
    with pytest.raises(TypeError, match=r"headers= is a .*: give a mapping, or a function") as caught:
        HttpTransport("http://host/", headers=headers)
    assert "secret" not in str(caught.value)


async def test_origins_without_end() -> None:
    """What is remembered of the origins that redirects name is bounded."""
    transport = HttpTransport("http://host/")
    client = transport._client
    for number in range(2 * MOST_ORIGINS + 1):
        client._find_proxy(("http", f"host{number}"))
        assert 0 < len(client._proxies) <= MOST_ORIGINS
    await transport.aclose()
