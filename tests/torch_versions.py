"""The releases of torch for which a test holds. Most tests compare with the installed torch, whatever its release.

Where torch itself behaves differently in the oldest supported release, the test names the release from which on it
holds. The suite was run with 2.6, 2.13 and 2.14; a behaviour that came between the first two is required from 2.13 on.
"""

from __future__ import annotations

import pytest
import torch


def torch_is(release: str) -> bool:
    """Whether the installed torch is of this release ("2.13") or later."""
    return _numbers(torch.__version__) >= _numbers(release)


def needs_torch(release: str, behaviour: str) -> pytest.MarkDecorator:
    """Skip a test on an older torch, which lacks the behaviour that the test compares with."""
    return pytest.mark.skipif(
        not torch_is(release), reason=f"torch {release} {behaviour}, {torch.__version__} does not"
    )


def says_the_same(ours: str, torchs: str) -> bool:
    """Whether an assertion's text is torch's own. An older torch asserts without a text: nothing can be compared."""
    return ours == torchs or (not torchs and not torch_is("2.13"))


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
