"""Saving and loading a loader's position: the layout of a state, progress tracking, the epoch counter."""
