"""The training of every peer: GPT, batches, optimizer of `recovery_job.py`, and the faults that ranks have once each.

Nothing here knows any peer, and no peer gets another model, batch or fault.
"""

import hashlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from midstep.examples.gpt import GPT, TEN_MILLION, VOCABULARY

from .kinds import CHECKPOINT_EVERY_STEPS, Fault, Setting
from .marks import lose_own_node
from .notes import Writer, note_fault
from .schedule import Schedule

NEIGHBOUR_S = 0.2  # a rank that goes with the node has noted its last step by then


class Injected(RuntimeError):
    """The exception that happens to a rank."""


class Workload:
    """The workload in one process. Batches and faults go by `place`: the rank, or what a peer has instead."""

    def __init__(self, directory: Path, schedule: Schedule, setting: Setting) -> None:
        self.directory, self.setting = directory, setting
        self._faults = schedule.faults
        self._place = 0
        self._writer = Writer(directory)
        self.total_steps = schedule.steps

    def network(self) -> nn.Module:
        """Make the model: 10.5 million parameters, the same in all processes."""
        torch.manual_seed(1)
        return GPT(TEN_MILLION)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the optimizer. With it the state has 126 MB."""
        return torch.optim.Adam(model.parameters(), lr=3e-4)

    def batch(self, step: int, place: int) -> tuple[Tensor, Tensor]:
        """Return a rank's one sequence of a step."""
        self._place = place
        generator = torch.Generator().manual_seed(1000 * step + place)
        window = torch.randint(VOCABULARY, (1, TEN_MILLION.context + 1), generator=generator)
        return window[:, :-1], window[:, 1:]

    def fault_point(self, step: int, place: int) -> None:
        """Call between forward and backward: here a fault happens, to one rank, in one step, once."""
        for number, planned in enumerate(self._faults):
            if (planned.step, planned.place) == (step, place) and note_fault(self.directory, number):
                _happen(planned.fault)

    def stepped(self, step: int, world: int) -> None:
        """Note that a step is complete."""
        self._writer.stepped(step, world, self._place)

    def finished(self, parameters: Iterable[Tensor]) -> None:
        """Note the end and the parameters that it came to."""
        digest = hashlib.sha256()
        for parameter in parameters:
            digest.update(parameter.detach().numpy().tobytes())
        self._writer.finished(digest.hexdigest())


def _happen(fault: Fault) -> None:
    """Do to this process what the fault is."""
    if fault is Fault.EXCEPTION:
        raise Injected("injected by the benchmark")
    if fault is Fault.SLEEP:
        while True:
            time.sleep(0.1)
    if fault is Fault.NODE:
        time.sleep(NEIGHBOUR_S)
        lose_own_node()
    os.kill(os.getpid(), signal.SIGKILL if fault is Fault.KILL else signal.SIGSTOP)


class CheckpointFile:
    """The file that peers without a store of their own save to: every few steps, by rank 0, complete or not there."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "checkpoint.pt"

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Load what was saved last, if anything was; return the step to go on with."""
        if not self._path.exists():
            return 0
        saved = torch.load(self._path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return int(saved["step"])

    def save_when_due(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
        """Save after every tenth step, in rank 0."""
        if rank != 0 or (step + 1) % CHECKPOINT_EVERY_STEPS != 0:
            return
        draft = self._path.with_suffix(".new")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, draft)
        draft.rename(self._path)
