"""Shards of samples in remote stores: from URLs to the samples of a batch, shared among workers and ranks.

In the order in which a sample passes them; read `dataset` first:

    dataset          RemoteIterableDataset: the user's side, and the epoch's plan
    braces, sources  URLs, brace patterns, prefixes and MDS folders -> shards
    measuring        sizes, sample counts, and the places where shards can be cut
    catalogue        shards, the pieces that they are cut into, the leases that these are put together to
    leases           main process: which worker reads what, in an order that depends on no clock
    epoch_leases     main process: one epoch's plan and book, and its part of a state
    lane             worker: from leases to the samples of batches; its state is checked by `lane_state`
    piece_reading    worker: the piece that is read, and those behind it that are opened before their time
    shuffle          worker: the buffer
    reading          one piece of one shard -> samples (`read_ahead`, `parquet_reading`)
    stores           a URL -> the transport that reads it (`loop_stores`: for each event loop)
    local_leases     leases without workers
"""

from __future__ import annotations
