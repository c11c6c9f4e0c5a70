"""What MindSpore draws, as far as it can be restored.

On a CPU no operator follows `mindspore.set_rng_state`. What repeats are functional operators of PyNative mode after
`mindspore.set_seed`. So each step gets a seed of its own, and a repeated step draws what it drew. A cell that lives
from step to step and draws (`nn.Dropout`) continues its own count, as does every operator of a compiled graph: no
call of MindSpore restores that, and the audit names it.
"""

from collections.abc import Iterator
from typing import Any

import mindspore as ms
import numpy as np

_SEED_ATTRIBUTES = ("Seed0", "seed0", "seed")
_LARGEST = 2**31 - 1
_MIX = 1_000_003  # two ranks, or two steps, do not get one seed by chance


class RandomNumbers:
    """The seeds of the steps of one rank, and the state of MindSpore's generator."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.base = int(ms.get_seed() or 0)

    def begin(self, step: int) -> None:
        """Seed MindSpore for one step. Numpy's generator, which `set_seed` seeds as well, is left as it was."""
        numpy_state = np.random.get_state()
        ms.set_seed((self.base * _MIX + self._rank * _MIX * _MIX + step) % _LARGEST)
        np.random.set_state(numpy_state)

    def capture(self) -> dict[str, Any]:
        """Return the base of the seeds, and the state of the generator, for devices where it means something."""
        return {"base": self.base, "generator": ms.get_rng_state().asnumpy()}

    def restore(self, captured: dict[str, Any]) -> None:
        """Restore what `capture` returned."""
        self.base = captured["base"]
        ms.set_rng_state(ms.Tensor(np.array(captured["generator"])))


def drawing_cells(root: Any) -> Iterator[tuple[str, Any]]:
    """Yield the cells that hold an operator with random numbers of its own: they draw, and remember how often."""
    for path, cell in root.cells_and_names():
        operators = [each for each in getattr(cell, "_primitives", {}).values() if each is not None]
        if getattr(cell, "p", None) != 0 and any(map(_draws, operators)):
            yield path, cell


def _draws(operator: Any) -> bool:
    return str(operator.name).startswith("Dropout") or any(hasattr(operator, name) for name in _SEED_ATTRIBUTES)
