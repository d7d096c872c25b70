"""Communication between the main process and a worker: sockets, frames, and detecting the end of either process."""
