"""What the controller does in a recovery, phase by phase: the transition table, its handlers and their state. Pure."""
