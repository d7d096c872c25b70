"""Finds the shards that a user's URLs refer to.

Data path: URLs, patterns, folders -> [discovery] -> shards -> catalog.

    hf://datasets/owner/name/*.parquet     what the revision's commit has; the shards' URLs name the commit
    https://host/shard-{000..127}.tar      a pattern with braces (`expand`)
    s3://bucket/train/                     all shards below a prefix, ascending; or an MDS dataset, by its index.json
    s3://bucket/**/train-*.tar             the shards that match: ``*`` is any part of a name, ``**/`` any folders
    /data/train                            a local directory, with or without a trailing ``/``
    s3://bucket/mds/index.json             an MDS dataset
    s3://bucket/a.tar                      one shard

A URL that occurs twice is read twice: repeating a shard gives it more weight. Its samples then have the same keys.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from functools import partial
from urllib.parse import quote, unquote

from asyncloader.base.bridge import in_thread
from asyncloader.formats import MdsShard, ShardError, ShardFormat, parse_mds_index
from asyncloader.remote.catalog import Shard, format_of, named_format
from asyncloader.remote.stores import Stores, scheme_of
from asyncloader.transports import AccessDenied, ObjectNotFound, ObjectTooLarge

MAX_INDEX_BYTES = 256 << 20
"""Maximum size of an MDS index: a million shards of ten columns."""

INDEX = "index.json"

_ESCAPED = frozenset({"http", "https"})

MOST = 1_000_000
"""Maximum number of URLs of a pattern, or below a prefix: a typing error easily adds a factor of ten."""

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.(-?\d{1,18}))?", re.ASCII)


def expand(pattern: str, *, most: int = MOST) -> list[str]:
    """Return the texts that a pattern stands for; the leftmost braces change most slowly. Of bash's patterns it knows

        {a,b}          each alternative, which may be empty
        {0..3}         numbers, ascending or descending; {0..9..3} in steps of 3
        {000..127}     padded with zeros to the longer of the two, if either begins with a zero
        {a}, {}        stand for themselves: they have no alternatives

    Raises:
        ValueError: braces within braces, or one without its other; a range that is none; more than `most` texts.
    """
    parts = _BRACES.split(pattern)  # texts and, between each two, what braces hold
    if any(sign in text for text in parts[::2] for sign in ("{", "}", "\\{")) or "\\}" in pattern:
        raise ValueError(
            f"{pattern!r} has a brace without its other, braces within braces, or a backslash before a brace: write "
            "these URLs out; a path object is taken as it is"
        )
    found = [""]
    for at, part in enumerate(parts):
        texts = _alternatives(part, pattern, most) if at % 2 else [part]
        if len(found) * len(texts) > most:  # before they are made
            raise _too_many(pattern, most)
        found = [before + each for before in found for each in texts]
    return found


def _alternatives(text: str, pattern: str, most: int) -> list[str]:
    if "," in text:
        return text.split(",")
    if ".." not in text:
        return [f"{{{text}}}"]
    if (numbers := _RANGE.fullmatch(text)) is None:
        raise ValueError(f"'{{{text}}}' in {pattern!r} is no range of numbers such as {{000..127}}")
    first, last = int(numbers[1]), int(numbers[2])
    step = abs(int(numbers[3] or 1)) or 1  # the direction is that from the first to the last
    found = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    if len(found) > most:
        raise _too_many(pattern, most)
    padded = any(len(digits) > 1 and digits[0] == "0" for digits in (numbers[1].lstrip("-"), numbers[2].lstrip("-")))
    width = max(len(numbers[1]), len(numbers[2])) if padded else 0
    return [str(number).zfill(width) for number in found]


def _too_many(pattern: str, most: int) -> ValueError:
    return ValueError(f"{pattern!r} means too many URLs; {most:,} are allowed at most: check its numbers")


def expand_urls(urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    """Expand patterns to URLs, in order. No I/O.

    Args:
        urls: one URL, pattern or path, or several. A path object is used literally, without patterns.

    Raises:
        ValueError: no URL is given; a reason of `expand`; more than 1,000,000 URLs in total.
        TypeError: an item is neither text nor a path.
    """
    given: Iterable[str | os.PathLike[str]] = [urls] if isinstance(urls, str | os.PathLike) else urls
    found: list[str] = []
    for url in given:
        if isinstance(url, str):
            if not url:
                raise ValueError("one of the URLs is empty")
            found += expand(url)
        elif isinstance(url, os.PathLike):
            found.append(os.fspath(url))
        else:
            raise TypeError(f"a URL is a string or a path, got {type(url).__name__}: {url!r}")
        if len(found) > MOST:
            raise ValueError(f"the patterns mean more than {MOST:,} URLs: check their numbers")
    if not found:
        raise ValueError("no URL was given: name at least one shard, pattern or prefix")
    return found


def asks_a_store(urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], stores: Stores) -> bool:
    """Return whether `find_shards` sends requests to a store that is the same for all ranks. Local files may be others
    on each host, and nothing says whether a user's own transport is the same on each rank.
    """
    given = [urls] if isinstance(urls, str | os.PathLike) else list(urls)
    texts = [url for url in given if isinstance(url, str) and scheme_of(url) not in ("file", "memory")]
    return stores.transport is None and len(texts) == len(given) and any(map(_is_listed, texts))


def _is_listed(url: str) -> bool:
    address = split_url(url)[0]
    return address.endswith(("/", INDEX)) or "*" in address or scheme_of(url) == "hf"


async def find_shards(
    urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    stores: Stores,
    format: ShardFormat | str | None = None,
) -> list[Shard]:
    """Find the shards that `urls` refer to, in the given order; below a prefix ascending.

    URLs of single shards are not checked: if an object does not exist, reading it fails.

    Args:
        urls: see the module and `expand_urls`.
        stores: find the transports for the URLs.
        format: of all shards. None: by the extension; below a prefix, objects with other extensions are ignored. With a
            format, all objects below a prefix are shards, except names that begin with ``_``. Names that begin with
            ``.``, and all objects in folders whose names begin with ``.`` or ``_``, are always ignored, unless such a
            folder is the prefix itself. A ``*`` at the beginning of a name finds neither of them, nor names that begin
            with ``_`` and have another extension; a pattern may name them, as in ``**/_raw/*.tar``. A format's name is
            an extension without its dot: ``"tar"``, ``"jsonl.gz"``, ``"parquet"``.

    Raises:
        ValueError: a URL without a known extension; a prefix with no shard below it, or a ``*`` that no object matches;
            an MDS shard without its index; or a reason of `expand_urls`.
        ShardError: an MDS index that cannot be used.
        TransportError: a listing or an index cannot be read.
    """
    wanted = named_format(format)
    shards: list[Shard] = []
    for url in await _at_commits(await _with_directories(expand_urls(urls), stores), stores):
        folder = _folder_of(url)
        if folder is not None and (wanted is None or wanted.name == "mds"):
            listed = await _read_index(folder, stores, must=url != folder)
            if listed is None and url != folder:
                raise ValueError(f"there is no MDS index at {url!r}")
            if listed is not None:
                shards += listed
                continue
        if url == folder or ("*" in split_url(url)[0] and not await _is_file(url, stores)):
            shards += await _below(url, stores, wanted)
        else:  # also an index.json of another format
            shards.append(_single(url, wanted))
    return shards


def _single(url: str, wanted: ShardFormat | None) -> Shard:
    form = format_of(url) if wanted is None else wanted
    if form.name == "mds":
        raise ValueError(f"{url!r} is an MDS shard, which is read with its index: give the folder that holds {INDEX}")
    return Shard(url, form)


def _folder_of(url: str) -> str | None:
    """Return the prefix that a URL refers to, with its query; None for the URL of a single shard."""
    address, query = split_url(url)
    if address.rpartition("/")[2] == INDEX:
        return address.removesuffix(INDEX) + query
    return url if address.endswith("/") else None


def split_url(url: str) -> tuple[str, str]:
    """Split a web URL into address and query (with its ``?``). In other URLs ``?`` may be part of a name."""
    if scheme_of(url) not in _ESCAPED:
        return url, ""
    address, mark, query = url.partition("?")
    return address, mark + query


def join_url(folder: str, path: str) -> str:
    """Return the URL of the object at `path` below a prefix's URL."""
    address, query = split_url(folder)
    escaped = quote(path, "/!$&'()*+,;=:@~", errors="surrogateescape") if is_escaped(folder) else path
    return address + escaped + query


def is_escaped(url: str) -> bool:
    """Return whether the names in a URL are percent-escaped."""
    return scheme_of(url) in _ESCAPED or url.lower().startswith("file://")


async def _is_file(url: str, stores: Stores) -> bool:
    """Return whether a local file has this name, which may contain any character, also ``*``."""
    if stores.transport is not None or scheme_of(url) != "file":
        return False
    return await in_thread(partial(os.path.isfile, "/" + stores.locate(url).path))


async def _at_commits(urls: Sequence[str], stores: Stores) -> list[str]:
    """Replace branches and tags of the Hugging Face Hub by their commits: all workers, and a resumed run that is given
    these URLs, read the same files, whatever is committed meanwhile.
    """
    if stores.transport is not None or not any(url[:2].lower() == "hf" for url in urls):
        return list(urls)
    pinned: dict[str, str] = {}
    found = []
    for url in urls:
        if scheme_of(url) == "hf":
            root, path = stores.locate(url)
            if root not in pinned:
                pinned[root] = await stores.find(root)[0].pinned_root() or root
            found.append(f"{pinned[root]}/{path}")
        else:
            found.append(url)
    return found


def _regex(pattern: str, format: ShardFormat | None) -> str:
    """Return the expression for names below a prefix that match a pattern. A ``*`` at the beginning of a name does not
    match those that are no shards, as other tools agree: `.x.tar`, `.ipynb_checkpoints/`, `_delta_log/`.
    """
    seen = r"(?!\.|_[^/]*/)" if format is None else r"(?![._])"
    found, at = "", 0
    for part in re.split(r"(\*\*/|\*\*|\*)", pattern):
        begins = not at or pattern[at - 1] == "/"
        at += len(part)
        if part == "**/" and begins:
            found += f"(?:{seen}[^/]+/)*"
        elif part[:1] == "*":
            found += (seen if begins else "") + "[^/]*"
            found += f"(?:/{seen}[^/]*)*" if part[1:] else ""
            found += part[2:]
        else:
            found += re.escape(part)
    return found


async def _with_directories(urls: Sequence[str], stores: Stores) -> list[str]:
    """Append ``/`` to local directories that were written without it."""
    if stores.transport is not None:
        return list(urls)
    doubtful = {url for url in urls if scheme_of(url) == "file" and not url.endswith("/") and not _is_known(url)}
    if not doubtful:
        return list(urls)

    def find() -> set[str]:
        paths = {url: "/" + stores.locate(url).path for url in doubtful}
        return {url for url, path in paths.items() if os.path.isdir(path)}  # noqa: PTH112 - a string, in a thread

    directories = await in_thread(find)
    return [url + "/" if url in directories else url for url in urls]


def _is_known(url: str) -> bool:
    try:
        format_of(url)
    except ValueError:
        return False
    return True


async def _read_index(folder: str, stores: Stores, *, must: bool) -> list[Shard] | None:
    """Return the shards of an MDS dataset; None without an index. `must`: the user named the index explicitly."""
    url = join_url(folder, INDEX)
    transport, path = stores.find(url)
    try:
        data = await transport.read(path, max_bytes=MAX_INDEX_BYTES)
    except ObjectNotFound:
        return None
    except AccessDenied:
        # This is S3's response for a missing object, too, if the user may not list the bucket.
        if must:
            raise
        return None
    except ObjectTooLarge as error:
        raise ShardError(f"the MDS index has more than {MAX_INDEX_BYTES:,} bytes", url=url) from error
    found: list[MdsShard] = await in_thread(partial(parse_mds_index, data, url=url))
    if not found:
        raise ValueError(f"the MDS index {url!r} names no shard")
    return [
        Shard(join_url(folder, mds.path), ShardFormat("mds", mds.compression), mds.stored_size, mds.samples, mds)
        for mds in found
    ]


async def _below(url: str, stores: Stores, wanted: ShardFormat | None) -> list[Shard]:
    """Return the shards below a prefix, or those that match a pattern with ``*``, ascending."""
    address, query = split_url(url)
    cut = address.rfind("/", 0, address.index("*")) + 1 if "*" in address else len(address)
    folder, pattern = address[:cut] or ("./" if stores.transport is None else ""), address[cut:]
    if folder.endswith("://"):
        raise ValueError(f"{url!r} has a * before its first folder, where none can be listed")
    transport, prefix = stores.find(folder + query)
    pattern = unquote(pattern, errors="surrogateescape") if is_escaped(url) else pattern
    name = re.compile(_regex(pattern or "**", wanted))
    found: list[Shard] = []
    others = 0
    async with aclosing(transport.list(prefix)) as paths:
        async for path in paths:
            rest = path[len(prefix) :]
            if name.fullmatch(rest) is None:
                others += bool(pattern)
            elif wanted is None and not _is_known(rest) and (not pattern or _lies_beside(rest, pattern)):
                others += 1
            else:
                size = transport.listed_size(path)
                found.append(_single(join_url(folder + query, rest), wanted)._replace(size=size, stated=size))
            if len(found) > MOST:
                raise ValueError(f"there are more than {MOST:,} shards below {folder!r}: give a longer prefix")
    if found:
        return found
    if pattern:
        raise ValueError(f"no object matches {url!r}; there are {others:,} others below {folder!r}")
    seen = f", but {others:,} objects of other extensions: say format=" if others else ". Is the address right?"
    raise ValueError(f"there is no shard below {folder!r}{seen}")


def _lies_beside(path: str, pattern: str) -> bool:
    """Return whether a file lies beside shards, such as `_SUCCESS` and the index of samples, and is not named."""
    return path.rpartition("/")[2].startswith("_") and "/_" not in f"/{pattern}"
