"""The commands `doctor`, `inspect` and `checkpoint show`: what they say is true, in words and as JSON."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from asyncloader import DataLoader, write_shards_sync
from asyncloader.__main__ import main
from asyncloader.commands import doctor
from asyncloader.formats import compressed
from tests.helpers.running import ROOT
from tests.helpers.seeded_datasets import Rows
from tests.helpers.shards_of_formats import FORMATS, SIZES, write

Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command, and returns its exit code and its findings by name: (state, text, figures)."""

    def call(*argv: Any) -> tuple[int, dict[str, Any]]:
        code = main([*map(str, argv), "--json"])
        told = json.loads(capsys.readouterr().out)
        assert told["ok"] == (code == 0)
        return code, {each["name"]: (each["state"], each["text"], each["figures"]) for each in told["findings"]}

    return call


# ---------------------------------------------------------------------------------------------- doctor


def test_a_machine_that_is_well(run: Run) -> None:
    """Every start method has delivered a batch, and nothing is to be mended."""
    code, found = run("doctor")
    assert code == 0
    assert found["versions"][2]["torch"] == torch.__version__
    for method in torch.multiprocessing.get_all_start_methods():
        state, text, figures = found[f"workers ({method})"]
        assert state == "ok"
        assert "the first batch took" in text
        assert figures["seconds"] > 0
    assert found["shared memory"][0] == "ok"


def test_every_extra_is_looked_for() -> None:
    """Those that are no tools for working on the package itself."""
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    tools = {name for name in declared if name.startswith("test")} | {"demo", "dev", "lint", "docs", "bench"}
    assert set(doctor._EXTRAS) == declared - tools


def test_litdata_is_installed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where LitData alone is missing, the advice has the second command, which the extra cannot have."""
    monkeypatch.setattr(doctor, "_is_there", lambda module: module != "litdata")
    (finding,) = doctor._extras()
    assert finding.advice == "for one: pip install 'asyncloader[litdata]', then pip install --no-deps litdata"


def test_too_few_open_files() -> None:
    """Is a problem, and its advice, which is followed here, mends it."""
    program = "from asyncloader.commands import doctor; from asyncloader.verification.findings import as_lines"
    program += "; print(*map(as_lines, doctor._open_files()))"
    shell = f'ulimit -S -n 100; {sys.executable} -c "{program}"'
    shell += f' | tee /dev/stderr | grep -o "ulimit.*" | (read advice; eval "$advice"; {sys.executable} -c "{program}")'
    told = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.stderr.startswith("!!  open files            at most 100\n")
    assert told.stdout == "ok  open files            at most 256\n"


# --------------------------------------------------------------------------------------------- inspect


def test_a_package_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Is no damage: the command could not be carried out, and its last line says what to install."""
    for name in compressed.ZSTD_MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    assert main(["inspect", f"{tmp_path}/a.jsonl.zst"]) == 2
    assert "pip install 'asyncloader[shards]'" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("format", FORMATS)
def test_whole_and_damaged_shards(format: str, tmp_path: Path, run: Run) -> None:
    """Of every format: the number of samples, and which shard is cut off, and which one is missing."""
    write(tmp_path, format)
    code, found = run("inspect", f"{tmp_path}/")
    assert code == 0
    assert found["shards"][2]["shards"] == len(SIZES)
    files = [path for path in sorted(tmp_path.iterdir()) if path.name != "index.json"]
    assert found["shards"][2]["bytes"] == sum(path.stat().st_size for path in files)
    assert found["samples"][2]["samples"] == sum(SIZES)
    assert found["damage"][:2] == ("ok", "none: every shard was read from end to end")
    data = files[1].read_bytes()
    files[1].write_bytes(data[: len(data) // 2 + 3])
    code, found = run("inspect", *files if "mds" not in format else [tmp_path])
    assert code == 1
    assert found["damage"][0] == "problem"
    assert files[1].stem in found["damage"][2]["url"]
    assert found["damaged shards"][1] == f"1 of {len(SIZES)}"
    files[1].unlink()
    code, found = run("inspect", *files if "mds" not in format else [tmp_path])
    assert code == 1
    assert found["damaged shards"][2] == {"damaged": 1}
    assert found["samples"][2]["samples"] == sum(SIZES) - SIZES[1]


def test_without_reading(tmp_path: Path, run: Run) -> None:
    """What an index says; of other shards it says how to find out."""
    for name in ("mds", "tar"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, name)
    assert run("inspect", tmp_path / "mds", "--no-read")[1]["samples"][2]["samples"] == sum(SIZES)
    assert run("inspect", tmp_path / "tar", "--no-read")[1]["samples"][:2] == ("note", "unknown")
    code, found = run("inspect", tmp_path / "tar", tmp_path / "mds", "--no-read")
    assert code == 0
    assert "47 in the 4 shards that have an index" in found["samples"][1]


def test_an_index_that_counts_wrong(tmp_path: Path, run: Run) -> None:
    """Is damage of its shard; so are lines that cannot be parsed, each of which is told."""
    write(tmp_path, "mds")
    index = json.loads((tmp_path / "index.json").read_text())
    index["shards"][2]["samples"] += 1
    (tmp_path / "index.json").write_text(json.dumps(index))
    code, found = run("inspect", tmp_path)
    assert code == 1
    assert str(SIZES[2]) in found["damage"][1]
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"a": 1}\n{"a"\n{"a": 2}\nno\n' + "no\n" * 40)
    code, found = run("inspect", lines)
    assert code == 1
    assert found["samples"][2]["samples"] == 2
    assert found["damage"][2]["errors"] == 42
    assert "and 22 more" in found["damage"][1]
    lines.write_text("")
    code, found = run("inspect", lines)
    assert code == 0
    assert found["empty shards"][:2] == ("note", "1")


@pytest.mark.parametrize("ending", ["tar", "parquet"])
def test_shards_that_are_missing(ending: str, tmp_path: Path, run: Run) -> None:
    """Of a folder those are named that the index of `write_shards` lists; shards that were not asked for are not."""
    samples = [{"__key__": f"{number}", "txt": "a"} if ending == "tar" else {"txt": "a"} for number in range(8)]
    shards = write_shards_sync(samples, f"{tmp_path}/a/train-{{shard:02d}}.{ending}", max_samples=2)
    assert [Path(shard.url).name for shard in shards] == [f"train-0{number}.{ending}" for number in range(4)]
    for number in (1, 3):
        Path(shards[number].url).unlink()
    for folder in (tmp_path / "a", f"{tmp_path}/a/", tmp_path, f"file://{tmp_path}/a/"):
        for how in ([], ["--no-read"]):
            code, found = run("inspect", folder, *how)
            assert code == 1
            assert found["missing shards"][0] == "problem"
            assert [url.rpartition("/")[2] for url in found["missing shards"][2]["urls"]] == [
                f"train-01.{ending}",
                f"train-03.{ending}",
            ]
            assert found["shards"][2]["shards"] == 2
    code, found = run("inspect", shards[0].url, shards[2].url)
    assert code == 0
    assert "missing shards" not in found


def test_the_index_of_write_shards(tmp_path: Path, run: Run) -> None:
    """Counts without reading, and shows that lines, or bytes behind an archive's end, are missing."""
    for ending, name in (("jsonl", "txt"), ("tar", "__key__")):
        samples = [{name: f"line{number}", "txt": "a"} for number in range(6)]
        shards = write_shards_sync(samples, f"{tmp_path}/{ending}/{{shard:02d}}.{ending}", max_samples=2)
        assert run("inspect", f"{tmp_path}/{ending}/", "--no-read")[1]["samples"][2]["samples"] == 6
        assert run("inspect", f"{tmp_path}/{ending}/")[0] == 0
        whole = Path(shards[1].url).read_bytes()
        Path(shards[1].url).write_bytes(whole[: whole.index(b"\n") + 1] if ending == "jsonl" else whole[:-100])
        code, found = run("inspect", f"{tmp_path}/{ending}/")
        assert code == 1
        assert "but its index says" in found["damage"][1]


def tar(*members: tuple[str, bytes | tuple[bytes, str]]) -> bytes:
    """An archive of files, and of members of another kind, which refer to a name."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:  # pads with zeros behind the end
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                member.size = len(content)
            else:
                member.type, member.linkname = content
            archive.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    return made.getvalue()


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(
    ("content", "damage"),
    [
        (tar(("a.x", b"1"), ("b.x", b"2"), ("a.y", b"3"), ("b.y", b"4")), "'a' are not together"),
        (tar(("a.x", b"1"), ("b.x", (tarfile.LNKTYPE, "a.x")), ("c.x", b"2")), "'b.x' is a hard link"),
        (tar(("a.x", b"1"), ("b.x", (tarfile.SYMTYPE, "a.x")), ("c.x", b"2")), "'b.x' is a symbolic link"),
        (tar(("a.x", b"1")) + tar(("b.x", b"2")), "follows the end"),
        (tar(("d", (tarfile.DIRTYPE, "")), ("d/a.x", b"1"), ("latest", (tarfile.SYMTYPE, "d"))), None),
    ],
)
def test_tars_of_other_programs(
    content: bytes, damage: str | None, pack: Callable[[bytes], bytes], tmp_path: Path, run: Run
) -> None:
    """What a reader would pass over, or read as several samples, is named."""
    shard = tmp_path / ("a.tar" if pack is bytes else "a.tar.gz")
    shard.write_bytes(pack(content))
    code, found = run("inspect", shard)
    assert (code, found["damage"][0]) == ((0, "ok") if damage is None else (1, "problem"))
    assert damage is None or damage in found["damage"][1]


def test_bytes_behind_the_end(tmp_path: Path, run: Run) -> None:
    """Of MDS the index says how many bytes a shard has."""
    write(tmp_path, "mds")
    shard = next(path for path in tmp_path.iterdir() if path.name != "index.json")
    shard.write_bytes(shard.read_bytes() + bytes(9))
    code, found = run("inspect", tmp_path)
    assert code == 1
    assert "but its index says" in found["damage"][1]


# ------------------------------------------------------------------------------------- checkpoint show


class Counting(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(100))


def state_of(steps: int | None, dataset: Any = None, **options: Any) -> dict[str, Any]:
    with DataLoader[Any](Rows(100) if dataset is None else dataset, batch_size=4, **options) as loader:
        batches = iter(loader)
        for _ in range(10**6 if steps is None else steps):
            if next(batches, None) is None:
                break
        return loader.state_dict()


class Evil:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('it ran')",))


SEEDED: dict[str, Any] = {"seed": 3, "shuffle": True}
CASES: dict[str, tuple[Callable[[], dict[str, Any]], str, str, str]] = {
    "seeded": (
        lambda: state_of(5, **SEEDED),
        "epoch 0, 5 batches delivered, about 20 samples of 100",
        "shuffled, seed 3, batches of 4",
        "any number of workers, and of ranks that share global batches of 4",
    ),
    "ranks": (
        lambda: state_of(5, **SEEDED, rank=1, world_size=2),
        "epoch 0, 5 batches delivered, about 40 samples of 100",
        "shuffled, seed 3, global batches of 8 on 2 ranks",
        "any number of workers, and of ranks that share global batches of 8",
    ),
    "finished": (
        lambda: state_of(None),
        "epoch 0 is finished; the next is epoch 1",
        "sequential, torch mode, batches of 4",
        "any number of workers",
    ),
    "stream": (
        lambda: state_of(3, Counting(), num_workers=2),
        "epoch 0, 3 batches delivered",
        "that of the dataset, torch mode, batches of 4",
        "num_workers=2",
    ),
}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("case", CASES)
def test_states_in_words(case: str, tmp_path: Path, run: Run) -> None:
    """At any place of a checkpoint of torch's, beside objects that only the program has, in a pickle, or as JSON."""
    make, *words = CASES[case]
    state = make()
    whole = {"model": {"weight": torch.zeros(9)}, "other": Evil(), "loaders": [None, {"train": state}]}
    torch.save(whole, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(whole))
    torch.save(whole, tmp_path / "a.pt")
    (tmp_path / "a.json").write_text("\ufeff\n" + json.dumps(state, indent=1))
    for file, place in (
        *((name, "loaders[1].train") for name in ("a.pt", "old.pt", "a.pickle")),
        ("a.json", "the file"),
    ):
        code, found = run("checkpoint", "show", tmp_path / file)
        assert code == 0
        assert [found[name][1] for name in (place, "  order", "  resumes on")] == words


def test_what_resumes_is_true() -> None:
    """The state of two ranks resumes on four, with another number of workers; that of a stream does not."""
    state = CASES["ranks"][0]()
    with DataLoader[Any](Rows(100), batch_size=2, **SEEDED, rank=3, world_size=4, num_workers=1) as loader:
        loader.load_state_dict(state)
    with (
        DataLoader[Any](Counting(), batch_size=4, num_workers=1) as other,
        pytest.raises(ValueError, match="num_workers=2"),
    ):
        other.load_state_dict(CASES["stream"][0]())


def test_states_that_cannot_be_loaded(tmp_path: Path, run: Run) -> None:
    """A broken state is a problem of its own; those beside it are described."""
    good = state_of(2, **SEEDED)
    torch.save([good | {"beyond": [9, 7]}, good | {"step": -1}, good | {"version": 99}], tmp_path / "a.pt")
    code, found = run("checkpoint", "show", tmp_path / "a.pt")
    assert code == 1
    assert found["[0]"][1].endswith("and these later ones: 9, 7")
    assert found["[1]"][:2] == ("problem", "the state is broken: step=-1")
    assert "of version 99" in found["[2]"][1]


def test_a_checkpoint_of_objects_within_themselves(tmp_path: Path, run: Run) -> None:
    """Each is looked through once."""
    whole: dict[str, Any] = {"loader": state_of(2, **SEEDED)}
    for name in "abc":
        whole[name] = whole
    torch.save(whole, tmp_path / "a.pt")
    assert [*run("checkpoint", "show", tmp_path / "a.pt")[1]] == ["loader", "  order", "  resumes on"]


def test_names_that_a_terminal_would_obey(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Are printed with escapes, and no part of a file looks like a finding; nor do they end the command."""
    for name in ("\x1b[2Ja.jsonl", "\nok  damage.jsonl", os.fsdecode(b"\xff.jsonl")):
        (tmp_path / name).write_text("no\n")
    assert main(["inspect", f"{tmp_path}/"]) == 1
    out = capsys.readouterr().out
    assert all(line.startswith(("ok ", "!! ", "   ")) for line in out.splitlines())
    assert "\nok  damage" not in out
    assert all(each in out for each in (r"\x1b[2Ja.jsonl", r"\udcff.jsonl", "damaged shards        3 of 3"))
    torch.save({"\x1b[2J\nok": state_of(2, **SEEDED)}, tmp_path / "a.pt")
    assert main(["checkpoint", "show", str(tmp_path / "a.pt")]) == 0
    assert r"\x1b[2J\nok" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (pickle.dumps(Evil()), "has no loader's state in it"),
        (b"", "a.pt is empty"),
        (b"PK\x03\x04 no archive", "not a checkpoint that can be read"),
        (b"root:x:0:0:root:/root:/bin/bash\n", "a.pt is text, and neither JSON nor a pickle; it begins with b'root"),
        (b"\x1f\x8b\x08\x00", "a.pt is neither a file of torch.save, JSON nor a pickle; it begins with b'\\x1f"),
        (b'{"a": [1, 2]}', "has no loader's state in it"),
        (b'{"a": [1, 2', "a.pt is not JSON that can be read: Expecting"),
        (b'{"a": "\xff"}', "a.pt is not JSON that can be read: 'utf-8' codec"),
        (b"[" * 100_000, "nests too deep"),
        (b"\x80\x02(1.", "not a checkpoint that can be read: it is damaged"),
    ],
)
def test_files_without_states(content: bytes, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Are refused in a line, and no code in them runs."""
    (tmp_path / "a.pt").write_bytes(content)
    assert main(["checkpoint", "show", str(tmp_path / "a.pt")]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["inspect", "/nowhere/"], "there is no shard below"),
        (["inspect", "a.unknown"], "a.unknown"),
        (["inspect", "nothing://a/b.tar"], "nothing"),
        (["checkpoint", "show", "/nowhere/a.pt"], "No such file"),
        (["plan", "a.tar", "--workers", "2"], "was removed: measure a short run instead, by `asyncloader try"),
        (["bench", "a:b"], "was removed: run your program by `asyncloader try -- python train.py`"),
    ],
)
def test_commands_that_cannot_be_carried_out(argv: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """End with a line that says why."""
    assert main(argv) == 2
    told = capsys.readouterr().err
    assert why in told
    assert told.count("\n") == 1


def test_a_reader_that_has_seen_enough() -> None:
    """Closing the pipe ends the command without a traceback."""
    shell = f"{sys.executable} -m asyncloader doctor | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("ok  versions")
    assert not done.stderr
    assert done.returncode == 141
