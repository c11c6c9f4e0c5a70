"""MindSpore: data parallel training, whose parameters every rank holds whole. See `docs/mindspore.md`.

- `state.py`: `MindSporeState`, what a recovery brings back.
- `gradients.py`: `average`, the mean of gradients over the ranks, over collectives that survive the loss of a peer.
"""

from .gradients import average, get_group_size, get_rank
from .state import MindSporeState

__all__ = ["MindSporeState", "average", "get_group_size", "get_rank"]
