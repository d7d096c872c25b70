"""Decides the answer to a request for the page. Pure.

Data path: live_server -> [http_requests] -> live_server.

The page is for one person at this machine: a request is answered only if it names this machine as its host (a page of
another site, whose name was made to point here, does not), and has the secret in its path.
"""

from __future__ import annotations

import re
from hmac import compare_digest
from typing import Literal, NamedTuple

MOST_HEAD = 1 << 14
"""Bytes of a request's line and headers, at most."""

_LINE = re.compile(rb"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.[01]")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*)")
# Any port: the page may be read through a tunnel, as with `ssh -L`, whose end has a port of its own.
_HOST = re.compile(rb"(?:127\.0\.0\.1|localhost|\[::1\])(?::[0-9]{1,5})?", re.IGNORECASE)


class AnswerError(NamedTuple):
    """The request gets a text."""

    status: str
    text: str
    location: str = ""


def answer(head: bytes, token: str) -> Literal["page", "events"] | AnswerError:
    """Decide on a request: it gets the page, the stream of snapshots, or an error.

    Args:
        head: its line and headers, with the empty line at their end.
        token: the secret that its path must begin with.
    """
    line, *headers = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    request = _LINE.fullmatch(line)
    fields = [_HEADER.fullmatch(each) for each in headers]
    if request is None or None in fields:
        return AnswerError("400 Bad Request", "this is no request of HTTP/1.1")
    hosts = [field[2].strip() for field in fields if field is not None and field[1].lower() == b"host"]
    if len(hosts) != 1 or not _HOST.fullmatch(hosts[0]):
        return AnswerError("403 Forbidden", "use the address with 127.0.0.1 or localhost, as it was given")
    method, path = request.groups()
    if method != b"GET":
        return AnswerError("405 Method Not Allowed", "GET only")
    given, slash, rest = path[1:].partition(b"/")
    # Compared in constant time, so that the time of the answer does not say how many characters were right.
    if not compare_digest(given, token.encode()):
        return AnswerError("403 Forbidden", "the address has a secret in it: use the whole of it")
    if not slash:
        return AnswerError("308 Permanent Redirect", "the page's address ends with a slash", f"/{token}/")
    if rest in (b"", b"events"):
        return "events" if rest else "page"
    return AnswerError("404 Not Found", "there is no such page")
