"""Statistics of a loader: counters, metrics, and the diagnosis of its speed."""
