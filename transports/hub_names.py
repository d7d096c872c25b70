"""The names of the Hugging Face Hub: ``hf://`` URLs, the addresses of its API, and the pages that this answers. Pure.

Without a revision, ``hf://datasets/OWNER/NAME/PATH`` is of the branch main. A revision in
``hf://datasets/OWNER/NAME@REVISION/PATH`` is a branch, a tag or a commit; a ``/`` in its name is ``%2F``, but for
refs/pr/N and refs/convert/NAME.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NamedTuple, Self
from urllib.parse import quote, unquote

from asyncloader.transports.checks import check_path
from asyncloader.transports.errors import InvalidPath, ReadFailed

_URL = re.compile(
    r"hf://datasets/(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[\w.-]+|[^/]+))?(?:/(?P<path>.*))?",
    re.IGNORECASE | re.ASCII | re.DOTALL,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NEXT = re.compile(r"<([^<>]*)>\s*;[^<>]*\brel=\"?next\"?", re.IGNORECASE)
_MOST_REASON = 400
_LIMITED = re.compile(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d{1,6})\b")


class HubDataset(NamedTuple):
    """A dataset of the Hub at a revision.

    Attributes:
        name: ``OWNER/NAME``.
        revision: a branch, a tag or a commit.
    """

    name: str
    revision: str

    @classmethod
    def split(cls, url: str) -> tuple[Self, str]:
        """Return the dataset of an ``hf://`` URL, and the path below it, which may be empty or a prefix.

        Raises:
            ValueError: it is no URL of a dataset.
        """
        match = _URL.fullmatch(url)
        if match is None or {match["owner"], match["name"]} & {".", ".."}:
            raise ValueError(
                f"{url!r} is no URL of a dataset on the Hugging Face Hub: write hf://datasets/OWNER/NAME/PATH, or "
                "hf://datasets/OWNER/NAME@REVISION/PATH"
            )
        return cls(f"{match['owner']}/{match['name']}", unquote(match["revision"] or "main")), match["path"] or ""

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def url(self) -> str:
        """The URL of the dataset, without an end."""
        return f"hf://datasets/{self.name}@{quote(self.revision, safe='')}"

    @property
    def revision_target(self) -> str:
        """The API's target that describes the revision."""
        return f"/api/datasets/{self.name}/revision/{quote(self.revision, safe='')}"

    def tree_target(self, folder: str) -> str:
        """Return the API's target that lists the files below a folder; the empty one: all."""
        below = f"/{quote(folder, errors='surrogateescape')}" if folder else ""
        return f"/api/datasets/{self.name}/tree/{quote(self.revision, safe='')}{below}?recursive=true&expand=false"

    @property
    def folder(self) -> str:
        """The path of the files below the Hub's address."""
        return f"datasets/{self.name}/resolve/{quote(self.revision, safe='')}/"


def commit_of(answer: bytes, where: str) -> str:
    """Return the commit of a revision, from the API's answer.

    Raises:
        ReadFailed: the answer names none.
    """
    found = _parsed(answer, where)
    commit = found.get("sha") if isinstance(found, dict) else None
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise ReadFailed(f"{where} answered without a commit")
    return commit


def files_of(answer: bytes, where: str) -> list[tuple[str, int]]:
    """Return the paths and sizes of the files in a page of a listing.

    Raises:
        ReadFailed: the answer is no such page.
    """
    found = _parsed(answer, where)
    if not isinstance(found, list):
        raise ReadFailed(f"{where} answered without a list of files")
    files: list[tuple[str, int]] = []
    for entry in found:
        kind = entry.get("type") if isinstance(entry, dict) else None
        if kind == "directory":
            continue
        path, size = (entry.get("path"), entry.get("size")) if kind == "file" else (None, None)
        if not isinstance(path, str) or type(size) is not int or size < 0:
            raise ReadFailed(f"{where} answered with an entry that is no file or directory: {str(entry)[:200]}")
        try:
            check_path(path)
        except InvalidPath as error:
            raise ReadFailed(f"{where} answered with a path that is not valid: {error}") from error
        files.append((path, size))
    return files


def next_target(link: str | None, address: str, where: str) -> str | None:
    """Return the target of the next page, from the ``Link`` header of a page; None for the last.

    Args:
        link: the header.
        address: the Hub's address, without an end.
        where: the page's address, for errors.

    Raises:
        ReadFailed: the next page is on another server.
    """
    match = _NEXT.search(link or "")
    if match is None:
        return None
    target = match[1].removeprefix(address)
    if not target.startswith("/") or target.startswith("//"):
        raise ReadFailed(f"{where} names a next page that is not of the same server")
    return target


def limited_delay(headers: Mapping[str, str]) -> float | None:
    """Return the seconds after which requests are allowed again, by the ``RateLimit`` header; None if it does not say
    so. The Hub sends it with answers of status 429: ``"api";r=0;t=55``.
    """
    match = _LIMITED.search(headers.get("RateLimit") or "")
    return None if match is None else float(match[1])


def reason_of(headers: Mapping[str, str]) -> str:
    """Return the Hub's own reason for an answer that is an error, a clause for an error's text; empty if it says none.
    It is cut, and printable.
    """
    code, text = (headers.get(name) or "" for name in ("X-Error-Code", "X-Error-Message"))
    shown = ": ".join(part for part in (code[:60], text[:_MOST_REASON]) if part)
    return "".join(each if each.isprintable() else " " for each in shown)


def is_no_dataset(headers: Mapping[str, str]) -> bool:
    """Return whether an answer of status 404 means that the dataset or its revision does not exist, and not only a part
    of it.
    """
    return headers.get("X-Error-Code") in {"RepoNotFound", "RevisionNotFound"}


def _parsed(answer: bytes, where: str) -> object:
    try:
        found: object = json.loads(answer)
    except (ValueError, RecursionError):
        raise ReadFailed(f"{where} did not answer with JSON") from None
    return found
