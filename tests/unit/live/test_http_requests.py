from __future__ import annotations

import pytest

from asyncloader.live.http_requests import AnswerError, answer

TOKEN = "s3cret-of-this_run"


def head(target: str, host: str | None = "127.0.0.1:80", method: str = "GET", more: str = "") -> bytes:
    named = "" if host is None else f"Host: {host}\r\n"
    return f"{method} {target} HTTP/1.1\r\n{named}{more}\r\n".encode("latin-1")


@pytest.mark.parametrize("host", ["127.0.0.1:80", "localhost", "LOCALHOST:9000", "[::1]:1"])
def test_the_page_and_its_stream(host: str) -> None:
    """Are given to whoever has the token, at any name of this machine, through any port."""
    assert answer(head(f"/{TOKEN}/", host), TOKEN) == "page"
    assert answer(head(f"/{TOKEN}/events", host), TOKEN) == "events"


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (head("/"), "403"),
        (head(f"/{TOKEN[:-1]}/"), "403"),
        (head(f"/{TOKEN}x/"), "403"),
        (head(f"/x/{TOKEN}/"), "403"),
        (head(f"/?{TOKEN}/"), "403"),
        (head(f"/{TOKEN}"), "308"),
        (head(f"/{TOKEN}/else"), "404"),
        (head(f"/{TOKEN}/../{TOKEN}/"), "404"),
        (head(f"/{TOKEN}/", None), "403"),
        (head(f"/{TOKEN}/", "evil.example"), "403"),
        (head(f"/{TOKEN}/", "127.0.0.1.evil.example"), "403"),
        (head(f"/{TOKEN}/", "localhost.:1"), "403"),
        (head(f"/{TOKEN}/", "127.0.0.1@evil.example"), "403"),
        (head(f"/{TOKEN}/", more="Host: evil.example\r\n"), "403"),
        (head(f"/{TOKEN}/", method="POST"), "405"),
        (head(f"/{TOKEN}/", method="HEAD"), "405"),
        (head(f"/{TOKEN}/events", method="POST"), "405"),
        (head("/ä"), "400"),
        (head(f"http://127.0.0.1/{TOKEN}/"), "400"),
        (head(f"/{TOKEN}/", more=" folded: header\r\n"), "400"),
        (head(f"/{TOKEN}/", more="no colon\r\n"), "400"),
        (head(f"/{TOKEN}/", more="Spaced : x\r\n"), "400"),
        (head(f"/{TOKEN}/", more="Bare: a\nHost: localhost\r\n"), "400"),
        (b"\r\n\r\n", "400"),
        (b"GET / HTTP/2\r\n\r\n", "400"),
        (bytes(range(256)) + b"\r\n\r\n", "400"),
    ],
)
def test_other_requests(request_head: bytes, status: str) -> None:
    """Are refused, and no refusal but the redirection has the token in it."""
    found = answer(request_head, TOKEN)
    assert isinstance(found, AnswerError)
    assert found.status.startswith(status)
    assert TOKEN not in found.text
    assert bool(found.location) == (status == "308")
