"""What a loader measures of itself, and what follows from it."""
