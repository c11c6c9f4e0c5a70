"""The program with which a controller has its job's story read: `python -m midstep.cli.story`, an order on its input.

A process of its own, of low priority, so that a recovery gets the processor first.
"""

import enum
import logging
import os
import re
import resource
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from ..controller.endpoints.control_requests import Refused, Reply
from ..controller.endpoints.story import StoryOrder, excerpt, story_of
from ..controller.recovery.events import Action, ControlAnswered, ControlRequested, Finish, Forget, Log, Send
from ..controller.story import StoryEntry
from ..protocol.errors import MidstepError
from ..protocol.own_programs import own_program
from ..protocol.types import rank_address
from .display.plain import log_to_stderr
from .views.wording import clock_text, telling_line

STORY_PROGRAM = own_program("midstep.cli.story")
NICENESS = 10
CPU_S = 60  # also when nobody is left who would end it
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
    "rung",
    "for_s",
    "controller",
    "by",
    "role",
    "why",
)
NESTED = ("process", "report", "fault", "control", "asked")  # whose fields count as if they were the event's own
RANKS = rank_address(0).removesuffix("0")  # the addresses of processors: which rank is meant is said by them
INDENT = " " * 8
_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")


def main() -> None:
    """Print the answer to the order on standard input, or why there is none."""
    os.nice(NICENESS)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S if hard == resource.RLIM_INFINITY else min(CPU_S, hard), hard))
    log_to_stderr(logging.WARNING, "%(asctime)s story %(levelname)s %(message)s")
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=StoryOrder)
    try:
        reply: Reply = excerpt(story_of(order), order.incident, told)
    except MidstepError as error:
        reply = Refused(str(error))
    sys.stdout.buffer.write(msgspec.msgpack.encode(reply))


def told(entry: StoryEntry) -> str:
    """Return an event and what followed from it in words."""
    return "\n".join(story_lines(entry))


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
            case ControlAnswered(text, refused):
                yield f"the operator is {'refused' if refused else 'answered'}: {telling_line(text)}"
            case Finish(exit_code, reason):
                yield f"the job is over with exit code {exit_code}: {telling_line(reason)}"
            case Forget():  # only what was to be sent before
                pass
    yield from (f"-> {', '.join(names)}: {what}" for what, names in receivers.items())


def _described(message: Any, without: tuple[str, ...] = ()) -> str:
    """Return a message's name as words, and its telling fields."""
    about = message.control if isinstance(message, ControlRequested) else message
    name = _WORD.sub(" ", type(about).__name__).lower()
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


if __name__ == "__main__":
    main()
