"""Plain PyTorch: DistributedDataParallel, and any module that every rank holds whole."""

from ...processor.values import Value, replicated
from .state import TrainState

__all__ = ["TrainState", "Value", "replicated"]
