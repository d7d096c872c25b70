"""Readers of shards: tar (WebDataset), JSON lines, MDS, TFRecord and Parquet, from bytes to samples.

All but Parquet are push parsers without I/O; `base` has the contract, which a reader of your own keeps as well. Parquet
has its index at its end: `parquet` asks for the ranges that it needs.
"""

from __future__ import annotations

from asyncloader.formats.base import MAX_SAMPLE_BYTES, Located, OnBad, Sample, ShardError, ShardRange, ShardReader
from asyncloader.formats.compressed import CompressedReader
from asyncloader.formats.example import parse_example
from asyncloader.formats.jsonl import JsonlReader, cut_lines
from asyncloader.formats.mds import MdsReader
from asyncloader.formats.mds_index import MdsShard, parse_mds_index
from asyncloader.formats.registry import ShardFormat, cut_shard, open_reader, shard_format
from asyncloader.formats.tar import TarReader
from asyncloader.formats.tfrecord import TFRecordReader

__all__ = [
    "MAX_SAMPLE_BYTES",
    "CompressedReader",
    "JsonlReader",
    "Located",
    "MdsReader",
    "MdsShard",
    "OnBad",
    "Sample",
    "ShardError",
    "ShardFormat",
    "ShardRange",
    "ShardReader",
    "TFRecordReader",
    "TarReader",
    "cut_lines",
    "cut_shard",
    "open_reader",
    "parse_example",
    "parse_mds_index",
    "shard_format",
]
