"""Shared memory: rings, slots and leases, and batches as bytes in them."""
