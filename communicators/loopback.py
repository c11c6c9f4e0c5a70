"""Collectives without peers: of a newcomer that is not connected yet, and of a group of one.

A newcomer builds its model, its groups and its optimizer while the survivors are still stopping. Its collectives
complete at once with this rank's own input; the repair that follows overwrites what was built from them.
"""

from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from .kept_works import keep, release

Tensors = list[torch.Tensor]


class CompletedWork(dist.Work):
    """A collective that is complete from the start."""

    def __init__(self, result: Tensors) -> None:
        """Complete with `result`."""
        super().__init__()
        self._result = result
        keep(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return at once."""
        release(self)
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def exception(self) -> None:
        """Return None."""

    def result(self) -> Tensors:
        """Return the tensors."""
        return self._result

    def source_rank(self) -> int:
        """Return 0: there is no other rank."""
        return 0

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Return at once."""

    def get_future(self) -> "torch.futures.Future[Tensors]":
        """Return a completed future."""
        future: torch.futures.Future[Tensors] = torch.futures.Future()
        future.set_result(self._result)
        release(self)
        return future


class Loopback:
    """The collectives of one group, with this rank as the only participant.

    Names and arguments are those of torch's ProcessGroup; options are ignored.
    """

    def __init__(self, rank: int, size: int) -> None:
        """Act as `rank` of `size` ranks."""
        self._rank = rank
        self._size = size

    def _same(self, tensors: Tensors, *_: Any, **__: Any) -> dist.Work:
        return CompletedWork(tensors)

    allreduce = allreduce_coalesced = broadcast = reduce = send = recv = recv_anysource = _same

    def barrier(self, *_: Any, **__: Any) -> dist.Work:
        """Return at once: there is no rank to wait for."""
        return CompletedWork([])

    def allgather(self, outputs: list[Tensors], inputs: Tensors, *_: Any, **__: Any) -> dist.Work:
        """Fill every rank's part with this rank's."""
        for slots, own in zip(outputs, inputs, strict=True):
            for slot in slots:
                slot.copy_(own)
        return CompletedWork([slot for slots in outputs for slot in slots])

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, *_: Any, **__: Any) -> dist.Work:
        """As `allgather`; here each output list is one rank's."""
        for slots in outputs:
            for slot, own in zip(slots, inputs, strict=True):
                slot.copy_(own)
        return CompletedWork([slot for slots in outputs for slot in slots])

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, *_: Any, **__: Any) -> dist.Work:
        """Fill every rank's part with this rank's."""
        output.view(self._size, -1).copy_(own.reshape(1, -1).expand(self._size, -1))
        return CompletedWork([output])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, *_: Any, **__: Any) -> dist.Work:
        """As `all_gather_single`, for each pair."""
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own)
        return CompletedWork(outputs)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], *_: Any, **__: Any) -> dist.Work:
        """Copy this rank's own part: the sum over one rank."""
        for output, parts in zip(outputs, inputs, strict=True):
            output.copy_(parts[self._rank])
        return CompletedWork(outputs)

    def reduce_scatter_single(self, output: torch.Tensor, own: torch.Tensor, *_: Any, **__: Any) -> dist.Work:
        """Copy this rank's own part: the sum over one rank."""
        output.view(-1).copy_(own.reshape(self._size, -1)[self._rank])
        return CompletedWork([output])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, *_: Any, **__: Any) -> dist.Work:
        """As `reduce_scatter_single`, for each pair."""
        for output, own in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, own)
        return CompletedWork(outputs)

    def gather(self, outputs: list[Tensors], inputs: Tensors, *_: Any, **__: Any) -> dist.Work:
        """Fill every rank's part with this rank's, at the root."""
        return self.allgather(outputs, inputs) if outputs else CompletedWork([])

    def scatter(self, outputs: Tensors, inputs: list[Tensors], *_: Any, **__: Any) -> dist.Work:
        """Copy the root's own part; on other ranks nothing arrives."""
        for output, parts in zip(outputs, inputs, strict=False):
            output.copy_(parts[self._rank])
        return CompletedWork(outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, *_: Any, **__: Any) -> dist.Work:
        """Copy what this rank sends to itself; nothing else arrives."""
        outputs[self._rank].copy_(inputs[self._rank])
        return CompletedWork(outputs)

    def all_to_all_single(
        self, output: torch.Tensor, own: torch.Tensor, out_splits: list[int], in_splits: list[int], *_: Any, **__: Any
    ) -> dist.Work:
        """Copy what this rank sends to itself; nothing else arrives."""
        arriving = torch.split(output, out_splits or output.shape[0] // self._size)
        leaving = torch.split(own, in_splits or own.shape[0] // self._size)
        arriving[self._rank].copy_(leaving[self._rank])
        return CompletedWork([output])

    # Of a batch of sends and receives nothing arrives.

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a batch."""

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """Return a complete batch."""
        return CompletedWork([])

    def batch_isend_irecv(self, kinds: list[str], tensors: Tensors, ranks: list[int]) -> dist.Work:
        """Return a complete batch: torch-npu's older way asks a group's backend for it."""
        return CompletedWork(tensors)

    # The names of torch before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
