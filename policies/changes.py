"""Hold two policies against each other, key by key, and say which keys may change while a job runs. Pure.

Only what the controller decides by may: the other keys were given to processes when they started, or are known to
programs that do not ask the controller. A rung of a ladder is named by its rung, as `ladder.recover.attempts`.
"""

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from .schema import Policy

FREE = (
    "ladder",
    "incident.max_attempts",
    "node.failures",
    "node.window_s",
    "deadlines",
    "save_before_reschedule",
    "sub_health",
    "slow",
    "scale.min_interval_s",
    "faults.in_place_age_s",
    "node_check.within_s",
)
"""These keys, and those below them, may change."""
FIXED = ("deadlines.orders_s", "deadlines.save_s", "deadlines.stop_grace_s")
"""Those below them that may not: processes go by them."""
FOR_GOOD = "allow_inject"
"""The controller alone goes by it, but what an operator may lift is no limit for operators."""
ABSENT = "-"


class PolicyChange(msgspec.Struct, frozen=True):
    """One key whose value differs. `before`, `after`: as JSON; `-`: it is not there."""

    key: str
    before: str
    after: str

    @property
    def text(self) -> str:
        """Say it in one line."""
        return f"{self.key}: {self.before} -> {self.after}"


def changes(before: Policy, after: Policy) -> tuple[PolicyChange, ...]:
    """Return every key in which two policies differ."""
    one, other = dict(_leaves(msgspec.to_builtins(before))), dict(_leaves(msgspec.to_builtins(after)))
    keys = [*one, *(key for key in other if key not in one)]
    return tuple(
        PolicyChange(key, one.get(key, ABSENT), other.get(key, ABSENT))
        for key in keys
        if one.get(key) != other.get(key)
    )


def may_change(key: str) -> bool:
    """Tell whether a key may change while a job runs."""
    if key in FIXED:
        return False
    words = key.split(".")
    if words[0] == "roles":  # the ladder of a role, and not which ranks it has
        return len(words) > 3 and words[2] == "ladder"
    return any(key == free or key.startswith(f"{free}.") for free in FREE)


def obstacle(found: tuple[PolicyChange, ...]) -> str | None:
    """Say why these changes cannot be made while the job runs, by key; None: they can."""
    if not found:
        return "it is the policy that is in force: nothing differs"
    fixed = [change.key for change in found if not may_change(change.key)]
    if not fixed:
        return None
    they = "it" if len(fixed) == 1 else "them"
    because = f"since processes that run go by {they}"
    if fixed == [FOR_GOOD]:
        because = "since it holds from the start of a job to its end"
    return (
        f"{', '.join(fixed)} cannot change while the job runs, {because}: start the job again with the new policy, or "
        f"leave {they} as before"
    )


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each key with its value as JSON."""
    if isinstance(value, dict) and value:
        for name, each in value.items():
            yield from _leaves(each, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple) and value and all(isinstance(each, dict) and "rung" in each for each in value):
        for entry in value:
            yield from _leaves(
                {name: each for name, each in entry.items() if name != "rung"}, f"{path}.{entry['rung']}"
            )
    else:
        yield path, json.dumps(value)
