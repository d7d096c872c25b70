"""Which samples make the next batch: samplers, their order and their cut among ranks."""
