"""`JoinSequences`: the window of some sequences, and its rules for those that are too long."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncloader import JoinSequences, PackSequences
from asyncloader.packing.window_packer import WindowPacker
from asyncloader.packing.windows import is_consistent


@pytest.mark.parametrize(
    ("rule", "tokens", "lengths"),
    [("skip", [1, 2], [2]), ("truncate", [1, 2, 3, 4, 5], [2, 3]), ("split", [1, 2, 3, 4, 5, 6, 7], [2, 5])],
)
def test_too_long(rule: Any, tokens: list[int], lengths: list[int]) -> None:
    """Sequences of 2, 0 and 5 tokens, in rows of 3: those without tokens are left out."""
    samples = [{"tokens": np.array(each, np.uint16), "name": str(each)} for each in ([1, 2], [], [3, 4, 5, 6, 7])]
    domain: Any = lambda sample: np.int64(len(sample["name"]))  # noqa: E731
    window = JoinSequences(3, on_too_long=rule, domain=domain)(samples)
    assert window.fields["tokens"].dtype == torch.uint16
    assert window.fields["tokens"].tolist() == tokens
    assert window.lengths.tolist() == lengths
    assert window.fields["name"] == ["[1, 2]", "[3, 4, 5, 6, 7]"][: len(lengths)]
    assert window.domains == [6, 15][: len(lengths)]
    assert all(type(domain) is int for domain in window.domains or [])


def test_too_long_is_an_error() -> None:
    """It says which sequence of the batch it is, with its other fields; strategies that cut have no such error."""
    samples = [{"tokens": [1, 2], "name": "short"}, {"tokens": [1, 2, 3, 4], "name": "long"}]
    with pytest.raises(ValueError, match=r"sequence 1 of the batch \(\{'name': 'long'\}\) has 4 tokens.*max_tokens=3"):
        JoinSequences(3)(samples)
    assert JoinSequences(3, strategy="wrap")(samples).lengths.tolist() == [2, 4]
    with pytest.raises(ValueError, match="sequence 0 of the batch has 4 tokens"):
        JoinSequences(3)([[1, 2, 3, 4]])


def test_fields_that_are_no_tokens() -> None:
    """Whatever is no array of numbers is a value of its sequence: also lists of lists of different lengths."""
    value: Any
    for value in ([[1, 2], [3]], ["a", "b"], {"a": [1]}, None, 0.5, [2**70], [{}]):
        window = JoinSequences(3)([{"tokens": [1, 2], "about": value}] * 2)
        assert window.fields["about"] == [value, value]


def test_bad_arguments() -> None:
    """Bad arguments and domains are refused, with the value."""
    with pytest.raises(ValueError, match="max_tokens should be positive, but got max_tokens=0"):
        JoinSequences(0)
    with pytest.raises(ValueError, match="got strategy='none'"):
        JoinSequences(3, strategy="none")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="got on_too_long='cut'"):
        JoinSequences(3, on_too_long="cut")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    none: Any = lambda _: 0.5  # noqa: E731
    with pytest.raises(TypeError, match=r"a domain should be an integer or a string, but got 0\.5"):
        JoinSequences(3, domain=none)([[1]])


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": [2, 1]},
        {"lengths": np.array([2, 1], np.int32)},
        {"lengths": np.array([2, 2])},
        {"lengths": np.array([4, -1])},
        {"lengths": np.array([2**62, 2**62, 2**62, 2**62, 2, 1])},
        {"fields": {"id": [1, 2]}},
        {"fields": {"tokens": torch.arange(2)}},
        {"fields": {"tokens": torch.arange(3), "id": [1]}},
        {"fields": {"tokens": torch.arange(3), "id": "ab"}},
        {"domains": [1]},
        {"domains": [1, None]},
        {"max_tokens": True},
        {"strategy": "none"},
    ],
)
def test_windows_of_others(change: dict[str, Any]) -> None:
    """What a service's node could not have made of sequences is refused before it is packed."""
    window = JoinSequences(4)([{"tokens": [1, 2], "id": 3}, {"tokens": [3], "id": 4}])
    assert is_consistent(window)
    assert is_consistent(JoinSequences(4)([[]]))
    assert not is_consistent(window._replace(**change))
    packer = WindowPacker(PackSequences(), drop_last=False, state={}, carried=[], delivered=0)
    with pytest.raises(ValueError, match="a window contradicts itself"):
        packer.add({}, [window._replace(**change)])
