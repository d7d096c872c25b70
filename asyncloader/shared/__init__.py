"""`share`: large read-only structures in shared memory, one copy for all processes."""
