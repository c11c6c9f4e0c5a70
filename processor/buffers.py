"""Find out, soundly and cheaply, which module buffers change while training.

Running statistics, codebooks and histories change in a forward pass, so they belong to what is captured at each commit.
Masks and position tables do not, and would be dead weight there. The script does not say which is which, so the buffers
are watched:

- Buffers of layers that track running statistics count as changing from the start.
- Any other buffer counts as constant until its object, its version counter or its content differs from what it was at
  registration; from then on it is captured at every commit.
- Content is compared (by hash) when the version counter moved (DDP broadcasts buffers, which moves it without changing
  anything), for every buffer in the first commits, and for small ones always, as writes through `.data` leave the
  counter as it is. What is missed: a buffer above `SMALL_BYTES` that is written through `.data` for the first time
  after the first `FULL_CHECKS` commits. Register such a thing as a value.

The contents at registration are kept (the baseline): a buffer that turns out to change in the very step that is
interrupted is put back to them.
"""

import dataclasses
from collections.abc import Iterator, Mapping

import torch
import xxhash

from ..communicators.host_memory import memory_of
from ..protocol.errors import RecoveryError
from . import tree

SMALL_BYTES = 16384
FULL_CHECKS = 5


@dataclasses.dataclass
class _Watched:
    baseline: torch.Tensor
    digest: int
    identity: int
    version: int
    changes: bool


class BufferWatch:
    """Watches the buffers of some modules; names are `<module>.<path of the buffer>`."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._owners: list[tuple[str, torch.nn.Module]] = [
            (f"{name}.{path}" if path else name, module)
            for name, root in modules.items()
            for path, module in root.named_modules()
        ]
        self._watched: dict[str, _Watched] = {}
        self._captures = 0
        self._register()

    def capture(self) -> dict[str, torch.Tensor]:
        """Return the buffers that change, as they are now, uncopied. Runs at each commit."""
        thorough = self._captures < FULL_CHECKS
        self._captures += 1
        changing = {}
        for path, buffer in self._live():
            watched = self._watched.get(path) or self._first_seen(path, buffer)
            if not watched.changes:
                watched.changes = self._has_changed(watched, buffer, thorough)
            if watched.changes:
                changing[path] = buffer.detach()
        return changing

    def restore(self, captured: Mapping[str, torch.Tensor]) -> None:
        """Put back what `capture` gave; every other buffer goes back to its baseline. Runs in rollback."""
        for path, buffer in list(self._live()):
            watched = self._watched.get(path)
            if path not in captured and watched is not None and self._has_changed(watched, buffer, True):
                self._write(path, watched.baseline)
        for path, value in captured.items():
            self._write(path, value)
            if path in self._watched:
                self._watched[path].changes = True
        self._register()

    def baseline(self) -> dict[str, torch.Tensor]:
        """Return the contents at registration."""
        return {path: watched.baseline for path, watched in self._watched.items()}

    def adopt_baseline(self, baseline: Mapping[str, torch.Tensor]) -> None:
        """Take another rank's baseline as the own one, and write it into the buffers. Runs in repair."""
        for path, value in baseline.items():
            self._write(path, value)
            changes = path in self._watched and self._watched[path].changes
            self._watch(path, self._find(path), changes)

    def _register(self) -> None:
        for path, buffer in self._live():
            if path not in self._watched:
                self._first_seen(path, buffer)

    def _first_seen(self, path: str, buffer: torch.Tensor) -> _Watched:
        return self._watch(path, buffer, _tracks_statistics(self._owner(path)[0]))

    def _watch(self, path: str, buffer: torch.Tensor, changes: bool) -> _Watched:
        kept = buffer.detach().clone(memory_format=torch.contiguous_format)
        watched = self._watched[path] = _Watched(kept, _digest(kept), id(buffer), buffer._version, changes)
        return watched

    def _live(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path, owner in self._owners:
            if owner._buffers:  # most modules have none
                for name, buffer in owner._buffers.items():
                    if buffer is not None:
                        yield f"{path}.{name}", buffer

    @staticmethod
    def _has_changed(watched: _Watched, buffer: torch.Tensor, thorough: bool) -> bool:
        same_object = id(buffer) == watched.identity
        untouched = same_object and buffer._version == watched.version
        if untouched and not thorough and buffer.nbytes > SMALL_BYTES:
            return False
        if buffer.shape != watched.baseline.shape or buffer.dtype != watched.baseline.dtype:
            return True
        if _digest(buffer) != watched.digest:
            return True
        watched.identity, watched.version = id(buffer), buffer._version
        return False

    def _owner(self, path: str) -> tuple[torch.nn.Module, str]:
        place, _, name = path.rpartition(".")
        for owner_path, owner in self._owners:
            if owner_path == place:
                return owner, name
        raise RecoveryError(
            f"the buffer {path} came from another rank, but this rank's model has no module {place}; do all ranks run "
            "the same script?"
        )

    def _find(self, path: str) -> torch.Tensor:
        owner, name = self._owner(path)
        buffer = owner._buffers[name]
        assert buffer is not None  # it was written right before
        return buffer

    def _write(self, path: str, value: torch.Tensor) -> None:
        owner, name = self._owner(path)
        live = owner._buffers.get(name)
        if live is not None and live.shape == value.shape and live.dtype == value.dtype:
            live.data.copy_(value)
        elif live is not None or name in owner._buffers:
            owner._buffers[name] = value.clone().to(live.device if live is not None else value.device)
        else:
            owner.register_buffer(name, value.clone(), persistent=False)


def _tracks_statistics(owner: torch.nn.Module) -> bool:
    return bool(getattr(owner, "track_running_stats", False))


def _digest(buffer: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(memory_of(tree.tensor_bytes(buffer)))
