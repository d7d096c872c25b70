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


MOST_TRACE_S = 60
"""Seconds that a trace covers, at most."""

_TRACE = re.compile(rb"trace\?seconds=([1-9][0-9]?)")


class Answer200(NamedTuple):
    """The request gets the page, the stream of snapshots, or a trace of so many seconds."""

    kind: Literal["page", "events", "trace"]
    seconds: int = 0


class AnswerError(NamedTuple):
    """The request gets a text."""

    status: str
    text: str
    location: str = ""


def answer(head: bytes, token: str) -> Answer200 | AnswerError:
    """Decide on a request.

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
    if method not in (b"GET", b"POST"):
        return AnswerError("405 Method Not Allowed", "GET and POST only")
    given, slash, rest = path[1:].partition(b"/")
    # Compared in constant time, so that the time of the answer does not say how many characters were right.
    if not compare_digest(given, token.encode()):
        return AnswerError("403 Forbidden", "the address has a secret in it: use the whole of it")
    if not slash:
        return AnswerError("308 Permanent Redirect", "the page's address ends with a slash", f"/{token}/")
    seconds = trace_seconds(rest)
    # A trace may have to be recorded first. So it is no GET, which a browser may send again, or ahead of a click.
    if (method == b"POST") != (seconds is not None):
        return AnswerError("405 Method Not Allowed", "POST for a trace, GET for all else")
    if seconds is not None:
        return Answer200("trace", seconds)
    if rest == b"":
        return Answer200("page")
    if rest == b"events":
        return Answer200("events")
    return AnswerError("404 Not Found", "there is no such page")


def trace_seconds(request: bytes) -> int | None:
    """Read the seconds of a request for a trace, 1 to `MOST_TRACE_S`; None: it is none."""
    found = _TRACE.fullmatch(request)
    return int(found[1]) if found is not None and int(found[1]) <= MOST_TRACE_S else None
