"""The loaders that a program makes, their common methods, and `write_shards`."""
