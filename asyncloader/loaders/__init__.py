"""The loaders that a program makes, what they have in common, `explain()`, and `write_shards`."""
