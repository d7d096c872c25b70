"""Places a service's nodes on machines, and decides how many there should be."""
