"""What all rooms stand on: the event loop in a thread, hooks of the process, events, CPUs, sizes, texts of peers."""
