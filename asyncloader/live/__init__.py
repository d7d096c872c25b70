"""Shows a loader while it runs: its figures, a socket for `asyncloader top`, and a page for a browser."""
