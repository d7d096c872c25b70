"""One epoch: what a loader asks for, gives out and recovers between `iter()` and the last batch."""
