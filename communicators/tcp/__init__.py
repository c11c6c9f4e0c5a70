"""Collectives of arrays in host memory over TCP, for jobs without torch. `communicator.py` is the way in."""
