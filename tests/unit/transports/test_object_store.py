from __future__ import annotations

import asyncio
import pickle
import sys
from typing import Any

import pytest

from asyncloader.transports import ObjectStoreTransport, RetryPolicy, TransportError, open_transport


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"requests": 0}, "requests must be at least 1, got 0"),
        ({"connect_s": 0}, "connect_s must be above 0 seconds, got 0"),
        ({"stalled_s": float("inf")}, "stalled_s must be above 0 seconds, got inf"),
        ({"endpoint": "minio:9000"}, "endpoint must be an http or https URL, got 'minio:9000'"),
        ({"root": "gs://bucket", "region": "x"}, "region='x' does not fit gs://bucket"),
        ({"root": "http://bucket"}, "is no URL of an object store"),
    ],
)
def test_impossible_options(options: dict[str, Any], text: str) -> None:
    """Impossible options are refused by the constructor."""
    with pytest.raises(ValueError, match=text):
        ObjectStoreTransport(options.pop("root", "s3://bucket"), **options)


@pytest.mark.parametrize("scheme", ["s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "S3"])
def test_schemes(scheme: str) -> None:
    """Each scheme of a store opens this transport, without a request and without an event loop."""
    transport = open_transport(f"{scheme}://bucket/a", requests=3)
    assert repr(transport) == f"<ObjectStoreTransport '{scheme.lower()}://bucket/a' requests=3 open>"


def test_texts_hold_no_keys() -> None:
    """The configuration is not in the repr, but is in the pickle."""
    transport = ObjectStoreTransport(
        "s3://bucket/a", config={"secret_access_key": "hidden"}, retry=RetryPolicy(budget_s=1), skip_signature=True
    )
    assert "hidden" not in repr(transport)
    copy = pickle.loads(pickle.dumps(transport))
    assert copy._options == transport._options
    assert repr(copy) == repr(transport)


def test_without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call raises an error that names the extra; constructing the transport does not need obstore."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setattr("asyncloader.transports.object_store_client.note_use", lambda: None)
    transport = ObjectStoreTransport("s3://bucket")
    with pytest.raises(TransportError, match=r"pip install 'asyncloader\[s3\]'"):
        asyncio.run(transport.read("a"))
