"""What a loader and a node of a service send each other."""
