"""What obstore's errors mean, and which of them heal (pure). Data path: obstore's error -> [trouble] -> retry or error.

obstore has a class for few failures; the rest is its GenericError, whose text ends with Rust's own description of
the error as a tree. The status of an answer and the kind of a broken connection are read from there. A text
that is not understood counts as healing: if a later obstore writes them otherwise, an error comes late and is
not lost.
"""

from __future__ import annotations

import re

from asyncloader.transports.broken import Broken
from asyncloader.transports.errors import AccessDenied, InvalidPath, ObjectNotFound, ReadFailed, TransportError

__all__ = ["status_of", "trouble_of"]

_DEBUG = "Debug source:"
_STATUS = re.compile(r"\binner: (?:Status|Response) \{\s*status: ([1-5][0-9]{2}),")
_STATUS_WORDS = re.compile(r"status code: ([1-5][0-9]{2})\b")
_KIND = re.compile(r"\bHttpError \{\s*kind: ([A-Za-z]+)")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,60})</Code>")

# Of the failures without a status, those that will be the same again. First the connections: a certificate, a name
# that nobody has, an address that is none.
_HOPELESS = (
    "invalid peer certificate",
    "certificate verify failed",
    "Name or service not known",
    "nodename nor servname",
    "URL scheme is not allowed",
    "builder error",
    # Answers that break the protocol: no range although one was asked for, another one, no length.
    "NotPartial",
    "NoContentRange",
    "ParseContentRange",
    "InvalidContentRange",
    "UnexpectedRange",
    "MissingContentLength",
    "InvalidContentLength",
)

_NEVER_HEALS = frozenset({"NotSupportedError", "NotImplementedError", "UnknownConfigurationKeyError"})

# Where a machine of a cloud gets its role's keys; elsewhere nothing answers there.
_METADATA = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")

_KINDS = {
    "Connect": ("connection", "no connection"),
    "Request": ("connection", "the connection broke before the answer"),
    "Timeout": ("stalled", "nothing arrived in time"),
    "Interrupted": ("broken body", "the connection broke in the middle of the answer"),
}

# The longest piece of obstore's own words that goes into a message.
_MOST_WORDS = 400


def status_of(error: BaseException) -> int | None:
    """Give the HTTP status that `error` is about, None when it is about none."""
    words, _, debug = str(error).partition(_DEBUG)
    match = _STATUS.search(debug) or _STATUS_WORDS.search(words)
    return int(match[1]) if match else None


def trouble_of(error: BaseException, path: str | None, where: str, statuses: frozenset[int]) -> Broken | None:
    """Say what `error` means; None when it is none of the store's.

    Args:
        error: what an attempt raised.
        path: the object, None for a listing.
        where: the root's URL.
        statuses: the statuses that heal.
    """
    if isinstance(error, Broken):
        return error
    if isinstance(error, TransportError) or not isinstance(error, Exception):
        return None
    if isinstance(error, TimeoutError):
        return Broken("no answer", "no answer came in time", cause=error)
    name = type(error).__name__
    theirs = type(error).__module__.startswith("obstore")
    if not theirs and not isinstance(error, FileNotFoundError | ValueError):
        return None  # a bug, ours or that of a credential provider
    whole = str(error)
    words = _words(whole)
    subject = repr(path) if path is not None else "the listing"
    if name == "InvalidPathError" or isinstance(error, ValueError):
        text = f"obstore cannot name {subject} in {where}: {words}"
        if path is None:
            text = (
                f"{where} holds an object whose name is no path, and cannot be listed: {words}; name the objects "
                "yourself, or open the transport at a prefix without it"
            )
        return _final("path", words, InvalidPath(text, path=path), error)
    status = status_of(error)
    if isinstance(error, FileNotFoundError) or status == 404:
        return _final(
            "status 404", words, ObjectNotFound(f"{subject} does not exist in {where}: {words}", path=path), error
        )
    if status in {401, 403, 407} or name in {"PermissionDeniedError", "UnauthenticatedError"}:
        code = _CODE.search(whole)
        note = f" ({code[1]})" if code else ""
        denied = AccessDenied(
            f"no permission to read {subject} in {where}{note}: {words}. Check the credentials; some stores "
            "answer this for missing objects as well, to those who may not list them",
            path=path,
        )
        return _final(f"status {status or 403}", words, denied, error)
    if status is not None:
        heals = status in statuses
        return Broken(f"status {status}", words, heals=heals, cause=error, final=_failed(subject, where, words, path))
    if "BareRedirect" in whole:
        words += "; pass region= the bucket's region"
        return _final("redirect", words, _failed(subject, where, words, path), error)
    kind, text = "store", words
    if match := _KIND.search(whole):
        kind, text = _KINDS.get(match[1], ("store", words))
        text = f"{text}: {words}" if text != words else words
    if any(each in whole for each in _METADATA):
        text += "; no credentials were found, so the cloud's metadata service was asked for them: set them in the "
        text += "environment, pass credentials=, or pass skip_signature=True if the bucket is public"
    heals = name not in _NEVER_HEALS and not any(each in whole for each in _HOPELESS)
    return Broken(kind, text, heals=heals, cause=error, final=_failed(subject, where, text, path))


def _final(kind: str, text: str, final: TransportError, error: Exception) -> Broken:
    return Broken(kind, text, heals=False, cause=error, final=final)


def _failed(subject: str, where: str, words: str, path: str | None) -> ReadFailed:
    return ReadFailed(f"reading {subject} failed: {where}: {words}", path=path)


def _words(text: str) -> str:
    """Give the error's own sentence, on one line and not too long."""
    line = " ".join(text.partition(_DEBUG)[0].split())
    return line if len(line) <= _MOST_WORDS else line[: _MOST_WORDS - 3] + "..."
