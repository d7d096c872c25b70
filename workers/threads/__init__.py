"""Worker threads: a pool's workers in the loader's own process."""
