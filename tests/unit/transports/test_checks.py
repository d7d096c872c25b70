from __future__ import annotations

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.transports.checks import check_path, check_prefix, check_size
from asyncloader.transports.errors import InvalidPath, ObjectTooLarge


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("", "the path is empty"),
        ("/etc/passwd", "'/etc/passwd' is absolute"),
        ("a/../b", "'..'"),
        ("./a", "'.'"),
        ("a//b", "an empty part"),
        ("a/", "an empty part"),
        ("a\0", "a NUL character"),
        ("a/\ud800", "half a character"),
    ],
)
def test_refusal_names_the_fault(path: str, text: str) -> None:
    """The message names the rule that the path breaks."""
    with pytest.raises(InvalidPath, match=text) as caught:
        check_path(path)
    assert caught.value.path == path


@given(st.text(alphabet="ab./\0", max_size=8))
def test_accepted_paths_are_canonical_and_stay_inside(path: str) -> None:
    """An accepted path is its own normal form below any root; every other path is refused."""
    normal = posixpath.normpath("/root/" + path)
    canonical = path != "" and "\0" not in path and not path.startswith("/") and normal == "/root/" + path
    try:
        check_path(path)
    except InvalidPath:
        assert not canonical
    else:
        assert canonical


@given(st.text(alphabet="ab./", max_size=8), st.integers(0, 8))
def test_every_beginning_of_a_legal_path_is_a_legal_prefix(path: str, length: int) -> None:
    """`check_prefix` refuses no beginning of a legal path."""
    try:
        check_path(path)
    except InvalidPath:
        return
    check_prefix(path[:length])


@given(st.integers(0, 100), st.integers(0, 100))
def test_size_limit(size: int, limit: int) -> None:
    """A size is refused exactly when it is larger than the limit; None is no limit."""
    check_size("a", size, None)
    if size <= limit:
        check_size("a", size, limit)
    else:
        with pytest.raises(ObjectTooLarge, match=f"max_bytes={limit}"):
            check_size("a", size, limit)
