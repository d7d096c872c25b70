"""`asyncloader plan`: the requests that it predicts are those that a server counts, and bad shards are reported."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from asyncloader import AsyncDataLoader, RemoteIterableDataset, write_shards_sync
from asyncloader.__main__ import main
from asyncloader.bridge import in_thread
from tests.helpers.http_store import Stored, serving
from tests.helpers.shards_of_formats import FORMATS, SIZES, write


def objects_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def tars(folder: Path, samples: int, each: int, size: int) -> None:
    """Write tar files, of this number of samples each, with an index."""
    made = [{"__key__": f"{number}", "bin": bytes(size)} for number in range(samples)]
    write_shards_sync(made, f"{folder}/{{shard:02d}}.tar", max_samples=each)


Plan = Callable[..., Awaitable[tuple[int, dict[str, Any]]]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """Runs the command, beside the running loop, and returns its exit code and its findings by name."""

    async def call(*argv: Any) -> tuple[int, dict[str, Any]]:
        code = await in_thread(lambda: main(["plan", *map(str, argv), "--json"]))
        told = json.loads(capsys.readouterr().out)
        return code, {each["name"]: each for each in told["findings"]}

    return call


def whole(samples: list[Any]) -> int:
    return len(samples)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("format", FORMATS)
async def test_requests_are_those_that_a_server_counts(format: str, workers: int, tmp_path: Path, plan: Plan) -> None:
    """Of two epochs, with those of the plan, for each format, also where shards are cut; so are the bytes."""
    write(tmp_path, format)
    async with serving() as store:
        for name, data in objects_of(tmp_path).items():
            store.put(name, data)
        names = ["index.json"] if "mds" in format else sorted(store.objects)
        urls = [f"{store.url}/{name}" for name in names]
        code, found = await plan(*urls, "--workers", workers, "--batch-size", 4, "--epochs", 2, "--cpus", 2)
        assert code == 0
        assert found["shards"]["figures"]["samples"] == pytest.approx(sum(SIZES), rel=0.3)
        assert found["rate"]["figures"]["simulated_whole"]
        figures = found["run"]["figures"]
        store.asked.clear()
        options: dict[str, Any] = {"workers": "threads"} if workers > 1 else {}
        number = workers if workers > 1 else 0
        async with AsyncDataLoader[Any](
            RemoteIterableDataset(urls), batch_size=4, num_workers=number, collate_fn=whole, **options
        ) as loader:
            for _ in range(2):
                assert sum([batch async for batch in loader]) == sum(SIZES)
            came = loader.stats()["store/bytes"]
        if found["shards"]["figures"]["estimated_shards"] == 0 or workers == 1:
            assert len(store.asked) == figures["requests"]
        else:  # another worker may read again the samples that do not fill a batch, whose number is not known before
            assert figures["requests"] <= len(store.asked) <= figures["requests"] + 2
        if workers == 1:
            # Nothing is cut: the plan has read the index alone.
            index = len(store.objects["index.json"].data) if "mds" in format else 0
            assert came == figures["bytes"] + index


async def test_what_is_missing_is_named(tmp_path: Path, plan: Plan) -> None:
    """The numbers of a shard that does not exist are estimated from the others; it is a problem."""
    write_shards_sync(
        [{"__key__": f"{number}", "txt": "a" * 50} for number in range(60)],
        f"{tmp_path}/{{shard:02d}}.tar",
        max_samples=10,
    )
    (tmp_path / "03.tar").unlink()
    code, found = await plan(f"{tmp_path}/{{00..05}}.tar", "--rtt", "1ms")
    assert code == 1
    assert found["unreadable shards"]["figures"] == {"unreadable": 1}
    assert "03.tar" in found["unreadable shards"]["text"]
    assert found["shards"]["figures"]["samples"] == 60


async def test_an_index_that_lies(tmp_path: Path, plan: Plan) -> None:
    """Samples that no shard of this size can have are not believed, and not simulated."""
    write_shards_sync([{"txt": "a"}] * 40, f"{tmp_path}/{{shard:02d}}.jsonl", max_samples=20)
    index = tmp_path / "_index.jsonl.json"
    data = json.loads(objects_of(tmp_path)[index.name])
    for shard in data["shards"].values():
        shard["samples"] = 1 << 39  # in 240 bytes
    index.write_text(json.dumps(data))
    code, found = await plan(f"{tmp_path}/", "--rtt", "1ms")
    assert code == 0
    assert found["shards"]["figures"]["samples"] == pytest.approx(40, abs=2)


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["/nowhere/"], "there is no shard below"),
        (["a.unknown"], "a.unknown"),
        (["/nowhere/a.tar"], "no shard's size is known"),
        (["empty.jsonl"], "the shards have no samples"),
        (["lines.jsonl", "--no-read"], "nothing says how many samples"),
        (["lines.jsonl", "--rtt", "fast"], "'fast' is no time"),
        (["lines.jsonl", "--bandwidth", "1"], "'1' is no bandwidth"),
        (["lines.jsonl", "--workers", "0"], "--workers should be at least 1"),
        (["lines.jsonl", "--cpus", "nan"], "--cpus should be from 0.01 to 1,048,576"),
        (["lines.jsonl", "--price-gb", "-1"], "per_gb should be 0 or more"),
        (["lines.jsonl", "--decode", "json:nothing"], "json has no function 'nothing'"),
        (["lines.jsonl", "--decode", "soon"], "'soon' is no time"),
    ],
)
def test_plans_that_cannot_be_made(
    argv: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """End with a line that says why."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.jsonl").write_text('{"a": 1}\n' * 20)
    (tmp_path / "empty.jsonl").write_text("")
    assert main(["plan", *argv]) == 2
    told = capsys.readouterr().err
    assert why in told
    assert told.count("\n") == 1


async def test_the_whole_of_a_plan(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode function is measured; the price is that of the requests, bytes and hours; the step limits the run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "decoding.py").write_text("def decode(sample):\n    return sum(range(20_000)) + len(sample)\n")
    write_shards_sync(
        [{"__key__": f"{number}", "bin": bytes(10_000)} for number in range(400)],
        f"{tmp_path}/{{shard:02d}}.tar",
        max_samples=50,
    )
    options = ["--workers", 2, "--batch-size", 10, "--rtt", "20ms", "--step", "100ms", "--epochs", 3, "--cpus", 4]
    prices = ["--price-requests", 2, "--price-gb", 3, "--price-hour", 7]
    code, found = await plan(f"{tmp_path}/", "--decode", "decoding.py:decode", *options, *prices)
    assert code == 0
    run = found["run"]["figures"]
    assert run["requests"] == run["planning_requests"] + 3 * 8
    assert run["seconds"] == pytest.approx(3 * 40 * 0.1, rel=0.05)
    assert found["a sample's CPU time"]["figures"]["decode_s"] > 1e-5
    wanted = run["requests"] / 1000 * 2 + run["bytes"] / 1e9 * 3 + run["seconds"] / 3600 * 7
    assert found["cost"]["figures"]["cost"] == pytest.approx(wanted)
    assert found["limit"]["state"] == "ok"
    assert found["limit"]["text"].startswith("training step: without it")
    assert found["would help"]["state"] == "ok"


class Everywhere(dict[str, Stored]):
    """Objects at every path."""

    def __contains__(self, path: object) -> bool:
        return str(path).endswith(".tar")

    def __missing__(self, path: str) -> Stored:
        return self[""]


@pytest.mark.thorough
async def test_very_many_shards(plan: Plan, tmp_path: Path) -> None:
    """Some of them are looked at, and the requests of all are counted."""
    write_shards_sync(
        [{"__key__": f"{number}", "bin": bytes(1000)} for number in range(20)], f"{tmp_path}/a{{shard}}.tar"
    )
    async with serving() as store:
        store.objects = Everywhere({"": Stored(objects_of(tmp_path)["a0.tar"])})
        urls = f"{store.url}/{{000000..019999}}.tar"
        code, found = await plan(urls, "--rtt", "20ms", "--workers", 4, "--batch-size", 4)
        assert code == 0
        assert len(store.asked) < 100
    assert found["run"]["figures"]["requests"] == 20_000
    assert found["shards"]["figures"]["samples"] == pytest.approx(400_000, rel=0.01)
    assert found["rate"]["figures"]["samples_per_s"] > 0
