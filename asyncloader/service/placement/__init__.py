"""Where the workers of a service run: fleets of agents and nodes."""
