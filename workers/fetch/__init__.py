"""Fetches batches in a worker: reads samples, handles their errors, and collates them."""
