"""Programs that are run find this checkout's package, also where another is installed."""

from __future__ import annotations

import os

import pytest

from tests.helpers.running import ROOT


@pytest.fixture(autouse=True)
def _this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
