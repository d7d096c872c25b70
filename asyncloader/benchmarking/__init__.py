"""Measures a loader and searches for its fastest setting: the command `asyncloader bench`."""
