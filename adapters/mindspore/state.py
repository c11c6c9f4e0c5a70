"""The train state of a MindSpore script, and how a recovery captures, transfers and restores it.

For data parallel training on a CPU, in PyNative mode, with `mindspore.jit` and in graph mode: every rank holds all
parameters, moments and counts, so a lost rank copies them from any other.

Random numbers come back as far as MindSpore allows. On a CPU no operator follows `mindspore.set_rng_state`. What
repeats are functional operators of PyNative mode after `mindspore.set_seed`. So each step gets a seed of its own, and a
repeated step draws what it drew. A cell that lives from step to step and draws (`nn.Dropout`) continues its own count,
as does every operator of a compiled graph: no call of MindSpore restores that, and the audit names it.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import mindspore as ms
import numpy as np
from mindspore import ops

from ...processor import tree
from ...processor.local_state import RandomState
from ...processor.runtime import Runtime
from ...processor.shard import Shard
from ...processor.values import as_value
from ...processor.whole_state import SHARD_ID, WholeState
from ...protocol.errors import RecoveryError
from ...protocol.types import InjectionPoint
from .gradients import as_array, as_tensor, get_rank, host_collectives

if TYPE_CHECKING:
    from ...processor.ledger import Step

_SEED_ATTRIBUTES = ("Seed0", "seed0", "seed")
_LARGEST = 2**31 - 1
_MIX = 1_000_003  # two ranks, or two steps, do not get one seed by chance


class MindSporeState(WholeState):
    """Everything that training changes, so that a recovery can bring it back.

    Args:
        network: The cell whose parameters are trained.
        optimizer: Its optimizer: moments, `global_step` and a dynamic learning rate come with it.
        data: Objects with state_dict and load_state_dict that say where in the data this rank is. A loop that takes its
            batches by `step.index` needs none.
        values: Anything else that changes, by name: dicts, lists, arrays, generators, objects with state_dict, or
            `midstep.Value(get, set)`. They are rank-local unless marked `midstep.replicated(...)`.

    Raises:
        ConfigurationError: An object cannot be put back in place, or the job's communicator has no collectives for
            MindSpore.
    """

    def __init__(self, network: Any, optimizer: Any = None, *, data: Any = None, values: dict[str, Any] | None = None):
        self._network = network
        owners = {"network": network} | ({} if optimizer is None else {"optimizer": optimizer})
        self._parameters = Parameters(owners)
        changing = {name: as_value(name, target) for name, target in (values or {}).items()}
        super().__init__(changing)
        self._values = ({} if data is None else {"data": as_value("data", data)}) | changing
        self._fire: Callable[[], None] | None = None
        self._random = RandomState()
        runtime = Runtime.current()
        if runtime is not None:
            host_collectives(runtime)
        self._drawn = RandomNumbers(self._rank)
        network.register_forward_pre_hook(self._reached_forward)

    # --- for the script -------------------------------------------------------------------------------------------

    def steps(self, total: int) -> "Iterator[Step]":
        """Go through the steps that are left of `total`, each with random numbers of its own.

        Args:
            total: The number of steps of the whole training, those before a recovery or restart included.

        Returns:
            An iterator of `midstep.processor.ledger.Step`.

        Raises:
            NotUnderMidstep: The call was made outside of a resilient train function.
        """
        for step in super().steps(total):
            self._drawn.begin(step.index)
            if ms.get_context("mode") == ms.GRAPH_MODE:
                self._reached_forward()  # the compiled forward pass knows no hook
            yield step

    def audit(self) -> tuple[str, ...]:
        """Return what cannot be brought back. Runs at start, and warns in the rank's log.

        Returns:
            One sentence for each cell that draws random numbers which no call of MindSpore puts back.
        """
        drawing = tuple(
            f"{path or 'the network'} is a {type(cell).__name__}, which draws from a count of its own that cannot be "
            "restored on a CPU: a repeated step draws other numbers. Use a function (ops.dropout, in PyNative mode) or "
            "pass a mask that numpy has drawn"
            for path, cell in drawing_cells(self._network)
        )
        return (*drawing, *super().audit())

    @property
    def _rank(self) -> int:
        """The rank of this process; 0 outside `midstep run`."""
        return get_rank()

    # --- for the recovery: the Framework protocol -----------------------------------------------------------------

    def capture_local(self) -> bytes:
        """Capture the rank-local state: random numbers, data position, values."""
        self._trailing.captured()
        return tree.pack(
            {
                "random": self._random.capture(),
                "mindspore": self._drawn.capture(),
                "values": {name: value.get() for name, value in self._values.items() if not value.replicated},
            },
            "state",
        )

    def clean(self) -> None:
        """Do nothing: gradients are values in MindSpore, which end with the interrupted step."""

    def rebuilt(self) -> None:
        """Do nothing: nothing here follows from the communicators."""

    def _open(self) -> Shard:
        """Open the replicated shard."""
        content = {
            "parameters": self._parameters.arrays(),
            "values": {name: value.get() for name, value in self._values.items() if value.replicated},
        }
        return Shard(*tree.flatten(content, SHARD_ID))

    def _accept(self, header: bytes) -> Shard:
        """Return memory that receives the replicated shard."""
        return Shard(header, [tree.empty(slot) for slot in tree.slots(header)])

    def _adopt(self, shard: Shard) -> None:
        """Make a received replicated shard the state of this rank."""
        content = tree.unflatten(shard.header, shard.tensors)
        self._parameters.restore(content["parameters"])
        for name, held in content["values"].items():
            self._values[name].set(held)

    def _replicated_marks(self) -> dict[str, Any]:
        """Return the replicated values, packed. Parameters have no counter that tells of a change."""
        shared = {name: each for name, each in self._values.items() if each.replicated}
        return {f"values[{name!r}]": tree.pack(each.get(), name) for name, each in shared.items()}

    def restore_local(self, blob: bytes) -> None:
        """Restore the rank-local state that `capture_local` returned, here or in this rank's earlier process."""
        captured = tree.unpack(blob)
        mine = {name for name, value in self._values.items() if not value.replicated}
        if captured["values"].keys() != mine:
            raise RecoveryError(
                f"the captured state has the values {sorted(captured['values'])}, this rank has {sorted(mine)}; do all "
                "ranks run the same script?"
            )
        for name, held in captured["values"].items():
            self._values[name].set(held)
        self._drawn.restore(captured["mindspore"])
        self._random.restore(captured["random"])  # last: putting the others back may have drawn numbers

    def rolled_back(self, step: int) -> None:
        """Do nothing: every step makes what is beside the state again."""

    def fire_in(self, point: InjectionPoint, fire: Callable[[], None]) -> None:
        """Call `fire` once at the next forward pass; for the backward pass, which is one call with it, there too."""
        if point in {InjectionPoint.FORWARD, InjectionPoint.BACKWARD}:
            self._fire = fire

    def _reached_forward(self, *arguments: Any) -> None:
        fire, self._fire = self._fire, None
        if fire is not None:
            fire()


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
