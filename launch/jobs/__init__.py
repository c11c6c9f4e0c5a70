"""A job on this machine: where it lies, what it is made of, and how it is started."""
