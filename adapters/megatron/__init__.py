"""Megatron: a training job on megatron-core, made resilient by decorating its train function.

Nothing of megatron-core is imported before the decorator is used.
"""

from .data import FromSample
from .initial_values import skip_initial_values
from .pretraining import resilient_pretrain
from .replicas import Replica
from .resilient import resilient

__all__ = ["FromSample", "Replica", "resilient", "resilient_pretrain", "skip_initial_values"]
