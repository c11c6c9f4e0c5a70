"""The registry of a script's mutable state, and which part of it is replicated or rank-local.

A recovery can only bring back what it knows of. The registry holds the script's objects by name, in two parts:
the replicated part (parameters, optimizer state, schedulers, scaler, values that are the same everywhere), which every
rank holds and which a lost rank copies from another one; and a rank's own part (random numbers, data position, buffers
that change, other values), which is captured at every commit because no other rank has it.
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ..protocol.errors import ConfigurationError, RecoveryError
from . import tree
from .buffers import BufferWatch
from .local_state import RandomState
from .values import Value


def by_name(kind: str, given: Any) -> dict[str, Any]:
    """Name what was given as one object, as a list or as a dict; None gives nothing."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {f"{kind}[{key}]": item for key, item in given.items()}
    if isinstance(given, list | tuple):
        return {f"{kind}[{index}]": item for index, item in enumerate(given)}
    return {kind: given}


class Registry:
    """The registered objects of a script, by name. `modules` are without wrappers such as DDP."""

    def __init__(
        self,
        *,
        modules: dict[str, torch.nn.Module],
        optimizers: dict[str, torch.optim.Optimizer],
        schedulers: dict[str, Any],
        scalers: dict[str, Any],
        data: dict[str, Any],
        values: dict[str, Value],
    ) -> None:
        self.modules = modules
        self.optimizers = optimizers
        self.schedulers = schedulers
        self.scalers = scalers
        self.data = data
        self.values = values
        for kind in (schedulers, scalers, data):
            for name, target in kind.items():
                _require_state_dict(name, target)
        self.buffers = BufferWatch(modules)
        self._random = RandomState()

    def capture_local(self) -> dict[str, Any]:
        """Return this rank's own part, still tied to live objects: encode it at once. Runs at each commit."""
        return {
            "random": self._random.capture(),
            "data": {name: target.state_dict() for name, target in self.data.items()},
            "buffers": self.buffers.capture(),
            "values": {name: value.get() for name, value in self.values.items() if not value.replicated},
        }

    def restore_local(self, own: dict[str, Any]) -> None:
        """Put back what `capture_local` gave. Runs in rollback. Raises RecoveryError when something is missing."""
        _same_names("data", own["data"], self.data)
        mine = {name: value for name, value in self.values.items() if not value.replicated}
        _same_names("values", own["values"], mine)
        for name, state in own["data"].items():
            self.data[name].load_state_dict(state)
        for name, state in own["values"].items():
            mine[name].set(state)
        self.buffers.restore(own["buffers"])
        self._random.restore(own["random"])  # last: putting the others back may have drawn numbers

    def capture_conditions(self) -> dict[str, Any]:
        """Return what a computation draws from beside its inputs, still tied to live objects: encode it at once."""
        return {part: held for part, held in self.capture_local().items() if part != "data"}

    def take_conditions(self, conditions: dict[str, Any]) -> None:
        """Put back what `capture_conditions` gave on another rank."""
        mine = {name: value for name, value in self.values.items() if not value.replicated}
        _same_names("values", conditions["values"], mine)
        for name, state in conditions["values"].items():
            mine[name].set(state)
        self.buffers.restore(conditions["buffers"])
        self._random.restore(conditions["random"])

    def restore_random(self, numbers: Any) -> None:
        """Put back the random numbers of `capture_local` alone."""
        self._random.restore(numbers)

    def small_replicated(self) -> dict[str, Any]:
        """Return the replicated part that is neither parameters nor optimizer state. In repair, at a source."""
        return {
            "schedulers": {name: target.state_dict() for name, target in self.schedulers.items()},
            "scalers": {name: target.state_dict() for name, target in self.scalers.items()},
            "values": {name: value.get() for name, value in self.values.items() if value.replicated},
        }

    def adopt_small_replicated(self, state: dict[str, Any]) -> None:
        """Put back what `small_replicated` gave on another rank. In repair, at a destination."""
        shared = {name: value for name, value in self.values.items() if value.replicated}
        _same_names("scheduler", state["schedulers"], self.schedulers)
        _same_names("scaler", state["scalers"], self.scalers)
        _same_names("values", state["values"], shared)
        for name, held in state["schedulers"].items():
            self.schedulers[name].load_state_dict(held)
        for name, held in state["scalers"].items():
            self.scalers[name].load_state_dict(held)
        for name, held in state["values"].items():
            shared[name].set(held)

    def check(self, *, optimizers: bool = True) -> None:
        """Try to encode everything once; raises UnsupportedState with the path of what cannot be. Runs at start."""
        also = self.optimizers if optimizers else {}
        for name, target in {**self.data, **self.schedulers, **self.scalers, **also}.items():
            tree.flatten(target.state_dict(), name)
        for name, value in self.values.items():
            tree.flatten(value.get(), name)

    def audit(self) -> tuple[str, ...]:
        """Return what is mutable and not registered, one sentence each. Runs at start."""
        return (*self._loose_parameters(), *self._module_findings(), *self._scheduler_findings())

    def _loose_parameters(self) -> Iterator[str]:
        known = {id(parameter) for module in self.modules.values() for parameter in module.parameters()}
        for name, optimizer in self.optimizers.items():
            for index, group in enumerate(optimizer.param_groups):
                loose = sum(id(parameter) not in known for parameter in group["params"])
                if loose:
                    yield (
                        f"{name}.param_groups[{index}] holds {loose} parameter(s) of no registered module: a lost rank "
                        "would not get them back. Register their module"
                    )
                if "initial_lr" in group and not self.schedulers:
                    yield (
                        f"{name}.param_groups[{index}] looks driven by a learning rate scheduler, but none is "
                        "registered"
                    )

    def _module_findings(self) -> Iterator[str]:
        known = {id(value.get.__self__) for value in self.values.values() if hasattr(value.get, "__self__")}
        for name, root in self.modules.items():
            for path, module in root.named_modules():
                place = f"{name}.{path}" if path else name
                if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
                    yield f"{place} has extra state (get_extra_state), which is not captured. Register it as a value"
                for attribute, held in vars(module).items():
                    generator = isinstance(held, torch.Generator | np.random.Generator | random.Random)
                    if generator and id(held) not in known:
                        yield f"{place}.{attribute} is a random number generator of its own. Register it as a value"

    def _scheduler_findings(self) -> Iterator[str]:
        optimizers = {id(optimizer) for optimizer in self.optimizers.values()}
        for name, scheduler in self.schedulers.items():
            if id(getattr(scheduler, "optimizer", None)) not in optimizers and hasattr(scheduler, "optimizer"):
                yield f"{name} drives an optimizer that is not registered"
            if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR | torch.optim.lr_scheduler.MultiplicativeLR):
                yield f"{name} computes with functions, which are not captured: they must not keep state of their own"


def _require_state_dict(name: str, target: Any) -> None:
    if not (hasattr(target, "state_dict") and hasattr(target, "load_state_dict")):
        raise ConfigurationError(
            f"{name} is a {type(target).__name__} without state_dict and load_state_dict, so it cannot be brought "
            "back. For a DataLoader use midstep.processor.data.ResumableBatches(loader)"
        )


def _same_names(kind: str, arrived: Mapping[str, Any], registered: Mapping[str, Any]) -> None:
    if arrived.keys() != registered.keys():
        raise RecoveryError(
            f"{kind}: the state that arrived names {sorted(arrived)}, this rank has registered {sorted(registered)}; "
            "do all ranks run the same script?"
        )
