"""What is decided in an incident: who is to blame, and which rung treats it. Pure."""
