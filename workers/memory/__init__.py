"""Shared memory: rings, slots and leases, and how batches are stored in them as bytes."""
