"""What `state_dict()` saves and `load_state_dict()` restores."""
