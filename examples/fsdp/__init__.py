"""Training with sharded parameters: plain, and resilient."""
