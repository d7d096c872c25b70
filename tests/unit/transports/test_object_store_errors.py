from __future__ import annotations

import asyncio

import pytest
from obstore import exceptions

from asyncloader.transports import (
    AccessDenied,
    InvalidPath,
    ObjectNotFound,
    TransportClosed,
    TransportError,
)
from asyncloader.transports.object_store_client import classify_error, status_of
from asyncloader.transports.retry import RETRYABLE_STATUSES, RequestFailed

WHERE = "s3://bucket/root"


def answered(status: int, body: str = "") -> str:
    """The text of obstore 0.12 for a store's error response."""
    return (
        f"Generic S3 error: Error performing GET http://h/bucket/root/a in 1ms - Server returned non-2xx status code: "
        f"{status} Word: {body}\n\nDebug source:\nGeneric {{ }}"
    )


def classified(error: BaseException, path: str | None = "a") -> RequestFailed:
    found = classify_error(error, path, WHERE, RETRYABLE_STATUSES)
    assert found is not None
    assert found.cause is error
    return found


@pytest.mark.parametrize("status", [400, 409, 416, 429, 500, 501, 503, 507])
def test_statuses(status: int) -> None:
    """A status is retryable if the policy has it, whatever the store sends with it; a page does not fill the log."""
    error = exceptions.GenericError(answered(status, "non-2xx status code: 599 " + "x" * 100_000))
    assert status_of(error) == status
    found = classified(error)
    assert (found.kind, found.retryable) == (f"status {status}", status in RETRYABLE_STATUSES)
    assert str(status) in found.text
    assert "\n" not in found.text
    assert len(found.text) <= 400


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (FileNotFoundError(answered(404)), ObjectNotFound),
        (exceptions.PermissionDeniedError(answered(403, "<Code>ExpiredToken</Code>")), AccessDenied),
        (exceptions.UnauthenticatedError(answered(401)), AccessDenied),
        (exceptions.InvalidPathError('Path "a//b" contained empty path segment'), InvalidPath),
        (ValueError("Could not parse path"), InvalidPath),
        (exceptions.NotSupportedError("not for this store"), type(None)),
    ],
)
def test_errors_that_are_not_retryable(error: Exception, final: type[Exception]) -> None:
    """Each is raised as its own class, with path and root in its text."""
    found = classified(error)
    assert not found.retryable
    assert type(found.final) is final
    if isinstance(found.final, TransportError):
        assert found.final.path == "a"
        assert WHERE in str(found.final)


def test_errors_without_a_status_are_retryable() -> None:
    """Broken connections, and whatever a later version words differently."""
    for text in ("Generic S3 error: HTTP error: error sending request", "words of a later version", ""):
        assert (
            classified(exceptions.GenericError(text)).kind,
            classified(exceptions.GenericError(text)).retryable,
        ) == (
            "store",
            True,
        )


def test_whose_fault_an_answer_is() -> None:
    """A bucket that does not exist proves nothing about an object; an object in an archive is a bad sample."""
    for code, about_sample in [("NoSuchKey", True), ("NoSuchBucket", False), ("ContainerNotFound", False)]:
        final = classified(FileNotFoundError(answered(404, f"<Code>{code}</Code>"))).final
        assert final is not None
        assert final.about_sample is about_sample
    for code, about_sample in [("AccessDenied", False), ("InvalidObjectState", True)]:
        final = classified(exceptions.PermissionDeniedError(answered(403, f"<Code>{code}</Code>"))).final
        assert final is not None
        assert final.about_sample is about_sample


def test_a_metadata_service_that_was_asked_for_credentials() -> None:
    """It is nearly always a missing setting, which the text names."""
    error = exceptions.GenericError("HTTP error: error sending request for http://169.254.169.254/latest")
    assert "skip_signature=True" in classified(error).text


def test_what_is_not_the_stores() -> None:
    """Cancellation, the package's own errors and bugs are not classified."""
    for error in [asyncio.CancelledError(), TransportClosed("closed"), KeyError("bug"), KeyboardInterrupt()]:
        assert classify_error(error, "a", WHERE, RETRYABLE_STATUSES) is None
    assert (classified(TimeoutError()).kind, classified(TimeoutError()).retryable) == ("no answer", True)
