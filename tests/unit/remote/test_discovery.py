"""Finding the shards that a user's URLs refer to."""

from __future__ import annotations

import os
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from braceexpand import braceexpand
from hypothesis import given
from hypothesis import strategies as st

from asyncloader import AsyncDataLoader, RemoteIterableDataset
from asyncloader.formats import ShardError, ShardFormat
from asyncloader.remote.catalog import PARQUET
from asyncloader.remote.discovery import MAX_INDEX_BYTES, expand, expand_urls, find_shards
from asyncloader.remote.stores import Stores
from asyncloader.transports import AccessDenied, MemoryTransport
from tests.unit.remote.shards import mds, mds_index


def test_one_or_several_patterns_and_paths() -> None:
    """Patterns are expanded, path objects are taken literally, repeats are kept."""
    assert expand_urls("s3://b/{0..2}.tar") == ["s3://b/0.tar", "s3://b/1.tar", "s3://b/2.tar"]
    assert expand_urls(Path("a{0,1}.tar")) == ["a{0,1}.tar"]
    assert expand_urls(["a.tar", "{b,a}.tar"]) == ["a.tar", "b.tar", "a.tar"]
    assert expand_urls("{a}{}.tar") == ["{a}{}.tar"]


NUMBERS = st.builds(
    lambda first, last, width, step: "{" + f"{first:0{width}d}..{last:0{width}d}" + step + "}",
    *(st.integers(-9, 12), st.integers(-9, 12), st.sampled_from([0, 2, 3, 5])),
    st.sampled_from(["", "..1", "..3", "..-2", "..0", "..007"]),
)
TEXTS = st.text("abz09.-/_ :", max_size=4)
GROUPS = st.lists(TEXTS, min_size=2, max_size=3).map(lambda texts: "{" + ",".join(texts) + "}")


@given(st.lists(st.one_of(TEXTS, NUMBERS, GROUPS), max_size=4).map("".join))
def test_braces_are_expanded_as_by_webdataset(pattern: str) -> None:
    """The package that it uses gives the same texts in the same order."""
    assert expand(pattern) == list(braceexpand(pattern))


@pytest.mark.parametrize(
    ("pattern", "match"),
    [
        *((text, "a brace without its other") for text in ("{a,b", "a}", "{a,b{1,2}}", "{0..3}}", r"\{a,b\}")),
        *((text, "is no range of numbers") for text in ("{a,b}-{000..}", "{a..e}")),
        *((text, "URLs; 1,000,000 are") for text in ("{0..1000000}", "{0..999}{0..999}{0,1}", "{0..99999999999}")),
    ],
)
def test_patterns_are_refused(pattern: str, match: str) -> None:
    """What is not expanded does not become a name; too many are counted before they are made."""
    with pytest.raises(ValueError, match=match):
        expand(pattern)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("urls", "error", "match"),
    [
        ([], ValueError, "no URL was given"),
        ([""], ValueError, "is empty"),
        ([b"a.tar"], TypeError, "got bytes"),
        (["{0..599999}.tar"] * 2, ValueError, "more than 1,000,000"),
    ],
)
def test_urls_that_are_none(urls: Any, error: type[Exception], match: str) -> None:
    """The error names the problem."""
    with pytest.raises(error, match=match):
        expand_urls(urls)


def local(root: Path, *names: str) -> Stores:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return Stores()


async def test_single_shards_are_believed() -> None:
    """No request is made for single shards; their format is that of the extension, or the given format."""
    shards = await find_shards(["https://host/a.jsonl.gz?sig=1", "s3://b/x.parquet"], Stores())
    assert [shard.format for shard in shards] == [ShardFormat("jsonl", "gzip"), PARQUET]
    (shard,) = await find_shards("https://host/download/7", Stores(), "tar")
    assert shard.format == ShardFormat("tar", None)
    with pytest.raises(ValueError, match=r"extension of 'https://host/a\.txt'"):
        await find_shards("https://host/a.txt", Stores())


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.tar", ["a b.tar", "b.tar"]),
        ("a/*", ["a/c.jsonl", "a/d.jsonl"]),
        ("**/*.jsonl", ["a/c.jsonl", "a/d.jsonl", "e.jsonl"]),
        ("*/c.*", ["a/c.jsonl"]),
        ("**", ["a b.tar", "a/c.jsonl", "a/d.jsonl", "b.tar", "e.jsonl"]),
        (".*.tar", [".x.tar"]),
        ("_d*/*.parquet", ["_delta/0.parquet"]),
        ("**/.Trash/**", ["a/.Trash/f/g.tar"]),
        ("**e.json*", ["e.jsonl"]),
        ("a**l", ["a/c.jsonl", "a/d.jsonl"]),
    ],
)
@pytest.mark.parametrize("written", ["{}/", "file://{}/", "transport"])
async def test_a_star_is_any_part_of_a_name(tmp_path: Path, written: str, pattern: str, names: list[str]) -> None:
    """Files are found in subdirectories, and sorted by path. Files that lie beside shards are left out, and hidden
    folders that the pattern does not name.
    """
    files = ["b.tar", "a/c.jsonl", "a/d.jsonl", "a b.tar", ".x.tar", "e.jsonl", "_b.tar.samples", "a/_SUCCESS"]
    files += ["a/.Trash/f/g.tar", "_delta/0.parquet", "_delta/.y/c.jsonl"]
    stores, prefix = local(tmp_path, *files), written.format(tmp_path)
    if written == "transport":
        stores, prefix = Stores(transport=MemoryTransport(dict.fromkeys(files, b""))), ""
    shards = await find_shards(prefix + pattern, stores)
    assert [stores.find(shard.url)[1].removeprefix(f"{os.fspath(tmp_path)[1:]}/") for shard in shards] == names
    await stores.aclose()


async def test_a_star_beside_escapes(tmp_path: Path) -> None:
    """In a file URL the text around the star is escaped, as in other URLs."""
    stores = local(tmp_path, "a b1.tar", "a b2.tar", "a%20b.tar", os.fsdecode(b"\xff.tar"))
    named = {"a%20b*": ["a%20b1.tar", "a%20b2.tar"], "a%2520*": ["a%2520b.tar"], "%ff*": ["%FF.tar"]}
    for pattern, names in named.items():
        shards = await find_shards(f"file://{tmp_path}/{pattern}", stores)
        assert [shard.url.rpartition("/")[2] for shard in shards] == names
    await stores.aclose()


async def test_a_star_that_nothing_matches(tmp_path: Path) -> None:
    """The error has the number of other objects below the prefix, or says that the extensions are unknown."""
    stores = local(tmp_path, "b.tar", "c.jsonl")
    with pytest.raises(ValueError, match=r"no object matches '.*/\*\.parquet'; there are 2 others below '.*/'"):
        await find_shards(f"{tmp_path}/*.parquet", stores)
    with pytest.raises(ValueError, match=r"extension"):
        await find_shards(f"{tmp_path}/*", local(tmp_path, "README.md"))
    with pytest.raises(ValueError, match=r"before its first folder"):
        await find_shards("s3://buck*/a.tar", stores)
    await stores.aclose()


async def test_a_star_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative pattern is searched in the working directory, unless a local file has this very name."""
    monkeypatch.chdir(tmp_path)
    stores = local(tmp_path, "b.tar", "c.jsonl")
    assert [shard.url for shard in await find_shards("*.tar", stores)] == ["./b.tar"]
    local(tmp_path, "star*.tar", "starry.tar")
    assert [shard.url for shard in await find_shards("star*.tar", stores)] == ["star*.tar"]
    await stores.aclose()


@pytest.mark.parametrize("written", ["{}/", "{}", "file://{}/"])
async def test_a_prefix_is_all_known_shards_below_it(tmp_path: Path, written: str) -> None:
    """Shards are sorted by path; other objects and hidden objects are left out, also those in hidden folders, unless
    the prefix itself is one. A local directory needs no slash.
    """
    hidden = (".x.tar", ".ipynb_checkpoints/b.tar", "a/.Trash/f/g.tar", "_delta_log/0.parquet", "z/_temporary/0/d.tar")
    prefix = f"{written.format(tmp_path / '_data').rstrip('/')}"
    stores = local(tmp_path / "_data", "b.tar", "a/c.jsonl", "a b.tar", "README.md", "z/d.parquet", *hidden)
    shards = await find_shards(written.format(tmp_path / "_data"), stores)
    blank = "%20" if written.startswith("file") else " "
    assert [shard.url for shard in shards] == [
        f"{prefix}/a{blank}b.tar",
        f"{prefix}/a/c.jsonl",
        f"{prefix}/b.tar",
        f"{prefix}/z/d.parquet",
    ]
    paths = [stores.find(shard.url)[1] for shard in shards]
    assert paths[0] == f"{os.fspath(tmp_path)[1:]}/_data/a b.tar"
    await stores.aclose()


@pytest.mark.parametrize("written", ["{}/", "file://{}/"])
async def test_names_that_are_no_text(tmp_path: Path, written: str) -> None:
    """A file's name may be any bytes; the listed URL can be read."""
    (tmp_path / os.fsdecode(b"caf\xe9.jsonl")).write_bytes(b'{"n": 7}\n')
    loader = AsyncDataLoader[Any](RemoteIterableDataset(written.format(tmp_path)), batch_size=2, decode=itemgetter("n"))
    assert [batch.tolist() async for batch in loader] == [[7]]


async def test_with_a_format_every_object_is_a_shard(tmp_path: Path) -> None:
    """Objects that other programs leave behind, such as ``_SUCCESS``, are left out."""
    stores = local(tmp_path, "part-0", "part-1", "_SUCCESS", ".part-0.crc", "_temporary/0/part-2")
    for url in (f"{tmp_path}/", f"{tmp_path}/*", f"{tmp_path}/**"):
        shards = await find_shards(url, stores, "jsonl")
        assert [shard.url.rpartition("/")[2] for shard in shards] == ["part-0", "part-1"]
    with pytest.raises(ValueError, match=r"no shard below .*, but 2 objects of other extensions|3 objects of other"):
        await find_shards(f"{tmp_path}/", stores)
    await stores.aclose()


@pytest.mark.parametrize("name", ["nothing/", "empty"])
async def test_an_empty_prefix_is_an_error(tmp_path: Path, name: str) -> None:
    """The error names the URL."""
    (tmp_path / "empty").mkdir()
    stores = Stores()
    with pytest.raises(ValueError, match=f"no shard below .*{name}"):
        await find_shards(f"{tmp_path}/{name}", stores)
    await stores.aclose()


SHARDS = [mds(range(5)), mds(range(5, 8))]
INDEX = mds_index(*SHARDS, counts=[5, 3])


@pytest.mark.parametrize("url", ["train/", "train/index.json"])
async def test_an_mds_data_set_is_its_index(url: str) -> None:
    """Sizes and counts are those of the index, and nothing is listed."""
    async with MemoryTransport({"train/index.json": INDEX, "train/unlisted.tar": b""}) as transport:
        shards = await find_shards(url, Stores(transport=transport))
    assert [shard.url for shard in shards] == ["train/shard.00000.mds", "train/shard.00001.mds"]
    assert [shard.samples for shard in shards] == [5, 3]
    assert [shard.size for shard in shards] == [len(data) for data in SHARDS]


async def test_an_index_of_another_format_is_one_shard() -> None:
    """The other objects in its folder were not asked for."""
    stores = Stores(transport=MemoryTransport({"train/index.json": b"{}", "train/other": b""}))
    assert [shard.url for shard in await find_shards("train/index.json", stores, "jsonl")] == ["train/index.json"]


async def test_a_users_transport_at_its_root() -> None:
    """``/`` means all of the transport's objects."""
    async with MemoryTransport({"b.tar": b"", "a/c.tar": b""}) as transport:
        stores = Stores(transport=transport)
        shards = await find_shards("/", stores)
        assert [stores.find(shard.url)[1] for shard in shards] == ["a/c.tar", "b.tar"]


async def test_an_index_is_not_believed() -> None:
    """Refused: shards outside of the index's folder, pickled columns, an index that is too large, and bad JSON."""
    escaping = INDEX.replace(b"shard.00000.mds", b"../secrets.mds")
    pickled = INDEX.replace(b'"str"', b'"pkl"')
    huge = bytes(MAX_INDEX_BYTES + 1)
    for data, match in ((escaping, "no plain path"), (pickled, "pkl"), (huge, "more than"), (b"{", "no JSON")):
        async with MemoryTransport({"train/index.json": data}) as transport:
            with pytest.raises(ShardError, match=match):
                await find_shards("train/", Stores(transport=transport))


async def test_mds_without_its_index() -> None:
    """A single shard, a folder of shards, and a missing index are errors."""
    async with MemoryTransport({"train/a.mds": SHARDS[0]}) as transport:
        stores = Stores(transport=transport)
        for url in ("train/a.mds", "train/"):
            with pytest.raises(ValueError, match=r"give the folder that holds index\.json"):
                await find_shards(url, stores)
        with pytest.raises(ValueError, match=r"there is no MDS index at 'train/index\.json'"):
            await find_shards("train/index.json", stores)


async def test_an_index_that_may_not_be_read() -> None:
    """Some stores deny access to missing objects: a prefix is then listed; a named index is an error."""

    class Guarded(MemoryTransport):
        async def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
            raise AccessDenied(f"no permission to read {path!r}", path=path)

    async with Guarded({"train/a.tar": b""}) as transport:
        stores = Stores(transport=transport)
        assert [shard.url for shard in await find_shards("train/", stores)] == ["train/a.tar"]
        with pytest.raises(AccessDenied):
            await find_shards("train/index.json", stores)
