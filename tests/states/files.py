"""Files that the kinds read: their bytes are the same on every machine, and in every year."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import struct
import tarfile
from pathlib import Path

import numpy as np

SIZES = (7, 11, 5)
"""The samples of each shard, which count from 0 on."""

COUNT = sum(SIZES)


def make_files(folder: Path) -> Path:
    """Write the shards of each format, and files of tokens. Returns the folder, which is made."""
    shutil.copytree(Path(__file__).parent / "data", folder, dirs_exist_ok=True)
    first = 0
    for name in ("tar", "jsonl", "jsonl.gz", "sequences"):
        (folder / name).mkdir()
    for number, size in enumerate(SIZES):
        samples = range(first, first + size)
        lines = b"".join(json.dumps({"n": n, "text": "x" * (n % 4)}).encode() + b"\n" for n in samples)
        (folder / f"tar/s-{number}.tar").write_bytes(_tar(samples))
        (folder / f"jsonl/s-{number}.jsonl").write_bytes(lines)
        (folder / f"jsonl.gz/s-{number}.jsonl.gz").write_bytes(gzip.compress(lines, 0, mtime=0))
        first += size
    np.arange(100, dtype="<u2").tofile(folder / "tokens")
    lengths = [1 + n % 4 for n in range(COUNT)]
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, COUNT, COUNT + 1)  # 8: uint16
    index += np.array(lengths, "<i4").tobytes() + (2 * np.cumsum([0, *lengths[:-1]])).astype("<i8").tobytes()
    (folder / "pair.idx").write_bytes(index + np.arange(COUNT + 1, dtype="<i8").tobytes())
    np.arange(sum(lengths), dtype="<u2").tofile(folder / "pair.bin")
    return folder


def _tar(samples: range) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for number in samples:
            data = str(number).encode()
            member = tarfile.TarInfo(f"{number:06d}.n")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()
