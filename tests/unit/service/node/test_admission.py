"""The loaders that a node serves, and the arguments with which it serves them."""

from __future__ import annotations

from typing import Any

import pytest

from asyncloader.service.node.admission import Refused, Served, find_served
from asyncloader.service.protocol.handshake import Hello
from tests.service import definitions

ASKED = Hello.of(definitions.numbers(n=7))


def serving(**options: Any) -> dict[str, Served]:
    return {"numbers": Served("data:numbers", definitions.numbers, **options)}


def test_fixed_arguments() -> None:
    """A loader gets the dataset that it asks for, or an error: never a dataset with other arguments."""
    served, arguments = find_served(serving(arguments={"n": 7, "more": 1}), ASKED)
    assert (served.target, arguments) == ("data:numbers", {"n": 7, "more": 1})
    with pytest.raises(Refused, match="numbers is served with n=40, and the loader asks for n=7"):
        find_served(serving(arguments={"n": 40}), ASKED)
    with pytest.raises(Refused, match="numbers is served with no arguments, and the loader asks for n=7"):
        find_served(serving(), ASKED)


def test_arguments_of_the_loaders_choice() -> None:
    """The loader's arguments replace the node's."""
    everything = serving(arguments={"n": 40}, open=True)
    assert find_served(everything, ASKED)[1] == {"n": 7}
    assert find_served(everything, ASKED._replace(arguments="{}"))[1] == {"n": 40}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"protocol": 1}, "the loader speaks protocol 1, and this node"),
        ({"version": "0.0.1\n"}, "the loader has asyncloader 0.0.1"),
        ({"torch": "1.13.1"}, "and torch 1.13.1, and this node"),
        ({"name": "letters"}, "'letters' is not served here; numbers is"),
        ({"fingerprint": "0" * 16}, "the definition numbers differs: its source has the fingerprint 0000"),
        ({"arguments": "[" * 60_000}, "the arguments of numbers are no JSON object"),
        ({"arguments": "[]"}, "the arguments of numbers are no JSON object"),
    ],
    ids=str,
)
def test_a_loader_that_is_not_served(changes: dict[str, Any], text: str) -> None:
    """The reason names both sides, and is final."""
    with pytest.raises(Refused, match=text) as caught:
        find_served(serving(arguments={"n": 7}), ASKED._replace(**changes))
    assert not caught.value.for_now
