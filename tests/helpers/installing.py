"""Helpers for the tests of `install`."""

from __future__ import annotations

import warnings

import torch

Torchs = torch.utils.data.DataLoader


def told(caught: list[warnings.WarningMessage]) -> list[str]:
    """Return the warnings about uses that `install` does not reach."""
    return [str(w.message) for w in caught if "install() does not reach" in str(w.message)]
