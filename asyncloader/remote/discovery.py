"""Finds the shards that a user's URLs refer to.

Data path: URLs, patterns, folders -> [discovery] -> shards -> catalog.

    hf://datasets/owner/name/*.parquet     what the revision's commit has; the shards' URLs name the commit
    https://host/shard-{000..127}.tar      a brace pattern (`braces`)
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
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from urllib.parse import quote, unquote

from asyncloader.base.bridge import in_thread
from asyncloader.formats import MdsShard, ShardError, ShardFormat, parse_mds_index
from asyncloader.remote.braces import MOST, expand
from asyncloader.remote.catalog import Shard, format_of, named_format
from asyncloader.remote.stores import Stores, scheme_of
from asyncloader.transports import AccessDenied, ObjectNotFound, ObjectTooLarge, Transport

MAX_INDEX_BYTES = 256 << 20
"""Maximum size of an MDS index: a million shards of ten columns."""

INDEX = "index.json"

_ESCAPED = frozenset({"http", "https"})

_HIDDEN = frozenset("._")
"""First characters of the folders below a prefix that are passed over."""

_RANGE = re.compile(r"(?<!\\)\{[^{},\\]*\.\.[^{},\\]*\}")
"""Braces that are meant as a range. If they are not a valid range, bash and `expand` take them literally."""


def expand_urls(urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    """Expand patterns to URLs, in order. No I/O.

    Args:
        urls: one URL, pattern or path, or several. A path object is used literally, without patterns.

    Raises:
        ValueError: no URL is given; a pattern or range is wrong (see `braces`); more than 1,000,000 URLs in total.
        TypeError: an item is neither text nor a path.
    """
    given: Iterable[str | os.PathLike[str]] = [urls] if isinstance(urls, str | os.PathLike) else urls
    found: list[str] = []
    for url in given:
        if isinstance(url, str):
            if not url:
                raise ValueError("one of the URLs is empty")
            for group in _RANGE.findall(url):
                if expand(group) == [group]:
                    what = f"{group!r} in {url!r} is no range such as {{000..127}} or {{a..e}}"
                    raise ValueError(f"{what}; write \\{{ for the character itself")
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
            folder is the prefix itself. A ``*`` finds neither of them, nor names that begin with ``_`` and have another
            extension; a pattern may name them, as in ``**/_raw/*.tar``. A format's name is an extension without its
            dot: ``"tar"``, ``"jsonl.gz"``, ``"parquet"``.

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
        if "*" in split_url(url)[0] and not await _is_file(url, stores):
            shards += await _match(url, stores, wanted)
        elif folder is None or url != folder:  # also an index.json of another format
            shards.append(_single(url, wanted))
        else:
            shards += await _below(folder, stores, wanted)
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


async def _match(url: str, stores: Stores, wanted: ShardFormat | None) -> list[Shard]:
    """Return the shards that match a pattern with ``*``, ascending."""
    address, query = split_url(url)
    folder, slash, _ = address[: address.index("*")].rpartition("/")
    pattern = address[len(folder + slash) :]
    folder = folder + slash if slash or stores.transport is not None else "./"
    if folder.endswith("://"):
        raise ValueError(f"{url!r} has a * before its first folder, where none can be listed")
    transport, prefix = stores.find(folder + query)
    pattern = unquote(pattern, errors="surrogateescape") if is_escaped(url) else pattern
    name = re.compile(_regex(pattern), re.DOTALL)  # the name of a folder may contain a line end

    def is_shard(rest: str) -> bool:
        return name.fullmatch(rest) is not None and not _is_left_out(rest, pattern, wanted)

    found, others = await _list(transport, prefix, folder + query, wanted, is_shard)
    if not found:
        raise ValueError(f"no object matches {url!r}; there are {others:,} others below {folder!r}")
    return found


def _is_left_out(path: str, pattern: str, wanted: ShardFormat | None) -> bool:
    """Return whether the pattern would have to name a hidden folder of this path, or the first character of its file:
    of a hidden file, or of one that lies beside shards, such as `_SUCCESS` and the index of a shard's samples.
    """
    if hidden := _hidden_folders(path):
        named = [re.compile(_regex(part), re.DOTALL) for part in pattern.split("/")[:-1] if part[:1] in _HIDDEN]
        if not all(any(each.fullmatch(folder) for each in named) for folder in hidden):
            return True
    first = path.rpartition("/")[2][:1]
    if f"/{first}" in f"/{pattern}":
        return False
    return first == "." or (first == "_" and (wanted is not None or not _is_known(path)))


def _hidden_folders(path: str) -> list[str]:
    """Return the folders of a path that hold no shards, as other tools agree: `.ipynb_checkpoints`, `_delta_log`."""
    if "/." not in f"/{path}" and "/_" not in f"/{path}":  # nearly all paths
        return []
    return [folder for folder in path.split("/")[:-1] if folder[:1] in _HIDDEN]


def _regex(pattern: str) -> str:
    kinds = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
    return "".join(kinds.get(part, re.escape(part)) for part in re.split(r"(\*\*/|\*\*|\*)", pattern))


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


async def _below(folder: str, stores: Stores, wanted: ShardFormat | None) -> list[Shard]:
    """Return the shards below a prefix."""
    transport, prefix = stores.find(folder)

    def is_shard(rest: str) -> bool | None:
        # Hidden files are no shards; with an explicit format, neither are names such as `_SUCCESS`.
        if rest.rpartition("/")[2].startswith("." if wanted is None else (".", "_")) or _hidden_folders(rest):
            return None
        return wanted is not None or _is_known(rest)

    found, others = await _list(transport, prefix, folder, wanted, is_shard)
    if not found:
        seen = f", but {others:,} objects of other extensions: say format=" if others else ". Is the address right?"
        raise ValueError(f"there is no shard below {folder!r}{seen}")
    return found


async def _list(
    transport: Transport,
    prefix: str,
    folder: str,
    wanted: ShardFormat | None,
    is_shard: Callable[[str], bool | None],
) -> tuple[list[Shard], int]:
    """Return the shards among the objects below a prefix, and the number of others.

    `is_shard` looks at a path below the prefix; None: it does not count.
    """
    found: list[Shard] = []
    others = 0
    async with aclosing(transport.list(prefix)) as paths:
        async for path in paths:
            rest = path[len(prefix) :]
            if verdict := is_shard(rest):
                size = transport.listed_size(path)
                found.append(_single(join_url(folder, rest), wanted)._replace(size=size, stated=size))
            others += verdict is False
            if len(found) > MOST:
                raise ValueError(f"there are more than {MOST:,} shards below {folder!r}: give a longer prefix")
    return found, others
