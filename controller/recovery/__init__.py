"""Decide in an incident who is to blame, and which rung treats it. Pure."""
