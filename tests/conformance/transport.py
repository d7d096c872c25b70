"""Conformance tests of transports. Subclass `TransportConformance`, and implement `make` and `put`."""

from __future__ import annotations

from tests.conformance.transport_lifetime import LifetimeConformance
from tests.conformance.transport_reading import ReadingConformance


class TransportConformance(ReadingConformance, LifetimeConformance):
    """All that the contract in `asyncloader/transports/base.py` promises, as tests."""
