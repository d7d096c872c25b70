"""Sequence packing: sequences of any lengths in rows of at most `max_tokens` tokens."""
