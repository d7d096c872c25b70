"""The reading services of DataLoader2."""
