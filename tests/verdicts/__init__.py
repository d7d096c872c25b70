"""Planted runs whose bound is known: whether `diagnose` names it, and what following its advice gains."""
