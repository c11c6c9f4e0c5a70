"""Write a policy as YAML with a comment behind each key that says where it comes from."""

from collections.abc import Iterable, Mapping

import msgspec

from ...protocol.plain_yaml import write_yaml
from ...protocol.types import Rung
from ...protocol.wording import one_line
from ..schema import Policy, RungPolicy

_LONGEST = 200  # of a comment, or a value in it


def render_commented(policy: Policy, origins: Mapping[str, str], head: Iterable[str], tail: Iterable[str]) -> str:
    """Return `policy` as a file whose keys are those of `origins`, each with its origin as a comment.

    Keys are paths: `ladder.recover`, `ladder.recover.budget`, `deadlines.nodes_s`, `sub_health`. The whole ladder is
    always written. `head` and `tail` become comment lines. `parse_policy` makes the same policy of the text, if every
    key of `policy` that is not its default is among `origins`.
    """
    lines = [*(comment(line) for line in head), "", "ladder:"]
    for rung in policy.ladder:
        lines += _rung_lines(rung, origins)
    for key in origins:
        if "." not in key:
            lines += ["", f"{key}: {_flow(msgspec.to_builtins(getattr(policy, key)))}{_behind(origins, key)}"]
    for section in policy.__struct_fields__:
        keys = [key.partition(".")[2] for key in origins if key.startswith(f"{section}.") and section != "ladder"]
        lines += ["", f"{section}:"] if keys else []
        for key in keys:
            value = msgspec.to_builtins(getattr(getattr(policy, section), key))
            lines.append(f"  {key}: {_flow(value)}{_behind(origins, f'{section}.{key}')}")
    ending = [comment(line) for line in tail]
    return "\n".join([*lines, *([""] if ending else []), *ending]) + "\n"


def comment(text: str) -> str:
    """Return `text` as one comment line: whatever it holds, nothing of it becomes YAML."""
    return f"# {one_line(text)}".rstrip()


def _rung_lines(rung: RungPolicy, origins: Mapping[str, str]) -> list[str]:
    lines = [f"  - rung: {rung.rung.value}{_behind(origins, f'ladder.{rung.rung}')}"]
    if rung.rung is not Rung.STOP:
        lines.append(f"    attempts: {rung.attempts}")
        limits = msgspec.to_builtins(rung.budget)
        budget = _flow({key: value for key, value in limits.items() if value is not None or key == "per_job"})
        lines.append(f"    budget: {budget}{_behind(origins, f'ladder.{rung.rung}.budget')}")
    return lines


def _behind(origins: Mapping[str, str], key: str) -> str:
    return f" # {one_line(origins[key], _LONGEST)}" if key in origins else ""


def _flow(value: object) -> str:
    """Return a value as YAML on one line."""
    plain = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(plain, dict):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in plain.items()) + "}"
    return write_yaml(plain, on_one_line=True).splitlines()[0]
