"""Hooks that fire in the middle of a forward or backward pass, for faults that are armed there.

They are registered only while a fault is armed, and remove themselves.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch


class _Halfway:
    """Fires once: after half of the expected calls, or when the pass ends."""

    def __init__(self, expected: int, fire: Callable[[], None]) -> None:
        self.handles: list[Any] = []
        self._left = max(1, (expected + 1) // 2)
        self._fire: Callable[[], None] | None = fire

    def pass_by(self, *_: Any) -> None:
        """Count one module or gradient."""
        self._left -= 1
        if self._left <= 0:
            self.last_chance()

    def last_chance(self, *_: Any) -> None:
        """Fire if that has not happened, and remove the hooks."""
        fire, self._fire = self._fire, None
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        if fire is not None:
            fire()


def fire_in_forward(modules: Sequence[torch.nn.Module], fire: Callable[[], None]) -> None:
    """Call `fire` when half of the first module's layers have computed."""
    leaves = [layer for module in modules[:1] for layer in module.modules() if not list(layer.children())]
    halfway = _Halfway(len(leaves), fire)
    halfway.handles += [layer.register_forward_hook(halfway.pass_by) for layer in leaves]
    halfway.handles += [
        module.register_forward_hook(halfway.last_chance) for module in modules[:1] if module not in leaves
    ]


def fire_in_backward(modules: Sequence[torch.nn.Module], fire: Callable[[], None]) -> None:
    """Call `fire` when half of the first module's gradients have been computed."""
    parameters = [p for module in modules[:1] for p in module.parameters() if p.requires_grad]
    halfway = _Halfway(len(parameters), fire)
    attach: list[Any] = [parameter.register_hook for parameter in parameters]
    halfway.handles += [hook(halfway.pass_by) for hook in attach]
