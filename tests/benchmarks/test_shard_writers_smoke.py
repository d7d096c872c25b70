"""The benchmark of shard writers: it runs, and finds wrong content. No speed is asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import shard_writers


def test_writers_are_measured_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both inputs, ours and the peer that is installed; the rows come into the page."""
    page = tmp_path / "benchmarks.md"
    page.write_text("# Benchmarks\n\n## Memory bandwidth\n")
    monkeypatch.setattr(shard_writers, "PAGE", page)
    monkeypatch.setattr(shard_writers, "ROOT", tmp_path)
    given = ["--rounds", "1", "--number", "400", "--large", "100000", "--folder", f"{tmp_path}/shards", "--save"]
    shard_writers.main(given)
    table = [line for line in page.read_text().splitlines() if line.startswith(("| even", "| skewed"))]
    assert sum("**" in line for line in table) >= 2
    assert len({line.count("|") for line in table}) == 1
    found = capsys.readouterr().out
    assert found.count("webdataset ShardWriter") == 2
    assert found.count("ratio") >= 2


def test_wrong_content_is_found(tmp_path: Path) -> None:
    """A sample that differs in one byte."""
    data = shard_writers.samples(5, 10)
    expected = shard_writers.digest_of(iter(data))
    data[3]["jpg"] = data[3]["jpg"][:-1] + bytes([data[3]["jpg"][-1] ^ 1])
    with pytest.raises(AssertionError, match="has other samples"):
        shard_writers.seconds(shard_writers.write_tar, data, tmp_path / "shards", expected)
