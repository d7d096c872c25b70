"""LitData, which makes torch's iterators itself: reads a small dataset inside `install`, which warns."""

from __future__ import annotations

import tempfile

from litdata import StreamingDataLoader, StreamingDataset
from litdata.streaming.writer import BinaryWriter

import asyncloader

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        writer = BinaryWriter(folder, chunk_size=4)
        for n in range(8):
            writer[n] = {"n": n}
        writer.done()
        writer.merge()
        with asyncloader.install():
            batches = list(StreamingDataLoader(StreamingDataset(folder), batch_size=4))
        assert [batch["n"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
