"""Places a service's nodes on machines."""
