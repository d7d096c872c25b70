"""Tests of the contract of `Transport`, for transports of this package and of others.

Data path: none; pytest runs it.

Subclass `TransportConformance` in a test module; for a transport that can write, `WritingConformance`, too. They need
pytest and pytest-asyncio, which asyncloader does not install: nothing else of the package imports this module.

    from asyncloader.transports.testing import TransportConformance

    class TestGopherTransport(TransportConformance):
        def make(self):
            return GopherTransport("gopher://localhost/")

        def put(self, transport, path, data):
            server.files[path] = data
"""

from __future__ import annotations

import pytest

# Before the modules are imported: pytest rewrites their asserts, to show the values, while it loads them.
pytest.register_assert_rewrite(
    "asyncloader.transports.testing.lifetime",
    "asyncloader.transports.testing.reading",
    "asyncloader.transports.testing.writing",
)

from asyncloader.transports.testing.lifetime import LifetimeConformance  # noqa: E402
from asyncloader.transports.testing.reading import ReadingConformance  # noqa: E402
from asyncloader.transports.testing.writing import WritingConformance  # noqa: E402

__all__ = ["TransportConformance", "WritingConformance"]


class TransportConformance(ReadingConformance, LifetimeConformance):
    """Tests that a transport keeps the contract, which `asyncloader/transports/base.py` has. Subclasses implement
    `make` and `put`; their fixtures prepare the store.

    The tests compare the returned bytes, the classes and attributes of errors, and the words of the functions in
    `asyncloader.transports.checks`, which a transport should call. Each test makes a transport, puts the objects that
    it reads, and closes the transport. pytest-asyncio runs the tests, in any of its modes.
    """
