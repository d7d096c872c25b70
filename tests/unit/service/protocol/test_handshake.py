"""The dataset that a node describes in its handshake, and the proofs of both sides."""

from __future__ import annotations

import pytest

from asyncloader.service.protocol.handshake import Welcome, nonce, proof, proves
from asyncloader.service.protocol.records import DatasetInfo


@pytest.mark.parametrize(
    "info",
    [
        DatasetInfo(length=-1),
        DatasetInfo(length=1 << 63),
        DatasetInfo(iterable=True, shuffle=-1),
        DatasetInfo(asynchronous=True),
        DatasetInfo(),
    ],
)
def test_a_dataset_that_cannot_be(info: DatasetInfo) -> None:
    """The description is refused before anything is planned with it: for example, it has no length and no iterator."""
    with pytest.raises(ValueError, match="a WELCOME that cannot be read"):
        Welcome(b"", info).checked_info()


@pytest.mark.parametrize(
    "info", [DatasetInfo(length=0), DatasetInfo(iterable=True), DatasetInfo(problem="it has no length")]
)
def test_a_dataset_that_can_be(info: DatasetInfo) -> None:
    """A dataset that the node itself reports as a problem is accepted here, too."""
    assert Welcome(b"", info).checked_info() == info


def test_a_proof_is_for_one_side_of_one_connection() -> None:
    """The proof fits neither the other side, nor another connection, nor another token."""
    loaders, nodes = nonce(), nonce()
    given = proof("secret", "loader", loaders, nodes)
    assert proves(given, "secret", "loader", loaders, nodes)
    for token, side, theirs, mine in [
        ("secret", "node", loaders, nodes),
        ("secret", "loader", nonce(), nodes),
        ("secret", "loader", loaders, nonce()),
        ("other", "loader", loaders, nodes),
    ]:
        assert not proves(given, token, side, theirs, mine)
