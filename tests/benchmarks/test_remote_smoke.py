"""The benchmark over a store: its content, its store, its checks and its tables. No speed is asserted."""

from __future__ import annotations

import io
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import uvloop

from . import remote, remote_report
from .harness import JobFailed, Results, run_job
from .plan import ASYNC, FACADE, Job
from .remote_child import Window
from .remote_clients import read_bare
from .remote_content import LARGE, LARGE_SHARDS, SMALL_SHARDS, STRIDE, Content, Shards, WrongContent, tar_size
from .remote_loaders import open_remote
from .remote_plan import (
    BARE,
    BATCH,
    IN_FLIGHT,
    MAIN,
    OBJECTS_KIND,
    OURS,
    OURS_TAR,
    PEERS,
    TORCH_ASYNCIO,
    TORCH_BLOCKING,
    Row,
    rows,
)
from .remote_store import running_store

SAMPLES = 4 * BATCH

# Slow: loaders read from a store by the second, and on a busy machine some are late.
pytestmark = [pytest.mark.network, pytest.mark.slow]


@pytest.fixture(scope="module")
def content() -> Content:
    return Content()


@pytest.fixture
def store() -> Iterator[str]:
    with running_store() as url:
        yield f"{url}/1"


def fetch(url: str, **headers: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_store_serves_its_content(store: str, content: Content) -> None:
    """Objects, tar files and byte ranges of both equal the content; other requests get 404 or 416."""
    assert fetch(f"{store}/objects/17") == (200, bytes(content.object(17)))
    assert fetch(f"{store}/objects/17", Range="bytes=3-10") == (206, bytes(content.object(17)[3:11]))
    for shards in (LARGE_SHARDS, SMALL_SHARDS):
        _, whole = fetch(f"{store}/{shards.folder}/0003.tar")
        assert len(whole) == tar_size(shards)
        for start in (0, 700, 1024 * 70, len(whole) - 1):
            status, part = fetch(f"{store}/{shards.folder}/3.tar", Range=f"bytes={start}-{start + 200_000}")
            assert (status, part) == (206, whole[start : start + 200_001])
        assert fetch(f"{store}/{shards.folder}/3.tar", Range="bytes=100-")[1] == whole[100:]
        assert fetch(f"{store}/{shards.folder}/3.tar", Range=f"bytes={len(whole)}-")[0] == 416
    for missing in (f"objects/{content.objects}", f"large/{LARGE_SHARDS.files}.tar", "other/1.tar", "nonsense"):
        assert fetch(f"{store}/{missing}")[0] == 404


@pytest.mark.parametrize("shards", [LARGE_SHARDS, SMALL_SHARDS], ids=lambda shards: shards.folder)
def test_shards_are_tar_files(shards: Shards, content: Content) -> None:
    """Python's tarfile reads the members, with their names and contents."""
    number = shards.files - 1
    with tarfile.open(fileobj=io.BytesIO(b"".join(content.tar(shards, number)))) as tar:
        members = tar.getmembers()
        assert [member.name for member in members] == [
            f"{index:08}.bin" for index in range(number * shards.each, shards.objects)
        ]
        for at in (0, shards.each - 1):
            file = tar.extractfile(members[at])
            assert file is not None
            assert file.read() == bytes(content.object(number * shards.each + at, shards.size))


def test_places_tell_objects_apart(content: Content) -> None:
    """Objects are named by their content; a byte changed at an end of any, or within the first, is found."""
    batch = np.stack([np.frombuffer(content.object(index), np.uint8) for index in (5, content.objects - 1, 0)])
    assert content.places(batch).tolist() == [5, content.objects - 1, 0]
    for row, byte in ((0, 0), (2, LARGE - 1), (1, 7), (0, STRIDE)):
        wrong = batch.copy()
        wrong[row, byte] ^= 1
        with pytest.raises(WrongContent):
            content.places(wrong)


@pytest.mark.parametrize("loader", [TORCH_BLOCKING, TORCH_ASYNCIO, *OURS])
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writ", "ignore:This process .* is multi-threaded")
def test_loaders_read_everything_once(loader: str, store: str, content: Content) -> None:
    """An epoch has each sample once, in full batches."""
    samples = SAMPLES if loader != OURS_TAR else 2 * LARGE_SHARDS.each
    # By fork, because the test's modules have other names in it than a new process would find.
    opened = open_remote(loader, OBJECTS_KIND, store, samples, start="fork")
    places: list[int] = []

    def take(batch: np.ndarray) -> None:
        assert len(batch) == BATCH
        places.extend(content.places(np.asarray(batch)).tolist())

    async def read() -> None:
        async with opened:
            async for batch in opened:
                take(batch)

    if loader in {ASYNC, OURS_TAR}:
        uvloop.run(read())
    else:
        for batch in opened:
            take(batch)
        if loader in OURS:
            opened.close()
    assert sorted(places) == list(range(samples))
    assert places == sorted(places) or loader == OURS_TAR


def test_bare_loop_stops(store: str, content: Content) -> None:
    """The bare client reads the given number of objects, and stops when `took` returns True."""
    came: list[int] = []

    def took(index: int, data: bytes) -> bool:
        assert data == content.object(index)
        came.append(index)
        return len(came) == SAMPLES + 20

    uvloop.run(read_bare(store, SAMPLES, 8, took))
    assert sorted(came) == list(range(SAMPLES))
    uvloop.run(read_bare(store, SAMPLES, 8, took))
    assert len(came) == SAMPLES + 20


def test_window_refuses_repeated_and_short_epochs(content: Content) -> None:
    """Samples that come twice, and an epoch that is over before the clock starts, are errors."""
    batch = np.stack([np.frombuffer(content.object(index), np.uint8) for index in range(4)])
    window = Window(content, 1.0)
    window.take(batch)
    with pytest.raises(RuntimeError, match="4 samples was over before"):
        window.result()
    window.take(batch)
    with pytest.raises(WrongContent, match="8 samples came, and 4 different ones"):
        window.result()
    with pytest.raises(WrongContent, match="object 3"):
        window.take_one(3, bytes(content.object(4)))


@pytest.mark.parametrize("row", [Row(OBJECTS_KIND, 1, BARE[256]), Row("small", 1, OURS_TAR)])
def test_measurement_in_its_process(row: Row) -> None:
    """A measurement gives a rate and CPU seconds."""
    with running_store() as store:
        output, _ = run_job(row.job(store, 0.05))
    assert output["rate"] > 0
    assert output["cpu"] > 0


def test_failure_has_the_reason() -> None:
    """A store that is not there is an error with the reason in it, not a number."""
    with pytest.raises(JobFailed, match=r"Cannot connect|ConnectionRefused"):
        run_job(Job("remote", OBJECTS_KIND, BARE[256], store="http://127.0.0.1:9/1"))


def fake_results(factor: float) -> Results:
    """Everything measured twice: peers 100 samples per second, ours `factor` times that; CPU time divided by it."""
    results = Results()
    for row in rows():
        scale = factor if row.loader in OURS else 1.0
        for noise in (1.0, 1.2):
            results.add(row.metric, row.loader, 100.0 * noise * scale)
            results.add(row.cpu, row.loader, 1e-4 * noise / scale)
    return results


def test_verdicts_bound_from_the_right_side() -> None:
    """200 times the others keeps every bound, a 200th none; each is in the table."""
    for factor, kept in ((200.0, True), (0.005, False)):
        results = fake_results(factor)
        found = remote_report.verdicts(results)
        assert {each.ok for each in found} == {kept}
        assert {each.loader for each in found} == {ASYNC, FACADE, OURS_TAR}
        table = remote_report.verdict_table(results)
        assert table.count("| ok |" if kept else "| **short** |") == len(found)
    assert remote_report.attainable(fake_results(1.0), MAIN) == 110
    results = fake_results(1.0)
    results.values[Row(OBJECTS_KIND, MAIN, "").metric, BARE[IN_FLIGHT]] = [1e6]
    assert remote_report.attainable(results, MAIN) == IN_FLIGHT * 1000 / MAIN


def test_section_is_put_in_its_place(tmp_path: Path) -> None:
    """The section is inserted before another section, or replaces its old version; the rest of the page stays."""
    page, text = tmp_path / "page.md", ""
    page.write_text("# Title\n\n## Before\n\nx\n\n## Memory bandwidth\n\ny\n")
    for factor in (1.0, 2.0):
        text = remote_report.section(fake_results(factor), ["2026-01-01"], "command", 1.5)
        remote.save(text, page)
        assert text.startswith(remote_report.TITLE)
        assert page.read_text() == f"# Title\n\n## Before\n\nx\n\n{text}\n\n## Memory bandwidth\n\ny\n"
    for loader in (TORCH_BLOCKING, *PEERS, *BARE.values(), ASYNC):
        assert loader.partition(",")[0] in page.read_text()


def test_tables_leave_out_what_was_not_measured() -> None:
    """With one latency and one loader there are tables without blanks, and no verdict without its two sides."""
    results = Results()
    row = Row(OBJECTS_KIND, MAIN, ASYNC)
    results.add(row.metric, ASYNC, 5000.0)
    results.add(row.cpu, ASYNC, 1e-4)
    assert remote_report.verdicts(results) == []
    assert remote_report.tar_table(results) == ""
    assert "| `AsyncDataLoader` | 5,000 | 0.100 |" in remote_report.rate_table(results)


def test_store_ends_with_its_client() -> None:
    """When its client leaves, the store's process ends, and its port is free."""
    with running_store() as url:
        assert fetch(f"{url}/1/objects/0")[0] == 200
    with pytest.raises(urllib.error.URLError):
        fetch(f"{url}/1/objects/0")
