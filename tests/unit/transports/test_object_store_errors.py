from __future__ import annotations

import asyncio

import pytest
from obstore import exceptions

from asyncloader.transports import (
    AccessDenied,
    InvalidPath,
    ObjectNotFound,
    ReadFailed,
    TransportClosed,
    TransportError,
)
from asyncloader.transports.object_store_client import classify_error, status_of
from asyncloader.transports.retry import RETRYABLE_STATUSES

WHERE = "s3://bucket/root"


def answered(status: int, body: str = "") -> str:
    """The text of obstore 0.12 for a store's error response."""
    return (
        f"Generic S3 error: Error performing GET http://h/bucket/root/a in 1ms - Server returned non-2xx status code: "
        f'{status} Word: {body}\n\nDebug source:\nGeneric {{\n    store: "S3",\n    source: RetryError(\n'
        f"        RetryErrorImpl {{\n            method: GET,\n            inner: Status {{\n"
        f"                status: {status},\n                body: Some(\n                    {body!r},\n"
        "                ),\n            },\n        },\n    ),\n}"
    )


def broke(kind: str, words: str = "error sending request", inner: str = "") -> str:
    """The text of obstore 0.12 for a failed connection."""
    return (
        f'Generic S3 error: HTTP error: {words}\n\nDebug source:\nGeneric {{\n    store: "S3",\n'
        f"    source: HttpError {{\n        kind: {kind},\n        source: reqwest::Error {{ {inner} }},\n    }},\n}}"
    )


def classified(error: BaseException, path: str | None = "a") -> tuple[str, bool, str]:
    found = classify_error(error, path, WHERE, RETRYABLE_STATUSES)
    assert found is not None
    assert found.cause is error
    return found.kind, found.retryable, found.text


@pytest.mark.parametrize("status", [400, 409, 416, 429, 500, 501, 503, 507])
def test_statuses(status: int) -> None:
    """A status is retryable if the policy has it, whatever text the store sends with it."""
    error = exceptions.GenericError(answered(status, "status: 503, inner: Status { status: 500,"))
    assert status_of(error) == status
    kind, retryable, text = classified(error)
    assert (kind, retryable) == (f"status {status}", status in RETRYABLE_STATUSES)
    assert str(status) in text
    assert "Debug" not in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (FileNotFoundError(answered(404)), ObjectNotFound),
        (exceptions.GenericError(answered(404)), ObjectNotFound),
        (exceptions.PermissionDeniedError(answered(403, "<Code>ExpiredToken</Code>")), AccessDenied),
        (exceptions.UnauthenticatedError(answered(401)), AccessDenied),
        (exceptions.GenericError(answered(400)), ReadFailed),
        (exceptions.InvalidPathError('Path "a//b" contained empty path segment'), InvalidPath),
        (ValueError("Could not parse path"), InvalidPath),
    ],
)
def test_errors_that_are_not_retryable(error: Exception, final: type[Exception]) -> None:
    """Each is raised as its own class, with path and root in its text."""
    found = classify_error(error, "a", WHERE, RETRYABLE_STATUSES)
    assert found is not None
    assert not found.retryable
    assert type(found.final) is final
    assert isinstance(found.final, TransportError)
    assert found.final.path == "a"
    assert WHERE in str(found.final)


@pytest.mark.parametrize(
    ("text", "kind", "retryable"),
    [
        (broke("Connect"), "connection", True),
        (broke("Request"), "connection", True),
        (broke("Timeout"), "stalled", True),
        (broke("Interrupted"), "broken body", True),
        (broke("Unknown"), "store", True),
        (broke("Connect", inner="invalid peer certificate: UnknownIssuer"), "connection", False),
        (
            broke("Connect", inner="failed to lookup address information: Name or service not known"),
            "connection",
            False,
        ),
        (broke("Connect", inner="Temporary failure in name resolution"), "connection", True),
        ("Generic S3 error: Received non-partial\n\nDebug source:\nGeneric { source: NotPartial }", "store", False),
        ("words of a later version", "store", True),
        ("", "store", True),
    ],
)
def test_connections(text: str, kind: str, retryable: bool) -> None:
    """Broken connections and unknown errors are retryable; certificates, unknown hosts and protocol errors are not."""
    found_kind, found_retryable, _ = classified(exceptions.GenericError(text))
    assert (found_kind, found_retryable) == (kind, retryable)


def test_hints() -> None:
    """Two failures are nearly always caused by a missing setting, which the text names."""
    metadata = exceptions.GenericError(
        broke("Connect", words="error sending request for http://169.254.169.254/latest")
    )
    assert "skip_signature=True" in classified(metadata)[2]
    redirect = exceptions.GenericError("Received redirect\n\nDebug source:\ninner: BareRedirect,")
    found = classify_error(redirect, "a", WHERE, RETRYABLE_STATUSES)
    assert found is not None
    assert "pass region=" in str(found.final)
    assert "status 403" in classified(exceptions.PermissionDeniedError(answered(403)))[0]


def test_long_answers_are_cut() -> None:
    """A proxy's HTML page does not fill the log."""
    assert len(classified(exceptions.GenericError(answered(503, "x" * 100_000)))[2]) <= 400


def test_what_is_not_the_stores() -> None:
    """Cancellation, the package's own errors and bugs are not classified."""
    for error in [asyncio.CancelledError(), TransportClosed("closed"), KeyError("bug"), KeyboardInterrupt()]:
        assert classify_error(error, "a", WHERE, RETRYABLE_STATUSES) is None
    assert classified(TimeoutError())[:2] == ("no answer", True)
