"""Samples of remote shards by their number: which shard, which bytes, and how they are read."""
