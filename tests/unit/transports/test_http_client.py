from __future__ import annotations

import pytest
from yarl import URL

from asyncloader.transports.http_client import origin_of


@pytest.mark.parametrize("url", ["https://host", "https://HOST:443/a", "https://user:password@host/b?c"])
def test_an_origin_has_one_form(url: str) -> None:
    """The scheme's default port and the case of the host make no difference."""
    for encoded in (False, True):
        assert origin_of(URL(url, encoded=encoded)) == ("https", "host", 443)


@pytest.mark.parametrize("url", ["http://host/", "https://host:444/", "https://host.example/", "https://other/"])
def test_other_origins(url: str) -> None:
    """Another scheme, port or host is another origin."""
    assert origin_of(URL(url)) != origin_of(URL("https://host/"))
