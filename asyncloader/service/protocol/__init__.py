"""The messages between a loader and a node of a service: framing, encoding, checks, and the connection."""
