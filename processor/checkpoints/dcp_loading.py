"""Loading a shard from a directory of torch.distributed.checkpoint (DCP): which stored tensors it is made of.

Names are those that midstep gives (`shard_layout.py`), or what a script of plain torch chose: `get_state_dict` below
any names, torchtitan's flat ones, or an optimizer's own `state_dict`, which numbers its parameters.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...communicators.host_memory import TORCH
from ...protocol.errors import RecoveryError
from .. import tree
from ..framework import Portable
from ..shard_layout import ENTRY, Extent, ShardLayout, public
from .dcp_files import StoredFiles, Wanted
from .files import Part

_NAMED = 3
_SCHEDULER = "lr_scheduler"  # as torchtitan calls it
_log = logging.getLogger("midstep")


def load_shard(place: Path, shard_id: str, framework: Portable, parts: Mapping[str, Part] | None) -> int:
    """Read the pieces of a shard and make them the state of this rank; returns their bytes. In repair.

    `parts`: what the files are to be, where midstep wrote them; None: torch did.
    Raises OSError, CheckpointError where a file is damaged, RecoveryError where it is not for this model.
    """
    files = StoredFiles(place, parts)
    layout = framework.layout(shard_id)
    opened = framework.open_shard(shard_id)
    wanting = _Wanting(files, layout)
    content = wanting.content(tree.unflatten(opened.header, opened.tensors), framework.buffers())
    header, given = tree.flatten(content, shard_id)
    shard = framework.accept_shard(shard_id, header)
    sources = wanting.sources(tree.outline(header))
    for index, (target, value) in enumerate(zip(shard.tensors, given, strict=True)):
        if index in sources:
            files.fill(target, sources[index])
        elif target.data_ptr() != value.data_ptr():
            target.copy_(value)
    try:
        framework.adopt_shard(shard_id, shard)
    except RecoveryError:
        raise
    except Exception as error:  # whatever a framework raises over a shard of another model
        raise RecoveryError(f"{place} is not for this model: {error}") from error
    return sum(tensor.nbytes for tensor in shard.tensors)


class _Wanting:
    """Says which stored tensors a shard is made of. The names are midstep's own, or those that a script chose."""

    def __init__(self, files: StoredFiles, layout: ShardLayout) -> None:
        self._place, self._files, self._layout = files.place, files, layout
        self._index = files.index
        self._beneath: dict[str, dict[str, str]] = defaultdict(dict)
        for key in (*self._index.tensors, *self._index.values):
            parent, _, last = key.rpartition(".")
            self._beneath[parent][last] = key
        self._pieces: list[tuple[tuple[Any, ...], Wanted]] = []  # path in the content, and what belongs there

    def content(self, live: dict[str, Any], buffers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return a shard's content with room for what is stored, and with the stored values."""
        prefixes = {name: self._prefix(name, paths) for name, paths in self._layout.parameters.items()}
        for module, named in live["parameters"].items():
            for path, tensor in named.items():
                key = prefixes[module] + public(path)
                self._want(("parameters", module, path), key, self._layout.parameters[module][path], tensor)
        own = self._own()
        if own is not None and own["groups"].keys() != live["optimizers"].keys():
            there, here = sorted(own["groups"]), sorted(live["optimizers"])
            raise RecoveryError(f"{self._place} has optimizers {there}, this script has {here}. Is it of the same one?")
        for name, state in live["optimizers"].items():
            if not state["plain"]:
                raise RecoveryError(f"{name} keeps state that DCP has no name for")
            self._take_optimizer(name, state, own, live["parameters"])
        if own is not None:
            return {**live, "small": own["small"], "baseline": own["baseline"]}
        for kind in ("schedulers", "scalers"):
            for name, state in live["small"][kind].items():
                self._take_values(name, state)
        return {**live, "baseline": self._buffers(prefixes, buffers)}

    def sources(self, outline: dict[str, Any]) -> dict[int, Wanted]:
        """Return what belongs into each tensor of a shard with this outline, by its index."""
        found = {}
        for path, wanted in self._pieces:
            slot: Any = outline
            for step in path:
                slot = slot[step]
            found[slot.index] = wanted
        return found

    def _own(self) -> Any:
        """Return what midstep has written beside named tensors; None where torch wrote the directory."""
        key = ".".join(ENTRY)
        if key not in self._index.tensors:
            return None
        return tree.unpack(self._files.whole(key).numpy().tobytes())

    def _want(self, path: tuple[Any, ...], key: str, extent: Extent, live: Any) -> None:
        stored = self._index.tensors.get(key)
        if stored is None:
            raise RecoveryError(f"{self._place} has no {key!r}, which this model needs. Is it of the same model?")
        if stored.shape != extent.shape or tree.dtype_of(stored.dtype) != live.dtype:
            raise RecoveryError(
                f"{self._place} has {key!r} as {stored.dtype} {list(stored.shape)}, but here it is {live.dtype} "
                f"{list(extent.shape)}. Is it of the same model?"
            )
        self._pieces.append((path, Wanted(key, extent.offsets)))

    def _prefix(self, module: str, paths: Mapping[str, Extent]) -> str:
        """Return what stands before the names of a module's parameters."""
        names, tensors = [public(path) for path in paths], self._index.tensors
        usual = f"{module}."
        if not names or f"{usual}{names[0]}" in tensors:
            return usual
        ending = [key.removesuffix(names[0]) for key in tensors if key.endswith(names[0])]
        fits = [each for each in ending if each[-1:] in {"", "."} and all(each + name in tensors for name in names)]
        if len(fits) > 1:
            text = ", ".join(repr(each) for each in sorted(fits)[:_NAMED])
            raise RecoveryError(f"{self._place} has the parameters of {module} more than once, below {text}")
        return fits[0] if fits else usual

    def _take_optimizer(self, name: str, state: dict[str, Any], own: Any, live: Mapping[str, Any]) -> None:
        """Put room for what an optimizer keeps for the parameters of this shard into its state, and its groups."""
        groups = self._layout.names(name)
        prefix = self._optimizer_prefix(name, [each for group in groups for each in group])
        state["groups"] = self._groups(prefix, state["groups"], groups) if own is None else own["groups"][name]
        if len(state["groups"]) != len(groups):
            raise RecoveryError(
                f"{self._place} has {len(state['groups'])} groups of {name}, and here are {len(groups)}"
            )
        state["state"], state["on_host"], sharded = {}, [], []
        members = [
            (group, public_name, place)
            for group, names, places in zip(state["groups"], groups, self._layout.optimizers[name], strict=True)
            for public_name, place in zip(names, places, strict=True)
        ]
        for position, (extent, (group, parameter, (module, path))) in enumerate(
            zip(self._layout.extents(name), members, strict=True)
        ):
            held = self._beneath.get(f"{prefix}state.{parameter}") or self._beneath.get(f"{prefix}state.{position}")
            if extent is None or not held:
                continue
            device_steps = group.get("fused") or group.get("capturable")
            for key, stored_as in held.items():
                cut = self._take_entry(
                    state["state"].setdefault(position, {}), key, stored_as, extent, live[module][path]
                )
                if cut and extent.sharded:
                    sharded.append((position, key))
                if key in own["on_host"][name] if own is not None else key == "step" and not device_steps:
                    state["on_host"].append((position, key))
                self._place_of(name, position, key, stored_as, extent if cut else None)
        if "sharded" in state:
            state["sharded"] = sharded
        if own is None and not state["state"] and any(each is not None for each in self._layout.extents(name)):
            _log.warning("%s has no state of %s: it begins anew", self._place, name)

    def _take_entry(self, entries: dict[str, Any], key: str, stored_as: str, extent: Extent, live: Any) -> bool:
        """Make room for one entry, or take its value; returns whether it is cut as its parameter."""
        stored = self._index.tensors.get(stored_as)
        if stored is None:
            entries[key] = self._files.value(stored_as)
            return False
        cut = key != "step" and stored.shape == extent.shape
        if extent.sharded and not cut and stored.shape:
            raise RecoveryError(
                f"{self._place} has {stored_as!r} as {list(stored.shape)}, and its parameter is {list(extent.shape)}: "
                "it cannot be cut as its parameter is"
            )
        entries[key] = TORCH.empty(live.shape if cut else stored.shape, dtype=tree.dtype_of(stored.dtype))
        return cut

    def _place_of(self, name: str, position: int, key: str, stored_as: str, extent: Extent | None) -> None:
        stored = self._index.tensors.get(stored_as)
        if stored is not None:
            offsets = (0,) * len(stored.shape) if extent is None else extent.offsets
            self._pieces.append((("optimizers", name, "state", position, key), Wanted(stored_as, offsets)))

    def _optimizer_prefix(self, name: str, names: Sequence[str]) -> str:
        """Return what stands before `state` and `param_groups` of an optimizer."""
        usual = f"{name}."
        if any(key.startswith((f"{usual}state.", f"{usual}param_groups.")) for key in self._beneath):
            return usual
        found = self._above([f"state.{each}" for each in names])
        found = found or self._above([f"state.{position}" for position in range(len(names))])
        if len(found) > 1:
            text = ", ".join(repr(each) for each in sorted(found)[:_NAMED])
            raise RecoveryError(f"{self._place} has the state of {name} more than once, below {text}")
        return found.pop() if found else usual

    def _above(self, endings: Sequence[str]) -> set[str]:
        """Return what stands before any of some endings in a name that has entries."""
        found = {parent[: -len(each)] for parent in self._beneath for each in endings if parent.endswith(each)}
        return {each for each in found if each[-1:] in {"", "."}}

    def _groups(self, prefix: str, live: Sequence[Any], groups: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """Return the groups of an optimizer with what is stored of them: by number, or by parameter."""
        taken = []
        for number, (group, members) in enumerate(zip(live, groups, strict=True)):
            held = self._beneath.get(f"{prefix}param_groups.{number}", {})
            if not held and members:
                held = self._beneath.get(f"{prefix}param_groups.{members[0]}", {})
            elif held and "params" in held:
                there = self._read(held["params"])
                if isinstance(there, list) and all(isinstance(each, str) for each in there) and there != list(members):
                    raise RecoveryError(f"{self._place} has other parameters in group {number} below {prefix!r}")
            taken.append({key: self._read(held[key]) if key in held else value for key, value in group.items()})
        return taken

    def _take_values(self, name: str, state: dict[str, Any]) -> None:
        """Put what is stored of a scheduler or a scaler into its state."""
        held = self._beneath.get(name) or self._beneath.get(_SCHEDULER, {})
        if not held:
            _log.warning("%s has no state of %s: it begins anew", self._place, name)
        state.update({key: self._read(held[key]) for key in state if key in held})

    def _buffers(self, prefixes: Mapping[str, str], buffers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the stored buffers of modules."""
        found = {}
        for module, named in buffers.items():
            for path in named:
                key = prefixes.get(module, f"{module}.") + public(path)
                if key not in self._index.tensors:
                    raise RecoveryError(f"{self._place} has no {key!r}, a buffer of this model. Is it of the same one?")
                found[f"{module}.{path}"] = self._files.whole(key)
        return found

    def _read(self, key: str) -> Any:
        return self._files.whole(key) if key in self._index.tensors else self._files.value(key)
