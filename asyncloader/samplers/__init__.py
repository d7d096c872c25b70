"""Samplers and index streams: seeded, length-aware, mixed, stateful and async samplers, and one rank's share."""
