"""The loader's side of a service: connects to nodes, and lets their workers look like local workers."""
