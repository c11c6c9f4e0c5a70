"""Compares what two runs of `examples/train_and_record.py` wrote: the same bits, or what differs."""

import json
from pathlib import Path

import msgspec


class Comparison(msgspec.Struct, frozen=True):
    """`differences` is empty when both runs are equal bit for bit. `losses` is the mean loss by step."""

    equal: dict[str, bool]
    differences: tuple[str, ...]
    losses: tuple[float, ...]

    @property
    def bit_exact(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


def compare(undisturbed: Path, disturbed: Path, ranks: int, steps: int) -> Comparison:
    """Compare two record directories, rank by rank."""
    differences: list[str] = []
    equal = {"loss curve": True}
    losses = [0.0] * steps
    for rank in range(ranks):
        for name, same in _digests(undisturbed, disturbed, rank, differences).items():
            equal[name] = equal.get(name, True) and same
        one, other = (_losses(directory / f"loss.{rank}", differences) for directory in (undisturbed, disturbed))
        for step in range(steps):
            if one.get(step) != other.get(step) or step not in one:
                equal["loss curve"] = False
                differences.append(f"rank {rank}: the loss of step {step} is {other.get(step)}, not {one.get(step)}")
            losses[step] += float.fromhex(one.get(step, "nan")) / ranks
    return Comparison(equal, tuple(differences), tuple(losses))


def _digests(undisturbed: Path, disturbed: Path, rank: int, differences: list[str]) -> dict[str, bool]:
    try:
        one, other = (
            json.loads((directory / f"digest.{rank}.json").read_text()) for directory in (undisturbed, disturbed)
        )
    except OSError as error:
        differences.append(f"rank {rank}: no digest: {error}")
        return {"digests": False}
    same = {name: one[name] == other.get(name) for name in one}
    differences += [f"rank {rank}: {name} differ" for name, is_same in same.items() if not is_same]
    return same


def _losses(path: Path, differences: list[str]) -> dict[int, str]:
    """Return the loss of each step, as hex; a step that was repeated must have given the same bits each time."""
    losses: dict[int, str] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        step, value = line.split()
        if losses.setdefault(int(step), value) != value:
            differences.append(f"{path.name}: step {step} gave {value} when repeated, and {losses[int(step)]} before")
    return losses
