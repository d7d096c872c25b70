"""One epoch of a loader, from `iter()` to the last batch: scheduling, delivery, recovery of workers."""
