"""The mean of gradients over all ranks, over the job's communicator.

MindSpore's own collectives on a CPU (MCCL) can be set up once in a process and not again, so they cannot follow a
recovery. These can.
"""

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import ops

from ...communicators.base import HostCollectives
from ...processor.runtime import Runtime
from ...protocol.errors import ConfigurationError


def average(gradients: Sequence[Any]) -> tuple[Any, ...]:
    """Return the mean of each gradient over all ranks of the job. Outside `midstep run` return them as they are.

    Args:
        gradients: Tensors, alike on every rank: what `mindspore.value_and_grad` gives. The call is made in Python, not
            inside a compiled graph.

    Returns:
        New tensors, bit for bit the same on every rank.

    Raises:
        ConfigurationError: The job's communicator has no collectives for arrays.
        CommunicatorAborted: A recovery began meanwhile.
        CommunicatorFailed: A peer is gone.
    """
    runtime = Runtime.current()
    if runtime is None:
        return tuple(gradients)
    collectives = host_collectives(runtime)
    arrays = [as_array(gradient) for gradient in gradients]
    flat: dict[Any, Any] = {}  # one collective for each dtype
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        parts = [array.reshape(-1) for array in arrays if array.dtype == dtype]
        flat[dtype] = whole = np.concatenate(parts)
        collectives.allreduce(whole)
        whole /= whole.dtype.type(runtime.world_size)
    means, at = [], dict.fromkeys(flat, 0)
    for gradient, array in zip(gradients, arrays, strict=True):
        start = at[array.dtype]
        at[array.dtype] = end = start + array.size
        means.append(as_tensor(flat[array.dtype][start:end].reshape(array.shape), gradient.dtype))
    return tuple(means)


def get_rank() -> int:
    """Return the rank of this process in the job, as `mindspore.communication.get_rank`; 0 outside `midstep run`."""
    runtime = Runtime.current()
    return 0 if runtime is None else runtime.rank


def get_group_size() -> int:
    """Return the number of ranks, as `mindspore.communication.get_group_size`; 1 outside `midstep run`."""
    runtime = Runtime.current()
    return 1 if runtime is None else runtime.world_size


def host_collectives(runtime: Runtime) -> HostCollectives:
    """Return the job's communicator. Raises ConfigurationError if it has no collectives for arrays."""
    communicator = runtime.communicator
    if isinstance(communicator, HostCollectives):
        return communicator
    raise ConfigurationError(
        f"the communicator {communicator.name} has no collectives for MindSpore {ms.__version__}: write "
        "`communicator: {name: tcp}` into the policy. Without torch, that is what the default is"
    )


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
