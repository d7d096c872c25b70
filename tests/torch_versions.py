"""Which torch a test holds for. Most compare with the torch that is installed, whichever that is.

Where torch itself behaves otherwise in the oldest release that is supported, the test says from which release on it
holds. The suite was run with 2.6, 2.13 and 2.14; a behaviour that came between the first two is asked for from 2.13 on.
"""

from __future__ import annotations

import pytest
import torch


def torch_is(release: str) -> bool:
    """Whether the installed torch is of this release ("2.13") or later."""
    return _numbers(torch.__version__) >= _numbers(release)


def needs_torch(release: str, behaviour: str) -> pytest.MarkDecorator:
    """Skip a test on an older torch, which has not got the behaviour that the test compares with."""
    return pytest.mark.skipif(
        not torch_is(release), reason=f"torch {release} {behaviour}, {torch.__version__} does not"
    )


def says_the_same(ours: str, torchs: str) -> bool:
    """Whether an assertion's text is torch's own. An older torch asserts without words: nothing to compare with."""
    return ours == torchs or (not torchs and not torch_is("2.13"))


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
