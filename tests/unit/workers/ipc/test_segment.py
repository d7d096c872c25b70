from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import pytest

from asyncloader.errors import RingMemoryError
from asyncloader.workers.ipc import segment
from tests import script_server
from tests.helpers.running import ROOT, environment

GB = 1 << 30


def allocated(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_segment_has_its_size_and_no_pages_yet() -> None:
    """A new segment is virtual: it takes no memory before it is used or reserved."""
    fd = segment.create(1 << 24)
    assert os.fstat(fd).st_size == 1 << 24
    assert allocated(fd) == 0
    os.close(fd)


def test_segment_is_private_to_its_holders() -> None:
    """A segment has no name, and is not inherited by programs that are started."""
    fd = segment.create(4096)
    assert not os.get_inheritable(fd)
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)


def test_mappings_share_the_bytes_and_outlive_the_descriptor() -> None:
    """Two mappings see each other's writes, also after the descriptor is closed."""
    fd = segment.create(4096)
    one, two = segment.map_segment(fd, 4096), segment.map_segment(fd, 4096)
    os.close(fd)
    one[:5] = b"hello"
    assert two[:5] == b"hello"


def test_reserve_takes_pages_once() -> None:
    """After `reserve` the pages of the range are allocated once, however often it is called."""
    fd = segment.create(10 * 4096)
    for _ in range(2):
        segment.reserve(fd, 4096, 3 * 4096)
        assert allocated(fd) == 3 * 4096
    os.close(fd)


def test_unlinked_fallback_is_anonymous_too() -> None:
    """The segment for systems without memfd works here as well, and leaves no name behind."""
    shm = Path("/dev/shm")
    before = set(shm.iterdir()) if shm.is_dir() else set()
    fd = segment._open_unlinked()
    after = set(shm.iterdir()) if shm.is_dir() else set()
    assert {path for path in after - before if path.name.startswith("al")} == set()
    os.ftruncate(fd, 8192)
    segment.reserve(fd, 0, 8192)
    memory = segment.map_segment(fd, 8192)
    os.close(fd)
    memory[8191] = 7
    assert memory[8191] == 7


def test_impossible_size_is_a_memory_error() -> None:
    """The error for a size that no file can have names the size, and no descriptor is left (the leak check looks)."""
    with pytest.raises(RingMemoryError, match=r"9,223,372,036,854,775,808 bytes.*ftruncate"):
        segment.create(1 << 63)


def test_mapping_without_address_space_is_a_memory_error() -> None:
    """The error for a mapping that the system refuses has its size."""
    fd = segment.create(1 << 62)
    with pytest.raises(RingMemoryError, match="mmap of the segment") as caught:
        segment.map_segment(fd, 1 << 62)
    assert caught.value.wanted == 1 << 62
    os.close(fd)


def test_mapping_of_another_descriptor_is_not_said_to_lack_memory() -> None:
    """A peer may pass any: the system's own error is raised."""
    read, write = os.pipe()
    with pytest.raises(PermissionError):
        segment.map_segment(read, 4096)
    os.close(read)
    os.close(write)


def run_limited(program: str) -> None:
    done = script_server.run([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of Linux")
def test_shortage_is_an_error_before_the_pages_are_touched() -> None:
    """`reserve` under a real limit raises RingMemoryError with the size; earlier reservations stay."""
    run_limited(
        """
        import os, resource
        from asyncloader.errors import RingMemoryError
        from asyncloader.workers.ipc import segment
        before = os.listdir("/proc/self/fd")
        fd = segment.create(1 << 16)
        segment.reserve(fd, 0, 1 << 16)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        try:
            segment.reserve(fd, 1 << 16, 1 << 20)
        except RingMemoryError as error:
            assert error.wanted == 1 << 20, error.wanted
            assert "fallocate" in str(error) and "1,048,576" in str(error), str(error)
        else:
            raise SystemExit("no error")
        segment.map_segment(fd, 1 << 16)[:] = bytes(1 << 16)
        try:
            segment.create(1 << 20)
        except RingMemoryError as error:
            assert error.wanted == 1 << 20
        else:
            raise SystemExit("no error")
        assert len(os.listdir("/proc/self/fd")) == len(before) + 1, os.listdir("/proc/self/fd")
        """
    )


def own_group() -> Path:
    """This process's version 2 group, as a path below the root."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, _, path = line.split(":", 2)
        if number == "0":
            return Path(path.lstrip("/"))
    pytest.skip("no unified control group here")


def fill(group: Path, **files: str) -> None:
    group.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (group / name.replace("__", ".")).write_text(text)


@pytest.fixture
def cgroups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    if not Path("/proc/self/cgroup").exists():
        pytest.skip("no control groups on this system")
    monkeypatch.setattr(segment, "_CGROUP_ROOT", tmp_path)
    return tmp_path


def test_no_group_leaves_the_machine(cgroups: Path) -> None:
    """Without limits of a group the bound is the machine's available memory."""
    limit, reason = segment.memory_limit()
    assert limit is not None
    assert limit > 0
    assert reason == "memory available on this machine"


def test_group_limit_less_its_usage(cgroups: Path) -> None:
    """The memory that the group may still get is its limit minus its usage, and the text names the group."""
    fill(cgroups, memory__max="1000000\n", memory__current="400000\n")
    assert segment.memory_limit() == (600_000, f"memory limit of control group {cgroups}")


def test_file_cache_counts_as_room(cgroups: Path) -> None:
    """Inactive file cache is given back under pressure."""
    fill(
        cgroups,
        memory__max="1000000",
        memory__current="900000",
        memory__stat="anon 5\ninactive_file 300000\nactive_file 70000\n",
    )
    assert segment.memory_limit()[0] == 400_000


@pytest.mark.parametrize("text", ["", "gibberish", "-"])
def test_unreadable_limit_is_no_bound(cgroups: Path, text: str) -> None:
    """A file without a number is ignored."""
    fill(cgroups, memory__max=text, memory__current="4000")
    assert segment.memory_limit()[1] == "memory available on this machine"


def test_parent_groups_bound_too(cgroups: Path) -> None:
    """The tightest group from ours up to the root counts."""
    group = cgroups / own_group()
    fill(group, memory__max=str(900 * GB), memory__current="0")
    fill(cgroups, memory__max="5000", memory__current="1000")
    assert segment.memory_limit() == (4000, f"memory limit of control group {cgroups}")


def test_version_1_files_are_read(cgroups: Path) -> None:
    """The files' older names are understood, and their value for "no limit"."""
    fill(cgroups, memory__limit_in_bytes="7000", memory__usage_in_bytes="3000")
    fill(cgroups, memory__stat="total_inactive_file 500\n")
    assert segment.memory_limit()[0] == 4500
    fill(cgroups, memory__limit_in_bytes=str((1 << 63) - 4096))
    assert segment.memory_limit()[1] == "memory available on this machine"


def test_check_room_names_sizes_and_purpose(cgroups: Path) -> None:
    """A plan that cannot fit is refused with the size wanted, the limit, the limit's origin, and the purpose."""
    fill(cgroups, memory__max="1000000", memory__current="0")
    segment.check_room(1_000_000, "anything")
    with pytest.raises(RingMemoryError) as caught:
        segment.check_room(1_000_001, "a ring of ring_bytes=1000001")
    assert (caught.value.wanted, caught.value.limit) == (1_000_001, 1_000_000)
    for words in ("1,000,001 bytes", "1,000,000 bytes", str(cgroups), "a ring of ring_bytes=1000001"):
        assert words in str(caught.value)
