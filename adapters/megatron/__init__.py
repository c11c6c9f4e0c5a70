"""Megatron: a training job on megatron-core, made resilient by decorating its train function.

Nothing of megatron-core is imported before the decorator is used.
"""

from .data import FromSample
from .pretraining import resilient_pretrain
from .replicas import Replica
from .resilient import resilient, skip_initial_values

__all__ = ["FromSample", "Replica", "resilient", "resilient_pretrain", "skip_initial_values"]
