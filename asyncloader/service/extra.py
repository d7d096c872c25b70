"""Checks that the requirements of the extra `service` are installed."""

from __future__ import annotations

import importlib.util


def check_extra() -> None:
    """Check that the service's modules can be imported.

    Raises:
        ImportError: a requirement is not installed.
    """
    if importlib.util.find_spec("msgspec") is None:
        raise ImportError("a service needs msgspec, which is not installed: pip install 'asyncloader[service]'")
