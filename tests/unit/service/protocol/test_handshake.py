"""What a node says of a dataset in its handshake."""

from __future__ import annotations

import pytest

from asyncloader.service.protocol.dataset_info import Facts
from asyncloader.service.protocol.handshake import Welcome


@pytest.mark.parametrize(
    "facts",
    [Facts(length=-1), Facts(length=1 << 63), Facts(iterable=True, shuffle=-1), Facts(asynchronous=True), Facts()],
)
def test_a_dataset_that_cannot_be(facts: Facts) -> None:
    """Is refused before anything is planned with it, such as one that has neither a length nor is iterated."""
    with pytest.raises(ValueError, match="a WELCOME that cannot be read"):
        Welcome(b"", facts).checked_facts()


@pytest.mark.parametrize("facts", [Facts(length=0), Facts(iterable=True), Facts(problem="it has no length")])
def test_a_dataset_that_can_be(facts: Facts) -> None:
    """Or one that the node itself calls a problem."""
    assert Welcome(b"", facts).checked_facts() == facts
