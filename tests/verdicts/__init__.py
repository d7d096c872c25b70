"""Planted runs whose bound is known: whether `diagnose` names it, and the gain of following its advice."""
