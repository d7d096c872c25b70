"""Measures a loader, and searches the setting with which it is fastest: the command `asyncloader bench`."""
