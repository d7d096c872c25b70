"""Simulates an epoch over shards in a remote store: the loader's own decisions, on a clock that does not wait."""
