"""What a worker does for a task: it reads samples, handles their errors, and collates them."""
