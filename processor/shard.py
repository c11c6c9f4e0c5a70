"""An open shard as adapters hand it out: a header that says what is in it, and the tensors themselves."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import tree

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class Shard:
    """An open shard."""

    header: bytes
    tensors: "Sequence[torch.Tensor]"

    @property
    def names(self) -> list[str]:
        """A name for each tensor, for the checkpoint file."""
        return tree.tensor_names(self.header)

    @property
    def size_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)
