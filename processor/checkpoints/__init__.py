"""Checkpoints on a file system that all nodes share: how they are written, found, read and removed."""
