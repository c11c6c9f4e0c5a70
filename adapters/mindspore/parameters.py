"""Parameters and optimizer state of MindSpore as numpy arrays, and back into the live parameters."""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import ops

from ...protocol.errors import RecoveryError


def as_array(tensor: Any) -> "np.ndarray[Any, Any]":
    """Return the content of a tensor, contiguous: bfloat16, which numpy lacks, as float32, which holds it exactly."""
    if tensor.dtype == ms.bfloat16:
        tensor = ops.cast(tensor, ms.float32)
    array: np.ndarray[Any, Any] = np.ascontiguousarray(tensor.asnumpy()).reshape(tensor.shape)
    return array


def as_tensor(array: "np.ndarray[Any, Any]", dtype: Any) -> Any:
    """Return a tensor of `dtype` with a copy of what `as_array` has given."""
    tensor = ms.Tensor(np.array(array))
    return tensor if tensor.dtype == dtype else ops.cast(tensor, dtype)


class Parameters:
    """All parameters of the cells and optimizers, each once, by name and in an order that all ranks share."""

    def __init__(self, owners: dict[str, Any]) -> None:
        self._owners = owners

    def live(self) -> dict[str, Any]:
        """Return the parameters; optimizers hold those of their cells, and moments, counts and rates besides."""
        found: dict[str, Any] = {}
        seen: set[int] = set()
        for kind, owner in self._owners.items():
            for name, parameter in owner.parameters_and_names():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    found[f"{kind}.{name}"] = parameter
        return found

    def arrays(self) -> dict[str, Any]:
        """Return their contents, which may share memory with them."""
        return {name: as_array(parameter) for name, parameter in self.live().items()}

    def restore(self, arrays: dict[str, Any]) -> None:
        """Write contents into the live parameters. Raises RecoveryError when they are of another model."""
        live = self.live()
        if arrays.keys() != live.keys():
            raise RecoveryError(
                f"parameters differ between ranks: {sorted(arrays.keys() ^ live.keys())[:4]}; do all ranks run the "
                "same script?"
            )
        for name, parameter in live.items():
            if tuple(arrays[name].shape) != tuple(parameter.shape):
                raise RecoveryError(f"{name} is {parameter.shape} here and {arrays[name].shape} at the source")
        for name, parameter in live.items():
            # What a compiled update works on is reached by assign, and not by `set_data`.
            ops.assign(parameter, as_tensor(arrays[name], parameter.dtype))
