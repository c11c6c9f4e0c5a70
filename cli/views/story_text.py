"""The chain of causes in words: an event with its number, and below it what the machine did about it."""

import enum
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from ...controller.recovery.events import Action, Finish, Forget, Log, Send
from ...controller.story import StoryEntry
from ...protocol.types import rank_address
from .wording import clock_text, telling_line

# Fields that tell an operator what an event or a command is about; what else they hold is for machines.
FIELDS = (
    "kind",
    "rank",
    "node",
    "incarnation",
    "generation",
    "status",
    "level",
    "step",
    "committed",
    "after_step",
    "term",
    "reason",
    "detail",
    "error",
    "path",
    "exit_code",
)
NESTED = ("process", "report", "fault")  # whose fields count as if they were the event's own
RANKS = rank_address(0).removesuffix("0")  # the addresses of processors: which rank is meant is said by them
INDENT = " " * 8
_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")


def story_lines(turn: StoryEntry) -> Iterator[str]:
    """Yield the lines of one event: when and what it was, how the phase changed, and each action that it caused."""
    changed = f"   [{turn.before} -> {turn.after}]" if turn.before is not turn.after else ""
    yield f"#{turn.number:<6} {clock_text(turn.at_s)}  {_described(turn.event)}{changed}"
    if turn.ignored:
        yield f"{INDENT}nothing follows: {telling_line(turn.ignored)}"
    yield from (f"{INDENT}{line}" for line in _grouped(turn.actions))


def _grouped(actions: tuple[Action, ...]) -> Iterator[str]:
    """Yield a line for each action; commands that differ in nothing but their receiver share one."""
    receivers: dict[str, list[str]] = {}
    for action in actions:
        match action:
            case Send(receiver, body, _):
                told = ("rank",) if receiver.startswith(RANKS) else ()
                receivers.setdefault(_described(body, without=told), []).append(receiver)
            case Log(text):
                yield telling_line(text)
            case Finish(exit_code, reason):
                yield f"the job is over with exit code {exit_code}: {telling_line(reason)}"
            case Forget():  # only what was to be sent before
                pass
    yield from (f"-> {', '.join(names)}: {what}" for what, names in receivers.items())


def _described(message: Any, without: tuple[str, ...] = ()) -> str:
    """Return a message's name as words, and its telling fields."""
    name = _WORD.sub(" ", type(message).__name__).lower()
    said = [f"{field.replace('_', ' ')} {value}" for field, value in _fields(message) if field not in without]
    return telling_line(f"{name}: {', '.join(said)}" if said else name)


def _fields(message: Any) -> Iterator[tuple[str, str]]:
    parts = [message, *(getattr(message, name, None) for name in NESTED)]
    for field in FIELDS:
        values = (getattr(part, field, None) for part in parts if isinstance(part, msgspec.Struct))
        value = next((each for each in values if each is not None and each != ""), None)
        if isinstance(value, enum.Enum):
            value = value.value
        if isinstance(value, int | str):
            yield field, telling_line(str(value))
