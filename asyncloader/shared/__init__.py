"""Datasets in shared memory, of which all workers read one copy."""
