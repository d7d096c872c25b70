"""Brace patterns are expanded as by webdataset, with bounded memory."""

from __future__ import annotations

import pytest
from braceexpand import braceexpand
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader.remote.braces import expand


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("a.tar", ["a.tar"]),
        ("s-{000..003}.tar", ["s-000.tar", "s-001.tar", "s-002.tar", "s-003.tar"]),
        ("{08..11}", ["08", "09", "10", "11"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{0..9..4}", ["0", "4", "8"]),
        ("{a,b{1,2}}", ["a", "b1", "b2"]),
        ("{1..2}{x,y}", ["1x", "1y", "2x", "2y"]),
        ("{a..c}", ["a", "b", "c"]),
        ("a{,.gz}", ["a", "a.gz"]),
        ("{a}", ["{a}"]),
        ("{}", ["{}"]),
        (r"\{a,b\}", ["{a,b}"]),
    ],
)
def test_examples(pattern: str, meant: list[str]) -> None:
    """Numbers with padding and steps, alternatives, and several braces in one pattern are expanded."""
    assert expand(pattern) == meant


numbers = st.builds(
    lambda first, last, width, step: "{" + f"{first:0{width}d}..{last:0{width}d}" + step + "}",
    st.integers(-9, 12),
    st.integers(-9, 12),
    st.sampled_from([0, 2, 3, 5]),
    st.sampled_from(["", "", "..1", "..3", "..-2", "..0", "..007"]),
)
texts = st.text("abz09.-/_ :", max_size=4)
patterns = st.recursive(
    st.one_of(texts, numbers, st.just("{Y..b}"), st.just("{e..a..2}"), st.just(r"\{"), st.just(r"\,")),
    lambda inner: st.one_of(
        st.builds("".join, st.lists(inner, max_size=3)),
        st.builds(lambda parts: "{" + ",".join(parts) + "}", st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=4,
)


@given(patterns)
@settings(deadline=None)
def test_same_as_the_package_that_webdataset_uses(pattern: str) -> None:
    """braceexpand gives the same texts in the same order."""
    assert expand(pattern, most=10**9) == list(braceexpand(pattern))


@given(st.text(r"{},.\09ab", max_size=30))
@settings(deadline=None)
def test_any_text_is_expanded_or_refused(pattern: str) -> None:
    """Unmatched braces and too many results are a ValueError; nothing else is raised."""
    try:
        meant = expand(pattern, most=10_000)
    except ValueError as error:
        assert "without its" in str(error) or "at most" in str(error)  # noqa: PT017 - not every text is an error
    else:
        assert meant


@pytest.mark.parametrize("pattern", ["{a,b", "a}", "{a,{b}", "{0..3}}"])
def test_braces_must_match(pattern: str) -> None:
    """The error shows how to escape a brace that is to be literal."""
    with pytest.raises(ValueError, match=r"without its .* write \\"):
        expand(pattern)


@pytest.mark.parametrize("pattern", ["{0..1000000}", "{0..999}{0..999}{0,1}", "{0..999999999999999999}" * 3])
def test_too_many_are_refused_before_they_are_made(pattern: str) -> None:
    """A million results are the limit; they are counted before they are made, which would take forever."""
    with pytest.raises(ValueError, match="URLs; 1,000,000 are allowed at most"):
        expand(pattern)


def test_depth_is_bounded() -> None:
    """Endless nesting is a ValueError, not a RecursionError."""
    with pytest.raises(ValueError, match="nests braces deeper than"):
        expand("{" * 10_000 + "a,b" + "}" * 10_000)
