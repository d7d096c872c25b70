"""What the ranks of a distributed run tell one another."""
