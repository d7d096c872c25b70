"""Datasets of shards in remote stores: from URLs to the samples of a batch, divided among workers and ranks.

The modules, in the order in which a sample passes through them; read `dataset` first:

    dataset            RemoteIterableDataset: the user's interface and the plan of an epoch
    braces, discovery  URLs, brace patterns, prefixes and MDS folders -> shards
    shard_sizes        sizes, sample counts and cut points of shards
    catalog            describes shards
    shard_splitting    ranges that shards are cut into, groups of them, and which of them each rank reads
    assignment         main process: which worker reads which range, in a reproducible order
    assignment_state   main process: one epoch's plan and assigner, and their part of the loader's state
    worker_stream      worker: from assignments to the samples of batches
    prefetch           worker: opens the next ranges early and buffers their bytes
    shuffle            worker: the shuffle buffer
    reading            worker: one range of one version of a shard -> samples (Parquet: `parquet_reading`)
    stores             a URL -> the transport that reads it
"""

from __future__ import annotations
