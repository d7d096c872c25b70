"""Traces of runs: the spans of each process, as Chrome's trace events."""
