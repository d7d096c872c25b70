"""What ``hf://`` URLs mean, and that no answer of a server that claims to be the Hub is believed unread."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader.transports import ReadFailed
from asyncloader.transports.hub_names import HubDataset, commit_of, files_of, limited_delay, next_target

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("url", "name", "revision", "path"),
    [
        ("hf://datasets/acme/digits", "acme/digits", "main", ""),
        ("hf://datasets/acme/digits/", "acme/digits", "main", ""),
        ("hf://datasets/acme/digits/data/a@b.parquet", "acme/digits", "main", "data/a@b.parquet"),
        ("HF://datasets/acme/digits@v1.0/a b?c#d", "acme/digits", "v1.0", "a b?c#d"),
        (f"hf://datasets/acme/digits@{COMMIT}/a", "acme/digits", COMMIT, "a"),
        ("hf://datasets/acme/digits@refs%2Fpr%2F3/a", "acme/digits", "refs/pr/3", "a"),
        ("hf://datasets/acme/digits@refs/convert/parquet/a/b", "acme/digits", "refs/convert/parquet", "a/b"),
        ("hf://datasets/acme/digits@refs/pr/3", "acme/digits", "refs/pr/3", ""),
    ],
)
def test_urls(url: str, name: str, revision: str, path: str) -> None:
    """The parts of a URL; the dataset's own URL means the same dataset."""
    dataset, found = HubDataset.split(url)
    assert (dataset.name, dataset.revision, found) == (name, revision, path)
    assert dataset.pinned == (revision == COMMIT)
    assert HubDataset.split(dataset.url) == (dataset, "")


@pytest.mark.parametrize(
    "url",
    [
        "hf://datasets/digits",
        "hf://acme/digits/a",
        "hf://models/acme/digits",
        "hf://datasets/../digits/a",
        "hf://datasets/acme/../a",
        "hf://datasets/acme/digits@/a",
        "hf://datasets/acme/di gits/a",
        "hf://datasets/acme/digits?x/a",
    ],
)
def test_other_urls(url: str) -> None:
    """Refused, with what to write."""
    with pytest.raises(ValueError, match="hf://datasets/OWNER/NAME/PATH"):
        HubDataset.split(url)


@given(
    st.binary(max_size=50)
    | st.recursive(st.none() | st.text(), st.lists, max_leaves=5).map(lambda v: json.dumps(v).encode())
)
def test_any_answer(answer: bytes) -> None:
    """Bytes that are no answer of the API are an error that says so."""
    with pytest.raises(ReadFailed, match=r"^there answered|^there did not answer"):
        commit_of(answer, "there")
    with suppress(ReadFailed):
        assert files_of(answer, "there") == []


@pytest.mark.parametrize(
    "entry",
    [
        {"type": "file", "path": "../a", "size": 1},
        {"type": "file", "path": "/a", "size": 1},
        {"type": "file", "path": "a", "size": -1},
        {"type": "file", "path": "a", "size": True},
        {"type": "file", "path": "a"},
        {"type": "link", "path": "a", "size": 1},
        "a",
    ],
)
def test_bad_entries(entry: object) -> None:
    """A path that leads out of the dataset, or a size that is none, is refused."""
    with pytest.raises(ReadFailed, match="there answered with"):
        files_of(json.dumps([entry]).encode(), "there")


@pytest.mark.parametrize(
    ("link", "target"),
    [
        (None, None),
        ("", None),
        ('<https://hub/api/x?cursor=1>; rel="prev"', None),
        ('<https://hub/api/x?cursor=1>; rel="next"', "/api/x?cursor=1"),
        ('<https://hub/a>; rel="prev", <https://hub/b>; rel=next', "/b"),
        ("</b>; rel=next", "/b"),
    ],
)
def test_next_pages(link: str | None, target: str | None) -> None:
    """Of the header's addresses the next page's is taken."""
    assert next_target(link, "https://hub", "there") == target


@pytest.mark.parametrize("address", ["https://evil/b", "https://hub.evil/b", "//evil/b", "b", "https://hub@evil/b"])
def test_a_next_page_elsewhere(address: str) -> None:
    """The token must not follow an address to another server."""
    with pytest.raises(ReadFailed, match="not of the same server"):
        next_target(f"<{address}>; rel=next", "https://hub", "there")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [('"api";r=0;t=55', 55), ('"resolvers"; r = 0; t = 300', 300), ('"api";r=3;t=55', None), ("", None), ("x", None)],
)
def test_limits(value: str, seconds: float | None) -> None:
    """Only a limit that is reached says when to come again."""
    assert limited_delay({"RateLimit": value}) == seconds
