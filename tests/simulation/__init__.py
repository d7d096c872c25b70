"""Simulations of the loader's pure modules at sizes that no test machine has: orders, costs, and epochs with losses."""
