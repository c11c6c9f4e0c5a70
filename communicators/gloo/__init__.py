"""gloo, the communicator of CPU tensors, made abortable and reconnectable in place. `communicator.py` is the way in."""
