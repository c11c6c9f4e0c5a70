"""Tools that train the same GPT on a mesh of two rows: each column's piece is on a rank of either row (HSDP)."""

from . import lm_resiliency, midstep, plain, torchft, torchrun

__all__ = ["lm_resiliency", "midstep", "plain", "torchft", "torchrun"]
