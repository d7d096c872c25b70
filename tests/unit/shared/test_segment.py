from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncloader.errors import RingMemoryError
from asyncloader.shared.segment import SegmentWriter, SharedSegment, _open_growing, is_spawning
from tests import script_server
from tests.helpers.running import ROOT, environment
from tests.unit.workers.test_setup_payload import run_children

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")


def written(*parts: Any) -> SharedSegment:
    writer = SegmentWriter("a test")
    for part in parts:
        writer.write(part)
    return writer.finish()


def test_bytes_are_appended_in_order_and_aligned() -> None:
    """Each write returns its offset, a multiple of the alignment; small and large writes are read back unchanged."""
    random = np.random.default_rng(1)
    writer = SegmentWriter("a test")
    wanted: list[tuple[int, bytes]] = []
    for size in (3, 1 << 21, 0, 17, 5, (1 << 20) - 1, 1 << 20, 1, 100_000):
        for align in (1, 8, 64):
            data = random.bytes(size)
            offset = writer.write(data, align)
            assert offset % align == 0
            wanted.append((offset, data))
    segment = writer.finish()
    assert all(segment.memory[offset : offset + len(data)] == data for offset, data in wanted)
    assert segment.nbytes == wanted[-1][0] + len(wanted[-1][1]) == len(segment.memory)
    offsets = [offset for offset, _ in wanted]
    assert offsets == sorted(offsets)


def test_short_writes_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the kernel writes only a part (2 GiB at most), the rest is written by further calls."""
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:100_001], offset))
    data = np.random.default_rng(1).bytes(3_000_000)
    assert written(b"ab", data, data[:7]).memory[:] == b"ab" + data + data[:7]


def test_any_contiguous_buffer_is_taken() -> None:
    """Arrays of any dtype, views of bytearrays and empty arrays are written with the contents of that moment."""
    buffer = bytearray(b"hello")
    writer = SegmentWriter("a test")
    for part in (memoryview(buffer)[1:], np.zeros(0), np.ones((2, 300_000))):
        writer.write(part)
    buffer[:] = b"-----"
    segment = writer.finish()
    assert segment.memory[:4] == b"ello"
    assert segment.memory[4:] == np.ones(600_000).tobytes()


def test_write_is_private() -> None:
    """A write through a mapping is not seen by other mappings or in the segment."""
    segment = written(b"hello")
    segment.memory[:5] = b"HELLO"
    assert os.pread(segment._fd, 5, 0) == b"hello"


def test_abandoned_writer_leaves_nothing() -> None:
    """Closing an unfinished writer closes its descriptor (the leak check verifies that); a finished segment stays."""
    writer = SegmentWriter("a test")
    writer.write(b"x" * 3_000_000)
    writer.close()
    writer.close()
    writer = SegmentWriter("a test")
    writer.write(b"abc")
    segment = writer.finish()
    writer.close()
    assert os.pread(segment._fd, 3, 0) == b"abc"


def test_file_without_a_name_where_memfd_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memfd_create is missing a segment is a file without a name that can grow."""
    monkeypatch.delattr(os, "memfd_create")
    segment = written(b"x" * 3_000_000, b"end")
    assert segment.memory[-3:] == b"end"
    assert os.fstat(segment._fd).st_nlink == 0
    fd = _open_growing()
    assert not os.get_inheritable(fd)
    os.close(fd)


# ---------------------------------------------------------------------------------------------------------- shortage


def run_limited(program: str) -> None:
    done = script_server.run([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
@linux
def test_shortage_is_an_error_and_leaves_nothing() -> None:
    """If the next part does not fit, an error has the sizes and the purpose; no signal, no descriptor is left open."""
    run_limited(
        """
        import os, resource
        from asyncloader.errors import RingMemoryError
        from asyncloader.shared.share import share
        strings = ["x" * 1000] * 20_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 22, 1 << 22))
        for data in (strings, [b"y" * 9_000_000], {"a": [1.0] * 1_000_000}):
            try:
                share(data)
            except RingMemoryError as error:
                assert error.wanted > 1 << 22 and error.limit == 1 << 22, str(error)
                assert "ulimit -f" in str(error) and "share(" in str(error), str(error)
            else:
                raise SystemExit("no error")
        assert len(os.listdir("/proc/self/fd")) == 4, os.listdir("/proc/self/fd")  # 0-2 and the listing
        assert share(strings[:2000]) == strings[:2000]
        """
    )


@pytest.mark.thorough
@linux
def test_no_address_space_is_an_error() -> None:
    """A segment that cannot be mapped is an error with its size, and its descriptor is closed."""
    run_limited(
        """
        import os, re, resource
        from pathlib import Path
        from asyncloader.errors import RingMemoryError
        from asyncloader.shared.share import share
        strings = ["x" * 1000] * 200_000
        size = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 27), resource.RLIM_INFINITY))
        try:
            share(strings)
        except RingMemoryError as error:
            assert error.wanted >= 200_000_000 and "ulimit -v" in str(error), str(error)
        else:
            raise SystemExit("no error")
        assert len(os.listdir("/proc/self/fd")) == 4, os.listdir("/proc/self/fd")
        """
    )


@linux
def test_control_groups_limit_is_checked_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A write that the control group can never hold is refused before it is allocated: the kernel would kill."""
    (tmp_path / "memory.max").write_text("3000000")
    (tmp_path / "memory.current").write_text("0")
    monkeypatch.setattr("asyncloader.workers.ipc.segment._CGROUP_ROOT", tmp_path)
    writer = SegmentWriter("share(list of 3)")
    writer.write(b"x" * 2_000_000)
    before = os.fstat(writer._fd).st_blocks
    with pytest.raises(RingMemoryError, match=r"control group .*share\(list of 3\), besides 2,000,000 bytes"):
        writer.write(b"x" * 4_000_000)
    assert os.fstat(writer._fd).st_blocks == before
    writer.close()


@pytest.mark.thorough
@linux
def test_peak_of_building() -> None:
    """Beside the data and the segment, sharing text, rows, arrays or bytes needs no memory of the data's size."""
    run_limited(
        """
        import re
        from pathlib import Path
        import numpy as np
        from asyncloader.shared.share import share

        def now(name):
            return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

        share([("warm", np.ones(3))])
        for data in (
            [f"{i:0200d}" for i in range(300_000)],
            [{"name": f"{i:0200d}", "box": np.full(8, i)} for i in range(100_000)],
            {"x": np.ones(8_000_000), "y": [b"%d" % i * 10_000 for i in range(2000)]},
        ):
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
            before = now("VmRSS")
            shared = share(data)
            peak = now("VmHWM") - before  # the segment is written through its descriptor: not counted
            assert shared.nbytes > 30_000_000
            assert peak < 0.2 * shared.nbytes + 12_000_000, (peak, shared.nbytes)
            del shared, data
        """
    )


# --------------------------------------------------------------------------------------------------- other processes


def test_pickles_for_a_process_being_started_only() -> None:
    """In other pickles a descriptor would mean nothing."""
    assert not is_spawning()
    with pytest.raises(TypeError, match="only to a process that is being started"):
        pickle.dumps(written(b"hello"))


def child_reads(number: int, segment: SharedSegment, inode: int) -> None:
    assert segment.memory[:5] == b"hello"
    assert os.fstat(segment._fd).st_ino == inode
    segment.memory[:5] = b"child"
    if sys.platform.startswith("linux"):
        assert re.search(rf"rw-p .* {inode} +/memfd:asyncloader", Path("/proc/self/maps").read_text())


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_map_the_same_pages(method: str) -> None:
    """Children of any start method map the same file privately: their writes are not seen here."""
    segment = written(b"hello" + bytes(10_000))
    inode = os.fstat(segment._fd).st_ino
    assert run_children(multiprocessing.get_context(method), child_reads, segment, inode, count=2) == [0, 0]
    assert segment.memory[:5] == b"hello"
